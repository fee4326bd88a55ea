"""Lists the protocol of a durable job: the actions of its processes, their order and reasons.

A row is one transition of one process, named for what is true after it. The code of the
processes calls the failpoint of its name there, models/takeover.py and own_pace.py explore the
rows, and `python -m tensorwire.transitions` prints them. tests/unit/test_transitions.py compares
the order in the code with the order here. It knows names and sentences only: no memory, no process.
"""

from __future__ import annotations

from .phase import Phase as Phase
from .phase import Transition as Transition
from .phases_of_launcher import CHANGE, DEATH, MOVE
from .phases_of_modes import EVENT, PAUSE, STANDING

_AGAIN = "does it again, with the same bytes"
_DURABLE, _NEW = "durable", "new"

OPENING = Phase(
    "opening",
    "server",
    "opens a store",
    (
        Transition(
            "opening.described",
            "a server has noted what workers describe of a store",
            "reads what is noted: the workers may be gone",
        ),
        Transition(
            "opening.ready",
            "it has all regions of the store, and has told nobody",
            "finds the regions, and allocates those that are missing",
            waits="the same regions of other servers",
            when="unmade",
        ),
        Transition(
            "opening.noted",
            "the first version is noted as complete",
            "tells the workers",
            when=_NEW,
        ),
        Transition(
            "opening.told", "it has told workers that the store is open", "tells them again"
        ),
    ),
)

NORMS = Phase(
    "norms",
    "server",
    "exchanges sums of squares with other servers",
    (
        Transition("norms.sent", "its sums of squares are at other servers", _AGAIN),
        Transition(
            "norms.awaited",
            "it has those of the others",
            "reads them again: they stay",
            waits="the sums of all servers",
        ),
    ),
    when="looks",
)

CELL = Phase(
    "cell",
    "server",
    "makes a cell's new values; several threads, each with a cell of its own",
    (
        Transition(
            "cell.saved",
            "a copy of a cell is made and not yet in force",
            "makes the cell: nothing of it is changed",
            when=_DURABLE,
        ),
        Transition(
            "cell.armed",
            "it is in force, and the cell about to be changed",
            "puts the copy back, and makes the cell",
            when=_DURABLE,
        ),
        Transition(
            "cell.changed",
            "the cell is changed, and not yet marked as done",
            "puts the copy back, and makes the cell",
        ),
        Transition(
            "cell.done",
            "it is marked, and the copy still in force",
            "leaves the cell as it is",
            when=_DURABLE,
        ),
        Transition(
            "cell.disarmed",
            "the copy is no longer in force",
            "leaves the cell as it is",
            when=_DURABLE,
        ),
    ),
    when="unfinished",
)

TABLE = Phase(
    "table",
    "server",
    "makes the new values of a table's rows, as of a cell",
    (
        Transition(
            "table.saved",
            "a copy of rows of a table is made and not yet in force",
            "makes the rows: nothing of them is changed",
            when=_DURABLE,
        ),
        Transition(
            "table.armed",
            "it is in force, and the rows about to be changed",
            "puts the copy back, and makes the rows",
            when=_DURABLE,
        ),
        Transition(
            "table.changed",
            "the rows are changed, and not yet marked as done",
            "puts the copy back, and makes the rows",
        ),
        Transition(
            "table.done",
            "they are marked, and the copy still in force",
            "leaves the rows as they are",
            when=_DURABLE,
        ),
        Transition(
            "table.disarmed",
            "the copy is no longer in force",
            "leaves the rows as they are",
            when=_DURABLE,
        ),
    ),
    when="unfinished",
)

STEP = Phase(
    "step",
    "server",
    "does to its shard what the commits ask for",
    (
        Transition(
            "version.copied",
            "values that a worker gives have taken the place of parameters",
            "copies them again: they stay in the slot",
            when="publishes",
        ),
        Transition(
            "numbers.saved",
            "counts and numbers of tensors are copied, or put back if the version was begun",
            "copies them again: none is changed",
            when="journaled",
        ),
        Transition(
            "version.begun",
            "the version is noted as begun, and nothing is changed",
            "puts counts and numbers back",
            when="journaled",
        ),
        Transition(
            "version.reduced",
            "the reduced gradient of a first pass is kept",
            "reduces again: it is kept in memory of its own",
            when="reduces",
        ),
        NORMS,
        Transition(
            "norm.noted",
            'the norm is noted, where the step changes what it was taken of (`apply="worker"`)',
            "takes what is noted: some cells may be changed already",
            when="rescales",
        ),
        Phase("cells", "server", "makes all cells and tables", (CELL, TABLE), when="applies"),
        Transition(
            "version.counted",
            "buffers, counts and numbers of tensors have their new values",
            "puts counts and numbers back, and counts again; cells stay as they are",
            when="applies",
        ),
    ),
)

