"""Copies many small buffers of a device to the host and back in one transfer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..devices import CopyStream, PageLocks, device_of, host_tensor, is_on_host, locked_memory

_ALIGN_BYTES = 64


class PackedBuffers:
    """The buffers of one model, all on one device. One thread at a time.

    Args:
        tensors: the buffers; later ones have the same shapes and dtypes.
        device: where they are.

    Attributes:
        leaving: contiguous copies on the host, in the same order; `pull` fills them.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], device: torch.device) -> None:
        self._stream = CopyStream(device)
        self._arrived: Any = None  # an event after the last copy to the device
        sizes = [each.nbytes for each in tensors]
        starts = [0]
        for size in sizes:
            starts.append(starts[-1] + -(-size // _ALIGN_BYTES) * _ALIGN_BYTES)
        self._locks = PageLocks(device)  # as long as the memory: a step has only these
        # One memory for each direction: neither waits for the other.
        self._memory = [locked_memory(starts[-1], self._locks) for _ in range(2)]
        hosts = [host_tensor(each) for each in self._memory]
        devices = [torch.empty(starts[-1], dtype=torch.uint8, device=device) for _ in range(2)]
        self._hosts, self._devices = hosts, devices

        def views(flat: torch.Tensor) -> list[torch.Tensor]:
            return [
                flat[start : start + size].view(like.dtype).view(like.shape)
                for start, size, like in zip(starts, sizes, tensors, strict=False)
            ]

        self.leaving, self._entering = views(hosts[0]), views(hosts[1])
        self._there, self._back = views(devices[0]), views(devices[1])

    def pull(self, tensors: Sequence[torch.Tensor]) -> None:
        """Fills `leaving` with the buffers, as the current stream leaves them; waits for it."""
        with torch.no_grad():
            torch._foreach_copy_(self._there, list(tensors))
        self._stream.to_host([(self._hosts[0], self._devices[0])]).synchronize()

    def push(self, values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Copies values on the host to the device, ahead of later work of the current stream.

        Returns:
            The copies; valid for what is given to the stream before the next call.
        """
        if self._arrived is not None:
            self._arrived.synchronize()
        with torch.no_grad():
            torch._foreach_copy_(self._entering, list(values))
        self._devices[1].copy_(self._hosts[1], non_blocking=True)
        self._arrived = self._stream.mark()
        return self._back

    def close(self) -> None:
        """Unlocks the pages of its memory, when no copy uses them."""
        if self._arrived is not None:
            self._arrived.synchronize()
        self._locks.release()


def packed(tensors: Sequence[torch.Tensor]) -> PackedBuffers | None:
    """Returns a model's buffers packed, if all are on one device; None: they are copied singly."""
    if not tensors or any(is_on_host(each) for each in tensors):
        return None
    if len({each.device for each in tensors}) > 1:
        return None
    device = device_of(tensors)
    assert device is not None
    return PackedBuffers(tensors, device)
