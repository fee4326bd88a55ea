"""All interleavings of a durable job whose processes are killed: `python models/takeover.py`.

The rows, their order and their guards are those of src/tensorwire/transitions.py, which the real
processes run; here each row has an abstract meaning, one or several steps on a memory of small
numbers. Between any two steps a process may be killed; then the launcher gives its place to
another one, whenever it likes, which begins at its first row with the memory that is there.

Explored are two jobs, in which any two faults may happen:

- versions: 2 servers with a cell each, 2 workers; a store is opened, gets a version, one with a
  norm, and one that frees it;
- sums: 1 server that makes versions in one thread and sums in another, 2 workers; two versions
  with a sum behind each, and a single position before them.

A worker is its notes: how far its script can go on, which commits, results and sums are noted. Its
successor begins at the position, takes what is noted, and computes again what is not. Connecting is
left out: the launcher holds the door, and who connects waits for nobody else; so is the launcher's
own death, with which the job ends.

What must hold: where nothing more can happen, everybody has come to the end; each version was
applied once to each cell, from the gradients of that version, which were computed from the version
before; what is told of a version or a sum is always the same. Each change of a single row must be
found, but for those of EQUIVALENT, which say why they change nothing.

To save states, steps that touch only what nobody else reads or writes (`local`) are not
interleaved with steps of others: moved before these they lead to the same states, and the process
may be killed before and behind each of them all the same. Likewise the launcher goes on from the
row that notices a death to its last one.
"""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple


def load_transitions() -> Any:
    """The module, without the package, which would have to be built."""
    package = ModuleType("protocol")
    package.__path__ = [str(Path(__file__).resolve().parents[1] / "src/tensorwire")]
    sys.modules["protocol"] = package
    return importlib.import_module("protocol.transitions")


T = load_transitions()

State = list[Any]
Memory = tuple[Any, ...]
DEAD, ENDED = -1, -2  # in place of the row that comes next
TORN = (-1,)
OPENED = 1  # the version with which a store begins

# Memory of a server; the first six numbers are its process's own.
(
    PC, VERSION, SUM_PC, SUM_NUMBER,
    MADE, SUMMED_UP,  # the version whose result is there; the sum that is
    CELL,  # the versions that were applied
    UNDO, ARMED, DONE, COUNT, BEFORE, BEGUN, KEPT, RESULT, PUBLISHED,
    COMMIT, _, SLOT, _,  # of each worker
    SUMS,  # the number of what the other server has told: its sums, and that it is ready
    ALLOCATED, DESCRIBED, GONE,
    PART, _, NOTED,  # of each worker; the sum that is noted
    SERVER_SIZE,
) = range(28)  # fmt: skip

# Memory of a worker; the first two numbers are its process's own.
TOLD, ANSWER, SPEC, POSITION, COMMITTED, GOT, SUMMED, WORKER_SIZE = 2, 4, 5, 6, 7, 8, 9, 10


class Violation(Exception):
    """The protocol has lost or doubled something."""


class Step(NamedTuple):
    """A part of what a row does to the state, by the process whose memory begins somewhere.

    Attributes:
        act: changes the state.
        ready: what it waits for; None: for nothing.
        local: it touches only what no other process reads or writes.
    """

    act: Callable[[State, int], None]
    ready: Callable[[State, int], bool] | None = None
    local: bool = False


Control = Callable[[State, int, int], int]
"""Where a process goes on; a part of the step before it."""

Program = list[Step | Control]


class Mutant(NamedTuple):
    """A single change of the protocol; "" and () change nothing."""

    without: str = ""
    exchanged: tuple[str, str] | tuple[()] = ()
    unguarded: str = ""
    unwaited: str = ""
    restoring: str = ""

    def __str__(self) -> str:
        if self.without:
            return f"without {self.without}"
        if self.exchanged:
            return f"{self.exchanged[1]} before {self.exchanged[0]}"
        if self.unguarded:
            return f"{self.unguarded} always"
        if self.unwaited:
            return f"{self.unwaited} without waiting"
        return f"a successor that does not {self.restoring}"


RIGHT = Mutant()
RESTORING = ("put back", "look whether it is done", "disarm")
"""What a successor does to a cell before it goes on, as a part of `opening.ready`."""

