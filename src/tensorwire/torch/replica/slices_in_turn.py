"""Commits the slices of one optimizer's step that a worker computes in turn: its own ones.

`taking` has the case in which they may become more at each commit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tensorwire.parameters import Bytes, Hyper, Store

from ..modes import check_averages
from ..session import Session
from .arithmetic import Arithmetic
from .buffers import Buffers
from .reducer import Reducer

Present = tuple[bytes, tuple[int, ...]]
CommitSlice = Callable[[int, int, int, float, Present], None]
"""Commits a slice: its index, the operation, flags, its weight, the entries of tensors."""


class SlicesInTurn:
    """The slices of one optimizer's step in this worker.

    Args:
        session: of the worker.
        store: of the optimizer.
        reducer: has its gradients.
        buffers: of its model.
    """

    def __init__(self, session: Session, store: Store, reducer: Reducer, buffers: Buffers) -> None:
        self.session, self.store = session, store
        self.reducer, self.buffers = reducer, buffers
        self._first_hyper: tuple[Hyper, ...] = ()

    def begin(self, who: object) -> None:
        """Begins the commit of a slice that was computed, for a replica."""

    def check_hyper(self, arithmetic: Arithmetic) -> None:
        """Raises RuntimeError if slices have other hyper-parameters, or they do not fit tables."""
        arithmetic.check_tables()
        hyper = arithmetic.hyper() if self.session.turns.several else ()
        if (turn := self.reducer.turn) == 0:
            self._first_hyper = hyper
        elif hyper != self._first_hyper:
            raise RuntimeError(
                "the learning rate or another hyper-parameter was changed after slice "
                f"{turn} of those that this worker computes in turn. Step a scheduler once per "
                "epoch, or after the last slice of a step: 'if job.step_complete:'"
            )

    def end(
        self,
        flags: int,
        averages: dict[int, tuple[torch.Tensor, Bytes]] | None,
        spoiled: bool,
        commit: CommitSlice,
    ) -> bool:
        """Ends the commit of a slice; tells whether all slices of this worker are committed.

        Args:
            flags: of its commit.
            averages: as of `Reducer.push_edited`; None: the script has seen none.
            spoiled: see there.
            commit: commits a slice. It belongs to the replica, and is not kept: that would keep it.
        """
        complete = self.reducer.slice_committed()
        self.buffers.after_slice(self.reducer.turn or len(self.session.my_slices))
        return complete

    # ---- averages that a script reads before the step

    @property
    def keeps_averages(self) -> bool:
        """True if this worker sends averages that its script has edited."""
        return self.session.replica == 0

    def begin_average(self, arithmetic: Arithmetic) -> None:
        """Begins the commit of a slice that is to be averaged.

        Raises:
            RuntimeError: this worker cannot have averages.
        """

    def check_averages(self) -> None:
        """Raises RuntimeError if this worker cannot have averages."""
        check_averages(self.session.mode, len(self.session.my_slices))

    def end_average(self) -> bool:
        """Ends the commit of a slice that is averaged; tells whether the average is there."""
        return True

    def in_average(self, own: bytes) -> set[int]:
        """Returns the tensors for which any slice has a gradient, when all have read the average.

        Args:
            own: what the commit of this worker's slice says of them.
        """
        everywhere: Any = self.store.layout.trained
        have = self.session.sum([float(own[i]) for i in everywhere])
        return {i for i, workers in zip(everywhere, have, strict=True) if workers}

    # ---- values that are given

    def publish_rest(self, commit: CommitSlice) -> None:
        """Commits further slices that this worker owes to a version of given values."""
