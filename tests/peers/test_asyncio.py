"""Awaiting transfers and words: nothing blocks the loop, no wake-up is lost, nothing is left."""

import asyncio
import threading
from collections.abc import Iterator

import numpy as np
import pytest

import tensorwire as tw
from tensorwire.memory.aio import wait_transfer
from tensorwire.testing import FaultPlan, Footprint, Pair, assert_no_leak, inject, node_pair

LATE_S = 0.2


@pytest.fixture
def pair(transport: str) -> Iterator[Pair]:
    with node_pair([transport]) as pair:
        yield pair


def late_write(pair: Pair, local: object = b"late") -> tuple[tw.Region, tw.Transfer]:
    """A write that is under way for LATE_S seconds."""
    region = pair.far.allocate(1 << 20)
    remote = pair.to_far.region(region.handle())
    inject(pair.to_far, FaultPlan(1, "delay", LATE_S))
    return region, remote.write(local)


def test_a_transfer_is_awaited_again_and_again(pair: Pair) -> None:
    region, transfer = late_write(pair)

    async def main() -> None:
        assert not transfer.done()
        await asyncio.gather(*(wait_transfer(transfer) for _ in range(5)))
        await transfer
        assert transfer.done()

    asyncio.run(main())
    assert bytes(region.memoryview()[:4]) == b"late"


def test_the_loop_goes_on_meanwhile(pair: Pair) -> None:
    _, transfer = late_write(pair)
    turns = 0

    async def turn() -> None:
        nonlocal turns
        while not transfer.done():
            turns += 1
            await asyncio.sleep(0)

    async def main() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(turn())
            await transfer

    asyncio.run(main())
    assert turns > 1


def test_a_timeout_stops_the_waiting_only(pair: Pair) -> None:
    region, transfer = late_write(pair, np.full(1 << 20, 3, np.uint8))

    async def main() -> None:
        with pytest.raises(tw.TimeoutError, match="1048576 bytes"):
            await wait_transfer(transfer, 0.01)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await transfer
        assert not transfer.done()
        await transfer

    asyncio.run(main())
    assert (region.array() == 3).all()


def test_a_cancelled_task_leaves_the_transfer_alone(pair: Pair) -> None:
    region, transfer = late_write(pair)

    async def main() -> None:
        task = asyncio.ensure_future(wait_transfer(transfer))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not transfer.done()

    asyncio.run(main())
    transfer.wait(10)
    assert bytes(region.memoryview()[:4]) == b"late"


def test_a_failed_transfer_raises_each_time(pair: Pair) -> None:
    remote = pair.to_far.region(pair.far.allocate(8).handle())
    inject(pair.to_far, FaultPlan(1, "fail", 0))
    transfer = remote.write(b"x")

    async def main() -> None:
        for _ in range(2):
            with pytest.raises(tw.UnavailableError, match="injected"):
                await transfer
        results = await asyncio.gather(
            wait_transfer(transfer), wait_transfer(remote.write(b"y")), return_exceptions=True
        )
        assert [type(result) for result in results] == [tw.UnavailableError, type(None)]

    asyncio.run(main())


@pytest.mark.parametrize("whose", ["near", "far"])
def test_a_close_ends_all_waiting(pair: Pair, whose: str) -> None:
    _, transfer = late_write(pair)
    mine = pair.near.allocate(8)
    word = mine.word(0)

    async def main() -> None:
        waiting = [
            asyncio.ensure_future(each)
            for each in (wait_transfer(transfer), word.reached(1, peer=pair.to_far))
        ]
        await asyncio.sleep(0)
        await asyncio.to_thread(getattr(pair, whose).close)
        # The delayed write is refused or lost, and the word will never come.
        expected = tw.ClosedError if whose == "near" else tw.PeerLostError
        for task in waiting:
            with pytest.raises(expected):
                await asyncio.wait_for(task, 30)

    asyncio.run(main())


def test_words_wake_their_waiters(pair: Pair) -> None:
    region = pair.far.allocate(64)
    remote = pair.to_far.region(region.handle())

    async def main() -> None:
        tasks = [asyncio.ensure_future(region.word(0).reached(value)) for value in (1, 2, 3)]
        other = asyncio.ensure_future(region.word(8).reached(1))
        for value in (1, 2, 3):
            await remote.word(0).set(value)
            await tasks[value - 1]
            assert [task.done() for task in tasks] == [i < value for i in range(3)]
        assert not other.done()
        await remote.word(8).set(9)
        await other

    asyncio.run(asyncio.wait_for(main(), 30))


