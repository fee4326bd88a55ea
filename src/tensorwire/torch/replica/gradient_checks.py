"""Chooses which bytes of the gradients a step checks: all in the first, then in turn.

A check takes a checksum when a gradient leaves, and again at `step()`. It finds changes that torch
does not count: by way of `.grad.data`.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from tensorwire.memory import checksum

from ..devices import is_on_host
from ..views import flat_bytes
from .device_gradients import device_sum

TURNS = 32
"""The most steps until every byte was looked at."""
_LEAST_BYTES = 256 << 10  # of a step
_PIECE_BYTES = 64 << 10
_CALL_BYTES = 16 << 10  # a look at few bytes costs as much as this


class GradientChecks:
    """The bytes of one optimizer's gradients that each step checks.

    Args:
        sizes: bytes of every dense gradient, by index.
    """

    def __init__(self, sizes: Mapping[int, int]) -> None:
        self._all = {index: slice(0, size) for index, size in sizes.items()}
        cost = sum(size + _CALL_BYTES for size in sizes.values())
        count = max(min(cost // _LEAST_BYTES, TURNS), 1)
        self._turns: list[dict[int, slice]] = [{} for _ in range(count)]
        done = 0
        for index, size in sizes.items():
            for start in range(0, size, _PIECE_BYTES):
                stop = min(start + _PIECE_BYTES, size)
                turn = self._turns[min(done * count // cost, count - 1)]
                begin = turn[index].start if index in turn else start
                turn[index] = slice(begin, stop)
                done += stop - start
            done += _CALL_BYTES

    def at(self, step: int) -> Mapping[int, slice]:
        """Returns the bytes to check in a step, counted from 0, by the index of the gradient."""
        return self._all if step == 0 else self._turns[(step - 1) % len(self._turns)]


def sum_of(
    gradient: torch.Tensor, like: torch.Tensor, part: slice | None
) -> int | torch.Tensor | None:
    """Returns the checksum of bytes of a gradient; None if unchecked or in another order.

    On a device it is a tensor there, which may not be computed yet.
    """
    if part is None or gradient.layout != torch.strided or gradient.stride() != like.stride():
        return None
    if not is_on_host(gradient):
        return device_sum(gradient.detach(), part)
    return checksum(flat_bytes(gradient.detach())[part])


def gradient_changed(name: str) -> RuntimeError:
    """Returns the error for a gradient that a script changed after it had left."""
    return RuntimeError(
        f"the gradient of {name} was changed after it had left for the servers. To clip use "
        "DistributedOptimizer(max_norm=…) or tw.clip_grad_norm_, for loss scaling tw.GradScaler; "
        "to read or edit averaged gradients call opt.synchronize() first; what averages them by "
        "itself, as DistributedDataParallel or an all_reduce, is to be left out"
    )
