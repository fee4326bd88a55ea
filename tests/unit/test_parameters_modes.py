"""Modes, clocks and what is told of adopted versions."""

import threading
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from tensorwire.cli.status import _pace
from tensorwire.errors import ClosedError, PeerLostError
from tensorwire.parameters.modes import SYNC, Mode, Pace, Paces, checked_mode
from tensorwire.parameters.server.paced.clocks import Clocks
from tensorwire.parameters.server.paced.events import Event, EventKind
from tensorwire.parameters.server.paced.ledger import Ledger
from tensorwire.parameters.server.paced.order import Leader
from tensorwire.parameters.server.stepping.pauses import Pauses


def test_a_mode_is_checked() -> None:
    assert checked_mode("sync", None) == SYNC
    assert checked_mode("async", None) == Mode("async")
    assert str(checked_mode("bounded", 0)) == 'mode="bounded", staleness=0'
    wrong: list[tuple[Any, Any]] = [
        ("other", None), (None, None), ("sync", 1), ("async", 0), ("bounded", None),
        ("bounded", -1), ("bounded", True), ("bounded", 1.0),
    ]  # fmt: skip
    for name, staleness in wrong:
        with pytest.raises(ValueError, match=r"mode|staleness"):
            checked_mode(name, staleness)


def test_a_worker_that_is_lost_when_the_node_was_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Named for a bug: a server that ended printed the traceback of a thread."""
    seen: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", seen.append)
    closed = ClosedError("the Node is closed")

    class Gone:
        servers: ClassVar[dict[int, Any]] = {}
        workers: ClassVar[dict[int, Any]] = {0: "worker-0"}

        def has_left(self, rank: int) -> bool:
            raise closed

    class Inbox:
        taken: ClassVar[list[int]] = [1]

        def wait(self, index: int, number: int, timeout_s: float) -> int:
            raise PeerLostError("worker 0 was lost")

    spec = SimpleNamespace(slices=1)
    opening: Any = SimpleNamespace(
        member=Gone(), committers=[0], spec=spec, durable=False, mode=Mode("async")
    )
    inbox: Any = Inbox()
    calls: Any = None
    with pytest.raises(ClosedError) as caught:
        Leader(opening, Ledger(opening), inbox, calls).decide(1)
    assert caught.value is closed
    assert not seen


def test_an_event_travels() -> None:
    for kind in EventKind:
        assert Event.from_bytes(Event(kind, 70_000, 9).to_bytes()) == Event(kind, 70_000, 9)


class Memory:
    """Regions of a store that outlive their allocators."""

    def __init__(self) -> None:
        self.regions: dict[Any, NDArray[np.uint8]] = {}
        self.committers, self.durable = [0, 1], True
        self.member = SimpleNamespace(count=2)

    def allocate(self, kind: Any, which: Any = None, size_bytes: int | None = None) -> Any:
        memory = self.regions.setdefault(kind, np.zeros(size_bytes or 1 << 15, np.uint8))
        return SimpleNamespace(array=lambda kind="uint8": memory.view(kind))


def test_a_ledger_is_that_before_an_event_or_behind_it() -> None:
    """Whatever a process that was killed had written of it."""
    opening: Any = Memory()
    ledger = Ledger(opening)
    (memory,) = opening.regions.values()
    for events in range(1, 6):
        before = memory.copy()
        ledger.account.events, ledger.account.answers[0] = events, (events, b"a" * 100 * events)
        ledger.note()
        after, head = memory.copy(), 8
        memory[:] = before
        for place in (slice(64, None), slice(head, 64), slice(0, head)):
            assert Ledger(opening).account.events == events - 1
            memory[place] = after[place]
        found = Ledger(opening).account
        assert (found.events, found.answers[0][0], found.taken) == (events, events, [1, 1])


def test_a_pause_is_over_when_a_later_request_says_so() -> None:
    opening: Any = Memory()
    pauses = Pauses(opening)
    assert pauses.version == 0
    pauses.begin(1, 4, 70)
    assert pauses.is_begun(1, 4)
    assert not pauses.wait(1, 4, 0.0)
    after = Pauses(opening)  # a successor's
    assert (after.version, after.is_begun(1, 5), after.is_begun(0, 1)) == (70, False, False)
    after.end(1, 4)  # a request of before
    assert after.version == 0
    assert not after.is_over(1, 4)
    after.end(1, 5)
    assert after.wait(1, 4, 60.0)
    assert not after.is_over(1, 5)


@given(
    st.integers(0, 3),
    st.integers(2, 4),
    st.lists(st.integers(0, 3), max_size=60),
)
def test_nobody_is_further_ahead_than_allowed(
    staleness: int, workers: int, wishes: list[int]
) -> None:
    """Workers that may go step, in any order: none leads by more, and not all wait."""
    clocks = Clocks({rank: [2 * rank, 2 * rank + 1] for rank in range(workers)}, staleness)
    for wish in wishes:
        may = [rank for rank in range(workers) if clocks.may_go(rank)]
        assert may
        clocks.step(may[wish % len(may)])
        assert max(clocks.now) - min(clocks.now) <= staleness + 1
        for rank in range(workers):
            ahead = clocks.now[2 * rank] - min(clocks.now)
            assert clocks.behind(rank) == ahead
            assert clocks.may_go(rank) == (ahead <= staleness)


def test_who_is_excused_holds_nobody_back() -> None:
    clocks = Clocks({0: [0], 1: [1], 2: [2]}, 1)
    for _ in range(2):
        clocks.step(0)
        clocks.step(1)
    assert not clocks.may_go(0)
    clocks.excuse([2])
    for _ in range(10):
        assert clocks.may_go(0)
        clocks.step(0)
        clocks.step(1)
    clocks.excuse([])
    assert clocks.now == [12, 12, 12]  # it is where the others are
    clocks.step(2)
    assert clocks.now == [12, 12, 13]
    clocks.excuse([0, 1])
    assert clocks.behind(2) == 0


def test_the_bound_holds_from_where_all_have_met() -> None:
    """Named for a bug: a worker that had waited was put beside workers that had gone on since."""
    clocks = Clocks({0: [0], 1: [1]}, 2)
    assert clocks.excuse([1])
    assert not clocks.excuse([1])
    clocks.step(0)
    assert clocks.excuse([0, 1])  # each waits for the other
    assert not clocks.excuse([])
    assert clocks.now == [1, 1]
    for _ in range(3):
        clocks.step(0)
    assert not clocks.may_go(0)
    clocks.step(1)
    assert clocks.now == [4, 2]


def test_without_a_bound_all_may_go() -> None:
    clocks = Clocks({0: [0], 1: [1]}, None)
    for _ in range(100):
        clocks.step(0)
    assert clocks.may_go(0)
    assert clocks.behind(0) == 100
    assert clocks.behind(1) == 0


def test_what_was_adopted_is_told_in_few_numbers() -> None:
    paces, others = Paces(), Paces()
    for behind in (0, 0, 3, 15, 16, 31, 40):
        pace = Pace(9, 5, behind, 2)
        paces.add(Pace.from_text(pace.to_text()))
    others.add(Pace(9, 5, 100, 1000))
    assert paces.described() == {
        "staleness_max": 40,
        "staleness": {"0": 2, "3": 1, "15": 1, "16-31": 2, "32-63": 1},
        "delay_max": 2,
        "delays": {"2": 7},
    }
    both = paces.joined(others).described()
    assert (both["staleness_max"], both["delay_max"]) == (100, 1000)
    assert sum(both["staleness"].values()) == 8


def test_status_tells_of_clocks() -> None:
    store = {"number": 0, "clocks": [3, 5], "staleness_max": 2, "staleness": {"0": 4, "2": 1}}
    assert _pace(store) == (
        "store 0: slices have made 3, 5 steps; staleness of versions at most 2 (4 x 0, 1 x 2)"
    )
