"""Runs the class's own `step()` of optimizers that work by elements or by tensors.

An instance of the class has one parameter, which lies over the bytes of a cell; its state lies over
the cell's arrays of state. It is made as `pickle` makes one, from the numbers and options of its
group, so no user's object is needed.
"""

from __future__ import annotations

import traceback
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from importlib import import_module
from typing import Any

import torch
from torch import nn

from tensorwire.parameters import Bytes, Cell, Hyper, Lookup, Scalars, TableStep, TensorSpec, Tile

from .optimizer_spec import OptimizerSpec
from .rows import TableRows
from .tile import Averaging, CellTile, scratch

_KEPT_PARTS = 4  # of a cell, whose instances are kept; mostly it is one, the whole cell
Views = Mapping[str, torch.Tensor]
_ADVICE = 'DistributedOptimizer(…, apply="worker") has worker 0 apply it'


_USE_GRAD = vars(import_module("torch.optim.optimizer")).get("_use_grad_for_differentiable")
_USE_GRAD_CODE = _USE_GRAD(lambda self: None).__code__ if _USE_GRAD else None


def plain_step_of(cls: type[torch.optim.Optimizer]) -> Callable[[Any], Any]:
    """Returns the step of a class without torch's wrapper; call it with gradients off.

    The wrapper runs the hooks of all optimizers, marks steps for the profiler, and handles
    `differentiable`, which imports all of torch's compiler.
    """
    step: Any = cls.step
    if getattr(step, "hooked", False):
        step = step.__wrapped__
    while _USE_GRAD_CODE is not None and getattr(step, "__code__", None) is _USE_GRAD_CODE:
        step = step.__wrapped__
    return step  # type: ignore[no-any-return]


class OwnOptimizer:
    """An instance of a class of optimizers, for one parameter. One thread at a time.

    Args:
        cls: the class.
        spec: how the optimizer is described.
        group: the parameter's group.
        master: the parameter's values, which every step changes in place.
    """

    def __init__(
        self,
        cls: type[torch.optim.Optimizer],
        spec: OptimizerSpec,
        group: int,
        master: torch.Tensor,
    ) -> None:
        self._spec, self._master = spec, master
        options = spec.options_of(group)
        self._parameter = nn.Parameter(master)
        self._address = self._parameter.data_ptr()
        self._hyper: Hyper | None = None
        made: Any = object.__new__(cls)
        self._made, self._step = made, plain_step_of(cls)
        constants = dict(options.constants)
        made.__setstate__(
            {
                "defaults": constants,
                "state": defaultdict(dict),
                "param_groups": [{**constants, "params": [self._parameter]}],
                **spec.attributes,
            }
        )
        self._bound: Views | None = None

    def step(
        self, hyper: Hyper, gradient: torch.Tensor, states: Views, scalars: Scalars | None
    ) -> Scalars:
        """Makes a step.

        Args:
            hyper: numbers of the group, by `OptimizerSpec.numbers`.
            gradient: of the parameter's shape, dense or sparse.
            states: all arrays of the group, of the parameter's shape where they have it. They are
                read and overwritten.
            scalars: before the step; None: there is no state yet, and `states` are only written.

        Returns:
            The scalars after the step.

        Raises:
            ValueError: the class keeps other state than is described, or its step raised an error.
        """
        made, parameter = self._made, self._parameter
        self._set(hyper)
        entry: dict[str, Any] = made.state[parameter]
        if scalars is None:
            entry.clear()
        else:
            if self._bound is not states:
                entry.clear()
                entry.update(states)
                self._bound = states
            self._put_scalars(entry, scalars)
        parameter.grad = gradient
        with torch.no_grad():
            try:
                self._step(made)
            except Exception as error:  # whatever a class may do
                last = traceback.extract_tb(error.__traceback__)[-1]
                raise ValueError(
                    f"the step() of {self._spec.name} raised {type(error).__name__}: {error} "
                    f"({last.filename}:{last.lineno}); {_ADVICE}"
                ) from error
            parameter.grad = None
            if parameter.data_ptr() != self._address:  # it was given other memory
                self._master.copy_(parameter)
                parameter.data = self._master
            entry = made.state[parameter]
            expected = {*states, *self._spec.scalars}
            if entry.keys() != expected:
                raise ValueError(
                    f"{self._spec.name} keeps the state {sorted(entry)}, and not the "
                    f"{sorted(expected)} of its first steps; {_ADVICE}"
                )
            for name, view in states.items():
                if entry[name].shape != view.shape:
                    raise ValueError(
                        f"{self._spec.name} keeps {name!r} of {tuple(entry[name].shape)}, and not "
                        f"of {tuple(view.shape)} as in its first steps; {_ADVICE}"
                    )
                if entry[name] is not view:
                    view.copy_(entry[name])
                    entry[name] = view
            self._bound = states
        return tuple([float(entry[name]) for name in self._spec.scalars])

    def try_out(self, hyper: Hyper, gradient: torch.Tensor) -> dict[str, Any]:
        """Returns the state that a first step makes, in memory of its own."""
        self._set(hyper)
        self._parameter.grad = gradient
        with torch.no_grad():
            self._step(self._made)
        entry: dict[str, Any] = self._made.state.pop(self._parameter)
        return entry

    def _set(self, hyper: Hyper) -> None:
        if hyper != self._hyper:
            numbers = self._spec.group_of(hyper)
            self._made.param_groups[0].update(numbers)
            self._made.defaults.update(numbers)
            self._hyper = hyper

    def _put_scalars(self, entry: dict[str, Any], scalars: Scalars) -> None:
        for (name, kind), value in zip(self._spec.scalars.items(), scalars, strict=True):
            found = entry.get(name)
            if isinstance(found, torch.Tensor):
                found.fill_(value)
            else:
                entry[name] = scalar_of(kind, value)


