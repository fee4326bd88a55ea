"""All interleavings of a job whose workers take over slices: `python models/slices.py`.

Three workers with a slice each and two servers make two versions; up to two workers are killed
between any two steps. Nobody has their place: the launcher tells the lowest worker that lives, a
thread of it tells the servers, and where the worker looks it adopts the slices, sends to all
servers what the dead one has committed at one, and computes what nobody has committed. The steps
are the rows of src/tensorwire/transitions.py of the phases "commit", "result" and "taking".

What must hold: where nothing more can happen, all workers that live have the last version; both
servers have made each version of the same computations; nobody overwrites gradients of which a
commit speaks. Each change of CHANGES must be found.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent))

from exploring import Explored, Violation, put, report

WORKERS, SERVERS, LAST, KILLS = range(3), range(2), 3, 2

CHANGES = {
    "computed again": "a slice is computed again that is committed at one server",
    "committed again": "a slice is computed that the dead worker has committed everywhere",
    "not told": "servers do not learn who has the slices",
    "told one": "one server does not learn it",
    "not passed on": "who takes over from a worker does not get what that had taken over",
    "not adopted": "the slices of a dead worker are not computed",
    "lowest dead": "the launcher tells the lowest worker, whether it lives or not",
}
"""Changes of the protocol, each of which breaks it."""


class Worker(NamedTuple):
    """A worker: its program, and the thread that listens to the launcher."""

    alive: bool = True
    version: int = 1
    doing: str = "look"
    slice: int = -1
    slices: tuple[int, ...] = ()
    inbox: tuple[tuple[int, ...], ...] = ()  # from the launcher, each its lost ones
    heard: tuple[int, ...] = ()  # not yet adopted
    words: tuple[tuple[int, int], ...] = ()  # control words to be raised: server, dead worker


class Server(NamedTuple):
    """A server: of each slice who has computed what lies there and is committed, and of what."""

    version: int = 1
    slots: tuple[tuple[int, int], ...] = ((1, -1),) * 3
    commits: tuple[tuple[int, int], ...] = ((1, -1),) * 3
    taken: tuple[bool, ...] = (False,) * 3
    told: int = 3  # workers, of the present version
    made_of: tuple[tuple[int, ...], ...] = ()


class State(NamedTuple):
    """All of it; `given` is what each worker was told to take over, `passed` whose death is."""

    workers: tuple[Worker, ...]
    servers: tuple[Server, ...]
    given: tuple[tuple[int, ...], ...] = ((),) * 3
    passed: tuple[bool, ...] = (False,) * 3


class Slices(Explored[State]):
    """The job, with at most one change."""

    def __init__(self, change: str = "") -> None:
        self.change = change

    def start(self) -> State:
        """Nothing has happened yet."""
        workers = tuple(Worker(slices=(rank,)) for rank in WORKERS)
        return State(workers, (Server(), Server()))

    def after(self, s: State) -> Iterator[State]:
        """The states that can come next, without another kill."""
        for rank in WORKERS:
            if s.workers[rank].alive:
                yield from self._worker(s, rank)
                yield from self._thread(s, rank)
            elif not s.passed[rank]:
                yield from self._pass_on(s, rank)
        for server in SERVERS:
            yield from self._server(s, server)

    def kills(self, s: State) -> Iterator[State]:
        """A worker is killed; one stays."""
        living = [rank for rank in WORKERS if s.workers[rank].alive]
        for rank in living if len(living) > len(WORKERS) - KILLS else ():
            dead = s.workers[rank]._replace(alive=False)
            yield s._replace(workers=put(s.workers, rank, dead))

    # ---- a worker

    def _worker(self, s: State, rank: int) -> Iterator[State]:
        me = s.workers[rank]
        if me.doing == "look":
            yield from self._look(s, rank)
        elif me.doing == "compute":  # gradients.sent
            mine, servers = (me.version + 1, rank), []
            for each in s.servers:
                if each.commits[me.slice][0] >= mine[0]:
                    raise Violation("gradients are overwritten of which a commit speaks")
                servers.append(each._replace(slots=put(each.slots, me.slice, mine)))
            yield self._go(s, rank, "commit 0")._replace(servers=tuple(servers))
        else:  # commit.begun, commit.sent
            at = int(me.doing[-1])
            there = s.servers[at]
            commits = put(there.commits, me.slice, (me.version + 1, rank))
            done = self._go(s, rank, "commit 1" if at == 0 else "look")
            yield done._replace(servers=put(s.servers, at, there._replace(commits=commits)))

    @staticmethod
    def _go(s: State, rank: int, doing: str, slice_: int | None = None) -> State:
        me = s.workers[rank]
        me = me._replace(doing=doing, slice=me.slice if slice_ is None else slice_)
        return s._replace(workers=put(s.workers, rank, me))

    def _look(self, s: State, rank: int) -> Iterator[State]:
        me = s.workers[rank]
        if me.version == LAST:
            return
        if me.heard:  # slices.adopted
            more = () if self.change == "not adopted" else me.heard
            me = me._replace(slices=(*me.slices, *more), heard=())
            s = s._replace(workers=put(s.workers, rank, me))
        for slice_ in me.slices:
            have = [each.commits[slice_][0] > me.version for each in s.servers]
            if all(have) and self.change != "committed again":
                continue
            if not any(have) or self.change == "computed again":
                yield self._go(s, rank, "compute", slice_)
                return
            if all(have):  # it looks only whether it has committed them itself
                if all(each.commits[slice_][1] == rank for each in s.servers):
                    continue
                yield self._go(s, rank, "compute", slice_)
                return
            at = have.index(False)  # commit.forwarded
            there = s.servers[at]
            commits = put(there.commits, slice_, s.servers[1 - at].commits[slice_])
            yield s._replace(servers=put(s.servers, at, there._replace(commits=commits)))
            return
        if all(each.version > me.version and each.told > rank for each in s.servers):
            me = me._replace(version=me.version + 1)  # result.come
            yield s._replace(workers=put(s.workers, rank, me))
        elif me != s.workers[rank]:
            raise AssertionError("a look that changes nothing")

    def _thread(self, s: State, rank: int) -> Iterator[State]:
        me = s.workers[rank]
        if me.words:
            (server, dead), *rest = me.words
            there = s.servers[server]
            there = there._replace(taken=put(there.taken, dead, True))
            me = me._replace(words=tuple(rest))  # the last one: owner.told
            yield State(put(s.workers, rank, me), put(s.servers, server, there), s.given, s.passed)
        elif me.inbox:
            lost, *more = me.inbox
            whom = {"not told": (), "told one": (0,)}.get(self.change, SERVERS)
            words = tuple((server, dead) for server in whom for dead in lost)
            heard = tuple(each for each in lost if each not in me.slices)
            me = me._replace(inbox=tuple(more), heard=(*me.heard, *heard), words=words)
            yield s._replace(workers=put(s.workers, rank, me))

    # ---- the launcher and the servers

    def _pass_on(self, s: State, dead: int) -> Iterator[State]:
        living = [r for r in WORKERS if s.workers[r].alive or self.change == "lowest dead"]
        to, lost = living[0], (dead, *s.given[dead])
        if self.change == "not passed on":
            lost = (dead,)
        told = s.workers[to]._replace(inbox=(*s.workers[to].inbox, lost))
        yield State(
            put(s.workers, to, told),
            s.servers,
            put(s.given, to, (*s.given[to], *lost)),
            put(s.passed, dead, True),
        )

    @staticmethod
    def _server(s: State, at: int) -> Iterator[State]:
        me = s.servers[at]
        if me.told < len(WORKERS):  # for one that was killed it waits until another has its slices
            if s.workers[me.told].alive or me.taken[me.told]:
                yield s._replace(servers=put(s.servers, at, me._replace(told=me.told + 1)))
        elif me.version < LAST and all(n > me.version for n, _ in me.commits):
            if me.slots != me.commits:
                raise Violation(f"a version was made of {me.slots}, and committed are {me.commits}")
            of = tuple(who for _, who in me.commits)
            other = s.servers[1 - at].made_of[me.version - 1 : me.version]
            if other and other[0] != of:
                raise Violation(f"two servers have made a version of {of} and of {other[0]}")
            me = me._replace(version=me.version + 1, told=0, made_of=(*me.made_of, of))
            yield s._replace(servers=put(s.servers, at, me))

    def check_end(self, s: State) -> None:
        if any(each.version < LAST for each in s.workers if each.alive):
            raise Violation("a worker waits for ever")
        if any(each.version < LAST for each in s.servers):
            raise Violation("a server waits for ever")


def find(change: str) -> str:
    """What is wrong with a change of the protocol; "" if nothing is."""
    try:
        Slices(change).explore()
    except Violation as found:
        return str(found)
    return ""


def main() -> int:
    """Explores the job, then its changes; 1 if one of these was not found."""
    return report({"two deaths": Slices()}, CHANGES, find)


if __name__ == "__main__":
    sys.exit(main())
