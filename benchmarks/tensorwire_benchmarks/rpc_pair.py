"""The two processes of `bench rpc`: a client that is timed, and the servers that it calls.

See `tensorwire.bench.processes`. Both ends read the whole payload; the servicer gives back what it
got. torch is not imported.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
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

from . import rpc_payloads as payloads
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
    GRPCIO_TENSOR,
    IN_TURN,
    IN_TURN_BYTES,
    MEMCPY,
    REQUESTS,
    RUNTIME,
    RUNTIME_TENSOR,
    SCHEMES,
    STREAM,
    STREAMS,
    TENSOR,
    UNARY,
)

STREAMED = 8
"""Messages of a call with a stream."""
_ENVELOPE_BYTES = 96
"""Of the message that says where payload lies, about."""
_BY_HAND = (BY_HAND, BY_HAND_BYTES, IN_TURN, IN_TURN_BYTES)
_KINDS = {UNARY: "unary_unary", STREAM: "unary_stream", REQUESTS: "stream_unary"}
_TYPES = rpc.Tensor.SerializeToString, rpc.Tensor.FromString
_BUFFERS = payloads.Buffers.SerializeToString, payloads.Buffers.FromString
_TENSORS = payloads.Tensors.SerializeToString, payloads.Tensors.FromString


def read(payload: Any) -> int:
    """Looks at every byte."""
    array = np.frombuffer(payload, np.uint8) if isinstance(payload, bytes) else payload
    return int(np.bitwise_xor.reduce(array.view(np.uint64)))


def _echo(request: bytes, context: Any) -> bytes:
    read(request)
    return request


def _stream(request: bytes, context: Any) -> Iterator[bytes]:
    read(request)
    for _ in range(STREAMED):
        yield request


def _echo_tensor(request: Any, context: Any) -> Any:
    array = rpc.unpack(request)
    read(array)
    return rpc.pack(array)


def _echo_by_hand(request: Any, context: Any) -> Any:
    array = payloads.unpack_by_hand(request)
    read(array)
    return payloads.pack_by_hand(array)


def _stream_tensors(request: Any, context: Any) -> Iterator[Any]:
    array = rpc.unpack(request)
    read(array)
    for _ in range(STREAMED):
        yield rpc.pack(array)


def _take(requests: Iterator[bytes], context: Any) -> bytes:
    _read_all(requests)
    return b""


def _take_tensors(requests: Iterator[Any], context: Any) -> Any:
    _read_all(map(rpc.unpack, requests))
    return rpc.Tensor()


def _read_all(parts: Any) -> None:
    for each in parts:
        read(each)


def _echo_buffers(request: Any, context: Any) -> Any:
    _read_all(request.buffers)
    return request


def _echo_tensors(request: Any, context: Any) -> Any:
    arrays = payloads.arrays(request)
    _read_all(arrays)
    return payloads.of_tensors(arrays)


def _coded(types: Any) -> dict[str, Any]:
    return {"request_deserializer": types[1], "response_serializer": types[0]}


def started(
    system: str, pool: ThreadPoolExecutor, handlers: Mapping[str, Any], socket: Path
) -> tuple[Any, dict[str, str]]:
    """A server of a system on a unix socket and a port, and its targets by wire."""
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
    """A channel of a system."""
    if system in (GRPCIO, GRPCIO_MARKED, GRPCIO_TENSOR):
        return grpc.insecure_channel(target, options=UNLIMITED)
    runtime = system in (RUNTIME, RUNTIME_TENSOR)
    return rpc.insecure_channel(target, UNLIMITED, transports=(wire,), runtime=runtime)


def serve(link: Connection, options: dict[str, Any]) -> None:
    """A server of grpcio and two of ours, and three of asyncio; on a unix socket and a port."""
    tensors = _coded(_TYPES)
    handlers = {
        "unary": grpc.unary_unary_rpc_method_handler(_echo),
        "stream": grpc.unary_stream_rpc_method_handler(_stream),
        "tensor_unary": grpc.unary_unary_rpc_method_handler(_echo_tensor, **tensors),
        "by_hand_unary": grpc.unary_unary_rpc_method_handler(_echo_by_hand, **tensors),
        "tensor_stream": grpc.unary_stream_rpc_method_handler(_stream_tensors, **tensors),
        "requests": grpc.stream_unary_rpc_method_handler(_take),
        "tensor_requests": grpc.stream_unary_rpc_method_handler(_take_tensors, **tensors),
        "buffers": grpc.unary_unary_rpc_method_handler(_echo_buffers, **_coded(_BUFFERS)),
        "tensors": grpc.unary_unary_rpc_method_handler(_echo_tensors, **_coded(_TENSORS)),
    }
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(4) as pool:
        targets, servers = {}, []
        for name in (GRPCIO, BYTES, RUNTIME):
            server, targets[name] = started(name, pool, handlers, Path(folder) / name)
            servers.append(server)
        aio = AioServers(Path(folder), read, STREAMED)
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
    """What a client calls, by a channel of each system, which is made when it is first asked for.

    A channel each: grpcio's flow control goes by what a connection has carried lately.

    Args:
        targets: of a server, by system and wire.
    """

    def __init__(self, targets: dict[str, dict[str, str]]) -> None:
        self._targets = targets
        self._channels: dict[tuple[str, str], Any] = {}

    def _channel(self, wire: str, system: str) -> Any:
        """RuntimeError: payload or calls do not travel as they should."""
        channel = self._channels.get((wire, system))
        if channel is None:
            channel = self._channels[wire, system] = self._connect(wire, system)
        return channel

    def _connect(self, wire: str, system: str) -> Any:
        of_grpcio = system in (GRPCIO, GRPCIO_MARKED, GRPCIO_TENSOR)
        runtime = system in (RUNTIME, RUNTIME_TENSOR)
        server = GRPCIO if of_grpcio else RUNTIME if runtime else BYTES
        channel = connect(self._targets[server][wire], wire, system)
        if of_grpcio:
            return channel
        channel.attach(ATTACH_S)
        way = channel.runtime if runtime else channel.payload
        if way != wire:
            channel.close()
            raise RuntimeError(f"{system} does not travel by {wire}: {way}")
        return channel

    def simple(
        self, wire: str, case: str, system: str, payload: NDArray[np.uint8]
    ) -> Callable[[], object]:
        """A call with one buffer, or a stream of it."""
        channel = self._channel(wire, system)
        if system == TENSOR:
            call = getattr(channel, _KINDS[case])(f"/bench/tensor_{case}", *_TYPES)
            if case == UNARY:
                return lambda: read(rpc.unpack(call(rpc.pack(payload))))
            if case == REQUESTS:
                return lambda: call(rpc.pack(payload) for _ in range(STREAMED))
            return lambda: [read(rpc.unpack(each)) for each in call(rpc.pack(payload))]
        if system == GRPCIO_TENSOR:
            call = channel.unary_unary("/bench/by_hand_unary", *_TYPES)
            pack, unpack = payloads.pack_by_hand, payloads.unpack_by_hand
            return lambda: read(unpack(call(pack(payload))))
        call, data = getattr(channel, _KINDS[case])(f"/bench/{case}"), payload.tobytes()
        if system == GRPCIO_MARKED:
            return lambda: read(call(data, metadata=payloads.METADATA))
        if case == UNARY:
            return lambda: read(call(data))
        if case == REQUESTS:
            return lambda: call(data for _ in range(STREAMED))
        return lambda: [read(each) for each in call(data)]

    def fresh(self, wire: str, system: str, data: bytes) -> Callable[[], object]:
        """A call by a channel of its own."""
        target = self._targets[system][wire]

        def call() -> None:
            with connect(target, wire, system) as channel:
                read(channel.unary_unary("/bench/unary")(data))

        return call

    def scheme(self, wire: str, case: str, system: str) -> Callable[[], object]:
        """A call with ten buffers."""
        parts = payloads.buffers(case)
        channel = self._channel(wire, system)
        if system in (TENSOR, RUNTIME_TENSOR):
            call = channel.unary_unary("/bench/tensors", *_TENSORS)
            return lambda: _read_all(payloads.arrays(call(payloads.of_tensors(parts))))
        call = channel.unary_unary("/bench/buffers", *_BUFFERS)
        return lambda: _read_all(call(payloads.of_bytes(parts)).buffers)

    def begin_scheme(self, wire: str, case: str, system: str) -> Callable[[], Callable[[], None]]:
        """Begins a call with ten buffers; what that gives back waits for it and reads it."""
        parts = payloads.buffers(case)
        channel = self._channel(wire, system)
        arrays = system in (TENSOR, RUNTIME_TENSOR)
        method, types = ("tensors", _TENSORS) if arrays else ("buffers", _BUFFERS)
        call = channel.unary_unary(f"/bench/{method}", *types)

        def begin() -> Callable[[], None]:
            message = payloads.of_tensors(parts) if arrays else payloads.of_bytes(parts)
            future = call.future(message)
            if arrays:
                return lambda: _read_all(payloads.arrays(future.result()))
            return lambda: _read_all(future.result().buffers)

        return begin

    def close(self) -> None:
        """Closes the channels."""
        for channel in self._channels.values():
            channel.close()


class Driver:
    """The client."""

    def __init__(self, link: Connection, options: dict[str, Any]) -> None:
        link.recv()
        self._link = link
        self._targets: dict[str, dict[str, str]]
        self._targets, of_aio = self._ask("targets")
        self._calls = ClientCalls(self._targets)
        self._aio = AioCalls(of_aio, options["wires"], read)

    def _ask(self, what: str) -> Any:
        self._link.send((what,))
        return self._link.recv()

    def targets(self) -> dict[str, dict[str, str]]:
        """Of the servers that are not of asyncio, by system and wire."""
        return self._targets

    def remote_cpu(self) -> float:
        """Seconds of CPU time of the servers' process so far."""
        return float(self._ask("cpu"))

    def time(self, wire: str, case: str, system: str, size_bytes: int, count: int) -> list[float]:
        """Seconds of each of so many calls; of a stream of each message."""
        payload = np.arange(size_bytes, dtype=np.uint8)
        if system in _BY_HAND:
            parts = payloads.buffers(case) if case in SCHEMES else [payload]
            return self._time_by_hand(wire, system, parts, count)
        if case in (AIO, AIO_STREAM) and system != MEMCPY:
            times = self._aio.time(wire, case, system, payload, count)
        else:
            if case in SCHEMES:
                operation = self._scheme(wire, case, system)
            elif case == CHANNEL:
                operation = self._calls.fresh(wire, system, payload.tobytes())
            elif system == MEMCPY:
                operation = _copies(payload, case)
            else:
                operation = self._calls.simple(wire, case, system, payload)
            operation()
            times = time_each(operation, count)
        return [each / (STREAMED if case in STREAMS else 1) for each in times]

    def _time_by_hand(self, wire: str, system: str, parts: list[Any], count: int) -> list[float]:
        call, take = None, as_bytes if system in (BY_HAND_BYTES, IN_TURN_BYTES) else in_place
        if system in (IN_TURN, IN_TURN_BYTES):
            call = self._calls.simple(wire, UNARY, GRPCIO, np.zeros(_ENVELOPE_BYTES, np.uint8))
        with calls_by_hand(self._link, wire, parts, take, read) as by_hand:

            def in_turn() -> None:
                if call is not None:
                    call()
                by_hand()

            in_turn()
            return time_each(in_turn, count)

    def _scheme(self, wire: str, case: str, system: str) -> Callable[[], object]:
        if system == MEMCPY:
            each = [_copies(part, UNARY) for part in payloads.buffers(case)]
            return lambda: [copy() for copy in each]
        return self._calls.scheme(wire, case, system)

    def crowd(
        self, wire: str, system: str, size_bytes: int, seconds: float, clients: int
    ) -> tuple[list[float], float, float]:
        """Many threads call for so long: (seconds of each call, CPU time here, CPU time there).

        Each calls once at least. The CPU time is that of all threads, by calls.
        """
        payload = np.arange(size_bytes, dtype=np.uint8)

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
                    by_hand.enter_context(
                        calls_by_hand(self._link, wire, [payload], in_place, read)
                    )
                    for _ in range(clients)
                ]
            else:
                operations = [self._calls.simple(wire, UNARY, system, payload)] * clients
            for operation in operations:
                operation()
            here, there = time.process_time(), self.remote_cpu()
            until = time.perf_counter() + seconds
            times = [each for some in pool.map(work, operations) for each in some]
            here, there = time.process_time() - here, self.remote_cpu() - there
        return times, here / len(times), there / len(times)

    def close(self) -> None:
        """Closes the channels."""
        self._aio.close()
        self._calls.close()


def _copies(payload: NDArray[np.uint8], case: str) -> Callable[[], None]:
    """What moving the payload costs at least: a copy into the other's memory, and a look at it."""
    there, back = np.empty_like(payload), np.empty_like(payload)

    def copy_there() -> None:
        for _ in range(STREAMED):
            np.copyto(there, payload)
            read(there)

    def copy() -> None:
        np.copyto(there, payload)
        read(there)
        for _ in range(STREAMED if case in STREAMS else 1):
            np.copyto(back, there)
            read(back)

    return copy_there if case == REQUESTS else copy
