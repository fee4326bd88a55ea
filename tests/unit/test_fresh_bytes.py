"""Bytes that are filled before anybody else has them, and copies in large pages."""

import numpy as np
import pytest

from tensorwire.memory import Node
from tensorwire.memory.fresh import FreshBytes, copied

SIZES = (0, 1, 4095, 4096, (1 << 18) - 1, 1 << 18, (2 << 20) - 1, (2 << 20) + 5, 9 << 20)


def content(size: int) -> bytes:
    return np.random.default_rng(size).bytes(size)


@pytest.mark.parametrize("size", SIZES)
def test_a_copy_is_equal(size: int) -> None:
    data = content(size)
    assert copied(memoryview(data)) == copied(np.frombuffer(data, np.uint8)) == data
    assert type(copied(bytearray(data))) is bytes


def test_a_copy_of_what_has_no_plain_memory() -> None:
    with pytest.raises(TypeError, match="expected an array"):
        copied("text")
    with pytest.raises(ValueError, match="not contiguous"):
        copied(np.zeros((4, 4))[:, 1])


@pytest.mark.parametrize("size", SIZES[1:])
def test_pieces_are_filled_by_transfers(size: int) -> None:
    data = content(size)
    with Node("a", transports=("shm",)) as owner, Node("b", transports=("shm",)) as reader:
        peer = reader.connect(owner.address)
        region = owner.allocate(size, name="data", access="r")
        region.array()[:] = np.frombuffer(data, np.uint8)
        remote = peer.region("data")
        fresh, middle = FreshBytes(size), size // 3
        for start, stop in ((middle, size), (0, middle)):
            remote[start:stop].read(fresh[start:stop]).wait(10)
        assert fresh.take() == data


@pytest.mark.parametrize("piece", [slice(0, 11), slice(5, 3), slice(-1, 3), slice(0, 4, 2)])
def test_pieces_that_are_none(piece: slice) -> None:
    with pytest.raises(ValueError, match="within 10"):
        FreshBytes(10)[piece]


def test_a_piece_keeps_the_bytes() -> None:
    piece = FreshBytes(1 << 22)[5:]
    assert piece.size_bytes == (1 << 22) - 5
    assert np.frombuffer(copied(piece._local_buffer()[0]), np.uint8).size == (1 << 22) - 5
