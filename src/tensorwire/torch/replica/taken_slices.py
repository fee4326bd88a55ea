"""Computes in turn the slices of a step that one worker has, also of dead workers.

Their number is known when one is committed: `step()` then looks which slices nobody has committed.
A slice that needs no batch is committed at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tensorwire.parameters import APPLY, PUBLISH, Bytes, Store

from ..session import Session
from .buffers import Buffers
from .reducer import Reducer

Present = tuple[bytes, tuple[int, ...]]
Commit = Callable[[int, int, int, float, Present], None]
"""Commits a slice: its index, the operation, flags, its weight, the entries of tensors."""


class TakenSlices:
    """The slices of one optimizer's store, used only where slices can be taken over.

    Args:
        session: of the worker.
        store: of the optimizer.
        reducer: has its gradients.
        buffers: of its model.
    """

    def __init__(self, session: Session, store: Store, reducer: Reducer, buffers: Buffers) -> None:
        self._session, self._store = session, store
        self._reducer, self._buffers = reducer, buffers

    def begin(self, who: object) -> None:
        """Begins the commit of a slice that was computed.

        Raises:
            RuntimeError: see `Taking.begin_commit`.
        """
        if (taking := self._session.taking) is not None:
            taking.begin_commit(who, self._session.batches)

    def is_complete(
        self,
        flags: int,
        averages: dict[int, tuple[torch.Tensor, Bytes]] | None,
        spoiled: bool,
        commit: Commit,
    ) -> bool:
        """Ends the commit of a slice; tells whether all slices of this worker are committed.

        Args:
            flags: of its commit.
            averages: as of `Reducer.push_edited`; None: the script has seen none.
            spoiled: see there.
            commit: commits a slice whose gradients are in the average.
        """
        reducer = self._reducer
        if self._session.taking is None:
            complete = reducer.slice_committed()
            self._buffers.after_slice(reducer.turn or len(self._session.my_slices))
            return complete

        def again(slice_index: int) -> None:
            if slice_index == 0 and averages is not None:
                self._reducer.push_edited(averages, spoiled)
            last = self._store.last_commit(slice_index)
            present = last.present, tuple(last.blocks)
            commit(slice_index, APPLY, flags, last.weight, present)

        due = self._store.due(again if reducer.sealed else None)
        self._next(list(due))
        return not due

    def is_reduced(self) -> bool:
        """Ends the commit of a slice to be averaged; tells whether the average is there."""
        assert self._session.taking is not None
        due = self._store.due()
        if due:
            self._next(list(due))
            self._reducer.reduced = True
        self._session.taking.due = tuple(due)
        return not due

    def _next(self, due: list[int]) -> None:
        """Begins the next slice; the committed gradients and buffers are the servers'."""
        assert self._session.taking is not None
        samples = self._reducer.samples.samples()
        self._reducer.slice_committed()
        self._session.taking.committed(due, samples)
        if due:
            self._buffers.begin_again()
            self._reducer.leave_slots()
        else:
            self._reducer.turn = 0

    def publish_nothing(self, commit: Commit) -> Callable[[int], None]:
        """Returns a function that commits a dead worker's slice to a version of given values."""

        def again(slice_index: int) -> None:
            if slice_index == 0:
                raise RuntimeError(
                    "worker 0 was killed inside edit(), load() or another call in which its values "
                    "become everybody's, and nobody else has them. The job can go on from its last "
                    "checkpoint: job.load"
                )
            commit(slice_index, PUBLISH, 0, 1.0, (bytes(len(self._store.layout.places)), ()))

        return again

    def in_average(self, own: bytes) -> set[int]:
        """Returns the tensors for which a slice has a gradient in the average, which all have read.

        Args:
            own: what the commit of this worker's slice says of them.
        """
        everywhere: Any = self._store.layout.trained
        if self._session.taking is None:
            have = self._session.sum([float(own[i]) for i in everywhere])
            return {i for i, workers in zip(everywhere, have, strict=True) if workers}
        # Not by what workers tell each other, as one may be gone.
        commits = [self._store.last_commit(i) for i in range(self._session.slices)]
        self._session.barrier()
        return {i for i in everywhere if any(each.present[i] for each in commits)}
