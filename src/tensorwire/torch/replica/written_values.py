"""Makes parameters that were written during a pause a version, at all workers.

The values lie at the servers, so any worker may commit slice 0, which says which values there are:
also one that computes it for a killed worker. docs/files.md has the user's side.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tensorwire.parameters import PUBLISH, PUSHED, WRITTEN, Store

from .buffers import Buffers
from .optimizer_state import OptimizerState
from .residency import Residency

Commit = Callable[[int, int, int, float, tuple[bytes, tuple[int, ...]]], None]
"""Commits a slice: its index, the operation, flags, its weight, the entries of tensors."""


class WrittenValues:
    """The values that were written to one optimizer's store during a pause.

    Args:
        store: of the optimizer.
        residency: of its parameters.
        buffers: of its model.
        state: of the optimizer.
        speaks: the tensors of which this worker says whether they are written; of a split model
            each belongs to one process.
    """

    def __init__(
        self,
        store: Store,
        residency: Residency,
        buffers: Buffers,
        state: OptimizerState,
        speaks: Sequence[int],
    ) -> None:
        self._store, self._residency, self._buffers = store, residency, buffers
        self._state, self._speaks = state, speaks

    def take(self, commit: Commit) -> None:
        """Makes a version of them, after a result that was `edited`; all workers do.

        Args:
            commit: commits a slice.
        """
        store = self._store
        self._state.average_frozen()
        written, nothing = store.written(), bytes(len(store.layout.spec.tensors))
        present = bytearray(nothing)
        for index in self._speaks:
            present[index] = PUSHED if written[index] else 0

        def commit_slice(slice_index: int) -> None:
            # Only slice 0 says what there is.
            says = bytes(present) if slice_index == 0 else nothing
            commit(slice_index, PUBLISH, WRITTEN, 1.0, (says, ()))

        for slice_index in store.missing():
            commit_slice(slice_index)
        store.due(commit_slice)
        store.wait()
        self._residency.adopt()
        self._buffers.take(store)
        self._residency.guard.remember()
