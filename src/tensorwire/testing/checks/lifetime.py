"""Checks of a transport: whatever goes away, everything ends, once, with the right error."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Callable

import numpy as np

from tensorwire.errors import (
    ClosedError,
    PeerLostError,
    StaleHandleError,
    TimeoutError,
    UnavailableError,
)
from tensorwire.memory import Node, Peer, RemoteRegion, Transfer
from tensorwire.memory.aio import wait_transfer

from ..faults import check_completed_once
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
from ..target import beside, round_value

# On these a target need not be awake for writes and reads.
ONE_SIDED = ("shm", "rdma")


def path(setup: CheckSetup) -> None:
    """Checks that the path is told, and a path that cannot be had is refused, not replaced."""
    told = setup.peer.path
    assert told.transport == setup.transport
    assert told.wire
    assert told.copies == {"rdma": 0, "shm": 1, "tcp": 2}[setup.transport]
    assert told.reason
    assert setup.peer.name == "far"
    assert setup.peer.address == setup.target.address()
    assert setup.peer.pid == setup.target.pid()
    other = "tcp" if setup.transport == "shm" else "shm"
    address = setup.target.address()
    must_fail(UnavailableError, setup.near.connect, address, require=other)
    assert setup.near.connect(address, require=setup.transport).path.transport == setup.transport


def local_close(setup: CheckSetup) -> None:
    """Checks that closing a Node ends all transfers, all waits, and every later call."""
    remote = setup.remote("r", 32 << 20)
    word = setup.near.allocate(8).word(0)
    local = np.ones(32 << 20, np.uint8)
    operations = operations_on(remote)
    transfers = [remote.write(local) for _ in range(4)] + [remote.read(local.copy())]
    ended = beside(failure_of, word.wait_until, 1)
    setup.near.close()
    assert isinstance(ended.result(WAIT_S), ClosedError)
    early = [(transfer, transfer.code) for transfer in transfers]
    for transfer in transfers:
        assert isinstance(failure_of(transfer.wait, WAIT_S), ClosedError | None)
    all_must_fail(
        ClosedError,
        *operations,
        lambda: setup.peer.region("r"),
        lambda: setup.peer.allocate(8),
        lambda: setup.near.allocate(8),
        lambda: setup.near.connect(setup.target.address()),
        lambda: setup.near.accept(0.01),
        lambda: word.wait_until(1, 0.01),
        lambda: asyncio.run(word.reached(1)),
    )
    setup.near.close()
    setup.peer.close()
    assert setup.near.closed
    assert setup.peer.lost
    check_completed_once(transfers, early, "local close")


def peer_close(setup: CheckSetup) -> None:
    """Checks that closing one connection ends its transfers and no other connection."""
    remote = setup.remote("r", 8 << 20)
    operations = operations_on(remote)
    setup.target.accept()
    other = setup.near.connect(setup.target.address())
    assert setup.target.accept() == "near"
    again = other.region(remote.handle())
    transfers = [remote.write(np.ones(8 << 20, np.uint8)) for _ in range(4)]
    setup.peer.close()
    setup.peer.close()
    early = [(transfer, transfer.code) for transfer in transfers]
    for transfer in transfers:
        assert isinstance(failure_of(transfer.wait, WAIT_S), ClosedError | None)
    all_must_fail(ClosedError, *operations, lambda: setup.peer.region("r"))
    check_completed_once(transfers, early, "peer close")
    finish(again.write(b"y"))
    assert setup.near.peers == [other]
    assert not other.lost


def lost_by_close(setup: CheckSetup) -> None:
    """Checks that a close of the other side ends everything with a PeerLostError naming it."""
    _lost(setup, setup.target.close)


def lost_by_hang_up(setup: CheckSetup) -> None:
    """Checks that a hang-up of the other side alone ends everything; reconnecting works."""
    setup.target.accept()
    handle = setup.target.allocate("again", 64)
    _lost(setup, setup.target.hang_up)
    finish(setup.near.connect(handle).region(handle).write(b"back"))
    assert setup.target.contents("again", 0, 4) == b"back"


def lost_by_kill(setup: CheckSetup) -> None:
    """Checks that the death of the other process ends everything with PeerLostError."""
    assert setup.member is not None
    _lost(setup, setup.member.kill)


def _lost(setup: CheckSetup, end: Callable[[], object]) -> None:
    remote = setup.remote("r", 16 << 20)
    operations = operations_on(remote)
    transfers: list[Transfer] = []
    half, local = threading.Event(), np.ones(16 << 20, np.uint8)

    def load() -> None:
        # Until an operation fails; there is no end but the loss.
        deadline = time.monotonic() + WAIT_S
        while time.monotonic() < deadline:
            transfers.append(remote.write(local, signal=(remote.word(0), 1)))
            transfers.append(remote.read(np.empty(1000, np.uint8)))
            transfers[-1].wait(WAIT_S)
            half.set()

    loading = beside(load)
    assert half.wait(WAIT_S)
    end()
    lost = loading.exception(2 * WAIT_S)
    assert isinstance(lost, PeerLostError), repr(lost)
    early = [(transfer, transfer.code) for transfer in transfers if transfer.done()]
    for transfer in transfers:
        error = failure_of(transfer.wait, WAIT_S)
        assert isinstance(error, PeerLostError | None), repr(error)
    refused = [
        *operations,
        lambda: setup.peer.region("r", WAIT_S),
        lambda: setup.peer.allocate(8, None, WAIT_S),
    ]
    for start in refused:
        assert "far" in str(must_fail(PeerLostError, start)), "the message names the peer"
    assert setup.peer.lost
    assert setup.peer.lost_reason
    assert setup.peer not in setup.near.peers
    check_completed_once(transfers, early, "peer lost")


def lost_while_awaited(setup: CheckSetup) -> None:
    """Checks that an event loop that awaits a transfer hears of a loss."""
    remote = setup.remote("r", 16 << 20)
    local = np.ones(16 << 20, np.uint8)

    async def main() -> None:
        async with asyncio.timeout(WAIT_S):
            closing = asyncio.to_thread(setup.target.close)
            task = asyncio.create_task(closing)
            while True:
                await remote.write(local)
                if task.done():
                    await task

    must_fail(PeerLostError, asyncio.run, main())


def stopped_target(setup: CheckSetup) -> None:
    """Checks that a frozen process still can be written and read where the transport is one-sided.

    Elsewhere a wait with a timeout ends, and the transfer completes when the process goes on.
    """
    assert setup.member is not None
    remote = setup.remote("r", 8 << 20)
    data = pattern(8 << 20)
    setup.member.stop()
    try:
        transfer = remote.write(data, signal=(remote.word(0), 0))
        back = np.empty(1 << 20, np.uint8)
        reading = remote[: 1 << 20].read(back)
        if setup.transport in ONE_SIDED:
            finish(transfer)
            finish(reading)
            assert (back == data[: 1 << 20]).all()
        else:
            must_fail(TimeoutError, reading.wait, 0.05)
            must_fail(TimeoutError, asyncio.run, wait_transfer(reading, 0.05))
            assert not reading.done()
    finally:
        setup.member.cont()
    finish(transfer)
    finish(reading)
    assert setup.target.contents("r") == data.tobytes()


def views_outlive(setup: CheckSetup) -> None:
    """Checks that a numpy view stays valid after free, close, and the end of its Region."""
    region = setup.near.allocate(1 << 20)
    view = region.array("float32")
    view[:] = 7
    local = np.ones(1 << 18, np.float32)
    finish(setup.remote("r", 1 << 20).write(region))
    region.free()
    del region
    gc.collect()
    assert (view == 7).all()
    view += local
    setup.near.close()
    gc.collect()
    assert (view == 8).all()


def remote_dropped(setup: CheckSetup) -> None:
    """Checks that transfers do not need the RemoteRegion and Peer objects that started them."""
    handle = setup.target.allocate("r", 8 << 20)

    def start() -> list[Transfer]:
        remote = setup.peer.region(handle)
        return [remote.write(np.full(8 << 20, value, np.uint8)) for value in (1, 2, 3)]

    transfers = start()
    gc.collect()
    for transfer in transfers:
        finish(transfer)
    # Three transfers to the same bytes have no order among them, but each byte is of one of them.
    found = np.frombuffer(setup.target.contents("r"), np.uint8)
    assert ((found >= 1) & (found <= 3)).all()


def restart(setup: CheckSetup) -> None:
    """Checks that a process restarted at its address is another one; reconnecting works."""
    handle = setup.target.allocate("r", 64, "rw", "weights")
    remote = setup.peer.region(handle)
    finish(remote.write(b"before"))
    setup.target.restart()
    # Noticed within a second; until then memory that is still mapped can be read.
    word = setup.near.allocate(8).word(0)
    must_fail(PeerLostError, word.wait_until, 1, WAIT_S, peer=setup.peer)
    must_fail(PeerLostError, remote.read, bytearray(6))
    peer = setup.near.connect(handle)
    assert peer.incarnation != handle.incarnation
    error = must_fail(StaleHandleError, peer.region, handle)
    assert "far" in str(error)
    must_fail(LookupError, peer.region, "weights")
    must_fail(PeerLostError, setup.peer.region, "weights")
    new = peer.region(setup.target.allocate("r", 64, "rw", "weights"))
    finish(new.write(b"after"))
    assert setup.target.contents("r", 0, 6) == b"after\0"
    must_fail(PeerLostError, remote.write, b"x")


def cycles(setup: CheckSetup) -> None:
    """Checks that connecting, moving bytes and hanging up repeatedly leaves nothing behind."""
    handle = setup.target.allocate("r", 4096)
    data = pattern(4096)
    for number in range(30):
        with Node("guest", **setup.options) as guest:
            peer = guest.connect(handle)
            remote = peer.region(handle)
            finish(remote.write(data, signal=(remote.word(0), 0)))
            leased = peer.allocate(4096)
            finish(leased.write(data))
            if number % 3 == 0:
                peer.close()
    assert setup.target.contents("r") == data.tobytes()
    assert len(setup.near.peers) == 1, (setup.near.peers, setup.peer)


def both_directions(setup: CheckSetup) -> None:
    """Checks that each side can write into the other at the same time."""
    with setup.rounds([1000] * 100) as (remote, reply):
        for round_ in range(1, 101):
            data = np.full(1000, round_value(round_), np.uint8)
            remote[64:].write(data, signal=(remote.word(0), round_))
            reply.wait_until(round_, WAIT_S)


def two_connections(setup: CheckSetup) -> None:
    """Checks that two connections between the same Nodes are independent."""
    second: Peer = setup.near.connect(setup.target.address())
    handle = setup.target.allocate("r", 128)
    regions: list[RemoteRegion] = [setup.peer.region(handle), second.region(handle)]
    finish(regions[0][:64].write(b"a" * 64))
    finish(regions[1][64:].write(b"b" * 64))
    assert setup.target.contents("r") == b"a" * 64 + b"b" * 64
    all_must_fail(
        ValueError,
        lambda: second.write(b"x", regions[0]),
        lambda: second.write([b"x"], [regions[0]]),
        lambda: regions[1].write(b"x", signal=(regions[0].word(0), 1)),
    )


# These need a target that can be stopped and killed.
TWO_PROCESSES = ("lost_by_kill", "stopped_target")
