"""Opens the unix socket at which programs of this user ask the launcher of a job for changes.

A client gets a number that is used once, and proves with it that it knows the job's secret. It asks
with one message, hears lines on the progress, and then the outcome or an error; the messages are in
docs/internals/launch.md. Knows no job: scaling.py carries out the requests; clients use
`membership.ask_launcher`. Nothing here blocks.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import secrets
import select
import socket
from collections.abc import Callable, Iterator
from typing import Any, TypedDict

from tensorwire.membership import (
    PEER_CREDENTIALS,
    listen_in,
    proof_of,
    remove_own,
    runtime_folder,
    tell,
)
from tensorwire.outside import parse_json

_MOST_CLIENTS = 64
_LONGEST = 1 << 16


class RequestPart(TypedDict, total=False):
    """One part of a request; docs/internals/launch.md has the content of each."""

    count: int
    drain: list[int]


class _ScaleRequest(TypedDict):
    ask: dict[str, RequestPart]
    proof: str


class _Cancellation(TypedDict):
    cancel: bool


class Client:
    """A client that has connected to the socket.

    Attributes:
        message: what it asks; None so far.
        cancelled: it wants it no more, or is gone.
    """

    def __init__(self, channel: socket.socket, secret: bytes) -> None:
        self._channel, self._secret = channel, secret
        self._nonce = secrets.token_hex(16)
        self.message: dict[str, RequestPart] | None = None
        self.cancelled = False
        self._send({"nonce": self._nonce})

    @property
    def descriptor(self) -> int:
        """The socket; -1 when it is closed."""
        return self._channel.fileno()

    def say(self, text: str) -> None:
        """Sends a line on the progress."""
        self._send({"says": text})

    def finish(self, outcome: dict[str, Any]) -> None:
        """Sends the outcome of the request, and closes the connection."""
        self._send({"done": outcome})
        self.close()

    def refuse(self, text: str, busy: bool = False) -> None:
        """Sends the reason of a refusal, and closes; `busy`: it may be possible later."""
        self._send({"error": text, "busy": busy})
        self.close()

    def close(self) -> None:
        """Closes the connection."""
        self._channel.close()

    def hear(self) -> bool:
        """Reads a message of the client; returns whether it is its request, the first time."""
        try:
            data = self._channel.recv(_LONGEST)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if not data:
            self.cancelled = True
            self.close()
            return False
        try:
            if self.message is not None:
                self.cancelled = parse_json(data, _Cancellation)["cancel"]
                return False
            told = parse_json(data, _ScaleRequest)
        except ValueError as error:
            self.cancelled = True
            self.refuse(
                f"the launcher does not understand this ({error}): is the command of its version?"
            )
            return False
        proof = told["proof"].encode(errors="replace")
        if not hmac.compare_digest(proof, proof_of(self._secret, self._nonce).encode()):
            self.refuse("this is not the secret of the job")
            return False
        self.message = told["ask"]
        return True

    def _send(self, message: dict[str, Any]) -> None:
        # Who does not read is told nothing more; it hears of that when it reads.
        with contextlib.suppress(OSError):
            self._channel.send(json.dumps(message).encode(), socket.MSG_NOSIGNAL)


class ControlDoor:
    """The socket; its name is there until `close`.

    Args:
        secret: of the job.
        say: prints a line where its name cannot be removed.

    Attributes:
        path: of the socket.
        descriptor: ready for reading when `requests` has something to do.

    Raises:
        UnavailableError, OSError: nobody can listen there.
    """

    def __init__(self, secret: bytes, say: Callable[[str], object] = tell) -> None:
        self._secret, self._say = secret, say
        self._clients: dict[int, Client] = {}
        self._listener, self.path = listen_in(runtime_folder(), "control-")
        self._epoll = select.epoll()
        self._epoll.register(self._listener, select.EPOLLIN)
        self.descriptor = self._epoll.fileno()

    def requests(self) -> Iterator[Client]:
        """Yields clients with a request that know the secret."""
        for descriptor, _ in self._epoll.poll(0):
            if descriptor == self._listener.fileno():
                self._accept()
            elif (client := self._clients.get(descriptor)) is not None:
                if client.hear():
                    yield client
                if client.descriptor < 0:
                    self.forget(client)

    def forget(self, client: Client) -> None:
        """Stops listening to a client, which still gets its answer."""
        for descriptor, each in list(self._clients.items()):
            if each is client:
                with contextlib.suppress(OSError, ValueError):  # it is closed
                    self._epoll.unregister(descriptor)
                del self._clients[descriptor]

    def close(self) -> None:
        """Removes the name and closes all connections. May be called again."""
        for client in self._clients.values():
            client.close()
        self._clients.clear()
        self._epoll.close()
        if self._listener.fileno() >= 0:
            self._listener.close()
            remove_own(self.path, say=self._say)

    def _accept(self) -> None:
        try:
            came, _ = self._listener.accept()
        except OSError:  # it has gone again, or this process may open no more files
            return
        came.setblocking(False)
        told = came.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, PEER_CREDENTIALS.size)
        if PEER_CREDENTIALS.unpack(told)[1] != os.geteuid():
            came.close()
            return
        for client in [each for each in self._clients.values() if each.message is None]:
            if len(self._clients) >= _MOST_CLIENTS:  # who says nothing makes room for others
                self.forget(client)
                client.close()
        self._clients[came.fileno()] = Client(came, self._secret)
        self._epoll.register(came, select.EPOLLIN)
