"""Checks of a transport: bytes arrive where they should, all of them, and nowhere else."""

from __future__ import annotations

import asyncio
import gc
import pickle
from collections.abc import Iterable
from functools import partial

import numpy as np

from tensorwire.memory import Transfer, wait_all

from ..setup import WAIT_S, CheckSetup, all_must_fail, finish, must_fail, pattern, run_threads

MIB = 1 << 20
SIZES = (0, 1, 7, 8, 63, 64, 65, 4096, MIB + 3, 16 * MIB)


def write_sizes(setup: CheckSetup) -> None:
    """Checks that writes of every size, at even and odd offsets, change exactly their bytes."""
    for number, size in enumerate(SIZES):
        for offset in (0, 64, 129):
            key = f"{size}-{offset}"
            total = size + offset + 100
            remote = setup.remote(key, total)
            background = pattern(total, seed=1000 + number)
            setup.target.fill(key, 0, background.tobytes())
            data = pattern(size, seed=number)
            transfer = remote[offset:].write(data)
            finish(transfer)
            assert transfer.bytes == size
            expected = background.copy()
            expected[offset : offset + size] = data
            assert setup.target.contents(key) == expected.tobytes(), f"{size} bytes at {offset}"
            setup.target.free(key)


def read_sizes(setup: CheckSetup) -> None:
    """Checks that reads of every size, at even and odd offsets, bring exactly their bytes."""
    total = SIZES[-1] + 200
    remote = setup.remote("all", total)
    content = pattern(total)
    for start in range(0, total, MIB):
        setup.target.fill("all", start, content[start : start + MIB].tobytes())
    for size in SIZES:
        for offset in (0, 64, 129):
            local = np.full(size + 2, 7, np.uint8)
            finish(remote[offset:].read(local[1 : size + 1]))
            assert (local[1 : size + 1] == content[offset : offset + size]).all(), (size, offset)
            assert local[0] == local[-1] == 7


def local_kinds(setup: CheckSetup) -> None:
    """Checks that any buffer can be a source, and any writable one a destination."""
    remote = setup.remote("r", 4096)
    data = pattern(1024)
    region = setup.near.allocate(2048)
    region.array()[512:1536] = data
    sources: dict[str, object] = {
        "bytes": data.tobytes(),
        "bytearray": bytearray(data),
        "memoryview": memoryview(data.tobytes()),
        "array": data,
        "read-only array": np.frombuffer(data.tobytes(), np.uint8),
        "part of an array": np.concatenate([data[:1], data, data[:1]])[1:-1],
        "two dimensions": data.reshape(32, 32),
        "float64": data.view(np.float64),
        "region": region[512:1536],
        "dlpack": _DlpackOnly(data),
    }
    for name, source in sources.items():
        setup.target.fill("r", 0, bytes(4096))
        finish(remote[100:1124].write(source))
        assert setup.target.contents("r", 100, 1124) == data.tobytes(), name
    region.array()[:] = 0
    target_array = np.zeros(1024, np.uint8)
    mutable = bytearray(1024)
    for destination in (target_array, mutable, region[512:1536]):
        finish(remote[100:1124].read(destination))
    assert target_array.tobytes() == bytes(mutable) == data.tobytes()
    assert region.array()[512:1536].tobytes() == data.tobytes()
    assert not region.array()[:512].any()
    assert not region.array()[1536:].any()


def slices(setup: CheckSetup) -> None:
    """Checks that a slice of a slice has the bytes that arithmetic says."""
    remote = setup.remote("r", 1000)
    finish(remote[100:900][50:][:10].write(b"0123456789"))
    assert setup.target.contents("r", 149, 161) == b"\x000123456789\x00"
    part = bytearray(4)
    finish(remote[150:160][3:7].read(part))
    assert part == b"3456"
    all_must_fail(
        ValueError,
        lambda: remote[0:10].write(bytes(11)),
        lambda: remote[0:10].read(bytearray(11)),
    )
    assert setup.target.contents("r", 0, 149) == bytes(149)


