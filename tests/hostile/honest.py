"""The honest parties of a trial: process functions whose every operation is timed and compared.

The `Victim` is a Node that is attacked and also does work of its own; a `Pair` writes to it, reads
back and is answered; a `Newcomer` connects anew all the time. `Plain` does the like without
tensorwire: what happens to it is the machine's doing, and no attack's.
"""

from __future__ import annotations

import contextlib
import math
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import numpy as np
from actor import serve
from hostile import Asker

from tensorwire import ClosedError, Node, Peer, TensorwireError
from tensorwire.testing import Channel, warm_up

PAUSE_S = 0.003  # between two rounds: honest parties are there all the time and load nobody
CONNECT_S = 5.0  # how long a newcomer may take to get in
OPERATION_S = 8.0  # after which an operation is given up; the judge's limit is far below
PAYLOAD_BYTES = 20_000
ANSWERS = "answers"


@dataclass
class Timed:
    """The results of one kind of operation in a trial; times in seconds."""

    seconds: list[float] = field(default_factory=list)

    @property
    def worst_s(self) -> float:
        return max(self.seconds, default=0.0)

    @property
    def median_s(self) -> float:
        return median(self.seconds) if self.seconds else math.nan


@dataclass
class Observed:
    """The observations of an honest party between `begin` and `end`.

    Attributes:
        operations: by kind.
        errors: what went wrong, as text.
        under_way: kind and seconds of what had not ended at `end`.
    """

    operations: dict[str, Timed] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)
    under_way: tuple[str, float] | None = None


class Party:
    """Does a round again and again in a thread, and times its operations."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._observed = Observed()
        self._now: tuple[str, float] | None = None
        self._over = threading.Event()
        self._goes_on = threading.Event()
        self._goes_on.set()
        self._between = threading.Event()  # two rounds
        self._thread = threading.Thread(target=self._run, name=f"honest {name}", daemon=True)

    def start(self) -> None:
        """Starts the thread; the constructor of the heir is over."""
        self._thread.start()

    def begin(self) -> None:
        """Forgets what was seen so far."""
        self._observed = Observed()

    def end(self) -> Observed:
        """Returns the observations since `begin`, also of an operation that still hangs."""
        now = self._now
        if now is not None:
            self._observed.under_way = now[0], time.monotonic() - now[1]
        return self._observed

    def rest(self) -> bool:
        """Stops after this round; whether it has in time."""
        self._goes_on.clear()
        return self._between.wait(OPERATION_S + 1)

    def go_on(self) -> None:
        """Goes on after `rest`."""
        self._goes_on.set()

    def close(self) -> None:
        self._over.set()
        self._goes_on.set()
        self._thread.join(OPERATION_S)

    def _round(self) -> None:
        raise NotImplementedError

    def _run(self) -> None:
        while not self._over.wait(PAUSE_S):
            self._between.set()
            self._goes_on.wait()
            self._between.clear()
            if self._over.is_set():
                return
            try:
                self._round()
            except Exception as error:
                self._observed.errors.append(f"{self.name}: {type(error).__name__}: {error}")
                if self._over.wait(0.05):
                    return

    @contextlib.contextmanager
    def timed(self, kind: str) -> Iterator[None]:
        """Times the block as an operation of this kind, whether it fails or not."""
        start = time.monotonic()
        self._now = kind, start
        try:
            yield
        finally:
            self._now = None
            timed = self._observed.operations.setdefault(kind, Timed())
            timed.seconds.append(time.monotonic() - start)


class Pair(Party):
    """Writes to the victim, reads back and compares; the victim's program answers each round."""

    def __init__(self, address: str, transport: str, secret: bytes) -> None:
        super().__init__(transport)
        self.node = Node(f"honest {transport}", secret=secret, transports=[transport])
        self._answers = self.node.allocate(64, name=ANSWERS)
        self._address = address
        self._rounds = 0
        self._payload = np.empty(PAYLOAD_BYTES, np.uint8)
        self._back = np.empty(PAYLOAD_BYTES, np.uint8)
        self._join()

    def _join(self) -> None:
        self._peer = self.node.connect(self._address, timeout_s=CONNECT_S)
        self._remote = self._peer.region(f"for {self.name}")

    def _round(self) -> None:
        if self._peer.lost:
            self._observed.errors.append(f"{self.name}: {self._peer.lost_reason}")
            self._over.wait(0.2)
            return
        # Ahead of what the round before may have left behind when it failed in the middle.
        self._rounds += 1
        self._payload.fill(self._rounds % 251)
        word = self._remote.word(0)
        with self.timed("write"):
            self._remote[64:].write(self._payload).wait(OPERATION_S)
        with self.timed("read"):
            self._remote[64:].read(self._back).wait(OPERATION_S)
        assert (self._payload == self._back).all(), "bytes were changed under way"
        with self.timed("look-up"):
            found = self._peer.region(f"for {self.name}", timeout_s=OPERATION_S)
        assert found.size_bytes == self._remote.size_bytes
        with self.timed("answer"):
            word.set(self._rounds).wait(OPERATION_S)
            self._answers.word(0).wait_until(self._rounds, timeout_s=OPERATION_S)

    def close(self) -> None:
        super().close()
        self.node.close()


