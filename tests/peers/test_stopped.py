"""The target is frozen (SIGSTOP): what is one-sided goes on, what is not waits and then goes on."""

import contextlib
from collections.abc import Iterator

import numpy as np
import pytest
from actor import MIB, PATIENCE_S, Actor, all_complete, eventually, is_asleep, start_actor

from tensorwire import Node, Peer, TimeoutError, wait_all
from tensorwire.testing import Member, PeerGroup

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("nothing_left")]

PENDING_S = 0.05  # a wait that must end without a result


@contextlib.contextmanager
def frozen(transport: str) -> Iterator[tuple[Node, Peer, Member, Actor]]:
    """A Node, and a target that a test may freeze."""
    with PeerGroup() as group, Node("awake", transports=[transport]) as node:
        member, target = start_actor(group, "frozen", transports=[transport], quota_bytes=MIB)
        yield node, node.connect(target.address()), member, target
        assert all_complete(node)


def test_shm_needs_no_target() -> None:
    with frozen("shm") as (_, peer, member, target):
        remote = peer.region(target.allocate("r", 8 * MIB))
        data = np.random.default_rng(1).integers(0, 256, 8 * MIB - 64, np.uint8)
        back = np.empty_like(data)
        batch = peer.prepare_write([data[:100], data[500:900]], [remote[64:164], remote[564:964]])
        member.stop()
        for _ in range(3):
            remote[64:].write(data).wait(0)
            remote[64:].read(back).wait(0)
            assert (back == data).all()
        batch.start().wait(0)
        assert [remote.word(8).fetch_add(5) for _ in range(3)] == [0, 5, 10]
        # The word is in its memory; nobody there has to look at it.
        remote[64:].write(data, signal=(remote.word(0), 3)).wait(0)
        remote.word(16).set(4).wait(0)
        words = np.empty(3, np.uint64)
        remote.read(words).wait(0)
        assert words.tolist() == [3, 15, 4]
        assert is_asleep(member.pid)
        member.cont()
        assert target.contents("r", 64) == data.tobytes()
        assert [target.value("r", offset) for offset in (0, 8, 16)] == [3, 15, 4]


def test_the_doorbell_waits(transport: str) -> None:
    """A process that waits there for a word wakes up when it is thawed."""
    with frozen(transport) as (_, peer, member, target):
        remote = peer.region(target.allocate("r", 64))
        finish = target.begin("wait_until", "r", 0, 3, PATIENCE_S)
        eventually(lambda: is_asleep(member.pid), "the target waits")
        member.stop()
        transfer = remote[8:].write(b"x", signal=(remote.word(0), 3))
        if transport == "shm":
            transfer.wait(0)
        assert is_asleep(member.pid)
        member.cont()
        finish()
        transfer.wait(PATIENCE_S)
        assert target.value("r", 0) == 3


def test_tcp_waits_for_the_target() -> None:
    with frozen("tcp") as (_, peer, member, target):
        size = 32 * MIB
        remote = peer.region(target.allocate("r", size))
        data, back = np.full(size, 7, np.uint8), np.zeros(64, np.uint8)
        batch = peer.prepare_write([b"prepared"], [remote[size - 8 :]])
        member.stop()
        writing = remote[64 : size - 8].write(data[64 : size - 8])
        pending = [
            writing,
            remote[:64].read(back),
            peer.fetch_add(remote.word(8), 5),
            remote.word(0).set(9, after=[writing]),
            batch.start(),
        ]
        for transfer in pending:
            with pytest.raises(TimeoutError):
                transfer.wait(PENDING_S)
            assert not transfer.done()
        with pytest.raises(TimeoutError):
            wait_all(pending, PENDING_S)
        with pytest.raises(TimeoutError):
            remote.word(16).fetch_add(1, PENDING_S)
        assert not peer.lost
        member.cont()
        wait_all(pending, PATIENCE_S)
        assert pending[2].value == 0
        assert target.is_filled("r", 64, size - 8, 7)
        assert target.contents("r", size - 8) == b"prepared"
        assert target.value("r", 0) == 9
        assert target.value("r", 8) == 5
        eventually(lambda: target.value("r", 16) == 1, "the addition nobody waits for")


def test_questions_wait(transport: str) -> None:
    """An asker that gives up waiting for an allocation does not leave it there."""
    with frozen(transport) as (node, peer, member, target):
        target.allocate("r", 64, "rw", "named")
        member.stop()
        with pytest.raises(TimeoutError, match="frozen"):
            peer.allocate(MIB, timeout_s=PENDING_S)  # as much as the quota allows
        with pytest.raises(TimeoutError, match="frozen"):
            peer.region("named", timeout_s=PENDING_S)
        with pytest.raises(TimeoutError):
            node.connect(peer.address, timeout_s=PENDING_S)
        assert not peer.lost
        member.cont()
        peer.region("named").write(b"fine").wait(PATIENCE_S)
        peer.allocate(MIB).free()


def test_giving_up_a_look_up_frees_nothing(transport: str) -> None:
    """Only an allocation that is not waited for any more is given back."""
    with frozen(transport) as (_, peer, member, target):
        leased = peer.allocate(4096, "leased")
        target.allocate("r", 64, "rw", "named")
        member.stop()
        for name in ("leased", leased.handle(), "named"):
            with pytest.raises(TimeoutError):
                peer.region(name, timeout_s=PENDING_S)
        member.cont()
        peer.region("named").write(b"fine").wait(PATIENCE_S)
        peer.region("leased").write(b"fine").wait(PATIENCE_S)
        leased.write(b"fine").wait(PATIENCE_S)
        leased.free()


@pytest.mark.slow
def test_frozen_for_long() -> None:
    """A process that only sleeps is not silent: its kernel still answers. Nothing is lost."""
    with PeerGroup() as group, Node("awake", transports=["tcp"], peer_timeout_s=3) as node:
        options = {"transports": ["tcp"], "peer_timeout_s": 3}
        member, target = start_actor(group, "frozen", **options)
        peer = node.connect(target.address())
        idle = node.connect(target.address())
        remote = peer.region(target.allocate("r", 32 * MIB))
        member.stop()
        transfer = remote.write(np.ones(32 * MIB, np.uint8))
        with pytest.raises(TimeoutError):
            transfer.wait(5)
        assert not idle.lost
        member.cont()
        transfer.wait(PATIENCE_S)
        assert target.is_filled("r", 0, 32 * MIB, 1)
