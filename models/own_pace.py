"""All interleavings of a job whose workers go at their own pace, and are killed: a second model.

    python models/own_pace.py

As in models/takeover.py the rows and their order are those of the protocol, here of EVENT, PAUSE
and STANDING, and each has an abstract meaning. What is explored there is taken for granted: that a
version which was begun is made once (the journal), that the launcher gives a place to one process.

The job: two servers and two workers with a slice each, in the mode bounded with a staleness of 0.
Worker 0 has a version stand still and makes a step, worker 1 makes two steps. A server or a worker
may be killed between any two steps, and is replaced at any time. Server 0 decides on any event that
there is. Two faults in one job are too many states here; tests/launch/test_paced_takeover.py has
jobs with more.

To save states, steps that touch only what no other process reads or writes (LOCAL) are not
interleaved with steps of others, as in models/takeover.py.

What must hold: what a worker adopts is one version at both servers, with its own commits once each,
and with no commit of its own that the bound forbids; it is never changed behind its back; nothing
is applied while a version stands still for a worker; two events never have one number; and where
nothing more can happen, everybody has come to the end, and both servers have each commit once.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent))

from takeover import T, Violation

DEAD, ENDED, AGAIN = "dead", "ended", "again"
STEPS, STALENESS = (1, 2), 0  # the steps of each worker
APPLIED, ANSWERED, PAUSED = "applied", "answered", "paused"
WISH, GO_ON = "pause", "go on"  # what a worker asks for; also the end of a predecessor's pauses
LOCAL = {"event.come", "event.noted", "pause.over", "0", "note", "gone", "again", "again:wait"}
"""The rows of servers and the steps of workers that touch only what is their own."""
Pair = tuple[Any, Any]


class Mutant(NamedTuple):
    """A single change of the protocol; "" and () change nothing."""

    without: str = ""
    exchanged: tuple[str, str] | tuple[()] = ()
    unguarded: str = ""
    unwaited: str = ""

    def __str__(self) -> str:
        if self.exchanged:
            return f"{self.exchanged[1]} before {self.exchanged[0]}"
        if self.without:
            return f"without {self.without}"
        return f"{self.unguarded} always" if self.unguarded else f"{self.unwaited} without waiting"


RIGHT = Mutant()


class Account(NamedTuple):
    """What a server's process knows, and, as it was noted last, its ledger."""

    events: int = 0
    version: int = 0
    taken: Pair = (0, 0)
    answers: Pair = (0, 0)
    decided: int = 0
    event: Any = None
    clocks: Pair = (0, 0)
    held: tuple[int, ...] = ()
    paused: Pair = (0, 0)


class Server(NamedTuple):
    """A server; `known`, `event` and `tells` are its process's own."""

    pc: Any = 0
    known: Account = Account()
    event: Any = None
    tells: tuple[int, ...] = ()
    ledger: Account = Account()
    cell: tuple[Any, ...] = ()  # the commits that were applied
    commits: Pair = (0, 0)
    order: tuple[Any, ...] = ()
    asks: Pair = ((0, GO_ON), (0, GO_ON))
    begun: Pair = (0, 0)
    ended: Pair = (0, 0)


class Worker(NamedTuple):
    """A worker; `pc` is its process's own, and the number of what it has asked."""

    pc: Any = 0
    asked: int = 0
    noted: int = 0
    got: int = 0
    told: Pair = (0, 0)
    view: Pair = ((), ())
    replies: Pair = (0, 0)


class State(NamedTuple):
    """All of the job."""

    servers: Pair = (Server(), Server())
    workers: Pair = (Worker(), Worker())
    faults: int = 0

    def server(self, i: int, **changes: Any) -> State:
        """With changes of a server."""
        return self._replace(servers=put(self.servers, i, self.servers[i]._replace(**changes)))

    def worker(self, i: int, **changes: Any) -> State:
        """With changes of a worker."""
        return self._replace(workers=put(self.workers, i, self.workers[i]._replace(**changes)))


