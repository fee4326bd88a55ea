"""Limits of the system and of the Node: each is an error that says so, and everything goes on."""

import os
import re
import time
import types
from pathlib import Path

import pytest
from actor import GIB, MIB, PATIENCE_S, background, error_of, eventually, start_actor
from limited import poor_actor, poor_client, poor_node
from relay import MESSAGES, Relay

from tensorwire import BusyError, Node, TensorwireError, UnavailableError
from tensorwire.testing import PeerGroup, node_pair

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("nothing_left")]

PHYSICAL_BYTES = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


# ---- descriptors


def clear(error: str) -> bool:
    """Tells whether a reader of this knows what is missing: descriptors, not memory, no peer."""
    return "Too many open files" in error and error.startswith(("BusyError", "UnavailableError"))


def test_a_node_begins_without_descriptors(transport: str) -> None:
    with PeerGroup() as group:
        _, target = start_actor(group, "host", transports=[transport])
        target.allocate("r", 64, "rw", "r")
        member = group.start(poor_client, [transport], target.address())
        seen = member.result(50)
        assert seen[-1][1] == "", "it never worked"
        unclear = [(count, error) for count, error, _ in seen[:-1] if not clear(error)]
        assert unclear == []
        assert [(count, left) for count, _, left in seen if left] == []
        assert target.peer_count() == 0


def test_a_node_runs_out_of_descriptors(transport: str) -> None:
    with PeerGroup() as group:
        _, target = start_actor(group, "host", transports=[transport])
        target.allocate("r", 64, "rw", "r")
        seen = group.start(poor_node, [transport], target.address()).result(50)
        assert seen[-1][1] == "", "it never worked"
        assert [(count, error) for count, error in seen[:-1] if not clear(error)] == []


def test_a_host_runs_out_of_descriptors(transport: str) -> None:
    """Present peers are served on; strangers are turned away, and let in again later."""
    with PeerGroup() as group, Node("guest", transports=[transport]) as node:
        _, target = start_actor(group, "host", poor_actor, transports=[transport])
        handle = target.allocate("r", 64)
        first = node.connect(handle).region(handle)
        target.mark()
        for count in range(4):
            target.leave_descriptors(count)
            error = error_of(node.connect, handle, timeout_s=0.3)
            assert error is None or isinstance(error, TensorwireError), repr(error)
            first.write(b"x").wait(PATIENCE_S)
            cpu_s, seconds = target.lift()
            assert cpu_s < 0.05 + 0.3 * seconds, "it turns round and round"
            again = node.connect(handle)
            again.region(handle).write(b"y").wait(PATIENCE_S)
            for peer in node.peers:
                if peer != first.peer:
                    peer.close()
            eventually(lambda: target.peer_count() == 1, "the host forgets")
        assert target.growth() == []


def test_out_of_descriptors_is_no_wrong_secret() -> None:
    """A peer that chooses shared memory where no descriptor is left for it is told so."""
    secret = b"sixteen bytes or more"
    with PeerGroup() as group, Node("guest", secret=secret, transports=["shm"]) as node:
        _, target = start_actor(group, "host", poor_actor, secret=secret)
        told = []
        for count in range(8):
            target.leave_descriptors(count)
            try:
                error = error_of(node.connect, target.address(), timeout_s=0.5)
            finally:
                target.lift()
            if error is None:
                break
            assert not isinstance(error, PermissionError), repr(error)
            told.append("ulimit" in str(error))
        assert error is None
        assert any(told)


# ---- memory


def test_more_than_the_host_has() -> None:
    for transports in (["shm"], ["tcp"]):
        with Node(transports=transports) as node:
            for size in (2 * PHYSICAL_BYTES, 1 << 62, (1 << 63) - 1):
                with pytest.raises(MemoryError, match="memory"):
                    node.allocate(size)
            node.allocate(64).array()[:] = 1


def test_more_than_the_peer_has(transport: str) -> None:
    with node_pair([transport], quota_bytes=1 << 62) as pair:
        for size in (2 * PHYSICAL_BYTES, 1 << 62):
            with pytest.raises(MemoryError, match="memory"):
                pair.to_far.allocate(size)
        pair.to_far.allocate(64).write(b"x").wait(PATIENCE_S)


