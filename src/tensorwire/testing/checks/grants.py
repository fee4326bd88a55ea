"""Checks of a transport: a peer reaches what it was given, as it was given, and no more."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import numpy as np

from tensorwire.errors import BusyError, ClosedError, StaleHandleError, TimeoutError
from tensorwire.memory import RemoteRegion

from ..setup import (
    WAIT_S,
    CheckSetup,
    all_must_fail,
    failure_of,
    finish,
    must_fail,
    operations_on,
    pattern,
)


def access(setup: CheckSetup) -> None:
    """Checks that an operation without the owner's permission is refused and changes nothing."""
    for grant in ("rw", "r", "w", "none"):
        remote = setup.remote(grant, 64, grant)
        assert remote.access == grant
        content = pattern(64).tobytes()
        setup.target.fill(grant, 0, content)
        free = setup.remote("free " + grant, 64)
        for write in _writes(remote, free):
            _allowed("w" in grant, write)
        assert "w" in grant or setup.target.contents(grant) == content
        for read in _reads(remote):
            _allowed("r" in grant, read)


def _allowed(allowed: bool, start: Callable[[], Any]) -> None:
    if allowed:
        assert failure_of(start) is None
    else:
        must_fail(PermissionError, start)


def _writes(remote: RemoteRegion, free: RemoteRegion) -> list[Callable[[], Any]]:
    peer, highest = remote.peer, 2**64 - 1
    return [
        lambda: remote.write(b"x" * 64),
        lambda: peer.write([b"x"], [remote[3:]]),
        lambda: peer.prepare_write([b"x"], [remote]).start(),
        lambda: remote.word(0).set(highest),
        lambda: free.write(b"y", signal=(remote.word(0), highest)),
    ]


def _reads(remote: RemoteRegion) -> list[Callable[[], Any]]:
    peer = remote.peer
    return [
        lambda: remote.read(bytearray(64)),
        lambda: peer.read([bytearray(1)], [remote[3:]]),
        lambda: peer.prepare_read([bytearray(1)], [remote]).start(),
    ]


def fetch_add_needs_both(setup: CheckSetup) -> None:
    """Checks that an addition tells the old value, so it needs both rights."""
    for grant, allowed in (("rw", True), ("r", False), ("w", False)):
        word = setup.remote(grant, 8, grant).word(0)
        if allowed:
            assert word.fetch_add(1, WAIT_S) == 0
        else:
            must_fail(PermissionError, word.fetch_add, 1, WAIT_S)
            assert setup.target.value(grant, 0) == 0


def out_of_range(setup: CheckSetup) -> None:
    """Checks that nothing reaches past a region's end."""
    remote, neighbour = setup.remote("r", 100), setup.remote("n", 100)
    all_must_fail(
        ValueError,
        lambda: remote.write(bytes(101)),
        lambda: remote[50:].write(bytes(51)),
        lambda: remote.read(bytearray(101)),
        lambda: setup.peer.write([b"a", bytes(101)], [neighbour, remote]),
        lambda: setup.peer.read([bytearray(51)], [remote[50:]]),
        lambda: setup.peer.prepare_write([bytes(51)], [remote[50:]]),
        lambda: remote[0:101],
        lambda: remote[-1:],
        lambda: remote[20:10],
        lambda: remote.word(96),
        lambda: remote.word(-8),
        lambda: remote.word(4),
        lambda: remote[4:].word(0),
    )
    assert setup.target.contents("r") == setup.target.contents("n") == bytes(100)
    finish(remote[100:].write(b""))


def stale_after_free(setup: CheckSetup) -> None:
    """Checks that every use after free fails alike, also if another region has the slot."""
    handle = setup.target.allocate("r", 4096)
    remote = setup.peer.region(handle)
    word, operations = remote.word(0), operations_on(remote)
    assert [failure_of(start) for start in operations] == [None] * len(operations)
    setup.target.free("r")
    again = setup.remote("again", 4096)
    all_must_fail(
        StaleHandleError,
        *operations,
        lambda: remote.write(bytes(4096)),
        lambda: again.write(b"x", signal=(word, 1)),
        lambda: setup.peer.region(handle),
    )
    assert setup.target.contents("again", 1) == bytes(4095)
    finish(again.write(b"fine"))
    assert setup.target.contents("again", 0, 4) == b"fine"


def forged_handles(setup: CheckSetup) -> None:
    """Checks that a handle that is not exactly right gives nothing."""
    handle = setup.target.allocate("r", 64)
    for wrong in (
        dataclasses.replace(handle, incarnation=handle.incarnation ^ 1),
        dataclasses.replace(handle, generation=handle.generation ^ 1),
        dataclasses.replace(handle, generation=0),
        dataclasses.replace(handle, id=handle.id + 1),
        dataclasses.replace(handle, id=2**32 - 1),
    ):
        must_fail(StaleHandleError, setup.peer.region, wrong)
    larger = dataclasses.replace(handle, size_bytes=1 << 30, access="rw")
    assert setup.peer.region(larger).size_bytes == 64, "the owner's word counts, not the handle's"


