"""All interleavings of a durable job in which servers are killed: `python models/takeover.py`.

Two servers with one cell each, two workers, two versions (the second one with a norm) and the end
of the store; up to two kills. A server runs the rows of TABLE from top to bottom; between any two
of them it may be killed, and later a successor runs RESTORE on the same memory. The rows are named
after the failpoints of src/tensorwire/failpoints.py where these are, so that a test can compare the
two.

What must hold: every state but the last has a next one, and in the last one each version was
applied to each cell once, from the gradients of that version. Each change of a row must be found.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

SERVERS, WORKERS, LAST = (0, 1), (0, 1), 3  # the third version frees the store
TORN = (-1,)


class Server(NamedTuple):
    """Memory of a server that outlives it, then what its process has for itself."""

    cell: tuple[int, ...] = ()  # the versions that were applied
    undo: tuple[int, ...] = TORN
    armed: int = 0
    done: int = 0
    count: int = 0
    count_before: int = -1
    begun: int = 0
    kept: tuple[int, int] = (0, 0)
    result: int = 0
    published: int = 0
    commits: tuple[int, int] = (0, 0)  # of each worker
    slots: tuple[int, int] = (0, 0)  # the version that each worker's gradients are for
    sums: tuple[int, int] = (0, 0)  # of each server: the version of its sums
    freed: bool = False
    row: int = 0  # that comes next; -1: it is dead, -2: it has ended
    version: int = 1


class Worker(NamedTuple):
    version: int = 1  # that it works on
    row: int = 0
    told: tuple[int, int] = (0, 0)  # by each server


class State(NamedTuple):
    servers: tuple[Server, Server] = (Server(), Server())
    workers: tuple[Worker, Worker] = (Worker(), Worker())
    kills: int = 0


class Violation(Exception):
    """The protocol has lost or doubled something."""


Step = Callable[[State, int], State | None]
"""What a server does to the state; None: it has to wait."""


def put(pair: tuple, index: int, value: object) -> tuple:  # type: ignore[type-arg]
    return (value, pair[1]) if index == 0 else (pair[0], value)


def change(state: State, me: int, **what: object) -> State:
    mine = state.servers[me]._replace(**what)  # type: ignore[arg-type]
    return state._replace(servers=put(state.servers, me, mine))


def jump(state: State, me: int, to: str) -> State:
    """The server goes on behind a row."""
    return change(state, me, row=NAMES.index(to))


def gather(state: State, me: int) -> State | None:
    mine = state.servers[me]
    return state if min(mine.commits) >= mine.version else None


def begin_copy(state: State, me: int) -> State:
    mine = state.servers[me]
    if mine.version == LAST:
        return jump(state, me, "version.applied")
    return change(state, me, count_before=mine.count) if mine.begun != mine.version else state


def begin(state: State, me: int) -> State:
    mine = state.servers[me]
    return change(state, me, begun=mine.version, count=mine.count_before)


def reduce(state: State, me: int) -> State:
    mine = state.servers[me]
    return change(state, me, kept=mine.slots)


def send_sums(state: State, me: int) -> State | None:
    mine, other = state.servers[me], state.servers[1 - me]
    if mine.version != 2:
        return jump(state, me, "norms.awaited")
    if other.freed:
        return None  # its region is gone: who needs it waits for ever
    return change(state, 1 - me, sums=put(other.sums, me, mine.version))


def await_sums(state: State, me: int) -> State | None:
    mine = state.servers[me]
    return state if mine.version != 2 or mine.sums[1 - me] >= mine.version else None


def skip_done(state: State, me: int) -> State:
    mine = state.servers[me]
    return jump(state, me, "cell.disarmed") if mine.done == mine.version else state


def save(state: State, me: int) -> State:
    return change(state, me, undo=state.servers[me].cell)


def arm(state: State, me: int) -> State:
    return change(state, me, armed=state.servers[me].version)


def tear(state: State, me: int) -> State:
    mine = state.servers[me]
    # What a kernel reads before it writes is in its registers.
    return change(state, me, cell=(*TORN, *mine.cell))


def finish(state: State, me: int) -> State:
    mine = state.servers[me]
    if mine.version == 2 and mine.sums[1 - me] < 2:
        raise Violation("the norm was taken without the sums of the other server")
    if mine.kept != (mine.version, mine.version):
        raise Violation(f"version {mine.version} was made of the gradients of {mine.kept}")
    return change(state, me, cell=(*mine.cell[1:], mine.version))


def mark(state: State, me: int) -> State:
    return change(state, me, done=state.servers[me].version)


def disarm(state: State, me: int) -> State:
    return change(state, me, armed=0)


def count(state: State, me: int) -> State:
    return change(state, me, count=state.servers[me].count + 1)


def note_result(state: State, me: int) -> State:
    mine = state.servers[me]
    if mine.version < LAST and mine.kept != (mine.version, mine.version):
        raise Violation(f"the norm of version {mine.version} is that of {mine.kept}")
    return change(state, me, result=state.servers[me].version)


def publish(state: State, me: int) -> State:
    return change(state, me, published=state.servers[me].version)


def tell(whom: int) -> Step:
    def step(state: State, me: int) -> State:
        mine, worker = state.servers[me], state.workers[whom]
        if mine.version > worker.told[me] and mine.result != mine.version:
            raise Violation(f"the result of version {mine.result} was told as {mine.version}")
        told = put(worker.told, me, max(worker.told[me], mine.version))
        return state._replace(workers=put(state.workers, whom, worker._replace(told=told)))

    return step


def next_version(state: State, me: int) -> State:
    mine = state.servers[me]
    if mine.version == LAST:
        return state
    return change(state, me, version=mine.version + 1, row=0)


def say_through(state: State, me: int) -> State:
    other = state.servers[1 - me]
    if other.freed:
        return state
    return change(state, 1 - me, sums=put(other.sums, me, LAST))


def await_others(state: State, me: int) -> State | None:
    return state if state.servers[me].sums[1 - me] >= LAST else None


def free(state: State, me: int) -> State:
    return change(state, me, freed=True, row=-2)


TABLE: list[tuple[str, Step]] = [
    ("version.gathered", gather),
    ("version.copied", begin_copy),
    ("version.begun", begin),
    ("version.reduced", reduce),
    ("norms.sent", send_sums),
    ("norms.awaited", await_sums),
    ("cell.skipped", skip_done),
    ("cell.saved", save),
    ("cell.armed", arm),
    ("cell.torn", tear),
    ("cell.changed", finish),
    ("cell.done", mark),
    ("cell.disarmed", disarm),
    ("version.counted", count),
    ("version.applied", note_result),
    ("version.published", publish),
    ("version.told.0", tell(0)),
    ("version.told", tell(1)),
    ("version.next", next_version),
    ("store.through", say_through),
    ("store.awaited", await_others),
    ("store.freed", free),
]
NAMES = [name for name, _ in TABLE]


def restore(state: State, me: int, rows: frozenset[str]) -> State | None:
    """What a successor does first; `rows` are those of RESTORE that are in force."""
    mine = state.servers[me]
    if mine.published < LAST and state.servers[1 - me].freed:
        return None  # it opens the store again, and looks for the regions of the other
    cell, armed, version = mine.cell, mine.armed, mine.published + 1
    if "put back" in rows and armed and ("unless done" not in rows or mine.done != armed):
        cell = mine.undo
    if "disarm" in rows:
        armed = 0
    row = 0
    if mine.published and "tell again" in rows:
        # The version before, which it then finds told; it goes on with the next one.
        version, row = mine.published, NAMES.index("version.told.0")
    elif mine.published == LAST:
        row = NAMES.index("store.through")
        version = LAST
    return change(state, me, cell=cell, armed=armed, version=version, row=row)


RESTORE = ("put back", "unless done", "disarm", "tell again")


def worker_step(state: State, rank: int) -> State | None:
    """Gradients to both servers, a commit to each, then the results of both."""
    mine = state.workers[rank]
    if mine.version > LAST:
        return None
    servers = state.servers
    if mine.row == 0:
        for me in SERVERS:
            slots = put(servers[me].slots, rank, mine.version)
            servers = put(servers, me, servers[me]._replace(slots=slots))
        mine = mine._replace(row=1)
    elif mine.row in (1, 2):
        me = mine.row - 1
        commits = put(servers[me].commits, rank, mine.version)
        servers = put(servers, me, servers[me]._replace(commits=commits))
        mine = mine._replace(row=mine.row + 1)
    elif min(mine.told) >= mine.version:
        mine = mine._replace(version=mine.version + 1, row=0)
    else:
        return None
    return state._replace(servers=servers, workers=put(state.workers, rank, mine))


def successors(
    state: State, table: list[tuple[str, Step]], restoring: frozenset[str], kills: int
) -> Iterator[State]:
    for rank in WORKERS:
        if (after := worker_step(state, rank)) is not None:
            yield after
    for me in SERVERS:
        mine = state.servers[me]
        if mine.row == -1:
            if (restored := restore(state, me, restoring)) is not None:
                yield restored
        elif 0 <= mine.row < len(table):
            before = change(state, me, row=mine.row + 1)
            after = table[mine.row][1](before, me)
            if after is not None:
                yield after
            if state.kills < kills:
                yield change(state, me, row=-1)._replace(kills=state.kills + 1)


def check_end(state: State) -> None:
    if any(worker.version <= LAST for worker in state.workers):
        raise Violation("somebody waits for ever")
    for mine in state.servers:
        if mine.row != -2 or mine.cell != tuple(range(1, LAST)) or mine.count != LAST - 1:
            raise Violation(f"in the end a server has {mine}")


def explore(
    table: list[tuple[str, Step]] = TABLE, restoring: tuple[str, ...] = RESTORE, kills: int = 2
) -> int:
    """The number of states; Violation says what is wrong in one of them."""
    start = State()
    seen, left = {start}, [start]
    while left:
        state = left.pop()
        ends = True
        for after in successors(state, table, frozenset(restoring), kills):
            ends = ends and after == state  # what changes nothing goes on for ever
            if after not in seen:
                seen.add(after)
                left.append(after)
        if ends:
            check_end(state)
    return len(seen)


def skip(state: State, me: int) -> State:
    """In place of a row that is left out."""
    return state


_DONE = "a cell that is done is not put back, whether its copy is in force or not"
_APART = "the two rows have nothing in common"
EQUIVALENT = {
    "without cell.disarmed": _DONE,
    "a successor without 'disarm'": _DONE,
    "version.copied before version.gathered": _APART,
    "version.reduced before version.begun": _APART,
    "cell.skipped before norms.awaited": "a cell that is done was made after the sums had come",
    "cell.saved before cell.skipped": _DONE,
    "version.counted before cell.disarmed": _APART,
    "version.told before version.told.0": _APART,
}
"""Changes of a row that change nothing that matters, and why."""


def mutants() -> Iterator[tuple[str, list[tuple[str, Step]], tuple[str, ...]]]:
    """Every row left out, every two neighbours exchanged; likewise what a successor does."""
    for index, (name, _) in enumerate(TABLE):
        changed = [*TABLE]
        changed[index] = name, skip
        yield f"without {name}", changed, RESTORE
    for index in range(len(TABLE) - 1):
        changed = [*TABLE]
        first, second = TABLE[index], TABLE[index + 1]
        changed[index], changed[index + 1] = (first[0], second[1]), (second[0], first[1])
        yield f"{second[0]} before {first[0]}", changed, RESTORE
    for name in RESTORE:
        yield (
            f"a successor without {name!r}",
            TABLE,
            tuple(each for each in RESTORE if each != name),
        )


if __name__ == "__main__":
    started = time.perf_counter()
    print(f"{explore()} states in {time.perf_counter() - started:.1f} s")
    survivors = []
    for what, changed_table, changed_restoring in mutants():
        try:
            explore(changed_table, changed_restoring, 1)
        except Violation as found:
            print(f"found: {what}: {found}")
            continue
        if what in EQUIVALENT:
            print(f"equivalent: {what}: {EQUIVALENT[what]}")
        else:
            survivors.append(what)
            print(f"NOT found: {what}")
    sys.exit(bool(survivors))
