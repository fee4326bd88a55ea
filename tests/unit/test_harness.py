"""The statistics against known data, and the repeat counts."""

import math
import os
import random
import time

import pytest

from tensorwire.bench import machine
from tensorwire.bench.harness import (
    Block,
    Budget,
    Series,
    alternate,
    laps_of,
    median,
    median_interval,
    median_rank,
    paired_ratio,
    percentile,
    run_block,
    time_each,
    warm_up,
)


def test_median() -> None:
    assert median([3, 1, 2]) == 2
    assert median([4, 1, 3, 2]) == 2.5
    with pytest.raises(ValueError, match="no median"):
        median([])


def test_percentile_is_nearest_rank() -> None:
    values = list(range(1, 101))
    assert percentile(values, 0.99) == 99
    assert percentile(values, 1.0) == 100
    assert percentile([5.0], 0.99) == 5.0
    assert percentile(list(range(1, 201)), 0.99) == 198
    with pytest.raises(ValueError, match="percentile"):
        percentile(values, 0)


# Ranks from the tables of the sign test, for 95 % two-sided.
@pytest.mark.parametrize(
    ("count", "rank"),
    [(5, None), (6, 1), (8, 1), (9, 2), (10, 2), (12, 3), (15, 4), (20, 6), (25, 8), (50, 18),
     (100, 40)],
)  # fmt: skip
def test_median_rank_against_the_table(count: int, rank: int | None) -> None:
    assert median_rank(count) == rank


@pytest.mark.parametrize("count", [6, 17, 64, 999])
def test_median_rank_is_the_largest_that_covers(count: int) -> None:
    rank = median_rank(count)
    assert rank is not None
    total = 2**count

    def tail(ranks: int) -> float:
        return sum(math.comb(count, below) for below in range(ranks)) / total

    assert tail(rank) <= 0.025 < tail(rank + 1)


def test_median_rank_of_many_goes_on_smoothly() -> None:
    exact, approximate = median_rank(999), median_rank(1001)
    assert exact is not None
    assert approximate is not None
    assert abs(approximate - exact) <= 2


def test_median_interval_covers_as_often_as_it_says() -> None:
    generator = random.Random(7)
    covered = 0
    for _ in range(2000):
        values = [generator.expovariate(1.0) for _ in range(20)]
        interval = median_interval(values)
        assert interval is not None
        covered += interval[0] <= math.log(2) <= interval[1]
    assert covered / 2000 == pytest.approx(0.9586, abs=0.02)  # of n = 20, ranks 6 and 15


def test_paired_ratio_ignores_what_disturbs_both() -> None:
    disturbance = [1.0, 10.0, 3.0, 100.0, 2.0, 7.0, 1.5]
    limit = [0.9 * factor for factor in disturbance]
    ratio = paired_ratio(limit, disturbance)
    assert ratio is not None
    assert ratio.median == pytest.approx(0.9)
    assert ratio.interval == pytest.approx((0.9, 0.9))
    assert ratio.pairs == 7


def test_paired_ratio_of_too_few_or_unequal() -> None:
    ratio = paired_ratio([1.0, 2.0], [2.0, 4.0])
    assert ratio is not None
    assert (ratio.median, ratio.interval) == (0.5, None)
    assert paired_ratio([], []) is None
    with pytest.raises(ValueError, match="cannot pair"):
        paired_ratio([1.0], [])


def test_time_each_counts_calls_and_restores_the_collector() -> None:
    import gc

    calls: list[bool] = []
    samples = time_each(lambda: calls.append(gc.isenabled()), 5)
    assert len(samples) == 5
    assert calls == [False] * 5
    assert gc.isenabled()
    with pytest.raises(RuntimeError):
        time_each(lambda: (_ for _ in ()).throw(RuntimeError("boom")), 1)
    assert gc.isenabled()


def test_alternate_pairs_each_system_with_a_limit_right_after_it() -> None:
    order: list[str] = []

    def run(name: str, count: int) -> Block:
        order.append(name)
        return Block([1.0] * count, 0.1, 0.2, count)

    counts = {"a": 2, "b": 3, "limit": 4}
    series = alternate(run, ["a", "b"], "limit", counts, 2)
    assert order == ["a", "limit", "b", "limit", "b", "limit", "a", "limit"]
    assert set(series) == {"a", "b", "a|limit", "b|limit"}
    assert len(series["a"].seconds) == 4
    assert series["b"].operations == 6
    assert series["b"].cpu_per_operation() == pytest.approx((0.2 / 6, 0.4 / 6))
    assert series["a|limit"].medians == [1.0, 1.0]


def test_alternate_without_limit() -> None:
    series = alternate(lambda _, n: Block([1.0], 0, 0, n), ["a"], None, {"a": 1}, 3)
    assert set(series) == {"a"}
    assert len(series["a"].blocks) == 3


def test_series_without_blocks_costs_nothing() -> None:
    assert Series().cpu_per_operation() == (0, 0)


def test_run_block_reads_the_clock_of_the_other_process() -> None:
    block = run_block(lambda n: [1.0] * n, 3, os.getpid(), batch=5, extra_operations=1)
    assert block.operations == 16
    assert block.cpu_seconds_local >= 0
    assert block.cpu_seconds_remote >= 0


def test_the_cpu_clock_of_a_process_counts_all_of_it() -> None:
    before, own = machine.process_cpu_seconds(os.getpid()), time.process_time()
    sum(i * i for i in range(200_000))
    used, mine = machine.process_cpu_seconds(os.getpid()) - before, time.process_time() - own
    assert used == pytest.approx(mine, abs=0.01)
    with pytest.raises(ProcessLookupError):
        machine.process_cpu_seconds(2**22 + 1)  # above the kernel's highest number


def test_budget() -> None:
    budget = Budget(case_s=1.0, block_s=1e-3, min_rounds=7, max_rounds=50, max_count=200)
    assert budget.count(1e-6) == 200
    assert budget.count(1e-4) == 10
    assert budget.count(1.0) == 1
    assert budget.rounds(0.1) == 10
    assert budget.rounds(1e-6) == 50
    assert budget.rounds(100.0) == 7


def test_warm_up_leaves_the_first_out() -> None:
    figures = iter([100.0, 1.0, 1.0, 1.0])
    assert warm_up(lambda _: [next(figures)], max_s=1e9, max_count=4) == 1.0


def test_warm_up_of_a_slow_operation_runs_it_twice() -> None:
    calls: list[int] = []

    def slow(count: int) -> list[float]:
        calls.append(count)
        return [5.0]

    assert warm_up(slow, max_s=0.1) == 5.0
    assert calls == [1, 1]


def test_laps() -> None:
    assert laps_of(10, 4) == [3, 3, 2, 2]
    assert laps_of(3, 10) == [1, 1, 1]
    assert sum(laps_of(97, 10)) == 97


def test_the_machine_is_described_as_json() -> None:
    import json

    about = machine.describe()
    json.dumps(about, allow_nan=False)
    assert about["cores"] >= 1
    assert about["packages"]["numpy"]
    assert {"cpu", "affinity", "kernel", "memory_bytes", "page_bytes", "python"} <= set(about)


def test_warnings_name_the_remedy() -> None:
    quiet = {"affinity": [0, 1], "load_average": [0.0] * 3, "cpu_quota": None, "governor": None}
    assert machine.warnings_about(quiet) == []
    loud = {"affinity": [0], "load_average": [3.0] * 3, "cpu_quota": 1.5, "governor": "powersave"}
    assert len(machine.warnings_about(loud)) == 4
