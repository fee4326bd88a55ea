"""gRPC with raw bytes: generic handlers, no protobuf, limits raised, the best of a few chunk sizes.

Measured: a message until the server has received all of it and answered (write), or until the
client has the whole answer (read). The bytes objects exist before the clock starts and are not
copied afterwards, which favours gRPC: a user's tensor would need both. For a message over 256 KiB
several ways of cutting it into concurrent calls or a stream are tried, and the fastest is used.
The client uses a unix socket, or loopback TCP for the tcp wire.
"""

from __future__ import annotations

import importlib
import os
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from tensorwire.bench.harness import median, time_each
from tensorwire.bench.processes import serve_messages
from tensorwire.bench.rows import format_size
from tensorwire_benchmarks.rivals.base import Operation, RivalDriver

_SERVICE = "tensorwire.bench.Raw"
_CHUNKS = (1 << 18, 1 << 20, 1 << 22, 1 << 24)
_LARGEST_TRIAL = 1 << 26
"""Above this size the fastest way of a smaller size is used: trying all would take a minute."""

OPTIONS = [
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.optimization_target", "throughput"),
    ("grpc.so_reuseport", 0),
]


class Driver(RivalDriver):
    """The client."""

    def __init__(self, link: Connection, options: dict[str, Any]) -> None:
        super().__init__(link, options)
        os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
        self._grpc: Any = importlib.import_module("grpc")
        link.send(("listen", options["wire"]))
        self._address = str(link.recv())
        self._channel = self._grpc.insecure_channel(self._address, options=OPTIONS)
        self._put = self._channel.unary_unary(f"/{_SERVICE}/Put")
        self._get = self._channel.unary_unary(f"/{_SERVICE}/Get")
        self._stream_put = self._channel.stream_unary(f"/{_SERVICE}/StreamPut")
        self._best: dict[str, str] = {}

    def connect_case(self, case: str, size_bytes: int) -> tuple[Operation, str]:
        where = "unix socket" if self._address.startswith("unix:") else "loopback TCP"
        ways = self._ways(case, size_bytes)
        if len(ways) == 1:
            name, operation = ways[0]
            return operation, f"raw bytes over {where}, {name}"
        named = dict(ways)
        if case not in self._best or size_bytes <= _LARGEST_TRIAL:
            self._best[case] = min(named, key=lambda name: _trial(named[name]))
        best = self._best[case]
        return named[best], f"raw bytes over {where}, {best}, the fastest of {len(ways)} ways tried"

    def _ways(self, case: str, size_bytes: int) -> list[tuple[str, Operation]]:
        """Returns ways to move these bytes: one call, or chunks in concurrent calls or a stream."""
        put = case == "write"
        call = self._put if put else self._get

        def requests(chunk_bytes: int) -> list[bytes]:
            """Returns the chunks to put, or the requests to get them."""
            full, rest = divmod(size_bytes, chunk_bytes)
            sizes = [chunk_bytes] * full + [rest] * (rest > 0)
            chunk = bytes(chunk_bytes)
            return [chunk[:size] if put else size.to_bytes(8, "little") for size in sizes]

        def concurrent(sent: list[bytes]) -> None:
            for future in [call.future(request) for request in sent]:
                future.result()

        def stream(sent: list[bytes]) -> None:
            self._stream_put(iter(sent))

        (whole,) = requests(size_bytes)
        ways: list[tuple[str, Operation]] = [("one call", partial(call, whole))]
        for chunk in _CHUNKS if size_bytes > 1 << 18 else ():
            if chunk < size_bytes:
                sent = requests(chunk)
                ways.append((f"{format_size(chunk)} calls", partial(concurrent, sent)))
                if put:
                    ways.append((f"{format_size(chunk)} stream", partial(stream, sent)))
        return ways

    def close(self) -> None:
        self._channel.close()


def _trial(operation: Operation) -> float:
    operation()
    return median(time_each(operation, 3))


def serve(link: Connection, options: dict[str, Any]) -> None:
    """Runs the server, with four threads."""
    del options
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    grpc: Any = importlib.import_module("grpc")
    answers: dict[int, bytes] = {}
    directory = tempfile.TemporaryDirectory(prefix="tensorwire-bench-")

    def put(request: bytes, context: object) -> bytes:
        return b""

    def get(request: bytes, context: object) -> bytes:
        size_bytes = int.from_bytes(request, "little")
        if size_bytes not in answers:
            answers[size_bytes] = bytes(size_bytes)
        return answers[size_bytes]

    def stream_put(requests: Any, context: object) -> bytes:
        for _ in requests:
            pass
        return b""

    handlers = {
        "Put": grpc.unary_unary_rpc_method_handler(put),
        "Get": grpc.unary_unary_rpc_method_handler(get),
        "StreamPut": grpc.stream_unary_rpc_method_handler(stream_put),
    }
    server = grpc.server(
        ThreadPoolExecutor(4),
        handlers=[grpc.method_handlers_generic_handler(_SERVICE, handlers)],
        options=OPTIONS,
    )

    def listen(wire: str) -> str:
        if wire == "tcp":
            address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        else:
            address = f"unix:{directory.name}/socket"
            server.add_insecure_port(address)
        server.start()
        return address

    try:
        serve_messages(link, {"listen": listen})
    finally:
        server.stop(0)
        directory.cleanup()
