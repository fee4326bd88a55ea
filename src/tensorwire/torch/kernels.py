"""torch's own optimizer kernels, applied to cells of a store instead of whole tensors.

The fused kernels of SGD, Adam and AdamW work element by element and vector by vector; cells start
and end on 64 bytes, so the cut changes no bit. Knows no processes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from tensorwire.errors import UnavailableError
from tensorwire.parameters import Bytes, Hyper, Lent, Lookup, Rows, Tile, Weight

_HYPER = {
    "SGD": ("lr", "momentum", "dampening", "weight_decay", "nesterov", "maximize"),
    "Adam": ("lr", "beta1", "beta2", "eps", "weight_decay", "amsgrad", "maximize"),
}
_HYPER["AdamW"] = _HYPER["Adam"]

KNOWN: dict[type[torch.optim.Optimizer], str] = {
    torch.optim.SGD: "SGD",
    torch.optim.Adam: "Adam",
    torch.optim.AdamW: "AdamW",
}


def path_of(optimizer: torch.optim.Optimizer) -> str:
    """How an optimizer travels: its class path and the state it keeps.

    Raises:
        UnavailableError: its arithmetic is not known here.
    """
    cls = type(optimizer)
    cls = getattr(cls, "_plain_class", cls)  # of a distributed one: the user's class
    if cls not in KNOWN:
        raise UnavailableError(
            f"a server cannot apply {cls.__module__}.{cls.__qualname__}: it knows torch.optim.SGD, "
            "Adam and AdamW, which work element by element (subclasses may do anything else)"
        )
    kind = KNOWN[cls]
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
        if any(group["differentiable"] for group in groups):
            raise UnavailableError("an optimizer with differentiable=True cannot be distributed")
    return f"torch.optim.{kind}:{','.join(states)}"


def hyper_of(optimizer: torch.optim.Optimizer, names: Sequence[str]) -> tuple[Hyper, ...]:
    """The present hyper-parameters of every group as numbers."""
    rows = []
    for group in optimizer.param_groups:
        row = []
        for name in names:
            value = group["betas"][int(name[-1]) - 1] if name.startswith("beta") else group[name]
            row.append(float(value))
        rows.append(tuple(row))
    return tuple(rows)


class TorchKernels:
    """`parameters.Kernel` for a path that `path_of` made.

    Attributes:
        hyper, states: as of `parameters.Kernel`.
        is_sgd: it is SGD, which keeps no count of its steps.
        changes_rows_alone: what has no gradient stays as it is, as long as nothing decays: SGD
            without momentum.

    Raises:
        ValueError: a path that names nothing known; it may come from another process.
    """

    def __init__(self, path: str) -> None:
        name, _, states = path.partition(":")
        self._kind = name.removeprefix("torch.optim.")
        if self._kind not in _HYPER or not name.startswith("torch.optim."):
            raise ValueError(f"unknown optimizer {path!r}")
        self.hyper = _HYPER[self._kind]
        self.states = tuple(filter(None, states.split(",")))
        known = ("momentum_buffer",), (), ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
        if self.states not in (*known, known[2][:2]):
            raise ValueError(f"unknown state in {path!r}")
        self.is_sgd = self._kind == "SGD"
        self.changes_rows_alone = self.is_sgd and not self.states

    def bind(
        self, dtype: str, master: Bytes, slots: Sequence[Bytes], states: Mapping[str, Bytes]
    ) -> Tile:
        """As `parameters.Kernel.bind`."""
        kind = getattr(torch, dtype)
        tensors = [tensor_over(array, kind) for array in (master, *slots)]
        mine = {name: tensor_over(state, kind) for name, state in states.items()}
        return _Tile(self._kind, tensors[0], tensors[1:], mine)

    def bind_rows(self, dtype: str, columns: int, master: Bytes) -> Lookup:
        """As `parameters.Kernel.bind_rows`."""
        if not self.changes_rows_alone:
            raise ValueError(f"{self._kind} with {self.states} changes all rows of a table")
        return _Lookup(tensor_over(master, getattr(torch, dtype)).view(-1, columns))


def tensor_over(array: Bytes, dtype: torch.dtype) -> torch.Tensor:
    """A flat tensor over bytes; nothing is copied. Its storage has exactly these bytes."""
    if array.nbytes == 0:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer(array, dtype=dtype)


class _Tile:
    def __init__(
        self,
        kind: str,
        master: torch.Tensor,
        slots: list[torch.Tensor],
        states: dict[str, torch.Tensor],
    ) -> None:
        self._kernel = _KERNELS[kind]
        self._item = master.element_size()
        self._master = master
        self._slots = slots
        self._states = list(states.values())
        self._bytes = master.nbytes
        self._reduced = slots[0]  # what the last reduce() made, of its bytes
        self._divisor: torch.Tensor | None = None  # what it is still to be divided by

    def _part(self, whole: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        if (start, stop) == (0, self._bytes):
            return whole
        return whole[start // self._item : stop // self._item]

    def reduce(self, weights: Sequence[Weight], start: int, stop: int, keep: bool) -> None:
        parts = [
            tensor_over(where.memory, self._master.dtype)
            if isinstance(where, Lent)
            else self._part(self._slots[where], start, stop)
            for where, _ in weights
        ]
        first, weight = weights[0]
        self._divisor = None
        if len(weights) == 1 and weight == 1.0 and (first == 0 or not keep):
            self._reduced = parts[0]
            return
        target = self._slots[0] if keep else _scratch(self._master)
        self._reduced = target = self._part(target, start, stop)
        if self._master.dtype == torch.float32 and all(w == weight for _, w in weights[1:]):
            # The sum, divided at its end: one pass less, and the optimizer's kernel can divide.
            if len(parts) == 1:
                target.copy_(parts[0])
            else:
                torch.add(parts[0], parts[1], out=target)
            for part in parts[2:]:
                target.add_(part)
            divisor = _constant(1.0 / weight)
            if keep:
                target.div_(divisor)
            else:
                self._divisor = divisor
            return
        torch.mul(parts[0], weight, out=target)
        for part, (_, factor) in zip(parts[1:], weights[1:], strict=True):
            target.add_(part, alpha=factor)

    def square_sum(self, start: int, stop: int) -> float:
        a, b = start // self._item, stop // self._item
        norm = torch.linalg.vector_norm(self._slots[0][a:b], dtype=torch.float64)
        return float(norm * norm)

    def step(
        self, hyper: Hyper, count: int, start: int, stop: int, kept: bool, scale: float
    ) -> None:
        gradient = self._part(self._slots[0], start, stop) if kept else self._reduced
        divisor = None if kept else self._divisor
        master = self._part(self._master, start, stop)
        states = [self._part(state, start, stop) for state in self._states]
        if scale != 1.0:
            # Not in place: slot 0 stays what it is, and its padding free of what is not finite.
            scaled = _scratch(self._master)[: gradient.numel()]
            gradient = torch.mul(gradient, scale, out=scaled)
        on = _Operands(master, gradient, states, divisor, count)
        self._kernel(on, hyper)


# A union by marks looks at every row: only where not many more than that are in it.
_SPARSE = 64


class _Lookup:
    """Rows of a table under plain SGD."""

    def __init__(self, master: torch.Tensor) -> None:
        self._master = master
        self._rows: Rows = np.empty(0, np.int64)
        self._total = master[:0]

    def reduce(self, parts: Sequence[tuple[Rows, Bytes, float]]) -> Rows:
        columns, dtype = self._master.shape[1], self._master.dtype
        gradients = [tensor_over(values, dtype).view(-1, columns) for _, values, _ in parts]
        if len(parts) == 1:
            rows, _, weight = parts[0]
            self._total = gradients[0] * weight
        else:
            every = [rows for rows, _, _ in parts] or [np.empty(0, np.int64)]
            rows = _union(every, len(self._master))
            self._total = torch.zeros((len(rows), columns), dtype=dtype)
            for gradient, (mine, _, weight) in zip(gradients, parts, strict=True):
                _add_rows(self._total, np.searchsorted(rows, mine), gradient, weight)
        self._rows = rows
        return rows

    def square_sums(self) -> NDArray[np.float64]:
        norms = torch.linalg.vector_norm(self._total, dim=1, dtype=torch.float64)
        found: NDArray[np.float64] = norms.square_().numpy()
        return found

    def step(self, hyper: Hyper, scale: float) -> None:
        lr, momentum, _, decay, _, maximize = hyper
        if momentum or decay:
            raise ValueError("momentum and weight decay change all rows of a table")
        total = self._total if scale == 1.0 else self._total * scale
        _add_rows(self._master, self._rows, total, lr if maximize else -lr)


def _union(every: Sequence[Rows], height: int) -> Rows:
    """The rows that are in any, rising."""
    if height > _SPARSE * sum(map(len, every)):
        return np.unique(np.concatenate(every))
    found = np.zeros(height, np.bool_)
    for rows in every:
        found[rows] = True
    return np.flatnonzero(found)


def _add_rows(target: torch.Tensor, rows: Rows, values: torch.Tensor, factor: float) -> None:
    """Adds to rows, each once, of a contiguous tensor; index_add_ takes several times as long."""
    whole = target.view(-1).view(torch.uint8).numpy()
    items = whole.view(np.dtype((np.void, target.shape[1] * target.element_size())))
    taken = torch.from_numpy(items[rows].view(np.uint8)).view(target.dtype).view(values.shape)
    taken.add_(values, alpha=factor)
    items[rows] = taken.view(-1).view(torch.uint8).numpy().view(items.dtype)


class _Operands(NamedTuple):
    """What a kernel works on; the gradient is still to be divided by the divisor."""

    master: torch.Tensor
    gradient: torch.Tensor
    states: list[torch.Tensor]
    divisor: torch.Tensor | None
    step: int


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
        [_constant(on.step)],
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


@lru_cache(maxsize=64)
def _constant(value: float) -> torch.Tensor:
    """A float32 scalar, as kernels want step counts and divisors."""
    return torch.tensor(float(value), dtype=torch.float32)


class _Scratch(threading.local):
    def __init__(self) -> None:
        self.tensors: dict[torch.dtype, torch.Tensor] = {}


_local = _Scratch()


def _scratch(like: torch.Tensor) -> torch.Tensor:
    """Memory of this thread that every tile uses in turn, so that it stays in the cache."""
    found = _local.tensors.get(like.dtype)
    if found is None or found.numel() < like.numel():
        found = _local.tensors[like.dtype] = torch.empty_like(like)
    return found[: like.numel()]
