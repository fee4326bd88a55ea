"""Notices changes of parameters by the script outside of `step()` and `tw.edit`.

The parameters are checked before every step and every other change, and before a checkpoint is
written: values by version counter, address and form, the place in the model by identity, and which
of them are frozen.
"""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from tensorwire.memory import same_bytes
from tensorwire.parameters import Store

from ..views import flat_bytes, in_form
from .device_parameters import DeviceParameters


class MutationGuard:
    """A guard of the parameters of one optimizer.

    Args:
        model: has the parameters.
        names: of every parameter by its id.
        planned: the optimizer's parameters, which are frozen or not for good.
        held: the parameters whose memory is the store's, by index; may lose some later.
        store: has them.
        on_device: the held parameters that are on a device; None: all are on the host.
    """

    def __init__(
        self,
        model: nn.Module,
        names: Mapping[int, str],
        planned: Sequence[nn.Parameter],
        held: Mapping[int, nn.Parameter],
        store: Store,
        on_device: DeviceParameters | None = None,
    ) -> None:
        self._model = model
        self._names = names
        self._planned = [(parameter, parameter.requires_grad) for parameter in planned]
        self._held = held
        self._forms = {i: _form_of(p) for i, p in held.items()}
        self._store = store
        self._on_device = on_device
        self._owners = self._find_owners()
        self._seen: dict[int, tuple[Any, ...]] = {}
        self._steps: Counter[int] = Counter()  # that have changed a parameter since
        # Those after the step that autograd is being told of, which an interrupt may keep apart.
        self._next: tuple[Sequence[int], Counter[int]] | None = None
        if store.compares:
            warnings.warn(
                "the kernel does not tell which memory this process has written "
                "(/proc/self/pagemap): parameters that a script changes by way of .data, outside "
                "of tw.edit, are found by comparing, within 32 steps instead of at once",
                RuntimeWarning,
                stacklevel=2,
            )

    def remember(self) -> None:
        """Remembers the present state of all parameters as the right one."""
        self._next, self._steps = None, Counter()
        self._seen = {i: _look_at(p) for i, p in self._held.items()}

    def expect(self, changed: Sequence[int]) -> None:
        """Expects that autograd is told, in one call, of a step's changes of some parameters."""
        steps = self._steps.copy()
        steps.update(changed)
        self._next = changed, steps

    def settle(self) -> None:
        """Ends the expectation: autograd was told, or not if that was interrupted."""
        if self._next is None:
            return
        changed, steps = self._next
        first = changed[0] if changed else None
        if first is not None and _look_at(self._held[first], steps[first]) == self._seen[first]:
            self._steps = steps
        self._next = None

    def check(self, wait: bool = True) -> None:
        """Raises RuntimeError, with advice, if something was changed since.

        Without `wait`, parameters on a device are compared meanwhile, and `finish` tells.
        """
        if self._on_device is not None:
            self._on_device.begin_check()
        for parameters, name, parameter in self._owners:
            if parameters.get(name) is not parameter:
                self._check_owners()
                break
        self._check_values()
        if (changed := self.frozen_or_not()) is not None:
            what = "unfrozen" if changed.requires_grad else "frozen"
            raise RuntimeError(
                f"parameter {self._name(changed)} was {what} after DistributedOptimizer was made; "
                "change requires_grad inside 'with tw.edit(model):', on all workers"
            )
        if wait:
            self.finish()

    def finish(self) -> None:
        """Raises RuntimeError as `check`, once values on a device are compared."""
        if self._on_device is not None and (found := self._on_device.finish_check()):
            raise self._changed(found[0])

    def _check_values(self) -> None:
        """Raises if values were written in place, and undoes that, so that the caller may go on."""
        self.settle()
        steps = self._steps
        changed = [i for i, p in self._held.items() if _look_at(p, steps[i]) != self._seen[i]]
        written = [i for i in self._store.take_back(bool(changed)) if i in self._held]
        if not changed and not written:
            return
        first = (changed or written)[0]
        moved = first in changed and self._was_moved(first)
        for i in changed:
            parameter, (_, address, size, stride, *_) = self._held[i], self._seen[i]
            if parameter.data_ptr() == address:
                if self._on_device is not None and i in self._on_device:
                    self._on_device.adopt(range(i, i + 1))
                    parameter.data = self._on_device.tensor(i)
                else:
                    value = self._store.value(i)
                    parameter.data = in_form(value, parameter.dtype, size, stride)
                self._seen[i] = _look_at(parameter, steps[i])
        if self._on_device is not None:
            self._on_device.forget_check()
        raise self._changed(first, moved)

    def _was_moved(self, index: int) -> bool:
        """Tells whether a parameter has other memory with the same values: it was not edited."""
        parameter = self._held[index]
        if parameter.data_ptr() == self._seen[index][1] or parameter.device.type != "cpu":
            return False
        return same_bytes(flat_bytes(parameter.detach()), self._store.value(index))

    def _changed(self, index: int, moved: bool = False) -> RuntimeError:
        now, before = _form_of(self._held[index]), self._forms[index]
        if now != before or moved:
            how = "has other memory" if moved else f"was {_said(before)}, and is {_said(now)}"
            return RuntimeError(
                f"parameter {self._name(self._held[index])} {how} since the model was moved or "
                f"converted; call model.to() before DistributedOptimizer{of_libraries()}"
            )
        if not self._held[index].requires_grad:
            return RuntimeError(
                f"parameter {self._name(self._held[index])}, which is frozen, was changed outside "
                "step(). If it is a target that follows the trained parameters (BYOL, a mean "
                "teacher), keep it outside of the model that DistributedOptimizer is given: made "
                "after it by copy.deepcopy, and updated by every worker in the same way, it is "
                "the same everywhere. Otherwise change it inside 'with tw.edit(model):', on all "
                f"workers{of_libraries()}"
            )
        return RuntimeError(
            f"parameter {self._name(self._held[index])} was changed outside "
            "step(), in place or by way of .data; other workers would not see it. Change "
            "parameters inside 'with tw.edit(model):', on all workers. To evaluate with other "
            "values (an average of weights), put them in and back inside one such block, or load "
            "them into copy.deepcopy(model). An nn.Embedding with max_norm= changes its rows in "
            f"forward, and cannot be distributed{of_libraries()}"
        )

    def frozen_or_not(self) -> nn.Parameter | None:
        """Returns the optimizer's first parameter whose requires_grad differs from the plan."""
        return next((p for p, planned in self._planned if p.requires_grad != planned), None)

    def _name(self, parameter: torch.Tensor) -> str:
        return repr(self._names[id(parameter)])

    def _find_owners(self) -> list[tuple[dict[str, Any], str, nn.Parameter]]:
        return [
            (module._parameters, name, parameter)
            for module in self._model.modules()
            for name, parameter in module._parameters.items()
            if id(parameter) in self._names
        ]

    def _check_owners(self) -> None:
        """Checks that parameters are in the model, perhaps under another name or module."""
        self._owners = self._find_owners()
        there = {id(parameter) for _, _, parameter in self._owners}
        for parameter in self._held.values():
            if id(parameter) not in there:
                raise RuntimeError(
                    f"parameter {self._name(parameter)} was replaced in the model by another "
                    "tensor, which the optimizer does not know (load_state_dict(assign=True), for "
                    "example). Load without assign, or make a new optimizer"
                )


def _form_of(parameter: torch.Tensor) -> tuple[torch.dtype, torch.device]:
    return parameter.dtype, parameter.device


def _said(form: tuple[torch.dtype, torch.device]) -> str:
    dtype, device = form
    return f"{dtype} on {device}"


def of_libraries() -> str:
    """Returns advice if an imported library has perhaps prepared the model; else ""."""
    found = [each for each in ("accelerate", "transformers", "lightning") if each in sys.modules]
    if not found:
        return ""
    ours = " or ".join(f"tensorwire.torch.integrations.{each}" for each in found)
    return (
        f". If {' or '.join(found)} prepared the model: use {ours} in its place, and give it the "
        "plain optimizer, which it makes distributed"
    )


def _look_at(parameter: torch.Tensor, steps: int = 0) -> tuple[Any, ...]:
    """Returns a key that differs after a change in place, or of `.data`'s memory or form."""
    negated = parameter.is_neg(), parameter.is_conj()
    version = parameter._version - steps
    return version, parameter.data_ptr(), parameter.shape, parameter.stride(), *negated
