"""Memory seen copy-on-write: it follows what others write, and keeps to itself what is written."""

import mmap
import os
import subprocess
import sys
from pathlib import Path

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


NOT_TRACKED = """
import ctypes, errno, platform, struct
number = {"x86_64": 323, "aarch64": 282}[platform.machine()]  # of userfaultfd
code = [(0x20, 0, 0, 0), (0x15, 0, 1, number), (0x06, 0, 0, 0x50000 | errno.EPERM),
        (0x06, 0, 0, 0x7FFF0000)]  # load the number; equal? an error : allowed
filters = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *each) for each in code))
program = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", len(code), ctypes.addressof(filters)))
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0, "no new privileges"
assert libc.prctl(22, 2, program, 0, 0) == 0, "a filter of system calls"
from test_private_mapping import PAGE, check, local_memory
shared, private = local_memory(40 * PAGE + 24)
assert not private._core.tracked
check(shared, private)
"""


def shared_memory_may_be_large() -> bool:
    switch = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
    return switch.exists() and not {"[never]", "[deny]"} & set(switch.read_text().split())


def test_where_the_kernel_does_not_note_what_is_written() -> None:
    """A sandbox that forbids userfaultfd: each page is looked at."""
    if local_memory(1)[1].compares:
        pytest.skip("/proc/self/pagemap does not tell which pages were written")
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent)}
    program = [sys.executable, "-c", NOT_TRACKED]
    done = subprocess.run(program, env=environment, stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_what_is_tracked() -> None:
    shared, private = local_memory(1000 * PAGE)
    if not private._core.tracked:
        if tuple(map(int, os.uname().release.split(".")[:2])) < (6, 7):
            pytest.skip("Linux 6.7 or newer notes which pages were written")
        if shared_memory_may_be_large():
            pytest.skip("shared memory may be mapped in large pages, which tracking would split")
    assert private._core.tracked
    seen = private.array()
    seen[5 * PAGE] = 1  # never read before
    shared[6 * PAGE] = 3
    assert seen[6 * PAGE] == 3
    with open("/dev/zero", "rb", buffering=0) as zeros:  # the kernel writes
        assert zeros.readinto(memoryview(seen)[7 * PAGE : 8 * PAGE]) == PAGE
    seen[8 * PAGE : 900 * PAGE : 2 * PAGE] = 1  # more ranges than one call tells
    found = private.written()
    assert found[0] == (5 * PAGE, 6 * PAGE)
    assert found[1:3] == [(7 * PAGE, 9 * PAGE), (10 * PAGE, 11 * PAGE)]
    assert len(found) == 2 + 445
    for _ in range(2):  # it goes on after what was written is given back
        private.revert()
        shared[:] = 4
        assert seen.sum() == 4 * len(seen)
        assert private.written() == []
        assert private._core.tracked
        seen[-1] = 1
        assert private.written() == [(999 * PAGE, 1000 * PAGE)]
    if (child := os.fork()) == 0:
        os._exit(0)  # where its copy of the descriptor is closed, as that of others may be
    assert os.waitpid(child, 0)[1] == 0
    assert private.written() == [(999 * PAGE, 1000 * PAGE)]
    seen[0] = 1
    assert private.written() == [(0, PAGE), (999 * PAGE, 1000 * PAGE)]


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
        with pytest.raises(UnavailableError, match="transports leave out shm"):
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