def names(setup: CheckSetup) -> None:
    """Checks that regions are found by name; names are unique and free again after free."""
    setup.target.allocate("a", 100, "rw", "weights/ä")
    remote = setup.peer.region("weights/ä")
    assert (remote.size_bytes, remote.name) == (100, "weights/ä")
    finish(remote.write(b"hello"))
    assert setup.target.contents("a", 0, 5) == b"hello"
    error = must_fail(LookupError, setup.peer.region, "weights/b")
    assert "weights/b" in str(error)
    must_fail(LookupError, setup.near.region, "weights/ä")
    must_fail(ValueError, setup.peer.allocate, 8, "weights/ä")
    must_fail(ValueError, setup.peer.allocate, 8, "x" * 2000)
    setup.target.free("a")
    must_fail(LookupError, setup.peer.region, "weights/ä")
    setup.target.allocate("b", 8, "rw", "weights/ä")
    assert setup.peer.region("weights/ä").size_bytes == 8


def awaited_names(setup: CheckSetup) -> None:
    """Checks that several look-ups, and a later one, can wait for the same region."""
    must_fail(TimeoutError, setup.peer.wait_region, "soon", 0.05)
    must_fail(LookupError, setup.peer.region, "soon")
    with ThreadPoolExecutor(3) as pool:
        found = [pool.submit(setup.peer.wait_region, "soon", WAIT_S) for _ in range(2)]
        other = pool.submit(setup.peer.wait_region, "other", WAIT_S)
        setup.target.allocate("s", 100, "rw", "soon")
        for remote in [each.result(WAIT_S) for each in found]:
            assert (remote.size_bytes, remote.name) == (100, "soon")
            finish(remote.write(b"hello"))
        assert not other.done()
        setup.target.allocate("o", 200, "r", "other")
        assert other.result(WAIT_S).size_bytes == 200
    assert setup.target.contents("s", 0, 5) == b"hello"
    assert setup.peer.wait_region("soon", WAIT_S).size_bytes == 100
    setup.target.free("s")
    must_fail(TimeoutError, setup.peer.wait_region, "soon", 0.05)
    setup.target.allocate("s", 300, "rw", "soon")
    assert setup.peer.wait_region("soon", WAIT_S).size_bytes == 300
    for name in range(1024):
        must_fail(TimeoutError, setup.peer.wait_region, f"never {name}", 0)
    must_fail(BusyError, setup.peer.wait_region, "one too many", WAIT_S)
    with setup.third() as third:
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(third.wait_region, "never", WAIT_S)
            assert not wait([waiting], 0.05).done
            third.close()
            must_fail(ClosedError, waiting.result, WAIT_S)


def remote_allocation(setup: CheckSetup) -> None:
    """Checks that memory can be allocated at the peer, found there by name, and given back."""
    remote = setup.peer.allocate(100_000, "theirs")
    back = np.ones(100_000, np.uint8)
    finish(remote.read(back))
    assert not back.any(), "new memory is zeroed"
    data = pattern(100_000)
    finish(remote.write(data))
    assert setup.target.find("t", "theirs") == 100_000
    assert setup.target.contents("t") == data.tobytes()
    setup.target.fill("t", 0, b"from the owner")
    finish(remote.read(back))
    assert back[:14].tobytes() == b"from the owner"
    remote.free(WAIT_S)
    must_fail(StaleHandleError, remote.write, b"x")
    must_fail(StaleHandleError, remote.free, WAIT_S)
    must_fail(LookupError, setup.peer.region, "theirs")


def only_the_lessee_frees(setup: CheckSetup) -> None:
    """Checks that a peer cannot free memory that it did not allocate."""
    owned = setup.remote("owned", 64)
    must_fail(PermissionError, owned.free, WAIT_S)
    leased = setup.peer.allocate(64, "leased")
    with setup.third() as third:
        seen = third.region("leased")
        must_fail(PermissionError, seen.free, WAIT_S)
        finish(seen.write(b"shared"))
    back = bytearray(6)
    finish(leased.read(back))
    assert back == b"shared"
    finish(owned.write(b"still there"))


def lease_ends_with_connection(setup: CheckSetup) -> None:
    """Checks that memory allocated by a peer is given back when the peer goes away."""
    with setup.third() as third:
        third.allocate(1 << 20, "borrowed")
        assert setup.peer.region("borrowed").size_bytes == 1 << 20
    for _ in range(20_000):  # each a round trip to the peer
        if isinstance(failure_of(setup.peer.region, "borrowed"), LookupError):
            return
    raise AssertionError("what was leased is still there")


def quota(setup: CheckSetup) -> None:
    """Checks that a quota bounds all peers' allocations together, and free gives room back."""
    mib = 1 << 20
    first = setup.peer.allocate(3 * mib)
    error = must_fail(BusyError, setup.peer.allocate, 2 * mib)
    assert "quota" in str(error)
    must_fail(BusyError, setup.peer.allocate, 1 << 62)
    with setup.third() as other:
        must_fail(BusyError, other.allocate, 2 * mib)
        second = other.allocate(mib)
        finish(second.write(b"fits"))
        first.free(WAIT_S)
        finish(other.allocate(3 * mib).write(b"fits too"))
    setup.target.allocate("own", 64 * mib)  # the owner itself is not bound


# Options of the Nodes for single checks.
OPTIONS: dict[str, dict[str, Any]] = {"quota": {"quota_bytes": 4 << 20}}
