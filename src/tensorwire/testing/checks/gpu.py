"""Checks of transfers in which a GPU has a part: for each pair of kinds of memory, and of streams.

The local side is memory of the host, pinned memory or memory of a GPU (`CheckSetup.memory`), the
remote side memory of the host or of a GPU.
"""

from __future__ import annotations

import asyncio
import gc
import random
from functools import partial

import numpy as np

from tensorwire.errors import ClosedError, PeerLostError, StaleHandleError
from tensorwire.memory import Node, Transfer, wait_all

from ..faults import check_completed_once
from ..gpu import GpuArray, GpuStream
from ..setup import WAIT_S, CheckSetup, failure_of, finish, must_fail, pattern, run_threads
from ..target import round_value

MIB = 1 << 20
SIZES = (0, 1, 7, 8, 63, 64, 65, 4096, MIB, MIB + 3, 9 * MIB + 5)
TWO_PROCESSES = ("gpu_target_killed",)


def gpu_write_sizes(setup: CheckSetup) -> None:
    """Checks that writes of every size, at even and odd offsets, change exactly their bytes."""
    total = SIZES[-1] + 300
    remote = setup.remote("r", total, on=setup.memory[1])
    for number, size in enumerate(SIZES):
        for offset in (0, 64, 129):
            background = pattern(size + offset + 100, seed=1000 + number)
            setup.target.fill("r", 0, background.tobytes())
            data = pattern(size, seed=number)
            transfer = remote[offset:].write(setup.local(data))
            finish(transfer)
            assert transfer.bytes == size
            background[offset : offset + size] = data
            found = setup.target.contents("r", 0, background.nbytes)
            assert found == background.tobytes(), f"{size} bytes at {offset}"


def gpu_read_sizes(setup: CheckSetup) -> None:
    """Checks that reads of every size, at even and odd offsets, bring exactly their bytes."""
    total = SIZES[-1] + 200
    remote = setup.remote("r", total, on=setup.memory[1])
    content = pattern(total)
    setup.target.fill("r", 0, content.tobytes())
    for size in SIZES:
        for offset in (0, 64, 129):
            local = setup.local(np.full(size + 2, 7, np.uint8))
            finish(remote[offset:].read(local[1 : size + 1]))
            found = setup.value(local)
            assert (found[1 : size + 1] == content[offset : offset + size]).all(), (size, offset)
            assert found[0] == found[-1] == 7


def gpu_batches(setup: CheckSetup) -> None:
    """Checks that one transfer moves neighbouring pieces between all kinds of memory."""
    there, host = setup.remote("r", 300_000, on=setup.memory[1]), setup.remote("h", 10_000)
    data = [pattern(size, seed) for seed, size in enumerate((1, 64, 0, 999, 100_000, 8, 8, 8))]
    targets = [
        host[5:6],
        there[0:64],
        host[9:9],
        host[9_001:10_000],
        there[64:100_064],
        there[200_024:200_032],
        there[200_016:200_024],
        there[200_032:200_040],
    ]
    pieces = [setup.local(each) if i % 4 else each for i, each in enumerate(data)]
    transfer = setup.peer.write(pieces, targets)
    finish(transfer)
    assert transfer.bytes == sum(each.nbytes for each in data)
    expected = {"h": np.zeros(10_000, np.uint8), "r": np.zeros(300_000, np.uint8)}
    expected["h"][5:6], expected["r"][0:64], expected["h"][9_001:] = data[0], data[1], data[3]
    expected["r"][64:100_064] = data[4]
    for start, each in zip((200_024, 200_016, 200_032), data[5:], strict=True):
        expected["r"][start : start + 8] = each
    for key, content in expected.items():
        assert setup.target.contents(key) == content.tobytes(), key
    back = [setup.local(np.zeros_like(each)) for each in data]
    finish(setup.peer.read(back, targets))
    for found, each in zip(back, data, strict=True):
        assert (setup.value(found) == each).all()


def gpu_many_pieces(setup: CheckSetup) -> None:
    """Checks that a batch of a thousand small pieces arrives whole; also prepared, by index."""
    count = 1000
    remote = setup.remote("r", count * 16, on=setup.memory[1])
    data = pattern(count * 8)
    local = setup.local(data)
    order = np.random.default_rng(5).permutation(count).tolist()
    pieces = [local[8 * i : 8 * i + 8] for i in order]
    targets = [remote[16 * i : 16 * i + 8] for i in order]
    finish(setup.peer.write(pieces, targets))
    found = np.frombuffer(setup.target.contents("r"), np.uint8).reshape(count, 16)
    assert (found[:, :8] == data.reshape(count, 8)).all()
    assert not found[:, 8:].any()
    setup.target.fill("r", 0, bytes(count * 16))
    writing = setup.peer.prepare_write(pieces, targets)
    chosen = [5, 4, 63, 5, 0, 62, 61]
    finish(writing.start(chosen))
    found = np.frombuffer(setup.target.contents("r"), np.uint8).reshape(count, 16)
    for place, i in enumerate(order):
        want = data[8 * i : 8 * i + 8] if place in chosen else 0
        assert (found[i, :8] == want).all(), place


