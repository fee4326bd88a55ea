"""Attacks of strangers: who does not know the secret, or does not show that he does; and floods."""

from __future__ import annotations

import os
import socket
import time
from random import Random
from typing import Any, ClassVar

import descriptors
import wire
from attack import NOBODY, Attack, abort, here
from wire import Wire

EVERYWHERE = ("here", "mounts and processes", "user")
SLOW_BYTES_S = 1.0


class ForeignDescriptors(Attack):
    """Sends harmful descriptors to the unix socket, by another user or by one without the secret.

    They come alone, with a Hello, with a byte of it each, or up to 253 with one byte; then the
    stream is closed at once, or kept until the Node ends it.
    """

    uids = (0, NOBODY, NOBODY)
    spaces = EVERYWHERE

    @classmethod
    def draw(cls, random: Random) -> dict[str, Any]:
        return {
            "kinds": descriptors.draw(random),
            "at_once": random.choice((1, 1, 2, 5, 253)),
            "with": random.choice(("nothing", "hello", "bytes")),
            "keep": random.random() < 0.3,
        }

    def prepare(self) -> dict[str, Any]:
        self.store = descriptors.Store(self.values["kinds"])
        self.name = self.incarnation()
        self.kept: list[Wire] = []
        return {"missing": self.store.missing}

    def act(self) -> None:
        stream = wire.dial_unix(self.name)
        try:
            hello = wire.hello(b"", kind=wire.ATTACH_KIND, session=1)
            data = {"nothing": b"\0", "hello": hello, "bytes": hello[:3]}[self.values["with"]]
            pieces = [data] if self.values["with"] != "bytes" else [data[:1], data[1:2], data[2:]]
            for piece in pieces:
                taken = [self.store.take(self.random)]
                taken += [os.dup(taken[0]) for _ in range(self.values["at_once"] - 1)]
                descriptors.send(stream, piece, taken)
        finally:
            if self.values["keep"] and len(self.kept) < 40:
                self.kept.append(stream)
            else:
                stream.close()
        self.pause(0.05)


class Garbage(Attack):
    """What is no handshake, or one that is cut off, mutated, wrong, recorded or out of turn."""

    uids = (0, NOBODY)
    spaces = (*EVERYWHERE, "network")

    @classmethod
    def draw(cls, random: Random) -> dict[str, Any]:
        return {"door": random.choice(("tcp", "tcp", "unix"))}

    def prepare(self) -> dict[str, Any]:
        self.name = self.incarnation()
        self.recorded = b""
        return {}

    def act(self) -> None:
        unix = self.values["door"] == "unix" and here(self.aim.address) and os.geteuid() == 0
        stream = wire.dial_unix(self.name) if unix else wire.dial(self.aim.address)
        with stream:
            kind = wire.ATTACH_KIND if unix else wire.SESSION
            hello = bytearray(wire.hello(self.aim.key, kind=kind, session=int(unix)))
            what = self.random.randrange(5)
            if what == 0:
                stream.send(self.random.randbytes(self.random.randrange(1, 5000)))
            elif what == 1:
                for _ in range(self.random.randrange(1, 4)):
                    hello[self.random.randrange(160)] = self.random.randrange(256)
                stream.send(bytes(hello))
            elif what == 2:
                stream.send(bytes(hello)[: self.random.randrange(160)])
            elif what == 3:
                stream.greet(bytes(hello))
                stream.prove(self.random.randbytes(32))
            else:
                theirs = stream.greet(bytes(hello))
                proof = wire.Keys.derive(b"", bytes(hello), theirs).client
                message = self.recorded or wire.encode("Proof", proof=proof)
                stream.send(message[: self.random.randrange(41)])
                self.recorded = wire.encode("Proof", proof=proof) + theirs
            if self.random.random() < 0.5 and not unix:
                abort(stream.stream)


class ConnectFlood(Attack):
    """Two processes connect as often as they can, and close, reset, greet or just stay."""

    uids = (0, NOBODY)
    spaces = (*EVERYWHERE, "network")
    processes = 2

    @classmethod
    def draw(cls, random: Random) -> dict[str, Any]:
        return {
            "then": random.choice(("close", "reset", "greet", "stay", "greet and stay")),
            "door": random.choice(("tcp", "tcp", "unix")),
        }

    def prepare(self) -> dict[str, Any]:
        self.name = self.incarnation()
        host, _, port = self.aim.address.rpartition(":")
        self.where = (host, int(port))
        self.kept: list[socket.socket] = []
        return {}

    def act(self) -> None:
        for _ in range(50):
            self._connect()
            self.acts += 1

    def _connect(self) -> None:
        then = self.values["then"]
        if self.values["door"] == "unix" and here(self.aim.address):
            stream = socket.socket(socket.AF_UNIX)
            target: Any = f"\0tensorwire-{self.name:016x}"
        else:
            stream, target = socket.socket(), self.where
        stream.settimeout(0.2)
        try:
            stream.connect(target)
            if "greet" in then:
                stream.send(wire.hello(self.aim.key))
        finally:
            if "stay" in then:
                self.kept.append(stream)
                if len(self.kept) > 400:
                    self.kept.pop(0).close()
            elif then == "reset" and stream.family == socket.AF_INET:
                abort(stream)
            else:
                stream.close()


class SlowLoris(Attack):
    """Many connections, each with a byte of a good Hello from time to time, or none at all."""

    uids = (0, NOBODY)
    spaces = (*EVERYWHERE, "network")

    @classmethod
    def draw(cls, random: Random) -> dict[str, Any]:
        return {"connections": random.choice((50, 127, 128, 129, 600)), "silent": random.random()}

    def prepare(self) -> dict[str, Any]:
        self.streams: list[list[Any]] = []  # stream, Hello, sent, when next
        return {}

    def act(self) -> None:
        if len(self.streams) < self.values["connections"]:
            stream = wire.dial(self.aim.address)
            self.streams.append([stream, wire.hello(self.aim.key), 0, time.monotonic()])
            return
        chosen = self.random.choice(self.streams)
        stream, hello, sent, due = chosen
        if due <= time.monotonic() and self.random.random() > self.values["silent"]:
            chosen[3] = time.monotonic() + SLOW_BYTES_S
            try:
                stream.send(hello[sent : sent + 1])
                chosen[2] += 1
            except (wire.HungUp, OSError):
                stream.close()
                self.streams.remove(chosen)
        time.sleep(0.001)


class NeverProves(Attack):
    """Greets, and never proves: the Node waits for its proof, again and again."""

    uids = (0, NOBODY)
    spaces = (*EVERYWHERE, "network")
    processes = 2
    KEEP: ClassVar = 300

    @classmethod
    def draw(cls, random: Random) -> dict[str, Any]:
        return {"per_s": random.choice((50, 500, 5000))}

    def prepare(self) -> dict[str, Any]:
        self.kept: list[Wire] = []
        return {}

    def act(self) -> None:
        stream = wire.dial(self.aim.address)
        self.kept.append(stream)
        stream.greet(wire.hello(self.aim.key))
        if len(self.kept) > self.KEEP:
            self.kept.pop(0).close()
        time.sleep(1 / self.values["per_s"])


KINDS = (ForeignDescriptors, Garbage, ConnectFlood, SlowLoris, NeverProves)