def scalar_of(kind: str, value: float) -> Any:
    """Returns a number as an optimizer keeps it: a tensor of a dtype, or an int, float or bool."""
    if kind in ("int", "bool", "float"):
        return {"int": int, "bool": bool, "float": float}[kind](value)
    return torch.tensor(value, dtype=getattr(torch, kind), device="cpu")


class OwnTile(CellTile):
    """A cell under a class's own `step()`."""

    def __init__(
        self,
        cls: type[torch.optim.Optimizer],
        spec: OptimizerSpec,
        cell: Cell,
        shape: Sequence[int] | None,
        master: Bytes,
        slots: Sequence[Bytes],
        states: Mapping[str, Bytes],
        kept: Bytes,
    ) -> None:
        super().__init__(cell.dtype, master, slots, states, kept)
        self._cls: Any = cls
        self._spec, self._group, self._shape = spec, cell.group, shape
        self._parts: dict[tuple[int, int], tuple[OwnOptimizer, Views]] = {}

    def step(
        self,
        hyper: Hyper,
        count: int,
        scalars: Scalars,
        start: int,
        stop: int,
        kept: bool,
        scale: float,
    ) -> Scalars:
        """See `parameters.Tile.step`."""
        gradient = self._gradient(start, stop, kept, scale)
        divisor = None if kept else self._divisor
        if divisor is not None:
            gradient.div_(divisor)  # a sum of several, in scratch memory
        elif self._spec.edits_gradient and scale == 1.0 and (kept or not self._in_scratch):
            gradient = scratch(*self._size)[: gradient.numel()].copy_(gradient)
        own, views = self._parts.get((start, stop)) or self._make_part(hyper, start, stop)
        begins = self._spec.lazy and count == 1
        return own.step(hyper, self._shaped(gradient), views, None if begins else scalars)

    def _make_part(self, hyper: Hyper, start: int, stop: int) -> tuple[OwnOptimizer, Views]:
        if len(self._parts) == _KEPT_PARTS:
            self._parts.clear()
        master = self._shaped(self._part(self._master, start, stop))
        shapes = state_shapes(
            self._cls, self._spec, self._group, hyper, tuple(master.shape), master.dtype
        )
        views = {
            name: self._part(self._states[name], start, stop)[: size.numel()].view(size)
            for name, size in shapes.items()
        }
        own = OwnOptimizer(self._cls, self._spec, self._group, master)
        self._parts[start, stop] = own, views
        return own, views

    def _shaped(self, flat: torch.Tensor) -> torch.Tensor:
        if self._shape is None:
            return flat
        return flat[: torch.Size(self._shape).numel()].view(self._shape)