def gpu_source_dropped(setup: CheckSetup) -> None:
    """Checks that a source may lose its last name right after the call, without a wait."""
    remote = setup.remote("r", 32 * 100_000, on=setup.memory[1])
    word = setup.remote("w", 8).word(0)
    transfers = [
        remote[100_000 * i : 100_000 * (i + 1)].write(setup.local(np.full(100_000, i, np.uint8)))
        for i in range(32)
    ]
    word.set(1, after=transfers)
    del transfers
    gc.collect()
    setup.target.wait_until("w", 0, 1, WAIT_S)
    for i in range(32):
        assert setup.target.is_filled("r", 100_000 * i, 100_000 * (i + 1), i)


def gpu_many_in_flight(setup: CheckSetup) -> None:
    """Checks that a thousand transfers complete with a single wait at the end."""
    count = 1000
    remote = setup.remote("r", 8 * count, on=setup.memory[1])
    data = pattern(8 * count)
    local = setup.local(data)
    parts = [(8 * i, 8 * i + 8) for i in range(count)]
    wait_all([remote[a:b].write(local[a:b]) for a, b in parts], WAIT_S)
    assert setup.target.contents("r") == data.tobytes()


def gpu_threads(setup: CheckSetup) -> None:
    """Checks that several threads share a Peer, each in its own part of a region."""
    part = 300_000
    remote = setup.remote("r", 4 * part, on=setup.memory[1])

    def hammer(number: int) -> None:
        mine = remote[number * part : (number + 1) * part]
        rng = np.random.default_rng(number)
        for _ in range(15):
            size = int(rng.choice([1, 8, 500, 70_000, part]))
            start = int(rng.integers(0, part - size + 1))
            data = rng.integers(0, 256, size, np.uint8)
            finish(mine[start : start + size].write(setup.local(data)))
            back = setup.local(np.zeros_like(data))
            finish(mine[start : start + size].read(back))
            assert (setup.value(back) == data).all()

    run_threads(*(partial(hammer, number) for number in range(4)))


def gpu_event_loop(setup: CheckSetup) -> None:
    """Checks that transfers can be awaited, many at once."""
    size = 3 * MIB + 1
    remote = setup.remote("r", 4 * size, on=setup.memory[1])
    data = [pattern(size, seed) for seed in range(4)]
    back = [setup.local(np.zeros(size, np.uint8)) for _ in range(4)]

    async def one(transfer: Transfer) -> None:
        await transfer

    async def main() -> None:
        parts = [remote[size * i : size * (i + 1)] for i in range(4)]
        async with asyncio.timeout(WAIT_S):
            writes = [p.write(setup.local(d)) for p, d in zip(parts, data, strict=True)]
            await asyncio.gather(*map(one, writes))
            reads = [part.read(each) for part, each in zip(parts, back, strict=True)]
            await asyncio.gather(*map(one, reads))

    asyncio.run(main())
    for want, found in zip(data, back, strict=True):
        assert (setup.value(found) == want).all()


def gpu_signal_ordering(setup: CheckSetup) -> None:
    """Checks that a reader of word >= k sees every byte of the call that raised it to k."""
    sizes = np.random.default_rng(3).choice([1, 8, 1000, 40_000, 3_000_000], 40).tolist()
    with setup.rounds_apart(sizes) as (remote, word, reply):
        for round_, size in enumerate(sizes, 1):
            data = setup.local(np.full(size, round_value(round_), np.uint8))
            if round_ % 2:
                remote.write(data, signal=(word, round_))
            else:
                setup.peer.signal(word, round_, after=[remote.write(data)])
            reply.wait_until(round_, WAIT_S)


def gpu_stream_order(setup: CheckSetup) -> None:
    """Checks that a transfer starts after its stream's work; `block_stream` delays later work.

    Between the two the stream changes the memory, with pauses at random, so that a copy that
    starts too early or ends too late moves other bytes.
    """
    stream_rounds(setup)