def test_no_address_space(transport: str) -> None:
    """Address space is missing at the owner, or (on shm) at the user of a region, which maps it."""
    with PeerGroup() as group:
        _, owner = start_actor(group, "owner", transports=[transport], quota_bytes=GIB)
        _, poor = start_actor(group, "poor", poor_actor, transports=[transport])
        owner.allocate("large", 512 * MIB, "rw", "large")
        owner.allocate("small", 64, "rw", "small")
        poor.connect(owner.address())
        poor.leave_memory(64 * MIB)
        assert poor.try_allocate(512 * MIB).startswith("MemoryError")
        assert poor.try_allocate(MIB) == ""
        if transport == "shm":
            assert poor.try_region("large").startswith("MemoryError")
            assert poor.is_connected()
            # What it could not map it does not keep: the whole quota is still there.
            assert poor.try_lease(GIB).startswith("MemoryError")
            assert poor.is_connected()
            with Node("rich", transports=[transport]) as node:
                node.connect(owner.address()).allocate(GIB)
        # And from the other side: the poor one is asked to allocate.
        with Node("asking", transports=[transport]) as node:
            peer = node.connect(poor.address())
            with pytest.raises(MemoryError, match="poor"):
                peer.allocate(512 * MIB)
            peer.allocate(4096).write(b"x").wait(PATIENCE_S)


# ---- limits of the Node


def test_quota(transport: str) -> None:
    with node_pair([transport], quota_bytes=MIB) as pair:
        peer = pair.to_far
        first = peer.allocate(MIB - 100)
        for size in (101, MIB + 1, 1 << 62):
            with pytest.raises(BusyError, match="quota") as caught:
                peer.allocate(size)
            assert "far" in str(caught.value)
        peer.allocate(100)
        pair.far.allocate(4 * MIB)  # its own memory does not count
        first.free()
        peer.allocate(MIB - 100)


def test_leased_regions(transport: str) -> None:
    """The number of regions that peers allocate is bounded too."""
    with node_pair([transport]) as pair:
        leased = [pair.to_far.allocate(1) for _ in range(1024)]
        with pytest.raises(BusyError, match="1024"):
            pair.to_far.allocate(1)
        leased.pop().free()
        pair.to_far.allocate(1)


def test_max_peers(transport: str) -> None:
    options = {"transports": [transport]}
    with (
        Node("full", max_peers=2, **options) as full,
        Node("a", **options) as a,
        Node("b", **options) as b,
        Node("c", **options) as c,
    ):
        first, _ = a.connect(full.address), b.connect(full.address)
        eventually(lambda: len(full.peers) == 2, "both are in")
        with pytest.raises(BusyError, match="max_peers"):
            c.connect(full.address)
        with pytest.raises(BusyError, match="max_peers"):
            full.connect(c.address)
        first.close()
        eventually(lambda: len(full.peers) == 1, "one has left")
        c.connect(full.address)


def test_max_peers_counts_who_is_in_the_handshake() -> None:
    """The last place is not given to two that come at the same moment."""
    with (
        Node("full", max_peers=1, transports=["tcp"]) as full,
        Node("slow", transports=["tcp"]) as slow,
        Node("fast", transports=["tcp"]) as fast,
        Relay(full.address) as relay,
    ):
        connecting = background(slow.connect, relay.address)
        relay.join()
        relay.forward(4)  # it is promised the place; its last message is on the way
        with pytest.raises(BusyError, match="max_peers"):
            fast.connect(full.address)
        relay.send("server", relay.receive(*MESSAGES[4]))
        assert connecting.result(PATIENCE_S).name == "full"
        assert full.accept(PATIENCE_S).name == "slow"
        # A promise that is not taken up is void.
        with Relay(full.address) as other:
            full.peers[0].close()
            connecting = background(slow.connect, other.address)
            other.join()
            other.forward(4)
            other.hang_up()
            connecting.exception(PATIENCE_S)
        eventually(lambda: error_of(fast.connect, full.address) is None, "the place is free")


def test_max_regions() -> None:
    with Node(transports=["tcp"]) as node:
        regions = [node.allocate(1, name=str(number)) for number in range(16384)]
        with pytest.raises(BusyError, match="16384"):
            node.allocate(1)
        regions[77].free()
        again = node.allocate(1, name="77")
        assert node.region("77").handle() == again.handle() != regions[77].handle()
        with pytest.raises(BusyError, match="16384"):
            node.allocate(1)