def put(pair: Pair, i: int, value: Any) -> Pair:
    """A pair with one of the two replaced."""
    return (value, pair[1]) if i == 0 else (pair[0], value)


Act = Callable[[State, int], Iterator[State]]
"""The states behind a step of a server or worker; none: it has to wait."""


class Model:
    """The job, and its protocol with at most one change."""

    def __init__(self, mutant: Mutant = RIGHT) -> None:
        self.mutant = mutant
        self.server_acts: dict[str, Act] = {
            "event.decided": self.decide,
            "event.sent": self.send,
            "event.come": self.come,
            "pause.begun": self.begin_pause,
            "pause.over": self.await_end,
            "event.made": self.make,
            "event.noted": self.note,
            "event.told": self.tell,
        }
        self.programs = [self.server_program(0), self.server_program(1)]

    def waits(self, name: str) -> bool:
        return name != self.mutant.unwaited

    def ordered(self, names: list[str]) -> list[str]:
        """Names of rows, with the change of the mutant."""
        if {*self.mutant.exchanged} <= {*names} and self.mutant.exchanged:
            first, second = self.mutant.exchanged
            other = {first: second, second: first}
            names = [other.get(name, name) for name in names]
        return [name for name in names if name != self.mutant.without]

    def server_program(self, i: int) -> list[str]:
        """The rows of a server; those of a pause are a part of what makes an event."""
        names = []
        for row in T.EVENT.rows:
            if row.when == ("follows" if i == 0 else "leads") or (row.when == "undecided" and i):
                continue
            if row.name == "event.made":
                names += [each.name for each in T.PAUSE.rows]
            names.append(row.name)
        return self.ordered(names)

    # ---- a server

    def serve(self, s: State, i: int) -> Iterator[State]:
        """The next step of a server's own thread."""
        server = s.servers[i]
        if server.pc == AGAIN:  # its first one: it tells again what is noted
            after = s.server(i, pc=0)
            for rank in (0, 1):
                after = self.told(after, i, rank, server.ledger.answers[rank])
            yield after
            return
        program = self.programs[i]
        at = self.next_row(s, i)
        for after in self.server_acts[program[at]](s, i):
            after = after.server(i, pc=at + 1)
            if at + 1 == len(program):
                after = after.server(i, pc=0, event=None, tells=())
            yield after

    def next_row(self, s: State, i: int) -> int:
        """Which row of its program a server does next."""
        at: int = s.servers[i].pc
        while self.skips(s, i, self.programs[i][at]):
            at += 1
        return at

    def skips(self, s: State, i: int, name: str) -> bool:
        known = s.servers[i].known
        if name == "event.decided" and self.mutant.unguarded != name:
            return known.decided > known.events
        event = s.servers[i].event
        return name.startswith("pause.") and event is not None and event[0] != PAUSED

    def decide(self, s: State, i: int) -> Iterator[State]:
        """Any event that there is; and it is noted with what follows from it."""
        server = s.servers[i]
        known = server.known
        for rank in known.held:
            other = s.workers[1 - rank]
            ahead = known.clocks[rank] - known.clocks[1 - rank]
            if ahead <= STALENESS or other.pc == ENDED:
                rest = tuple(each for each in known.held if each != rank)
                yield self.decided(s, i, known._replace(event=(ANSWERED, rank, 0), held=rest))
        for rank in (0, 1):
            if server.commits[rank] > known.taken[rank]:
                clocks = put(known.clocks, rank, known.clocks[rank] + 1)
                event = APPLIED, rank, 0
                new = known._replace(event=event, clocks=clocks, held=(*known.held, rank))
                yield self.decided(s, i, new)
            number, kind = server.asks[rank]
            if kind == WISH and number > known.paused[rank]:
                paused = put(known.paused, rank, number)
                yield self.decided(
                    s, i, known._replace(event=(PAUSED, rank, number), paused=paused)
                )

    def decided(self, s: State, i: int, known: Account) -> State:
        known = known._replace(decided=known.decided + 1)
        return s.server(i, known=known, ledger=known)

    def send(self, s: State, i: int) -> Iterator[State]:
        known, order = s.servers[0].known, s.servers[1].order
        if known.event is None:
            raise Violation("an event is sent that was not decided")
        if len(order) >= known.decided:
            if order[known.decided - 1] != known.event:
                raise Violation("two events have one number")
            yield s.server(0, event=known.event)
        elif len(order) + 1 == known.decided:
            yield s.server(0, event=known.event).server(1, order=(*order, known.event))
        else:
            raise Violation("an event is lost")

    def come(self, s: State, i: int) -> Iterator[State]:
        server = s.servers[i]
        if len(server.order) > server.known.events:
            yield s.server(i, event=server.order[server.known.events])
        elif not self.waits("event.come"):
            raise Violation("an event is done that nobody has decided on")

    def begin_pause(self, s: State, i: int) -> Iterator[State]:
        _, rank, number = self.event(s, i)
        yield s.server(i, begun=put(s.servers[i].begun, rank, number))

    def await_end(self, s: State, i: int) -> Iterator[State]:
        _, rank, number = self.event(s, i)
        if s.servers[i].ended[rank] > number or not self.waits("pause.over"):
            yield s

    def event(self, s: State, i: int) -> Any:
        if (event := s.servers[i].event) is None:
            raise Violation("a server does an event that it does not know")
        return event

    def make(self, s: State, i: int) -> Iterator[State]:
        kind, rank, _ = self.event(s, i)
        server = s.servers[i]
        known = server.known._replace(events=server.known.events + 1)
        if kind == APPLIED:
            number = known.taken[rank] + 1
            if server.commits[rank] < number:
                if not self.waits("event.made"):
                    raise Violation("a commit is applied that has not come")
                return
            for each in s.workers:
                if each.pc == "go on:0" or (each.pc == "go on:1" and i == 1):
                    raise Violation("a version is made while one stands still")
            cell = server.cell
            if len(cell) == known.version:  # the journal tells whether a predecessor has
                cell = (*cell, (rank, number))
            if cell[known.version] != (rank, number):
                raise Violation("a version is made of another commit")
            taken = put(known.taken, rank, number)
            known = known._replace(taken=taken, version=known.version + 1)
            yield s.server(i, known=known, cell=cell)
        elif kind == ANSWERED:
            number = known.taken[rank]
            if s.workers[rank].told[i] >= number:
                raise Violation("values move under a worker that was told")
            known = known._replace(answers=put(known.answers, rank, number))
            view = put(s.workers[rank].view, i, server.cell)
            yield s.server(i, known=known, tells=(rank,)).worker(rank, view=view)
        else:
            yield s.server(i, known=known)

    def note(self, s: State, i: int) -> Iterator[State]:
        yield s.server(i, ledger=s.servers[i].known)

    def tell(self, s: State, i: int) -> Iterator[State]:
        for rank in s.servers[i].tells:
            s = self.told(s, i, rank, s.servers[i].known.answers[rank])
        yield s

    @staticmethod
    def told(s: State, i: int, rank: int, number: int) -> State:
        told = s.workers[rank].told
        return s.worker(rank, told=put(told, i, max(told[i], number)))

    def lend(self, s: State, i: int) -> Iterator[State]:
        """The other thread of a server: it answers what workers ask."""
        server = s.servers[i]
        for rank, (number, kind) in enumerate(server.asks):
            replies = s.workers[rank].replies
            if replies[i] >= number:
                continue
            after = s
            if kind == WISH:
                if server.begun[rank] < number:
                    continue
            elif self.mutant.without != "pause.ended":
                after = s.server(i, ended=put(server.ended, rank, number))
            yield after.worker(rank, replies=put(replies, i, number))

    # ---- a worker: what it does next is the text of its pc

    def work(self, s: State, rank: int) -> Iterator[State]:
        """The next step of a worker."""
        worker = s.workers[rank]
        what, _, where = str(worker.pc).partition(":")
        if what == AGAIN:  # the pauses of its predecessor are over
            if not where:
                number = 1 + max(each.asks[rank][0] for each in s.servers)
                yield s.worker(rank, asked=number, pc="again:0")
            elif where in "01":
                pc = "again:1" if where == "0" else "again:wait"
                yield self.ask(s, rank, int(where), GO_ON).worker(rank, pc=pc)
            elif min(worker.replies) >= worker.asked:
                yield s.worker(rank, pc="sent:0" if worker.noted > worker.got else 0)
        elif what == "0":
            yield s.worker(rank, pc=self.next_of(worker, rank))
        elif what == "note":
            yield s.worker(rank, noted=worker.noted + 1, pc="sent:0")
        elif what == "sent":
            i = int(where)
            commits = put(s.servers[i].commits, rank, worker.noted)
            after = s.server(i, commits=commits)
            yield after.worker(rank, pc="sent:1" if i == 0 else "come")
        elif what == "come" and min(worker.told) >= worker.noted:
            self.check_adopted(s, rank)
            yield s.worker(rank, got=worker.noted, pc=0)
        elif what == "stand":
            yield from self.stand(s, rank, where)
        elif what == "go on":
            i = int(where)
            after = self.ask(s.worker(rank, asked=worker.asked + (i == 0)), rank, i, GO_ON)
            yield after.worker(rank, pc="go on:1" if i == 0 else "gone")
        elif what == "gone" and min(worker.replies) >= worker.asked:
            yield s.worker(rank, pc="note")

    @staticmethod
    def next_of(worker: Worker, rank: int) -> str:
        if worker.got == STEPS[rank]:
            return ENDED
        return "stand:0" if rank == 0 else "note"

    def stand(self, s: State, rank: int, where: str) -> Iterator[State]:
        """The rows of STANDING, of which the first one has a step for each server."""
        worker = s.workers[rank]
        steps: list[str] = []
        for name in self.ordered([row.name for row in T.STANDING.rows]):
            steps += ["ask 0", "ask 1"] if name == "pause.asked" else ["hold"]
        at = int(where)
        pc = f"stand:{at + 1}" if at + 1 < len(steps) else "go on:0"
        if steps[at] == "hold":
            number = worker.asked if "ask 0" in steps[:at] else worker.asked + 1
            if self.waits("pause.held") and min(worker.replies) < number:
                return
            if len({each.cell for each in s.servers}) > 1:
                raise Violation("what stands still is not one version")
            yield s.worker(rank, pc=pc)
        else:
            i = int(steps[at][-1])
            after = self.ask(s.worker(rank, asked=worker.asked + (i == 0)), rank, i, WISH)
            yield after.worker(rank, pc=pc)

    @staticmethod
    def ask(s: State, rank: int, i: int, kind: str) -> State:
        return s.server(i, asks=put(s.servers[i].asks, rank, (s.workers[rank].asked, kind)))

    def check_adopted(self, s: State, rank: int) -> None:
        worker, other = s.workers[rank], s.workers[1 - rank]
        if worker.told != (worker.noted, worker.noted):
            raise Violation(f"a worker at {worker.noted} was told {worker.told}")
        first, second = worker.view
        if first != second:
            raise Violation("a worker adopts two versions")
        mine = [number for whose, number in first if whose == rank]
        if mine != list(range(1, worker.noted + 1)):
            raise Violation(f"a worker adopts its commits {mine}")
        theirs = sum(whose != rank for whose, _ in first)
        if worker.noted - theirs > STALENESS and other.pc != ENDED:
            raise Violation("a worker is too far ahead")

    # ---- exploring

    def successors(self, s: State, faults: int) -> tuple[list[State], bool]:
        """The next states, and whether there are any without another fault."""
        for i, server in enumerate(s.servers):
            if server.pc not in (DEAD, AGAIN) and self.programs[i][self.next_row(s, i)] in LOCAL:
                if found := list(self.serve(s, i)):
                    return [*found, *self.kill_server(s, i, faults)], True
        for rank, worker in enumerate(s.workers):
            if str(worker.pc) in LOCAL and (found := list(self.work(s, rank))):
                return [*found, *self.kill_worker(s, rank, faults)], True
        found = []
        for i, server in enumerate(s.servers):
            if server.pc == DEAD:
                found.append(s.server(i, pc=AGAIN, known=server.ledger))
            else:
                found += [*self.serve(s, i), *self.lend(s, i)]
        for rank, worker in enumerate(s.workers):
            if worker.pc == DEAD:
                found.append(s.worker(rank, pc=AGAIN))
            elif worker.pc != ENDED:
                found += self.work(s, rank)
        goes_on = bool(found)
        for each in (0, 1):
            found += [*self.kill_server(s, each, faults), *self.kill_worker(s, each, faults)]
        return found, goes_on

    @staticmethod
    def kill_server(s: State, i: int, faults: int) -> Iterator[State]:
        if s.faults < faults and s.servers[i].pc != DEAD:
            s = s._replace(faults=s.faults + 1)
            yield s.server(i, pc=DEAD, known=Account(), event=None, tells=())

    @staticmethod
    def kill_worker(s: State, rank: int, faults: int) -> Iterator[State]:
        if s.faults < faults and s.workers[rank].pc not in (DEAD, ENDED):
            yield s._replace(faults=s.faults + 1).worker(rank, pc=DEAD, asked=0)

    def check_end(self, s: State) -> None:
        """Nothing more can happen."""
        if any(each.pc != ENDED for each in s.workers):
            raise Violation("somebody waits for ever")
        cells = {each.cell for each in s.servers}
        if len(cells) > 1:
            raise Violation("servers have different versions in the end")
        wanted = sorted((rank, k) for rank in (0, 1) for k in range(1, STEPS[rank] + 1))
        if sorted(cells.pop()) != wanted:
            raise Violation("not each commit was applied once")

    def explore(self, faults: int) -> int:
        """The number of states; Violation says what is wrong in one of them."""
        start, ended = State(), False
        seen, left = {start}, [start]
        while left:
            state = left.pop()
            found, goes_on = self.successors(state, faults)
            if not goes_on:
                self.check_end(state)
                ended = True
            for after in found:
                if after not in seen:
                    seen.add(after)
                    left.append(after)
        if not ended:
            raise Violation("nobody comes to the end")
        return len(seen)


