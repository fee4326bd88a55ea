"""Worker side of takeovers: the work of a worker for places that have no worker.

The launcher assigns the places. A thread passes the consequences of a death on to the servers at
once, in control words: they wait for this worker instead. The worker itself adopts them where it
asks (`adopt`), between other things.

A wanted change takes place at all workers between the same two steps. The launcher asks all of them
how many steps they have made (`prepare`); from then on none goes more than one step further. It
then tells all of them after which step they change (`plan`), and the places that each has from
there on. docs/internals/fault-tolerance.md has the messages.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypedDict

import numpy as np
from numpy.typing import NDArray

from tensorwire.durability.descriptor_store import DescriptorStore
from tensorwire.errors import TensorwireError
from tensorwire.failpoints import failpoint
from tensorwire.membership.identity import taken_by
from tensorwire.membership.world import World


def deal_places(places: int, living: Iterable[int]) -> dict[int, list[int]]:
    """Returns the places of each worker that has one: its own, and an even part of the others.

    Args:
        places: how many there are.
        living: the places that have a worker; at least one.
    """
    found = {rank: [rank] for rank in sorted(living)}
    for place in range(places):
        if place not in found:
            found[min(found, key=lambda rank: (len(found[rank]), rank))].append(place)
    return found


class _LauncherSays(TypedDict, total=False):
    """A message of the launcher; docs/internals/launch.md shows which keys go together."""

    lost: list[int]
    number: int
    next: list[int]
    words: list[int]
    prepare: int
    plan: int
    left: int
    go: int
    cancel: int
    step: int
    mine: list[int]
    owners: dict[str, int]
    donor: int | None


class ChangeWord(StrEnum):
    """The first key of a message about a change of the workers; its value is a number."""

    # From the launcher. PREPARE and CANCEL: the number of a question, and of one that it takes
    # back. PLAN, LEFT, GO: the number of a change: this is its plan; all workers that are to
    # leave have left; a worker that joins goes on.
    PREPARE = "prepare"
    PLAN = "plan"
    LEFT = "left"
    GO = "go"
    CANCEL = "cancel"
    # From a worker. AT: how many steps it has made. READY: 1, it waits to join. SWITCHED,
    # JOINED: the number of the change that it has made, or has joined by.
    AT = "at"
    READY = "ready"
    SWITCHED = "switched"
    JOINED = "joined"


@dataclass
class PlannedChange:
    """A change that takes place after a step.

    Attributes:
        number: of the change.
        step: after which it is, counted from the beginning of the job.
        mine: the places that this worker has from then on; empty: it leaves.
        owners: the new owner of each place whose control word changes.
        donor: the worker that notes where the script is, for joining ones; None: none joins.
    """

    number: int
    step: int
    mine: list[int]
    owners: dict[int, int]
    donor: int | None = None

    def to_message(self, word: ChangeWord) -> dict[str, Any]:
        """Returns the launcher's message with this change."""
        return {
            word: self.number, "step": self.step, "mine": self.mine, "owners": self.owners,
            "donor": self.donor,
        }  # fmt: skip

    @staticmethod
    def from_message(number: int, told: _LauncherSays) -> PlannedChange:
        """Returns the change in a message of the launcher."""
        owners = {int(rank): owner for rank, owner in told["owners"].items()}
        return PlannedChange(number, told["step"], told["mine"], owners, told["donor"])


