"""Strangers: hostile bytes before and in the handshake, and too many of them at once.

A victim in another process is attacked while honest peers write, read and compare all the time;
`Victim.unharmed` says what must hold after every test.
"""

import itertools
import random
import resource
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import wire
from actor import serve_actor, start_actor
from hostile import (
    HANDSHAKE_S,
    OPEN_BYTES,
    SECRET,
    Victim,
)
from wire import HungUp, Wire, Wires

from tensorwire import Node
from tensorwire.testing import PeerGroup

pytestmark = pytest.mark.timeout(60)


def random_bytes() -> list[bytes]:
    source = random.Random(1)
    return [source.randbytes(size) for size in (1, 7, 8, 159, 160, 161, 200, 1000, 100_000)]


OPENINGS = {
    "http": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" + bytes(160),
    "tls": bytes.fromhex("16030102000100") + bytes(200),
    "zeros": bytes(400),
    "other version": wire.hello(SECRET, version=1),
    "no incarnation": wire.hello(SECRET, incarnation=0),
    "wrong magic": wire.hello(SECRET, magic=b"TWIREv00"),
    "unknown kind": wire.hello(SECRET, kind=4),
    "kind of a server": wire.hello(SECRET, kind=wire.CHALLENGE),
    "kind of a busy server": wire.hello(SECRET, kind=wire.BUSY_KIND),
    "name too long": wire.hello(SECRET, name_bytes=64),
    "line break in the name": wire.hello(SECRET, b"a\nb"),
    "bytes behind the name": wire.hello(SECRET, b"abc", name_bytes=2),
    "reserved bytes": wire.hello(SECRET, reserved=1),
    "reserved byte": wire.hello(SECRET, reserved2=1),
    "secret of two kinds": wire.hello(SECRET, has_secret=2),
    **{f"{len(data)} random bytes": data for data in random_bytes() if len(data) >= 160},
}


@pytest.mark.parametrize("opening", OPENINGS.values(), ids=OPENINGS.keys())
def test_what_is_no_hello_is_not_answered(victim: Victim, opening: bytes) -> None:
    with victim.dial() as stream:
        try:
            stream.send(opening)
            answer = stream.stream.recv(4096)
        except (HungUp, ConnectionResetError):
            answer = b""
        assert answer == b""


def test_few_random_bytes_and_then_nothing(victim: Victim) -> None:
    for data in random_bytes()[:4]:
        with victim.dial() as stream:
            stream.send(data)
            stream.stream.shutdown(socket.SHUT_WR)
            assert stream.hung_up()


def truncated(stream: Wire, key: bytes, hello: bytes, rest: bytes, size: int) -> None:
    """Goes through the handshake and stops after `size` bytes."""
    stream.send(hello[:size])
    if size >= len(hello):
        theirs = stream.receive(160)
        proof = wire.encode("Proof", proof=wire.Keys.derive(key, hello, theirs).client)
        stream.send((proof + rest)[: size - len(hello)])


def test_cut_off_at_every_byte_of_the_handshake(victim: Victim) -> None:
    choice = wire.encode("Choice")
    for size in range(160 + 40 + 16):
        with victim.dial() as stream:
            truncated(stream, SECRET, wire.hello(SECRET), choice, size)
            stream.stream.shutdown(socket.SHUT_WR)
            assert stream.hung_up(), f"after {size} bytes"
    assert victim.target.peer_count() == len(victim.honest)


def refused(stream: Wire, proof: bytes) -> bool:
    """Tells whether a proof is answered with a refusal that tells nothing, and the end."""
    welcome = stream.prove(proof)
    assert welcome["proof"] == bytes(32)
    return welcome["status"] == wire.PERMISSION and stream.hung_up()


def test_a_recorded_handshake_does_not_open_twice(victim: Victim) -> None:
    hello = wire.hello(SECRET)
    with victim.dial() as stream:
        proof = wire.Keys.derive(SECRET, hello, stream.greet(hello)).client
        assert stream.prove(proof)["status"] == wire.OK
    with victim.dial() as stream:
        assert stream.greet(hello)
        assert refused(stream, proof)
    with victim.dial() as stream:  # all of it at once, as a recording would be sent
        stream.send(hello + wire.encode("Proof", proof=proof) + wire.encode("Choice"))
        stream.receive(160)
        assert wire.decode("Welcome", stream.receive(160))["status"] == wire.PERMISSION
        assert stream.hung_up()


def test_no_proof_but_the_right_one(victim: Victim) -> None:
    hello = wire.hello(SECRET)

    def proofs(theirs: bytes) -> Iterator[bytes]:
        right = wire.Keys.derive(SECRET, hello, theirs)
        yield bytes(32)
        yield b"\xff" * 32
        yield right.server  # reflected
        yield right.client[:31] + bytes([right.client[31] ^ 1])
        yield wire.Keys.derive(SECRET, theirs, hello).client
        yield wire.Keys.derive(SECRET + b"x", hello, theirs).client
        yield wire.Keys.derive(b"", hello, theirs).client

    for number in range(7):
        with victim.dial() as stream:
            theirs = stream.greet(hello)
            assert refused(stream, next(itertools.islice(proofs(theirs), number, None)))


