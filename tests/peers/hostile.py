"""Processes for test_hostile.py: Nodes that are lied to, and honest peers that must not notice."""

import threading
from typing import Any

import numpy as np
from actor import PATIENCE_S, Actor, eventually, serve

from tensorwire import Node, RemoteRegion, TensorwireError
from tensorwire.testing import Channel


class Asker(Actor):
    """Asks a Node that lies, and tells how each question ended: "" or the error as text."""

    def ask(self, what: str, *args: Any) -> str:
        try:
            getattr(self, f"_{what}")(*args)
        except (TensorwireError, ValueError, LookupError, PermissionError, MemoryError) as error:
            if isinstance(error, UnicodeError):
                raise  # a ValueError, but nothing that a user of memory expects
            return f"{type(error).__name__}: {error}"
        return ""

    def _connect(self, address: str, timeout_s: float = PATIENCE_S) -> None:
        self._link = self._node.connect(address, timeout_s=timeout_s)

    def _find(self, name: str = "r") -> None:
        self._remote: RemoteRegion = self._link.region(name)

    def _write(self, size_bytes: int) -> None:
        self._remote[:size_bytes].write(np.full(size_bytes, 7, np.uint8)).wait(PATIENCE_S)

    def _read(self, size_bytes: int) -> None:
        self._remote[:size_bytes].read(np.zeros(size_bytes, np.uint8)).wait(PATIENCE_S)

    def _signal(self) -> None:
        self._remote.word(0).set(1).wait(PATIENCE_S)

    def _add(self) -> None:
        self._remote.word(0).fetch_add(1)

    def describe(self) -> list[str]:
        """Everything about the peer that a program may print."""
        texts = [repr(self._link), self._link.name, self._link.address, self._link.lost_reason]
        return texts + [repr(peer) for peer in self._node.peers]

    def forget(self) -> None:
        """Drops what it has of the liar, and with it the mapped memory."""
        self.__dict__.pop("_remote", None)
        self.__dict__.pop("_link", None)

    def lost_reason(self) -> str:
        """Waits until the peer is lost."""
        eventually(lambda: self._link.lost, "the liar is dropped")
        return self._link.lost_reason


def serve_asker(channel: Channel, options: dict[str, Any]) -> None:
    """Process function: an Asker that is told what to do until the channel ends."""
    serve(channel, Asker(options))


class HonestPeer:
    """Writes to a region of a Node, reads back and compares, again and again in a thread."""

    SIZE = 20_000

    def __init__(self, address: str, transport: str, secret: bytes) -> None:
        self._node = Node(f"honest {transport}", secret=secret, transports=[transport])
        self._remote = self._node.connect(address).allocate(self.SIZE)
        self.rounds = 0
        self._error: BaseException | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"honest {transport}", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            payload, back = np.empty(self.SIZE - 64, np.uint8), np.empty(self.SIZE - 64, np.uint8)
            # Not at full speed: it is to be there all the time, not to wear out the machine.
            while not self._over.wait(0.002):
                payload.fill(self.rounds % 251)
                word = self._remote.word(0)
                self._remote[64:].write(payload, signal=(word, self.rounds + 1)).wait(PATIENCE_S)
                self._remote[64:].read(back).wait(PATIENCE_S)
                assert (payload == back).all(), "bytes were changed under way"
                assert word.fetch_add(0) == self.rounds + 1, "the word was changed"
                self.rounds += 1
        except BaseException as error:
            self._error = error

    def goes_on(self) -> None:
        """Waits for some more rounds; raises what has gone wrong, if anything has."""
        before = self.rounds
        eventually(lambda: self._error or self.rounds >= before + 3, "honest traffic goes on")
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        self._over.set()
        self._thread.join(PATIENCE_S)
        self._node.close()
