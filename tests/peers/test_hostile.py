"""Hostile bytes, and peers that know the secret and lie: nothing outside a grant is touched.

A victim in another process is attacked over both streams, while honest peers write, read and
compare all the time. After every test: nothing that was not granted has changed, the victim is
alive, holds no more descriptors and little more memory than before, and honest traffic goes on.
"""

import fcntl
import itertools
import mmap
import os
import random
import resource
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import wire
from actor import MIB, PATIENCE_S, eventually, serve_actor, start_actor
from hostile import HonestPeer, serve_asker
from wire import HungUp, Wire, Wires

from tensorwire import Handle, Node
from tensorwire.testing import PeerGroup

pytestmark = pytest.mark.timeout(60)

SECRET = b"known to every member"
HANDSHAKE_S = 1.5  # how long the victim lets strangers try
QUOTA_BYTES = 1 << 20
OPEN_BYTES = 65_536
FILL = {"open": 0x11, "read": 0x22, "write": 0x33, "none": 0x44, "secret": 0x55}
GROWTH_BYTES = 24 * MIB  # far less than what the attacks send


@dataclass
class Victim:
    address: str
    handles: dict[str, Handle]
    target: Any
    honest: list[HonestPeer]

    def connect(self, transport: str, **values: Any) -> Wire:
        return wire.connect(transport, self.address, SECRET, **values)

    def dial(self) -> Wire:
        return wire.dial(self.address)

    def unchanged(self, *names: str) -> None:
        for name in names:
            size = self.handles[name].size_bytes
            assert self.target.is_filled(name, 0, size, FILL[name]), f"{name} was changed"

    def unharmed(self) -> None:
        self.unchanged("read", "write", "none", "secret")
        for peer in self.honest:
            peer.goes_on()
        eventually(lambda: self.target.peer_count() == len(self.honest), "liars are forgotten")


@pytest.fixture(scope="module")
def everything() -> Iterator[Victim]:
    options = {
        "secret": SECRET,
        "quota_bytes": QUOTA_BYTES,
        "max_peers": 64,
        "handshake_timeout_s": HANDSHAKE_S,
    }
    with PeerGroup() as group:
        _, target = start_actor(group, "victim", **options)
        handles = {
            "open": target.allocate("open", OPEN_BYTES, "rw", "open"),
            "read": target.allocate("read", 4096, "r", "read"),
            "write": target.allocate("write", 100, "w", "write"),
            "none": target.allocate("none", 64, "none", "none"),
            "secret": target.allocate("secret", 4096, "rw"),
        }
        for name, handle in handles.items():
            target.fill(name, 0, bytes([FILL[name]]) * handle.size_bytes)
        address = target.address()
        honest = [HonestPeer(address, transport, SECRET) for transport in ("shm", "tcp")]
        victim = Victim(address, handles, target, honest)
        victim.unharmed()
        yield victim
        for peer in honest:
            peer.close()


@pytest.fixture
def victim(everything: Victim) -> Iterator[Victim]:
    target = everything.target
    target.fill("open", 0, bytes([FILL["open"]]) * OPEN_BYTES)
    target.mark()
    rss_bytes = target.rss_bytes()
    yield everything
    everything.unharmed()
    assert target.growth(PATIENCE_S) == []
    assert target.rss_bytes() - rss_bytes < GROWTH_BYTES


# ---- strangers: before and in the handshake


def random_bytes() -> list[bytes]:
    source = random.Random(1)
    return [source.randbytes(size) for size in (1, 7, 8, 159, 160, 161, 200, 1000, 100_000)]


