"""Applies SGD, Adam and AdamW by torch's fused kernels to cells instead of whole tensors.

The fused kernels work element by element and vector by vector; cells start and end on 64 bytes, so
the cut changes no bit. Knows no processes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from tensorwire.errors import UnavailableError
from tensorwire.parameters import Bytes, Cell, Hyper, Lookup, Scalars, TableStep, TensorSpec, Tile

from .rows import PlainRows, TableRows
from .tile import Averaging, CellTile, constant

_HYPER = {
    "SGD": ("lr", "momentum", "dampening", "weight_decay", "nesterov", "maximize"),
    "Adam": ("lr", "beta1", "beta2", "eps", "weight_decay", "amsgrad", "maximize"),
}
_HYPER["AdamW"] = _HYPER["Adam"]
_LAZY = ";lazy rows"

_KNOWN: dict[type[torch.optim.Optimizer], str] = {
    torch.optim.SGD: "SGD",
    torch.optim.Adam: "Adam",
    torch.optim.AdamW: "AdamW",
}


def fused_path_of(
    optimizer: torch.optim.Optimizer, cls: type[torch.optim.Optimizer], lazy_rows: bool = False
) -> str:
    """Returns the class path and state by which SGD, Adam or AdamW travels; "" for another class.

    With `lazy_rows`, SGD's momentum and decay change only the rows of tables that a step has.

    Raises:
        UnavailableError: one kernel cannot step all of its groups.
    """
    # A subclass that leaves the arithmetic alone is the class itself.
    kind = next((_KNOWN[each] for each in cls.__mro__ if each in _KNOWN), "")
    known = next((each for each in _KNOWN if _KNOWN[each] == kind), None)
    if known is None or not _is_unchanged(cls, known):
        return ""
    groups = optimizer.param_groups
    if kind == "SGD":
        states = ["momentum_buffer"] if any(group["momentum"] for group in groups) else []
    else:
        states = ["exp_avg", "exp_avg_sq"]
        if any(group["amsgrad"] for group in groups):
            states.append("max_exp_avg_sq")
        # Adam with decoupled decay is AdamW, since torch 2.7 also by name.
        decoupled = {bool(g.get("decoupled_weight_decay")) for g in groups if g["weight_decay"]}
        if kind == "Adam" and len(decoupled) > 1:
            raise UnavailableError(
                "groups with and without decoupled_weight_decay in one Adam; make it the same"
            )
        if kind == "Adam" and decoupled == {True}:
            kind = "AdamW"
    lazy = _LAZY * (lazy_rows and kind == "SGD")
    return f"torch.optim.{kind}:{','.join(states)}{lazy}"


def _is_unchanged(cls: type, known: Any) -> bool:
    """Tells whether a class steps as a known one: no class between has arithmetic of its own."""
    for each in cls.__mro__[: cls.__mro__.index(known)]:
        # torch puts a wrapped step into each class of which it makes an optimizer.
        own = {name for name in vars(each) if not name.startswith("__") and name != "step"}
        step = vars(each).get("step")
        if own or (step is not None and inspect.unwrap(step) is not inspect.unwrap(known.step)):
            return False
    return True


class FusedKernel(Averaging):
    """`parameters.Kernel` for a path that `fused_path_of` made.

    Attributes:
        hyper, states, scalars: as of `parameters.Kernel`.
        keeps_count: it is not SGD, which keeps no count of its steps.
        changes_rows_alone: rows of tables without a gradient stay as they are: SGD without
            momentum as long as nothing decays, and SGD with lazy rows.

    Raises:
        ValueError: a path that names nothing known; it may come from another process.
    """

    scalars: tuple[str, ...] = ()

    def __init__(self, path: str) -> None:
        self._lazy_rows = path.endswith(_LAZY)
        name, _, states = path.removesuffix(_LAZY).partition(":")
        self._kind = name.removeprefix("torch.optim.")
        if self._kind not in _HYPER or not name.startswith("torch.optim."):
            raise ValueError(f"unknown optimizer {path!r}")
        self.hyper = _HYPER[self._kind]
        self.states = tuple(filter(None, states.split(",")))
        known = ("momentum_buffer",), (), ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
        if self.states not in (*known, known[2][:2]):
            raise ValueError(f"unknown state in {path!r}")
        self.keeps_count = self._kind != "SGD"
        self.changes_rows_alone = not self.keeps_count and (not self.states or self._lazy_rows)

    def hyper_of(self, optimizer: torch.optim.Optimizer) -> tuple[Hyper, ...]:
        """Returns the present hyper-parameters of every group as numbers."""
        rows = []
        for group in optimizer.param_groups:
            row = []
            for name in self.hyper:
                beta = name.startswith("beta")
                value = group["betas"][int(name[-1]) - 1] if beta else group[name]
                row.append(float(value))
            rows.append(tuple(row))
        return tuple(rows)

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
        return FusedTile(_KERNELS[self._kind], cell.dtype, master, slots, states, kept)

    def bind_rows(self, table: TensorSpec, master: Bytes, states: Mapping[str, Bytes]) -> Lookup:
        """Binds the rows of a table, see `parameters.Kernel.bind_rows`."""
        if not self.changes_rows_alone:
            raise ValueError(f"{self._kind} with {self.states} changes all rows of a table")
        if self._lazy_rows:
            return TableRows(_sgd_on_rows, table.dtype, table.shape[1], master, states)
        return PlainRows(table.dtype, table.shape[1], master)


class _Operands(NamedTuple):
    """The operands of a kernel; the gradient is still to be divided by the divisor."""

    master: torch.Tensor
    gradient: torch.Tensor
    states: list[torch.Tensor]
    divisor: torch.Tensor | None
    step: int


class FusedTile(CellTile):
    """A cell under one of torch's fused kernels."""

    def __init__(
        self,
        kernel: Callable[[_Operands, Hyper], None],
        dtype: str,
        master: Bytes,
        slots: Sequence[Bytes],
        states: Mapping[str, Bytes],
        kept: Bytes,
    ) -> None:
        super().__init__(dtype, master, slots, states, kept)
        self._kernel, self._every = kernel, list(self._states.values())

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
        master, states = self._master, self._every
        if (start, stop) != (0, self._bytes):
            master = self._part(master, start, stop)
            states = [self._part(state, start, stop) for state in states]
        self._kernel(_Operands(master, gradient, states, divisor, count), hyper)
        return scalars


