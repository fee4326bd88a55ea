"""Attacks of strangers, which do not know the secret, or do not show that they do; and floods."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from random import Random
from typing import Any, ClassVar

import descriptors
import wire
from attack import NOBODY, Attack, abort, here, names_of_sockets
from wire import Wire

EVERYWHERE = ("here", "mounts and processes", "user")
SLOW_BYTES_S = 1.0


class ForeignDescriptors(Attack):
    """Sends harmful descriptors to every socket whose name it can read, or guess.

    By another user, or by one without the secret: to all names again and again, or to a new one as
    soon as it appears, which is while honest peers are on their way to each other. As datagrams or
    over a stream, from a socket that has connected itself and is kept, or from one that has not.
    """

    uids = (0, NOBODY, NOBODY)
    spaces = EVERYWHERE

    @classmethod
    def draw(cls, random: Random) -> dict[str, Any]:
        return {
            "kinds": descriptors.draw(random),
            "at_once": random.choice((1, 1, 2, 5, 253)),
            "with": random.choice(("a header", "a byte", "nothing")),
            "how": random.choice(("to all", "connected", "connected", "stream", "guessed")),
            "new ones": random.random() < 0.5,
        }

    def prepare(self) -> dict[str, Any]:
        self.store = descriptors.Store(self.values["kinds"])
        self.guess = self.incarnation()
        self.known: set[str] = set()
        self.kept: list[socket.socket] = []
        return {"missing": self.store.missing}

    def act(self) -> None:
        taken = [self.store.take(self.random)]
        taken += [os.dup(taken[0]) for _ in range(self.values["at_once"] - 1)]
        try:
            for name in self._names():
                self._try(name, taken)
            for stranger in self.kept:  # nobody may have been in the way before
                with contextlib.suppress(OSError):
                    descriptors.put(stranger, self._message(), taken)
        finally:
            descriptors.let_go(taken)
        self.pause(0.05)

    def _names(self) -> list[str]:
        if self.values["how"] == "guessed":
            guesses = (self.guess, self.guess + 1, self.random.getrandbits(64))
            return [wire.unix_name(guess & wire.U64) for guess in guesses]
        found = names_of_sockets()
        if self.values["new ones"]:
            until = time.monotonic() + min(0.2, self.left_s)
            while not found - self.known and time.monotonic() < until:
                found = names_of_sockets()
            found, self.known = found - self.known, found
        return sorted(found)

    def _try(self, name: str, taken: list[int]) -> None:
        how = self.values["how"]
        stranger = socket.socket(
            socket.AF_UNIX, socket.SOCK_STREAM if how == "stream" else socket.SOCK_DGRAM
        )
        stranger.setblocking(False)
        try:
            if how in ("connected", "stream"):
                stranger.connect(name)
                if len(self.kept) < 40:
                    self.kept.append(stranger)
                descriptors.put(stranger, self._message(), taken)
            else:
                descriptors.put(stranger, self._message(), taken, name)
        except OSError:
            pass  # that is as it should be
        finally:
            if stranger not in self.kept:
                stranger.close()

    def _message(self) -> bytes:
        header = wire.encode("Header", type=wire.ATTACH, generation=self.guess)
        return {"a header": header, "a byte": b"\0", "nothing": b""}[self.values["with"]]


class Garbage(Attack):
    """A handshake that is none, or one that is cut off, mutated, wrong, recorded or out of turn."""

    uids = (0, NOBODY)
    spaces = (*EVERYWHERE, "network")

    @classmethod
    def draw(cls, random: Random) -> dict[str, Any]:
        return {"door": random.choice(("tcp", "tcp", "tcp", "unix"))}

    def prepare(self) -> dict[str, Any]:
        self.recorded = b""
        return {}

    def act(self) -> None:
        if self.values["door"] == "unix" and here(self.aim.address):
            self._datagrams()
            return
        with wire.dial(self.aim.address) as stream:
            hello = bytearray(wire.hello(self.aim.key))
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
            if self.random.random() < 0.5:
                abort(stream.stream)

    def _datagrams(self) -> None:
        for name in names_of_sockets():
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stranger:
                stranger.setblocking(False)
                with contextlib.suppress(OSError):
                    if self.random.random() < 0.5:
                        stranger.connect(name)
                    stranger.sendto(self.random.randbytes(self.random.randrange(5000)), name)
        self.pause(0.01)


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
        names = names_of_sockets() if self.values["door"] == "unix" else set()
        if names:
            stream = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            target: Any = self.random.choice(sorted(names))
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