OPENINGS = {
    "http": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" + bytes(160),
    "tls": bytes.fromhex("16030102000100") + bytes(200),
    "zeros": bytes(400),
    "other version": wire.hello(SECRET, version=2),
    "no incarnation": wire.hello(SECRET, incarnation=0),
    "wrong magic": wire.hello(SECRET, magic=b"TWIREv00"),
    "unknown kind": wire.hello(SECRET, kind=4),
    "kind of a server": wire.hello(SECRET, kind=wire.CHALLENGE),
    "kind of a unix stream": wire.hello(SECRET, kind=wire.ATTACH_KIND, session=1),
    "name too long": wire.hello(SECRET, name_bytes=64),
    "line break in the name": wire.hello(SECRET, b"a\nb"),
    "bytes behind the name": wire.hello(SECRET, b"abc", name_bytes=2),
    "reserved byte": wire.hello(SECRET, reserved=1),
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
    for size in range(160 + 40 + 8):
        with victim.dial() as stream:
            truncated(stream, SECRET, wire.hello(SECRET), choice, size)
            stream.stream.shutdown(socket.SHUT_WR)
            assert stream.hung_up(), f"after {size} bytes"
    assert victim.target.peer_count() == len(victim.honest)


def test_cut_off_at_every_byte_of_the_unix_handshake(victim: Victim) -> None:
    with victim.dial() as first:
        session, key = first.handshake(SECRET, wire.hello(SECRET))
        for size in range(160 + 40):
            with wire.dial_unix(first.incarnation) as stream:
                hello = wire.hello(SECRET, kind=wire.ATTACH_KIND, session=session)
                truncated(stream, key, hello, b"", size)
                stream.stream.shutdown(socket.SHUT_WR)
                assert stream.hung_up(), f"after {size} bytes"
    assert victim.target.peer_count() == len(victim.honest)


def refused(stream: Wire, proof: bytes) -> bool:
    """Whether a proof is answered with a refusal that tells nothing, and the end."""
    welcome = stream.prove(proof)
    assert welcome["proof"] == bytes(32)
    assert welcome["session"] == 0
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
        yield right.session
        yield right.client[:31] + bytes([right.client[31] ^ 1])
        yield wire.Keys.derive(SECRET, theirs, hello).client
        yield wire.Keys.derive(SECRET + b"x", hello, theirs).client
        yield wire.Keys.derive(b"", hello, theirs).client

    for number in range(8):
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


def test_attaching_needs_the_session_and_its_key(victim: Victim) -> None:
    with victim.dial() as first, victim.dial() as other:
        session, key = first.handshake(SECRET, wire.hello(SECRET))
        _, other_key = other.handshake(SECRET, wire.hello(SECRET))
        values = {"kind": wire.ATTACH_KIND, "session": session}
        for attempt, wrong_key in (
            (values, other_key),
            (values, SECRET),
            (values, b""),
            (values | {"session": session ^ 1}, key),
            (values | {"incarnation": 0x7178}, key),
        ):
            with wire.dial_unix(first.incarnation) as stream:
                hello = wire.hello(SECRET, **attempt)
                proof = wire.Keys.derive(wrong_key, hello, stream.greet(hello)).client
                assert refused(stream, proof)
        with wire.dial_unix(first.incarnation) as stream:
            stream.send(wire.hello(SECRET))  # not the kind for this door
            assert stream.hung_up()


def test_a_session_is_one_peer(victim: Victim) -> None:
    """Two unix streams and the TCP stream itself, all from one session: one of them gets it."""
    with victim.dial() as first:
        session, key = first.handshake(SECRET, wire.hello(SECRET))
        streams, greeted = [wire.dial_unix(first.incarnation) for _ in range(3)], []
        for stream in streams:
            hello = wire.hello(SECRET, kind=wire.ATTACH_KIND, session=session)
            greeted.append(wire.Keys.derive(key, hello, stream.greet(hello)).client)
        for stream, proof in zip(streams, greeted, strict=True):
            stream.send(wire.encode("Proof", proof=proof))
        first.send(wire.encode("Choice"))
        open_ = [stream for stream in (first, *streams) if not is_over(stream)]
        assert len(open_) == 1
        for stream in streams:
            stream.close()


def is_over(stream: Wire) -> bool:
    """Whether a stream ends without ever answering a frame; makes it a peer if it can be one."""
    try:
        if stream.is_unix and wire.decode("Welcome", stream.receive(160))["status"] != wire.OK:
            return stream.hung_up()
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


def test_a_thousand_idle_connections(victim: Victim) -> None:
    """Others get in at once all the same, and every idle one ends in time."""
    count = 1000
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(max(soft, count + 500), hard), hard))
    with Wires() as streams:
        for number in range(count):
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


# ---- members that lie: frames


def granted(stream: Wire, name: str) -> dict[str, int]:
    """Region and generation of a region by name, as fields of further frames."""
    answer = stream.ask(wire.LOOKUP, name.encode())
    assert (answer.type, answer.status) == (wire.GRANT, wire.OK)
    return {"region": answer.region, "generation": answer.generation}


Lie = Callable[[Wire, dict[str, int]], None]


def many_open_transfers(stream: Wire, region: dict[str, int]) -> None:
    for transfer in range(1025):
        stream.frame(wire.WRITE, b"x", transfer=transfer, total=2, **region)


def without_reading(type_: int, **values: int) -> Lie:
    """Asks until the other side hangs up, and takes no answer; more than any socket holds."""

    def lie(stream: Wire, region: dict[str, int]) -> None:
        frame = wire.encode("Header", type=type_, transfer=1, **region, **values)
        for _ in range(20_000):
            stream.send(frame * 100)

    return lie


