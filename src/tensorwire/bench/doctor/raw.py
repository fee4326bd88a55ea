"""A raw TCP socket between the two processes of a doctor: what the network itself allows.

Blocking C loops (`tensorwire._core.bench_loops`) on a connected stream with TCP_NODELAY and the
kernel's own buffers; one fresh connection per mode and size. The server listens on a free port for
one connection that knows the token, which travels by tensorwire.
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

MODES = ("send", "fetch", "echo")
MAX_BYTES = 64 << 20
_TOKEN_BYTES = 16
_PATIENCE_S = 10
_STRANGERS = 8

_loops: Any = _core.bench_loops


def _tune(stream: socket.socket) -> None:
    """Blocking for the C loops, but never for ever."""
    stream.settimeout(None)
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        stream.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", _PATIENCE_S, 0))


class RawServer:
    """Serves one connection at a time in a thread of its own."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._listener: socket.socket | None = None

    def listen(self, mode: str, size_bytes: int) -> tuple[int, str]:
        """Waits in the background for one connection; returns the port and the token.

        Raises:
            ValueError: a mode or size that is not offered.
            OSError: no port to listen on.
        """
        if mode not in MODES or not 1 <= size_bytes <= MAX_BYTES:
            raise ValueError(f"no raw socket for {mode!r} and {size_bytes} bytes")
        self.close()
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        self._listener = socket.create_server((self._host, 0), family=family)
        self._listener.settimeout(_PATIENCE_S)
        token = secrets.token_bytes(_TOKEN_BYTES)
        threading.Thread(
            target=self._serve, args=(self._listener, token, mode, size_bytes), daemon=True
        ).start()
        return int(self._listener.getsockname()[1]), token.hex()

    @staticmethod
    def _serve(listener: socket.socket, token: bytes, mode: str, size_bytes: int) -> None:
        loop = {
            "send": _loops.serve_sink,
            "fetch": _loops.serve_source,
            "echo": _loops.serve_echo,
        }[mode]
        # A client that goes away, or never comes, ends it.
        with contextlib.suppress(OSError), listener:
            for _ in range(_STRANGERS):
                stream, _ = listener.accept()
                with stream:
                    stream.settimeout(_PATIENCE_S)
                    if not hmac.compare_digest(_receive(stream, _TOKEN_BYTES), token):
                        continue
                    _tune(stream)
                    memory = np.ones(size_bytes, np.uint8)
                    loop(stream.fileno(), memory.ctypes.data, size_bytes)
                    return

    def close(self) -> None:
        """Stops listening; a connection that is served ends with its client."""
        if self._listener is not None:
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)  # wakes whoever accepts
            self._listener.close()
            self._listener = None


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
        self, host: str, port: int, token: str, mode: str, memory: np.ndarray[Any, Any]
    ) -> None:
        self._memory = memory
        self._loop = {
            "send": _loops.socket_send,
            "fetch": _loops.socket_fetch,
            "echo": _loops.socket_ping_pong,
        }[mode]
        proof = bytes.fromhex(token)
        self._stream = socket.create_connection((host, port), timeout=3)
        try:
            _tune(self._stream)
            self._stream.sendall(proof)
        except OSError:
            self._stream.close()
            raise

    def run(self, count: int) -> Sequence[float]:
        """Seconds of each of `count` operations.

        Raises:
            PeerLostError: the other side is gone or silent.
        """
        memory = self._memory
        samples: Sequence[float] = self._loop(
            self._stream.fileno(), memory.ctypes.data, memory.nbytes, count, 1
        )
        return samples

    def close(self) -> None:
        """Ends the connection and with it the server's loop."""
        self._stream.close()
