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
from ..stage import (
    WAIT_S,
    CheckStage,
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


def path(stage: CheckStage) -> None:
    """The path is told, and a path that cannot be had is refused, not replaced."""
    told = stage.peer.path
    assert told.transport == stage.transport
    assert told.wire
    assert told.reason
    assert stage.peer.name == "far"
    assert stage.peer.address == stage.target.address()
    assert stage.peer.pid == stage.target.pid()
    other = "tcp" if stage.transport == "shm" else "shm"
    address = stage.target.address()
    must_fail(UnavailableError, stage.near.connect, address, require=other)
    assert stage.near.connect(address, require=stage.transport).path.transport == stage.transport


def local_close(stage: CheckStage) -> None:
    """Closing a Node ends what is in flight and whoever waits, and everything after."""
    remote = stage.remote("r", 32 << 20)
    word = stage.near.allocate(8).word(0)
    local = np.ones(32 << 20, np.uint8)
    operations = operations_on(remote)
    transfers = [remote.write(local) for _ in range(4)] + [remote.read(local.copy())]
    ended = beside(failure_of, word.wait_until, 1)
    stage.near.close()
    assert isinstance(ended.result(WAIT_S), ClosedError)
    early = [(transfer, transfer.code) for transfer in transfers]
    for transfer in transfers:
        assert isinstance(failure_of(transfer.wait, WAIT_S), ClosedError | None)
    all_must_fail(
        ClosedError,
        *operations,
        lambda: stage.peer.region("r"),
        lambda: stage.peer.allocate(8),
        lambda: stage.near.allocate(8),
        lambda: stage.near.connect(stage.target.address()),
        lambda: stage.near.accept(0.01),
        lambda: word.wait_until(1, 0.01),
        lambda: asyncio.run(word.reached(1)),
    )
    stage.near.close()
    stage.peer.close()
    assert stage.near.closed
    assert stage.peer.lost
    check_completed_once(transfers, early, "local close")


def peer_close(stage: CheckStage) -> None:
    """Closing one connection ends its transfers; the Node and other connections go on."""
    remote = stage.remote("r", 8 << 20)
    operations = operations_on(remote)
    stage.target.accept()
    other = stage.near.connect(stage.target.address())
    assert stage.target.accept() == "near"
    again = other.region(remote.handle())
    transfers = [remote.write(np.ones(8 << 20, np.uint8)) for _ in range(4)]
    stage.peer.close()
    stage.peer.close()
    early = [(transfer, transfer.code) for transfer in transfers]
    for transfer in transfers:
        assert isinstance(failure_of(transfer.wait, WAIT_S), ClosedError | None)
    all_must_fail(ClosedError, *operations, lambda: stage.peer.region("r"))
    check_completed_once(transfers, early, "peer close")
    finish(again.write(b"y"))
    assert stage.near.peers == [other]
    assert not other.lost


def lost_by_close(stage: CheckStage) -> None:
    """When the other side closes, everything ends with PeerLostError that names it."""
    _lost(stage, stage.target.close)


def lost_by_hang_up(stage: CheckStage) -> None:
    """When the other side closes the connection only, the same; connecting again works."""
    stage.target.accept()
    handle = stage.target.allocate("again", 64)
    _lost(stage, stage.target.hang_up)
    finish(stage.near.connect(handle).region(handle).write(b"back"))
    assert stage.target.contents("again", 0, 4) == b"back"


def lost_by_kill(stage: CheckStage) -> None:
    """When the other process is killed, the same."""
    assert stage.member is not None
    _lost(stage, stage.member.kill)


def _lost(stage: CheckStage, end: Callable[[], object]) -> None:
    remote = stage.remote("r", 16 << 20)
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
        lambda: stage.peer.region("r", WAIT_S),
        lambda: stage.peer.allocate(8, None, WAIT_S),
    ]
    for start in refused:
        assert "far" in str(must_fail(PeerLostError, start)), "the message names the peer"
    assert stage.peer.lost
    assert stage.peer.lost_reason
    assert stage.peer not in stage.near.peers
    check_completed_once(transfers, early, "peer lost")


def lost_while_awaited(stage: CheckStage) -> None:
    """An event loop that awaits is told, too."""
    remote = stage.remote("r", 16 << 20)
    local = np.ones(16 << 20, np.uint8)

    async def main() -> None:
        async with asyncio.timeout(WAIT_S):
            closing = asyncio.to_thread(stage.target.close)
            task = asyncio.create_task(closing)
            while True:
                await remote.write(local)
                if task.done():
                    await task

    must_fail(PeerLostError, asyncio.run, main())


