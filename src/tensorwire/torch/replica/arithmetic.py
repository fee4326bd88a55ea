"""Chooses the arithmetic for an optimizer's parameters, on the servers or in worker 0."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import torch

from tensorwire.errors import UnavailableError
from tensorwire.parameters import WITH_GRADIENT, Hyper, TensorSpec

from ..kernels import (
    AVERAGE_ONLY,
    NotOnServersError,
    Options,
    OwnStepKernel,
    ParameterKind,
    TorchKernel,
    alike,
    describe,
    has_other_attributes,
    ignored_options,
    kernel_of,
    options_of,
    plain_class_of,
)
from .mutation_guard import of_libraries

APPLIERS = ("auto", "servers", "worker")
"""The choices of a place to apply gradients: the servers if possible, the servers, worker 0."""


class Arithmetic:
    """The arithmetic of one optimizer.

    Args:
        optimizer: the user's.
        tensors: of the store, before it is known how they are treated.
        apply: one of APPLIERS.
        ema: decay of an average of weights that servers keep; 0: none.
        lazy_rows: of tables, SGD's momentum and weight decay change the rows of a step alone.
        permitted: modules that servers may import; None: there is no other process.
        several: the optimizers of several processes are one.

    Attributes:
        ema, lazy_rows: as given.
        text: by which the optimizer travels.
        kernel: the servers' arithmetic.
        by_worker: worker 0 makes the optimizer's steps.
        why: what made it so, in words; "" where it was asked for.
        tensors: of the store, with the kinds that the optimizer needs.

    Raises:
        UnavailableError: servers were asked for, or are needed, and cannot.
        ValueError: the optimizer changes all rows of a table with sparse gradients, or lazy rows
            make no sense for it.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        tensors: Sequence[TensorSpec],
        apply: str,
        ema: float,
        lazy_rows: bool,
        permitted: Collection[str] | None,
        several: bool,
    ) -> None:
        self._optimizer, self._permitted, self.ema = optimizer, permitted, ema
        self._kinds = {
            ParameterKind(
                each.group,
                getattr(torch, each.dtype),
                len(each.shape),
                each.kind == "rows",
                tuple(each.shape),
            )
            for each in tensors
            if each.kind in WITH_GRADIENT
        }
        self.lazy_rows = lazy_rows
        self.why = ""
        self.text = AVERAGE_ONLY
        if apply != "worker":
            try:
                self.text = describe(optimizer, self._kinds, permitted, lazy_rows)
            except NotOnServersError as error:
                self.why = str(error)
        self.kernel: TorchKernel = self._kernel()
        self.tensors = list(tensors)
        if isinstance(self.kernel, OwnStepKernel) and self.kernel.spec.method == "whole":
            self._keep_whole()
        self.by_worker = self.text == AVERAGE_ONLY
        cls = _name_of(optimizer)
        if self.by_worker and apply == "servers":
            raise UnavailableError(f"servers cannot apply {cls}: {self.why}")
        self._tables = [each for each in tensors if each.kind == "rows"]
        tables = [each.name for each in self._tables]
        if lazy_rows and not (tables and self.text.startswith("torch.optim.SGD:")):
            raise ValueError(
                f'sparse="lazy" is for SGD and tables with sparse gradients, not for {cls} '
                + ("" if tables else "without such tables")
            )
        if ema and self.by_worker:
            raise UnavailableError(
                f"ema= needs an optimizer that servers apply, and {cls} is applied by worker 0"
                + (f": {self.why}" if self.why else "")
            )
        if self.by_worker and (several or tables):
            whose = "a model that is split" if several else f"the sparse gradients of {tables[0]!r}"
            why = f": {self.why}" if self.why else ""
            raise UnavailableError(f"worker 0 cannot apply {cls} to {whose}, only servers{why}")
        decaying = self._decaying_table()
        if tables and (decaying is not None or not self.changes_rows_alone):
            raise ValueError(
                f"parameter {decaying or tables[0]!r} is a table with sparse gradients, and "
                "momentum, weight decay and most optimizers change all of its rows in every step: "
                'use torch.optim.SGD without them or with sparse="lazy", Adagrad or SparseAdam, or '
                "a table with sparse=False"
            )
        self._without_momentum = [
            index for index, group in enumerate(optimizer.param_groups) if not group.get("momentum")
        ]
        self._options: Options | None = None
        self._texts: dict[Options, str] = {}
        self._looks: list[list[tuple[str, object]]] | None = None  # of groups that were described
        if isinstance(self.kernel, OwnStepKernel):
            self._options = options_of(optimizer)[0]
            self._texts[self._options] = self.text

    def _kernel(self) -> TorchKernel:
        if self._permitted is None and self.text.startswith("{"):
            return OwnStepKernel.of_object(self._optimizer, self.text)
        return kernel_of(self.text, self._permitted or ())

    def _keep_whole(self) -> None:
        """Keeps tensors uncut, as the optimizer looks at whole tensors."""
        for index, each in enumerate(self.tensors):
            if each.kind == "trained":
                self.tensors[index] = replace(each, kind="whole")
        whole = [each.name for each in self.tensors if each.kind == "whole"]
        if odd := next((name for name in whole if ", strides " in name), None):
            self.why = f"it looks at whole tensors, and {odd!r} is not contiguous"
            self.text = AVERAGE_ONLY
            self.kernel = self._kernel()
            self.tensors = [
                replace(each, kind="trained") if each.kind == "whole" else each
                for each in self.tensors
            ]

    def check_tables(self) -> None:
        """Raises RuntimeError if the optimizer has begun to change all rows of a table."""
        if (decaying := self._decaying_table()) is not None:
            raise RuntimeError(
                f"weight_decay was set for {decaying!r}, a table with sparse gradients; it changes "
                "all rows in every step: use a table with sparse=False"
            )

    def _decaying_table(self) -> str | None:
        groups = self._optimizer.param_groups
        tables = () if self.lazy_rows else self._tables
        return next((t.name for t in tables if groups[t.group].get("weight_decay")), None)

    @property
    def changes_rows_alone(self) -> bool:
        """True if a sparse gradient changes only the rows that it has."""
        kernel = self.kernel
        if isinstance(kernel, OwnStepKernel):
            return kernel.spec.rows
        return bool(getattr(kernel, "changes_rows_alone", False))

    def hyper(self) -> tuple[Hyper, ...]:
        """Returns the present numbers of every group."""
        if self.by_worker:
            return ((),) * len(self._optimizer.param_groups)
        return self.kernel.hyper_of(self._optimizer)

    def check_state(self) -> None:
        """Raises RuntimeError if servers would have to keep something else than they do."""
        if self.keeps_other_state():
            raise RuntimeError(
                "momentum, amsgrad or another option that decides what servers keep was changed "
                "after DistributedOptimizer was made, or an attribute of the optimizer; set it (or "
                'make the scheduler) before, or use apply="worker"'
            )

    def keeps_other_state(self) -> bool:
        """Tells whether the optimizer's groups need another description than the servers have."""
        if self.by_worker:
            return False
        if self._options is None:
            now = describe(self._optimizer, (), self._permitted, self.lazy_rows)
            return now != self.text or self._begins_damped()
        kernel = self.kernel
        if isinstance(kernel, OwnStepKernel) and has_other_attributes(
            self._optimizer, kernel.spec.attributes
        ):
            return True
        looks = [
            [(key, _look(value)) for key, value in group.items() if key != "params"]
            for group in self._optimizer.param_groups
        ]
        if looks == self._looks:
            return False
        try:
            options, _ = options_of(self._optimizer)
            if options not in self._texts:
                kinds, permitted = self._kinds, self._permitted
                self._texts[options] = describe(self._optimizer, kinds, permitted)
        except NotOnServersError:
            return True
        if not alike(self._texts[options], self.text):
            return True
        self._looks = looks
        return False

    def _begins_damped(self) -> bool:
        """Tells whether a group of SGD begins with momentum later than others, undamped.

        Servers know first steps of tensors, and not of their momentum, which is 0 until then.
        """
        if not self.text.startswith("torch.optim.SGD:momentum_buffer"):
            return False
        groups = self._optimizer.param_groups
        return any(groups[i]["momentum"] and groups[i]["dampening"] for i in self._without_momentum)

    def step(self) -> None:
        """Makes a step of the optimizer's own class, in this process."""
        step: Any = plain_class_of(self._optimizer).step
        # Its hooks run around the step of which this is a part.
        step = step.__wrapped__ if getattr(step, "hooked", False) else step
        step(self._optimizer)

    def tell(self) -> None:
        """Tells the user of differences to the requested arithmetic; worker 0 calls it."""
        cls = _name_of(self._optimizer)
        if ignored := ignored_options(self._optimizer):
            verb = "has no meaning" if len(ignored) == 1 else "have no meaning"
            _say(f"{' and '.join(ignored)} of {cls} {verb} here and will be ignored")
        if self.by_worker and self.why:
            _say(
                f"worker 0 applies {cls}, as servers cannot: {self.why}. Each step sends all "
                "gradients to worker 0 and all parameters back, and the other workers wait; "
                'apply="worker" says that it is meant so'
            )


