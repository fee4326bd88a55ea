"""Hands descriptors of a member to its launcher, so that memory and socket outlive it.

Like systemd's FDSTORE: the launcher keeps them under a key and gives them to the successor of a
member that was killed. The messages are in docs/internals/launch.md.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import select
import socket
import threading
import time
from typing import Any, NamedTuple, TypedDict, TypeVar

import numpy as np
from numpy.typing import NDArray

from tensorwire.jobs.door import Message, receive_message, send_message

LISTENER = "listener"
"""The key of the socket on which a member listens."""

STORE, TERM = "TENSORWIRE_DESCRIPTOR_STORE", "TENSORWIRE_TERM"
"""Environment variables of a worker: its socket to the launcher; how often it was replaced."""

JOINS, DONOR = "TENSORWIRE_JOINS", "donor"
"""Variable of a worker that joins a job which runs; the key of another worker's history for it."""

_MOST_BYTES = 1 << 18

Told = TypeVar("Told")


class _StandbyStart(TypedDict):
    start: list[str]
    term: int
    restarts: int
    messages: int


class _HandedOver(TypedDict):
    kept: list[list[Any]]


class Kept(NamedTuple):
    """A descriptor kept under a key, which this process closes, and a description of it."""

    about: dict[str, Any]
    descriptor: int


class Takeover(NamedTuple):
    """The message to a standby: the server whose place it takes, and that server's options.

    `term` is 1 for the first successor of a server, and rises; `restarts` of these were because a
    process had died, and the others because it gave its share away.
    """

    arguments: list[str]
    term: int
    restarts: int


class DescriptorStore:
    """A member's end of the channel to its launcher. Any thread may use it.

    Args:
        channel: the socket towards the launcher, owned from now on.

    Attributes:
        joins: this member has joined a job that runs.
    """

    def __init__(self, channel: socket.socket) -> None:
        self._channel, self.joins = channel, False
        self._donor = np.empty(0, np.uint8)
        self._kept: dict[str, Kept] = {}
        self._lock = threading.Lock()

    @staticmethod
    def of_descriptor(descriptor: int) -> DescriptorStore:
        """Returns the store at the other end of an inherited descriptor.

        Raises:
            OSError: it is no socket.
        """
        os.set_inheritable(descriptor, False)
        return DescriptorStore(socket.socket(fileno=descriptor))

    def wait_for_takeover(self) -> Takeover | None:
        """Waits until this process is needed, and takes all that was kept; None: it is not needed.

        Raises:
            ValueError: the messages are not those of a launcher.
        """
        try:
            if (first := self._receive(_StandbyStart)) is None:
                return None
            told = first.content
            for _ in range(told["messages"]):
                if (found := self._receive(_HandedOver)) is None:
                    raise ValueError("the connection ended before the last message")
                entries = found.content["kept"]
                for (key, about), descriptor in zip(entries, found.descriptors, strict=True):
                    self._kept[key] = Kept(about, descriptor)
        except (TypeError, ValueError) as error:
            raise ValueError(f"the launcher's messages cannot be understood: {error}") from error
        return Takeover(told["start"], told["term"], told["restarts"])

    def keep(self, key: str, about: dict[str, Any], descriptor: int) -> None:
        """Hands a duplicate to the launcher, in place of the descriptor kept under the key."""
        self._send({"keep": key, "about": about}, [descriptor])

    def drop(self, key: str) -> None:
        """Asks the launcher to close the descriptor under a key."""
        self._send({"drop": key}, [])

    def leave(self, in_order: bool) -> None:
        """Says goodbye: this member has done its work, or has failed, and needs no successor."""
        self._send({"leave": in_order}, [])

    def tell(self, message: dict[str, Any]) -> None:
        """Tells the launcher something else; docs/internals/launch.md has the messages."""
        self._send(message, [])

    def hear(self, form: type[Told]) -> Told | None:
        """Waits for the launcher's next message and returns it; None: it is gone. One thread.

        Args:
            form: what it may say; see `parse_json`.

        Raises:
            ValueError: it says something else.
        """
        if (found := self._receive(form)) is None:
            return None
        for descriptor in found.descriptors:
            self._map_donor(descriptor)
        return found.content

    def map_donor(self) -> NDArray[np.uint8]:
        """Returns the history of the worker that tells a joining member where the script is."""
        if (kept := self.take(DONOR)) is not None:
            self._map_donor(kept.descriptor)
        return self._donor

    def _map_donor(self, descriptor: int) -> None:
        try:
            size = os.fstat(descriptor).st_size
            mapped = mmap.mmap(descriptor, size, mmap.MAP_SHARED, mmap.PROT_READ)
            self._donor = np.frombuffer(mapped, np.uint8)
        finally:
            os.close(descriptor)

    @property
    def descriptor(self) -> int:
        """The socket, ready for reading when the launcher has said something, or is gone."""
        return self._channel.fileno()

    @property
    def has_ended(self) -> bool:
        """True if the launcher says nothing any more; waits unless `descriptor` is ready."""
        return not self._channel.recv(1, socket.MSG_PEEK)

    @property
    def abandoned(self) -> bool:
        """True if the launcher is gone, and with it all that it kept."""
        poll = select.poll()
        poll.register(self._channel, 0)
        return bool(poll.poll(0))

    def take(self, key: str) -> Kept | None:
        """Returns the descriptor that a predecessor has kept under a key, once; None without one.

        The launcher keeps it too.
        """
        with self._lock:
            return self._kept.pop(key, None)

    def left(self) -> list[str]:
        """Returns the keys that were not taken."""
        with self._lock:
            return list(self._kept)

    def _send(self, message: dict[str, Any], descriptors: list[int]) -> None:
        # Without its launcher this process is about to be killed.
        with self._lock, contextlib.suppress(BrokenPipeError, ConnectionResetError):
            while True:
                try:
                    send_message(self._channel, message, descriptors)
                    return
                except OSError as error:
                    if error.errno != errno.ETOOMANYREFS:
                        raise
                time.sleep(0.001)  # too many are on their way, of all processes of this user

    def _receive(self, form: type[Told]) -> Message[Told] | None:
        return receive_message(self._channel, form, _MOST_BYTES)