BREACHES: dict[str, Lie] = {
    "wrong magic": lambda s, r: s.frame(wire.SIGNAL, magic=0x55, flags=1, **r),
    "type 0": lambda s, r: s.frame(0, **r),
    "type 13": lambda s, r: s.frame(13, **r),
    "type 255": lambda s, r: s.frame(255, **r),
    "reserved flag": lambda s, r: s.frame(wire.SIGNAL, flags=9, **r),
    "reserved byte": lambda s, r: s.frame(wire.SIGNAL, flags=1, reserved=1, **r),
    "reserved2": lambda s, r: s.frame(wire.SIGNAL, flags=1, reserved2=1, **r),
    "reserved3": lambda s, r: s.frame(wire.SIGNAL, flags=1, reserved3=1, **r),
    "unknown status": lambda s, r: s.frame(wire.DONE, status=12),
    "payload over a chunk": lambda s, r: s.frame(
        wire.WRITE, length=wire.MAX_CHUNK_BYTES + 1, total=wire.MAX_CHUNK_BYTES + 1, **r
    ),
    "payload of 2**64 - 1": lambda s, r: s.frame(wire.WRITE, length=wire.U64, **r),
    "body over the limit": lambda s, r: s.frame(wire.LOOKUP, b"n" * (wire.MAX_BODY_BYTES + 1)),
    "body of 2**64 - 1": lambda s, r: s.frame(wire.SIGNAL, length=wire.U64, **r),
    "data that nobody asked for": lambda s, r: s.frame(wire.DATA, b"x" * 100, transfer=1),
    "empty data": lambda s, r: s.frame(wire.DATA, transfer=1),
    "done with nothing": lambda s, r: s.frame(wire.DONE, transfer=1),
    "a grant of nothing": lambda s, r: s.frame(
        wire.GRANT, region=1, generation=1, total=4096, transfer=1, flags=6
    ),
    "total below": lambda s, r: s.frame(wire.WRITE, b"x" * 8, flags=wire.LAST, total=7, **r),
    "total above": lambda s, r: s.frame(wire.WRITE, b"x" * 8, flags=wire.LAST, total=9, **r),
    "total of 2**64 - 1": lambda s, r: s.frame(
        wire.WRITE, b"x" * 8, flags=wire.LAST, total=wire.U64, **r
    ),
    "signal before the bytes": lambda s, r: s.frame(
        wire.SIGNAL, flags=wire.LAST, total=8, value=1, **r
    ),
    "signal that is not last": lambda s, r: s.frame(wire.SIGNAL, value=1, **r),
    "attach without descriptors": lambda s, r: s.frame(wire.ATTACH),
    "too many open transfers": many_open_transfers,
    "signals, no answer read": without_reading(wire.SIGNAL, flags=wire.LAST),
    "reads, no answer read": without_reading(wire.READ, length=OPEN_BYTES),
    "look-ups, no answer read": without_reading(wire.LOOKUP),
    "writes, no answer read": without_reading(wire.WRITE, flags=wire.LAST),
    "refusals, no answer read": without_reading(wire.FREE),
    "leases, no answer read": without_reading(wire.ALLOCATE),
}


@pytest.mark.parametrize("lie", BREACHES.values(), ids=BREACHES.keys())
def test_a_breach_ends_the_connection(victim: Victim, transport: str, lie: Lie) -> None:
    with victim.connect(transport) as stream:
        region = granted(stream, "open")
        try:
            lie(stream, region)
        except HungUp:
            return
        assert stream.hung_up()


def test_random_frames(victim: Victim, transport: str) -> None:
    """Well-formed headers with random fields, until the stream is closed for one of them."""
    source = random.Random(2)
    interesting = (0, 1, 7, 8, 64, 4095, OPEN_BYTES - 1, OPEN_BYTES, 1 << 20, 1 << 63, wire.U64)
    for _ in range(40):
        with victim.connect(transport) as stream:
            regions = [granted(stream, name) for name in ("read", "write", "none")]
            try:
                for _ in range(50):
                    type_ = source.randrange(1, 13)
                    body = source.randbytes(source.choice((0, 0, 8, 30)))
                    values = {
                        name: source.choice(interesting)
                        for name in ("offset", "transfer", "total", "value")
                    }
                    values |= source.choice(regions)
                    if type_ == wire.READ:
                        values["length"] = source.choice(interesting)
                    # What these may rightly change is not looked at here.
                    if type_ in (wire.WRITE, wire.SIGNAL, wire.FETCH_ADD):
                        values |= source.choice((regions[0], regions[2]))
                    stream.frame(type_, body, flags=source.randrange(8), **values)
            except HungUp:
                continue


def status_of(stream: Wire, type_: int, body: bytes, values: dict[str, Any]) -> int:
    answer = stream.ask(type_, body, **values)
    assert answer.transfer == values["transfer"]
    assert answer.value == 0
    assert answer.body.decode(), "a refusal says why"
    return answer.status


