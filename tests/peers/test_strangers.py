"""Strangers of the same host, and members, try to hold a Node up.

They send descriptors that block their reader, and push others out of the handshake. `HonestPeer`
writes, reads and compares all the time; its slowest round is judged.
"""

import contextlib
import os
import resource
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import wire
from actor import eventually
from hostile import SECRET, Victim

from tensorwire import Node, PathWarning
from tensorwire.testing import Channel, PeerGroup

pytestmark = pytest.mark.timeout(100)

LINGER_S = 30
SLOWEST_S = 3.0  # of a round of milliseconds; far less than what the attacks ask for
NOBODY = 65534


class Lingering:
    """A TCP socket with bytes that are not read: its last holder waits for LINGER_S on close."""

    def __init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            self._sender = socket.create_connection(server.getsockname())
            self._receiver, _ = server.accept()
        self._sender.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                self._sender.send(bytes(1 << 20))
        self._linger(LINGER_S)
        self._closing: threading.Thread | None = None

    def _linger(self, seconds: int) -> None:
        self._sender.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, seconds))

    def give(self, send: Callable[[int], Any]) -> bool:
        """Sends the socket away and closes it here, so that the other side closes it last.

        Or it is faster, and this side waits: in a thread.
        """
        try:
            send(self._sender.fileno())
        except OSError:
            self._linger(0)
            return False
        finally:
            self._closing = threading.Thread(target=self._sender.close)
            self._closing.start()
            self._closing.join(0.1)
        return True

    def __enter__(self) -> "Lingering":
        return self

    def __exit__(self, *_: object) -> None:
        """Lets all threads go that still wait."""
        self._receiver.close()
        if self._closing:
            self._closing.join()


@contextlib.contextmanager
def nobody_is_held_up(victim: Victim) -> Iterator[None]:
    """Fails if a round of an honest peer takes long during the block and a second after it."""
    slowest = [0.0]
    over = threading.Event()

    def watch() -> None:
        seen = [peer.rounds for peer in victim.honest]
        since = [time.monotonic()] * len(seen)
        while not over.wait(0.01):
            for index, peer in enumerate(victim.honest):
                if peer.rounds != seen[index]:
                    seen[index], since[index] = peer.rounds, time.monotonic()
                slowest[0] = max(slowest[0], time.monotonic() - since[index])

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
        for peer in victim.honest:
            for _ in range(10):
                peer.goes_on()
    finally:
        over.set()
        thread.join()
    assert slowest[0] < SLOWEST_S


def names_of_sockets() -> set[str]:
    words = Path("/proc/net/unix").read_text().split()
    return {"\0" + word[1:] for word in words if word.startswith("@tensorwire-")}


def stuff_every_socket(channel: Channel, address: str, seconds: float) -> int:
    """Process function: as another user, sends blocking descriptors to all sockets with names.

    Also to the name that Nodes once had, from the incarnation in the Hello that anybody gets.
    Returns how many descriptors the kernel took.
    """
    with wire.dial(address) as stream:
        incarnation = wire.decode("Hello", stream.greet(wire.hello(b"guessed")))["incarnation"]
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    taken = 0
    end = time.monotonic() + seconds
    with contextlib.ExitStack() as stack:
        channel.send("ready")
        while time.monotonic() < end:
            for name in names_of_sockets() | {f"\0tensorwire-{incarnation:016x}"}:
                for kind in (socket.SOCK_DGRAM, socket.SOCK_STREAM):
                    stranger = socket.socket(socket.AF_UNIX, kind)
                    with stranger, contextlib.suppress(OSError):
                        stranger.setblocking(False)
                        stranger.connect(name)
                        blocks = stack.enter_context(Lingering())
                        taken += blocks.give(partial(send_descriptor, stranger))
            time.sleep(0.01)
    return taken


def send_descriptor(stranger: socket.socket, fd: int) -> None:
    socket.send_fds(stranger, [b"x" * 64], [fd])


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to become another user")
def test_a_stranger_does_not_hold_up_a_node(victim: Victim) -> None:
    """Neither one that is at work, nor while others connect over shared memory."""
    with PeerGroup() as group, nobody_is_held_up(victim):
        stranger = group.start(stuff_every_socket, victim.address, 3.0)
        assert stranger.recv() == "ready"
        for _ in range(20):
            with Node("comes and goes", secret=SECRET, transports=["shm"]) as node:
                start = time.monotonic()
                node.connect(victim.address).region("open")
                assert time.monotonic() - start < SLOWEST_S
        stranger.result(50)


def blocks_in_place_of(stream: wire.Wire, place: str, fd: int) -> None:
    mine = wire.HELLO["incarnation"][2]
    with wire.page(mine) as page, wire.doorbell() as bell:
        descriptors = {"page": [fd, bell], "doorbell": [page, fd], "one more": [page, bell, fd]}
        if place in descriptors:
            stream.frame(wire.ATTACH, fds=descriptors[place], generation=mine)
        else:
            stream.pass_descriptors(bytes(64), [fd])


@pytest.mark.parametrize("place", ["page", "doorbell", "one more", "unclaimed"])
def test_a_member_does_not_hold_up_a_node(victim: Victim, place: str) -> None:
    """Its descriptor blocks a thread that does nothing else, and no other peer."""
    with nobody_is_held_up(victim):
        for _ in range(3):
            with Lingering() as blocks, victim.connect("shm", attach=False) as stream:
                assert blocks.give(partial(blocks_in_place_of, stream, place))
                for peer in victim.honest:
                    peer.goes_on()