def check_possible(optimizer: torch.optim.Optimizer) -> None:
    """Raises UnavailableError for an optimizer that cannot be applied in a distributed step."""
    cls, name = plain_class_of(optimizer), _name_of(optimizer)
    if cls.__name__ == "ZeroRedundancyOptimizer":
        inner = type(getattr(optimizer, "optim", optimizer)).__name__
        raise UnavailableError(
            f"{name} deals out the optimizer's state over a process group of its own, and servers "
            f"do that here: give DistributedOptimizer its optimizer_class itself, as {inner}"
            "(model.parameters(), …)"
        )
    closure = inspect.signature(inspect.unwrap(cls.step)).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise UnavailableError(
            f"{name} evaluates the model several times per step, as its step() needs a closure; "
            "a distributed step cannot: use another optimizer"
        )
    if callable(getattr(cls, "train", None)) and callable(getattr(cls, "eval", None)):
        raise UnavailableError(
            f"{name} changes parameters in its train() and eval(), which other workers would not "
            "see: use another optimizer, and DistributedOptimizer(ema=…) for an average of weights"
            f"{of_libraries()}"
        )


def _look(value: Any) -> object:
    """Returns the part of an option that matters for the description."""
    if isinstance(value, bool | int | float):
        return type(value), bool(value)
    if isinstance(value, tuple | list):
        return tuple(map(_look, value))
    # What can be changed in place, or compares in its own way, is described in every step.
    return value if isinstance(value, str | None) else object()


def _name_of(optimizer: torch.optim.Optimizer) -> str:
    cls = plain_class_of(optimizer)
    return f"{cls.__module__}.{cls.__qualname__}"


def _say(text: str) -> None:
    print(f"tensorwire: {text}", file=sys.stderr, flush=True)