def test_a_challenge_is_no_hello(victim: Victim) -> None:
    """A server's own words, sent back to it, and relayed between two connections."""
    with victim.dial() as first, victim.dial() as second:
        theirs = first.greet(wire.hello(SECRET))
        second.send(theirs)
        assert second.hung_up()


def test_without_the_secret(victim: Victim) -> None:
    hello = wire.hello(b"")
    with victim.dial() as stream:
        proof = wire.Keys.derive(b"", hello, stream.greet(hello)).client
        assert refused(stream, proof)


@pytest.mark.parametrize("choice", [0, 1, 3, 4, 8, 1 << 31])
def test_a_choice_that_was_not_offered(victim: Victim, choice: int) -> None:
    with victim.dial() as stream:
        stream.handshake(SECRET, wire.hello(SECRET))
        stream.send(wire.encode("Choice", transport=choice))
        assert stream.hung_up()


def test_shm_is_tried_once_and_then_another_choice_follows(victim: Victim) -> None:
    """A socket that is not there cannot be met; the stream goes on with TCP, or ends."""
    nowhere = wire.encode("Choice", transport=wire.SHM_BIT, socket=0x7177)
    for then, goes_on in ((wire.encode("Choice"), True), (nowhere, False)):
        with victim.dial() as stream:
            stream.handshake(SECRET, wire.hello(SECRET))
            stream.send(nowhere)
            meeting = wire.decode("Meeting", stream.receive(16))
            assert (meeting["status"], meeting["socket"]) == (wire.UNAVAILABLE, 0)
            stream.send(then)
            assert is_over(stream) != goes_on


def names_in_use() -> list[str]:
    lines = Path("/proc/net/unix").read_text().splitlines()
    return [word for line in lines for word in line.split() if word.startswith("@tensorwire-")]


def test_nobody_else_reaches_the_sockets_for_descriptors(victim: Victim) -> None:
    """Their names can be read by everybody; the kernel takes messages of the partner alone."""
    before = set(names_in_use())
    with victim.connect("shm") as stream:
        assert stream.next_frame().type == wire.ATTACH
        mine = stream.beside.getsockname()
        theirs = set(names_in_use()) - before - {mine.decode().replace("\0", "@")}
        (name,) = (each.replace("@", "\0") for each in theirs)
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stranger:
            with pytest.raises(PermissionError):
                stranger.connect(name)
            with pytest.raises(PermissionError):
                stranger.sendto(b"x", name)
        with socket.socket(socket.AF_UNIX) as stranger, pytest.raises(ConnectionError):
            stranger.connect(name)


def is_over(stream: Wire) -> bool:
    """Tells whether a stream ends without an answer; makes it a peer if it can be one."""
    try:
        return stream.ask(wire.LOOKUP, b"open").status != wire.OK
    except HungUp:
        return True


def test_max_peers_is_a_limit_also_for_many_at_once() -> None:
    limit = 3
    with PeerGroup() as group, Wires() as streams:
        _, target = start_actor(group, "small", serve_actor, secret=SECRET, max_peers=limit)
        target.allocate("open", 64, "rw", "open")
        address = target.address()
        for _ in range(4 * limit):
            stream = wire.dial(address)
            streams.append(stream)
            hello = wire.hello(SECRET)
            proof = wire.Keys.derive(SECRET, hello, stream.greet(hello)).client
            stream.send(wire.encode("Proof", proof=proof))
        welcomes = [wire.decode("Welcome", stream.receive(160)) for stream in streams]
        assert {welcome["status"] for welcome in welcomes} <= {wire.OK, wire.BUSY}
        for stream, welcome in zip(streams, welcomes, strict=True):
            if welcome["status"] == wire.OK:
                stream.send(wire.encode("Choice"))
        served = [stream for stream in streams if not is_over(stream)]
        assert len(served) == limit
        assert target.peer_count() == limit


def test_slow_handshakes_end(victim: Victim) -> None:
    """One byte per 50 ms: never more than the time that a stranger has."""
    hello = wire.hello(SECRET)
    start = time.monotonic()
    with victim.dial() as stream:
        sent = 0
        while not stream.hung_up(within_s=0.05):
            stream.send(hello[sent : sent + 1])
            sent += 1
            assert sent < 160, "the time for a handshake is not limited"
    assert HANDSHAKE_S / 2 < time.monotonic() - start < HANDSHAKE_S + 5


@pytest.fixture
def many_descriptors() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(max(soft, 2000), hard), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("many_descriptors")
def test_a_thousand_idle_connections(victim: Victim) -> None:
    """Others get in at once all the same, and every idle one ends in time."""
    with Wires() as streams:
        for number in range(1000):
            streams.append(victim.dial())
            if number % 3 == 0:
                streams[-1].send(wire.hello(SECRET)[: number % 161])
        for transport in ("shm", "tcp"):
            with Node("late", secret=SECRET, transports=[transport]) as node:
                assert node.connect(victim.address).region("open").size_bytes == OPEN_BYTES
        victim.honest[0].goes_on()
        assert all(stream.hung_up() for stream in streams)


def test_a_flood_of_connections(victim: Victim) -> None:
    for number in range(1500):
        with victim.dial() as stream:
            if number % 2:
                stream.send(wire.hello(SECRET))
        if number % 100 == 0:
            victim.honest[1].goes_on()
