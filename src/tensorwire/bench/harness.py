"""Takes figures: timing, alternation with a limit, statistics, repeat counts.

A *limit* is what the machine allows (memcpy, a raw socket). It alternates with the measured system,
A limit B limit …, so that whatever disturbs the machine disturbs both; the ratio is the median of
the paired ratios and its interval comes from order statistics, so it assumes no distribution. This
module knows neither tensorwire nor any rival: an operation is a callable that takes a count, runs
that often, and returns the seconds of each run.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median as median

from tensorwire.bench.machine import process_cpu_seconds

Runner = Callable[[int], Sequence[float]]
"""Runs an operation `count` times and returns the seconds that each one took."""


# --- statistics ---------------------------------------------------------------------------------


def percentile(values: Sequence[float], fraction: float) -> float:
    """Returns the smallest value that at least `fraction` of all values do not exceed.

    Raises:
        ValueError: no values, or a fraction outside 0 to 1.
    """
    if not values or not 0 < fraction <= 1:
        raise ValueError(
            f"a percentile needs values and a fraction above 0 and up to 1, not {len(values)} "
            f"values and {fraction}"
        )
    return sorted(values)[max(1, math.ceil(fraction * len(values))) - 1]


def median_rank(count: int) -> int | None:
    """Returns the rank whose value and mirror image enclose the true median with 95 % confidence.

    Counted from 1: of `count` sorted values the r-th smallest and the r-th largest are the
    interval. None when even the extremes do not suffice (count < 6). The number of values below
    the median is binomial with p = 1/2, whatever their distribution: r is the largest rank with
    P(fewer than r below) <= 2.5 %.
    """
    ways, term, rank = 0, 1, 0  # of 2**count: with fewer below, with exactly so many below
    for below in range(count):
        ways += term
        if 40 * ways > 1 << count:
            break
        rank = below + 1
        term = term * (count - below) // rank
    return rank or None


def median_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """Returns the 95 % interval of the true median by order statistics; None for few values."""
    rank = median_rank(len(values))
    if rank is None:
        return None
    ordered = sorted(values)
    return ordered[rank - 1], ordered[-rank]


@dataclass(frozen=True, slots=True)
class Ratio:
    """A paired ratio: median, 95 % interval (None under six pairs), number of pairs."""

    median: float
    interval: tuple[float, float] | None
    pairs: int


def paired_ratio(above: Sequence[float], below: Sequence[float]) -> Ratio | None:
    """Returns the median of above[i] / below[i]. None when there is no pair.

    Raises:
        ValueError: sequences of unequal length.
    """
    if len(above) != len(below):
        raise ValueError(f"{len(above)} values cannot be paired with {len(below)}: give as many")
    ratios = [a / b for a, b in zip(above, below, strict=True) if b > 0]
    if not ratios:
        return None
    return Ratio(median(ratios), median_interval(ratios), len(ratios))


# --- timing -------------------------------------------------------------------------------------


def time_each(operation: Callable[[], object], count: int) -> list[float]:
    """Returns the seconds of each of `count` calls, without the garbage collector, as `timeit`.

    Two looks at the clock (about 0.1 µs together) are part of every figure.
    """
    clock = time.perf_counter
    samples = [0.0] * count
    collecting = gc.isenabled()
    gc.disable()
    try:
        for i in range(count):
            begin = clock()
            operation()
            samples[i] = clock() - begin
    finally:
        if collecting:
            gc.enable()
    return samples


@dataclass(frozen=True, slots=True)
class Block:
    """Some operations of one system in a row, with the CPU that both processes spent on them."""

    seconds: list[float]
    cpu_seconds_local: float
    cpu_seconds_remote: float
    operations: int


def run_block(
    runner: Runner, count: int, remote_pid: int, batch: int = 1, extra_operations: int = 0
) -> Block:
    """Runs `count` samples and reads both CPU clocks around them.

    `batch` is the number of operations in one sample (the C++ loops average over it);
    `extra_operations` run inside the block without being timed.
    """
    local, remote = time.process_time(), process_cpu_seconds(remote_pid)
    seconds = list(runner(count))
    return Block(
        seconds,
        time.process_time() - local,
        process_cpu_seconds(remote_pid) - remote,
        count * batch + extra_operations,
    )


@dataclass(slots=True)
class Series:
    """All blocks of one system in one case, in the order in which they ran."""

    blocks: list[Block] = field(default_factory=list)

    @property
    def seconds(self) -> list[float]:
        """The seconds of all samples."""
        return [sample for block in self.blocks for sample in block.seconds]

    @property
    def operations(self) -> int:
        """The number of all operations, also of untimed ones."""
        return sum(block.operations for block in self.blocks)

    @property
    def medians(self) -> list[float]:
        """One figure per block, to be paired with another system's."""
        return [median(block.seconds) for block in self.blocks]

    def cpu_per_operation(self) -> tuple[float, float]:
        """Returns CPU seconds per operation, local and remote."""
        operations = max(1, self.operations)
        return (
            sum(block.cpu_seconds_local for block in self.blocks) / operations,
            sum(block.cpu_seconds_remote for block in self.blocks) / operations,
        )


