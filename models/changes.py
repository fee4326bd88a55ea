"""All interleavings of a change of a job's workers with a death: `python models/changes.py`.

Three places with a slice each, and two workers, of which one has two slices. One of three changes
is asked for: a worker joins, one leaves, or both at once. Any worker, also the one that joins, is
killed between any two steps, or none is. The launcher asks all how many steps they have made, and
tells them behind which step they change; a death meanwhile concerns who has what up to that step
and behind it. The steps are those of the rows of src/tensorwire/transitions.py of the phases
"changing" and "change", and of "owner.told" and "slices.adopted"; what happens within a step is in
slices.py.

What must hold: nobody computes a slice that another one computes or has committed for the same
version, and no version is made before who leaves behind the last one has left; where nothing more
can happen, all workers that live and stay have the last version, and without a death the change has
taken place. Each change of CHANGES must be found.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent))

from exploring import Explored, Violation, put, report

PLACES, LAST = range(3), 4

CHANGES = {
    "no wait": "workers go on while the launcher decides",
    "too early": "the change takes place behind a step that somebody may have passed",
    "not behind": "who takes over gets nothing of what the dead one was to have behind the change",
    "at once": "who takes over has at once what the dead one was to have behind the change",
    "kept": "who takes over keeps behind the change what it got up to it",
    "to who leaves": "a worker that is to leave takes over from a dead one",
    "goes early": "who joins does not wait for the worker that notes the position",
    "no farewell": "who stays does not wait for who leaves",
}
"""Changes of the protocol, each of which breaks it."""

SCENARIOS = {"joins": (0, 1, 2), "leaves": (1,), "both": (1, 2)}
"""The places that have a worker behind the change."""


class Worker(NamedTuple):
    """A worker: `mine` are its slices, `told` those that it has not adopted so far."""

    alive: bool = True
    there: bool = True  # it has joined, and has not left
    version: int = 0
    begun: bool = False  # the step to the next version
    doing: int = -1  # the slice that it computes
    mine: tuple[int, ...] = ()
    told: tuple[int, ...] = ()
    inbox: tuple[tuple, ...] = ()  # type: ignore[type-arg]
    hold_at: int = -1
    plan: tuple[int, tuple[int, ...]] | None = None
    left: bool = False  # it was told that who leaves has left
    switched: bool = False


class State(NamedTuple):
    """All of it; `now` and `behind` are the launcher's tables, `acks` what it was answered."""

    workers: tuple[Worker, ...]
    commits: tuple[int, ...] = (0, 0, 0)
    phase: str = "idle"
    acks: tuple[int, ...] = (-1, -1, -1)
    step: int = -1
    now: tuple[tuple[int, ...], ...] = ((0, 2), (1,), ())
    behind: tuple[tuple[int, ...], ...] | None = None
    passed: tuple[bool, ...] = (False, False, False)  # whose death is dealt with
    left: bool = False  # all were told that who leaves has left
    over: bool = False  # nobody is left who could take something over