def batches(setup: CheckSetup) -> None:
    """Checks that a batch is one transfer: pieces of several regions, neighbours, in any order."""
    first, second = setup.remote("a", 10_000), setup.remote("b", 300_000)
    pieces = [pattern(size, seed) for seed, size in enumerate((1, 64, 0, 999, 100_000, 8, 8, 8))]
    targets = [
        first[5:6],
        second[0:64],
        first[9:9],
        first[9_001:10_000],
        second[64:100_064],
        first[24:32],
        first[16:24],
        first[32:40],
    ]
    transfer = setup.peer.write(pieces, targets)
    finish(transfer)
    assert transfer.bytes == sum(piece.nbytes for piece in pieces)
    expected = {"a": np.zeros(10_000, np.uint8), "b": np.zeros(300_000, np.uint8)}
    expected["a"][5:6], expected["b"][0:64], expected["a"][9_001:] = pieces[0], pieces[1], pieces[3]
    expected["b"][64:100_064] = pieces[4]
    expected["a"][24:32], expected["a"][16:24], expected["a"][32:40] = pieces[5:8]
    for key, content in expected.items():
        assert setup.target.contents(key) == content.tobytes()
    back = [np.zeros_like(piece) for piece in pieces]
    finish(setup.peer.read(back, targets))
    assert all((a == b).all() for a, b in zip(back, pieces, strict=True))
    finish(setup.peer.write([], []))
    finish(setup.peer.read([], []))


def many_pieces(setup: CheckSetup) -> None:
    """Checks that a batch of thousands of small pieces, scattered, arrives whole."""
    count = 3000
    remote = setup.remote("r", count * 16)
    data = pattern(count * 8).reshape(count, 8)
    order = np.random.default_rng(5).permutation(count)
    finish(
        setup.peer.write(
            [data[i] for i in order], [remote[16 * i : 16 * i + 8] for i in order.tolist()]
        )
    )
    found = np.frombuffer(setup.target.contents("r"), np.uint8).reshape(count, 16)
    assert (found[:, :8] == data).all()
    assert not found[:, 8:].any()


def prepared(setup: CheckSetup) -> None:
    """Checks that a prepared batch moves the values that its memory has at each start."""
    remote = setup.remote("r", 4096)
    local = np.zeros(4096, np.uint8)
    ranges = [(0, 512), (512, 1024), (2048, 2049), (1024, 1100)]
    pieces = [local[a:b] for a, b in ranges]
    targets = [remote[a:b] for a, b in ranges]
    writing = setup.peer.prepare_write(pieces, targets)
    assert (len(writing), writing.size_bytes) == (4, 512 + 512 + 1 + 76)
    assert writing.runs == 3, "the first two pieces are neighbours on both sides"
    for seed in range(3):
        local[:] = pattern(4096, seed)
        finish(writing.start())
        found = setup.target.contents("r")
        for a, b in ranges:
            assert found[a:b] == local[a:b].tobytes()
        assert found[1100:2048] == bytes(948)
    sent = local.copy()
    local[:] = 0
    finish(setup.peer.prepare_read(pieces, targets).start())
    for a, b in ranges:
        assert (local[a:b] == sent[a:b]).all()
    assert not local[1100:2048].any()


def prepared_by_index(setup: CheckSetup) -> None:
    """Checks that index vectors choose pieces: none, repeated, unsorted, of any integer type."""
    count = 64
    remote = setup.remote("r", count * 32)
    local = pattern(count * 32).reshape(count, 32)
    writing = setup.peer.prepare_write(
        list(local), [remote[32 * i : 32 * i + 32] for i in range(count)]
    )
    empty = writing.start([])
    finish(empty)
    assert empty.bytes == 0
    chosen = [5, 4, 63, 5, 0, 62, 61]
    for indices in (chosen, np.array(chosen, np.int64), np.array(chosen, np.uint8)):
        setup.target.fill("r", 0, bytes(count * 32))
        transfer = writing.start(indices)
        finish(transfer)
        assert transfer.bytes == 32 * len(chosen)
        found = np.frombuffer(setup.target.contents("r"), np.uint8).reshape(count, 32)
        for i in range(count):
            assert (found[i] == (local[i] if i in chosen else 0)).all(), i
    word = setup.remote("w", 8).word(0)
    finish(writing.start([1], signal=(word, 9)))
    assert setup.target.value("w", 0) == 9
    for wrong in ([count], [-1], [0, 1 << 40]):
        must_fail(ValueError, writing.start, wrong)
    reading = setup.peer.prepare_read([np.zeros(32, np.uint8)], [remote[:32]])
    must_fail(ValueError, reading.start, signal=(word, 10))


