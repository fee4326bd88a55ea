"""Commits the slices of one optimizer's step that one worker has, also of dead workers.

Their number is known when one is committed: `step()` then looks for slices without a commit.
A slice that needs no batch is committed at once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tensorwire.parameters import APPLY, PUBLISH, Bytes

from ..modes import check_averages
from ..replica.arithmetic import Arithmetic
from ..replica.slices_in_turn import CommitSlice, SlicesInTurn
from .slices import TakenTurns


class TakenSlices(SlicesInTurn):
    """See `SlicesInTurn`, in whose place it is.

    Args:
        turns: of the worker.
        own: the object that it replaces.
    """

    def __init__(self, turns: TakenTurns, own: SlicesInTurn) -> None:
        super().__init__(own.session, own.store, own.reducer, own.buffers)
        self._turns = turns

    def begin(self, who: object) -> None:
        """See `SlicesInTurn`.

        Raises:
            RuntimeError: see `TakenTurns.begin_commit`.
        """
        self._turns.begin_commit(who, self.session.batches)

    def end(
        self,
        flags: int,
        averages: dict[int, tuple[torch.Tensor, Bytes]] | None,
        spoiled: bool,
        commit: CommitSlice,
    ) -> bool:
        """See `SlicesInTurn`. A slice whose gradients are in the average is committed at once."""

        def again(slice_index: int) -> None:
            if slice_index == 0 and averages is not None:
                self.reducer.push_edited(averages, spoiled)
            last = self.store.last_commit(slice_index)
            commit(slice_index, APPLY, flags, last.weight, (last.present, tuple(last.blocks)))

        due = self.store.due(again if self.reducer.sealed else None)
        self._next(due)
        return not due

    @property
    def keeps_averages(self) -> bool:
        """True: this worker may have to send edited averages for another one."""
        return True

    def check_averages(self) -> None:
        """See `SlicesInTurn`; slices are averaged one after the other."""
        check_averages(self.session.mode, 1)

    def begin_average(self, arithmetic: Arithmetic) -> None:
        """Checks and pushes now what a worker that takes this slice over would not have."""
        self.check_hyper(arithmetic)
        self.buffers.push(self.store, self.reducer.slice_index)

    def end_average(self) -> bool:
        """See `SlicesInTurn`."""
        due = self.store.due()
        if due:
            self._next(due)
            self.reducer.reduced = True
        self._turns.due = tuple(due)
        return not due

    def _next(self, due: Sequence[int]) -> None:
        """Begins the next slice; the committed gradients and buffers are the servers'."""
        samples = self.reducer.samples.samples()
        self.reducer.slice_committed()
        self._turns.committed(due, samples)
        if due:
            self.buffers.begin_again()
            self.reducer.leave_slots()
        else:
            self.reducer.turn = 0

    def in_average(self, own: bytes) -> set[int]:
        """See `SlicesInTurn`. The commits at the servers tell, since a worker may be gone."""
        commits = [self.store.last_commit(i) for i in range(self.session.slices)]
        self.session.barrier()
        return {i for i in self.store.layout.trained if any(each.present[i] for each in commits)}

    def publish_rest(self, commit: CommitSlice) -> None:
        """Commits slices of dead workers, which have nothing to give."""

        def again(slice_index: int) -> None:
            if slice_index == 0:
                raise RuntimeError(
                    "worker 0 was killed inside edit(), load() or another call in which its values "
                    "become everybody's, and nobody else has them. The job can go on from its last "
                    "checkpoint: job.load"
                )
            present = bytes(len(self.store.layout.places)), ()
            commit(slice_index, PUBLISH, 0, 1.0, present)

        self.store.due(again)
