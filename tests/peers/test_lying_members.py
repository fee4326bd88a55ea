"""Members of the job that know the protocol, and lie in it: nothing outside a grant is touched.

Forged regions, generations, ranges, totals, answers, descriptors, over both streams, while honest
peers write, read and compare all the time; `Victim.unharmed` says what must hold after every test.
"""

import contextlib
import fcntl
import mmap
import os
import random
import select
import socket
from collections.abc import Callable
from typing import Any

import pytest
import wire
from actor import MIB, eventually
from hostile import (
    FILL,
    MAX_PEERS,
    OPEN_BYTES,
    QUOTA_BYTES,
    SECRET,
    Victim,
)
from wire import HungUp, Wire, Wires

from tensorwire import Node

pytestmark = pytest.mark.timeout(60)


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
    "type 15": lambda s, r: s.frame(15, **r),
    "type 255": lambda s, r: s.frame(255, **r),
    "reserved flag": lambda s, r: s.frame(wire.SIGNAL, flags=17, **r),
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
                    type_ = source.randrange(1, wire.REVOKE + 1)
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
    """A peer writes 64 MiB into one open transfer: they are kept nowhere but in its target."""
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
        for number in range(MAX_PEERS - len(victim.honest) - 1):
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


@pytest.mark.parametrize("count", [1, 5, 16, 200])
def test_descriptors_that_nobody_asked_for(victim: Victim, count: int) -> None:
    """The descriptors stay in the queue, which is short, and are closed with it."""
    null = os.open("/dev/null", os.O_RDWR)
    try:
        with victim.connect("shm") as stream:
            assert stream.next_frame().type == wire.ATTACH
            stream.beside.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                for _ in range(1000):
                    stream.pass_descriptors(bytes(64), [null] * count)
                raise AssertionError("the queue has no end")
            stream.beside.settimeout(wire.PATIENCE_S)
            assert stream.ask(wire.LOOKUP, b"open").status == wire.OK
    finally:
        os.close(null)


ATTACH_LIES = (
    "none", "one", "swapped", "unsealed", "too small", "other incarnation", "wrong magic", "pipe",
    "null", "directory", "socket", "epoll as doorbell", "pipe as doorbell",
    "null as doorbell", "memory as doorbell", "no announcement",
)  # fmt: skip


@pytest.mark.parametrize("lie", ATTACH_LIES)
def test_attaching_with_wrong_descriptors(victim: Victim, lie: str) -> None:
    mine = 0x7177
    pipe, null, folder = os.pipe(), os.open("/dev/null", os.O_RDWR), os.open("/", os.O_RDONLY)
    pair, event = socket.socketpair(), select.epoll()
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
                "epoll as doorbell": [good, event.fileno()],
                "pipe as doorbell": [good, pipe[1]],
                "null as doorbell": [good, null],
                "memory as doorbell": [good, small],
                "no announcement": [good, bell],
            }[lie]
            if lie == "no announcement":
                stream.pass_descriptors(wire.encode("Header", type=wire.ATTACH), descriptors)
                stream.frame(wire.ATTACH, generation=mine)  # of another message
            else:
                stream.frame(wire.ATTACH, fds=descriptors, generation=mine)
            assert stream.hung_up()
    finally:
        for descriptor in (*pipe, null, folder):
            os.close(descriptor)
        for each in (*pair, event):
            each.close()


def test_attaching_twice(victim: Victim) -> None:
    with victim.connect("shm") as stream, wire.page(0x7177) as page, wire.doorbell() as bell:
        stream.frame(wire.ATTACH, fds=[page, bell])
        assert stream.hung_up()


def test_no_peer_can_take_the_rings_of_another(victim: Victim) -> None:
    """Each has a doorbell of its own: what one of them sets is not seen at the other's."""
    with victim.connect("shm") as one, victim.connect("shm") as other:
        bells = []
        for stream in (one, other):
            while (frame := stream.next_frame()).type != wire.ATTACH:
                pass
            bells.append(frame.descriptors[1])
        os.set_blocking(bells[0], False)
        os.eventfd_write(bells[0], 5)
        os.set_blocking(bells[1], False)
        with pytest.raises(BlockingIOError):
            os.eventfd_read(bells[1])


def test_attaching_over_tcp(victim: Victim) -> None:
    with victim.connect("tcp") as stream:
        stream.frame(wire.ATTACH)
        assert stream.hung_up()


def test_a_grant_of_nothing_hands_out_no_memory(victim: Victim) -> None:
    with victim.connect("shm") as stream:
        assert len(stream.next_frame().descriptors) == 2  # its page and its doorbell
        for name, memory in (("open", 1), ("read", 1), ("write", 1), ("none", 0)):
            assert len(stream.ask(wire.LOOKUP, name.encode()).descriptors) == memory, name
        stream.beside.setblocking(False)
        with pytest.raises(BlockingIOError):
            stream.beside.recv(64)


def test_read_only_memory_stays_read_only(victim: Victim) -> None:
    """The rights that the kernel gives the holder of the descriptor."""
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
