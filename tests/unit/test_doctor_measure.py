"""How `tensorwire doctor` bounds its measuring."""

import time
from collections.abc import Sequence

import pytest

from tensorwire.doctor.measure import Cost, Effort, plan, take


class Counted:
    """An operation that says it took `seconds`, and counts how often it ran."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.count = 0

    def __call__(self, count: int) -> Sequence[float]:
        self.count += count
        return [self.seconds] * count


def test_shares_are_a_whole() -> None:
    for helped in (False, True):
        for effort in (Effort(), Effort().gentle(), Effort(sizes=(8,))):
            cases = plan(effort, helped)
            assert sum(case.share for case in cases) == pytest.approx(1.0)
            assert any(case.action == "signal" for case in cases) == helped


def test_gentle_is_small() -> None:
    gentle = Effort(seconds=100).gentle()
    assert max(gentle.sizes) == 1 << 20
    assert gentle.case_bytes == 16 << 20
    assert gentle.seconds <= 1.0
    assert Effort(seconds=0.5).gentle().seconds == 0.5


def test_bytes_are_bounded() -> None:
    own, limit = Counted(1e-6), Counted(1e-6)
    taken = take(own, limit, 60.0, 1 << 20, 16 << 20)
    assert own.count + limit.count <= 16
    assert len(taken.own) + len(taken.limit) == own.count + limit.count - 2  # warm-up


def test_bytes_are_bounded_without_a_limit() -> None:
    own = Counted(1e-6)
    assert len(take(own, None, 60.0, 1 << 20, 16 << 20).own) >= 1
    assert own.count <= 16


def test_a_single_operation_above_the_bound_is_still_measured() -> None:
    own, limit = Counted(1e-3), Counted(1e-3)
    taken = take(own, limit, 60.0, 64, 1)
    assert (len(taken.own), len(taken.limit)) == (1, 1)


def test_time_is_bounded() -> None:
    def slow(count: int) -> Sequence[float]:
        time.sleep(0.05 * count)
        return [0.05] * count

    begin = time.perf_counter()
    taken = take(slow, None, 0.2, 8, 1 << 40)
    assert 1 <= len(taken.own) <= 4
    assert time.perf_counter() - begin >= 0.1


def test_the_ratio_is_that_of_pairs() -> None:
    taken = take(Counted(2e-3), Counted(1e-3), 60.0, 8, 8 << 10)
    assert taken.ratio is not None
    assert taken.ratio.median == pytest.approx(0.5)
    assert taken.ratio.interval == (0.5, 0.5)


def test_estimates() -> None:
    assert Cost(0.1, 1e-6).of(1_000_000) == pytest.approx(1.1)
