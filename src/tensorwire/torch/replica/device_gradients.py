"""Copies each gradient off a device during backward, as soon as it is there.

It is copied into the memory that its server reads, on the device or the host, if that is mapped
here. Else it is copied into registered memory of the host, from which it is sent.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from tensorwire.parameters import Bytes, Place

from ..devices import CopyStream, PageLocks, host_tensor, locked_memory

_TOGETHER_BYTES = 8 << 20


class _Target(NamedTuple):
    """Memory for one gradient.

    Attributes:
        memory: the host's; empty where servers have their shares on the device.
        tensors: that memory in the parameter's form; or if it is cut between servers, of each the
            bytes there.
        shared: a server reads it there.
        strides: of the parameter.
    """

    memory: Bytes
    tensors: Sequence[torch.Tensor]
    shared: bool
    strides: tuple[int, ...]

    def leaving(self, gradient: torch.Tensor) -> torch.Tensor:
        """Returns a gradient, or where it is cut and lies otherwise than the parameter, a copy."""
        if len(self.tensors) == 1 or gradient.stride() == self.strides:
            return gradient
        size, device = gradient.size(), gradient.device
        made = torch.empty_strided(size, self.strides, dtype=gradient.dtype, device=device)
        return made.copy_(gradient)

    def copies(self, gradient: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Returns targets and sources of the copies that bring what is `leaving` there."""
        if len(self.tensors) == 1:
            return [(self.tensors[0], gradient)]
        flat = gradient.as_strided((gradient.numel(),), (1,), gradient.storage_offset())
        sizes = [each.nbytes for each in self.tensors]
        return list(zip(self.tensors, flat.view(torch.uint8).split(sizes), strict=True))


class GradientOnHost(NamedTuple):
    """A gradient whose copy is complete.

    Attributes:
        tensor: its index in the store.
        memory: where it is on the host; empty if it is on the device of its server's share.
        shared: its server reads it there, so it need not be sent.
    """

    tensor: int
    memory: Bytes
    shared: bool


class DeviceGradients:
    """The gradients of one optimizer and slice. One thread at a time; backward may be another.

    Args:
        device: of the parameters.
        parameters: those on the device that have dense gradients, by index.
        places: for each tensor of the store where its gradient is best, or why there is no place.

    Attributes:
        locks: of the memory to which gradients are copied.
    """

    def __init__(
        self,
        device: torch.device,
        parameters: Mapping[int, nn.Parameter],
        places: Sequence[Place | str],
    ) -> None:
        self.locks = PageLocks(device)
        self._stream = CopyStream(device)
        self._targets: dict[int, _Target] = {}
        self._waiting: dict[int, torch.Tensor] = {}  # by index, for a copy of several together
        self._waiting_bytes = 0
        self._behind = 0  # the stream that makes these
        self._under_way: deque[tuple[Any, list[int]]] = deque()  # events, each after some gradients
        self._newest: dict[int, Any] = {}  # the event of the last copy, by index
        self._compared: list[tuple[int, torch.Tensor, torch.Tensor]] = []
        given = {i: p for i in parameters if isinstance(p := places[i], Place)}
        own = {i: parameters[i].nbytes for i in parameters if i not in given}
        memory = locked_memory(sum(-(-each // 64) * 64 for each in own.values()), self.locks)
        self.locks.lock([place.memory for place in given.values()])
        start = 0
        for index, parameter in parameters.items():
            if index in given:
                self._add(index, parameter, given[index])
            else:
                self._add(index, parameter, Place(memory[start : start + own[index]], False))
                start += -(-own[index] // 64) * 64

    def _add(self, index: int, parameter: nn.Parameter, place: Place) -> None:
        tensors: Sequence[torch.Tensor] = place.on_device or [host_tensor(place.memory)]
        if len(tensors) == 1:
            bare = tensors[0].view(parameter.dtype)
            tensors = [bare.as_strided(parameter.size(), parameter.stride())]
        self._targets[index] = _Target(place.memory, tensors, place.shared, parameter.stride())

    def __contains__(self, index: int) -> bool:
        return index in self._targets

    def is_shared(self, index: int) -> bool:
        """Tells whether a gradient is copied to where its server reads it."""
        return self._targets[index].shared

    def is_within(self, index: int) -> bool:
        """Tells whether a gradient is copied to where its server has it on the same device."""
        target = self._targets[index]
        return target.shared and not target.memory.nbytes

    def leave(self, index: int, gradient: torch.Tensor) -> None:
        """Sends a gradient that is complete in the current stream, when the device gets there."""
        if not gradient.numel():
            return
        stream = self._stream.current()
        if self._waiting and (stream != self._behind or index in self._waiting):
            self._copy()
        self._behind = stream
        self._waiting[index] = self._targets[index].leaving(gradient.detach())
        self._waiting_bytes += gradient.nbytes
        if self._waiting_bytes >= _TOGETHER_BYTES:
            self._copy()

    def _copy(self) -> None:
        """Copies waiting gradients, some at a time, as calls for a stream take long."""
        waiting, self._waiting, self._waiting_bytes = self._waiting, {}, 0
        copies = [
            pair for index, each in waiting.items() for pair in self._targets[index].copies(each)
        ]
        event = self._stream.to_host(copies, self._behind)
        self._under_way.append((event, list(waiting)))
        self._newest.update(dict.fromkeys(waiting, event))

    def start(self) -> None:
        """Begins the copies that wait for others to be made with them."""
        if self._waiting:
            self._copy()

    def arrive(self) -> Iterator[GradientOnHost]:
        """Waits for each gradient that has left; yields it, in the order of the copies."""
        self.start()
        while self._under_way:
            event, indices = self._under_way[0]
            event.synchronize()
            for index in indices:
                target = self._targets[index]
                if self._newest[index] is event:  # and not one that comes over it
                    yield GradientOnHost(index, target.memory, target.shared)
            self._under_way.popleft()  # not before: an interrupt may come anywhere

    def withdraw(self) -> None:
        """Withdraws the gradients that were sent; the memory may be used again."""
        self._waiting.clear()
        self._waiting_bytes = 0
        while self._under_way:
            self._under_way.popleft()[0].synchronize()
        self._newest.clear()
        self._compared.clear()

    # ---- changes that autograd does not see

    def compare(self, index: int, before: torch.Tensor, now: torch.Tensor) -> None:
        """Compares two sums of a gradient on the device, which should be equal; see `changed`."""
        self._compared.append((index, before, now))

    def changed(self) -> int | None:
        """Returns the first gradient whose sums differ; waits for the device."""
        compared, self._compared = self._compared, []
        if not compared:
            return None
        befores, nows = (torch.stack([each[i] for each in compared]) for i in (1, 2))
        differ = (befores != nows).tolist()
        return next((c[0] for c, changed in zip(compared, differ, strict=True) if changed), None)

    def close(self) -> None:
        """Waits for all copies, and unlocks the memory before it is freed."""
        self.withdraw()
        self.locks.release()
        self._targets.clear()


def device_sum(gradient: torch.Tensor, part: slice) -> torch.Tensor:
    """Returns a sum over bytes of a gradient, computed by its device; it changes if they do.

    Args:
        gradient: dense; its elements fill one piece of memory.
        part: of its bytes.
    """
    flat = gradient.as_strided((gradient.numel(),), (1,), gradient.storage_offset())
    data = flat.view(torch.uint8)[part]
    words = data[: data.numel() // 4 * 4].view(torch.int32)
    # Every second one twice, so that most of what only changes places is found too.
    return words.sum() + words[::2].sum() + data[words.numel() * 4 :].sum()