VERSION = Phase(
    "version",
    "server",
    "makes a version",
    (
        Transition(
            "version.gathered",
            "it has the commits of all slices",
            "reads them again: they stay",
            waits="the commits of all slices",
        ),
        STEP,
        Transition(
            "version.applied",
            "all cells and counts have their new values, and nobody knows",
            "puts counts back, and counts again; cells stay as they are",
        ),
        Transition(
            "version.published",
            "the version is noted as complete, with what is told of it, and nobody is told",
            "never makes it again; tells the workers",
            when=_DURABLE,
        ),
        Transition("version.told", "the workers are told", "tells them again, the same"),
    ),
)

END = Phase(
    "end",
    "server",
    "ends a store whose last version was made",
    (
        Transition(
            "store.through",
            "other servers know that it has made the last version of a store",
            "tells them again, unless they have gone on",
            when=_DURABLE,
        ),
        Transition(
            "store.awaited",
            "all servers have made it: nobody needs the regions any more",
            "looks again: what they told stays",
            waits="all servers to have made the last version",
            when=_DURABLE,
        ),
        Transition(
            "store.released",
            "a store is noted as freed, and its regions are there",
            "frees them",
        ),
        Transition("store.freed", "they are gone", "leaves the store out"),
    ),
)

SUM = Phase(
    "sum",
    "server",
    "adds up what all workers give (server 0)",
    (
        Transition(
            "sum.gathered",
            "a sum of all workers is made, and not noted",
            "makes it again: nobody knows of it",
            waits="the parts of all workers",
            when=_NEW,
        ),
        Transition(
            "sum.noted", "it is noted, and nobody is told", "never makes it again", when=_NEW
        ),
        Transition("sum.told", "the workers are told", "tells them again, the same"),
    ),
)

SNAPSHOT = Phase(
    "snapshot",
    "server",
    "copies its share of a version",
    (
        Transition(
            "snapshot.allocated",
            "memory for a snapshot of a version is there, and nothing is copied",
            "lets go of the memory: it is asked again",
        ),
        Transition(
            "snapshot.copied",
            "the version is copied, and not noted as held",
            "lets go of the copy: it is asked again, and the version stays until then",
        ),
        Transition(
            "snapshot.noted",
            "it is noted, and who has asked is not told",
            "has it, and tells so when it is asked again",
        ),
    ),
    when="makes",
)

LENDING = Phase(
    "lending",
    "server",
    "answers what a worker asks about snapshots and pauses",
    (
        Transition(
            "pause.ended",
            "the end of a worker's pauses is noted, and who has asked for it is not told",
            "notes it again",
            when="ends",
        ),
        SNAPSHOT,
        Transition(
            "snapshot.freed",
            "the memory of snapshots is freed, and who has asked for that is not told",
            "frees what is left of them",
            when="frees",
        ),
        Transition("snapshot.told", "who has asked is told", "answers again, the same"),
    ),
)

BORROWING = Phase(
    "borrowing",
    "worker",
    "takes a snapshot",
    (
        Transition(
            "snapshot.asked",
            "a worker has asked servers for a snapshot, and has no answer",
            "has all that its predecessor held freed, and asks for its own",
        ),
        Transition(
            "snapshot.held",
            "it has the snapshot, and nothing is written from it",
            "has it freed, and asks for its own",
            waits="the answers of all servers",
        ),
    ),
)

HOLDING = Phase(
    "holding",
    "worker",
    "notes what an optimizer has while another one steps",
    (
        Transition(
            "gradients.noted",
            "where gradients of another optimizer lie is noted, before this one commits",
            "takes them from there when it computes the batch again, and pushes none",
        ),
    ),
)

ASK = Phase(
    "ask",
    "worker",
    "gives its part of a sum, and gets the sum",
    (
        Transition(
            "part.sent",
            "a worker has sent its part of a sum",
            "does not send it again: the server may be reading it",
            when="unasked",
        ),
        Transition(
            "answer.come",
            "the sum is there, and not noted",
            "reads it again: there is no other before this worker asks",
            waits="the sum",
        ),
        Transition(
            "answer.noted",
            "the result of the sum is noted",
            "takes what is noted",
            when=_DURABLE,
        ),
    ),
    when="unnoted",
)

