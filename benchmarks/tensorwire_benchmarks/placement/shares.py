"""How a step divides into computation and communication.

    forward, backward   of workers that only compute, beside each other
    exposed             what a step takes longer than such a worker's: paired by turns
    hidden              for how long gradients were on their way while backward went on, by what the
                        system itself tells; it costs no time but where it slows backward down,
                        and that is exposed

Copying in the thread that runs backward is exposed: backward waits for it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from tensorwire.bench.harness import median, percentile
from tensorwire.bench.rows import Row
from tensorwire_benchmarks.training.figures import extra_seconds
from tensorwire_benchmarks.training.stage import Stage
from tensorwire_benchmarks.training.systems import COMPUTATION, LIMIT

PARTS = ("forward", "backward", "hidden", "exposed")


def rows_of(stage: Stage, names: Sequence[str]) -> list[Row]:
    """The rows of a stage's parts, for the systems of these names; without figures none."""
    rows = [*_computation(stage)]
    for name in names:
        if name not in (COMPUTATION.name, LIMIT) and name in stage.ends:
            rows += [_hidden(stage, name), *_exposed(stage, name)]
    return rows


def _computation(stage: Stage) -> list[Row]:
    name = COMPUTATION.name
    if name not in stage.ends:
        return []
    turns = stage.turns[name]
    found = []
    for part, samples in (
        ("forward", [s for turn in turns.forward for s in turn]),
        ("backward", [s for turn in turns.backward for s in turn]),
    ):
        row = dataclasses.replace(
            stage.empty(part, name),
            seconds_median=median(samples),
            seconds_p99=percentile(samples, 0.99),
            operations=len(samples),
            note="of the slowest worker",
        )
        found.append(row)
    return found


def _hidden(stage: Stage, name: str) -> Row:
    end = stage.ends[name]
    return dataclasses.replace(
        stage.empty("hidden", name),
        seconds_median=end.hidden_s,
        operations=end.steps,
        note="the mean of all steps that were not held, of the slowest worker, by what it tells",
    )


def _exposed(stage: Stage, name: str) -> list[Row]:
    if COMPUTATION.name not in stage.ends:
        return []
    own = [median(turn) for turn in stage.turns[name].step]
    computation = [median(turn) for turn in stage.turns[COMPUTATION.name].step]
    extra = extra_seconds(own, computation)
    note = "the median of the differences of turns"
    if extra.interval is not None:
        note += f"; 95 % interval {extra.interval[0]:.3g} to {extra.interval[1]:.3g} s"
    row = dataclasses.replace(
        stage.empty("exposed", name),
        seconds_median=extra.seconds,
        operations=sum(map(len, stage.turns[name].step)),
        note=note,
    )
    return [row]