def _sgd(on: _Operands, hyper: Hyper) -> None:
    lr, momentum, dampening, decay, nesterov, maximize = hyper
    if on.master.element_size() < 4:
        _sgd_by_parts(on, hyper)
        return
    torch._fused_sgd_(
        [on.master],
        [on.gradient],
        on.states if momentum else [],
        lr=lr,
        momentum=momentum,
        dampening=dampening,
        weight_decay=decay,
        nesterov=bool(nesterov),
        maximize=bool(maximize),
        is_first_step=on.step == 1,
        grad_scale=on.divisor,
    )


def _sgd_on_rows(
    hyper: Hyper,
    rows: torch.Tensor,
    gradient: torch.Tensor,
    states: dict[str, torch.Tensor],
    part: TableStep,
) -> Scalars:
    """Steps SGD on these rows as if they were all; the momentum of a row begins at 0."""
    _sgd(_Operands(rows, gradient, list(states.values()), None, max(part.step, 2)), hyper)
    return ()


def _sgd_by_parts(on: _Operands, hyper: Hyper) -> None:
    """Steps 16-bit parameters, which torch 2.13's fused kernel with momentum does not change."""
    lr, momentum, dampening, decay, nesterov, maximize = hyper
    gradient = on.gradient
    if maximize:
        gradient = -gradient
    if decay:
        gradient = gradient.add(on.master, alpha=decay)
    if momentum:
        (buffer,) = on.states
        if on.step == 1:
            buffer.copy_(gradient)
        else:
            buffer.mul_(momentum).add_(gradient, alpha=1 - dampening)
        gradient = gradient.add(buffer, alpha=momentum) if nesterov else buffer
    on.master.add_(gradient, alpha=-lr)


def _adam(kernel: Any, on: _Operands, hyper: Hyper) -> None:
    lr, beta1, beta2, eps, decay, amsgrad, maximize = hyper
    kernel(
        [on.master],
        [on.gradient],
        [on.states[0]],
        [on.states[1]],
        on.states[2:3] if amsgrad else [],
        [constant(on.step, on.master.device)],
        lr=lr,
        beta1=beta1,
        beta2=beta2,
        weight_decay=decay,
        eps=eps,
        amsgrad=bool(amsgrad),
        maximize=bool(maximize),
        grad_scale=on.divisor,
    )


_KERNELS: dict[str, Callable[[_Operands, Hyper], None]] = {
    "SGD": _sgd,
    "Adam": partial(_adam, torch._fused_adam_),
    "AdamW": partial(_adam, torch._fused_adamw_),
}