POSITION = Phase(
    "position",
    "worker",
    "notes where its script can go on",
    (
        Transition(
            "position.noted",
            "its position in the script is noted",
            "runs the script to there, and takes what is noted after it",
        ),
    ),
)

COMMIT = Phase(
    "commit",
    "worker",
    "commits a slice for a version",
    (
        Transition(
            "gradients.sent",
            "a slice's gradients are at all servers, or on their way over a network",
            "computes them again, with the same parameters",
        ),
        Transition(
            "commit.noted",
            "its commit is noted, and not sent",
            "sends what is noted, and pushes no gradients",
            when=_DURABLE,
        ),
        Transition(
            "commit.begun",
            "the commit is at the first server, and at no other one",
            "sends it to those servers that have not got it",
        ),
        Transition(
            "commit.sent",
            "the commit is at all servers",
            "sends it to those servers that have not got it",
        ),
    ),
)

RESULT = Phase(
    "result",
    "worker",
    "gets a version",
    (
        Transition(
            "result.come",
            "a version is in place at all servers, and its result not noted",
            "reads the result again: there is no other before this worker commits",
            waits="the results of all servers",
        ),
        Transition(
            "result.noted",
            "the result of a version is noted",
            "takes what is noted",
            when=_DURABLE,
        ),
    ),
    when="unnoted",
)

REJOIN = Phase(
    "rejoin",
    "worker",
    "goes on at the position of its predecessor",
    (
        Transition(
            "commit.repeated",
            "the commits that a predecessor has noted are at all servers",
            "looks again which servers have them",
            when="committed",
        ),
        Transition(
            "version.reached",
            "parameters stand still until it commits: what it has committed is made",
            "waits again",
            waits="the version of those commits at all servers",
            when="committed",
        ),
    ),
)

_NEXT = "there is none: the next worker takes over its slices, and those that it had"

TAKING = Phase(
    "taking",
    "worker",
    "takes over the slices of a worker that was killed and is not replaced",
    (
        Transition("owner.told", "all servers know whose commits they wait for now", _NEXT),
        Transition("slices.adopted", "the slices are among those that it computes", _NEXT),
        Transition(
            "commit.forwarded",
            "a commit that the dead one has sent to some servers only is at all of them",
            _NEXT,
        ),
    ),
)

CHANGING = Phase(
    "changing",
    "worker",
    "comes, goes or stays when the number of workers is changed",
    (
        Transition(
            "join.ready",
            "a worker that is to join has made its models and optimizers, and waits",
            "there is none: the number of workers stays",
        ),
        Transition(
            "change.made",
            "a worker has the places that it has after the change, or none, and all servers know",
            _NEXT,
            waits="those that leave, if it stays",
        ),
        Transition("join.made", "a worker that joins is where the others are", _NEXT),
    ),
)

PHASES = (
    OPENING,
    VERSION,
    EVENT,
    PAUSE,
    LENDING,
    END,
    SUM,
    ASK,
    POSITION,
    HOLDING,
    COMMIT,
    RESULT,
    REJOIN,
    BORROWING,
    TAKING,
    CHANGING,
    STANDING,
    DEATH,
    CHANGE,
    MOVE,
)
"""All of the protocol, in the order of a job; a phase is added here."""

ROWS = {row.name: row for phase in PHASES for row in phase.all_rows()}
"""All rows by their names."""


def rows_of(who: str) -> dict[str, Transition]:
    """Returns the rows that a "server", a "worker" or the "launcher" runs, by their names."""
    return {row.name: row for phase in PHASES if phase.who == who for row in phase.all_rows()}


def page() -> str:
    """Returns the tables that `python -m tensorwire.transitions` prints."""
    lines: list[str] = []
    for phase in PHASES:
        article = "The" if phase.who == "launcher" else "A"
        lines += [f"{article} {phase.who} {phase.what}:", ""]
        lines += [
            "| place | it waits for | what has happened | its successor |",
            "|---|---|---|---|",
        ]
        for row in phase.all_rows():
            lines.append(f"| `{row.name}` | {row.waits} | {row.what} | {row.then} |")
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    print(page(), end="")
