"""Reduces a cell's gradients; subclasses apply an optimizer to the cell."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from functools import lru_cache

import torch

from tensorwire.parameters import Bytes, Hyper, Lent, Scalars, ShareDevice, Weight

from .share_device import TorchDevice


def tensor_over(array: Bytes | torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns a flat tensor over bytes, not a copy; on the host its storage has no other bytes."""
    if isinstance(array, torch.Tensor):
        return array.view(dtype)
    if array.nbytes == 0:
        return torch.empty(0, dtype=dtype, device="cpu")
    return torch.frombuffer(array, dtype=dtype)


class Averaging:
    """The common part of all kernels.

    Attributes:
        changes_kept: as of `parameters.Kernel`.
    """

    changes_kept = False

    def device(self, name: str) -> ShareDevice:
        """Returns a device, see `parameters.Kernel.device`."""
        return TorchDevice(name)

    def average(self, dtype: str, target: Bytes, source: Bytes, weight: float) -> None:
        """Averages values, see `parameters.Kernel.average`; the bits are the same as of `lerp`."""
        kind = getattr(torch, dtype)
        average, values = tensor_over(target, kind), tensor_over(source, kind)
        if weight == 1.0:
            average.copy_(values)
        else:
            average.lerp_(values, weight)


class CellTile:
    """See `parameters.Tile`; `step` is a subclass's.

    Args:
        dtype: of the parameters, by its name.
        master: the cell's parameters.
        slots: the gradients of each slice.
        states: the arrays of the optimizer's state.
        kept: where a reduced gradient stays; it may be the first slot.
    """

    def __init__(
        self,
        dtype: str,
        master: Bytes,
        slots: Sequence[Bytes],
        states: Mapping[str, Bytes],
        kept: Bytes,
    ) -> None:
        kind = getattr(torch, dtype)
        self._master = tensor_over(master, kind)
        self._item = self._master.element_size()
        self._slots = [tensor_over(slot, kind) for slot in slots]
        self._states = {name: tensor_over(state, kind) for name, state in states.items()}
        self._kept = tensor_over(kept, kind)
        self._kept_in_slot = self._kept.data_ptr() == self._slots[0].data_ptr()
        self._bytes = self._master.nbytes
        self._size = kind, self._master.device, self._master.numel()
        self._on_device = self._master.device.type != "cpu"
        self._reduced = self._slots[0]  # what the last reduce() made, of its bytes
        self._divisor: torch.Tensor | None = None  # what it is still to be divided by
        self._in_scratch = False  # it is in no slot

    def _part(self, whole: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        if (start, stop) == (0, self._bytes):
            return whole
        return whole[start // self._item : stop // self._item]

    def reduce(self, weights: Sequence[Weight], start: int, stop: int, keep: bool) -> None:
        """See `parameters.Tile.reduce`."""
        parts = [
            tensor_over(where.memory, self._master.dtype)
            if isinstance(where, Lent)
            else self._part(self._slots[where], start, stop)
            for where, _ in weights
        ]
        if self._on_device:
            parts = [part.to(self._master.device) for part in parts]  # what was pushed is not there
        first, weight = weights[0]
        self._divisor, self._in_scratch = None, False
        there = not keep or (first == 0 and self._kept_in_slot)
        if len(weights) == 1 and weight == 1.0 and there:
            self._reduced = parts[0]
            return
        target = self._kept if keep else scratch(*self._size)
        self._in_scratch = not keep
        self._reduced = target = self._part(target, start, stop)
        if self._master.dtype == torch.float32 and all(w == weight for _, w in weights[1:]):
            # The sum, divided at its end: one pass less, and the optimizer's kernel can divide.
            if len(parts) == 1:
                target.copy_(parts[0])
            else:
                torch.add(parts[0], parts[1], out=target)
            for part in parts[2:]:
                target.add_(part)
            divisor = constant(1.0 / weight, self._master.device)
            if keep:
                target.div_(divisor)
            else:
                self._divisor = divisor
            return
        torch.mul(parts[0], weight, out=target)
        for part, (_, factor) in zip(parts[1:], weights[1:], strict=True):
            target.add_(part, alpha=factor)

    def square_sum(self, start: int, stop: int) -> float:
        """See `parameters.Tile.square_sum`."""
        a, b = start // self._item, stop // self._item
        norm = torch.linalg.vector_norm(self._kept[a:b], dtype=torch.float64)
        return float(norm * norm)

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
        raise NotImplementedError

    def _gradient(self, start: int, stop: int, kept: bool, scale: float) -> torch.Tensor:
        """Returns the reduced gradient, scaled; still to be divided by the divisor unless kept."""
        gradient = self._part(self._kept, start, stop) if kept else self._reduced
        if scale == 1.0:
            return gradient
        # Not in place: what is kept stays what it is, its padding free of what is not finite.
        return torch.mul(gradient, scale, out=scratch(*self._size)[: gradient.numel()])


_HOST = torch.device("cpu")


@lru_cache(maxsize=64)
def constant(value: float, device: torch.device = _HOST) -> torch.Tensor:
    """Returns a float32 scalar, as kernels want step counts and divisors."""
    return torch.tensor(float(value), dtype=torch.float32, device=device)


class _Scratch(threading.local):
    def __init__(self) -> None:
        self.wholes: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}
        self.parts: dict[tuple[torch.dtype, torch.device, int], torch.Tensor] = {}


_local = _Scratch()


def scratch(dtype: torch.dtype, device: torch.device, count: int) -> torch.Tensor:
    """Returns memory of this thread that every tile uses in turn, so that it stays in the cache."""
    part = _local.parts.get((dtype, device, count))
    if part is None:
        whole = _local.wholes.get((dtype, device))
        if whole is None or whole.numel() < count:
            _local.parts.clear()  # they keep the memory of the whole before
            whole = _local.wholes[dtype, device] = torch.empty(count, dtype=dtype, device=device)
        part = _local.parts[dtype, device, count] = whole[:count]
    return part
