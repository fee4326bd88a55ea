"""The two processes of `bench rpc`: a client that is timed, and the servers that it calls.

See `tensorwire.bench.processes`. Both ends read the whole payload; the servicer returns its
request. torch is not imported.
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
    ATTACH_S,
    BY_HAND,
    BY_HAND_BYTES,
    BYTES,
    CHANNEL,
    CLIENTS,
    GRPCIO,
    GRPCIO_MARKED,
    IN_TURN,
    IN_TURN_BYTES,
    MEMCPY,
    RUNTIME,
    SKEW,
    SKEW_SIZES,
    STREAM,
    STREAMED,
    UNARY,
    server_of,
)
from .rpc_payloads import CODECS, METADATA, codec_of, read

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
    handlers = {
        f"{codec.name}_{kind}": make(getattr(codec, kind), **codec.served_types())
        for codec in CODECS
        for kind, make in (
            (UNARY, grpc.unary_unary_rpc_method_handler),
            (STREAM, grpc.unary_stream_rpc_method_handler),
        )
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

    def operation(self, wire: str, case: str, system: str, parts: Parts) -> Callable[[], object]:
        """Returns a function that makes a call, or a stream, with these buffers."""
        codec, channel = codec_of(case, system), self._channel(wire, system)
        kind, make = UNARY, channel.unary_unary
        if case == STREAM:
            kind, make = STREAM, channel.unary_stream
        call = make(f"/bench/{codec.name}_{kind}", *codec.types())
        message = codec.messages(parts)
        if system == GRPCIO_MARKED:
            call = partial(call, metadata=METADATA)
        if case != STREAM:
            return lambda: codec.read(call(message()))

        def stream() -> None:
            for each in call(message()):
                codec.read(each)

        return stream

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
        targets, of_aio = self._ask("targets")
        self._aio = AioCalls(of_aio, options["wires"])
        self._calls = ClientCalls(targets)

    def _ask(self, what: str) -> Any:
        self._link.send((what,))
        return self._link.recv()

    def time(self, wire: str, case: str, system: str, size_bytes: int, count: int) -> list[float]:
        """Returns the seconds of each of `count` calls; of streams, per message."""
        sizes = SKEW_SIZES if case == SKEW else (size_bytes,)
        parts = [np.arange(size, dtype=np.uint8) for size in sizes]
        if system in _BY_HAND:
            return self._time_by_hand(wire, system, parts, count)
        if case == AIO and system != MEMCPY:
            return self._aio.time(wire, system, parts[0], count)
        if case == CHANNEL:
            operation = self._calls.fresh(wire, system, parts[0].tobytes())
        elif system == MEMCPY:
            operation = _copies(parts, STREAMED if case == STREAM else 1)
        else:
            operation = self._calls.operation(wire, case, system, parts)
        operation()
        times = time_each(operation, count)
        return [each / (STREAMED if case == STREAM else 1) for each in times]

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
        self, wire: str, system: str, size_bytes: int, seconds: float
    ) -> tuple[list[float], float, float]:
        """Lets `CLIENTS` threads call for `seconds`, at least once each.

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

        with contextlib.ExitStack() as by_hand, ThreadPoolExecutor(CLIENTS) as pool:
            operations: list[Callable[[], object]]
            if system == BY_HAND:
                operations = [
                    by_hand.enter_context(calls_by_hand(self._link, wire, parts, in_place, read))
                    for _ in range(CLIENTS)
                ]
            else:
                operations = [self._calls.operation(wire, UNARY, system, parts)] * CLIENTS
            for operation in operations:
                operation()
            here, there = time.process_time(), self._ask("cpu")
            until = time.perf_counter() + seconds
            times = [each for some in pool.map(work, operations) for each in some]
            return times, time.process_time() - here, self._ask("cpu") - there

    def close(self) -> None:
        """Closes the channels."""
        self._aio.close()
        self._calls.close()


def _copies(parts: Parts, answers: int) -> Callable[[], None]:
    """Returns a function that copies the payload as often as a call moves it, and reads it."""
    memory = [(part, np.empty_like(part), np.empty_like(part)) for part in parts]

    def copy() -> None:
        for part, there, back in memory:
            np.copyto(there, part)
            read(there)
            for _ in range(answers):
                np.copyto(back, there)
                read(back)

    return copy