def test_names_of_regions(transport: str) -> None:
    with pytest.raises(ValueError, match="name"):
        Node("n" * 1000)
    with node_pair([transport]) as pair:
        longest = "r" * 255
        pair.far.allocate(64, name=longest)
        assert pair.to_far.region(longest).name == longest
        assert pair.to_far.allocate(64, "ä" * 127).name == "ä" * 127
        for too_long in ("r" * 256, "ä" * 128, "x" * 100_000):
            for call in (
                lambda name=too_long: pair.far.allocate(64, name=name),
                lambda name=too_long: pair.to_far.allocate(64, name),
                lambda name=too_long: pair.to_far.region(name),
            ):
                with pytest.raises(ValueError, match="255"):
                    call()
        for call in (
            lambda: pair.far.allocate(64, name="\udc80"),
            lambda: pair.far.region("\udc80"),
            lambda: pair.to_far.allocate(64, "\udc80"),
            lambda: pair.to_far.region("\udc80"),
        ):
            with pytest.raises(ValueError, match="Unicode"):
                call()
        for hidden in ("a\n0", "a\0", "\x7f", "a\x85b"):  # control characters, also those of C1
            for call in (
                lambda name=hidden: pair.far.allocate(64, name=name),
                lambda name=hidden: pair.to_far.allocate(64, name),
                lambda name=hidden: pair.to_far.region(name),
            ):
                with pytest.raises(ValueError, match="control characters"):
                    call()
        with pytest.raises(LookupError):
            pair.far.region("r" * 256)
        with pytest.raises((ValueError, LookupError)):
            pair.to_far.region("")
        assert not pair.to_far.lost


@pytest.mark.parametrize("name", ["n" * 63, "ä" * 31, "a b", "ü/ß 東京"])
def test_names_of_nodes(name: str) -> None:
    with Node(name) as node, Node() as other:
        assert other.connect(node.address).name == name


def test_the_default_name_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names of hosts may be longer than those of Nodes."""
    long = types.SimpleNamespace(nodename="host-" + "x" * 59)
    monkeypatch.setattr(os, "uname", lambda: long)
    with Node() as node:
        assert node.name.startswith("host-")
        assert node.name.endswith(f"-{os.getpid()}")


@pytest.mark.parametrize("name", ["a\nb", "a\x00b", "\x7f", "a\x85b", "\udc80", "n" * 64, "ä" * 32])
def test_names_that_no_node_can_have(name: str) -> None:
    """The name is refused at once, not by every process that is asked to connect later."""
    with pytest.raises(ValueError, match="name"):
        Node(name).close()


# ---- addresses


def test_address_in_use() -> None:
    with Node() as node:
        with pytest.raises((BusyError, UnavailableError), match=re.escape(node.address)):
            Node(listen=node.address)
        with Node() as other:
            other.connect(node.address)


@pytest.mark.parametrize("listen", ["192.0.2.1:0", "[2001:db8::1]:0"])
def test_address_of_another_host(listen: str) -> None:
    """The addresses are from the ranges for documentation, which no host has."""
    with pytest.raises(UnavailableError, match="cannot listen"):
        Node(listen=listen, secret=b"s" * 16)


@pytest.mark.parametrize("listen", ["nowhere.invalid:0", "127.0.0.1", "127.0.0.1:x", ":1", ""])
def test_address_that_is_none(listen: str) -> None:
    with pytest.raises(ValueError, match=r"address|listen"):
        Node(listen=listen)


def test_nobody_there() -> None:
    with Node() as node, Node() as other:
        address = other.address
        other.close()
        start = time.monotonic()
        with pytest.raises(ConnectionError, match=re.escape(address)):
            node.connect(address)
        assert time.monotonic() - start < 5
        with pytest.raises((ConnectionError, ValueError)):
            node.connect("nowhere.invalid:7000")


# ---- secret files


def test_secret_file_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "secret"
    monkeypatch.setenv("TENSORWIRE_SECRET_FILE", str(path))
    with pytest.raises(ValueError, match=re.escape(str(path))):
        Node()
    path.mkdir()
    with pytest.raises(ValueError, match=re.escape(str(path))):
        Node()


@pytest.mark.parametrize("content", [b"", b"\n", b"s3cr3t", b" " * 100, b"fifteen.bytes.1\n"])
def test_secret_file_too_short(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, content: bytes
) -> None:
    path = tmp_path / "secret"
    path.write_bytes(content)
    monkeypatch.setenv("TENSORWIRE_SECRET_FILE", str(path))
    with pytest.raises(ValueError, match="at least 16") as caught:
        Node()
    assert str(path) in str(caught.value)
    if text := content.decode().strip():
        assert text not in str(caught.value), "a secret is told to nobody"
