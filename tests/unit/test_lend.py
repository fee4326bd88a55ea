"""A Node lends memory of another Node of its process: peers read it, and cannot write it."""

import contextlib
import ctypes
import errno
import mmap
import os
from collections.abc import Iterator

import numpy as np
import pytest

from tensorwire import Node, Region, StaleHandleError
from tensorwire.memory.peer import RemoteRegion


def reading(region: Region) -> int:
    """A descriptor of the region's memory that is good for reading alone."""
    descriptor = region.descriptor()
    try:
        return os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.close(descriptor)


@pytest.fixture
def owned() -> Iterator[Region]:
    with Node("owner") as node:
        region = node.allocate(10_000, name="secret memory")
        region.array()[:] = 7
        yield region


@contextlib.contextmanager
def seen(owned: Region, *transports: str) -> Iterator[tuple[Node, RemoteRegion]]:
    with Node("door") as door, Node("reader", transports=transports or None) as reader:
        descriptor = reading(owned)
        lent = door.lend(descriptor, name="values", size_bytes=owned.size_bytes)
        os.close(descriptor)
        assert (lent.name, lent.size_bytes) == ("values", 10_000)
        yield door, reader.connect(door.address).region("values")
        lent.free()
        lent.free()


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_peers_read_what_its_owner_writes_and_write_nothing(owned: Region, transport: str) -> None:
    with seen(owned, transport) as (door, remote):
        data = np.zeros(10_000, np.uint8)
        remote.read(data).wait(10)
        assert (data == 7).all()
        owned.array()[:] = 9
        remote.read(data).wait(10)
        assert (data == 9).all()
        assert remote.access == "r"
        for attempt in (
            lambda: remote.write(data).wait(10),
            lambda: remote.word(0).set(1 << 60).wait(10),
            lambda: remote.word(0).fetch_add(1, 10),
        ):
            with pytest.raises(PermissionError):
                attempt()
        assert (owned.array() == 9).all()
        with pytest.raises(LookupError):
            door.region("values")  # nobody here gets it for writing, either
        with pytest.raises(LookupError):
            remote.peer.region("secret memory")


def test_a_mapping_of_it_cannot_be_made_writable(owned: Region) -> None:
    with seen(owned) as (_, remote):
        view = remote.memoryview()
        assert view.readonly
        address = np.frombuffer(view, np.uint8).ctypes.data
        libc = ctypes.CDLL(None, use_errno=True)
        page = ctypes.c_void_p(address // mmap.PAGESIZE * mmap.PAGESIZE)
        assert libc.mprotect(page, mmap.PAGESIZE, mmap.PROT_READ | mmap.PROT_WRITE) == -1
        assert ctypes.get_errno() == errno.EACCES


def test_when_it_is_freed_peers_reach_it_no_more(owned: Region) -> None:
    with Node("door") as door, Node("reader") as reader:
        descriptor = reading(owned)
        lent = door.lend(descriptor, name="values", size_bytes=4096)
        remote = reader.connect(door.address).region("values")
        lent.free()
        with pytest.raises(StaleHandleError):
            remote.read(np.zeros(4096, np.uint8)).wait(10)
        door.lend(descriptor, name="values", size_bytes=1).free()  # the name is free again
        os.close(descriptor)


def test_what_cannot_be_lent_is_refused(owned: Region) -> None:
    with Node("door") as door:
        writing = owned.descriptor()
        with pytest.raises(ValueError, match="reading alone"):
            door.lend(writing, name="values", size_bytes=10_000)
        os.close(writing)
        descriptor = reading(owned)
        for size in (0, -1, 1 << 20, 1 << 62):
            with pytest.raises(ValueError, match=r"smaller|bytes"):
                door.lend(descriptor, name="values", size_bytes=size)
        door.allocate(64, name="taken")
        with pytest.raises(ValueError, match="already a region"):
            door.lend(descriptor, name="taken", size_bytes=64)
        os.close(descriptor)
        with pytest.raises(ValueError, match="descriptor"):
            door.lend(descriptor, name="values", size_bytes=64)
        with open(__file__, "rb") as file, pytest.raises(ValueError, match="cannot lend"):
            door.lend(file.fileno(), name="values", size_bytes=64)
