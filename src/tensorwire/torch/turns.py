"""Decides which slice a worker computes next: its own ones, in turn.

A capability may decide otherwise, as `taking` does for workers that were killed; its classes have
the methods of these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count, islice
from typing import Any

from tensorwire.membership.world import World


class SliceTurns:
    """The slices of one worker, which computes its own ones in each step.

    Attributes:
        grows: slices may be added at any batch.
    """

    grows = False

    def __init__(self, world: World) -> None:
        self._world, self._slices = world, world.my_slices

    @property
    def rank(self) -> int:
        """The rank of the worker for which this one acts: its own."""
        return self._world.rank

    @property
    def ranks(self) -> Sequence[int]:
        """The workers whose slices this one computes."""
        return (self._world.rank,)

    @property
    def slices(self) -> Sequence[int]:
        """The slices that this worker computes in turn."""
        return self._slices

    @property
    def several(self) -> bool:
        """True if this worker computes several slices of a step, or may come to it."""
        return self.grows or len(self.slices) > 1

    @property
    def steps(self) -> int:
        """Steps of the optimizers since the job began, where slices can be taken over; else 0."""
        return 0

    @property
    def default_slice(self) -> int | None:
        """The slice that a script means without a name; None: it has to name one."""
        return None if self.several else self.slices[0]

    def slice_of(self, turn: int) -> int:
        """Returns the slice that is being computed."""
        return self._slices[turn]

    def after(self, turn: int) -> int:
        """Returns the turn that follows a committed slice; 0 begins the next step."""
        return (turn + 1) % len(self.slices)

    def batches_per_step(self, accumulate: int) -> int:
        """Returns how many batches of a pass are counted for a step."""
        return accumulate * len(self.slices)

    def batches(
        self,
        has: Callable[[int], bool],
        samples: Callable[[int, int], int],
        first: int,
        together: int,
        begin: Callable[[], None],
        is_ahead: Callable[[int], bool],
    ) -> BatchOrder:
        """Returns the order in which a pass gives its batches.

        Args:
            has: tells whether the pass has a step of the data.
            samples: how many a step of the data has for a slice.
            first: steps of the data before it were made before a checkpoint was saved.
            together: how many steps of the data a slice accumulates.
            begin: called between two steps of the script, before a batch is chosen.
            is_ahead: tells whether a slice is committed for the next version already.
        """
        return BatchOrder(self, has, first, together, begin)

    def give(self, slice_index: int) -> None:
        """Notes that the loader gives a batch of a slice."""

    def check(self, what: str) -> None:
        """Raises RuntimeError while a step is not complete without a further batch."""

    def check_present(self, what: str) -> None:
        """Raises RuntimeError if this worker has left the job, and others have its slices."""

    def adopt(self) -> None:
        """Adds the slices that have become this worker's."""

    def begin_epoch(self, reasons: Callable[[], tuple[str, str]]) -> None:
        """Begins an epoch; `reasons`: why other workers could not take slices over, or join."""

    def stepped(self, obstacle: str) -> None:
        """Counts a version; `obstacle`: why no other worker could have computed its slices."""

    def saved(self) -> dict[str, Any]:
        """Returns the numbers for a process that goes on by this one's notes."""
        return {}

    def report(self) -> dict[str, Any]:
        """Returns facts for `Job.report`."""
        return {}

    def go_on(self, saved: Mapping[str, Any]) -> bool:
        """Takes the numbers of a predecessor; tells whether it was in this worker's place."""
        return True

    def begin_save(self, path: str) -> None:
        """Begins to write a checkpoint."""

    def end_save(self) -> None:
        """Ends the writing of a checkpoint."""

    def of_optimizer(self, own: Any) -> Any:
        """Returns the object that decides for one optimizer; `own` is its `SlicesInTurn`."""
        return own


class BatchOrder:
    """The order of the batches of a pass over a loader: slice by slice, as they accumulate.

    Attributes:
        began: the first step of the data that is still of use.
    """

    def __init__(
        self,
        turns: SliceTurns,
        has: Callable[[int], bool],
        first: int,
        together: int,
        begin: Callable[[], None] = lambda: None,
    ) -> None:
        self._turns, self._has, self._begin = turns, has, begin
        self._first, self._together = first, together
        self._given, self.began = 0, first
        self._coming = self._all()

    @property
    def given(self) -> int:
        """How many batches were chosen, as `SliceTurns.batches_per_step` counts them."""
        return self._given

    def _all(self) -> Iterator[tuple[int, int]]:
        for begin in count(self._first, self._together):
            if not self._has(begin + self._together - 1):
                return
            for index in self._turns.slices:
                for step in range(begin, begin + self._together):
                    yield step, index

    def next(self) -> tuple[int, int] | None:
        """Returns the step and slice of the next batch; None: the pass is over."""
        self._begin()
        if (found := next(self._coming, None)) is not None:
            self._given, self.began = self._given + 1, found[0] + 1 - self._together
        return found

    def rest(self) -> Iterator[tuple[int, int]]:
        """Yields the batches after the present one, if the script makes a step with each group."""
        return islice(self._all(), self._given, None)
