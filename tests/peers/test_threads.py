"""Threads share a Node and a Peer: operations mix, waits differ, and closing ends them all."""

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from typing import Any

import numpy as np
import pytest
from actor import MIB, PATIENCE_S, all_complete, background, eventually, start_actor

from tensorwire import (
    ClosedError,
    Node,
    Peer,
    PeerLostError,
    StaleHandleError,
    TensorwireError,
    TimeoutError,
    wait_all,
)
from tensorwire.testing import PeerGroup, node_pair

pytestmark = [pytest.mark.timeout(150), pytest.mark.usefixtures("nothing_left")]

THREADS = 4
TOGETHER_S = 100.0  # an emulated machine moves half a gigabyte in that time; each wait is shorter


@pytest.fixture
def hasty_gil() -> Iterator[None]:
    """Threads lose the GIL as often as possible."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(usual)


def together(works: list[Callable[[], Any]]) -> None:
    """Runs each in a thread, started at the same moment; raises the first error."""
    barrier = threading.Barrier(len(works))

    def run(work: Callable[[], Any]) -> None:
        barrier.wait()
        work()

    calls = [background(run, work) for work in works]
    wait(calls, TOGETHER_S, FIRST_EXCEPTION)
    for call in calls:
        if call.done():
            call.result()
    assert not wait(calls, 0).not_done, "a thread hangs"


class Mixed:
    """All operations on one peer, in an order of its own; counts what it has added."""

    def __init__(self, peer: Peer, number: int, rounds: int) -> None:
        self._peer, self._rounds = peer, rounds
        self._random = np.random.default_rng(number)
        self._remote = peer.region("shared")
        self._mine = slice(4096 + number * MIB, 4096 + (number + 1) * MIB)
        self._word = self._remote.word(8 * (number + 1))
        self._data = np.zeros(MIB, np.uint8)
        self._round = 0
        self.added = 0

    def run(self) -> None:
        steps = [self.write, self.batch, self.add, self.lease, self.look_up, self.announce]
        while self._round < self._rounds:
            self._round += 1
            steps[self._random.integers(len(steps))]()
        self.check(np.empty(MIB, np.uint8))

    def check(self, back: np.ndarray) -> None:
        self._remote[self._mine].read(back).wait(PATIENCE_S)
        assert (back == self._data).all()

    def write(self) -> None:
        start, stop = np.sort(self._random.integers(0, MIB, 2))
        self._data[start:stop] = self._round % 256
        part = self._remote[self._mine][int(start) : int(stop)]
        part.write(self._data[start:stop]).wait(PATIENCE_S)

    def batch(self) -> None:
        starts = range(0, MIB, MIB // 16)
        locals_ = [self._data[start : start + 100] for start in starts]
        remotes = [self._remote[self._mine][start : start + 100] for start in starts]
        batch = self._peer.prepare_write(locals_, remotes)
        wait_all([batch.start(), batch.start([3, 1, 2])], PATIENCE_S)

    def add(self) -> None:
        self._remote.word(0).fetch_add(self._round, PATIENCE_S)
        self.added += self._round

    def lease(self) -> None:
        leased = self._peer.allocate(5000)
        leased.write(self._data[:5000]).wait(PATIENCE_S)
        self._peer.region(leased.handle()).read(np.empty(5000, np.uint8)).wait(PATIENCE_S)
        leased.free()

    def look_up(self) -> None:
        assert self._peer.region("shared").size_bytes == self._remote.size_bytes
        with pytest.raises(LookupError):
            self._peer.region("absent")

    def announce(self) -> None:
        writes = [self._remote[self._mine].write(self._data) for _ in range(2)]
        self._word.set(self._round, after=writes).wait(PATIENCE_S)


def test_mixed_operations(transport: str, hasty_gil: None) -> None:
    with PeerGroup() as group, Node("near", transports=[transport]) as node:
        _, target = start_actor(group, "far", transports=[transport])
        target.allocate("r", 4096 + THREADS * MIB, "rw", "shared")
        peer = node.connect(target.address())
        workers = [Mixed(peer, number, rounds=60) for number in range(THREADS)]
        together([worker.run for worker in workers])
        assert target.value("r", 0) == sum(worker.added for worker in workers)
        assert all_complete(node)


def test_everybody_writes_to_everybody(transport: str, hasty_gil: None) -> None:
    """Threads on both sides of one connection, and of a second one in the other direction."""
    rounds = 150
    with node_pair([transport]) as pair:
        back = pair.far.connect(pair.near.address)
        near, far = pair.near.allocate(4 * MIB, name="r"), pair.far.allocate(4 * MIB, name="r")

        def work(peer: Peer, own: Any, number: int) -> None:
            remote, word = peer.region("r")[number * MIB :], own.word(number * MIB)
            data = np.zeros(MIB // 2, np.uint8)
            for round_ in range(1, rounds + 1):
                data[:] = round_ % 256
                remote[8:].write(data, signal=(remote.word(0), round_))
                word.wait_until(round_, PATIENCE_S)
                mine = own[number * MIB + 8 :].array()[: data.size]
                # The other side may be one round ahead, and is never behind.
            assert {(int(mine[at]) - round_) % 256 for at in (0, -1)} <= {0, 1}

        together(
            [lambda n=n: work(pair.to_far, near, n) for n in range(2)]
            + [lambda n=n: work(pair.to_near, far, n) for n in range(2)]
            + [lambda: work(back, far, 2), lambda: work(pair.to_far, near, 2)]
        )
        for node in (pair.near, pair.far):
            eventually(lambda node=node: all_complete(node), "the last transfers")


def test_many_start_one_waits(transport: str) -> None:
    """A transfer may be waited for by threads that did not start it, by several at once."""
    with node_pair([transport]) as pair:
        pair.far.allocate(THREADS * MIB, name="r")
        remote = pair.to_far.region("r")
        data = np.ones(MIB, np.uint8)
        for _ in range(20):
            transfers = [remote[n * MIB :].write(data) for n in range(THREADS)]
            together([lambda t=transfers: wait_all(t, PATIENCE_S)] * THREADS)
            together([lambda t=transfers: wait_all(reversed(t), PATIENCE_S)] * 2)


def test_waits_with_different_ends(transport: str) -> None:
    """Each waiter sees its own value or its own timeout, in whatever order they come."""
    with node_pair([transport]) as pair:
        mine = pair.near.allocate(64, name="mine")
        remote = pair.to_near.region("mine")
        start = time.monotonic()
        late = [background(mine.word(8).wait_until, 1, 0.05 * n) for n in range(5)]
        early = [background(mine.word(0).wait_until, n, PATIENCE_S) for n in (3, 1, 4, 2)]
        for value, call in zip((1, 2, 3, 4), [early[i] for i in (1, 3, 0, 2)], strict=True):
            assert not call.done()
            remote.word(0).set(value)
            assert call.exception(PATIENCE_S) is None
        for call in late:
            assert isinstance(call.exception(PATIENCE_S), TimeoutError)
        assert time.monotonic() - start >= 0.2
        mine.word(0).wait_until(4, 0)


# ---- the end


def blocked(pair: Any) -> list["Future[Any]"]:
    """A thread in each call that can block, all at the Node `near`."""
    mine = pair.near.allocate(64, name="mine")
    return [
        background(mine.word(0).wait_until, 1),
        background(mine.word(0).wait_until, 2, PATIENCE_S),
        background(mine.word(8).wait_until, 1, peer=pair.to_far),
        background(pair.near.accept),
        background(pair.near.accept, PATIENCE_S),
    ]


def test_several_threads_accept_guests_that_come_and_go(transport: str) -> None:
    """Some of a hundred times two threads wake up for the same peer, and one finds it taken."""
    names = sorted(f"guest-{number}" for number in range(100))
    accepted: list[str] = []
    with Node("host", transports=[transport]) as host:

        def accept() -> None:
            with contextlib.suppress(ClosedError):
                while True:
                    accepted.append(host.accept().name)

        def come(name: str) -> None:
            with Node(name, transports=[transport]) as guest:
                guest.connect(host.address, timeout_s=PATIENCE_S)
                time.sleep(0.02)

        accepting = [background(accept) for _ in range(8)]
        with ThreadPoolExecutor(4) as guests:
            list(guests.map(come, names))
        eventually(lambda: len(accepted) >= len(names), "each guest is accepted")
        host.close()
        for one in accepting:
            one.result(PATIENCE_S)
    assert sorted(accepted) == names


def test_closing_ends_all_waits(transport: str) -> None:
    for _ in range(10):
        with node_pair([transport]) as pair:
            calls = blocked(pair)
            pair.near.close()
            for call in calls:
                assert isinstance(call.exception(1), ClosedError)


def test_closing_a_peer_ends_only_its_waits(transport: str) -> None:
    with node_pair([transport]) as pair:
        words, watched, accepts = (calls := blocked(pair))[:2], calls[2], calls[3:]
        pair.to_far.close()
        assert isinstance(watched.exception(1), ClosedError)
        assert not any(call.done() for call in words + accepts)
        pair.near.close()
        for call in words + accepts:
            assert isinstance(call.exception(1), ClosedError)


def test_freeing_a_region_ends_its_waits(transport: str) -> None:
    with node_pair([transport]) as pair:
        calls = blocked(pair)
        pair.near.region("mine").free()
        for call in calls[:3]:
            assert isinstance(call.exception(1), StaleHandleError)
        pair.near.close()
        for call in calls[3:]:
            assert isinstance(call.exception(1), ClosedError)


def test_the_end_of_a_lease_ends_its_waits(transport: str) -> None:
    """The peer that was to raise the word took its memory along."""
    with node_pair([transport]) as pair:
        pair.to_far.allocate(64, "leased")
        call = background(pair.far.region("leased").word(0).wait_until, 1)
        pair.near.close()
        assert isinstance(call.exception(1), StaleHandleError)


def test_closing_during_traffic(transport: str, hasty_gil: None) -> None:
    """Whatever threads were doing ends with ClosedError here and with the loss over there."""
    for _ in range(5):
        with node_pair([transport]) as pair:
            pair.far.allocate(8 * MIB, name="r")
            pair.near.allocate(8 * MIB, name="r")
            rounds = [0]

            def work(peer: Peer, rounds: list[int] = rounds) -> None:
                remote, data = peer.region("r"), np.ones(2 * MIB, np.uint8)
                while True:
                    remote.write(data, signal=(remote.word(4 * MIB), 1)).wait(PATIENCE_S)
                    remote.word(8).fetch_add()
                    peer.region("r")
                    rounds[0] += 1

            ours = [background(work, pair.to_far) for _ in range(2)]
            theirs = [background(work, pair.to_near) for _ in range(2)]
            eventually(lambda rounds=rounds: rounds[0] > 8, "all have begun")
            together([pair.near.close, pair.near.close])
            for call in ours:
                assert isinstance(call.exception(1), ClosedError), repr(call.exception(0))
            for call in theirs:
                assert isinstance(call.exception(1), PeerLostError), repr(call.exception(0))
            for node in (pair.near, pair.far):
                assert all_complete(node)


def test_nodes_come_and_go_in_threads(transport: str) -> None:
    """Nodes of one process are independent, also while they begin and end."""
    with Node("host", transports=[transport]) as host:
        host.allocate(64, name="r")

        def come_and_go() -> None:
            for number in range(15):
                with Node("guest", transports=[transport]) as guest:
                    peer = guest.connect(host.address)
                    remote = peer.region("r")
                    remote.word(0).fetch_add(1, PATIENCE_S)
                    if number % 2:
                        peer.close()

        together([come_and_go] * THREADS)
        assert host.region("r").word(0).value == 15 * THREADS
        eventually(lambda: not host.peers, "all have left")


def test_connecting_while_closing(transport: str) -> None:
    """A connection that comes too late gets an error, not a hang."""
    for _ in range(20):
        with Node("host", transports=[transport]) as host, Node("guest") as guest:
            call = background(guest.connect, host.address)
            accept = background(host.accept)
            host.close()
            assert isinstance(call.exception(5), TensorwireError | None)
            assert isinstance(accept.exception(5), ClosedError | None)
