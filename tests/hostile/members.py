"""Attacks of members of the job: they know the secret, become peers, and lie."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from random import Random
from typing import Any, ClassVar

import descriptors
import fuse
import wire
from attack import Attack, apart, granted, here, names_of_sockets
from wire import Wire

SPACES = ("here", "mounts and processes", "user")
INTERESTING = (0, 1, 7, 8, 63, 64, 4095, 65_535, 65_536, 1 << 20, (1 << 20) + 1, 1 << 32, 1 << 63,
               wire.U64 - 7, wire.U64)  # fmt: skip
MINE = 0x7177  # the incarnation that a lying member claims


class ProvesAndIdles(Attack):
    """Proves the secret and then chooses nothing, or becomes a peer and says nothing."""

    spaces = (*SPACES, "network")

    @classmethod
    def draw(cls, random: Random) -> dict[str, Any]:
        return {"stop": random.choice(("welcome", "choice", "attach")),
                "connections": random.choice((10, 100, 200))}  # fmt: skip

    def prepare(self) -> dict[str, Any]:
        self.kept: list[Wire] = []
        return {}

    def act(self) -> None:
        stop = self.values["stop"]
        if len(self.kept) >= self.values["connections"]:
            self.kept.pop(0).close()
        if stop == "attach" and here(self.aim.address):
            self.kept.append(wire.connect_shm(self.aim.address, self.aim.key, attach=False))
        else:
            stream = wire.dial(self.aim.address)
            self.kept.append(stream)
            stream.handshake(self.aim.key, wire.hello(self.aim.key))
            if stop != "welcome":
                stream.send(wire.encode("Choice"))
        self.pause(0.005)


class MemberDescriptors(Attack):
    """Harmful descriptors on the socket of a peer: as page and doorbell, unannounced, too many.

    With headers of another frame or none; with a frame and no message, a second attach, none at
    all; the socket full, shut, or one that is not its own; with a goodbye and after it.
    """

    spaces = SPACES
    WHERE: ClassVar = (
        "page", "bell", "both", "many", "header", "unannounced", "frame alone", "attach twice",
        "never attaches", "shut", "full", "other name", "goodbye",
    )  # fmt: skip

    @classmethod
    def draw(cls, random: Random) -> dict[str, Any]:
        return {
            "kinds": descriptors.draw(random),
            "at_once": random.choice((1, 2, 3, 4, 5, 253)),
            "where": random.choice(cls.WHERE),
            "keep": random.random() < 0.3,
        }

    def prepare(self) -> dict[str, Any]:
        self.store = descriptors.Store(self.values["kinds"])
        self.kept: list[Wire] = []
        self.header = wire.encode("Header", type=wire.ATTACH, generation=MINE)
        return {"missing": self.store.missing}

    def taken(self, count: int = 0) -> list[int]:
        first = self.store.take(self.random)
        return [first] + [os.dup(first) for _ in range((count or self.values["at_once"]) - 1)]

    def act(self) -> None:
        where = self.values["where"]
        if where == "other name":
            self._other_name()
            return
        good = where in ("unannounced", "frame alone", "attach twice", "shut", "full", "goodbye")
        stream = wire.connect_shm(self.aim.address, self.aim.key, attach=good)
        assert stream.beside is not None
        try:
            getattr(self, f"_{where.replace(' ', '_')}")(stream, stream.beside)
            if self.values["keep"]:
                stream.hung_up(0.02)
        finally:
            if self.values["keep"] and len(self.kept) < 20:
                self.kept.append(stream)
            else:
                stream.close()
        self.pause(0.05)

    def _announced(self, stream: Wire, beside: socket.socket, fds: list[int]) -> None:
        descriptors.send(beside, self.header, fds)
        stream.send(self.header)

    def _page(self, stream: Wire, beside: socket.socket) -> None:
        with wire.doorbell() as bell:
            self._announced(stream, beside, [*self.taken(1), os.dup(bell)])

    def _bell(self, stream: Wire, beside: socket.socket) -> None:
        with wire.page(MINE) as page:
            self._announced(stream, beside, [os.dup(page), *self.taken(1)])

    def _both(self, stream: Wire, beside: socket.socket) -> None:
        self._announced(stream, beside, self.taken(2))

    def _many(self, stream: Wire, beside: socket.socket) -> None:
        self._announced(stream, beside, self.taken())

    def _header(self, stream: Wire, beside: socket.socket) -> None:
        message = bytearray(self.header)
        message[self.random.randrange(64)] ^= 1 << self.random.randrange(8)
        size = self.random.choice((0, 1, 63, 64, 64, 64))
        descriptors.send(beside, bytes(message[:size]) or bytes(2000), self.taken())
        stream.send(self.header)

    def _unannounced(self, stream: Wire, beside: socket.socket) -> None:
        with contextlib.suppress(BlockingIOError):
            for _ in range(self.random.randrange(1, 12)):
                descriptors.send(beside, self.header, self.taken())
        granted(stream, "open")

    def _frame_alone(self, stream: Wire, beside: socket.socket) -> None:
        granted(stream, "open")
        type_ = self.random.choice((wire.ATTACH, wire.GRANT))
        stream.frame(type_, flags=6, total=4096, generation=MINE, transfer=1)
        descriptors.send(beside, self.header, self.taken())

    def _attach_twice(self, stream: Wire, beside: socket.socket) -> None:
        granted(stream, "open")
        self._both(stream, beside)

    def _never_attaches(self, stream: Wire, beside: socket.socket) -> None:
        descriptors.send(beside, self.header, self.taken())
        stream.frame(wire.LOOKUP, b"open", transfer=1)

    def _shut(self, stream: Wire, beside: socket.socket) -> None:
        descriptors.send(beside, self.header, self.taken())
        beside.shutdown(self.random.choice((socket.SHUT_RD, socket.SHUT_RDWR, socket.SHUT_WR)))
        for transfer in range(20):
            stream.frame(wire.LOOKUP, b"open", transfer=transfer)

    def _full(self, stream: Wire, beside: socket.socket) -> None:
        """Ours with answers that are not taken, theirs with what was not announced."""
        for transfer in range(100):
            stream.frame(wire.LOOKUP, b"open", transfer=transfer)
        with contextlib.suppress(BlockingIOError):
            while True:
                descriptors.send(beside, self.header, self.taken())

    def _goodbye(self, stream: Wire, beside: socket.socket) -> None:
        stream.frame(wire.GOODBYE)
        descriptors.send(beside, self.header, self.taken())

    def _other_name(self) -> None:
        """Chooses a socket that is not its own, then sends to every connection."""
        with wire.dial(self.aim.address) as stream:
            stream.handshake(self.aim.key, wire.hello(self.aim.key))
            names = sorted(names_of_sockets())
            name = int(self.random.choice(names).rpartition("-")[2], 16) if names else 1
            stream.send(wire.encode("Choice", transport=wire.SHM_BIT, socket=name))
            meeting = wire.decode("Meeting", stream.receive(wire.SIZES["Meeting"]))
            beside, _ = wire.unix_socket()
            with beside:
                with contextlib.suppress(OSError):
                    beside.connect(wire.unix_name(meeting["socket"]))
                with contextlib.suppress(OSError):
                    descriptors.send(beside, self.header, self.taken(2))
            stream.send(self.header)
        self.pause(0.02)


class Doorbell(Attack):
    """An attack on the doorbell that a peer was given: silence it, ring it, hold it up."""

    spaces = SPACES

    @classmethod
    def draw(cls, random: Random) -> dict[str, Any]:
        return {"how": random.choice(("silence", "ring", "block", "hold by a read",
                                      "hold by a write"))}  # fmt: skip

    def prepare(self) -> dict[str, Any]:
        self.stream: Wire | None = None
        self.hung = fuse.hung_file_if_any() if "hold" in self.values["how"] else -1
        return {}

    def act(self) -> None:
        if self.stream is None:
            self._join()
        how = self.values["how"]
        if "hold" in how:
            time.sleep(0.05)  # another process does it
            return
        until = time.monotonic() + min(0.02, self.left_s)
        while time.monotonic() < until:
            os.set_blocking(self.bell, False)
            with contextlib.suppress(OSError):
                if how == "silence":
                    os.read(self.bell, 8)
                else:
                    os.eventfd_write(self.bell, 1)
            os.set_blocking(self.bell, how == "block")

    def _join(self) -> None:
        stream = wire.connect_shm(self.aim.address, self.aim.key)
        while (frame := stream.next_frame()).type != wire.ATTACH:
            pass
        self.bell = frame.descriptors[1]
        os.set_blocking(self.bell, False)
        self.stream = stream
        if self.hung >= 0:
            by = self.values["how"].removeprefix("hold by ")
            apart(descriptors.hold_pipe, self.hung, self.bell, self.bell, by)


class Frames(Attack):
    """Valid frames of every type in random order, with lying fields; some cut off at any byte."""

    spaces = (*SPACES, "network")

    @classmethod
    def draw(cls, random: Random) -> dict[str, Any]:
        return {"transport": random.choice(("tcp", "shm")), "mutate": random.choice((0, 0.02, 0.3)),
                "cut": random.choice((0, 0.1))}  # fmt: skip

    def act(self) -> None:
        transport = self.values["transport"] if here(self.aim.address) else "tcp"
        with self.member(transport) as stream:
            # What the honest may rightly not find changed is not granted for writing.
            regions = [granted(stream, name) for name in ("open", "read", "write", "none")]
            for _ in range(self.random.randrange(1, 200)):
                frame = self._frame(regions)
                if self.random.random() < self.values["cut"]:
                    stream.send(frame[: self.random.randrange(len(frame))])
                    return
                stream.send(frame)
                self.acts += 1
                if self.random.random() < 0.1:
                    with contextlib.suppress(BlockingIOError):
                        stream.stream.recv(1 << 16, 0x40)  # MSG_DONTWAIT

    def _frame(self, regions: list[dict[str, int]]) -> bytes:
        random = self.random
        type_ = random.randrange(1, 13) if random.random() < 0.95 else random.randrange(256)
        values: dict[str, int] = dict(random.choice(regions))
        for name in ("offset", "total", "value"):
            values[name] = random.choice(INTERESTING) if random.random() < 0.5 else 0
        values["transfer"] = random.randrange(4)
        body = b""
        if type_ in (wire.WRITE, wire.DATA):
            body = random.randbytes(random.choice((0, 8, 64, 4096)))
            if random.random() < 0.8:
                values["total"] = len(body)
        elif type_ in (wire.LOOKUP, wire.ALLOCATE):
            body = random.choice((b"", b"open", b"\xff\xfe", b"a\nb", b"n" * 255, b"x" * 256))
        elif type_ == wire.GOODBYE and random.random() < 0.9:
            type_ = wire.SIGNAL
        length = len(body)
        if type_ == wire.READ:
            length = random.choice(INTERESTING)
        elif random.random() < self.values["mutate"]:
            length = random.choice(INTERESTING)
        if random.random() < self.values["mutate"]:
            values["region"] = random.choice((0, 1, 100, 16383, 16384, 0xFFFFFFFF))
        if random.random() < self.values["mutate"]:
            values["generation"] ^= 1 << random.randrange(64)
        return wire.encode("Header", type=type_, flags=random.randrange(8), status=random.choice(
            (0, 0, 3, 11, 65535)), length=length, **values) + body  # fmt: skip


class Greedy(Attack):
    """Leases by name, thousands up to every limit, frees some, with names that are not text."""

    spaces = (*SPACES, "network")

    @classmethod
    def draw(cls, random: Random) -> dict[str, Any]:
        return {"transport": random.choice(("tcp", "shm")),
                "size_bytes": random.choice((1, 64, 4096, 70_000)),
                "read_answers": random.random() < 0.7}  # fmt: skip

    def act(self) -> None:
        transport = self.values["transport"] if here(self.aim.address) else "tcp"
        with self.member(transport) as stream:
            for number in range(self.random.randrange(10, 1500)):
                name = self.random.choice(
                    (b"", b"%d of greedy" % number, b"\xff%d" % number, b"same", b"a\0b",
                     "\N{RIGHT-TO-LEFT OVERRIDE}x".encode(), b"\xed\xa0\x80")
                )  # fmt: skip
                stream.frame(wire.ALLOCATE, name, total=self.values["size_bytes"], flags=6,
                             transfer=number)  # fmt: skip
                self.acts += 1
                if self.left_s == 0:
                    return
                if self.values["read_answers"]:
                    answer = stream.answer(wire.GRANT)
                    stream.let_go(answer)
                    if answer.status == wire.OK and self.random.random() < 0.5:
                        stream.ask(wire.FREE, region=answer.region, generation=answer.generation)


class Deaf(Attack):
    """Asks for very much and takes no answer, or takes it byte by byte."""

    spaces = (*SPACES, "network")

    @classmethod
    def draw(cls, random: Random) -> dict[str, Any]:
        return {"transport": random.choice(("tcp", "shm")), "slowly": random.random() < 0.5,
                "what": random.choice(("reads", "look-ups", "signals", "refusals"))}  # fmt: skip

    def prepare(self) -> dict[str, Any]:
        self.kept: list[Wire] = []
        return {}

    def act(self) -> None:
        transport = self.values["transport"] if here(self.aim.address) else "tcp"
        stream = self.member(transport)
        self.kept.append(stream)
        if len(self.kept) > 20:
            self.kept.pop(0).close()
        region = granted(stream, "open")
        frame = {
            "reads": wire.encode("Header", type=wire.READ, length=65_536, transfer=1, **region),
            "look-ups": wire.encode("Header", type=wire.LOOKUP, length=4, transfer=1) + b"open",
            "signals": wire.encode("Header", type=wire.SIGNAL, flags=1, transfer=1, **region),
            "refusals": wire.encode("Header", type=wire.FREE, transfer=1, **region),
        }[self.values["what"]]
        for _ in range(200):
            stream.send(frame * 20)
            self.acts += 1
            if self.left_s == 0:
                return
            if self.values["slowly"]:
                stream.stream.recv(1)


class FreedUnderWay(Attack):
    """Writes to and reads from regions that the owner, or it itself, frees at the same time."""

    spaces = (*SPACES, "network")

    @classmethod
    def draw(cls, random: Random) -> dict[str, Any]:
        return {"whose": random.choice(("churn", "leased")), "signal": random.random() < 0.5}

    def act(self) -> None:
        with self.member("tcp") as stream:
            while self.left_s > 0:
                if self.values["whose"] == "churn":
                    answer = stream.ask(wire.LOOKUP, b"churn")
                else:
                    answer = stream.ask(wire.ALLOCATE, total=8192, flags=6)
                self.acts += 1
                if answer.type != wire.GRANT or answer.status != wire.OK:
                    continue
                region = {"region": answer.region, "generation": answer.generation}
                body = self.random.randbytes(self.random.choice((8, 4000, 8192)))
                header = wire.encode("Header", type=wire.WRITE, length=len(body), total=len(body),
                                     flags=0 if self.values["signal"] else wire.LAST,
                                     transfer=7, **region)  # fmt: skip
                half = self.random.randrange(len(body))
                stream.send(header + body[:half])
                self.pause(0.004)
                stream.send(body[half:])
                if self.values["signal"]:
                    stream.frame(wire.SIGNAL, flags=wire.LAST, total=len(body), value=1,
                                 transfer=7, **region)  # fmt: skip
                stream.answer(wire.DONE)
                if self.values["whose"] == "leased":
                    stream.frame(wire.READ, length=8192, transfer=8, **region)
                    stream.frame(wire.FREE, transfer=9, **region)
                    stream.frame(wire.READ, length=8192, transfer=8, **region)
                    for _ in range(3):
                        stream.answer()


class UnderClose(Attack):
    """Connects, asks and sends descriptors while the Node closes."""

    second = True

    @classmethod
    def draw(cls, random: Random) -> dict[str, Any]:
        return {"kinds": descriptors.draw(random), "transport": random.choice(("tcp", "shm"))}

    def prepare(self) -> dict[str, Any]:
        self.store = descriptors.Store(self.values["kinds"])
        self.kept: list[Wire] = []
        return {"missing": self.store.missing}

    def act(self) -> None:
        stream = self.member(self.values["transport"])
        self.kept.append(stream)
        region = granted(stream, "open")
        for _ in range(20):
            stream.frame(wire.READ, length=4096, transfer=1, **region)
        if stream.beside is not None:
            with contextlib.suppress(OSError):
                header = wire.encode("Header", type=wire.ATTACH)
                descriptors.send(stream.beside, header, [self.store.take(self.random)])
        if len(self.kept) > 30:
            self.kept.pop(0).close()


KINDS = (
    ProvesAndIdles, MemberDescriptors, Doorbell, Frames, Greedy, Deaf, FreedUnderWay, UnderClose,
)  # fmt: skip
