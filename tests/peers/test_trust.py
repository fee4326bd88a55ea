"""The rules for joining: secrets from each source, loopback without one, and other users."""

import hashlib
import os
from pathlib import Path

import pytest
import wire
from actor import PATIENCE_S, eventually, start_actor
from trusted import attach_as_nobody, nobody, read_secret

from tensorwire import Node, PathWarning, PeerLostError, UnavailableError
from tensorwire.testing import PeerGroup

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("nothing_left")]

SECRET = b"a secret of this job"
OTHER = b"a secret of that job"
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


def moves_bytes(node: Node, address: str, name: str = "r") -> str:
    """Connects and writes; gives the transport."""
    peer = node.connect(address)
    peer.region(name).write(b"hello").wait(PATIENCE_S)
    return peer.path.transport


# ---- where the secret comes from


def test_all_sources_are_the_same_secret(
    transport: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "secret"
    path.write_bytes(b"\n" + SECRET + b" \n")
    with Node(secret=SECRET, transports=[transport]) as host:
        host.allocate(64, name="r")
        monkeypatch.setenv("TENSORWIRE_SECRET", SECRET.decode())
        with Node() as by_variable:
            assert moves_bytes(by_variable, host.address) == transport
        # The file counts more than the variable.
        monkeypatch.setenv("TENSORWIRE_SECRET", OTHER.decode())
        monkeypatch.setenv("TENSORWIRE_SECRET_FILE", str(path))
        with Node() as by_file:
            assert moves_bytes(by_file, host.address) == transport
        # The argument counts more than both.
        with Node(secret=OTHER) as by_argument, pytest.raises(PermissionError):
            by_argument.connect(host.address)


def test_secret_in_another_process(transport: str) -> None:
    """The launcher's way: a variable in the environment of all."""
    environment = {"TENSORWIRE_SECRET": SECRET.decode()}
    with PeerGroup(environment=environment) as group:
        _, target = start_actor(group, "host", transports=[transport])
        target.allocate("r", 64, "rw", "r")
        with Node(secret=SECRET) as node:
            assert moves_bytes(node, target.address()) == transport


@pytest.mark.parametrize("secret", [b"fifteen bytes..", b"", bytes(3)])
def test_short_secrets(secret: bytes) -> None:
    with pytest.raises(ValueError, match="at least 16"):
        Node(secret=secret)


def test_secrets_of_the_wrong_type() -> None:
    with pytest.raises(TypeError, match="bytes"):
        Node(secret="a text of more than 16 characters")  # type: ignore[arg-type]


def test_secrets_may_be_any_bytes(transport: str) -> None:
    secret = bytes(range(256)) * 100
    with Node(secret=secret) as host, Node(secret=secret, transports=[transport]) as node:
        host.allocate(64, name="r")
        assert moves_bytes(node, host.address) == transport
        with Node(secret=secret[:-1]) as almost, pytest.raises(PermissionError):
            almost.connect(host.address)


LONG = b"x" * 65  # longer than a block of HMAC, which takes its hash instead


@pytest.mark.parametrize("secret", [SECRET + b"\0", LONG])
def test_a_second_implementation_knows_every_secret(secret: bytes) -> None:
    with Node(secret=secret) as node, wire.connect("tcp", node.address, secret) as stream:
        assert stream.ask(wire.LOOKUP, b"none").status == wire.NOT_FOUND
    with Node(secret=secret) as node, Node(secret=secret) as other:
        assert other.connect(node.address).name == node.name


# ---- who is refused


@pytest.mark.parametrize(
    ("theirs", "mine"),
    [
        (SECRET, SECRET + b"\0"),
        (SECRET + b"\0", SECRET + b"\0\0"),
        (LONG, hashlib.sha256(LONG).digest()),
    ],
)
def test_secrets_that_hmac_takes_for_one(theirs: bytes, mine: bytes) -> None:
    with Node(secret=theirs) as node, Node(secret=mine) as other:
        for one, two in ((node, other), (other, node)):
            with pytest.raises(PermissionError, match="wrong secret"):
                one.connect(two.address)


@pytest.mark.parametrize(
    ("theirs", "mine", "reason"),
    [
        (SECRET, OTHER, "wrong secret"),
        (SECRET, None, "has a secret and the caller has none"),
        (None, SECRET, "has no secret and the caller has one"),
    ],
)
def test_secrets_differ(
    theirs: bytes | None, mine: bytes | None, reason: str, transport: str
) -> None:
    """Neither side gets a peer, the message tells what to do, and honest ones go on."""
    with (
        Node("host", secret=theirs, transports=[transport]) as host,
        Node("stranger", secret=mine) as stranger,
        Node("friend", secret=theirs) as friend,
    ):
        host.allocate(64, name="r")
        for _ in range(3):
            with pytest.raises(PermissionError, match=reason) as caught:
                stranger.connect(host.address)
            assert "TENSORWIRE_SECRET" in str(caught.value)
            for secret in (SECRET, OTHER):
                assert secret.decode() not in str(caught.value)
        assert host.peers == []
        assert stranger.peers == []
        assert moves_bytes(friend, host.address) == transport
        assert host.accept(PATIENCE_S).name == "friend"


def test_only_loopback_without_a_secret() -> None:
    for listen in ("0.0.0.0:0", "[::]:0", "192.0.2.1:0"):
        with pytest.raises(ValueError, match="TENSORWIRE_SECRET_FILE"):
            Node(listen=listen)
    for listen in ("127.0.0.1:0", "127.0.0.2:0", "localhost:0"):
        with Node(listen=listen) as host, Node() as node:
            host.allocate(64, name="r")
            assert moves_bytes(node, host.address) == "shm"


def test_all_interfaces_with_a_secret(transport: str) -> None:
    options = {"secret": SECRET, "transports": [transport]}
    with Node(listen="0.0.0.0:0", **options) as host, Node(**options) as node:
        host.allocate(64, name="r")
        port = host.address.rpartition(":")[2]
        assert moves_bytes(node, f"127.0.0.1:{port}") == transport


def test_ipv6_loopback(transport: str) -> None:
    if not Path("/proc/net/if_inet6").exists() or not Path("/proc/net/if_inet6").read_text():
        pytest.skip("this host has no IPv6")
    with (
        Node("host", listen="[::1]:0", transports=[transport]) as host,
        Node("guest", listen="[::1]:0", transports=[transport]) as guest,
    ):
        assert host.address.startswith("[::1]:")
        handle = host.allocate(64, name="r").handle()
        peer = guest.connect(handle)
        assert peer.address == host.address
        peer.region(handle).write(b"six").wait(PATIENCE_S)
        back = host.accept(PATIENCE_S)
        assert back.address == guest.address
        guest.allocate(64, name="back")
        assert moves_bytes(host, back.address, "back") == transport


# ---- other users of this host


@as_root
def test_another_user_gets_no_shared_memory() -> None:
    """The other user falls back to tcp, and says why; each side is asked in turn."""
    with PeerGroup() as group, Node("root") as node:
        node.allocate(64, name="r")
        _, other = start_actor(group, "nobody", nobody)
        other.allocate("r", 64, "rw", "r")
        with pytest.warns(PathWarning, match="another user"):
            peer = node.connect(other.address())
        assert peer.path.transport == "tcp"
        assert "user" in peer.path.reason
        peer.region("r").write(b"hello").wait(PATIENCE_S)
        assert other.contents("r", 0, 5) == b"hello"
        with pytest.raises(UnavailableError, match="user"):
            node.connect(other.address(), require="shm")
        # The other way round.
        assert other.connect(node.address) == "tcp"
        other.find_remote("r")
        # Two processes of that other user do share memory.
        _, another = start_actor(group, "nobody too", nobody)
        assert another.connect(other.address()) == "shm"


@as_root
def test_another_user_without_tcp() -> None:
    with PeerGroup() as group, Node("root", transports=["shm"]) as node:
        _, other = start_actor(group, "nobody", nobody, transports=["shm"])
        with pytest.raises(UnavailableError, match="user"):
            node.connect(other.address())
        assert node.peers == []


@as_root
def test_memory_of_another_user_is_not_taken() -> None:
    """The kernel tells whose it is; it does not rely on the visitor's manners."""
    with PeerGroup() as group, Node("root") as node:
        node.allocate(64, name="open")
        status, text, over = group.start(attach_as_nobody, node.address).result()
        assert (status, text, over) == (wire.UNAVAILABLE, b"it runs as another user", True)
        assert node.peers == []


@as_root
def test_a_secret_that_may_not_be_read(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_bytes(SECRET)
    path.chmod(0o600)
    with PeerGroup() as group:
        message = group.start(read_secret, str(path)).result()
        assert str(path) in message
        assert "denied" in message


def test_a_lost_stranger_is_no_peer(transport: str) -> None:
    """A process that hangs up in the middle is not reported."""
    with Node("host", secret=SECRET, transports=[transport]) as host:
        with Node("stranger", secret=OTHER) as stranger:
            for _ in range(20):
                with pytest.raises((PermissionError, PeerLostError)):
                    stranger.connect(host.address)
        eventually(lambda: not host.peers, "nobody is in")
