"""A raw TCP socket driven by C loops: what loopback TCP allows, and the limit of the tcp wire.

Measured: blocking send and receive of a connected stream with TCP_NODELAY and the kernel's own
buffer sizing. The sender's clock stops at a one-byte acknowledgement (send), at the last byte of
the answer (fetch), or at the last byte of the echo (echo). One fresh connection per mode and size,
so no byte of framing is part of the figure. The loops are `tensorwire._core.bench_loops`.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Sequence
from typing import Any

MODES = ("send", "fetch", "echo")
LOOPBACK = "127.0.0.1"


def free_port() -> int:
    """A TCP port on loopback that nobody uses at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    """The target's side: serves one connection at a time in a thread of its own."""

    def __init__(self, loops: Any) -> None:
        self._loops = {
            "send": loops.serve_sink,
            "fetch": loops.serve_source,
            "echo": loops.serve_echo,
        }
        self._thread: threading.Thread | None = None
        self._listener: socket.socket | None = None

    def listen(self, mode: str, address: int, size_bytes: int, host: str = LOOPBACK) -> int:
        """Waits in the background for one connection and serves it; returns the port.

        It sends from and receives into the memory at `address`, which must outlive it.
        """
        self.close()
        listener = socket.create_server((host, 0))
        self._listener = listener
        self._thread = threading.Thread(
            target=self._serve, args=(listener, self._loops[mode], address, size_bytes), daemon=True
        )
        self._thread.start()
        return int(listener.getsockname()[1])

    @staticmethod
    def _serve(
        listener: socket.socket, loop: Callable[[int, int, int], int], address: int, size_bytes: int
    ) -> None:
        try:
            stream, _ = listener.accept()
        except OSError:
            return  # closed before anyone came
        finally:
            listener.close()
        with stream:
            stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            loop(stream.fileno(), address, size_bytes)

    def close(self) -> None:
        """Waits for the end of the last connection; its client must have closed first."""
        if self._listener is not None:
            self._listener.close()
        if self._thread is not None:
            self._thread.join(10)
        self._thread = self._listener = None


class Client:
    """The driver's side: one connection for one mode and size."""

    def __init__(
        self, loops: Any, port: int, mode: str, address: int, size_bytes: int,
        host: str = LOOPBACK,
    ) -> None:  # fmt: skip
        self._stream = socket.create_connection((host, port), timeout=10)
        self._stream.settimeout(None)
        self._stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._loop = {
            "send": loops.socket_send,
            "fetch": loops.socket_fetch,
            "echo": loops.socket_ping_pong,
        }[mode]
        self._address = address
        self._size_bytes = size_bytes

    def run(self, count: int, batch: int = 1) -> Sequence[float]:
        """Seconds per operation of `count` samples."""
        samples: Sequence[float] = self._loop(
            self._stream.fileno(), self._address, self._size_bytes, count, batch
        )
        return samples

    def close(self) -> None:
        """Ends the connection and with it the server's loop."""
        self._stream.close()
