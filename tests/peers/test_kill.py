"""A peer is killed with SIGKILL in every phase of its life; the others notice, and nothing is left.

Each phase gets a survivor (this process) and a victim, and kills it. The conditions afterwards are
the same for all and checked in one place.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from itertools import count
from typing import Any

import numpy as np
import pytest
from actor import (
    MIB,
    NOTICED_S,
    PATIENCE_S,
    Actor,
    all_complete,
    background,
    eventually,
    exists,
    growth_since,
    killed_at_end,
    start_actor,
)
from relay import MEETING, MESSAGES, WELCOME, Relay

from tensorwire import Node, Peer, PeerLostError, RemoteRegion, TimeoutError
from tensorwire.testing import Footprint, Member, PeerGroup

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("nothing_left")]


class Scene:
    """A survivor, a victim, and the moment of its death."""

    def __init__(self, transport: str, node: Node, member: Member, target: Actor) -> None:
        self.transport = transport
        self.node = node
        self.member = member
        self.target = target
        self.address = target.address()
        self.incarnation = target.incarnation()
        self.peer: Peer | None = None
        self.died_at = 0.0

    def connect(self) -> Peer:
        """Connects to the victim."""
        self.peer = self.node.connect(self.address)
        assert self.peer.path.transport == self.transport
        return self.peer

    def accept(self) -> Peer:
        """Lets the victim connect."""
        self.target.connect(self.node.address)
        self.peer = self.node.accept(PATIENCE_S)
        assert self.peer.path.transport == self.transport
        return self.peer

    def remote(self, size_bytes: int) -> RemoteRegion:
        """Connects; a region of the victim, "r" there."""
        return self.connect().region(self.target.allocate("r", size_bytes))

    def kill(self) -> None:
        self.died_at = time.monotonic()
        self.member.kill()

    def dies_by_itself(self) -> None:
        """The victim was told to kill itself."""
        self.member._expected_end = True
        assert self.member.wait(PATIENCE_S) == -9
        self.died_at = time.monotonic()

    def left_s(self) -> float:
        return max(self.died_at + NOTICED_S - time.monotonic(), 0.0)

    def lost(self, *calls: "Future[Any]") -> None:
        """Each of these calls must end with the victim's loss, in time."""
        for call in calls:
            self.check(call.exception(self.left_s()))

    def check(self, error: BaseException | None) -> None:
        assert isinstance(error, PeerLostError), repr(error)
        assert "victim" in str(error)

    def until_killed(self, step: Callable[[int], Any], rounds: int = 20) -> None:
        """Repeats a step in another thread, kills during it, and expects the loss."""
        done = [0]

        def run() -> None:
            for done[0] in count(1):
                step(done[0])

        call = background(run)
        eventually(lambda: done[0] > rounds or call.done(), f"{rounds} rounds")
        self.kill()
        self.lost(call)


@contextlib.contextmanager
def survivor(transport: str) -> Iterator[Scene]:
    """Gives a Scene, and checks in the end what must hold whenever a peer has died."""
    with Node("survivor", transports=[transport]) as node:
        before = Footprint.now()
        with PeerGroup() as group:
            scene = Scene(transport, node, *start_actor(group, "victim", transports=[transport]))
            yield scene
            eventually(lambda: not node.peers, "the Node forgets the peer", scene.left_s())
            if scene.peer is not None:
                check_lost(scene.peer)
            scene.peer = None
        assert all_complete(node)
        # While the Node lives, nothing of its connection to the victim is left.
        assert growth_since(before) == []
        go_on(node, scene)


def check_lost(peer: Peer) -> None:
    assert peer.lost
    assert "victim" in peer.lost_reason
    for call in (lambda: peer.region("r"), lambda: peer.allocate(8)):
        with pytest.raises(PeerLostError, match="victim"):
            call()


def go_on(node: Node, scene: Scene) -> None:
    """The port is free again, and the survivor can use it."""
    transports = [scene.transport]
    with Node("successor", listen=scene.address, transports=transports) as successor:
        region = successor.allocate(8)
        remote = node.connect(successor.address).region(region.handle())
        remote.write(b"goes on!").wait(PATIENCE_S)
        assert region.memoryview() == b"goes on!"


