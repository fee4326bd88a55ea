"""The two processes of `bench rpc`: a client that is timed, and the servers that it calls.

See `tensorwire.bench.processes`. Both ends read the whole payload; the servicer returns its
request. torch is not imported. With the option `targets` a pair is only a client, which calls the
servers of other pairs.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from numpy.typing import NDArray

from tensorwire import rpc
from tensorwire.bench.harness import time_each
from tensorwire.bench.processes import serve_messages

from .rpc_aio import UNLIMITED, AioCalls, AioServers
from .rpc_by_hand import HandServer, as_bytes, calls_by_hand, in_place
from .rpc_names import (
    AIO,
    AIO_STREAM,
    ATTACH_S,
    BY_HAND,
    BY_HAND_BYTES,
    BYTES,
    CHANNEL,
    GRPCIO,
    GRPCIO_MARKED,
    IN_TURN,
    IN_TURN_BYTES,
    KIND_OF,
    KINDS,
    MEMCPY,
    PUSH_PULL,
    REQUESTS,
    RUNTIME,
    SCHEMES,
    SKEW,
    STREAMED,
    STREAMS,
    UNARY,
    server_of,
)
from .rpc_payloads import CODECS, METADATA, Codec, buffers, codec_of, read

_ENVELOPE_BYTES = 96
"""About the size of the message that says where payload lies."""
_BY_HAND = (BY_HAND, BY_HAND_BYTES, IN_TURN, IN_TURN_BYTES)

Targets = dict[str, dict[str, str]]
"""Addresses of servers, by system and wire."""
Parts = list[NDArray[np.uint8]]


def started(
    system: str, pool: ThreadPoolExecutor, handlers: Mapping[str, Any], socket: Path
) -> tuple[Any, dict[str, str]]:
    """Starts a system's server on a unix socket and a port; returns it and its targets by wire."""
    make: Callable[..., Any] = grpc.server
    if system != GRPCIO:
        make = partial(rpc.server, runtime=system == RUNTIME)
    server = make(pool, options=UNLIMITED)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bench", handlers),))
    server.add_insecure_port(f"unix:{socket}")
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    return server, {"shm": f"unix:{socket}", "tcp": f"127.0.0.1:{port}"}


def connect(target: str, wire: str, system: str) -> Any:
    """Returns a new channel of a system."""
    server = server_of(system)
    if server == GRPCIO:
        return grpc.insecure_channel(target, options=UNLIMITED)
    return rpc.insecure_channel(target, UNLIMITED, transports=(wire,), runtime=server == RUNTIME)


def serve(link: Connection, options: dict[str, Any]) -> None:
    """Runs a server of grpcio and two of ours, and the same with asyncio, until the link ends."""
    if "targets" in options:
        serve_messages(link, {})
        return
    handlers = {
        f"{codec.name}_{kind}": getattr(grpc, f"{name}_rpc_method_handler")(
            getattr(codec, kind), **codec.served_types()
        )
        for codec in CODECS
        for kind, name in KINDS.items()
    }
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(4) as pool:
        targets, servers = {}, []
        for name in (GRPCIO, BYTES, RUNTIME):
            server, targets[name] = started(name, pool, handlers, Path(folder) / name)
            servers.append(server)
        aio = AioServers(Path(folder))
        all_targets = targets, aio.targets
        serve_messages(
            link,
            {
                "targets": lambda: all_targets,
                "cpu": time.process_time,
                "by_hand": HandServer(link, read).begin,
            },
        )
        aio.close()
        for server in servers:
            server.stop(0).wait()


class ClientCalls:
    """The calls of a client, by a channel for each system, which is made on first use.

    Systems share no channel, as grpcio's flow control depends on the recent data of a connection.
    """

    def __init__(self, targets: Targets) -> None:
        self._targets = targets
        self._channels: dict[tuple[str, str], Any] = {}

    def _channel(self, wire: str, system: str) -> Any:
        """Returns the channel; raises RuntimeError if it does not use the wire."""
        channel = self._channels.get((wire, system))
        if channel is None:
            channel = self._channels[wire, system] = self._connect(wire, system)
        return channel

    def _connect(self, wire: str, system: str) -> Any:
        server = server_of(system)
        channel = connect(self._targets[server][wire], wire, system)
        if server == GRPCIO:
            return channel
        channel.attach(ATTACH_S)
        way = channel.runtime if server == RUNTIME else channel.payload
        if way != wire:
            channel.close()
            raise RuntimeError(f"{system} does not travel by {wire}: {way}")
        return channel

    def _call(
        self, wire: str, case: str, system: str, parts: Parts
    ) -> tuple[Codec, Any, Callable[[], Any]]:
        """Returns the codec, the method to call, and a function that makes its messages."""
        codec, kind = codec_of(case, system), KIND_OF.get(case, UNARY)
        make = getattr(self._channel(wire, system), KINDS[kind])
        return codec, make(f"/bench/{codec.name}_{kind}", *codec.types()), codec.messages(parts)

    def operation(self, wire: str, case: str, system: str, parts: Parts) -> Callable[[], object]:
        """Returns a function that makes a call, or a stream, with these buffers."""
        codec, call, message = self._call(wire, case, system, parts)
        if system == GRPCIO_MARKED:
            call = partial(call, metadata=METADATA)
        if case == REQUESTS:
            return lambda: call(message() for _ in range(STREAMED))
        if KIND_OF.get(case, UNARY) == UNARY:
            return lambda: codec.read(call(message()))

        def stream() -> None:
            for each in call(message()):
                codec.read(each)

        return stream

    def beginning(self, wire: str, system: str) -> Callable[[], Callable[[], None]]:
        """Returns a function that begins a call of `PUSH_PULL` and returns one that awaits it."""
        codec, call, message = self._call(wire, PUSH_PULL, system, buffers(SKEW))

        def begin() -> Callable[[], None]:
            future = call.future(message())
            return lambda: codec.read(future.result())

        return begin

    def fresh(self, wire: str, system: str, data: bytes) -> Callable[[], object]:
        """Returns a function that makes a call by a channel of its own."""
        target = self._targets[system][wire]

        def call() -> None:
            with connect(target, wire, system) as channel:
                read(channel.unary_unary(f"/bench/bytes_{UNARY}")(data))

        return call

    def close(self) -> None:
        """Closes the channels."""
        for channel in self._channels.values():
            channel.close()