OUTSIDE = {
    "norm.noted": "only where servers scale what they keep and make no step themselves; "
    "tests/torch/test_journal.py kills there",
    "version.copied": "values come whole from a slot that stays until all are told: copied again "
    "they are the same, and no cell has to be put back",
    **{
        row.name: "as those of a cell, for other memory; tests/torch/test_journal.py kills there"
        for row in T.TABLE.rows
    },
    **{
        row.name: "a copy of a version that stands still, as who asks has not committed the next; "
        "no result depends on it; tests/launch/test_takeover.py kills there"
        for phase in (T.LENDING, T.BORROWING)
        for row in phase.all_rows()
    },
    **{
        row.name: "a move is the death of a server, of which the model has its own rows; "
        "tests/launch/test_moves.py kills there"
        for row in T.MOVE.rows
    },
    **{
        row.name: "of jobs in which nobody has the place of a worker; models/slices.py explores "
        "them, tests/torch/test_taken_slices.py kills there"
        for row in T.TAKING.rows
    },
    **{
        row.name: "of jobs whose workers come and go; models/changes.py explores them, "
        "tests/torch/test_elastic.py kills there"
        for phase in (T.CHANGING, T.CHANGE)
        for row in phase.rows
    },
    **{
        row.name: "where each worker goes at its own pace: models/own_pace.py"
        for phase in (T.EVENT, T.PAUSE, T.STANDING)
        for row in phase.all_rows()
    },
    "pause.ended": "likewise",
    "gradients.noted": "of several optimizers, and there is one store here; "
    "tests/torch/test_killed_workers.py kills there",
    "grant.noted": "what people read afterwards; the launcher reads it never",
}
"""Rows without a meaning here, and why."""

ALWAYS = {"durable", "publishes"}
"""Guards that are the same in all of these jobs: they are durable; no version is a worker's."""