# ---- phases: nothing is moved


def idle(scene: Scene) -> None:
    scene.connect()
    scene.kill()
    # Nobody calls anything: the Node notices by itself.


def idle_accepted(scene: Scene) -> None:
    scene.accept()
    scene.kill()


def not_yet_accepted(scene: Scene) -> None:
    scene.target.connect(scene.node.address)
    eventually(lambda: scene.node.peers, "the victim's connection")
    scene.kill()
    eventually(lambda: not scene.node.peers, "the end of the connection", scene.left_s())
    with pytest.raises(TimeoutError):
        scene.node.accept(0)  # a dead peer is not handed out


def looked_up(scene: Scene) -> None:
    remote = scene.remote(64)
    scene.kill()
    eventually(lambda: scene.peer.lost, "the loss", scene.left_s())
    for start in (
        lambda: remote.write(b"x"),
        lambda: remote.read(bytearray(1)),
        lambda: remote.word(0).set(1),
        lambda: scene.peer.fetch_add(remote.word(0)),
        lambda: scene.peer.write([b"x"], [remote]),
    ):
        with pytest.raises(PeerLostError, match="victim"):
            start().wait(0)
    with pytest.raises(PeerLostError, match="victim"):
        remote.free()


def two_connections(scene: Scene) -> None:
    scene.accept()
    scene.connect()
    scene.kill()


def just_forked(scene: Scene) -> None:
    """The victim's child lives on, and must not look like the victim."""
    scene.connect()
    with killed_at_end(scene.target.fork()) as child:
        scene.kill()
        eventually(lambda: scene.peer.lost, "the loss", scene.left_s())
        assert exists(child)


# ---- phases: waiting


def waiting_for_words(scene: Scene) -> None:
    peer = scene.connect()
    mine = scene.node.allocate(64)
    calls = [
        background(mine.word(offset).wait_until, 1, timeout_s, peer=peer)
        for offset, timeout_s in ((0, None), (0, PATIENCE_S), (8, None))
    ]
    scene.kill()
    scene.lost(*calls)
    mine.free()


def waiting_in_asyncio(scene: Scene) -> None:
    peer = scene.connect()
    mine = scene.node.allocate(64)

    async def main() -> list[BaseException | None]:
        waits = [mine.word(offset).reached(1, PATIENCE_S, peer=peer) for offset in (0, 8)]
        killing = asyncio.to_thread(scene.kill)
        return (await asyncio.gather(*waits, killing, return_exceptions=True))[:2]

    for error in asyncio.run(main()):
        scene.check(error)
    assert scene.left_s() > 0
    mine.free()


def waiting_for_frozen(scene: Scene) -> None:
    """Everything that can be pending at a victim that does not answer any more."""
    remote = scene.remote(32 * MIB)
    peer, local = scene.peer, np.ones(32 * MIB, np.uint8)
    writing = peer.prepare_write([local[:100], local[200:300]], [remote[:100], remote[200:300]])
    scene.member.stop()
    moving = [
        remote.write(local),
        remote.read(local.copy()),
        peer.fetch_add(remote.word(0)),
        writing.start(),
        writing.start([1, 0]),
        remote.word(8).set(1),
    ]
    moving.append(remote.word(8).set(2, after=moving[:1]))
    asking = [
        background(peer.allocate, 4096, None, None),
        background(peer.region, "r", None),
        background(remote.free, None),
    ]
    calls = [background(transfer.wait) for transfer in moving]
    scene.kill()
    scene.lost(*asking)
    for call in calls:
        error = call.exception(scene.left_s())
        if scene.transport == "tcp" or error is not None:
            scene.check(error)


# ---- phases: bytes are moving


def during_large_write(scene: Scene) -> None:
    """The victim dies when it sees the first of many bytes."""
    remote = scene.remote(64 * MIB)
    scene.target.begin("die_when", "r", 0, 1)
    with contextlib.suppress(PeerLostError):
        remote.write(np.ones(64 * MIB, np.uint8)).wait(PATIENCE_S)
    scene.dies_by_itself()