def source_dropped(setup: CheckSetup) -> None:
    """Checks that a source may lose its last name right after the call."""
    remote = setup.remote("r", 64 * 100_000)
    transfers = [
        remote[100_000 * i : 100_000 * (i + 1)].write(np.full(100_000, i, np.uint8))
        for i in range(64)
    ]
    gc.collect()
    scratch = [np.full(100_000, 255, np.uint8) for _ in range(8)]  # reuses freed memory
    for transfer in transfers:
        finish(transfer)
    for i in range(64):
        assert setup.target.is_filled("r", 100_000 * i, 100_000 * (i + 1), i)
    del scratch


def many_in_flight(setup: CheckSetup) -> None:
    """Checks that thousands of transfers complete with a single wait at the end."""
    remote = setup.remote("r", 8 * 4000)
    data = pattern(8 * 4000)
    transfers = [remote[8 * i : 8 * i + 8].write(data[8 * i : 8 * i + 8]) for i in range(4000)]
    wait_all(transfers, WAIT_S)
    assert setup.target.contents("r") == data.tobytes()


def transfer_dropped(setup: CheckSetup) -> None:
    """Checks that a transfer is carried out even if no reference to it is kept."""
    remote = setup.remote("r", 8 + 50 * 100_000)
    word = remote.word(0)
    for i in range(50):
        remote[8 + 100_000 * i :].write(np.full(100_000, i + 1, np.uint8), signal=(word, i + 1))
    gc.collect()
    setup.target.wait_until("r", 0, 50, WAIT_S)
    finish(setup.peer.signal(word, 51))
    assert setup.target.is_filled("r", 8 + 49 * 100_000, 8 + 50 * 100_000, 50)


def threads(setup: CheckSetup) -> None:
    """Checks that several threads share a Peer, each in its own part of a region."""
    part = 300_000
    remote = setup.remote("r", 4 * part)

    def hammer(number: int) -> None:
        mine = remote[number * part : (number + 1) * part]
        rng = np.random.default_rng(number)
        for _ in range(60):
            size = int(rng.choice([1, 8, 500, 70_000, part]))
            start = int(rng.integers(0, part - size + 1))
            data = rng.integers(0, 256, size, np.uint8)
            finish(mine[start : start + size].write(data))
            back = np.empty_like(data)
            finish(mine[start : start + size].read(back))
            assert (back == data).all()

    run_threads(*(partial(hammer, number) for number in range(4)))


def event_loop(setup: CheckSetup) -> None:
    """Checks that transfers and words can be awaited, many at once, also large ones."""
    size = 3 * MIB + 1
    remote = setup.remote("r", 4 * size)
    data = [pattern(size, seed) for seed in range(4)]
    back = [np.zeros(size, np.uint8) for _ in range(4)]

    async def one(transfer: Transfer) -> None:
        await transfer

    async def together(transfers: Iterable[Transfer]) -> None:
        await asyncio.gather(*map(one, transfers))

    async def main() -> None:
        parts = [remote[size * i : size * (i + 1)] for i in range(4)]
        async with asyncio.timeout(WAIT_S):
            await together(part.write(each) for part, each in zip(parts, data, strict=True))
            await together(part.read(each) for part, each in zip(parts, back, strict=True))
            await together(remote[8 * i : 8 * i + 8].write(bytes([i] * 8)) for i in range(200))

    asyncio.run(main())
    assert all((a == b).all() for a, b in zip(data, back, strict=True))
    assert setup.target.contents("r", 0, 1600) == bytes(i for i in range(200) for _ in range(8))


def handles_travel(setup: CheckSetup) -> None:
    """Checks that a handle works after pickling, as bytes, and from the remote side."""
    handle = setup.target.allocate("r", 100)
    for copy in (
        pickle.loads(pickle.dumps(handle)),
        type(handle).from_bytes(handle.to_bytes()),
        setup.peer.region(handle).handle(),
    ):
        assert copy == handle
        finish(setup.peer.region(copy).write(b"x" * 100))
        assert setup.target.contents("r") == b"x" * 100
        setup.target.fill("r", 0, bytes(100))


class _DlpackOnly:
    """An array library's object with nothing but DLPack."""

    def __init__(self, array: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> None:
        self._array = array

    def __dlpack__(self, **options: object) -> object:
        return self._array.__dlpack__(**options)  # type: ignore[arg-type]

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)
