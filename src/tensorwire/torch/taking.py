"""Gives the script batches of slices that a worker computes for others that were killed.

A step of the script commits one slice. If others of this worker's are missing for the version, a
worker has died meanwhile or this one has several: `step()` returns without a version, the loader
gives the batches of the next slice, the same ones that its worker had, and the script makes a step
with them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, count
from typing import Any

from tensorwire.membership import Takeovers

from .random_numbers import RandomState, random_state, set_random_state


class Taking:
    """The slices of one worker, in a job that does not replace killed workers.

    Args:
        takeovers: what the launcher tells of workers that were killed.

    Attributes:
        due: slices that need a batch before there is a version; the first one is next.
        commits: how often a slice was committed.
        samples: of the slice that was committed last.
        steps: that optimizers have made, since the beginning of the job.
        present: the slice of the batch that the loader has given last; None: there is none.
    """

    def __init__(self, takeovers: Takeovers) -> None:
        self._takeovers = takeovers
        self.due: Sequence[int] = ()
        self.commits = 0
        self.samples = 0
        self.present: int | None = None
        self._given_at = 0  # after so many commits
        # Torch's random numbers after the slices of the worker for which this one acts.
        self._random: RandomState | None = None
        self._reason = self._joining = ""
        self._stepped: tuple[int, object] = -1, None  # with which batch, and what

    @property
    def slice_index(self) -> int:
        """The slice that is being computed.

        Raises:
            RuntimeError: see `check_present`.
        """
        self.check_present("a gradient is computed")
        return self._takeovers.slices[0] if self.present is None else self.present

    @property
    def default_slice(self) -> int | None:
        """The slice that a script means without a name: the last batch's, or its only one."""
        acting = self._takeovers.acting_slices
        if self.present is not None or len(acting) > 1:
            return self.present
        return acting[0]

    def first_slice(self, is_ahead: Callable[[int], bool]) -> int:
        """Returns the slice with which the next step begins: the first without a commit for it."""
        self._takeovers.adopt()
        return next(each for each in self._takeovers.slices if not is_ahead(each))

    def give(self, slice_index: int) -> None:
        """Notes that the loader gives a batch of a slice."""
        self.present, self._given_at = slice_index, self.commits

    def begin_commit(self, replica: object, batches: int) -> None:
        """Checks that a slice can be committed after the loader has given `batches` batches.

        Raises:
            RuntimeError: its batch was not given, or another optimizer has stepped with it.
        """
        before, other = self._stepped
        self.check_present("step()")
        if batches and other is not None and before == batches and other is not replica:
            self.refuse("several optimizers make steps with one batch")
            if self.due:
                raise RuntimeError(
                    f"a worker was killed, and slice {self.due[0]} is due, for one optimizer; "
                    "where workers are not restarted one optimizer makes a step with each batch. "
                    "Run the job without --no-restart-workers"
                )
        self._stepped = batches, replica
        if self.due and self._given_at != self.commits:
            raise RuntimeError(
                f"a batch of slice {self.due[0]} is due, which the loader gives: one opt.step() "
                "follows each batch of job.loader, or each group of batches that are accumulated"
            )

    def committed(self, due: Sequence[int], samples: int) -> None:
        """Notes the commit of a slice with `samples` samples.

        The slices `due` are left of the step.
        """
        if due and self.slice_index == self._takeovers.acting_slices[-1]:
            self._random = random_state()
        self.due, self.samples, self.commits = tuple(due), samples, self.commits + 1
        if not due:
            self.present = None
            if self._random is not None:  # what the script draws now it draws where nobody died
                set_random_state(self._random)
            self._random = None

    def check_present(self, what: str) -> None:
        """Raises RuntimeError if this worker has left by a change, and others have its slices."""
        if self._takeovers.is_gone:
            raise RuntimeError(
                f"{what}, and this worker has left the job (tensorwire scale): its loader has "
                "raised SystemExit, and others compute its slices. Let that end the process, and "
                "neither train, save nor wait for other workers in what runs on the way out "
                "(finally, except BaseException)"
            )

    def check(self, what: str) -> None:
        """Raises RuntimeError while a batch is due."""
        if self.due:
            raise RuntimeError(
                f"{what} while slice {self.due[0]} of this step is due: this worker computes the "
                "slices of one that was killed, and the loader gives their batches next. Do what "
                "belongs to a whole step 'if job.step_complete:', and leave the loop only then"
            )

    def begin_epoch(self, against: str, joining: str) -> None:
        """Announces why others could not take over this worker's slices; "" if they could.

        `joining` does the same for workers that would join by its notes.

        Raises:
            RuntimeError: see `check`.
        """
        self.check_present("the next epoch")
        self.check("the next epoch")
        if against:
            self.refuse(against)
        else:
            self._joining = joining
            self._takeovers.offer(self._reason, joining)

    def refuse(self, reason: str) -> None:
        """Refuses, for a reason, that slices are taken over; worker 0 prints it."""
        if self._reason:
            return
        self._reason = reason
        self._takeovers.offer(reason, self._joining)
        if self._takeovers.rank == 0:
            text = f"the slices of a worker that is killed are not taken over, as {reason}"
            print(f"tensorwire: {text}", file=sys.stderr, flush=True)

    @property
    def steps(self) -> int:
        """See the class."""
        return self._takeovers.steps

    @steps.setter
    def steps(self, steps: int) -> None:
        self._takeovers.steps = steps

    def stepped(self) -> None:
        """Counts a version that an optimizer has made."""
        self._takeovers.steps += 1

    @property
    def changes(self) -> list[dict[str, Any]]:
        """The workers that came and went, and after which step, as far as this one has seen it."""
        return self._takeovers.changes

    def saves(self, path: str) -> None:
        """Announces the path of a checkpoint that is being written; "": it is written."""
        self._takeovers.saves(path)


class BatchTurns:
    """Which batch of a pass over a loader comes next, by the steps that the script makes.

    Args:
        taking: of the worker.
        samples: how many a step of the data has for a slice.
        is_there: tells whether the pass has a step of the data.
        first: those before it were made before a checkpoint was saved.
        together: how many of them a slice accumulates, as far as the loader was told.
        slices: of this worker at present.
        is_ahead: somebody has committed a slice for the next version.
        begin_step: called before the first batch of a step is chosen.

    Attributes:
        began: the first step of the data of the present version; those before it are over.
    """

    def __init__(
        self,
        taking: Taking,
        samples: Callable[[int, int], int],
        is_there: Callable[[int], bool],
        first: int,
        together: int,
        slices: Callable[[], Sequence[int]],
        is_ahead: Callable[[int], bool],
        begin_step: Callable[[], None] = lambda: None,
    ) -> None:
        self._begin_step = begin_step
        self._taking, self._samples = taking, samples
        self._is_there, self._first, self._together = is_there, first, together
        self._slices, self._is_ahead = slices, is_ahead
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
        others = [each for each in self._slices() if each != self._slice]
        self._again = [(s, each) for each in others for s in range(self._first, self._at)]
        return self._again.pop(0) if self._again else None

    def rest(self) -> Iterator[tuple[int, int]]:
        """Yields the batches after the present one, if the script makes a step with each group.

        The batches of steps that are not read yet become known when they are asked for.
        """
        found, slices = list(self._again), list(self._slices())
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