class Newcomer(Party):
    """Connects to the victim, moves some bytes and leaves, again and again."""

    def __init__(self, name: str, address: str, transports: list[str], secret: bytes) -> None:
        super().__init__(name)
        self._address = address
        self._nodes = [
            Node(f"{name} {transport}", secret=secret, transports=[transport])
            for transport in transports
        ]
        self._rounds = 0

    def _round(self) -> None:
        self._rounds += 1
        node = self._nodes[self._rounds % len(self._nodes)]
        with self.timed(f"connect {node.transports[0]}"):
            peer = node.connect(self._address, timeout_s=CONNECT_S)
        with contextlib.closing(peer), self.timed("first bytes"):
            remote = peer.region(f"for {self.name}", timeout_s=OPERATION_S)[:8]
            remote.write(bytes([self._rounds % 256]) * 8).wait(OPERATION_S)
            back = np.zeros(8, np.uint8)
            remote.read(back).wait(OPERATION_S)
            assert (back == self._rounds % 256).all(), "bytes were changed under way"
        self._over.wait(0.02)

    def close(self) -> None:
        super().close()
        for node in self._nodes:
            node.close()


class Plain(Party):
    """Computes, sends a byte to another process and waits for it: the machine's share."""

    def __init__(self, port: int) -> None:
        super().__init__("plain")
        self._stream = socket.create_connection(("127.0.0.1", port), OPERATION_S)
        self._stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def _round(self) -> None:
        with self.timed("computation"):
            sum(range(20_000))
        with self.timed("answer"):
            self._stream.sendall(b"?")
            self._stream.recv(1)

    def close(self) -> None:
        super().close()
        self._stream.close()