def alternate(
    run: Callable[[str, int], Block],
    systems: Sequence[str],
    limit: str | None,
    counts: Mapping[str, int],
    rounds: int,
) -> dict[str, Series]:
    """Runs `rounds` times: first system, limit, second system, limit, and so on.

    Without a limit just the systems. Their order is reversed in every other round, so that none
    profits from its place.

    Returns:
        One series per system. The limit's series for system s is under "s|limit": block i of it ran
        right after block i of s.
    """
    series: dict[str, Series] = {name: Series() for name in systems}
    if limit is not None:
        series |= {f"{name}|limit": Series() for name in systems}
    for index in range(rounds):
        for name in systems if index % 2 == 0 else reversed(systems):
            series[name].blocks.append(run(name, counts[name]))
            if limit is not None:
                series[f"{name}|limit"].blocks.append(run(limit, counts[limit]))
    return series


# --- repeat counts ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Budget:
    """The time that one case may take, and how it is cut.

    Attributes:
        case_s: time for all systems of one case together.
        block_s: aim for one block; short operations repeat within a block, long ones run once.
        min_rounds, max_rounds: alternations, whatever the budget says. Six give a first interval.
        max_count: operations in one block.
    """

    case_s: float = 2.0
    block_s: float = 2e-3
    min_rounds: int = 7
    max_rounds: int = 200
    max_count: int = 2000

    def count(self, seconds_each: float) -> int:
        """Returns how many operations of this length are in one block, at least one."""
        return max(1, min(self.max_count, int(self.block_s / max(seconds_each, 1e-9))))

    def rounds(self, seconds_per_round: float) -> int:
        """Returns the number of rounds that fit, within the bounds."""
        wanted = int(self.case_s / max(seconds_per_round, 1e-9))
        return max(self.min_rounds, min(self.max_rounds, wanted))


def warm_up(runner: Runner, max_s: float = 0.2, max_count: int = 50) -> float:
    """Runs an operation until it is warm and returns its length, the median without the first.

    Ends after `max_s` or `max_count` operations, at least two.
    """
    seconds = list(runner(1))
    begin = time.perf_counter()
    while len(seconds) < max_count and (
        len(seconds) < 2 or time.perf_counter() - begin + seconds[-1] < max_s
    ):
        seconds.extend(runner(1))
    return median(seconds[1:])


def laps_of(rounds: int, laps: int) -> list[int]:
    """Returns `rounds` cut into at most `laps` parts that differ by one at most."""
    laps = max(1, min(laps, rounds))
    return [rounds // laps + (1 if i < rounds % laps else 0) for i in range(laps)]


def flatten(parts: Iterable[Series]) -> Series:
    """Returns the blocks of several series as one."""
    return Series([block for part in parts for block in part.blocks])