class Job:
    """A job, and its protocol with at most one change.

    Args:
        servers: how many.
        last: the last version; it frees the store, unless sums are made.
        norm: the version with a norm; 0: none.
        sums: a sum of all workers follows each version.
        mutant: the change.
    """

    def __init__(
        self, servers: int, last: int, norm: int, sums: bool, mutant: Mutant = RIGHT
    ) -> None:
        self.last, self.norm, self.sums = last, norm, sums
        self.frees = not sums
        self.positions = {2, 3} if self.frees else {2}
        self.mutant = mutant
        self.servers = [i * SERVER_SIZE for i in range(servers)]
        self.workers = [servers * SERVER_SIZE + i * WORKER_SIZE for i in range(2)]
        self.launcher = self.workers[-1] + WORKER_SIZE
        self.faults = self.launcher + 5  # how many there were
        self.processes = [*self.servers, *self.workers]
        self.meaning = {**self._of_servers(), **self._of_sums(), **self._of_workers()}
        self.meaning |= self._of_launcher()
        self.guards = self._guards()
        self.programs: dict[int, Program] = {}
        server, worker = self._server_program(), self._worker_program()
        for each in self.servers:
            self.programs[each] = server
        for each in self.workers:
            self.programs[each] = worker
        self.sum_program = self._sum_program()
        self.launcher_program = self._compile([T.DEATH])

    # ---- from rows to programs

    def _compile(self, phases: Iterable[Any], at: int = 0) -> Program:
        """The steps of phases, which begin at a place of a program, with controls for guards."""
        program: Program = []

        def guard(name: str, what: str) -> int | None:
            """Room for the control that leaves out what is guarded; None if nothing is."""
            if not name or name in ALWAYS or what == self.mutant.unguarded:
                return None
            program.append(lambda s, b, pc: pc)
            return len(program) - 1

        def close(place: int | None, phase: str, name: str) -> None:
            if place is not None:
                holds = self.guards.get(f"{phase}: {name}") or self.guards[name]
                end = at + len(program)
                program[place] = lambda s, b, pc: pc + 1 if holds(s, b) else end

        def emit(phase: Any) -> None:
            place = guard(phase.when, phase.name)
            for each in phase.rows:
                if not isinstance(each, T.Transition):
                    emit(each)
                    continue
                row = each
                if each.name in self.mutant.exchanged:
                    first, second = self.mutant.exchanged
                    row = T.ROWS[second if each.name == first else first]
                if row.name in OUTSIDE or row.name == self.mutant.without:
                    continue
                inner = guard(row.when, row.name)
                for step in self.meaning[row.name]:
                    waits = row.name != self.mutant.unwaited
                    program.append(step if waits else step._replace(ready=None))
                close(inner, phase.name, row.when)
            close(place, phase.name, phase.when)

        for phase in phases:
            emit(phase)
        return program

    def _server_program(self) -> Program:
        opening = self._compile([T.OPENING], 1)
        loop = 1 + len(opening)
        version = self._compile([T.VERSION], loop + 1)
        end = loop + 1 + len(version) + 1
        freed = end + len(self._compile([T.END], end)) - 1

        def begin(s: State, b: int, pc: int) -> int:
            return (pc + 1, freed, ENDED)[s[b + GONE]]

        def turn(s: State, b: int, pc: int) -> int:
            if self.frees and s[b + VERSION] >= self.last:
                return end
            s[b + VERSION] += 1
            return loop + 1

        def again(s: State, b: int, pc: int) -> int:
            # What nobody will read: so that states are alike that differ in it alone.
            s[b + KEPT], s[b + BEFORE] = (0, 0), -1
            return loop

        def stop(s: State, b: int, pc: int) -> int:
            return ENDED

        return [begin, *opening, turn, *version, again, *self._compile([T.END], end), stop]

    def _sum_program(self) -> Program:
        rows = self._compile([T.SUM], 1)

        def begin(s: State, b: int, pc: int) -> int:
            s[b + SUM_NUMBER] = s[b + SUM_NUMBER] + 1 if s[b + SUM_NUMBER] else max(s[b + NOTED], 1)
            return 1

        return [begin, *rows, lambda s, b, pc: 0]

    def _worker_program(self) -> Program:
        """Its store is opened, then each step: position, commit, result, and the sum behind it."""
        position = self._compile([T.POSITION], 4)
        batch = 4 + len(position)
        rejoin = self._compile([T.REJOIN], batch)
        commit_at = batch + len(rejoin) + 1
        commit = self._compile([T.COMMIT], commit_at)
        again = commit_at + len(commit) + 1
        repeat = self.meaning["commit.repeated"]
        result_at = again + 1 + len(repeat)
        result = self._compile([T.RESULT], result_at)
        ask = self._compile([T.ASK] if self.sums else [], result_at + len(result))

        def open_(s: State, b: int, pc: int) -> int:
            s[b + VERSION] = s[b + POSITION] or OPENED + 1
            return 3

        def step(s: State, b: int, pc: int) -> int:
            if s[b + VERSION] > self.last:
                s[b + SPEC] = 0  # what it describes goes with it
                return ENDED
            # It is noted already where this process goes on; a store is freed behind all positions.
            noted = s[b + VERSION] not in self.positions or s[b + VERSION] == s[b + POSITION]
            return batch if noted else 4

        def is_new(s: State, b: int, pc: int) -> int:
            return again if s[b + COMMITTED] >= s[b + VERSION] else commit_at

        def next_(s: State, b: int, pc: int) -> int:
            s[b + VERSION] += 1
            return 3

        return [
            Step(lambda s, b: s.__setitem__(b + SPEC, 1)),
            Step(lambda s, b: None, lambda s, b: min(self._told(s, b)) >= OPENED),
            open_,
            step,
            *position,
            *rejoin,
            is_new,
            *commit,
            lambda s, b, pc: result_at,
            Step(self._compute_again),
            *repeat,
            *result,
            *ask,
            next_,
        ]  # fmt: skip

    # ---- what rows mean

    def _guards(self) -> dict[str, Callable[[State, int], bool]]:
        return {
            "unmade": lambda s, b: not self.frees or s[b + PUBLISHED] < self.last,
            "opening: new": lambda s, b: s[b + PUBLISHED] == 0,
            "sum: new": lambda s, b: s[b + NOTED] < s[b + SUM_NUMBER],
            "looks": lambda s, b: s[b + VERSION] == self.norm,
            "reduces": lambda s, b: s[b + VERSION] == self.norm,
            "journaled": self._trains,
            "applies": self._trains,
            "unfinished": lambda s, b: s[b + DONE] != s[b + VERSION],
            "unasked": lambda s, b: (
                s[b + ANSWER] < s[b + VERSION] - OPENED
                and s[self._part(b)] < s[b + VERSION] - OPENED
            ),
            "result: unnoted": lambda s, b: s[b + GOT] < s[b + VERSION],
            "ask: unnoted": lambda s, b: s[b + SUMMED] < s[b + VERSION],
            "committed": lambda s, b: s[b + COMMITTED] >= s[b + VERSION] == s[b + POSITION],
        }

    def _trains(self, s: State, b: int) -> bool:
        return not self.frees or bool(s[b + VERSION] < self.last)

    def _other(self, b: int) -> int | None:
        return next((each for each in self.servers if each != b), None)

    def _rank(self, b: int) -> int:
        return self.workers.index(b)

    def _told(self, s: State, b: int) -> list[int]:
        return s[b + TOLD : b + TOLD + len(self.servers)]

    def _part(self, b: int) -> int:
        return self.servers[0] + PART + self._rank(b)

    def _values(self, version: int) -> tuple[int, ...]:
        """What a cell is in a version."""
        return tuple(range(OPENED + 1, version + 1))

    def _of_servers(self) -> dict[str, list[Step]]:
        def describe(s: State, b: int) -> None:
            s[b + DESCRIBED] = 1

        def is_described(s: State, b: int) -> bool:
            return bool(s[b + DESCRIBED]) or all(s[each + SPEC] for each in self.workers)

        def allocate(s: State, b: int) -> None:
            if not s[b + DESCRIBED]:
                raise Violation("a store is opened that nobody has described")
            s[b + ALLOCATED] = 1

        def sees_other(s: State, b: int) -> bool:
            other = self._other(b)
            return other is None or (s[other + ALLOCATED] == 1 and s[other + GONE] < 2)

        def say(number: Callable[[State, int], int]) -> Callable[[State, int], None]:
            def act(s: State, b: int) -> None:
                other = self._other(b)
                if other is not None and s[other + GONE] < 2:
                    if not s[other + ALLOCATED]:
                        raise Violation("something is written to a region that is not there")
                    s[other + SUMS] = max(s[other + SUMS], number(s, b))

            return act

        def has_heard(number: Callable[[State, int], int]) -> Callable[[State, int], bool]:
            return lambda s, b: self._other(b) is None or s[b + SUMS] >= number(s, b)

        def nothing(s: State, b: int) -> None:
            pass

        def put_back(s: State, b: int) -> None:
            looks = self.mutant.restoring != RESTORING[1]
            if s[b + ARMED] and (not looks or s[b + DONE] < s[b + ARMED]):
                s[b + CELL] = s[b + UNDO]

        def disarm(s: State, b: int) -> None:
            s[b + ARMED], s[b + UNDO] = 0, TORN

        def note_opened(s: State, b: int) -> None:
            s[b + PUBLISHED] = s[b + RESULT] = OPENED

        def go_on(s: State, b: int) -> None:
            s[b + VERSION] = s[b + PUBLISHED]

        def tell(worker: int) -> Step:
            def act(s: State, b: int) -> None:
                at = worker + TOLD + self.servers.index(b)
                version = s[b + VERSION] or s[b + PUBLISHED]
                if version > s[at]:
                    if version != s[b + RESULT] or version > s[b + PUBLISHED]:
                        raise Violation(f"version {version} was told before it was noted")
                    s[at] = version

            return Step(act)

        tells = [tell(each) for each in self.workers]

        def save_numbers(s: State, b: int) -> None:
            if s[b + BEGUN] == s[b + VERSION]:
                s[b + COUNT] = s[b + BEFORE]
            else:
                s[b + BEFORE] = s[b + COUNT]

        def begin(s: State, b: int) -> None:
            s[b + BEGUN] = s[b + VERSION]

        def reduce(s: State, b: int) -> None:
            if s[b + COUNT] != s[b + VERSION] - OPENED - 1:
                raise Violation("a norm was taken with counts of another version")
            s[b + KEPT] = tuple(s[b + SLOT : b + SLOT + 2])

        def save(s: State, b: int) -> None:
            s[b + UNDO] = s[b + CELL]

        def arm(s: State, b: int) -> None:
            s[b + ARMED] = s[b + VERSION]

        def tear(s: State, b: int) -> None:
            # What a kernel reads before it writes is in its registers.
            s[b + CELL] = (*TORN, *s[b + CELL])

        def change(s: State, b: int) -> None:
            version = s[b + VERSION]
            used = tuple(s[b + SLOT : b + SLOT + 2])
            if version == self.norm:
                used = s[b + KEPT]
                if not has_heard(lambda s, b: version)(s, b):
                    raise Violation("the norm was taken without the sums of the other server")
            if used != (version, version):
                raise Violation(f"version {version} was made of the gradients of {used}")
            s[b + CELL] = (*s[b + CELL][1:], version)

        def mark(s: State, b: int) -> None:
            s[b + DONE] = s[b + VERSION]

        def count(s: State, b: int) -> None:
            s[b + COUNT] += 1

        def complete(s: State, b: int) -> None:
            version = s[b + VERSION]
            if version == self.norm and s[b + KEPT] != (version, version):
                raise Violation(f"the norm of version {version} is that of {s[b + KEPT]}")
            s[b + MADE] = version

        def publish(s: State, b: int) -> None:
            version = s[b + VERSION]
            trained = version if self._trains(s, b) else version - 1
            if s[b + PUBLISHED] >= version:
                raise Violation(f"version {version} was made again after it was noted")
            if s[b + CELL] != self._values(trained) or s[b + COUNT] != trained - OPENED:
                raise Violation(f"version {version} is {s[b + CELL]} after {s[b + COUNT]} steps")
            s[b + PUBLISHED], s[b + RESULT] = version, s[b + MADE]

        def release(s: State, b: int) -> None:
            s[b + GONE] = 1

        def free(s: State, b: int) -> None:
            if s[b + GONE] != 1:
                raise Violation("regions were freed of which a successor does not know")
            s[b + GONE] = 2

        restore = [
            Step(act, local=local)
            for name, act, local in (
                (RESTORING[0], put_back, False),
                (RESTORING[2], disarm, True),
            )
            if name != self.mutant.restoring
        ]
        here = lambda s, b: s[b + VERSION]  # noqa: E731
        return {
            "opening.described": [Step(describe, is_described)],
            "opening.ready": [
                Step(allocate),
                Step(say(lambda s, b: 1), sees_other),
                Step(nothing, has_heard(lambda s, b: 1)),
                *restore,
            ],
            "opening.noted": [Step(note_opened, local=True)],
            "opening.told": [*tells, Step(go_on, local=True)],
            "version.gathered": [
                Step(nothing, lambda s, b: min(s[b + COMMIT : b + COMMIT + 2]) >= s[b + VERSION])
            ],
            "numbers.saved": [Step(save_numbers, local=True)],
            "version.begun": [Step(begin, local=True)],
            "version.reduced": [Step(reduce)],
            "norms.sent": [Step(say(here), sees_other)],
            "norms.awaited": [Step(nothing, has_heard(here))],
            "cell.saved": [Step(save, local=True)],
            "cell.armed": [Step(arm, local=True)],
            "cell.changed": [Step(tear), Step(change)],
            "cell.done": [Step(mark, local=True)],
            "cell.disarmed": [Step(disarm, local=True)],
            "version.counted": [Step(count, local=True)],
            "version.applied": [Step(complete, local=True)],
            "version.published": [Step(publish, local=True)],
            "version.told": tells,
            "store.through": [Step(say(here))],
            "store.awaited": [Step(nothing, has_heard(here))],
            "store.released": [Step(release, local=True)],
            "store.freed": [Step(free)],
        }

    def _of_sums(self) -> dict[str, list[Step]]:
        def has_parts(s: State, b: int) -> bool:
            return bool(min(s[b + PART : b + PART + 2]) >= s[b + SUM_NUMBER])

        def gather(s: State, b: int) -> None:
            parts = s[b + PART : b + PART + 2]
            if parts != [s[b + SUM_NUMBER]] * 2:
                raise Violation(f"sum {s[b + SUM_NUMBER]} was made of the parts of {parts}")
            s[b + SUMMED_UP] = s[b + SUM_NUMBER]

        def note(s: State, b: int) -> None:
            if s[b + SUMMED_UP] != s[b + SUM_NUMBER] > s[b + NOTED]:
                raise Violation("a sum was noted that was not made")
            s[b + NOTED] = s[b + SUM_NUMBER]

        def tell(worker: int) -> Step:
            def act(s: State, b: int) -> None:
                if s[b + SUM_NUMBER] > s[worker + ANSWER]:
                    if s[b + NOTED] != s[b + SUM_NUMBER]:
                        raise Violation(f"sum {s[b + SUM_NUMBER]} was told before it was noted")
                    s[worker + ANSWER] = s[b + SUM_NUMBER]

            return Step(act)

        return {
            "sum.gathered": [Step(gather, has_parts)],
            "sum.noted": [Step(note, local=True)],
            "sum.told": [tell(each) for each in self.workers],
        }

    def _compute_again(self, s: State, b: int) -> None:
        """The batch of a commit that counts: nothing leaves, and parameters stand still.

        A version without a position is made of values that a script gives; behind these a batch may
        be computed with what they have changed, as nothing of it is used.
        """
        version = s[b + VERSION]
        given = version not in self.positions or s[b + POSITION] == version < s[b + COMMITTED]
        for server in () if given else self.servers:
            if s[server + CELL] != self._values(s[b + VERSION]):
                raise Violation("a successor computes while parameters move")

    def _of_workers(self) -> dict[str, list[Step]]:
        def mark(s: State, b: int) -> None:
            s[b + POSITION] = s[b + VERSION]
            s[b + COMMITTED] = s[b + GOT] = s[b + SUMMED] = 0

        def send_gradients(s: State, b: int) -> None:
            for server in self.servers:
                if not self.frees or s[b + VERSION] < self.last:
                    if s[server + CELL] != self._values(s[b + VERSION] - 1):
                        raise Violation(
                            f"gradients of version {s[b + VERSION]} from {s[server + CELL]}"
                        )
                s[server + SLOT + self._rank(b)] = s[b + VERSION]

        def note_commit(s: State, b: int) -> None:
            s[b + COMMITTED] = s[b + VERSION]

        def commit(server: int) -> Step:
            def act(s: State, b: int) -> None:
                at = server + COMMIT + self._rank(b)
                if s[server + SLOT + self._rank(b)] != s[b + VERSION]:
                    raise Violation("a commit was sent without its gradients")
                s[at] = max(s[at], s[b + VERSION])

            return Step(act)

        def repeat(server: int) -> Step:
            def act(s: State, b: int) -> None:
                at = server + COMMIT + self._rank(b)
                s[at] = max(s[at], s[b + VERSION])

            return Step(act)

        def has_results(s: State, b: int) -> bool:
            return min(self._told(s, b)) >= s[b + VERSION]

        def get(s: State, b: int) -> None:
            if {*self._told(s, b)} != {s[b + VERSION]}:
                raise Violation(f"a worker at {s[b + VERSION]} was told {self._told(s, b)}")

        def note_result(s: State, b: int) -> None:
            if min(self._told(s, b)) < s[b + VERSION]:
                raise Violation("a result is noted that has not come")
            s[b + GOT] = s[b + VERSION]

        def send_part(s: State, b: int) -> None:
            if s[self._part(b)] >= s[b + VERSION] - OPENED:
                raise Violation("a part is written that the server may be reading")
            s[self._part(b)] = s[b + VERSION] - OPENED

        def has_answer(s: State, b: int) -> bool:
            return bool(s[b + ANSWER] >= s[b + VERSION] - OPENED)

        def answer(s: State, b: int) -> None:
            if s[b + ANSWER] != s[b + VERSION] - OPENED:
                raise Violation("a worker has got another sum than it asked for")

        def note_answer(s: State, b: int) -> None:
            if not has_answer(s, b):
                raise Violation("a sum is noted that has not come")
            s[b + SUMMED] = s[b + VERSION]

        return {
            "position.noted": [Step(mark, local=True)],
            "gradients.sent": [Step(send_gradients)],
            "commit.noted": [Step(note_commit, local=True)],
            "commit.begun": [commit(self.servers[0])],
            "commit.sent": [commit(each) for each in self.servers[1:]],
            "result.come": [Step(get, has_results)],
            "result.noted": [Step(note_result, local=True)],
            "part.sent": [Step(send_part)],
            "answer.come": [Step(answer, has_answer)],
            "answer.noted": [Step(note_answer, local=True)],
            "commit.repeated": [repeat(each) for each in self.servers],
            "version.reached": [Step(lambda s, b: None, has_results)],
        }

    def _of_launcher(self) -> dict[str, list[Step]]:
        # Its memory: the row that comes next, whose place, and what it has done for that.
        def note(what: int) -> Callable[[State, int], None]:
            def act(s: State, b: int) -> None:
                s[b + 2 + what] = 1

            return act

        def start(s: State, b: int) -> None:
            if not s[b + 3]:
                raise Violation("a successor was started with the term of another process")
            s[b + 4] = 1

        def hand_over(s: State, b: int) -> None:
            if s[b + 2 : b + 5] != [1, 1, 1]:
                raise Violation("a place was given away without a term, a count or a process")
            if s[s[b + 1]] != DEAD:
                raise Violation("two processes have one place")
            s[s[b + 1]] = 0
            if self.sums and s[b + 1] in self.servers:
                s[s[b + 1] + SUM_PC] = 0
            s[b + 1], s[b + 2 : b + 5] = -1, [0, 0, 0]

        return {
            "death.noticed": [Step(lambda s, b: None, lambda s, b: s[s[b + 1]] == DEAD)],
            "death.counted": [Step(note(0))],
            "term.granted": [Step(note(1))],
            "successor.started": [Step(start)],
            "place.handed": [Step(hand_over)],
        }

    # ---- exploring

    def start(self) -> State:
        """Nothing has happened yet."""
        server = [0] * SERVER_SIZE
        server[CELL], server[UNDO], server[KEPT], server[BEFORE] = (), TORN, (0, 0), -1
        s: State = [*server * len(self.servers), *[0] * WORKER_SIZE * 2, 0, -1, 0, 0, 0, 0]
        for each in self.processes:
            self._settle(s, each, self.programs[each], PC)
        if self.sums:
            self._settle(s, self.servers[0], self.sum_program, SUM_PC)
        return s

    @staticmethod
    def _settle(s: State, b: int, program: Program, pc: int) -> None:
        """Goes through controls, up to the next step."""
        at = s[b + pc]
        while at >= 0 and not isinstance(program[at], Step):
            at = program[at](s, b, at)  # type: ignore[operator]
        s[b + pc] = at

    def _run(self, state: Memory, b: int, program: Program, pc: int) -> Memory | None:
        """The state after the next step of a process; None: it has to wait."""
        step = program[state[b + pc]]
        if step.ready is not None and not step.ready(state, b):  # type: ignore[union-attr]
            return None
        s = list(state)
        step.act(s, b)  # type: ignore[union-attr]
        s[b + pc] += 1
        self._settle(s, b, program, pc)
        return tuple(s)

    def _kill(self, state: Memory, b: int) -> Memory:
        s = list(state)
        s[b + PC], s[b + VERSION] = DEAD, 0
        if b in self.servers:
            s[b + SUM_PC] = DEAD
            s[b + SUM_NUMBER] = s[b + MADE] = s[b + SUMMED_UP] = 0
        s[self.faults] += 1
        return tuple(s)

    def _can_die(self, state: Memory, b: int) -> bool:
        """A worker that frees a store is not replaced: its script may not close an optimizer."""
        if state[b + PC] < 0:
            return False
        return b in self.servers or not self.frees or bool(state[b + VERSION] < self.last)

    def _replace(self, state: Memory, place: int) -> Memory | None:
        """The next row of the launcher; it begins with a place."""
        b, program = self.launcher, self.launcher_program
        s = list(state)
        s[b + 1] = place
        step = program[s[b]]
        assert isinstance(step, Step)
        if step.ready is not None and not step.ready(s, b):
            return None
        step.act(s, b)
        s[b] += 1
        if s[b] == len(program):
            s[b] = 0
            if s[b + 1] != -1:
                raise Violation("the launcher is through, and nobody has the place")
            self._settle(s, place, self.programs[place], PC)
            if self.sums and place in self.servers:
                self._settle(s, place, self.sum_program, SUM_PC)
        return tuple(s)

    def successors(self, state: Memory, faults: int, reduced: bool) -> tuple[list[Memory], bool]:
        """The next states, and whether there are any without another fault."""
        more = state[self.faults] < faults
        if (place := state[self.launcher + 1]) != -1:
            after = self._replace(state, place)
            if after is not None and reduced:
                return [after], True
            found = [] if after is None else [after]
        else:
            found = []
            for each in self.processes:
                # Only where somebody is dead: a change of a row may let it begin with the living.
                if state[each] == DEAD or self.mutant != RIGHT:
                    after = self._replace(state, each)
                    if after is not None:
                        found.append(after)
        if reduced:
            for each in self.processes:
                # A server with two threads dies with both: there all orders count.
                if state[each] >= 0 and not (self.sums and each in self.servers):
                    step = self.programs[each][state[each]]
                    if step.local:  # type: ignore[union-attr]
                        after = self._run(state, each, self.programs[each], PC)
                        assert after is not None
                        if more and self._can_die(state, each):
                            return [after, self._kill(state, each)], True
                        return [after], True
        for each in self.processes:
            if state[each] >= 0:
                after = self._run(state, each, self.programs[each], PC)
                if after is not None:
                    found.append(after)
        if self.sums and state[self.servers[0] + SUM_PC] >= 0:
            after = self._run(state, self.servers[0], self.sum_program, SUM_PC)
            if after is not None:
                found.append(after)
        goes_on = bool(found)
        if more:
            found += [self._kill(state, b) for b in self.processes if self._can_die(state, b)]
        return found, goes_on

    def check_end(self, state: Memory) -> None:
        """Nothing more can happen."""
        if any(state[b + PC] != ENDED for b in self.workers) or state[self.launcher + 1] != -1:
            raise Violation("somebody waits for ever")
        trained = self.last - self.frees
        for b in self.servers:
            ended = state[b + PC] == ENDED if self.frees else state[b + PC] >= 0
            right = state[b + CELL] == self._values(trained), state[b + COUNT] == trained - OPENED
            gone = state[b + GONE] == (2 if self.frees else 0)
            if not (ended and gone and all(right) and state[b + PUBLISHED] == self.last):
                raise Violation(f"in the end a server has {state[b : b + SERVER_SIZE]}")

    def explore(self, faults: int, reduced: bool = True) -> tuple[int, set[Memory]]:
        """The number of states, and the last ones; Violation says what is wrong in one of them."""
        start = tuple(self.start())
        seen, left, ends = {start}, [start], set()
        while left:
            state = left.pop()
            found, goes_on = self.successors(state, faults, reduced)
            if not goes_on:
                self.check_end(state)
                ends.add(state)
            for after in found:
                if after not in seen:
                    seen.add(after)
                    left.append(after)
        return len(seen), ends


