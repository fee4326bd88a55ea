"""Moves parameters into a store's memory, edits them there, and brings them back."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from tensorwire.parameters import ABSENT, Store

from ..views import tensor_at
from .device_parameters import DeviceParameters
from .edit_memory import EditMemory
from .mutation_guard import MutationGuard

# Small beside a large model, and few parts: each is a version that all workers wait for.
_PART_BYTES = 64 << 20

Formats = Mapping[int, tuple[Any, ...]]
"""The dtype, shape, strides and device of parameters, by their index."""


class Residency:
    """The parameters of one optimizer in one store.

    Args:
        store: has them.
        parameters: by their index in the store.
        names: of the parameters by their id.
        guard: of these parameters.
        on_device: the parameters that are on a device; None: all are on the host.

    Attributes:
        parameters: as given; may lose some to another optimizer.
        guard, on_device: as given.
    """

    def __init__(
        self,
        store: Store,
        parameters: dict[int, nn.Parameter],
        names: Mapping[int, str],
        guard: MutationGuard,
        on_device: DeviceParameters | None,
    ) -> None:
        self.parameters = parameters
        self.guard = guard
        self.on_device = on_device
        self._store = store
        self._names = names

    def adopt(self, part: range | None = None) -> None:
        """Makes the store's memory the parameters': all, or the first time a part."""
        for index, parameter in self.parameters.items():
            if (part is None or index in part) and not self._is_on_device(index):
                parameter.data = tensor_at(self._store.value(index), parameter)
        if self.on_device is not None:
            self.on_device.adopt(part)
        if part is not None:
            _give_back_freed()

    def _is_on_device(self, index: int) -> bool:
        return self.on_device is not None and index in self.on_device

    def settle(self) -> None:
        """Waits until copies from the store are complete, before a commit changes it."""
        if self.on_device is not None:
            self.on_device.settle()

    def refresh(self, present: bytes) -> None:
        """Copies the store's new version to the places where its memory is not seen.

        Autograd is told of changed parameters, so that it refuses a graph that was made before the
        step, as after any other optimizer. It is not told of a parameter for which only other
        workers have a gradient.

        Args:
            present: what this worker's commit says of each tensor; empty if no step was applied.
        """
        if self.on_device is not None:
            self.on_device.refresh()
        trained = {i: p for i, p in self.parameters.items() if present and p.requires_grad}
        changed = [i for i in trained if present[i] != ABSENT]
        self.guard.expect(changed)
        torch.autograd.graph.increment_version([trained[i] for i in changed])
        self.guard.settle()

    def parts(self) -> list[range]:
        """Returns all tensors of the store, in parts of some size; the same in all workers."""
        parts, first, size = [], 0, 0
        tensors = self._store.layout.spec.tensors
        for index, tensor in enumerate(tensors):
            if size and size + tensor.size_bytes > _PART_BYTES:
                parts.append(range(first, index))
                first, size = index, 0
            size += tensor.size_bytes
        return [*parts, range(first, len(tensors))]

    def release(self, index: int) -> None:
        """Forgets a parameter that does not change here and is another optimizer's now."""
        self.parameters.pop(index, None)
        if self.on_device is not None:
            self.on_device.release(index)

    def close(self) -> None:
        """Ends all copies before the store is closed; parameters stay where they are."""
        if self.on_device is not None:
            self.on_device.close()

    def make_private(self) -> None:
        """Lets the parameters be copies in this process's own memory."""
        self.settle()  # another stream may still copy what this one reads
        for parameter in self.parameters.values():
            parameter.data = parameter.data.clone(memory_format=torch.preserve_format)

    def find(self, index: int) -> tuple[bool, bool, str]:
        """Returns where a parameter is: `inside`, `held` and `slow` of `Found`."""
        slow = self.on_device.locks.why_not if self.on_device is not None else ""
        return self._is_inside(index), index in self.parameters, slow

    def _is_inside(self, index: int) -> bool:
        """Tells whether the parameter lies in the store's memory now, or its copy on a device."""
        if index not in self.parameters:
            return False
        if self.on_device is not None and index in self.on_device:
            return bool(self.parameters[index].data_ptr() == self.on_device.address(index))
        value = self._store.value(index)
        return not value.nbytes or self.parameters[index].data_ptr() == value.ctypes.data

    def formats(self) -> Formats:
        """Returns the formats that the parameters have now."""
        return {index: _format_of(parameter) for index, parameter in self.parameters.items()}

    def begin_edit(self, memory: EditMemory) -> None:
        """Makes parameters copies in `memory` until the next `adopt`."""
        memory.lend(self._store, self.parameters)

    @contextlib.contextmanager
    def averaged(self, memory: EditMemory, averages: Mapping[int, torch.Tensor]) -> Iterator[None]:
        """Makes parameters copies in `memory` inside, with the averages of their values."""
        self.begin_edit(memory)
        try:
            with torch.no_grad():
                for index, average in averages.items():
                    if index in self.parameters:
                        self.parameters[index].copy_(average)
                yield
        finally:
            self.adopt()
            self.guard.remember()

    def check_formats(self, before: Formats) -> None:
        """Raises RuntimeError if dtype, shape, memory format or device of one was changed."""
        for index, parameter in self.parameters.items():
            if _format_of(parameter) != before[index]:
                raise RuntimeError(
                    f"dtype, shape, memory format or device of parameter "
                    f"{self._names[id(parameter)]!r} was changed in edit(); change it before "
                    "DistributedOptimizer. The parameters are as before"
                )

    def take_format(self, before: Formats) -> None:
        """Gives the parameters these formats again, with any values."""
        for index, parameter in self.parameters.items():
            dtype, shape, stride, device = before[index]
            parameter.data = torch.empty_strided(shape, stride, dtype=dtype, device=device)


def _give_back_freed() -> None:
    """Gives freed memory back to the system, where the C library would keep it.

    glibc keeps blocks below 32 MiB, and so most parameters of a model, for later requests.
    """
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):  # glibc's
        trim(0)


def _format_of(parameter: torch.Tensor) -> tuple[Any, ...]:
    return parameter.dtype, tuple(parameter.shape), parameter.stride(), parameter.device