END = OPEN_BYTES
REFUSALS: dict[str, tuple[str, int, bytes, dict[str, int], int]] = {
    # what: (region, type, body, other fields, status)
    "write at the end": ("open", wire.WRITE, b"12345678", {"offset": END}, wire.INVALID),
    "write over the end": ("open", wire.WRITE, b"12345678", {"offset": END - 7}, wire.INVALID),
    "write at 2**64 - 8": ("open", wire.WRITE, b"12345678", {"offset": wire.U64 - 7}, wire.INVALID),
    "write at 2**63": ("open", wire.WRITE, b"12345678", {"offset": 1 << 63}, wire.INVALID),
    "write to read-only": ("read", wire.WRITE, b"12345678", {}, wire.PERMISSION),
    "write to nothing": ("none", wire.WRITE, b"12345678", {}, wire.PERMISSION),
    "read over the end": ("open", wire.READ, b"", {"length": END + 1}, wire.INVALID),
    "read of 2**64 - 1": ("open", wire.READ, b"", {"length": wire.U64}, wire.INVALID),
    "read that wraps": ("open", wire.READ, b"", {"offset": 16, "length": wire.U64}, wire.INVALID),
    "read at 2**64 - 1": ("open", wire.READ, b"", {"offset": wire.U64, "length": 1}, wire.INVALID),
    "read of nothing": ("open", wire.READ, b"", {"length": 0}, wire.INVALID),
    "read of write-only": ("write", wire.READ, b"", {"length": 8}, wire.PERMISSION),
    "read without a grant": ("none", wire.READ, b"", {"length": 8}, wire.PERMISSION),
    "signal off the words": ("open", wire.SIGNAL, b"", {"offset": 4, "value": 1}, wire.INVALID),
    "signal at the end": ("open", wire.SIGNAL, b"", {"offset": END, "value": 1}, wire.INVALID),
    "signal over the end": ("write", wire.SIGNAL, b"", {"offset": 96, "value": 1}, wire.INVALID),
    "signal at 2**64 - 8": (
        "open", wire.SIGNAL, b"", {"offset": wire.U64 - 7, "value": 1}, wire.INVALID,
    ),
    "signal to read-only": ("read", wire.SIGNAL, b"", {"value": wire.U64}, wire.PERMISSION),
    "add off the words": ("open", wire.FETCH_ADD, b"", {"offset": 1, "value": 1}, wire.INVALID),
    "add at the end": ("open", wire.FETCH_ADD, b"", {"offset": END, "value": 1}, wire.INVALID),
    "add to read-only": ("read", wire.FETCH_ADD, b"", {"value": 1}, wire.PERMISSION),
    "add to write-only": ("write", wire.FETCH_ADD, b"", {"value": 1}, wire.PERMISSION),
    "free what is not leased": ("open", wire.FREE, b"", {}, wire.PERMISSION),
    "an unknown name": ("open", wire.LOOKUP, b"secret", {}, wire.NOT_FOUND),
    "allocate nothing": ("open", wire.ALLOCATE, b"", {"total": 0}, wire.INVALID),
    "allocate over the quota": (
        "open", wire.ALLOCATE, b"", {"total": QUOTA_BYTES + 1}, wire.BUSY,
    ),
    "allocate 2**64 - 1": ("open", wire.ALLOCATE, b"", {"total": wire.U64}, wire.BUSY),
    "allocate a taken name": ("open", wire.ALLOCATE, b"read", {"total": 8}, wire.INVALID),
    "allocate a long name": ("open", wire.ALLOCATE, b"n" * 256, {"total": 8}, wire.INVALID),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSALS.values(), ids=REFUSALS.keys())
def test_what_a_grant_does_not_allow_is_refused(
    victim: Victim, transport: str, case: tuple[str, int, bytes, dict[str, int], int]
) -> None:
    """Also with forged generations and ids; the connection stays, and nothing has changed."""
    name, type_, body, values, status = case
    if type_ == wire.WRITE:
        values = values | {"flags": wire.LAST, "total": len(body)}
    if type_ == wire.SIGNAL:
        values = values | {"flags": wire.LAST}
    with victim.connect(transport) as stream:
        region = granted(stream, name)
        assert status_of(stream, type_, body, {**region, **values, "transfer": 1}) == status
        if type_ not in (wire.LOOKUP, wire.ALLOCATE):
            forged = {
                "generation": {"generation": region["generation"] ^ 1},
                "region": {"region": region["region"] + 1},
                "far region": {"region": 0xFFFFFFFF},
                "secret": {"region": victim.handles["secret"].id},
                "not granted here": {
                    "region": victim.handles["secret"].id,
                    "generation": victim.handles["secret"].generation,
                },
            }
            for what, change in forged.items():
                fields = {**region, **values, **change, "transfer": 2}
                assert status_of(stream, type_, body, fields) == wire.STALE, what
        assert stream.ask(wire.SIGNAL, flags=wire.LAST, **granted(stream, "open")).status == wire.OK
    victim.unchanged("open")


def test_handles_are_not_guessed(victim: Victim, transport: str) -> None:
    """By id with any generation but the right one, a region cannot be had."""
    handle = victim.handles["secret"]
    with victim.connect(transport) as stream:
        for generation in (0, 1, handle.generation ^ 1, handle.generation + 1, wire.U64):
            answer = stream.ask(wire.LOOKUP, region=handle.id, generation=generation % (1 << 64))
            assert (answer.type, answer.status) == (wire.GRANT, wire.STALE)
        for id_ in (100, 16383, 16384, 0xFFFFFFFF):
            answer = stream.ask(wire.LOOKUP, region=id_, generation=handle.generation)
            assert answer.status == wire.STALE


