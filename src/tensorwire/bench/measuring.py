"""Makes the report of a run, also of one that Ctrl-C ends, and tells if the machine was quiet.

It knows nothing of what is measured.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from tensorwire.bench import machine
from tensorwire.bench.harness import paired_ratio
from tensorwire.bench.rows import Report, Row

MOST_OTHER_WORK = 0.05
"""The part of the cores' time above which other processes disturb the figures."""


@contextlib.contextmanager
def measuring(bench: str, settings: Mapping[str, Any]) -> Iterator[Report]:
    """Yields the report of a run. Ctrl-C ends the block early, with the rows so far.

    After the block `settings["other_work"]` of the report has the part of the cores' time that
    other processes took meanwhile, and `settings["warnings"]` a sentence if that is too much.

    Args:
        bench: its name.
        settings: what is run, ready for JSON.
    """
    about, others = machine.describe(), machine.OtherWork()
    warnings = machine.warnings_about(about)
    report = Report(bench, about, settings={**settings, "interrupted": False, "warnings": warnings})
    try:
        yield report
    except KeyboardInterrupt:
        report.settings["interrupted"] = True
    share = report.settings["other_work"] = others.share()
    if share is None:
        warnings.append("nothing tells whether other processes disturbed the figures")
    elif share > MOST_OTHER_WORK:
        warnings.append(
            f"other processes took {share:.0%} of the cores' time: they disturb the figures; "
            "run again on a quiet machine"
        )


def take_turns(
    ways: Mapping[str, Callable[[], Any]], rounds: int, warm: int = 1,
    chance: random.Random | None = None,
) -> dict[str, list[Any]]:  # fmt: skip
    """Runs each way once in every round, and returns what it gave, by its name.

    Every other round has the opposite order, so that none profits from its place; with `chance`
    each round has an order that is drawn. The first `warm` rounds, in which memory is made, are not
    returned.
    """
    names = list(ways)
    found: dict[str, list[Any]] = {name: [] for name in names}
    for number in range(warm + rounds):
        order = names if number % 2 else names[::-1]
        for name in order if chance is None else chance.sample(names, len(names)):
            result = ways[name]()
            if number >= warm:
                found[name].append(result)
    return found


def add_rows(
    report: Report, case: str, size_bytes: int, seconds: Mapping[str, Sequence[float]],
    notes: Mapping[str, str] | None = None, *, limit: str = "", moves: bool = False,
) -> None:  # fmt: skip
    """Adds a row of each system, and how the first one compares with the others, turn by turn.

    Args:
        report: gets them.
        case: of the rows.
        size_bytes: of the rows.
        seconds: of each turn, by system; the first one is ours.
        notes: by system.
        limit: the system that is a limit and no rival, if there is one.
        moves: an operation moves its bytes.
    """
    own, *others = seconds
    for system, each in seconds.items():
        row = Row(report.bench, case, system, size_bytes, note=(notes or {}).get(system, ""))
        beside = paired_ratio(seconds[limit], each) if system == own and limit in seconds else None
        report.rows.append(row.timed(each, moves=moves).beside(beside))
    for rival in others:
        if rival != limit:
            report.compare(case, size_bytes, own, rival, seconds[rival], seconds[own])