def versions(mutant: Mutant = RIGHT) -> Job:
    """A store at two servers."""
    return Job(servers=2, last=4, norm=3, sums=False, mutant=mutant)


def sums(mutant: Mutant = RIGHT) -> Job:
    """A store and sums at one server."""
    return Job(servers=1, last=3, norm=0, sums=True, mutant=mutant)


JOBS: dict[str, Callable[[Mutant], Job]] = {"versions": versions, "sums": sums}

ORDERS = (
    (T.OPENING, T.VERSION, T.END),
    (T.SUM,),
    (T.POSITION, T.COMMIT, T.RESULT, T.ASK),
    (T.REJOIN,),
    (T.DEATH,),
)
"""The phases in the order in which a process comes to them."""

_DONE = "a cell that is done is not put back, whether its copy is in force or not"
_AS_THEY_ARE = "where nothing is applied, numbers are as they were saved"
EQUIVALENT = {
    "numbers.saved always": _AS_THEY_ARE,
    "version.begun always": _AS_THEY_ARE,
    "version.reduced always": "where no norm is taken nobody reads what is kept",
    "without cell.disarmed": _DONE,
    "a successor that does not disarm": _DONE,
    "opening.noted before opening.ready": "nobody is told before both are done",
    "numbers.saved before version.gathered": "no number changes between two versions",
    "version.reduced before version.begun": "numbers are put back before both of them",
    "version.applied before version.counted": "a result tells nothing of counts",
    "sum.noted always": "what is noted again is what is noted",
    "commit.sent before commit.begun": "servers may get a commit in any order",
    "part.sent before result.noted": "a successor finds whether each was done, without the other",
    "term.granted before death.counted": "who is not replaced any more needs no term",
}
"""Changes of a row that change nothing that matters, and why."""