class Victim(Asker):
    """The Node under attack. Its program answers the pairs, and allocates and frees regions."""

    ASK_S = 0.5  # limit of what it asks of a liar, where there is one

    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__(options)
        self._over = threading.Event()
        self._threads: list[threading.Thread] = []
        self._worker = Worker(self._node)
        self._asking: Asking | None = None
        self._accepted: list[Peer] = []

    def answer(self, name: str, address: str) -> None:
        """From now on raises the word at another Node whenever one here is raised."""
        peer = self._node.connect(address)
        theirs, mine = peer.region(ANSWERS).word(0), self._regions[f"for {name}"].word(0)

        def run() -> None:
            seen = 0
            while not self._over.is_set():
                with contextlib.suppress(TimeoutError):
                    mine.wait_until(seen + 1, timeout_s=0.2)
                    seen = mine.value
                    theirs.set(seen).wait(OPERATION_S)

        self._threads.append(threading.Thread(target=run, name=f"answers {name}", daemon=True))
        self._threads[-1].start()

    def work(self) -> None:
        """Starts its own work."""
        self._worker.start()

    def begin(self) -> None:
        self._worker.begin()

    def end(self) -> Observed:
        return self._worker.end()

    def rest(self) -> bool:
        return self._worker.rest()

    def go_on(self) -> None:
        self._worker.go_on()

    # ---- towards liars

    def start_asking(self, address: str, transport: str) -> None:
        """A thread connects to a liar and asks it everything, until `stop_asking`."""
        self._asking = Asking(self._node, address, transport)

    def stop_asking(self) -> tuple[list[str], bool]:
        """Returns the faults in the ends of questions, and whether the thread still hangs."""
        asking, self._asking = self._asking, None
        return ([], False) if asking is None else asking.stop()

    # ---- after the attack

    def reasons_missing(self) -> list[str]:
        """Peers that came since the last call and were lost without a reason that can be read."""
        missing = []
        with contextlib.suppress(TimeoutError):
            while True:
                self._accepted.append(self._node.accept(timeout_s=0.0))
        for peer in self._accepted:
            reason = peer.lost_reason
            if peer.lost and not (reason and reason.isprintable()):
                missing.append(f"{peer!r} was lost for {reason!r}")
        self._accepted = [peer for peer in self._accepted if not peer.lost]
        return missing

    def close_under_fire(self, stop: bool = False) -> str:
        """The address of a second Node, for attackers; with `stop` it is closed."""
        if not stop:
            self._second = Node(**{**self._options, "name": "second"})
            self._second.allocate(4096, name="open")
            return self._second.address
        self._second.close()
        del self._second
        return ""

    def close(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(1.0)
        if self._worker.is_alive():
            self._worker.close()
        super().close()


class Worker(Party):
    """The victim's own use of its Node: regions come and go."""

    def __init__(self, node: Node) -> None:
        super().__init__("victim")
        self._node = node
        self._rounds = 0

    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def _round(self) -> None:
        self._rounds += 1
        with self.timed("allocate"):
            region = self._node.allocate(8192, name="churn")
        region.array().fill(self._rounds % 251)
        self._over.wait(0.002)
        with self.timed("free"):
            region.free()


class Asking:
    """A thread that asks a liar; every end must be an answer or an error with a reason, in time."""

    LIMIT_S = 0.5
    SLACK_S = 1.0

    def __init__(self, node: Node, address: str, transport: str) -> None:
        self._node, self._address = node, address
        self._require = None if transport == "any" else transport
        self._over = threading.Event()
        self._wrong: list[str] = []
        self._thread = threading.Thread(target=self._run, name="asks a liar", daemon=True)
        self._thread.start()

    def stop(self) -> tuple[list[str], bool]:
        self._over.set()
        self._thread.join(2.0)
        return self._wrong[:5], self._thread.is_alive()

    def _run(self) -> None:
        local = np.full(200_000, 7, np.uint8)
        while not self._over.wait(0.001):
            peer = self._ask("connect", lambda: self._node.connect(
                self._address, timeout_s=self.LIMIT_S, require=self._require))  # fmt: skip
            if peer is None:
                continue
            with contextlib.closing(peer):
                for size in (8, 5000, 200_000):
                    self._ask_all(peer, local[:size])

    def _ask_all(self, peer: Peer, local: np.ndarray[Any, Any]) -> None:
        remote = self._ask("look-up", lambda: peer.region("r", timeout_s=self.LIMIT_S))
        if remote is None or remote.size_bytes < local.size:
            return
        target = remote[: local.size]
        self._ask("write", lambda: target.write(local).wait(self.LIMIT_S))
        self._ask("read", lambda: target.read(np.empty_like(local)).wait(self.LIMIT_S))
        for value in range(1, 40):
            self._ask("signal", lambda: remote.word(0).set(value).wait(self.LIMIT_S))  # noqa: B023
        self._ask("lease", lambda: peer.allocate(64, timeout_s=self.LIMIT_S))

    def _ask(self, what: str, question: Callable[[], Any]) -> Any:
        start = time.monotonic()
        try:
            return question()
        except (TensorwireError, ValueError, LookupError, PermissionError, MemoryError,
                TimeoutError) as error:  # fmt: skip
            if isinstance(error, UnicodeError) or not str(error).isprintable() or not str(error):
                self._wrong.append(f"{what} of a liar ended with {error!r}, which names no reason")
            early = isinstance(error, TimeoutError) and time.monotonic() - start < self.LIMIT_S / 2
            if early or isinstance(error, ClosedError):
                self._wrong.append(f"{what} of a liar ended with {error!r}, which is not true")
        except Exception as error:
            self._wrong.append(f"{what} of a liar ended with {type(error).__name__}: {error}")
        finally:
            took_s = time.monotonic() - start
            if took_s > self.LIMIT_S + self.SLACK_S:
                self._wrong.append(
                    f"{what} of a liar has a limit of {self.LIMIT_S:g} s and took {took_s:.1f} s"
                )
        return None


# ---- process functions


def victim(channel: Channel, options: dict[str, Any]) -> None:
    """Process function: a Victim that is told what to do."""
    for transport in ("shm", "tcp"):
        warm_up(transport)
    serve(channel, Victim(options))


def _serve(channel: Channel, party: Party) -> None:
    party.start()
    serve(channel, party)


def pair(channel: Channel, address: str, transport: str, secret: bytes) -> None:
    """Process function: a Pair; sends its own address and incarnation first."""
    party = Pair(address, transport, secret)
    channel.send((party.node.address, party.node.incarnation))
    channel.recv(None)  # the victim answers from now on
    _serve(channel, party)


def newcomer(
    channel: Channel, name: str, address: str, transports: list[str], secret: bytes
) -> None:
    """Process function: a Newcomer."""
    _serve(channel, Newcomer(name, address, transports, secret))


def plain(channel: Channel, port: int) -> None:
    """Process function: a Plain."""
    _serve(channel, Plain(port))


def plain_echo(channel: Channel) -> None:
    """Process function: answers the Plain; sends its port first."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        channel.send(listener.getsockname()[1])
        stream, _ = listener.accept()
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with stream:
            while data := stream.recv(1):
                stream.sendall(data)