def test_one_refused_piece_and_the_word_is_not_raised(victim: Victim, transport: str) -> None:
    with victim.connect(transport) as stream:
        region = granted(stream, "open")
        fields = {"transfer": 5, "total": 24, **region}
        stream.frame(wire.WRITE, b"goodgood", offset=64, **fields)
        stream.frame(wire.WRITE, b"badbad!!", offset=END - 1, **fields)
        stream.frame(wire.WRITE, b"goodgood", offset=72, **fields)
        answer = stream.ask(wire.SIGNAL, flags=wire.LAST, value=wire.U64, **fields)
        assert (answer.type, answer.status) == (wire.DONE, wire.INVALID)
    assert victim.target.contents("open", 64, 80) == b"goodgood" * 2
    assert victim.target.is_filled("open", 0, 64, FILL["open"])
    assert victim.target.is_filled("open", 80, END, FILL["open"])


def test_a_grant_ends_with_its_connection(victim: Victim, transport: str) -> None:
    with victim.connect(transport) as first, victim.connect(transport) as second:
        region = granted(first, "open")
        assert second.ask(wire.READ, length=8, **region).status == wire.STALE
        assert first.ask(wire.READ, length=8, **region).type == wire.DATA


def test_a_transfer_without_end(victim: Victim, transport: str) -> None:
    """64 MiB into one open transfer: nobody keeps it anywhere but where it was sent to."""
    with victim.connect(transport) as stream:
        region = granted(stream, "open")
        chunk = b"e" * OPEN_BYTES
        for _ in range(64 * MIB // OPEN_BYTES):
            stream.frame(wire.WRITE, chunk, transfer=9, total=wire.U64, **region)
        assert stream.ask(wire.LOOKUP, b"open").status == wire.OK


def test_leases_are_limited_and_given_back(victim: Victim, transport: str) -> None:
    before = sum(peer.SIZE for peer in victim.honest)
    with victim.connect(transport) as stream:
        size, sizes = 64 << 10, 0
        while (answer := stream.ask(wire.ALLOCATE, total=size)).status == wire.OK:
            sizes += size
            assert before + sizes <= QUOTA_BYTES
        assert answer.status == wire.BUSY
        assert before + sizes + size > QUOTA_BYTES
    eventually(lambda: victim.target.peer_count() == len(victim.honest), "its end")
    with victim.connect(transport) as stream:
        regions = 0
        while (answer := stream.ask(wire.ALLOCATE, total=1)).status == wire.OK:
            regions += 1
            assert regions <= 1024
        assert answer.status == wire.BUSY


def test_slow_frames_hold_nobody_up(victim: Victim, transport: str) -> None:
    with victim.connect(transport) as stream:
        region = granted(stream, "open")
        frame = wire.encode("Header", type=wire.SIGNAL, flags=wire.LAST, transfer=1, **region)
        for byte in frame[:20]:
            stream.send(bytes([byte]))
            assert stream.quiet(for_s=0.05)
        for peer in victim.honest:
            peer.goes_on()
        stream.send(frame[20:])
        assert stream.answer(wire.DONE).status == wire.OK


def test_many_members_that_do_nothing(victim: Victim) -> None:
    """Every place but one is taken by connections that never say a word, or half of one."""
    with Wires() as streams:
        for number in range(64 - len(victim.honest) - 1):
            stream = (
                victim.connect(("shm", "tcp")[number % 2], attach=False)
                if (number % 2 == 0)
                else victim.connect("tcp")
            )
            stream.send(wire.encode("Header", type=wire.WRITE, length=1 << 20)[: number % 64])
            streams.append(stream)
        with Node("last", secret=SECRET) as node:
            assert node.connect(victim.address).region("open").size_bytes == OPEN_BYTES
        for peer in victim.honest:
            peer.goes_on()


# ---- members that lie: descriptors


def flood(stream: Wire, descriptors: list[int]) -> bool:
    """Whether the other side hangs up on requests that bring descriptors."""
    try:
        for _ in range(100):
            stream.frame(wire.LOOKUP, b"open", fds=descriptors)
            stream.answer(wire.GRANT)
    except HungUp:
        return True
    return False


@pytest.mark.parametrize("count", [1, 5, 16, 200])
def test_descriptors_that_nobody_asked_for(victim: Victim, count: int) -> None:
    null = os.open("/dev/null", os.O_RDWR)
    try:
        with victim.connect("shm") as stream:
            assert flood(stream, [null] * count)
    finally:
        os.close(null)


ATTACH_LIES = (
    "none", "one", "swapped", "unsealed", "too small", "other incarnation", "wrong magic", "pipe",
    "null", "directory", "socket", "pipe as doorbell", "null as doorbell", "memory as doorbell",
)  # fmt: skip


@pytest.mark.parametrize("lie", ATTACH_LIES)
def test_attaching_with_wrong_descriptors(victim: Victim, lie: str) -> None:
    mine = 0x7177
    pipe, null, folder = os.pipe(), os.open("/dev/null", os.O_RDWR), os.open("/", os.O_RDONLY)
    pair = socket.socketpair()
    content = wire.encode("Page", incarnation=mine)
    try:
        with (
            victim.connect("shm", attach=False) as stream,
            wire.page(mine) as good,
            wire.page(mine + 1) as other,
            wire.page(mine, magic=b"TWpage02") as wrong,
            wire.memory(1 << 20, content, seals=0) as unsealed,
            wire.memory(4096, content[:4096]) as small,
            wire.doorbell() as bell,
        ):
            descriptors = {
                "none": [],
                "one": [good],
                "swapped": [bell, good],
                "unsealed": [unsealed, bell],
                "too small": [small, bell],
                "other incarnation": [other, bell],
                "wrong magic": [wrong, bell],
                "pipe": [pipe[0], bell],
                "null": [null, bell],
                "directory": [folder, bell],
                "socket": [pair[0].fileno(), bell],
                "pipe as doorbell": [good, pipe[1]],
                "null as doorbell": [good, null],
                "memory as doorbell": [good, small],
            }[lie]
            stream.frame(wire.ATTACH, fds=descriptors)
            assert stream.hung_up()
    finally:
        for descriptor in (*pipe, null, folder):
            os.close(descriptor)
        for each in pair:
            each.close()


def test_attaching_twice(victim: Victim) -> None:
    with victim.connect("shm") as stream, wire.page(0x7177) as page, wire.doorbell() as bell:
        stream.frame(wire.ATTACH, fds=[page, bell])
        assert stream.hung_up()


def test_attaching_over_tcp(victim: Victim) -> None:
    with victim.connect("tcp") as stream:
        stream.frame(wire.ATTACH)
        assert stream.hung_up()


def test_a_grant_of_nothing_hands_out_no_memory(victim: Victim) -> None:
    with victim.connect("shm") as stream:
        assert len(stream.next_frame().descriptors) == 2  # its page and its doorbell
        for name, memory in (("open", 1), ("read", 1), ("write", 1), ("none", 0)):
            assert len(stream.ask(wire.LOOKUP, name.encode()).descriptors) == memory, name


def test_read_only_memory_stays_read_only(victim: Victim) -> None:
    """What the kernel lets the holder of the descriptor do."""
    with victim.connect("shm") as stream:
        descriptor = stream.ask(wire.LOOKUP, b"read").descriptors[-1]
        with pytest.raises(PermissionError):
            mmap.mmap(descriptor, 4096)
        for act in (
            lambda: os.pwrite(descriptor, b"x", 0),
            lambda: os.ftruncate(descriptor, 0),
            lambda: os.ftruncate(descriptor, 1 << 20),
            lambda: fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE),
        ):
            with pytest.raises(PermissionError):
                act()
        again = os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR)
        try:
            with pytest.raises(PermissionError):
                mmap.mmap(again, 4096)
        finally:
            os.close(again)
        with mmap.mmap(descriptor, 4096, prot=mmap.PROT_READ) as mapped:
            assert mapped[:] == bytes([FILL["read"]]) * 4096


