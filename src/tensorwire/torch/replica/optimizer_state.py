"""Converts an optimizer's state between torch's form and a store's arrays."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NoReturn

import numpy as np
import torch

from tensorwire.parameters import AVERAGE, Bytes, PresentVersion, Snapshot, Store

from ..kernels import OwnStepKernel, TorchKernel, scalar_of
from ..session import Session
from ..views import tensor_at
from .arithmetic import Arithmetic
from .ownership import Pipelined, Replicated

Entry = dict[str, Any]


class StateAtServers(defaultdict[Any, Entry]):
    """A stand-in for an optimizer's `state` that the servers keep: to use it is an error.

    Its length and its `items()`, at which libraries look, say that there is nothing here.
    """

    def refuse(self, *args: Any, **options: Any) -> NoReturn:
        """Raises RuntimeError, with advice."""
        raise RuntimeError(
            "the servers keep the state of a distributed optimizer, and opt.state has nothing: "
            "opt.state_dict() reads it; edit that, and opt.load_state_dict() it, on all workers"
        )


for _name in (
    "__contains__ __delitem__ __getitem__ __ior__ __iter__ __setitem__ "
    "clear get keys pop popitem setdefault update values"
).split():
    setattr(StateAtServers, _name, StateAtServers.refuse)


class OptimizerState:
    """The state of one optimizer, which the servers keep, or worker 0.

    Args:
        session: of this worker.
        store: has the state.
        optimizer: the user's, whose own `state` stays empty where the store has it.
        arithmetic: of the optimizer.
        ownership: which process has which part of the model.
        parameters: of the store.

    Attributes:
        snapshot: what `state_dict` reads instead of what the store has now; None: it does not.
    """

    def __init__(
        self,
        session: Session,
        store: Store,
        optimizer: torch.optim.Optimizer,
        arithmetic: Arithmetic,
        ownership: Replicated,
        parameters: Sequence[torch.Tensor],
    ) -> None:
        self._session, self._store, self._optimizer = session, store, optimizer
        self.snapshot: Snapshot | None = None
        self._arithmetic, self._ownership = arithmetic, ownership
        self._trained = {i: parameters[i] for i in store.layout.trained}
        self._frozen: dict[Any, Entry] = {}
        self._parameters = parameters
        self._frozen_averages: dict[int, torch.Tensor] = {}
        self._averaged = 0  # values, of which the averages of frozen parameters are

    # ---- as torch has it

    def state_dict(self, plain: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Returns the optimizer's own dictionary, filled with the store's state.

        An average of weights is beside it, where torch's own `load_state_dict` ignores it.
        """
        if self._arithmetic.by_worker:
            if self._session.rank != 0:
                raise RuntimeError(
                    "worker 0 makes this optimizer's steps and has its state: call state_dict() "
                    "and job.save() there"
                )
            return plain()
        with self._one_version():
            return self._filled(plain)

    def _one_version(self) -> AbstractContextManager[None]:
        return nullcontext() if self.snapshot else self._store.still()

    def _filled(self, plain: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        found = self._read()
        hooks: Any = self._optimizer
        own = getattr(plain, "__func__", None) is torch.optim.Optimizer.state_dict
        if self.snapshot and not (own and not hooks._optimizer_state_dict_post_hooks):
            self.snapshot.fetch()  # hooks may use the tensors in any way
        entries = {self._trained[i]: entry for i, entry in found.items()}
        state = self._ownership.state_dict(plain, {**entries, **self._frozen}, found)
        if self._arithmetic.ema:
            averages = {id(self._parameters[i]): each for i, each in self.averages().items()}
            order = [p for group in self._optimizer.param_groups for p in group["params"]]
            numbered = ((n, averages.get(id(p))) for n, p in enumerate(order))
            state["ema"] = {n: each for n, each in numbered if each is not None}
        return state

    def saved(self) -> dict[str, Any]:
        """Returns the state for a new store; the state that worker 0 keeps stays with it."""
        return {"state": {}} if self._arithmetic.by_worker else self._optimizer.state_dict()

    def load(
        self,
        ema: Mapping[int, torch.Tensor] | None = None,
        more: Mapping[Any, Entry] | None = None,
    ) -> None:
        """Loads worker 0's `optimizer.state` into the servers, for all workers.

        Args:
            ema: averages of weights, as in `state_dict`; if there are none, they begin anew with
                the next step. If only some parameters have none, theirs are the present values.
            more: by parameter, what `optimizer.state` holds besides.
        """
        own = vars(self._optimizer)
        entries = {**dict(own["state"].items()), **(more or {})}
        if self._arithmetic.by_worker:
            own["state"] = defaultdict(dict, entries if self._session.rank == 0 else {})
            return
        own["state"] = StateAtServers(dict)
        if self._ownership.split and entries:
            raise ValueError(
                "the optimizer of a split model has state already: make the DistributedOptimizer "
                "first, and load the state into it"
            )
        ids = {id(parameter) for parameter in self._trained.values()}
        # Kept for when they are trained again.
        self._frozen = {p: entry for p, entry in entries.items() if id(p) not in ids}
        averages = self._numbered(ema) if self._arithmetic.ema and ema else {}
        self._frozen_averages = {
            i: average.to(self._parameters[i].device, self._parameters[i].dtype, copy=True)
            for i, average in averages.items()
            if i not in self._trained
        }
        self._session.barrier()  # others may still read what worker 0 is about to overwrite
        writes = self._session.rank == 0
        if writes:
            if entries or self._store.counts().any():
                self._write({i: entries[p] for i, p in self._trained.items() if p in entries})
            if self._arithmetic.ema and (averages or self._store.counts(averaged=True).any()):
                self._write_averages({i: averages[i] for i in self._trained if i in averages})
        self._session.barrier()
        if self._session.rank == 0 and not writes:  # since then
            raise RuntimeError(
                "worker 0 was killed inside load_state_dict() or load(), and what it has written "
                "of the optimizer's state may not be all. The job can go on from its last "
                "checkpoint: job.load"
            )
        self._averaged = self._count_averaged() if self._frozen_averages else 0

    def model_state(self, buffers: Mapping[str, int]) -> dict[str, torch.Tensor]:
        """Returns the `state_dict()` of a shared model, all of it; no other worker takes part.

        Args:
            buffers: the indices of its buffers in the store, by name.
        """
        assert isinstance(self._ownership, Pipelined)
        version = self.snapshot or PresentVersion(self._store)
        return self._ownership.model_state(version, self._store.layout, buffers)

    def check_complete(self, arithmetic: Arithmetic, saved: Mapping[str, Any]) -> None:
        """Raises ValueError, in all workers, if `load` would after a move to another store."""
        if not _is_made_at_once(arithmetic.kernel):
            return
        order = [p for group in self._optimizer.param_groups for p in group["params"]]
        for number, parameter in enumerate(order):
            if parameter.requires_grad and number not in saved["state"]:
                raise _incomplete(arithmetic.tensors[number].name)

    def leave(self) -> None:
        """Gives the optimizer an ordinary `state`: it is not distributed any more."""
        if isinstance(self._optimizer.state, StateAtServers):
            vars(self._optimizer)["state"] = defaultdict(dict)

    def load_whole(self, given: dict[str, Any]) -> None:
        """Loads worker 0's state of a shared model into the servers, for all workers."""
        assert isinstance(self._ownership, Pipelined)
        if self._session.rank == 0:
            self._write(self._ownership.entries(given))
        self._session.barrier()

    # ---- as the store has it

    def _read(self) -> dict[int, Entry]:
        """Returns torch's `optimizer.state`, of parameters that have a state already.

        By index in the store; of a parameter only the format counts.
        """
        store, kernel = self._store, self._arithmetic.kernel
        version = self.snapshot or PresentVersion(store)
        scalars, counts = version.scalars().tolist(), version.counts().tolist()
        found = {}
        for index, parameter in self._trained.items():
            if not (counts[index] or _is_made_at_once(kernel)):
                continue
            place = store.layout.places[index]
            entry: Entry = {}
            if isinstance(kernel, OwnStepKernel):
                numbers = zip(kernel.spec.scalars.items(), scalars[index], strict=True)
                entry = {name: scalar_of(kind, value) for (name, kind), value in numbers}
            elif kernel.keeps_count:
                entry["step"] = _as_count(counts[index])
            for name, size in self._shapes_of(index).items():
                entry[name] = _array_at(version.state(name, place), size, parameter)
            if entry:
                found[index] = entry
        return found

    def _write(self, entries: Mapping[int, Entry]) -> None:
        """Overwrites the store's state; parameters without an entry begin anew.

        Raises:
            ValueError: the optimizer makes its state when it is made, and some parameter has none;
                or a parameter has other state than this optimizer keeps.
        """
        store, kernel = self._store, self._arithmetic.kernel
        for index in self._trained:
            self._check(index, entries.get(index, {}))
        for index in self._trained if _is_made_at_once(kernel) else ():
            if not entries.get(index):
                raise _incomplete(store.layout.spec.tensors[index].name)
        for name in kernel.states:
            array = np.zeros(store.layout.size_bytes, np.uint8)
            for index, parameter in self._trained.items():
                value = entries.get(index, {}).get(name)
                if value is not None:
                    place = store.layout.places[index]
                    size = self._shapes_of(index).get(name, parameter.shape)
                    _array_at(array[place.start : place.end], size, parameter).copy_(value)
            store.write_state(name, array)
        counts = np.zeros(len(store.layout.spec.tensors), np.int64)
        scalars = np.zeros((len(counts), len(kernel.scalars)))
        for index in self._trained:
            entry = entries.get(index, {})
            # SGD keeps no count; with a momentum buffer the first step is over.
            has = any(value is not None for value in entry.values())
            counts[index] = max(int(entry.get("step", 0)), int(has))
            for number, name in enumerate(kernel.scalars):
                scalars[index, number] = float(entry.get(name, 0.0))
        store.set_counts(counts)
        store.set_scalars(scalars)

    def _check(self, index: int, entry: Entry) -> None:
        """Raises ValueError for state of a parameter that the optimizer does not keep."""
        kernel, sizes = self._arithmetic.kernel, self._shapes_of(index)
        name = self._store.layout.spec.tensors[index].name
        if isinstance(kernel, OwnStepKernel) and entry:
            keeps = {*sizes, *kernel.scalars}
            if entry.keys() != keeps:
                raise ValueError(
                    f"the state of parameter {name!r} has {sorted(entry)}, and "
                    f"{kernel.spec.name} keeps {sorted(keeps)}"
                )
        for key, size in sizes.items():
            value = entry.get(key)
            if value is not None and value.shape != size:
                raise ValueError(
                    f"the state {key!r} of parameter {name!r} has the shape {tuple(value.shape)}, "
                    f"and not {tuple(size)}"
                )

    def _shapes_of(self, index: int) -> Mapping[str, torch.Size]:
        """Returns the arrays of state that a parameter has, and their shapes."""
        parameter, kernel = self._trained[index], self._arithmetic.kernel
        if not isinstance(kernel, OwnStepKernel):
            return dict.fromkeys(kernel.states, parameter.shape)
        group = self._store.layout.spec.tensors[index].group
        hyper = self._arithmetic.hyper()[group]
        return kernel.state_shapes(group, hyper, tuple(parameter.shape), parameter.dtype)

    # ---- averages of weights

    @property
    def holds_frozen(self) -> bool:
        """True if this process alone has state or averages of parameters that are frozen now."""
        return bool(self._frozen or self._frozen_averages)

    def average_frozen(self) -> None:
        """Updates the averages of frozen parameters to the last step.

        Called before their values change, and before the averages are read: a frozen value is
        averaged as often as there were steps, and servers do not know it.
        """
        if not self._frozen_averages:
            return
        before, self._averaged = self._averaged, self._count_averaged()
        for index, average in self._frozen_averages.items():
            value = self._parameters[index].detach()
            for _ in range(before, self._averaged):
                last = average.clone()
                if torch.equal(average.lerp_(value, 1 - self._arithmetic.ema), last):
                    break

    def _count_averaged(self) -> int:
        """Returns how many values the servers' averages have; each step adds one."""
        return int(self._store.counts(averaged=True).max())

    def _numbered(self, ema: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """Returns averages as in `state_dict`, by index in the store."""
        order = [p for group in self._optimizer.param_groups for p in group["params"]]
        found = {id(p): ema.get(n, p).detach() for n, p in enumerate(order)}
        indices = {id(p): i for i, p in enumerate(self._parameters)}
        return {indices[p]: each for p, each in found.items() if each.is_floating_point()}

    def averages(self) -> dict[int, torch.Tensor]:
        """Returns the averages of weights, of parameters that have one."""
        with self._one_version():
            return self._read_averages()

    def _read_averages(self) -> dict[int, torch.Tensor]:
        self.average_frozen()
        version, places = self.snapshot or PresentVersion(self._store), self._store.layout.places
        counts = version.counts(averaged=True)
        trained = {
            i: tensor_at(version.state(AVERAGE, places[i]), parameter)
            for i, parameter in self._trained.items()
            if counts[i]
        }
        return {**trained, **{i: each.clone() for i, each in self._frozen_averages.items()}}

    def _write_averages(self, averages: Mapping[int, torch.Tensor]) -> None:
        """Overwrites all averages; parameters without one begin anew."""
        store = self._store
        data = np.zeros(store.layout.size_bytes, np.uint8)
        counts = np.zeros(len(store.layout.spec.tensors), np.int64)
        for index, value in averages.items():
            place = store.layout.places[index]
            tensor_at(data[place.start : place.end], self._trained[index]).copy_(value)
            counts[index] = 1
        store.write_state(AVERAGE, data)
        store.set_counts(counts, averaged=True)


def _is_made_at_once(kernel: TorchKernel) -> bool:
    """Tells whether the optimizer's class makes the state of a parameter before its first step."""
    return isinstance(kernel, OwnStepKernel) and not kernel.spec.lazy


def _incomplete(name: str) -> ValueError:
    return ValueError(
        f"parameter {name!r} has no state, which this optimizer makes when it is made, as where a "
        "group was added later: make the optimizer with all parameters"
    )


def _array_at(data: Bytes, size: torch.Size, parameter: torch.Tensor) -> torch.Tensor:
    """Returns an array of state in the bytes of its parameter, in whose order of elements it is."""
    if size == parameter.shape:
        return tensor_at(data, parameter)
    return torch.frombuffer(data, dtype=parameter.dtype, count=size.numel()).view(size)


def _as_count(steps: int) -> torch.Tensor:
    """Returns a count of steps in the dtype of torch's optimizers, which never rounds it."""
    wide = torch.get_default_dtype() == torch.float64
    return torch.tensor(steps, dtype=torch.float64 if wide else torch.float32, device="cpu")