def test_no_wake_up_is_lost(pair: Pair) -> None:
    """Two event loops in two threads answer each other, with every pause that chance gives."""
    rounds = 1500
    there, back = pair.far.allocate(8), pair.near.allocate(8)

    async def play(mine: tw.Word, theirs: tw.RemoteWord, first: bool) -> None:
        for round_ in range(1, rounds + 1):
            if first:
                transfer = theirs.set(round_)
            await mine.reached(round_)
            if not first:
                transfer = theirs.set(round_)
            await transfer

    def run(mine: tw.Word, theirs: tw.RemoteWord, first: bool) -> None:
        asyncio.run(asyncio.wait_for(play(mine, theirs, first), 60))
        finished.append(first)

    finished: list[bool] = []
    ping = pair.to_far.region(there.handle()).word(0)
    pong = pair.to_near.region(back.handle()).word(0)
    thread = threading.Thread(target=run, args=(there.word(0), pong, False))
    thread.start()
    run(back.word(0), ping, True)
    thread.join(60)
    assert sorted(finished) == [False, True]


def test_threads_and_loops_share_a_node(pair: Pair) -> None:
    """A blocking waiter drives the Node's I/O; a loop beside it must still be told."""
    region = pair.far.allocate(1 << 20)
    remote = pair.to_far.region(region.handle())
    stop = threading.Event()
    blocked = threading.Thread(target=_expect_timeouts, args=(pair, stop))
    blocked.start()

    async def main() -> None:
        data = np.ones(300_000, np.uint8)
        for _ in range(300):
            await remote.write(data)
            await remote.read(data)

    try:
        asyncio.run(asyncio.wait_for(main(), 60))
    finally:
        stop.set()
        blocked.join()


def _expect_timeouts(pair: Pair, stop: threading.Event) -> None:
    word = pair.near.allocate(8).word(0)
    while not stop.is_set():
        with pytest.raises(tw.TimeoutError):
            word.wait_until(1, 0.003)


@pytest.mark.parametrize("how", ["write", "read", "batch", "indices"])
def test_a_running_loop_copies_1_mib_at_most_itself(how: str) -> None:
    mib = 1 << 20
    with node_pair(["shm"]) as pair:
        remote = pair.to_far.region(pair.far.allocate(32 * mib).handle())
        local = np.ones(32 * mib, np.uint8)
        prepared = pair.to_far.prepare_write([local[:mib]], [remote[:mib]])
        pieces = [local[: 16 * mib], local[16 * mib :]], [remote[: 16 * mib], remote[16 * mib :]]
        starts = {
            "write": lambda: remote.write(local),
            "read": lambda: remote.read(local),
            "batch": lambda: pair.to_far.write(*pieces),
            "indices": lambda: prepared.start([0] * 32),
        }

        async def rounds_taken() -> int:
            assert remote.write(local[:mib]).done()
            before = pair.near.stats()["rounds"]
            await starts[how]()
            return pair.near.stats()["rounds"] - before

        assert starts[how]().done()
        assert asyncio.run(rounds_taken()) >= 32  # the Node's thread copies 1 MiB in each
        assert starts[how]().done()


def test_a_closed_loop_leaves_nothing(pair: Pair) -> None:
    word = pair.near.allocate(8).word(0)

    async def wait_in_vain() -> None:
        waiting = asyncio.ensure_future(word.reached(1))
        with pytest.raises(tw.TimeoutError):
            await word.reached(1, 0)
        assert not waiting.done()  # and asyncio.run cancels it

    with assert_no_leak():
        for _ in range(20):
            asyncio.run(wait_in_vain())
        loop = asyncio.new_event_loop()
        with pytest.raises(tw.TimeoutError):
            loop.run_until_complete(word.reached(1, 0))
        loop.close()


def test_a_closed_node_leaves_nothing_in_a_loop_that_goes_on() -> None:
    async def main() -> None:
        before = Footprint.now()
        for _ in range(5):
            await use_and_close()
            await asyncio.sleep(0)
        assert Footprint.now().growth(before) == []

    async def use_and_close() -> None:
        with tw.Node() as node:
            with pytest.raises(tw.TimeoutError):
                await node.allocate(8).word(0).reached(1, 0.001)

    asyncio.run(main())


def test_a_node_that_is_closed_while_no_loop_runs(pair: Pair) -> None:
    loop = asyncio.new_event_loop()
    with pytest.raises(tw.TimeoutError):
        loop.run_until_complete(pair.near.allocate(8).word(0).reached(1, 0))
    pair.near.close()
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    pair.near.close()