def stopped_target(stage: CheckStage) -> None:
    """A frozen process still can be written and read where the transport is one-sided.

    Elsewhere a wait with a timeout ends, and the transfer completes when the process goes on.
    """
    assert stage.member is not None
    remote = stage.remote("r", 8 << 20)
    data = pattern(8 << 20)
    stage.member.stop()
    try:
        transfer = remote.write(data, signal=(remote.word(0), 0))
        back = np.empty(1 << 20, np.uint8)
        reading = remote[: 1 << 20].read(back)
        if stage.transport in ONE_SIDED:
            finish(transfer)
            finish(reading)
            assert (back == data[: 1 << 20]).all()
        else:
            must_fail(TimeoutError, reading.wait, 0.05)
            must_fail(TimeoutError, asyncio.run, wait_transfer(reading, 0.05))
            assert not reading.done()
    finally:
        stage.member.cont()
    finish(transfer)
    finish(reading)
    assert stage.target.contents("r") == data.tobytes()


def views_outlive(stage: CheckStage) -> None:
    """A numpy view stays valid after free, after close, and without its Region object."""
    region = stage.near.allocate(1 << 20)
    view = region.array("float32")
    view[:] = 7
    local = np.ones(1 << 18, np.float32)
    finish(stage.remote("r", 1 << 20).write(region))
    region.free()
    del region
    gc.collect()
    assert (view == 7).all()
    view += local
    stage.near.close()
    gc.collect()
    assert (view == 8).all()


def remote_dropped(stage: CheckStage) -> None:
    """Transfers do not need the RemoteRegion and Peer objects that started them."""
    handle = stage.target.allocate("r", 8 << 20)

    def start() -> list[Transfer]:
        remote = stage.peer.region(handle)
        return [remote.write(np.full(8 << 20, value, np.uint8)) for value in (1, 2, 3)]

    transfers = start()
    gc.collect()
    for transfer in transfers:
        finish(transfer)
    # Three transfers to the same bytes have no order among them, but each byte is of one of them.
    found = np.frombuffer(stage.target.contents("r"), np.uint8)
    assert ((found >= 1) & (found <= 3)).all()


def restart(stage: CheckStage) -> None:
    """A process that comes back at the same address is another one; reconnecting works."""
    handle = stage.target.allocate("r", 64, "rw", "weights")
    remote = stage.peer.region(handle)
    finish(remote.write(b"before"))
    stage.target.restart()
    # Noticed within a second; until then memory that is still mapped can be read.
    word = stage.near.allocate(8).word(0)
    must_fail(PeerLostError, word.wait_until, 1, WAIT_S, peer=stage.peer)
    must_fail(PeerLostError, remote.read, bytearray(6))
    peer = stage.near.connect(handle)
    assert peer.incarnation != handle.incarnation
    error = must_fail(StaleHandleError, peer.region, handle)
    assert "far" in str(error)
    must_fail(LookupError, peer.region, "weights")
    must_fail(PeerLostError, stage.peer.region, "weights")
    new = peer.region(stage.target.allocate("r", 64, "rw", "weights"))
    finish(new.write(b"after"))
    assert stage.target.contents("r", 0, 6) == b"after\0"
    must_fail(PeerLostError, remote.write, b"x")


def cycles(stage: CheckStage) -> None:
    """Connecting, moving bytes and hanging up, again and again, leaves nothing behind."""
    handle = stage.target.allocate("r", 4096)
    data = pattern(4096)
    for number in range(30):
        with Node("guest", **stage.options) as guest:
            peer = guest.connect(handle)
            remote = peer.region(handle)
            finish(remote.write(data, signal=(remote.word(0), 0)))
            leased = peer.allocate(4096)
            finish(leased.write(data))
            if number % 3 == 0:
                peer.close()
    assert stage.target.contents("r") == data.tobytes()
    assert len(stage.near.peers) == 1, (stage.near.peers, stage.peer)


def both_directions(stage: CheckStage) -> None:
    """Who connected does not matter: each side writes into the other at the same time."""
    with stage.rounds([1000] * 100) as (remote, reply):
        for round_ in range(1, 101):
            data = np.full(1000, round_value(round_), np.uint8)
            remote[64:].write(data, signal=(remote.word(0), round_))
            reply.wait_until(round_, WAIT_S)


def two_connections(stage: CheckStage) -> None:
    """Two connections between the same Nodes are independent."""
    second: Peer = stage.near.connect(stage.target.address())
    handle = stage.target.allocate("r", 128)
    regions: list[RemoteRegion] = [stage.peer.region(handle), second.region(handle)]
    finish(regions[0][:64].write(b"a" * 64))
    finish(regions[1][64:].write(b"b" * 64))
    assert stage.target.contents("r") == b"a" * 64 + b"b" * 64
    all_must_fail(
        ValueError,
        lambda: second.write(b"x", regions[0]),
        lambda: second.write([b"x"], [regions[0]]),
        lambda: regions[1].write(b"x", signal=(regions[0].word(0), 1)),
    )


# These need a target that can be stopped and killed.
TWO_PROCESSES = ("lost_by_kill", "stopped_target")