def during_large_read(scene: Scene) -> None:
    remote = scene.remote(64 * MIB)
    local = np.empty(64 * MIB, np.uint8)
    scene.until_killed(lambda _: remote.read(local).wait(), rounds=2)


def during_async_copy(scene: Scene) -> None:
    """The same under an event loop, where the Node's thread copies, bit by bit."""
    remote = scene.remote(64 * MIB)
    scene.target.begin("die_when", "r", 0, 1)

    async def main() -> None:
        with contextlib.suppress(PeerLostError):
            await remote.write(np.ones(64 * MIB, np.uint8))

    asyncio.run(main())
    scene.dies_by_itself()


def during_small_writes(scene: Scene) -> None:
    remote = scene.remote(64)
    word = remote.word(0)
    scene.until_killed(lambda n: remote[8:].write(b"x", signal=(word, n)).wait())


def during_many_in_flight(scene: Scene) -> None:
    remote = scene.remote(MIB)
    local = np.ones(MIB, np.uint8)

    def step(n: int) -> None:
        transfers = [remote.write(local) for _ in range(20)]
        transfers.append(remote.word(0).set(n, after=transfers))
        for transfer in transfers:
            transfer.wait()

    scene.until_killed(step, rounds=3)


def during_prepared(scene: Scene) -> None:
    remote = scene.remote(MIB)
    local = np.ones(MIB, np.uint8)
    pieces = [slice(start, start + 1000) for start in range(64, MIB - 1000, 5000)]
    batch = scene.peer.prepare_write([local[p] for p in pieces], [remote[p] for p in pieces])
    scene.until_killed(lambda n: batch.start(signal=(remote.word(0), n)).wait())


def during_fetch_add(scene: Scene) -> None:
    word = scene.remote(64).word(0)
    scene.until_killed(lambda _: word.fetch_add())


def during_allocate(scene: Scene) -> None:
    peer = scene.connect()
    scene.until_killed(lambda _: peer.allocate(MIB, "named").free())


def during_lookup(scene: Scene) -> None:
    scene.remote(MIB)
    handle = scene.target.allocate("named", MIB, "rw", "named")
    scene.until_killed(lambda n: scene.peer.region(handle if n % 2 else "named"))


def during_its_write(scene: Scene) -> None:
    region = scene.node.allocate(8 * MIB, name="survivor's")
    peer = scene.accept()
    scene.target.find_remote("survivor's")
    scene.target.begin("write_for_ever", 8 * MIB - 64)
    region.word(0).wait_until(3, PATIENCE_S, peer=peer)
    call = background(region.word(0).wait_until, 1 << 60, peer=peer)
    scene.kill()
    scene.lost(call)
    region.free()


def during_its_read(scene: Scene) -> None:
    region = scene.node.allocate(8 * MIB, name="survivor's")
    peer = scene.accept()
    scene.target.find_remote("survivor's")
    scene.target.begin("read_for_ever", 8 * MIB - 64)
    region.word(0).wait_until(3, PATIENCE_S, peer=peer)
    call = background(region.word(0).wait_until, 1 << 60, peer=peer)
    scene.kill()
    scene.lost(call)
    region.free()


def holding_a_lease(scene: Scene) -> None:
    """Memory that it allocated here is given back; a process that looks at it keeps it."""
    scene.accept()
    scene.target.lease(MIB, "leased")
    leased = scene.node.region("leased")
    view = leased.array()
    scene.kill()
    eventually(lambda: leased.freed, "the end of the lease", scene.left_s())
    with pytest.raises(LookupError):
        scene.node.region("leased")
    view[:] = 1


PHASES = (
    idle,
    idle_accepted,
    not_yet_accepted,
    looked_up,
    two_connections,
    just_forked,
    waiting_for_words,
    waiting_in_asyncio,
    waiting_for_frozen,
    during_large_write,
    during_large_read,
    during_async_copy,
    during_small_writes,
    during_many_in_flight,
    during_prepared,
    during_fetch_add,
    during_allocate,
    during_lookup,
    during_its_write,
    during_its_read,
    holding_a_lease,
)


@pytest.mark.parametrize("phase", PHASES)
def test_killed(phase: Callable[[Scene], None], transport: str) -> None:
    with survivor(transport) as scene:
        phase(scene)


