"""Checks of a transport: signals tell the truth, counters count, waiting ends."""

from __future__ import annotations

import asyncio
import contextlib
import time
from functools import partial

import numpy as np

from tensorwire.errors import StaleHandleError, TimeoutError
from tensorwire.memory import RemoteWord, wait_all

from ..setup import WAIT_S, CheckSetup, failure_of, finish, must_fail, pattern, run_threads
from ..target import round_value


def signal_ordering(setup: CheckSetup) -> None:
    """Checks that a reader of word >= k sees every byte of the call that raised it to k.

    The target looks at once, in another thread or process, many times, with calls of very
    different sizes and with batches.
    """
    sizes = np.random.default_rng(3).choice([1, 8, 64, 1000, 5000, 40_000, 300_000], 600).tolist()
    with setup.rounds(sizes) as (remote, reply):
        word, payload = remote.word(0), remote[64:]
        for round_, size in enumerate(sizes, 1):
            data = np.full(size, round_value(round_), np.uint8)
            if round_ % 3 == 0:  # a batch, last byte first
                half = size // 2
                setup.peer.write(
                    [data[half:], data[:half]],
                    [payload[half:size], payload[:half]],
                    signal=(word, round_),
                )
            elif round_ % 3 == 1:
                payload.write(data, signal=(word, round_))
            else:
                setup.peer.signal(word, round_, after=[payload.write(data)])
            reply.wait_until(round_, WAIT_S)


def signal_is_maximum(setup: CheckSetup) -> None:
    """Checks that a word never falls, whatever is written with a lower value."""
    remote = setup.remote("r", 64)
    word = remote.word(8)
    for value, expected in ((5, 5), (3, 5), (5, 5), (2**64 - 1, 2**64 - 1), (0, 2**64 - 1)):
        finish(word.set(value))
        assert setup.target.value("r", 8) == expected
    other = remote.word(16)
    finish(remote[32:].write(b"a", signal=(other, 7)))
    finish(remote[32:].write(b"b", signal=(other, 6)))
    assert setup.target.value("r", 16) == 7
    assert setup.target.contents("r", 32, 33) == b"b"
    assert setup.target.contents("r", 0, 8) == setup.target.contents("r", 24, 32) == bytes(8)


def signal_without_bytes(setup: CheckSetup) -> None:
    """Checks that an empty write and an empty batch still signal."""
    remote = setup.remote("r", 64)
    finish(remote.write(b"", signal=(remote.word(0), 1)))
    assert setup.target.value("r", 0) == 1
    finish(setup.peer.write([], [], signal=(remote.word(0), 2)))
    assert setup.target.value("r", 0) == 2
    transfer = setup.peer.prepare_write([b"x"], [remote[8:]]).start([], signal=(remote.word(0), 3))
    finish(transfer)
    assert setup.target.value("r", 0) == 3


def signal_after(setup: CheckSetup) -> None:
    """Checks that a signal waits for the transfers that it names, and fails with them."""
    remote, gone = setup.remote("r", 20_000_000), setup.remote("gone", 64)
    writes = [
        remote[8 + i * 4_000_000 :][:4_000_000].write(np.full(4_000_000, i + 1, np.uint8))
        for i in range(4)
    ]
    announce = remote.word(0).set(1, after=writes)
    setup.target.wait_until("r", 0, 1, WAIT_S)
    for i in range(4):
        assert setup.target.is_filled("r", 8 + i * 4_000_000, 8 + (i + 1) * 4_000_000, i + 1)
    finish(announce)
    assert all(write.done() for write in writes)
    finish(remote.word(0).set(2, after=writes))  # complete ones do not hinder
    setup.target.free("gone")
    failed = None
    with contextlib.suppress(StaleHandleError):  # raised at once, or the transfer's
        failed = gone.write(b"x")
    if failed is not None:
        must_fail(StaleHandleError, failed.wait, WAIT_S)
        must_fail(StaleHandleError, remote.word(0).set, 3, after=[failed])
        assert setup.target.value("r", 0) == 2