class Driver:
    """The client."""

    def __init__(self, link: Connection, options: dict[str, Any]) -> None:
        link.recv()
        self._link = link
        self._aio: AioCalls | None = None
        self._all_targets: list[Targets] = options.get("targets", [])
        if not self._all_targets:
            targets, of_aio = self._ask("targets")
            self._all_targets = [targets]
            self._aio = AioCalls(of_aio, options["wires"])
        self._servers = [ClientCalls(each) for each in self._all_targets]
        self._calls = self._servers[0]

    def _ask(self, what: str) -> Any:
        self._link.send((what,))
        return self._link.recv()

    def targets(self) -> Targets:
        """Returns the targets of the servers without asyncio."""
        return self._all_targets[0]

    def remote_cpu(self) -> float:
        """Returns CPU seconds of the servers' process so far; 0 if they are in another pair."""
        return 0.0 if self._aio is None else float(self._ask("cpu"))

    def time(self, wire: str, case: str, system: str, size_bytes: int, count: int) -> list[float]:
        """Returns the seconds of each of `count` calls; of streams, per message."""
        parts = buffers(case) if case in SCHEMES else [np.arange(size_bytes, dtype=np.uint8)]
        if system in _BY_HAND:
            return self._time_by_hand(wire, system, parts, count)
        if case in (AIO, AIO_STREAM) and system != MEMCPY:
            assert self._aio is not None
            times = self._aio.time(wire, case, system, parts[0], count)
        else:
            if case == CHANNEL:
                operation = self._calls.fresh(wire, system, parts[0].tobytes())
            elif system == MEMCPY:
                operation = _copies(parts, case)
            else:
                operation = self._calls.operation(wire, case, system, parts)
            operation()
            times = time_each(operation, count)
        return [each / (STREAMED if case in STREAMS else 1) for each in times]

    def _time_by_hand(self, wire: str, system: str, parts: Parts, count: int) -> list[float]:
        call, take = None, as_bytes if system in (BY_HAND_BYTES, IN_TURN_BYTES) else in_place
        if system in (IN_TURN, IN_TURN_BYTES):
            envelope = [np.zeros(_ENVELOPE_BYTES, np.uint8)]
            call = self._calls.operation(wire, UNARY, GRPCIO, envelope)
        with calls_by_hand(self._link, wire, parts, take, read) as by_hand:

            def in_turn() -> None:
                if call is not None:
                    call()
                by_hand()

            in_turn()
            return time_each(in_turn, count)

    def crowd(
        self, wire: str, system: str, size_bytes: int, seconds: float, clients: int
    ) -> tuple[list[float], float, float]:
        """Lets `clients` threads call for `seconds`, at least once each.

        Returns:
            Seconds of each call, and CPU seconds of this process and of the servers.
        """
        parts = [np.arange(size_bytes, dtype=np.uint8)]

        def work(operation: Callable[[], object]) -> list[float]:
            times = list[float]()
            ended = time.perf_counter()
            while not times or ended < until:
                began = time.perf_counter()
                operation()
                ended = time.perf_counter()
                times.append(ended - began)
            return times

        with contextlib.ExitStack() as by_hand, ThreadPoolExecutor(clients) as pool:
            operations: list[Callable[[], object]]
            if system == BY_HAND:
                operations = [
                    by_hand.enter_context(calls_by_hand(self._link, wire, parts, in_place, read))
                    for _ in range(clients)
                ]
            else:
                operations = [self._calls.operation(wire, UNARY, system, parts)] * clients
            for operation in operations:
                operation()
            here, there = time.process_time(), self.remote_cpu()
            until = time.perf_counter() + seconds
            times = [each for some in pool.map(work, operations) for each in some]
            return times, time.process_time() - here, self.remote_cpu() - there

    def push_pull(self, wire: str, system: str, seconds: float) -> tuple[int, float, float]:
        """Pushes to all servers and pulls from them, again and again, for `seconds`.

        Returns:
            The number of calls, the time.monotonic() of the last end, and CPU seconds.
        """
        beginnings = [each.beginning(wire, system) for each in self._servers]
        calls, cpu = 0, time.process_time()
        ended = began = time.monotonic()
        while not calls or ended < began + seconds:
            for wait in [begin() for begin in beginnings]:
                wait()
            calls, ended = calls + len(beginnings), time.monotonic()
        return calls, ended, time.process_time() - cpu

    def close(self) -> None:
        """Closes the channels."""
        if self._aio is not None:
            self._aio.close()
        for each in self._servers:
            each.close()


def _copies(parts: Parts, case: str) -> Callable[[], None]:
    """Returns a function that copies the payload as often as a call moves it, and reads it."""
    memory = [(part, np.empty_like(part), np.empty_like(part)) for part in parts]
    first = STREAMED if case == REQUESTS else 1
    second = 0 if case == REQUESTS else STREAMED if case in STREAMS else 1

    def copy() -> None:
        for part, there, back in memory:
            for _ in range(first):
                np.copyto(there, part)
                read(there)
            for _ in range(second):
                np.copyto(back, there)
                read(back)

    return copy
