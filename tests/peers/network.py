"""Processes on two hosts, and Nodes on both; see tests/hosts.py."""

import contextlib
import hashlib
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from actor import Actor, serve
from hosts import Hosts, enter

from tensorwire import Node, PeerLostError
from tensorwire.testing import Channel, Elsewhere, Member, Pair, PeerGroup
from tensorwire.testing.target import serve_target, target_elsewhere

SECRET = b"of two hosts in one kernel"


def serve_target_on(channel: Channel, path: str, options: dict[str, Any]) -> None:
    """Process function: a Target on a host."""
    with enter(path):
        serve_target(channel, options)


class Far(Actor):
    """An Actor that tells when and how it lost a peer, by the clock that all processes share."""

    def await_loss(self, key: str, timeout_s: float) -> tuple[str, float]:
        """Waits for a word that is never raised; the peer is the one that `accept` took."""
        try:
            self._regions[key].word(0).wait_until(1 << 60, timeout_s, peer=self._peer)
        except PeerLostError as error:
            return str(error), time.monotonic()
        raise AssertionError("somebody raised the word")

    def use_accepted(self, name: str) -> None:
        """`write_until_lost` writes to a region of the peer that `accept` took."""
        assert self._peer is not None
        self._remote = self._peer.region(name)

    def write_until_lost(self, size_bytes: int) -> tuple[str, float]:
        """Keeps two writes into the remote region on their way."""
        local = np.ones(size_bytes, np.uint8)
        before = self._remote.write(local)
        try:
            while True:
                after = self._remote.write(local)
                before.wait()
                before = after
        except PeerLostError as error:
            return str(error), time.monotonic()

    def listen_plainly(self, size_bytes: int) -> int:
        """Takes a plain connection, answers each `size_bytes` with a byte; returns the port."""
        listener = socket.create_server((self.address().partition(":")[0], 0))

        def run() -> None:
            with listener, listener.accept()[0] as plain:
                room = memoryview(bytearray(size_bytes))
                while True:
                    left = room
                    while len(left):
                        count = plain.recv_into(left)
                        if count == 0:
                            return
                        left = left[count:]
                    plain.sendall(b"!")

        threading.Thread(target=run, name="plain", daemon=True).start()
        return listener.getsockname()[1]

    def digest(self, key: str) -> str:
        """sha256 of a region."""
        return digest(self._regions[key].array())


def digest(data: Any) -> str:
    """sha256 of bytes."""
    return hashlib.sha256(data).hexdigest()


def serve_far(channel: Channel, path: str, options: dict[str, Any]) -> None:
    """Process function: a Far on a host."""
    with enter(path):
        serve(channel, Far(options))


def on(address: str, **options: Any) -> dict[str, Any]:
    """Options of a Node that listens on an address."""
    return {"listen": f"{address}:0", "secret": SECRET, "transports": ["tcp"], **options}


def start_far(
    group: PeerGroup, hosts: Hosts, name: str = "far", **options: Any
) -> tuple[Member, Any]:
    """Starts a process with a Far on the second host."""
    options = {"name": name, **on(hosts[1].address), **options}
    member = group.start(serve_far, hosts[1].path, options, name=name)
    return member, target_elsewhere(member)


def second_of(hosts: Hosts) -> Elsewhere:
    """The second host, as a place for targets of checks that run on the first."""

    @contextlib.contextmanager
    def start(options: dict[str, Any]) -> Iterator[Member]:
        with PeerGroup() as group:
            yield group.start(serve_target_on, hosts[1].path, options, name="target")

    return Elsewhere(start, on(hosts[0].address), on(hosts[1].address))


@contextlib.contextmanager
def pair_on(hosts: Hosts, transports: Iterable[str] | None, **options: Any) -> Iterator[Pair]:
    """Connects a pair like `node_pair`: near on the first host, far on the second."""
    near_host, far_host = hosts
    options = {"transports": transports, **options}
    with contextlib.ExitStack() as stack:
        with enter(far_host.path):
            far = stack.enter_context(Node("far", **{**on(far_host.address), **options}))
        stack.enter_context(enter(near_host.path))
        near = stack.enter_context(Node("near", **{**on(near_host.address), **options}))
        yield Pair(near, far, near.connect(far.address), far.accept(timeout_s=10.0))
