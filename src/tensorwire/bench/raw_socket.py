"""Measures a raw TCP socket between two processes: the limit of tcp.

Measured: blocking C loops (`tensorwire._core.bench_loops`) on a connected stream with TCP_NODELAY
and the kernel's own buffer sizing. The sender's clock stops at a one-byte acknowledgement (send),
at the last byte of the answer (fetch), or at the last byte of the echo (echo). One fresh connection
per mode and size, so no byte of framing is part of the figure. The server listens on a free port
for one connection that knows the token, which travels by another way.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import socket
import struct
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from tensorwire import _core

LOOPBACK = "127.0.0.1"
Bytes = np.ndarray[Any, Any]
"""An array, whatever its elements are."""

_TOKEN_BYTES = 16
_PATIENCE_S = 10
_STRANGERS = 8

_loops: Any = _core.bench_loops
_MODES = ("send", "fetch", "echo")


def _round(mode: str, size_bytes: int) -> tuple[int, int]:
    """Returns the bytes that the client sends in one round, and the bytes of the answer."""
    return 1 if mode == "fetch" else size_bytes, 1 if mode == "send" else size_bytes


def _tune(stream: socket.socket, patience_s: int) -> None:
    """Makes a socket block, for the C loops, but never longer than the patience."""
    stream.settimeout(None)
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        stream.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", patience_s, 0))


class RawServer:
    """A server of one connection at a time, in a thread of its own.

    Attributes:
        most_bytes: the largest size that it serves.
    """

    def __init__(
        self, host: str = LOOPBACK, patience_s: int = 0, most_bytes: float = float("inf")
    ) -> None:
        self._host = host
        self._patience_s = patience_s
        self.most_bytes = most_bytes
        self._listener: socket.socket | None = None
        self._thread: threading.Thread | None = None

    def listen(self, mode: str, size_bytes: int, memory: Bytes | None = None) -> tuple[int, str]:
        """Waits in the background for one connection; returns the port and the token.

        It sends from and receives into `memory`, else into some of its own.

        Raises:
            ValueError: a mode or size that is not offered.
            OSError: no port to listen on.
        """
        if mode not in _MODES or not 1 <= size_bytes <= self.most_bytes:
            raise ValueError(
                f"a raw socket measures {', '.join(_MODES)} with 1 to {self.most_bytes} bytes, not "
                f"{mode!r} with {size_bytes}"
            )
        self.close()
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        self._listener = socket.create_server((self._host, 0), family=family)
        self._listener.settimeout(_PATIENCE_S)
        token = secrets.token_bytes(_TOKEN_BYTES)
        served = (self._listener, token, mode, size_bytes, memory)
        self._thread = threading.Thread(target=self._serve, args=served, daemon=True)
        self._thread.start()
        return int(self._listener.getsockname()[1]), token.hex()

    def _serve(
        self, listener: socket.socket, token: bytes, mode: str, size_bytes: int,
        memory: Bytes | None,
    ) -> None:  # fmt: skip
        # A client that goes away, or never comes, ends it.
        with contextlib.suppress(OSError), listener:
            for _ in range(_STRANGERS):
                stream, _ = listener.accept()
                with stream:
                    stream.settimeout(_PATIENCE_S)
                    if not hmac.compare_digest(_receive(stream, _TOKEN_BYTES), token):
                        continue
                    _tune(stream, self._patience_s)
                    served = np.ones(size_bytes, np.uint8) if memory is None else memory
                    _loops.socket_serve(
                        stream.fileno(), served.ctypes.data, *_round(mode, size_bytes)
                    )
                    return

    def close(self) -> None:
        """Stops listening, and waits for the end of the last connection, which its client ends."""
        if self._listener is not None:
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
            self._listener.close()
        if self._thread is not None:
            self._thread.join(_PATIENCE_S)
        self._thread = self._listener = None


def _receive(stream: socket.socket, size_bytes: int) -> bytes:
    data = b""
    with contextlib.suppress(OSError):
        while len(data) < size_bytes and (part := stream.recv(size_bytes - len(data))):
            data += part
    return data


class RawClient:
    """The measuring side of one connection. `memory` is sent, or received into.

    Raises:
        OSError: the port cannot be reached.
    """

    def __init__(
        self, host: str, port: int, token: str, mode: str, memory: Bytes, patience_s: int = 0
    ) -> None:
        self._memory = memory
        self._round = _round(mode, memory.nbytes)
        proof = bytes.fromhex(token)
        self._stream = socket.create_connection((host, port), timeout=3)
        try:
            _tune(self._stream, patience_s)
            self._stream.sendall(proof)
        except OSError:
            self._stream.close()
            raise

    def run(self, count: int, batch: int = 1) -> Sequence[float]:
        """Returns the seconds per operation of `count` samples, each of `batch` operations.

        Raises:
            PeerLostError: the other side is gone or silent.
        """
        memory = self._memory
        samples: Sequence[float] = _loops.socket_rounds(
            self._stream.fileno(), memory.ctypes.data, *self._round, count, batch
        )
        return samples

    def close(self) -> None:
        """Ends the connection and with it the server's loop."""
        self._stream.close()