def stream_rounds(setup: CheckSetup, wait: bool = True, hold: bool = True) -> None:
    """Runs the rounds of `gpu_stream_order`; without one of its waits they fail.

    Args:
        setup: where.
        wait: the transfer is told its stream; else one on which nothing is.
        hold: the stream is told to wait for the transfer.
    """
    size = MIB + 4096
    remote = setup.remote("r", size, on=setup.memory[1])
    idle = GpuStream()
    streams = [GpuStream() for _ in range(2)]
    arrays = [GpuArray(size), GpuArray(size)]
    checked = GpuArray(size)
    dice = random.Random(4)
    for round_ in range(1, 25):
        stream, array = streams[round_ % 2], arrays[round_ % 2]
        value = round_value(round_)
        if not wait:  # so that the transfer comes before the fill, also on a busy machine
            stream.pause(0.05)
            for _ in range(200):  # a driver may do the work of all streams one after the other
                stream.fill(checked, 252)
        stream.pause(dice.choice([0, 0, 1e-3, 3e-3]))
        stream.fill(array, value)
        transfer = remote.write(array, stream=stream if wait else idle)
        if round_ % 3:
            if hold:
                transfer.block_stream(stream)
            stream.fill(array, 255)
        transfer.wait(WAIT_S)
        found = setup.target.contents("r", 0, size)
        assert found == bytes([value]) * size, f"round {round_}: {set(found)} and not {value}"
        stream.pause(dice.choice([0, 1e-3]))
        stream.fill(checked, 254)
        back = remote.read(checked, stream=stream if wait else idle)
        if hold:
            back.block_stream(stream)
        stream.fill(array, 253)
        stream.synchronize()
        if hold:
            assert checked.tobytes() == bytes([value]) * size, f"round {round_}, read"
        finish(back)
    for stream in [*streams, idle]:
        stream.close()


def gpu_stream_and_host(setup: CheckSetup) -> None:
    """Checks that a stream orders transfers of memory of the host too, and can wait for them."""
    size = 2 * MIB + 17
    remote = setup.remote("r", size, on=setup.memory[1])
    stream = GpuStream()
    for round_ in range(1, 7):
        local = setup.local(np.zeros(size, np.uint8))
        data = pattern(size, round_)
        stream.pause(2e-3)
        stream.call(partial(setup.refill, local, data))
        transfer = remote.write(local, stream=stream)
        transfer.block_stream(stream)
        seen: list[bool] = []
        stream.call(lambda transfer=transfer, seen=seen: seen.append(transfer.done()))  # type: ignore[misc]
        stream.synchronize()
        finish(transfer)
        assert setup.target.contents("r") == data.tobytes(), round_
        if setup.memory == ("host", "host"):
            assert seen == [True]
    stream.close()


def gpu_freed_in_flight(setup: CheckSetup) -> None:
    """Checks that a region may be freed while copies of it wait for a stream."""
    remote = setup.remote("r", MIB, on=setup.memory[1])
    stream = GpuStream()
    stream.pause(20e-3)
    transfers = [remote.write(setup.local(pattern(MIB)), stream=stream) for _ in range(3)]
    setup.target.free("r")
    for transfer in transfers:
        assert isinstance(failure_of(transfer.wait, WAIT_S), StaleHandleError | None)
    must_fail(StaleHandleError, remote.write, setup.local(pattern(8)))
    stream.close()


def gpu_node_closed(setup: CheckSetup) -> None:
    """Checks that closing a Node waits for the GPU's copies, and ends every transfer once."""
    remote = setup.remote("r", 4 * MIB, on=setup.memory[1])
    with Node("other", **setup.options) as other:
        there = other.connect(setup.target.address()).region(remote.handle())
        stream = GpuStream()
        stream.pause(20e-3)
        local = setup.local(pattern(4 * MIB))
        transfers = [there.write(local, stream=stream) for _ in range(3)]
        transfers.append(there.write(local))
    early = [(transfer, transfer.code) for transfer in transfers]
    for transfer in transfers:
        assert isinstance(failure_of(transfer.wait, WAIT_S), ClosedError | None)
    check_completed_once(transfers, early, "node closed")
    stream.close()
    finish(remote.write(local))
    assert setup.target.contents("r") == setup.value(local).tobytes()


def gpu_target_killed(setup: CheckSetup) -> None:
    """Checks that a killed owner's transfers end, and its memory stays usable until then."""
    assert setup.member is not None
    remote = setup.remote("r", 8 * MIB, on=setup.memory[1])
    local = setup.local(pattern(8 * MIB))
    transfers = [remote.write(local) for _ in range(4)]
    setup.member.kill()
    for transfer in transfers:
        assert isinstance(failure_of(transfer.wait, WAIT_S), PeerLostError | None)
    for _ in range(1000):
        if isinstance(failure_of(remote.write, local), PeerLostError):
            return
    raise AssertionError("the loss was not seen")


def gpu_errors(setup: CheckSetup) -> None:
    """Checks that operations that a GPU's memory cannot do are refused at once."""
    remote = setup.remote("r", 4096, on="gpu")
    assert remote.device == ("cuda:0" if remote.mapped else "cuda")
    must_fail(ValueError, remote.word, 0)
    for access in ("r", "w"):
        limited = setup.remote(access, 64, access, on="gpu")
        ways = {"r": limited.read, "w": limited.write}
        for way, operation in ways.items():
            local = setup.local(np.zeros(8, np.uint8))
            if way == access:
                finish(operation(local))
            else:
                must_fail(PermissionError, operation, local)
    must_fail(ValueError, remote.write, setup.local(np.zeros(4097, np.uint8)))
    must_fail(TypeError, remote.write, setup.local(np.zeros(8, np.uint8)), stream="fast")