class Takeovers:
    """The places that one worker computes. One thread uses it, beside its own.

    Args:
        place: of the worker.
        store: to the launcher.
        joins: it has joined a job that ran, and has no places so far.

    Attributes:
        ranks: the places that this worker has: its own, and others, in turn.
        slices: of these, its own first.
        steps: that optimizers have made since the beginning of the job.
        changes: that this worker has seen, for its report.
        joins: as given, until it has joined.
        is_gone: it has left by a change, and others have its places.
    """

    def __init__(self, place: World, store: DescriptorStore, joins: bool = False) -> None:
        self._place, self._store = place, store
        self._told: deque[Sequence[int]] = deque()
        self._offered: tuple[str, str] | None = None
        self._change = threading.Condition()
        self._hold_at: int | None = None
        self._plan: PlannedChange | None = None
        self._left = 0  # the last change of which all have left that are to leave
        self._go: PlannedChange | None = None
        self._over = False  # the launcher is gone
        self._tell: Callable[[int, int], None] = lambda rank, value: None
        self.steps = 0
        self.changes: list[dict[str, Any]] = []
        self.joins, self.is_gone = joins, False
        present = range(place.present or place.workers)
        dealt = deal_places(place.workers, present) if place.takeover and not joins else {}
        self._take(dealt.get(place.rank, [place.rank]))

    def _take(self, ranks: Sequence[int]) -> None:
        self.ranks = tuple(ranks)
        self.slices = tuple(i for rank in ranks for i in self._place.slices_of(rank))

    @property
    def rank(self) -> int:
        """The lowest of `ranks`, so that a successor of worker 0 acts as worker 0."""
        return min(self.ranks)

    @property
    def acting_slices(self) -> Sequence[int]:
        """The slices of the worker for which this one acts, by its `rank`."""
        return self._place.slices_of(self.rank)

    def start(self, tell: Callable[[int, int], None]) -> None:
        """Begins to listen; `tell` raises the control word of a place at all servers."""
        self._tell = tell
        threading.Thread(target=self._run, name="tensorwire-takeovers", daemon=True).start()

    def _run(self) -> None:
        # A thread that waits for a server that is gone gets the error.
        try:
            with contextlib.suppress(TensorwireError, OSError):
                while (told := self._store.hear(_LauncherSays)) is not None:
                    if "lost" in told:
                        self._hear_lost(told)
                    else:
                        self._hear_change(told)
        finally:  # nobody waits for what cannot come any more
            with self._change:
                self._over = True
                self._change.notify_all()

    def _hear_lost(self, told: _LauncherSays) -> None:
        number, lost = told["number"], told["lost"]
        with self._change:
            if self._plan is not None:
                self._plan.mine += told.get("next", lost)
            elif "next" in told:  # the change has taken place here
                lost = told["next"]
            self._told.append(lost)
        for rank in told.get("words", lost):
            self._tell(rank, taken_by(self._place.rank, number))
        failpoint("owner.told")
        self._store.tell({"took": number})

    def _hear_change(self, told: _LauncherSays) -> None:
        with self._change:
            if "prepare" in told:
                self._hold_at = self.steps + 1
                self._store.tell({ChangeWord.AT: self.steps, "number": told["prepare"]})
            elif "plan" in told:
                self._plan = PlannedChange.from_message(told["plan"], told)
                self._hold_at = None
            elif "left" in told:
                self._left = told["left"]
            elif "cancel" in told:
                self._hold_at = None
                if self._plan is not None:
                    self._left = self._plan.number  # nobody is waited for
            elif "go" in told:
                self._go = PlannedChange.from_message(told["go"], told)
            self._change.notify_all()

    def adopt(self) -> bool:
        """Adds the places and slices of dead workers that the launcher has assigned to this one."""
        came = False
        while self._told:
            for rank in self._told.popleft():
                if rank not in self.ranks:
                    self._take((*self.ranks, rank))
                    came = True
        if came:
            failpoint("slices.adopted")
        return came

    # ---- changes that are wanted

    def due(self) -> PlannedChange | None:
        """Returns the change due at this point between two steps, after waiting for its plan."""
        with self._change:
            while not self._over and self._plan is None:
                if self._hold_at is None or self.steps < self._hold_at:
                    return None
                self._change.wait()
            plan = self._plan
            return None if plan is None or self.steps < plan.step else plan

    def make(self, plan: PlannedChange, obstacle: str = "") -> bool:
        """Makes a change; tells whether this worker stays.

        Then it waits for leaving workers: between this step and the next they may still save the
        step's results.

        Args:
            plan: that is due.
            obstacle: why nobody can join by what this worker has noted; only at the donor.
        """
        leaving = any(rank != owner for rank, owner in plan.owners.items())
        with self._change:
            while plan.mine and leaving and self._left < plan.number and not self._over:
                self._change.wait()
            self._plan = None
            self._told.clear()  # what a death gave it until now is among what it has from here on
            mine = list(dict.fromkeys(plan.mine))
            self.is_gone = not mine
            if mine:
                self._take(mine)
        # First the workers that come: words followed from place to place end at one that is there.
        for rank, owner in sorted(plan.owners.items(), key=lambda each: each[0] != each[1]):
            self._tell(rank, taken_by(owner, plan.number))
        self._note(plan.step, plan.owners)
        self._store.tell({ChangeWord.SWITCHED: plan.number, "obstacle": obstacle})
        failpoint("change.made")
        return bool(mine)

    def _note(self, step: int, owners: Mapping[int, int]) -> None:
        came = [rank for rank, owner in owners.items() if rank == owner]
        gone = [rank for rank, owner in owners.items() if rank != owner]
        self.changes.append({"step": step, "came": sorted(came), "went": sorted(gone)})

    def wait_to_join(self) -> None:
        """Announces that a joining worker has made its models; waits until it may go on.

        Raises:
            RuntimeError: it is not wanted any more.
        """
        self._store.tell({ChangeWord.READY: 1})
        failpoint("join.ready")
        with self._change:
            while self._go is None and not self._over:
                self._change.wait()
            if self._go is None:
                raise RuntimeError("this worker was to join a job, which has ended meanwhile")
            self._told.clear()
            self._take(self._go.mine)

    def donor(self) -> NDArray[np.uint8]:
        """Returns the history of the worker that has noted where the others are."""
        return self._store.map_donor()

    def joined(self) -> None:
        """Announces that the joining worker has come to where the others are."""
        assert self._go is not None
        self.joins = False
        self._note(self._go.step, self._go.owners)
        self._store.tell({ChangeWord.JOINED: self._go.number})
        failpoint("join.made")

    # ---- what the launcher is told

    def offer(self, against: str, joining: str = "") -> None:
        """Announces why others could not take over this worker's slices; "" if they could.

        `joining` is why no worker could join by this worker's notes; "" if one could.
        """
        if (against, joining) != self._offered:
            self._offered = against, joining
            self._store.tell({"offer": against, "joins": joining})

    def saves(self, path: str) -> None:
        """Announces the path of a checkpoint before it is written; "": it is written."""
        self._store.tell({"saving": path})