# ---- the handshake, stopped after each message


@pytest.mark.parametrize("passed", range(len(MESSAGES)))
def test_server_killed_in_the_handshake(passed: int, transport: str) -> None:
    """The client hears of it in time, however far it had come."""
    with survivor(transport) as scene, Relay(scene.address) as relay:
        connecting = background(scene.node.connect, relay.address)
        relay.join()
        relay.forward(min(passed, 3))
        if passed == 4:
            # The client is trusted and goes on: at once on tcp, on shm when it is answered.
            welcome = relay.receive("server", WELCOME)
            scene.member.stop()
            relay.send("client", welcome)
        if passed == 4 and transport == "tcp":
            peer = connecting.result(PATIENCE_S)
            assert peer.name == "victim"
            call = background(peer.region, "r", None)
            scene.kill()
            relay.hang_up()
            scene.lost(call)
        else:
            scene.kill()
            relay.hang_up()
            error = connecting.exception(scene.left_s())
            assert isinstance(error, PeerLostError), repr(error)
            assert relay.address in str(error)


@pytest.mark.parametrize("passed", range(len(MESSAGES)))
def test_client_killed_in_the_handshake(passed: int) -> None:
    """The server forgets the stranger: nothing of it is left, and `accept` returns no peer."""
    with survivor("tcp") as scene, Relay(scene.node.address) as relay:
        scene.target.begin("connect", relay.address)
        relay.join()
        relay.forward(passed)
        if passed == 4:
            relay.receive(*MESSAGES[4])  # the last message is lost with the client
        scene.kill()
        assert relay.ended("client")
        relay.hang_up()
        with pytest.raises(TimeoutError):
            scene.node.accept(0)


def test_client_killed_while_it_attaches() -> None:
    """On shm two sockets for descriptors have met by then, and no descriptor came."""
    with PeerGroup() as group:
        _, server = start_actor(group, "survivor", transports=["shm"])
        server.mark()
        victim, client = start_actor(group, "victim", transports=["shm"])
        with Relay(server.address()) as relay:
            client.begin("connect", relay.address)
            relay.join()
            relay.forward(5)
            relay.receive("server", MEETING)
            victim.kill()
        assert server.growth() == []
        assert server.peer_count() == 0


def test_connecting_to_the_dead(transport: str) -> None:
    with Node("survivor", transports=[transport]) as node:
        with PeerGroup() as group:
            member, target = start_actor(group, "victim", transports=[transport])
            address = target.address()
            node.connect(address).close()
            member.kill()
        with pytest.raises(PeerLostError, match=address):
            node.connect(address)
        assert all_complete(node)


def test_connecting_while_it_dies(transport: str) -> None:
    """Connections come and go when it dies; each ends well or with the loss."""
    with survivor(transport) as scene:
        rounds = [0]

        def come_and_go() -> None:
            for rounds[0] in count(1):
                peer = scene.node.connect(scene.address)
                peer.region("r").write(b"x").wait(PATIENCE_S)
                peer.close()

        scene.target.allocate("r", 8, "rw", "r")
        calls = [background(come_and_go) for _ in range(2)]
        eventually(lambda: rounds[0] > 10, "some connections")
        scene.kill()
        for call in calls:
            error = call.exception(scene.left_s())
            assert isinstance(error, PeerLostError), repr(error)
        # Their tracebacks hold the last peers.
        del calls, call, error


def test_the_checks_see_a_connection(transport: str) -> None:
    """Things that the checks above miss at the end are there as long as the peer lives."""
    with PeerGroup() as group, Node("survivor", transports=[transport]) as node:
        member, target = start_actor(group, "victim", transports=[transport])
        before = Footprint.now()
        remote = node.connect(target.address()).region(target.allocate("r", 12345))
        growth = "\n".join(growth_since(before, settle_s=0))
        assert "socket:" in growth
        assert ("/memfd:" in growth) == (transport == "shm")
        assert ("eventfd" in growth) == (transport == "shm")
        member.stop()
        transfer = remote.write(bytes(12345))
        if transport != "rdma":  # there a NIC completes it, sooner or later
            assert all_complete(node) == transfer.done() == (transport == "shm")
