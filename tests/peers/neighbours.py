"""Process functions for test_restart.py: some stay, and some come and go."""

import time
from typing import Any

import numpy as np
from actor import MIB, PATIENCE_S, all_complete, growth_since

from tensorwire import Handle, Node, Peer, PeerLostError, RemoteRegion, StaleHandleError
from tensorwire.testing import Channel, Footprint

BLOCK = 256 << 10


def restarting(channel: Channel, listen: str, transports: list[str] | None) -> None:
    """A process with a region that everybody writes and reads, until it is killed."""
    with Node("restarting", listen=listen, transports=transports) as node:
        region = node.allocate(4 * MIB, name="target")
        channel.send((node.address, region.handle()))
        channel.recv(None)


def neighbour(channel: Channel, name: str, transports: list[str], address: str) -> None:
    """Moves bytes to the restarting process and to the other neighbour at the same time.

    Sends the incarnation of the restarting process each time that it has got through to a new one,
    and stops when it is told to. Sends what it has seen, and stays until it is told to go.
    """
    with Node(name, transports=transports) as node:
        mine = node.allocate(BLOCK + 64, name="mine")
        channel.send(node.address)
        other = node.connect(channel.recv())
        friend = Friend(mine, other)
        stale = wrong = 0
        handle: Handle | None = None
        before: Footprint | None = None
        while (peer := reconnect(node, address, channel)) is not None:
            if handle is not None:
                try:
                    peer.region(handle)
                    wrong += 1
                except StaleHandleError:
                    stale += 1
            remote = allocated(peer, "target")
            handle = remote.handle()
            got_through = False
            try:
                while True:
                    wrong += not exchange(remote, name)
                    friend.step()
                    if not got_through:
                        channel.send(peer.incarnation)
                        got_through = True
            except PeerLostError as error:
                if "restarting" not in str(error):
                    raise
            wrong += not refused(remote)
            del peer, remote
            if before is None:
                before = Footprint.now()
        assert before is not None
        seen = {
            "stale": stale,
            "wrong": wrong,
            "rounds": friend.rounds,
            "other_lost": other.lost,
            "growth": growth_since(before),
            "complete": all_complete(node),
        }
        channel.send(seen)
        channel.recv(None)


class Friend:
    """The exchange with the other neighbour, which must not notice anything."""

    def __init__(self, mine: Any, other: Peer) -> None:
        self._mine, self._other = mine, other
        self._remote = other.region("mine")
        self._local = np.empty(BLOCK, np.uint8)
        self.rounds = 0

    def step(self) -> None:
        """Writes a block and reads it back, and raises the other's word."""
        self.rounds += 1
        self._local[:] = self.rounds % 251
        self._remote[64:].write(self._local, signal=(self._remote.word(0), self.rounds)).wait(
            PATIENCE_S
        )
        back = np.empty_like(self._local)
        self._remote[64:].read(back).wait(PATIENCE_S)
        assert (back == self.rounds % 251).all()


def reconnect(node: Node, address: str, channel: Channel) -> Peer | None:
    """Tries until a process listens there again; None if the test ends."""
    deadline = time.monotonic() + 3 * PATIENCE_S  # a process takes long to start in a machine
    while True:
        try:
            return node.connect(address)
        except PeerLostError:
            if told_to_stop(channel):
                return None
            assert time.monotonic() < deadline, "it never came back"
            time.sleep(0.02)


def allocated(peer: Peer, name: str) -> RemoteRegion:
    """A region of a process that may have begun to listen a moment ago."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            return peer.region(name)
        except LookupError:
            assert time.monotonic() < deadline, "it never allocated it"
            time.sleep(0.001)


def told_to_stop(channel: Channel) -> bool:
    try:
        channel.recv(0)
    except TimeoutError:
        return False
    return True


def exchange(remote: RemoteRegion, name: str) -> bool:
    """Writes, reads back and counts, in a part of the region that is this neighbour's own."""
    place = {"left": 0, "right": 1}[name]
    part = remote[64 + place * MIB : 64 + (place + 1) * MIB]
    data = np.full(MIB, 7 + place, np.uint8)
    part.write(data).wait(PATIENCE_S)
    back = np.empty_like(data)
    part.read(back).wait(PATIENCE_S)
    remote.word(8 * place).fetch_add(1, PATIENCE_S)
    return bool((back == data).all())


def refused(remote: RemoteRegion) -> bool:
    """Tells whether memory of the lost process is out of reach."""
    try:
        remote.write(b"x").wait(PATIENCE_S)
    except PeerLostError:
        return True
    return False