# ---- Nodes that lie to whoever asks them


@pytest.fixture(scope="module")
def asker_process() -> Iterator[Any]:
    with PeerGroup() as group:
        _, target = start_actor(group, "asker", serve_asker, secret=SECRET)
        yield target


@pytest.fixture
def asker(asker_process: Any) -> Iterator[Any]:
    asker_process.mark()
    yield asker_process
    eventually(lambda: asker_process.peer_count() == 0, "the liar is forgotten")
    asker_process.forget()
    assert asker_process.growth(PATIENCE_S) == []
    stats = asker_process.stats()
    assert stats["transfers_started"] == stats["transfers_completed"]


def answers_to(stream: Wire, transfer: int, grant: dict[str, int], **values: Any) -> None:
    stream.frame(wire.GRANT, transfer=transfer, flags=6, **{**grant, **values})


REGION = {"region": 1, "generation": 77, "total": 64 * MIB}


def linked(asker: Any, fake: wire.FakeNode, **grant: Any) -> Wire:
    """Connects the asker over TCP and grants it a region."""
    connected = asker.begin("ask", "connect", fake.address)
    stream = fake.accept_tcp()
    assert connected() == ""
    found = asker.begin("ask", "find")
    question = stream.answer(wire.LOOKUP)
    answers_to(stream, question.transfer, REGION, **grant)
    assert found() == ""
    return stream


def test_done_before_the_bytes_were_taken(asker: Any) -> None:
    """The caller would take its memory back while it is still being sent."""
    with wire.FakeNode(SECRET) as fake, linked(asker, fake) as stream:
        writing = asker.begin("ask", "write", 64 * MIB)
        header = wire.decode("Header", stream.receive(64))
        stream.frame(wire.DONE, transfer=header["transfer"])
        assert stream.hung_up()
        assert writing().startswith("PeerLostError")


