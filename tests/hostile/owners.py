"""Attacks of Nodes that the victim itself connects to: they know the secret, and answer lies."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import signal
import time
from random import Random
from typing import Any, ClassVar

import descriptors
import fuse
import wire
from attack import PR_SET_PDEATHSIG, Attack, apart, call
from wire import Frame, HungUp, Wire

REGION_BYTES = 1 << 20
BOTH = wire.TCP_BIT | wire.SHM_BIT


class Owner(Attack):
    """A Node that lies. Heirs say what it answers; one connection at a time."""

    owner: ClassVar[str] = "tcp"
    spaces = ("here", "mounts and processes", "user")

    def prepare(self) -> dict[str, Any]:
        claimed = self.random.getrandbits(63) | 1
        bits = wire.TCP_BIT if self.transport() == "tcp" else BOTH
        self.node = wire.FakeNode(self.aim.key, claimed, patience_s=0.3, transports=bits)
        return {"address": self.node.address, "transport": self.transport()}

    def transport(self) -> str:
        return str(self.values.get("transport", self.owner))

    def act(self) -> None:
        stream = self.arrive()
        with stream:
            while self.left_s > 0:
                stream.stream.settimeout(0.3)
                self.answer(stream, stream.next_frame())
                self.acts += 1

    def arrive(self) -> Wire:
        """A connection on which frames follow."""
        if self.transport() == "tcp":
            return self.node.accept_tcp()
        stream = self.node.accept_shm()
        self.attach(stream)
        return stream

    def attach(self, stream: Wire) -> None:
        with wire.page(self.node.incarnation, [0, 77], armed=1) as page, wire.doorbell() as bell:
            stream.attach(page, bell, incarnation=self.node.incarnation)

    def answer(self, stream: Wire, question: Frame) -> None:
        """Returns the answer to a frame."""
        raise NotImplementedError

    def grant(self, stream: Wire, question: Frame, **values: Any) -> None:
        """A good answer to a look-up or lease, but for `values`."""
        fields = {"region": 1, "generation": 77, "total": REGION_BYTES, "flags": 6, **values}
        transfer = fields.pop("transfer", question.transfer)
        if stream.beside is None:
            stream.frame(wire.GRANT, transfer=transfer, **fields)
            return
        with wire.memory(REGION_BYTES) as memory:
            stream.frame(wire.GRANT, transfer=transfer, fds=[memory], **fields)


class LyingOwner(Owner):
    """Answers late, twice, never, out of range, with other types, totals and statuses."""

    owner = "tcp"

    @classmethod
    def draw(cls, random: Random) -> dict[str, Any]:
        return {"transport": random.choice(("tcp", "tcp", "shm")),
                "lies": random.choice((0.05, 0.3, 1.0))}  # fmt: skip

    def answer(self, stream: Wire, question: Frame) -> None:
        random = self.random
        lies = random.random() < self.values["lies"]
        repeat = 1
        values: dict[str, Any] = {}
        if lies:
            what = random.randrange(8)
            if what == 0:
                return  # withheld
            if what == 1:
                repeat = 2
            elif what == 2:
                values["transfer"] = random.choice((0, question.transfer + 1, wire.U64))
            elif what == 3:
                type_ = random.randrange(1, 13)
                stream.frame(type_, random.randbytes(random.choice((0, 8, 64))),
                             transfer=question.transfer, flags=random.randrange(8))  # fmt: skip
                return
            elif what == 4:
                stream.send(random.randbytes(random.randrange(1, 64)))
                return
            elif what == 5:
                stream.frame(wire.GOODBYE, random.choice((b"", b"why", b"\xff\xfe", b"a\nb")))
                return
            elif what == 6:
                time.sleep(min(random.choice((0.05, 0.7)), self.left_s))
        for _ in range(repeat):
            self._answer(stream, question, values, lies)

    def _answer(self, stream: Wire, question: Frame, values: dict[str, Any], lies: bool) -> None:
        random = self.random
        transfer = values.get("transfer", question.transfer)
        if question.type in (wire.LOOKUP, wire.ALLOCATE):
            if lies and random.random() < 0.7:
                values |= random.choice((
                    {"total": 0}, {"generation": 0}, {"total": wire.U64}, {"region": 0xFFFFFFFF},
                    {"total": REGION_BYTES + 1}, {"status": 9}, {"status": 65535}, {"flags": 0},
                    {"body": b"\xff\xfe"}, {"status": 4, "body": b"bad\nnews"},
                ))  # fmt: skip
            self.grant(stream, question, **values)
        elif question.type == wire.READ:
            size = min(question.length, 1 << 20)
            offset = question.total
            if lies:
                size = random.choice((0, 1, size, size + 1, size // 2))
                offset = random.choice((offset, offset + 1, wire.U64 - 7, 1 << 40, 0))
            stream.frame(wire.DATA, bytes(min(size, 1 << 20)), offset=offset, transfer=transfer,
                         flags=random.choice((0, 1)) if lies else wire.LAST)  # fmt: skip
        elif question.type == wire.WRITE and not question.flags & wire.LAST:
            if lies and random.random() < 0.3:
                stream.frame(wire.DONE, transfer=transfer)
        elif question.type in (wire.WRITE, wire.SIGNAL, wire.FETCH_ADD, wire.FREE):
            status = random.choice((0, 1, 3, 5, 11, 12)) if lies else 0
            text = random.choice((b"", b"\xff", b"because")) if status else b""
            stream.frame(wire.DONE, text, status=status, transfer=transfer)


class OwnerDescriptors(Owner):
    """Harmful descriptors where the victim expects page, doorbell or memory of a grant."""

    owner = "shm"

    @classmethod
    def draw(cls, random: Random) -> dict[str, Any]:
        return {"kinds": descriptors.draw(random),
                "where": random.choice(("page", "bell", "grant", "grant and more", "unannounced",
                                        "header"))}  # fmt: skip

    def prepare(self) -> dict[str, Any]:
        self.store = descriptors.Store(self.values["kinds"])
        return {**super().prepare(), "missing": self.store.missing}

    def attach(self, stream: Wire) -> None:
        assert stream.beside is not None
        where = self.values["where"]
        header = wire.encode("Header", type=wire.ATTACH, generation=self.node.incarnation)
        with wire.page(self.node.incarnation, [0, 77], armed=1) as page, wire.doorbell() as bell:
            bad = self.store.take(self.random) if where in ("page", "bell") else -1
            fds = [bad if where == "page" else os.dup(page), bad if where == "bell" else
                   os.dup(bell)]  # fmt: skip
            descriptors.send(stream.beside, header, fds)
            stream.send(header)
        if where == "unannounced":
            with contextlib.suppress(BlockingIOError):
                for _ in range(self.random.randrange(20)):
                    descriptors.send(stream.beside, header, [self.store.take(self.random)])

    def answer(self, stream: Wire, question: Frame) -> None:
        if question.type not in (wire.LOOKUP, wire.ALLOCATE):
            return
        assert stream.beside is not None
        where = self.values["where"]
        fds = [self.store.take(self.random)]
        if where == "grant and more":
            fds += [os.dup(fds[0]) for _ in range(self.random.choice((1, 3, 4, 100)))]
        frame = wire.encode("Header", type=wire.GRANT, transfer=question.transfer, region=1,
                            generation=77, total=REGION_BYTES, flags=6)  # fmt: skip
        message = self.random.randbytes(self.random.randrange(200)) if where == "header" else frame
        descriptors.send(stream.beside, message, fds)
        stream.send(frame)


class Memory(Owner):
    """A good owner that sleeps; what heirs do to its doorbell or memory comes after the grant."""

    owner = "shm"

    def prepare(self) -> dict[str, Any]:
        self.bell = os.eventfd(0, os.EFD_CLOEXEC)
        self.memory = os.memfd_create("words", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.truncate(self.memory, REGION_BYTES)
        fcntl.fcntl(self.memory, fcntl.F_ADD_SEALS, wire.SEALS)
        return super().prepare()

    def act(self) -> None:
        if self.acts == 0:
            apart(self.beside)
        super().act()

    def attach(self, stream: Wire) -> None:
        # Its page says that it sleeps, so every signal rings.
        with wire.page(self.node.incarnation, [0, 77], armed=1) as page:
            stream.attach(page, self.bell, incarnation=self.node.incarnation)

    def beside(self) -> None:
        """Runs beside, in another process; does not end."""
        raise NotImplementedError

    def answer(self, stream: Wire, question: Frame) -> None:
        if question.type in (wire.LOOKUP, wire.ALLOCATE):
            stream.frame(wire.GRANT, transfer=question.transfer, region=1, generation=77,
                         total=REGION_BYTES, flags=6, fds=[self.memory])  # fmt: skip
        elif question.type == wire.FREE:
            stream.frame(wire.DONE, transfer=question.transfer)


class BusyDoorbell(Memory):
    """Fills, reads and blocks its doorbell all the time, from two processes."""

    @classmethod
    def draw(cls, random: Random) -> dict[str, Any]:
        return {"value": random.choice((1, 0xFFFFFFFFFFFFFFFD, 0xFFFFFFFFFFFFFFFE))}

    def beside(self) -> None:
        os.fork()
        call("prctl", PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        while True:
            os.set_blocking(self.bell, False)
            with contextlib.suppress(OSError):
                os.read(self.bell, 8)
            with contextlib.suppress(OSError):
                os.eventfd_write(self.bell, self.values["value"])
            os.set_blocking(self.bell, True)
            time.sleep(0.001)


class HeldDoorbell(Memory):
    """Offers a pipe as doorbell, full, blocking, and holds its lock: it copies a page under it."""

    @classmethod
    def draw(cls, random: Random) -> dict[str, Any]:
        return {"by": random.choice(("a read", "a write"))}

    def prepare(self) -> dict[str, Any]:
        self.hung = fuse.hung_file_if_any()
        ready = super().prepare()
        self.out, self.bell = os.pipe2(os.O_CLOEXEC)
        return ready

    def beside(self) -> None:
        descriptors.hold_pipe(self.hung, self.out, self.bell, self.values["by"])


class ChangingMemory(Memory):
    """Takes pages out of its memory again and again, tries to cut it, and closes its doorbell."""

    @classmethod
    def draw(cls, random: Random) -> dict[str, Any]:
        return {"pages": random.choice((1, REGION_BYTES // 4096)),
                "closes": random.random() < 0.5}  # fmt: skip

    def beside(self) -> None:
        memory = mmap.mmap(self.memory, REGION_BYTES)
        if self.values["closes"]:
            os.close(self.bell)
        while True:
            with contextlib.suppress(OSError):
                os.truncate(self.memory, 0)
            memory.madvise(mmap.MADV_REMOVE, 0, self.values["pages"] * 4096)
            time.sleep(0.0001)


class OtherIncarnation(Owner):
    """Claims to be an honest Node, or the victim itself, so that the victim attaches there."""

    owner = "tcp"

    def prepare(self) -> dict[str, Any]:
        return {**super().prepare(), "transport": "any"}

    def arrive(self) -> Wire:
        stream = self.node.accept()
        with contextlib.ExitStack() as stack:
            stack.callback(stream.close)
            self.node.claim(incarnation=self.random.choice(self.aim.others), transports=BOTH)
            self.node.welcome(stream, self.aim.key)
            stack.pop_all()
        return stream

    def answer(self, stream: Wire, question: Frame) -> None:
        raise HungUp


class HungServer(Owner):
    """Accepts and then stalls: before its Hello, its Welcome, or by one byte at a time."""

    owner = "tcp"

    @classmethod
    def draw(cls, random: Random) -> dict[str, Any]:
        return {"after": random.choice((0, 1, 159, 160, 200, 319))}

    def arrive(self) -> Wire:
        stream = self.node.accept()
        client = stream.receive(wire.SIZES["Hello"])
        server = self.node.challenge(client)
        welcome = wire.encode("Welcome", proof=wire.Keys.derive(
            self.aim.key, client, server).server)  # fmt: skip
        stream.send((server + welcome)[: self.values["after"]])
        return stream

    def answer(self, stream: Wire, question: Frame) -> None:
        self.pause(0.1)


KINDS = (
    LyingOwner, OwnerDescriptors, BusyDoorbell, HeldDoorbell, ChangingMemory, OtherIncarnation,
    HungServer,
)  # fmt: skip
