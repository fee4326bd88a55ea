"""Records where in its data a job is: the epoch, and the steps of each loader in it.

A checkpoint has it, so that a job goes on with the very next step. It belongs to the last version:
a batch that no step has used yet is given out again.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

ALL_STEPS = 1 << 62
"""The length of a pass that is unknown before its end."""


@dataclass(slots=True)
class LoaderPass:
    """An iteration over a loader in which gradients are computed.

    Attributes:
        number: which of its loader's in this epoch, from 0.
        data: what decides which samples a step has, as text.
        batches_per_step: that this worker gets.
        first_step: earlier steps were made before a checkpoint was saved.
        given: batches that this worker got.
        steps: that were made at the last version, the first ones included.
        mark: a checksum of the compared samples up to the present step.
        is_last: there is no further step.
    """

    number: int
    data: str
    batches_per_step: int
    first_step: int = 0
    given: int = 0
    steps: int = 0
    mark: int = 0
    is_last: bool = False


class Position:
    """The position of one worker; all workers have the same when a version is in place.

    A loader has a name that is the same when the program runs again: how many were made before it,
    since the job or since the epoch began.

    Attributes:
        began: how many epochs have begun; passes are counted from each of them.
        made_steps: steps were made in the present epoch.
        orders: how many passes were made over data in a random order, since the last epoch of
            `Job.epochs` began, by `LoaderPass.data`.
    """

    def __init__(self) -> None:
        self.began = 0
        self._epoch: int | None = None  # None: outside of Job.epochs
        self._made = 0
        self._passes: dict[str, LoaderPass] = {}  # under way, by loader
        self.made_steps = False
        self.orders: Counter[str] = Counter()
        self._begun: dict[str, int] = {}  # how many passes of a loader in this epoch are over
        self._from: dict[str, Any] | None = None  # what a checkpoint has told of this epoch
        self._taken: set[str] = set()  # loaders whose pass has gone on from there

    def begin_epoch(self, epoch: int) -> None:
        """Begins an epoch of `Job.epochs`."""
        self.began += 1
        self._epoch = epoch
        self._made = 0
        self.made_steps = False
        self._passes, self._begun, self._taken = {}, {}, set()
        self.orders.clear()
        if self._from is not None and self._from["epoch"] != epoch:
            self._from = None

    def leave_epochs(self) -> None:
        """Ends the epochs of `Job.epochs`."""
        self._epoch = self._from = None

    def name_of_next_loader(self) -> str:
        """Returns the name of a loader that is being made."""
        self._made += 1
        return f"{'job' if self._epoch is None else 'epoch'} {self._made - 1}"

    def first_step(self, loader: str, number: int, steps: int) -> int:
        """Returns how many of the `steps` of a loader's pass a checkpoint already has."""
        if self._from is None or self._epoch is None:
            return 0
        if loader in self._from["passes"]:
            found, done, _ = self._from["passes"][loader]
            return int(done) if number == found else steps if number < found else 0
        return steps if number < self._from["over"].get(loader, 0) else 0

    def begin(
        self, loader: str, number: int, data: str, steps: int, batches_per_step: int
    ) -> LoaderPass:
        """Begins a pass of `steps` steps.

        Raises:
            ValueError: a checkpoint was saved inside a pass, and this program makes another one.
        """
        self._check(loader, number, data)
        if loader in self._passes:  # an iterator that the program has kept
            self.end(loader, self._passes[loader])
        first = self.first_step(loader, number, steps)
        begun = LoaderPass(number, data, batches_per_step, first, 0, first)
        self._passes[loader] = begun
        return begun

    def _check(self, loader: str, number: int, data: str) -> None:
        if self._from is None or self._epoch is None:
            return
        passes = self._from["passes"]
        if loader in passes:
            if passes[loader][0] == number:
                self._taken.add(loader)
                if passes[loader][2] != data:
                    raise ValueError(
                        f"the checkpoint was saved inside a pass over {passes[loader][2]}, and the "
                        f"loader has {data}: its steps are others. Give it the same, or load a "
                        "checkpoint that was saved between epochs"
                    )
        elif loader not in self._from["over"] and self._taken != passes.keys():
            raise ValueError(
                "the checkpoint was saved inside a pass of a loader that this program does not "
                "make, or makes later or earlier than the one that saved it. Make loaders in the "
                "same order, or load a checkpoint that was saved between epochs"
            )

    def end(self, loader: str, ended: LoaderPass) -> None:
        """Ends a pass that is over, or was left."""
        if self._passes.get(loader) is not ended:
            return  # it was over before
        del self._passes[loader]
        if ended.given or ended.first_step:
            self._begun[loader] = ended.number + 1

    def stepped(self) -> list[LoaderPass]:
        """Counts a new version; returns the passes whose samples are to be compared now.

        That is so after steps 1, 2, 4, 8, … and the last one: all workers find the same, also a
        replacement process.
        """
        self.made_steps = True
        due = []
        for each in self._passes.values():
            before, each.steps = each.steps, each.first_step + each.given // each.batches_per_step
            doubled = each.steps.bit_length() > before.bit_length()
            if doubled or (each.is_last and each.steps > before):
                due.append(each)
        return due

    def saved(self) -> dict[str, Any] | None:
        """Returns the position for a checkpoint; None without a pass in an epoch that has steps.

        Before its first step an epoch begins anew, or goes on where a checkpoint was.
        """
        if self._epoch is None:
            return self._from
        return None if not self._passes and self.made_steps else self.now()

    def now(self) -> dict[str, Any] | None:
        """Returns the position, with ended passes; None outside of the epochs."""
        if self._epoch is None:
            return None
        passes = {name: [p.number, p.steps, p.data] for name, p in self._passes.items()}
        before = self._from or {"passes": {}, "over": {}}
        waiting = {name: p for name, p in before["passes"].items() if name not in self._taken}
        over = {**before["over"], **self._begun}
        return {"epoch": self._epoch, "passes": {**waiting, **passes}, "over": over}

    @property
    def inside(self) -> str:
        """A phrase if the script makes steps with data that the job has not chosen; else ""."""
        if self._epoch is None:
            return "it makes steps outside of job.epochs"
        return "" if self._passes else "it makes steps with batches that no job.loader has given"

    def load(self, saved: dict[str, Any] | None) -> None:
        """Goes on from the position that `saved` returned for the checkpoint."""
        self._from = saved
