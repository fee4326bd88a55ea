"""Joins the parts of taking slices over into the class that a `Session` uses for its turns."""

from __future__ import annotations

from collections.abc import Callable

from ..replica.slices_in_turn import SlicesInTurn
from .batches import BatchTurns
from .of_optimizer import TakenSlices
from .slices import TakenTurns


class Taking(TakenTurns):
    """The slices of one worker, in a job that does not replace killed workers."""

    def batches(
        self,
        has: Callable[[int], bool],
        samples: Callable[[int, int], int],
        first: int,
        together: int,
        begin: Callable[[], None],
        is_ahead: Callable[[int], bool],
    ) -> BatchTurns:
        """See `SliceTurns`."""
        return BatchTurns(self, samples, has, first, together, is_ahead, begin)

    def of_optimizer(self, own: SlicesInTurn) -> TakenSlices:
        """See `SliceTurns`."""
        return TakenSlices(self, own)