EQUIVALENT = {
    "event.made before pause.over": "a pause makes nothing, and is noted behind both",
}
"""Changes of a row that change nothing that matters, and why."""


def mutants() -> Iterator[Mutant]:
    """Every row left out, every two neighbours exchanged, guards and waits dropped."""
    model = Model()
    orders = [*model.programs, [row.name for row in T.STANDING.rows]]
    names = list(dict.fromkeys([*(name for order in orders for name in order), "pause.ended"]))
    for name in names:
        yield Mutant(without=name)
        if T.ROWS[name].waits and name != "event.decided":
            yield Mutant(unwaited=name)
    yield Mutant(unguarded="event.decided")
    pairs = dict.fromkeys(pair for order in orders for pair in pairwise(order))
    yield from (Mutant(exchanged=pair) for pair in pairs)


def find(mutant: Mutant, faults: int = 1) -> str:
    """What is wrong with a change of the protocol; "" if nothing is."""
    try:
        Model(mutant).explore(faults)
    except Violation as found:
        return str(found)
    return ""


def main() -> int:
    """Explores the job, then its mutants; 1 if one of these was not found."""
    for faults in range(2):
        started = time.perf_counter()
        number = Model().explore(faults)
        print(
            f"{faults} faults: {number} states, {time.perf_counter() - started:.1f} s", flush=True
        )
    survivors = 0
    for mutant in mutants():
        found, what = find(mutant), str(mutant)
        told = f"found: {what}: {found}" if found else f"NOT found: {what}"
        if what in EQUIVALENT and not found:
            told = f"equivalent: {what}: {EQUIVALENT[what]}"
        print(told, flush=True)
        survivors += bool(found) == (what in EQUIVALENT)
    print(f"{survivors} not as they should be")
    return int(survivors > 0)


if __name__ == "__main__":
    sys.exit(main())
