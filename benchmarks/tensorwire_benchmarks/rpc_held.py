"""Measures what systems of `bench rpc` hold: descriptors of channels, memory for a slow reader.

Each system and wire has fresh processes, so that no other system's memory counts. See
`tensorwire.bench.processes`.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import grpc

from tensorwire.bench.processes import serve_messages

from .rpc_names import ATTACH_S, GRPCIO
from .rpc_pair import connect, started

SERVERS = 20
"""The number of servers, to which the client's channels are spread."""
MESSAGE_BYTES = 1 << 20
_MESSAGES = 3000
_STEP_S, _MOST_STEPS = 0.25, 20
_HOLDERS = ("Pss_Anon:", "Pss_Shmem:")


def _held_bytes() -> int:
    """Returns bytes of this process that belong to no file; shared memory in parts (PSS)."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith(_HOLDERS))


def _take(request: bytes, context: Any) -> bytes:
    return b"%d" % len(request)


def _send_all(request: bytes, context: Any) -> Iterator[bytes]:
    for _ in range(_MESSAGES):
        yield bytes(MESSAGE_BYTES)


def serve(link: Connection, options: dict[str, Any]) -> None:
    """Runs all servers of the system until the link ends."""
    handlers = {
        "take": grpc.unary_unary_rpc_method_handler(_take),
        "send": grpc.unary_stream_rpc_method_handler(_send_all),
    }
    system, wire = options["system"], options["wire"]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(8) as pool:
        made = [started(system, pool, handlers, Path(folder, str(n))) for n in range(SERVERS)]
        targets = [where[wire] for _, where in made]
        serve_messages(link, {"targets": lambda: targets, "held": _held_bytes})
        for server, _ in made:
            server.stop(0).wait()


class Driver:
    """The client."""

    def __init__(self, link: Connection, options: dict[str, Any]) -> None:
        link.recv()
        self._link = link
        self._wire, self._system = options["wire"], options["system"]
        self._targets: list[str] = self._ask("targets")
        self._channels: list[Any] = []

    def _ask(self, what: str) -> Any:
        self._link.send((what,))
        return self._link.recv()

    def _connect(self, target: str) -> Any:
        self._channels.append(connect(target, self._wire, self._system))
        return self._channels[-1]

    def descriptors(self, count: int) -> tuple[int, float]:
        """Returns this process's descriptors with `count` channels, and seconds of each and a call.

        Raises:
            RuntimeError: a channel has no attachment.
        """
        payload = bytes(MESSAGE_BYTES)
        began = time.perf_counter()
        for number in range(count):
            self._connect(self._targets[number % SERVERS]).unary_unary("/bench/take")(payload)
        each_s = (time.perf_counter() - began) / count
        if self._system != GRPCIO:
            for channel in self._channels[:SERVERS]:
                if not channel.attach(ATTACH_S):
                    raise RuntimeError(f"no attachment: {channel.payload}")
        return len(os.listdir("/proc/self/fd")), each_s

    def slow_reader(self, count: int) -> tuple[int, float]:
        """Returns the bytes that both ends hold of a stream after one message, and its seconds."""
        channel = self._connect(self._targets[0])
        if self._system != GRPCIO:
            channel.attach(ATTACH_S)
        channel.unary_unary("/bench/take")(bytes(MESSAGE_BYTES))
        before = _held_bytes() + self._ask("held")
        began = time.perf_counter()
        stream = channel.unary_stream("/bench/send")(b"")
        next(stream)
        first_s = time.perf_counter() - began
        held, most = -1, 0
        for _ in range(_MOST_STEPS):
            if most == held:
                break
            held = most
            time.sleep(_STEP_S)
            most = max(most, _held_bytes() + self._ask("held") - before)
        stream.cancel()
        return most, first_s

    def close(self) -> None:
        """Closes the channels."""
        for channel in self._channels:
            channel.close()
