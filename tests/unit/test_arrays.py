"""Which arrays memory can be seen as and which can be moved; the others are errors that say why."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tensorwire import Node, Peer, Region, RemoteRegion


@pytest.fixture(scope="module", params=["shm", "tcp"])
def ends(request: pytest.FixtureRequest) -> Iterator[tuple[Region, Peer, RemoteRegion]]:
    kind = {"transports": [request.param]}
    with Node("owner", **kind) as owner, Node("user", **kind) as user:
        region = owner.allocate(4096, name="r")
        peer = user.connect(owner.address)
        yield region, peer, peer.region("r")


@pytest.mark.parametrize("dtype", ["V0", "S0", "U0", []])
@pytest.mark.parametrize("shape", [None, 3])
def test_items_without_bytes(ends: Any, dtype: Any, shape: int | None) -> None:
    """numpy would divide by zero, or choose another size by itself."""
    region, _, remote = ends
    for memory in (region, *([remote] if remote.mapped else [])):
        with pytest.raises(ValueError, match="have no bytes"):
            memory.array(dtype, shape)


@pytest.mark.parametrize("dtype", ["O", [("x", "i4"), ("o", "O")], "nonsense"])
def test_dtypes_that_no_memory_has(ends: Any, dtype: Any) -> None:
    region, _, _ = ends
    with pytest.raises(TypeError):
        region.array(dtype, 1)


MOVABLE = {
    "datetime64": np.array(["2020-01-01", "NaT"], "datetime64[ns]"),
    "timedelta64": np.array([1, -1], "timedelta64[s]"),
    "big endian": np.arange(3, dtype=">i4"),
    "structured": np.array([(1, 2.5)], [("x", "i4"), ("y", ">f8")]),
    "structured with time": np.array([(1, 7)], [("x", "i4"), ("t", "datetime64[s]")]),
    "bytes": np.array([b"abc", b"d"]),
    "text": np.array(["abc", "ü"]),
    "void": np.array([b"12345"], "V5"),
    "no dimension": np.array(3.5),
    "nothing": np.zeros((3, 0)),
    "bool": np.array([True, False]),
    "half": np.ones(3, "f2"),
}


@pytest.mark.parametrize("name", MOVABLE)
def test_bytes_move_whatever_they_mean(ends: Any, name: str) -> None:
    region, peer, remote = ends
    source = MOVABLE[name]
    for batch in (False, True):
        region.array()[:] = 0
        target = np.zeros_like(source)
        if batch:
            peer.write([source], [remote]).wait(10)
            peer.read([target], [remote]).wait(10)
        else:
            remote.write(source).wait(10)
            remote.read(target).wait(10)
        seen = region.array(source.dtype, source.shape)
        assert seen.tobytes() == target.tobytes() == source.tobytes()
        assert seen.dtype == source.dtype
    if source.nbytes:
        source.flags.writeable = False
        remote.write(source).wait(10)
        with pytest.raises(ValueError, match="read-only"):
            remote.read(source)
        source.flags.writeable = True


REFUSED = {
    "masked": (np.ma.array([1, 2], mask=[0, 1]), TypeError, "mask"),
    "objects": (np.array([None, 1], object), TypeError, "objects"),
    "objects in a structure": (np.zeros(2, [("o", "O")]), TypeError, "objects"),
    "strided": (np.arange(10)[::2], ValueError, "contiguous"),
    "Fortran": (np.asfortranarray(np.ones((3, 4))), ValueError, "contiguous"),
    "strided time": (np.zeros(4, "datetime64[s]")[::2], ValueError, "contiguous"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_arrays_that_cannot_be_moved(ends: Any, name: str) -> None:
    _, peer, remote = ends
    array, error, advice = REFUSED[name]
    for call in (
        lambda: remote.write(array),
        lambda: remote.read(array),
        lambda: peer.write([array], [remote]),
        lambda: peer.prepare_write([array], [remote]),
    ):
        with pytest.raises(error, match=advice):
            call()


def test_a_mask_is_not_adopted(ends: Any) -> None:
    region, _, _ = ends
    with pytest.raises(TypeError, match="mask"):
        region.adopt(np.ma.array([1, 2], mask=[0, 1]))