ANSWERS: dict[str, Callable[[Wire, Any], None]] = {
    # what is done to a read of 1,000 bytes
    "done without data": lambda s, q: s.frame(wire.DONE, transfer=q.transfer),
    "less": lambda s, q: s.frame(wire.DATA, b"d" * 999, transfer=q.transfer, flags=wire.LAST),
    "more": lambda s, q: s.frame(wire.DATA, b"d" * 1001, transfer=q.transfer, flags=wire.LAST),
    "nothing": lambda s, q: s.frame(wire.DATA, transfer=q.transfer, flags=wire.LAST),
    "before it": lambda s, q: s.frame(
        wire.DATA, b"d" * 1000, transfer=q.transfer, offset=wire.U64 - 7
    ),
    "behind it": lambda s, q: s.frame(wire.DATA, b"d" * 8, transfer=q.transfer, offset=1000),
    "across its end": lambda s, q: s.frame(wire.DATA, b"d" * 8, transfer=q.transfer, offset=996),
    "twice": lambda s, q: (
        s.frame(wire.DATA, b"d" * 600, transfer=q.transfer),
        s.frame(wire.DATA, b"d" * 600, transfer=q.transfer, flags=wire.LAST),
    )[-1],
    "for another": lambda s, q: s.frame(wire.DATA, b"d" * 1000, transfer=q.transfer + 1),
    "a grant": lambda s, q: answers_to(s, q.transfer, REGION),
    "no frame": lambda s, q: s.send(b"d" * 64),
}


@pytest.mark.parametrize("lie", ANSWERS.values(), ids=ANSWERS.keys())
def test_wrong_answers_to_a_read(asker: Any, lie: Callable[[Wire, Any], None]) -> None:
    with wire.FakeNode(SECRET) as fake, linked(asker, fake) as stream:
        reading = asker.begin("ask", "read", 1000)
        lie(stream, stream.answer(wire.READ))
        assert stream.hung_up()
        assert "broke the protocol" in reading()


def test_answers_to_a_write_that_nobody_sent(asker: Any) -> None:
    with wire.FakeNode(SECRET) as fake, linked(asker, fake) as stream:
        for number in range(3):
            adding = asker.begin("ask", "add")
            question = stream.answer(wire.FETCH_ADD)
            stream.frame(wire.DONE, transfer=question.transfer, value=number)
            assert adding() == ""
        stream.frame(wire.DONE, transfer=question.transfer)  # a second time
        assert stream.hung_up()
        assert "broke the protocol" in asker.lost_reason()


@pytest.mark.parametrize(
    "grant",
    [{"total": 0}, {"generation": 0}, {"type_": wire.DONE}],
    ids=["no bytes", "no generation", "no grant"],
)
def test_grants_that_cannot_be(asker: Any, grant: dict[str, int]) -> None:
    with wire.FakeNode(SECRET) as fake:
        connected = asker.begin("ask", "connect", fake.address)
        with fake.accept_tcp() as stream:
            assert connected() == ""
            found = asker.begin("ask", "find")
            transfer = stream.answer(wire.LOOKUP).transfer
            if "type_" in grant:
                stream.frame(wire.DONE, transfer=transfer)
            else:
                answers_to(stream, transfer, REGION, **grant)
            assert stream.hung_up()
            found()
            assert "broke the protocol" in asker.lost_reason()


def test_texts_that_are_no_utf8(asker: Any) -> None:
    """Names and reasons from outside end up in messages that a program prints."""
    bad = b"\xff\xfe\x80 \xc3"
    with wire.FakeNode(SECRET, name=bad, name_bytes=len(bad)) as fake:
        connected = asker.begin("ask", "connect", fake.address)
        with fake.accept() as stream:
            stream.receive(160)
            stream.send(fake.challenge(b""))
            assert stream.hung_up()
        assert connected().startswith("PeerLostError")
    with wire.FakeNode(SECRET) as fake:
        connected = asker.begin("ask", "connect", fake.address)
        with fake.accept() as stream:
            stream.receive(160)
            stream.send(fake.challenge(b""))
            stream.receive(40)
            values = {"status": wire.BUSY, "message": bad, "message_bytes": len(bad)}
            stream.send(wire.encode("Welcome", **values))
        assert connected().startswith("BusyError")
    for reply in (wire.GRANT, wire.GOODBYE):
        with wire.FakeNode(SECRET) as fake:
            connected = asker.begin("ask", "connect", fake.address)
            with fake.accept_tcp() as stream:
                assert connected() == ""
                found = asker.begin("ask", "find")
                transfer = stream.answer(wire.LOOKUP).transfer
                stream.frame(reply, bad, transfer=transfer, status=wire.NOT_FOUND)
                assert found().startswith(("LookupError", "PeerLostError"))
                asker.describe()


def test_a_server_that_does_not_know_the_secret(asker: Any) -> None:
    with wire.FakeNode(b"something else entirely") as fake:
        connected = asker.begin("ask", "connect", fake.address)
        with fake.accept() as stream:
            client_hello = stream.receive(160)
            server_hello = wire.hello(SECRET, kind=wire.CHALLENGE)
            stream.send(server_hello)
            stream.receive(40)
            keys = wire.Keys.derive(fake.secret, client_hello, server_hello)
            stream.send(wire.encode("Welcome", session=1, proof=keys.server))
            assert stream.hung_up()
        assert connected().startswith("PermissionError")


