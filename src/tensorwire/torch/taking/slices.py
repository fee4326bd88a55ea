"""Decides which slice a worker computes next, its own or one of a worker that was killed.

A step of the script commits one slice. If other slices of this worker are missing for the version,
a worker has died meanwhile, or this one has several. Then `step()` returns without a version, the
loader gives the batches of the next slice, the same that its worker had, and the script makes a
step with them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tensorwire.membership.takeovers import Takeovers

from ..random_numbers import RandomState, random_state, set_random_state
from ..turns import SliceTurns


class TakenTurns(SliceTurns):
    """The slices of one worker, in a job that does not replace killed workers.

    Args:
        takeovers: what the launcher tells of workers that were killed.

    Attributes:
        due: slices that need a batch before there is a version; the first one is next.
        commits: how often a slice was committed.
        samples: of the slice that was committed last.
        present: the slice of the batch that the loader has given last; None: there is none.
    """

    grows = True

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
    def rank(self) -> int:
        """See `SliceTurns`; also of a worker that was killed."""
        return self._takeovers.rank

    @property
    def ranks(self) -> Sequence[int]:
        """See `SliceTurns`."""
        return self._takeovers.ranks

    @property
    def slices(self) -> Sequence[int]:
        """See `SliceTurns`."""
        return self._takeovers.slices

    def slice_of(self, turn: int) -> int:
        """Returns the slice that is being computed.

        Raises:
            RuntimeError: see `check_present`.
        """
        self.check_present("a gradient is computed")
        return self._takeovers.slices[0] if self.present is None else self.present

    def after(self, turn: int) -> int:
        """See `SliceTurns`; whether the step is complete is known later."""
        return turn + 1

    def batches_per_step(self, accumulate: int) -> int:
        """See `SliceTurns`; however many slices there are, steps of the data are counted."""
        return accumulate

    def adopt(self) -> None:
        """See `SliceTurns`."""
        self._takeovers.adopt()

    @property
    def default_slice(self) -> int | None:
        """The slice that a script means without a name: the last batch's, or its only one."""
        acting = self._takeovers.acting_slices
        if self.present is not None or len(acting) > 1:
            return self.present
        return acting[0]

    def first_slice(self, is_ahead: Callable[[int], bool]) -> int:
        """Returns the slice with which the next step begins: the first without a commit for it."""
        self.adopt()
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
                    "Run the job without --on-death takeover"
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
        if due and self.slice_of(0) == self._takeovers.acting_slices[-1]:
            self._random = random_state()
        self.due, self.samples, self.commits = tuple(due), samples, self.commits + 1
        if not due:
            self.present = None
            if self._random is not None:  # the script then draws as it would if no worker had died
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

    def begin_epoch(self, reasons: Callable[[], tuple[str, str]]) -> None:
        """Announces why others could not take over this worker's slices, and why none could join.

        Raises:
            RuntimeError: see `check`.
        """
        against, joining = reasons()
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

    def stepped(self, obstacle: str) -> None:
        """See `SliceTurns`."""
        self._takeovers.steps += 1
        if obstacle:
            self.refuse(obstacle)

    @property
    def steps(self) -> int:
        """See `SliceTurns`."""
        return self._takeovers.steps

    def saved(self) -> dict[str, Any]:
        """See `SliceTurns`."""
        return {"steps": self._takeovers.steps, **self.report()}

    def report(self) -> dict[str, Any]:
        """Returns the workers that came and went, and after which step, as far as it is known."""
        return {"worker_changes": self._takeovers.changes}

    def go_on(self, saved: Mapping[str, Any]) -> bool:
        """Takes the numbers of another worker, with whose notes this one joins."""
        self._takeovers.steps = saved["steps"]
        self._takeovers.changes[:0] = saved["worker_changes"]
        return False

    def begin_save(self, path: str) -> None:
        """Announces the path of a checkpoint that is being written."""
        self._takeovers.saves(path)

    def end_save(self) -> None:
        """Announces that it is written."""
        self._takeovers.saves("")