class Change(Explored[State]):
    """The job and the change that is asked for, with at most one change of the protocol."""

    def __init__(self, living: tuple[int, ...], change: str = "") -> None:
        self.living, self.change = living, change
        self.joins, self.leaves = 2 in living, not {0, 1} <= set(living)

    def start(self) -> State:
        """Nothing has happened yet; who joins waits."""
        workers = (Worker(mine=(0, 2)), Worker(mine=(1,)), Worker(alive=self.joins, there=False))
        return State(workers, passed=(False, False, not self.joins))

    def after(self, s: State) -> Iterator[State]:
        """The states that can come next, without a kill."""
        if s.over:
            return
        for rank in PLACES:
            me = s.workers[rank]
            if me.alive and me.inbox:
                yield self._hear(s, rank)
            if me.alive and me.there:
                yield from self._work(s, rank)
            if not me.alive and not s.passed[rank]:
                yield self._pass_on(s, rank)
        yield from self._launch(s)

    def kills(self, s: State) -> Iterator[State]:
        """A worker is killed, if none was."""
        ends = (not each.alive for each in s.workers[: 3 if self.joins else 2])
        if any(ends):
            return
        for rank, me in enumerate(s.workers):
            if me.alive and not (me.switched and not me.there and rank not in self.living):
                yield s._replace(workers=put(s.workers, rank, me._replace(alive=False, doing=-1)))

    # ---- a worker

    def _set(self, s: State, rank: int, **new: object) -> State:
        return s._replace(workers=put(s.workers, rank, s.workers[rank]._replace(**new)))

    def _hear(self, s: State, rank: int) -> State:
        me = s.workers[rank]
        (what, *rest), inbox = me.inbox[0], me.inbox[1:]
        s = self._set(s, rank, inbox=inbox)
        if what == "ask":
            hold = -1 if self.change == "no wait" else me.version + 1
            return self._set(s, rank, hold_at=hold)._replace(acks=put(s.acks, rank, me.version))
        if what == "plan":
            step, mine = rest
            return self._set(s, rank, plan=(step, mine), hold_at=-1)
        if what == "left":
            return self._set(s, rank, left=True)
        if what == "go":
            step, mine = rest  # join.made
            return self._set(s, rank, there=True, version=step, mine=mine, switched=True)
        now, behind = rest  # owner.told
        if me.plan is not None and behind is not None:
            step, mine = me.plan
            if self.change == "at once":
                now, behind = (*now, *behind), ()
            s = self._set(s, rank, plan=(step, (*mine, *behind)))
        elif me.switched and behind is not None:
            now = behind
        return self._set(s, rank, told=(*me.told, *now))

    def _work(self, s: State, rank: int) -> Iterator[State]:
        me = s.workers[rank]
        if me.doing >= 0:
            if s.commits[me.doing] > me.version:
                raise Violation(f"slice {me.doing} is committed twice for {me.version + 1}")
            commits = put(s.commits, me.doing, me.version + 1)
            if min(commits) > s.step >= 0 and self._leaving(s):
                raise Violation("a version is made, and a worker uses the one before")
            yield self._set(s, rank, doing=-1)._replace(commits=commits)
            return
        if me.begun and min(s.commits) > me.version:
            yield self._set(s, rank, version=me.version + 1, begun=False)
            return
        if me.version == LAST:
            return
        if not me.begun:
            if me.plan is not None and me.version >= me.plan[0]:
                if me.left or not (me.plan[1] and self.leaves) or self.change == "no farewell":
                    yield self._switch(s, rank)
            elif me.plan is not None or me.hold_at < 0 or me.version < me.hold_at:
                yield self._set(s, rank, begun=True)
            return
        mine = tuple(dict.fromkeys((*me.mine, *me.told)))  # slices.adopted
        missing = [i for i in mine if s.commits[i] <= me.version]
        if missing:
            for other in s.workers:
                if other.alive and (other.doing, other.version) == (missing[0], me.version):
                    raise Violation(f"two workers compute slice {missing[0]}")
            yield self._set(s, rank, mine=mine, told=(), doing=missing[0])
        elif me.told:
            yield self._set(s, rank, mine=mine, told=())

    def _switch(self, s: State, rank: int) -> State:
        """change.made."""
        me = s.workers[rank]
        assert me.plan is not None
        kept = me.told if self.change == "kept" else ()
        mine = tuple(dict.fromkeys(me.plan[1]))
        stays = bool(mine)
        return self._set(s, rank, mine=mine, told=kept, plan=None, switched=True, there=stays)

    # ---- the launcher

    def _tell(self, s: State, rank: int, *message: object) -> State:
        return self._set(s, rank, inbox=(*s.workers[rank].inbox, message))

    def _present(self, s: State) -> list[int]:
        """The workers of which it knows nothing else, without one that is to join."""
        return [rank for rank in PLACES if s.now[rank] and not s.passed[rank]]

    def _leaving(self, s: State) -> list[int]:
        """Those that are to leave behind the step, and have not."""
        assert s.behind is not None
        asked = [rank for rank in PLACES if s.acks[rank] >= 0 and rank not in self.living]
        return [r for r in asked if s.workers[r].alive and not s.workers[r].switched]

    def _launch(self, s: State) -> Iterator[State]:
        present = self._present(s)
        if self.leaves and s.behind is not None and not s.left:
            if not [r for r in present if r not in self.living and not s.workers[r].switched]:
                told = s._replace(left=True)
                for rank in present:
                    told = self._tell(told, rank, "left")
                yield told
        if s.phase == "idle":
            if self.joins and s.passed[2]:
                return  # who was to join is dead: nothing changes
            asked = s
            for rank in present:
                asked = self._tell(asked, rank, "ask")
            yield asked._replace(phase="asked")  # change.asked
        elif s.phase == "asked" and all(s.acks[rank] >= 0 for rank in present):
            yield self._plan(s, present)
        elif s.phase == "planned" and self.joins and not s.passed[2]:
            donor = 0 if not s.passed[0] else -1
            if self.change == "goes early" or (donor == 0 and s.workers[0].switched):
                assert s.behind is not None
                told = self._tell(s, 2, "go", s.step, s.behind[2])
                yield told._replace(phase="handed")  # change.handed
            elif donor < 0:  # it is killed, as nobody has noted where the script is
                dead = self._set(s, 2, alive=False)
                yield dead._replace(phase="handed")

    def _plan(self, s: State, present: list[int]) -> State:
        """change.planned."""
        known = [s.acks[rank] for rank in present]
        step = (min if self.change == "too early" else max)(known) + 1
        living = [rank for rank in self.living if rank in present or (rank == 2 and self.joins)]
        living = [rank for rank in living if not s.passed[rank]]
        if not [rank for rank in living if rank in present]:
            for rank in present:
                s = self._set(s, rank, hold_at=-1)
            return s._replace(phase="cancelled")
        table = {rank: [rank] for rank in living}
        for place in (place for place in PLACES if place not in table):
            table[min(table, key=lambda rank: (len(table[rank]), rank))].append(place)
        behind = tuple(tuple(table.get(rank, ())) for rank in PLACES)
        for rank in present:
            s = self._tell(s, rank, "plan", step, behind[rank])
        return s._replace(phase="planned", step=step, behind=behind)

    def _pass_on(self, s: State, dead: int) -> State:
        able = [rank for rank in self._present(s) if s.workers[rank].alive and rank != dead]
        if s.behind is not None and self.change != "to who leaves":
            able = [rank for rank in able if s.behind[rank]]
        s = s._replace(passed=put(s.passed, dead, True))
        now, behind = s.now[dead], None if s.behind is None else s.behind[dead]
        s = s._replace(now=put(s.now, dead, ()))
        if not now and not behind:
            return s
        if not able:
            return s._replace(over=True)
        to = able[0]
        s = s._replace(now=put(s.now, to, (*s.now[to], *now)))
        if s.behind is not None and behind is not None:
            s = s._replace(behind=put(put(s.behind, dead, ()), to, (*s.behind[to], *behind)))
        if self.change == "not behind":
            behind = None if behind is None else ()
        return self._tell(s, to, "lost", now, behind)

    def check_end(self, s: State) -> None:
        if s.over:
            return
        stay = [each for each in s.workers if each.alive and each.there]
        if any(each.version < LAST for each in stay):
            raise Violation("a worker waits for ever")
        if not stay:
            raise Violation("nobody is left")
        ended = s.step < 0 or s.step >= LAST  # before the change
        if all(each.alive for each in s.workers[: 3 if self.joins else 2]) and not ended:
            if [rank for rank in PLACES if s.workers[rank].there] != list(self.living):
                raise Violation("the change has not taken place")


def find(change: str) -> str:
    """What is wrong with a change of the protocol; "" if nothing is."""
    for living in SCENARIOS.values():
        try:
            Change(living, change).explore()
        except Violation as found:
            return str(found)
    return ""


def main() -> int:
    """Explores the job, then its changes; 1 if one of these was not found."""
    return report({name: Change(living) for name, living in SCENARIOS.items()}, CHANGES, find)


if __name__ == "__main__":
    sys.exit(main())
