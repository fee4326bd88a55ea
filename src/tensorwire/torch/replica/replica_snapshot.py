"""Reads an optimizer's parameters and state of one version, for a checkpoint."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from ..views import tensor_at
from .replica import Replica


class ReplicaSnapshot:
    """A snapshot of the present version; made by one worker, between steps.

    Raises:
        BusyError, MemoryError, RuntimeError, PeerLostError: see `Store.snapshot`.
    """

    def __init__(self, replica: Replica) -> None:
        self._replica, layout = replica, replica.store.layout
        self._snapshot = replica.store.snapshot()
        starts = {place.start: place for place in layout.places if place.end > place.start}
        # The parameters that lie in the store's memory, by their addresses.
        self._resident = {
            found.parameter.data_ptr(): (starts[found.offset], found.parameter)
            for found in replica.tensors()
            if found.inside and found.parameter.numel()
        }
        self._taken: set[int] = set()  # addresses

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Makes `state_dict()` of the optimizer, and of a split model, read this version inside.

        The tensors may lie in its memory, and be incomplete before `fetch`.
        """
        state = self._replica.state
        state.snapshot = self._snapshot
        try:
            yield
        finally:
            state.snapshot = None

    def take(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Returns a tensor of a `state_dict()` in memory of the snapshot; None if it is another's.

        No two of them share memory, which some formats of files do not have; None for the second.
        """
        address = tensor.data_ptr()
        if self._snapshot.has(address) and address not in self._taken:
            self._taken.add(address)
            return tensor.detach()
        if (found := self._resident.get(address)) is not None:
            place, parameter = found
            if (tensor.dtype, tensor.shape, tensor.stride()) == (
                parameter.dtype, parameter.shape, parameter.stride(),
            ):  # fmt: skip
                part = self._snapshot.value(place)
                if part.ctypes.data not in self._taken:
                    self._taken.add(part.ctypes.data)
                    return tensor_at(part, tensor)
        return None

    def fetch(self) -> None:
        """Completes the tensors. Any thread."""
        self._snapshot.fetch()

    def release(self) -> None:
        """Releases the tensors, which are not used any more. Any thread; idempotent."""
        self._resident.clear()
        self._snapshot.release()
