"""Memory seen copy-on-write: it follows what others write, and keeps to itself what is written."""

import mmap

import numpy as np
import pytest

from tensorwire import Node, UnavailableError
from tensorwire.memory import PrivateMapping, checksum, local_memory, same_bytes

PAGE = mmap.PAGESIZE


def check(shared: np.ndarray, private: PrivateMapping) -> None:
    """`shared` has 40 pages and a few bytes."""
    seen = private.array()
    assert len(seen) == len(shared) == private.size_bytes
    shared[:] = 1
    assert seen.sum() == len(shared)
    assert private.written() == []
    seen[3 * PAGE + 5] = 7
    seen[4 * PAGE] = 1  # the same byte
    seen[-1] = 7
    assert shared.sum() == len(shared)
    wanted = [(3 * PAGE, 5 * PAGE), (40 * PAGE, len(shared))]
    assert private.written() == wanted
    private.compares = True
    found = [each for _ in range(32) for each in private.written()]
    assert found == [(3 * PAGE, 4 * PAGE), wanted[1]]
    private.compares = False
    private.revert()
    assert private.written() == []
    shared[:] = 2
    assert seen.sum() == 2 * len(shared)


def test_memory_of_this_process() -> None:
    if not local_memory(1)[1].compares:
        check(*local_memory(40 * PAGE + 24))
        return
    pytest.skip("/proc/self/pagemap does not tell which pages were written")


def test_memory_of_a_node_and_of_its_peer() -> None:
    with Node("owner") as owner, Node("user") as user:
        region = owner.allocate(40 * PAGE + 24, name="x")
        remote = user.connect(owner.address).region("x")
        check(region.array(), region.private())
        check(region.array(), remote.private())
        check(remote.array(), remote.private())
        with pytest.raises(ValueError, match="whole region"):
            remote[:64].private()


def test_memory_that_no_peer_maps() -> None:
    with Node("owner", transports=["tcp"]) as owner:
        owner.allocate(64, name="plain")
        mappable = owner.allocate(40 * PAGE + 24, name="x", mappable=True)
        check(mappable.array(), mappable.private())
        with pytest.raises(UnavailableError, match="cannot be mapped again"):
            owner.region("plain").private()
        with Node("user") as user:
            remote = user.connect(owner.address).region("x")
            with pytest.raises(UnavailableError, match="tcp"):
                remote.private()


def test_same_bytes_and_checksum() -> None:
    one = np.arange(1000, dtype=np.uint8)
    other = one.copy()
    assert same_bytes(one, other)
    assert checksum(one) == checksum(other)
    assert not same_bytes(one, one[:-1])
    seen = {checksum(one)}
    for i in range(len(one)):
        other[i] ^= 128
        assert not same_bytes(one, other)
        seen.add(checksum(other))
        other[i] ^= 128
    assert len(seen) == len(one) + 1
    # A change of every sign leaves sums as they are.
    signs = np.arange(1, 65, dtype=np.float32)
    assert checksum(signs) != checksum(-signs)
    assert checksum(np.zeros(77, np.uint8)) == 0
    assert checksum(np.zeros(0, np.uint8)) == 0
