"""Memory that one end leases at the other, without calls."""

import time
from collections.abc import Iterator
from typing import Any

import pytest

from tensorwire import Node, TimeoutError
from tensorwire.rpc.payload import leases
from tensorwire.rpc.payload.leases import SLOTS, Lease, LeasePool

KIB64 = 1 << 16


class Leasing:
    """A pool at one Node, of memory of another one that lends a fixed amount."""

    def __init__(self, transport: str, node: Node, other: Node) -> None:
        self._board = node.allocate(8 * (1 + SLOTS))
        self._words = self._board.array("uint64")
        peer = node.connect(other.address)
        assert peer.path.transport == transport
        self.pool = LeasePool(peer, self._board, 8 * KIB64)

    def take(self, size_bytes: int, patience_s: float = 1.0) -> Lease | None:
        return self.pool.take(size_bytes, (0, 1), patience_s, lambda: True)

    def give_back(self, lease: Lease | None) -> None:
        """Gives a lease back, in the place of the other end."""
        assert lease is not None
        self._words[1 + lease.slot] = lease.turn
        self._words[0] += 1


@pytest.fixture(params=["shm", "tcp"])
def leasing(request: pytest.FixtureRequest) -> Iterator[Leasing]:
    options: dict[str, Any] = {"transports": [request.param]}
    with Node(**options) as node, Node(quota_bytes=8 * KIB64, **options) as other:
        yield Leasing(request.param, node, other)


def test_idle_memory_makes_room_for_larger_memory(leasing: Leasing) -> None:
    """At once, though the other end lends nothing before it has all of it back."""
    for _ in range(5):
        small = [leasing.take(KIB64) for _ in range(8)]
        for each in small:
            leasing.give_back(each)
        large = leasing.take(8 * KIB64, patience_s=0.0)
        assert large is not None
        leasing.give_back(large)
    assert leasing.pool.leased_bytes == 8 * KIB64


def test_who_is_refused_memory_waits_for_that_which_is_used(leasing: Leasing) -> None:
    """The other end has less than it has said."""
    other = leasing.take(KIB64)
    assert other is not None
    taken = other.memory.peer.allocate(6 * KIB64)
    kept = leasing.take(KIB64)

    asked = []

    def needed() -> bool:
        asked.append(True)
        if len(asked) == 2:
            leasing.give_back(kept)
        return True

    found = leasing.pool.take(KIB64, (0, 2), 5.0, needed)
    assert found is kept
    assert len(asked) >= 2
    taken.free()


def test_nobody_waits_again_before_some_is_given_back(leasing: Leasing) -> None:
    """Or each of many responses that a client does not take would hold up a thread so long."""
    kept = [leasing.take(KIB64) for _ in range(8)]
    began = time.monotonic()
    assert leasing.take(KIB64, patience_s=0.5) is None
    assert time.monotonic() - began >= 0.5
    began = time.monotonic()
    for _ in range(20):
        assert leasing.take(KIB64, patience_s=0.5) is None
    assert time.monotonic() - began < 0.5
    leasing.give_back(kept[0])
    assert leasing.take(KIB64) is kept[0]
    began = time.monotonic()
    assert leasing.take(KIB64, patience_s=0.2) is None
    assert time.monotonic() - began >= 0.2


def test_memory_that_is_idle_for_long_is_freed(
    leasing: Leasing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "IDLE_S", 0.2)
    used, idle, busy = (leasing.take(2 * KIB64) for _ in range(3))
    for each in (idle, busy):
        leasing.give_back(each)
    leasing.pool.free_idle()
    assert leasing.pool.leased_bytes == 6 * KIB64, "it has only just been given back"
    time.sleep(0.3)
    leasing.give_back(leasing.take(2 * KIB64))  # one of the two, which is used again
    leasing.pool.free_idle()
    assert leasing.pool.leased_bytes == 4 * KIB64
    time.sleep(0.3)
    leasing.pool.free_idle()
    assert leasing.pool.leased_bytes == 2 * KIB64
    assert used is not None
    assert used.memory.peer.allocate(6 * KIB64) is not None, "the other end has it back"
    leasing.give_back(used)
    assert leasing.take(2 * KIB64) is used


def test_a_receiver_that_does_not_answer_is_not_asked_for_a_while(
    leasing: Leasing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else each of many messages would wait for it, one after the other."""
    asked: list[float] = []
    inner = leasing.pool._allocate

    def silent(size_bytes: int, serial: int, answer_s: float) -> Any:
        asked.append(answer_s)
        raise TimeoutError("no answer")

    def take(size_bytes: int) -> Lease | None:
        return leasing.pool.take(size_bytes, (0, 1), 0.0, lambda: True, answer_s=0.05)

    used = leasing.take(KIB64)
    monkeypatch.setattr(leasing.pool, "_allocate", silent)
    assert [take(2 * KIB64) for _ in range(5)] == [None] * 5
    assert asked == [0.05]
    assert leasing.pool.failure == "no answer"
    assert leasing.pool.leased_bytes == KIB64
    leasing.give_back(used)  # it does again
    assert take(2 * KIB64) is None
    assert len(asked) == 2
    time.sleep(leases._PAUSES * 0.05)
    monkeypatch.setattr(leasing.pool, "_allocate", inner)
    assert take(2 * KIB64) is not None
