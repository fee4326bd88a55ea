"""Divides a step into computation and communication.

    forward, backward   of workers that only compute, all at the same time
    exposed             the step's time beyond such a step, paired by turns
    hidden              the time in which gradients were sent while backward went on, as the system
                        itself reports; it costs time only where it slows backward down, and that
                        is exposed

Copying in the thread that runs backward is exposed: backward waits for it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from tensorwire.bench.harness import median
from tensorwire.bench.rows import Row
from tensorwire_benchmarks.contest import WireContest
from tensorwire_benchmarks.figures import extra_seconds
from tensorwire_benchmarks.systems import COMPUTATION

PARTS = ("forward", "backward", "hidden", "exposed")


def rows_of(contest: WireContest) -> Iterator[Row]:
    """Yields the rows of the parts of a step, without systems that did not run to their end."""
    computation = contest.turns[COMPUTATION.name] if COMPUTATION.name in contest.ends else None
    if computation is not None:
        for part in ("forward", "backward"):
            row = contest.empty(part, COMPUTATION.name)
            yield row.timed(computation.all(part), note="of the slowest worker")
    for name in contest.names:
        if name == COMPUTATION.name or name not in contest.ends:
            continue
        end = contest.ends[name]
        note = "the mean of all steps that were not held, of the slowest worker, by what it tells"
        yield dataclasses.replace(
            contest.empty("hidden", name),
            seconds_median=end.hidden_s,
            operations=end.steps,
            note=note,
        )
        if computation is None:
            continue
        own, alone = (turns.samples["step"] for turns in (contest.turns[name], computation))
        extra = extra_seconds(list(map(median, own)), list(map(median, alone)))
        note = "the median of the differences of turns"
        if extra.interval is not None:
            note += f"; 95 % interval {extra.interval[0]:.3g} to {extra.interval[1]:.3g} s"
        yield dataclasses.replace(
            contest.empty("exposed", name),
            seconds_median=extra.seconds,
            operations=sum(map(len, own)),
            note=note,
        )
