"""Gives the batches of slices that a worker computes for others, as they become due."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain, count

from ..turns import BatchOrder
from .slices import TakenTurns


class BatchTurns(BatchOrder):
    """The order of the batches of a pass over a loader, by the steps that the script makes.

    Args:
        taking: of the worker.
        samples: how many a step of the data has for a slice.
        is_there: tells whether the pass has a step of the data.
        first: steps of the data before it were made before a checkpoint was saved.
        together: how many of them a slice accumulates, as far as the loader was told.
        is_ahead: tells whether a slice is committed for the next version already.
        begin_step: called before the first batch of a step is chosen.

    Attributes:
        began: the first step of the data of the present version; earlier ones are over.
    """

    def __init__(
        self,
        taking: TakenTurns,
        samples: Callable[[int, int], int],
        is_there: Callable[[int], bool],
        first: int,
        together: int,
        is_ahead: Callable[[int], bool],
        begin_step: Callable[[], None] = lambda: None,
    ) -> None:
        self._begin_step = begin_step
        self._taking, self._samples = taking, samples
        self._is_there, self._first, self._together = is_there, first, together
        self._is_ahead = is_ahead
        self.began = self._at = first
        self._slice: int | None = None
        self._again: list[tuple[int, int]] = []
        self._replays = self._left = False
        self._commits = self._before = taking.commits

    @property
    def given(self) -> int:
        """How many steps of the data this worker has begun in the pass."""
        return self._at - self._first

    def next(self) -> tuple[int, int] | None:
        """Returns the step and slice of the next batch; None: the pass is over.

        Raises:
            RuntimeError: what the script has done cannot be done for another slice.
        """
        taking = self._taking
        if self._commits != taking.commits:
            self._commits = taking.commits
            self._note_commit()
        elif self._replays and not self._again:
            taking.check("a batch is asked for, and no step made,")
        if self._again:
            return self._again.pop(0)
        if self._is_there(self._at):
            if self._slice is None:
                self._begin_step()
                self._slice = taking.first_slice(self._is_ahead)
            self._at += 1
            return self._at - 1, self._slice
        return self._without_steps()

    def _note_commit(self) -> None:
        taking, replayed = self._taking, self._replays
        self._replays = bool(taking.due)
        steps = range(self.began, self._at)
        if not replayed:
            self._together = max(len(steps), 1)  # as the script does it
        if not taking.due:
            self.began, self._slice, self._again = self._at, None, []
            return
        if not replayed and self._slice is not None:
            counted = sum(self._samples(step, self._slice) for step in steps)
            if counted != taking.samples:
                raise RuntimeError(
                    f"slice {taking.due[0]} of a worker that was killed is due, and cannot be "
                    f"computed: the last step was made of {taking.samples} samples, and the "
                    f"batches since the step before have {counted}. Let each step use all batches "
                    "since the one before, of one pass"
                )
        self._again = [(step, taking.due[0]) for step in steps]

    def _without_steps(self) -> tuple[int, int] | None:
        """Returns a batch of another slice if the script makes no steps in this pass; else None."""
        if self._commits != self._before or self._left or self._slice is None:
            return None
        self._left = True
        others = [each for each in self._taking.slices if each != self._slice]
        self._again = [(s, each) for each in others for s in range(self._first, self._at)]
        return self._again.pop(0) if self._again else None

    def rest(self) -> Iterator[tuple[int, int]]:
        """Yields the batches after the present one, if the script makes a step with each group.

        The batches of steps that are not read yet become known when they are asked for.
        """
        found, slices = list(self._again), list(self._taking.slices)
        due, at, together = self._taking.due, self._at, self._together
        if self._replays:
            steps = range(self.began, at)
            found += [(step, each) for each in due[1:] for step in steps]
        elif self._left:
            return iter(found)
        else:
            # The group of the present batch; one that the script has made longer ends with it.
            group = self._steps_from(self.began, max(together, at - self.began))
            found += [(step, self._slice or 0) for step in group if step >= at]
            others = [each for each in slices if each != self._slice]
            found += [(step, each) for each in others for step in group]
            at = self.began + len(group)

        def further() -> Iterator[tuple[int, int]]:
            for first in count(at, together):
                if not (steps := self._steps_from(first, together)):
                    return
                yield from ((step, each) for each in slices for step in steps)

        return chain(found, further())

    def _steps_from(self, first: int, most: int) -> Sequence[int]:
        """Returns up to this many steps of the pass, from one on."""
        return [step for step in range(first, first + most) if self._is_there(step)]