def waiters(setup: CheckSetup) -> None:
    """Checks that each value of a word wakes exactly the threads that wait for it."""
    with setup.rounds([1, 1, 1]) as (remote, word):

        def wait(value: int) -> None:
            word.wait_until(value, WAIT_S)
            assert word.value >= value

        def answer() -> None:
            # The target raises the word to 3 in three rounds, as fast as it is let.
            for round_ in (1, 2, 3):
                data = bytes([round_value(round_)])
                remote[64:].write(data, signal=(remote.word(0), round_))
                word.wait_until(round_, WAIT_S)

        run_threads(*(partial(wait, value) for value in (1, 1, 2, 3, 3)), answer)


def word_timeouts(setup: CheckSetup) -> None:
    """Checks that a wait for a word ends in time, and can be repeated."""
    mine = setup.near.allocate(64)
    start = time.monotonic()
    for timeout_s in (0, 0.0, 0.05):
        must_fail(TimeoutError, mine.word(0).wait_until, 1, timeout_s)
    assert time.monotonic() - start >= 0.05
    mine.word(0).wait_until(0, 0)

    async def main() -> None:
        await mine.word(0).reached(0, 0)
        await mine.word(0).reached(1, 0.02)

    must_fail(TimeoutError, asyncio.run, main())


def word_awaited(setup: CheckSetup) -> None:
    """Checks that an event loop waits for words that the peer raises, several at a time."""
    rounds = 200
    with setup.rounds([1] * rounds) as (remote, word):

        async def main() -> None:
            last = asyncio.create_task(word.reached(rounds, WAIT_S))
            for round_ in range(1, rounds + 1):
                data = bytes([round_value(round_)])
                await remote[64:].write(data, signal=(remote.word(0), round_))
                await word.reached(round_, WAIT_S)
            await last

        asyncio.run(main())


def fetch_add(setup: CheckSetup) -> None:
    """Checks that all additions of peers and threads count, and each old value occurs once."""
    handle = setup.target.allocate("r", 64)
    setup.target.fill("r", 0, bytes([255]) * 8)  # the neighbour must not feel a carry
    per_thread = 200
    seen: list[int] = []

    with setup.third() as third:
        words = [peer.region(handle).word(8) for peer in (setup.peer, third) for _ in range(2)]

        def add(word: RemoteWord) -> None:
            mine = [word.fetch_add(3, WAIT_S) for _ in range(per_thread // 2)]
            pending = [word.peer.fetch_add(word, 3) for _ in range(per_thread // 2)]
            wait_all(pending, WAIT_S)
            seen.extend(mine + [transfer.value for transfer in pending])

        run_threads(*(partial(add, word) for word in words))
    assert sorted(seen) == list(range(0, 3 * 4 * per_thread, 3))
    assert setup.target.value("r", 8) == 3 * 4 * per_thread
    assert setup.target.contents("r", 0, 8) == bytes([255]) * 8
    assert setup.target.contents("r", 16) == bytes(48)
    word = setup.peer.region(handle).word(0)
    assert word.fetch_add(2) == 2**64 - 1
    assert setup.target.value("r", 0) == 1, "addition is modulo 2**64"


def transfer_timeouts(setup: CheckSetup) -> None:
    """Checks that a timeout of wait() ends the waiting only."""
    size = 64 << 20
    remote = setup.remote("r", size)
    data = pattern(1 << 20)
    local = np.tile(data, size >> 20)
    for _ in range(5):
        transfer = remote.write(local)
        error = failure_of(transfer.wait, 0)
        assert error is None or isinstance(error, TimeoutError)
        if error is not None:
            # It was in flight a moment ago, and neither the error nor dropping it ends it.
            finish(transfer)
    finish(remote.write(local))
    assert setup.target.contents("r", size - (1 << 20), size) == data.tobytes()