def mutants() -> Iterator[Mutant]:
    """Every row left out, every two neighbours exchanged, guards and waits dropped."""
    for phases in ORDERS:
        rows = [row for phase in phases for row in phase.all_rows() if row.name not in OUTSIDE]
        for row in rows:
            yield Mutant(without=row.name)
            if row.when and row.when not in ALWAYS:
                yield Mutant(unguarded=row.name)
            if row.waits:
                yield Mutant(unwaited=row.name)
        for first, second in pairwise(rows):
            yield Mutant(exchanged=(first.name, second.name))
        for phase in phases:
            for inner in within(phase):
                if inner.when and inner.when not in ALWAYS and inner is not T.TABLE:
                    yield Mutant(unguarded=inner.name)
    for what in RESTORING:
        yield Mutant(restoring=what)


def within(phase: Any) -> Iterator[Any]:
    """A phase, and those in it."""
    yield phase
    for each in phase.rows:
        if isinstance(each, T.Phase):
            yield from within(each)


def find(mutant: Mutant, faults: int = 1) -> str:
    """What is wrong with a change of the protocol; "" if nothing is."""
    for make in JOBS.values():
        try:
            make(mutant).explore(faults)
        except Violation as found:
            return str(found)
    return ""


def main() -> int:
    """Explores the jobs, then their mutants; 1 if one of these was not found."""
    for name, make in JOBS.items():
        started = time.perf_counter()
        number, ends = make(RIGHT).explore(2)
        seconds = time.perf_counter() - started
        print(f"{name}: {number} states, {len(ends)} of them last, {seconds:.1f} s", flush=True)
    started, survivors = time.perf_counter(), 0
    for mutant in mutants():
        what = str(mutant)
        if what in EQUIVALENT:
            found = find(mutant)
            print(f"{'FOUND' if found else 'equivalent'}: {what}: {found or EQUIVALENT[what]}")
        else:
            found = find(mutant) or find(mutant, 2)
            print(f"found: {what}: {found}" if found else f"NOT found: {what}", flush=True)
        survivors += bool(found) == (what in EQUIVALENT)
    print(f"{survivors} not as they should be, {time.perf_counter() - started:.1f} s")
    return int(survivors > 0)


if __name__ == "__main__":
    sys.exit(main())
