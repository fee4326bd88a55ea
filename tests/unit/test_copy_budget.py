"""How much a server copies for readers that ask as fast as they can."""

import pytest

from tensorwire.parameters.server.lending.budget import ALLOWANCE_S, SHARE, CopyBudget


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize("copy_s", [0.002, 0.1, 5.0])
def test_who_asks_all_the_time_gets_its_share_and_no_more(copy_s: float) -> None:
    clock, copied, copies = Clock(), 0.0, 0
    budget = CopyBudget(clock)
    while copies < 2000:
        waits = budget.opens_in_s()
        clock.now += waits
        assert budget.opens_in_s() <= 1e-9 * (1 + clock.now)
        clock.now += copy_s
        budget.spend(copy_s)
        copied, copies = copied + copy_s, copies + 1
        assert copied <= (SHARE * clock.now + ALLOWANCE_S + copy_s) * (1 + 1e-9)
    assert copied >= 0.9 * SHARE * clock.now


def test_who_asks_now_and_then_never_waits() -> None:
    clock = Clock()
    budget = CopyBudget(clock)
    for _ in range(100):
        assert budget.opens_in_s() == 0
        budget.spend(0.2)
        clock.now += 1.0