def victim_with_few(channel: Channel, secret: bytes) -> None:
    """Process function: may have 160 descriptors, so that 40 may be held up."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (160, before[1]))
    with Node("victim", secret=secret) as victim:
        channel.send(victim.address)
        channel.recv(None)


def give_ever_more(channel: Channel, address: str) -> None:
    """Process function: a member that passes 60 descriptors that do not close."""
    attach = wire.encode("Header", type=wire.ATTACH, generation=77)
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(AssertionError):  # until shm is refused, which a busy host may see
            for _ in range(60):
                blocks = stack.enter_context(Lingering())
                with wire.connect("shm", address, SECRET, attach=False) as stream:
                    # Closed here while they are on their way, so that the Node closes them last.
                    beside = stream.beside
                    blocks.give(lambda fd, to=beside: socket.send_fds(to, [attach], [fd, fd]))
                    stream.send(attach)
                    time.sleep(0.01)
            time.sleep(1.2)  # who is held up for a second counts
        channel.send("given")
        channel.recv(None)


def test_members_cannot_hold_up_ever_more_threads() -> None:
    """Named for a bug: each such connection held a thread and a descriptor, without a limit."""
    with PeerGroup() as group:
        victim = group.start(victim_with_few, SECRET)
        address = victim.recv(50)
        member = group.start(give_ever_more, address)
        assert member.recv(50) == "given"
        with Node("late", secret=SECRET) as node:
            with pytest.warns(PathWarning, match="is reached by tcp"):
                path = node.connect(address).path
            assert path.transport == "tcp"
            assert "too many descriptors that do not close" in path.reason
        member.send("enough")
        member.result(50)
        with Node("later", secret=SECRET) as node:

            def is_shm() -> bool:
                peer = node.connect(address)
                transport = peer.path.transport
                peer.close()
                return transport == "shm"

            eventually(is_shm, "shm is back")
        victim.send("enough")
        victim.result(50)


def test_a_grant_that_blocks(victim: Victim) -> None:
    """The same in an answer: the asker has an error at once, and goes on with others."""
    shm = {"transports": wire.SHM_BIT, "host": wire.host_id()}
    with (
        Lingering() as blocks,
        wire.FakeNode(SECRET, **shm) as fake,
        wire.page(fake.incarnation, [0, 77]) as page,
        wire.doorbell() as bell,
        Node("asks", secret=SECRET) as node,
    ):
        honest = node.connect(victim.address).region("open")
        with contextlib.ExitStack() as stack:
            peers: list[Any] = []
            connecting = threading.Thread(target=lambda: peers.append(node.connect(fake.address)))
            connecting.start()
            stream = stack.enter_context(fake.accept_shm())
            stream.next_frame()
            stream.attach(page, bell, incarnation=fake.incarnation)
            connecting.join()
            asking = threading.Thread(target=lambda: peers.append(ask(peers[0])))
            asking.start()
            transfer = stream.answer(wire.LOOKUP).transfer
            values = {"flags": 6, "region": 1, "generation": 77, "total": 4096}
            blocks.give(lambda fd: stream.frame(wire.GRANT, fds=[fd], transfer=transfer, **values))
            start = time.monotonic()
            for _ in range(50):
                honest[:64].write(bytes(64)).wait(wire.PATIENCE_S)
            asking.join()
            assert time.monotonic() - start < SLOWEST_S
            assert "not sealed" in peers[1]


def ask(peer: Any) -> str:
    try:
        peer.region("r")
    except Exception as error:
        return str(error)
    return ""


# ---- floods


def flood(channel: Channel, address: str, seconds: float, greets: bool) -> int:
    """Process function: connects as fast as it can and never proves anything."""
    host, _, port = address.rpartition(":")
    hello = wire.hello(b"guessed")
    connected = 0
    end = time.monotonic() + seconds
    channel.send("ready")
    while time.monotonic() < end:
        with contextlib.suppress(OSError):
            stream = socket.socket()
            stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            stream.connect((host, int(port)))
            if greets:
                stream.send(hello)
            if greets and connected % 4 == 0:
                stream.recv(160)  # it is in the middle of its handshake; who is silent gets nothing
            stream.detach() if connected % 1000 < 200 else stream.close()
            connected += 1
    return connected


@pytest.mark.slow
@pytest.mark.parametrize("greets", [False, True], ids=["silent", "with a Hello"])
def test_a_flood_of_strangers_keeps_nobody_out(greets: bool) -> None:
    """Two processes connect all the time; every honest connect works within its limit."""
    with PeerGroup() as group, Node("wanted", secret=SECRET, listen="127.0.0.1:0") as node:
        node.allocate(64, name="open")
        floods = [group.start(flood, node.address, 4.0, greets) for _ in range(2)]
        for each in floods:
            assert each.recv() == "ready"
        served = 0
        while any(each.exit_code is None for each in floods):
            for transport in ("shm", "tcp"):
                with Node("honest", secret=SECRET, transports=[transport]) as guest:
                    assert guest.connect(node.address, timeout_s=20).region("open").size_bytes == 64
                    served += 1
        assert served > 4
        assert sum(each.result(20) for each in floods) > 500
        eventually(lambda: not node.peers, "all have left")