def test_a_server_that_reflects(asker: Any) -> None:
    """It sends the client's own hello, and the client's own proof, back."""
    with wire.FakeNode(SECRET) as fake:
        connected = asker.begin("ask", "connect", fake.address)
        with fake.accept() as stream:
            stream.send(stream.receive(160))
            assert stream.hung_up()
        assert connected().startswith("PeerLostError")
        connected = asker.begin("ask", "connect", fake.address)
        with fake.accept() as stream:
            stream.receive(160)
            stream.send(wire.hello(SECRET, kind=wire.CHALLENGE))
            proof = stream.receive(40)[:32]
            stream.send(wire.encode("Welcome", session=1, proof=proof))
            assert stream.hung_up()
        assert connected().startswith("PermissionError")


# ---- on this host


SHM = {"transports": wire.SHM_BIT, "host": wire.host_id()}


def attached(asker: Any, fake: wire.FakeNode, page: int, bell: int) -> tuple[Wire, str]:
    connected = asker.begin("ask", "connect", fake.address)
    stream = fake.accept_unix()
    stream.frame(wire.ATTACH, fds=[page, bell])
    return stream, connected()


@pytest.mark.parametrize("lie", ["unsealed", "too small", "pipe", "null", "missing"])
def test_grants_of_memory_that_is_none(asker: Any, lie: str) -> None:
    null, pipe = os.open("/dev/null", os.O_RDWR), os.pipe()
    try:
        with (
            wire.FakeNode(SECRET, **SHM) as fake,
            wire.page(fake.incarnation, [0, 77]) as page,
            wire.doorbell() as bell,
            wire.memory(1 << 20, seals=0) as unsealed,
            wire.memory(4096) as small,
        ):
            stream, error = attached(asker, fake, page, bell)
            assert error == ""
            memory = {"unsealed": unsealed, "too small": small, "pipe": pipe[0], "null": null}
            with stream:
                found = asker.begin("ask", "find")
                transfer = stream.answer(wire.LOOKUP).transfer
                fds = [memory[lie]] if lie in memory else []
                stream.frame(
                    wire.GRANT, fds=fds, transfer=transfer, flags=6, region=1, generation=77,
                    total=1 << 20,
                )  # fmt: skip
                assert stream.hung_up()
                assert found()
    finally:
        for descriptor in (null, *pipe):
            os.close(descriptor)


def test_a_second_grant_cannot_widen_the_first(asker: Any) -> None:
    """The same generation, first to read, then to write: the mapping of the first is read-only."""
    with (
        wire.FakeNode(SECRET, **SHM) as fake,
        wire.page(fake.incarnation, [0, 77]) as page,
        wire.doorbell() as bell,
        wire.memory(4096) as memory,
    ):
        stream, error = attached(asker, fake, page, bell)
        assert error == ""
        with stream:
            for flags in (wire.READABLE, wire.READABLE | wire.WRITABLE):
                found = asker.begin("ask", "find")
                transfer = stream.answer(wire.LOOKUP).transfer
                values = {"flags": flags, "region": 1, "generation": 77, "total": 4096}
                stream.frame(wire.GRANT, fds=[memory], transfer=transfer, **values)
                assert found() == ""
            assert asker.ask("write", 4096) == ""
        assert os.pread(memory, 4096, 0) == bytes([7]) * 4096


def test_a_server_that_never_attaches(asker: Any) -> None:
    """It answers questions all the same; nobody can ask any before the page is there."""
    with wire.FakeNode(SECRET, **SHM) as fake:
        connected = asker.begin("ask", "connect", fake.address, 0.5)
        with fake.accept_unix() as stream:
            assert stream.hung_up()
        assert connected().startswith("TimeoutError")


@pytest.mark.parametrize("lie", ["full pipe", "closed pipe", "full counter"])
def test_a_doorbell_that_holds_up_whoever_rings(asker: Any, lie: str) -> None:
    """Refused at once, or rung without blocking and without a signal that kills."""
    reader, writer = os.pipe()
    counter = os.eventfd(0, os.EFD_CLOEXEC)
    os.eventfd_write(counter, 0xFFFFFFFFFFFFFFFE)  # blocks whoever adds
    os.set_blocking(writer, False)
    try:
        while lie == "full pipe":
            os.write(writer, bytes(4096))
    except BlockingIOError:
        os.set_blocking(writer, True)
    if lie == "closed pipe":
        os.close(reader)
    bell = counter if lie == "full counter" else writer
    try:
        with (
            wire.FakeNode(SECRET, **SHM) as fake,
            wire.page(fake.incarnation, [0, 77], armed=1) as page,
            wire.memory(4096) as memory,
        ):
            stream, error = attached(asker, fake, page, bell)
            with stream:
                if error == "":
                    found = asker.begin("ask", "find")
                    transfer = stream.answer(wire.LOOKUP).transfer
                    values = {"flags": 6, "region": 1, "generation": 77, "total": 4096}
                    stream.frame(wire.GRANT, fds=[memory], transfer=transfer, **values)
                    assert found() == ""
                    assert asker.ask("signal") == ""
    finally:
        os.close(writer)
        os.close(counter)
        if lie != "closed pipe":
            os.close(reader)