@lru_cache(maxsize=1024)
def state_shapes(
    cls: Any,
    spec: OptimizerSpec,
    group: int,
    hyper: Hyper,
    shape: tuple[int, ...],
    dtype: torch.dtype,
) -> Mapping[str, torch.Size]:
    """Returns the arrays of state that a class keeps of a tensor, and their shapes.

    Mostly they have the tensor's shape. Where they have not, a step is tried out.
    """
    if spec.states_have_shape:
        return dict.fromkeys(spec.options_of(group).states, torch.Size(shape))
    own = OwnOptimizer(cls, spec, group, torch.zeros(shape, dtype=dtype, device="cpu"))
    entry = own.try_out(hyper, torch.ones(shape, dtype=dtype, device="cpu"))
    return {name: entry[name].shape for name in spec.states if name in entry}


class OwnStepKernel(Averaging):
    """`parameters.Kernel` for a class of optimizers that is described by an `OptimizerSpec`.

    Attributes:
        hyper, states, scalars: as of `parameters.Kernel`.
    """

    def __init__(self, cls: type[torch.optim.Optimizer], spec: OptimizerSpec) -> None:
        self._cls: Any = cls
        self.spec = spec
        self.hyper = tuple(spec.numbers)
        self.states = spec.states
        self.scalars = tuple(spec.scalars)

    @staticmethod
    def of_object(optimizer: torch.optim.Optimizer, text: str) -> OwnStepKernel:
        """Makes the kernel of an optimizer of this process, of any class; `text` describes it."""
        cls = type(optimizer)
        return OwnStepKernel(getattr(cls, "_plain_class", cls), OptimizerSpec.from_text(text))

    def hyper_of(self, optimizer: torch.optim.Optimizer) -> tuple[Hyper, ...]:
        """Returns the present numbers of every group, of an optimizer that fits the description."""
        return tuple(self.spec.hyper_of(group) for group in optimizer.param_groups)

    def state_shapes(
        self, group: int, hyper: Hyper, shape: tuple[int, ...], dtype: torch.dtype
    ) -> Mapping[str, torch.Size]:
        """See `state_shapes`."""
        return state_shapes(self._cls, self.spec, group, hyper, shape, dtype)

    def bind(
        self,
        cell: Cell,
        shape: Sequence[int] | None,
        master: Bytes,
        slots: Sequence[Bytes],
        states: Mapping[str, Bytes],
        kept: Bytes,
    ) -> Tile:
        """Binds a cell, see `parameters.Kernel.bind`."""
        return OwnTile(self._cls, self.spec, cell, shape, master, slots, states, kept)

    def bind_rows(self, table: TensorSpec, master: Bytes, states: Mapping[str, Bytes]) -> Lookup:
        """Binds the rows of a table, see `parameters.Kernel.bind_rows`."""
        if not self.spec.rows:
            raise ValueError(f"{self.spec.name} changes all rows of a table")
        mine = {name: states[name] for name in self.spec.options_of(table.group).states}
        step = partial(self._step_rows, table.group)
        return TableRows(step, table.dtype, table.shape[1], master, mine)

    def _step_rows(
        self,
        group: int,
        hyper: Hyper,
        rows: torch.Tensor,
        gradient: torch.Tensor,
        states: dict[str, torch.Tensor],
        part: TableStep,
    ) -> Scalars:
        """Steps the class on these rows as if they were a whole table with all gradients."""
        own = OwnOptimizer(self._cls, self.spec, group, rows)
        each = torch.arange(len(rows), device=rows.device).unsqueeze(0)
        sparse = torch.sparse_coo_tensor(
            each, gradient, rows.shape, dtype=gradient.dtype, device=rows.device, is_coalesced=True,
            check_invariants=False,
        )  # fmt: skip
        begins = self.spec.lazy and part.step == 1
        return own.step(hyper, sparse, states, None if begins else part.scalars)
