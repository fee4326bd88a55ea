"""The two processes of `bench rpc`: a client that is timed, and the servers that it calls.

See `tensorwire.bench.processes`. Both ends read the whole payload; the servicer gives back what it
got. torch is not imported.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
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
from .rpc_names import (
    AIO,
    AIO_STREAM,
    BYTES,
    GRPCIO,
    MEMCPY,
    RUNTIME,
    RUNTIME_TENSOR,
    SCHEMES,
    STREAM,
    TENSOR,
    UNARY,
)

STREAMED = 8
"""Messages of a call with a stream of answers."""
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
    array = rpc.array(request)
    read(array)
    return rpc.tensor(array)


def _stream_tensors(request: Any, context: Any) -> Iterator[Any]:
    array = rpc.array(request)
    read(array)
    for _ in range(STREAMED):
        yield rpc.tensor(array)


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


def serve(link: Connection, options: dict[str, Any]) -> None:
    """A server of grpcio and two of ours, and three of asyncio; on a unix socket and a port."""
    tensors = _coded(_TYPES)
    handlers = {
        "unary": grpc.unary_unary_rpc_method_handler(_echo),
        "stream": grpc.unary_stream_rpc_method_handler(_stream),
        "tensor_unary": grpc.unary_unary_rpc_method_handler(_echo_tensor, **tensors),
        "tensor_stream": grpc.unary_stream_rpc_method_handler(_stream_tensors, **tensors),
        "buffers": grpc.unary_unary_rpc_method_handler(_echo_buffers, **_coded(_BUFFERS)),
        "tensors": grpc.unary_unary_rpc_method_handler(_echo_tensors, **_coded(_TENSORS)),
    }
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(4) as pool:
        targets, servers = {}, []
        runtime = partial(rpc.server, runtime=True)
        for name, make in ((GRPCIO, grpc.server), (BYTES, rpc.server), (RUNTIME, runtime)):
            server = make(pool, options=UNLIMITED)
            generic = grpc.method_handlers_generic_handler("bench", handlers)
            server.add_generic_rpc_handlers((generic,))
            socket = f"unix:{Path(folder) / name}"
            server.add_insecure_port(socket)
            targets[name] = {
                "shm": socket, "tcp": f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
            }  # fmt: skip
            server.start()
            servers.append(server)
        aio = AioServers(Path(folder), read, STREAMED)
        all_targets = targets, aio.targets
        serve_messages(link, {"targets": lambda: all_targets, "cpu": time.process_time})
        aio.close()
        for server in servers:
            server.stop(0).wait()


class Driver:
    """The client."""

    def __init__(self, link: Connection, options: dict[str, Any]) -> None:
        link.recv()
        self._link = link
        link.send(("targets",))
        targets, of_aio = link.recv()
        self._channels: dict[tuple[str, str], Any] = {}
        for wire in options["wires"]:
            plain = grpc.insecure_channel(targets[GRPCIO][wire], options=UNLIMITED)
            ours = rpc.insecure_channel(targets[BYTES][wire], UNLIMITED, transports=(wire,))
            ours.unary_unary("/bench/unary")(bytes(8))
            if ours.payload != wire:
                raise RuntimeError(f"payload does not travel by {wire}: {ours.payload}")
            frames = rpc.insecure_channel(
                targets[RUNTIME][wire], UNLIMITED, transports=(wire,), runtime=True
            )
            frames.unary_unary("/bench/unary")(bytes(8))
            if frames.runtime != wire:
                raise RuntimeError(f"calls do not travel by {wire}: {frames.runtime}")
            self._channels |= {
                (wire, GRPCIO): plain, (wire, BYTES): ours, (wire, TENSOR): ours,
                (wire, RUNTIME): frames, (wire, RUNTIME_TENSOR): frames,
            }  # fmt: skip
        self._aio = AioCalls(of_aio, options["wires"], read)

    def time(self, wire: str, case: str, system: str, size_bytes: int, count: int) -> list[float]:
        """Seconds of each of so many calls; of a stream of each message."""
        payload = np.arange(size_bytes, dtype=np.uint8)
        if case in (AIO, AIO_STREAM) and system != MEMCPY:
            times = self._aio.time(wire, case, system, payload.tobytes(), count)
        else:
            if case in SCHEMES:
                operation = self._scheme(wire, case, system)
            else:
                operation = self._operation(wire, case, system, payload)
            operation()
            times = time_each(operation, count)
        return [each / (STREAMED if case in (STREAM, AIO_STREAM) else 1) for each in times]

    def _scheme(self, wire: str, case: str, system: str) -> Callable[[], object]:
        parts = payloads.buffers(case)
        if system == MEMCPY:
            each = [_copies(part, UNARY) for part in parts]
            return lambda: [copy() for copy in each]
        channel = self._channels[wire, system]
        if system in (TENSOR, RUNTIME_TENSOR):
            call = channel.unary_unary("/bench/tensors", *_TENSORS)
            return lambda: _read_all(payloads.arrays(call(payloads.of_tensors(parts))))
        call = channel.unary_unary("/bench/buffers", *_BUFFERS)
        return lambda: _read_all(call(payloads.of_bytes(parts)).buffers)

    def crowd(
        self, wire: str, system: str, size_bytes: int, seconds: float, clients: int
    ) -> tuple[list[float], float, float]:
        """Many threads call for so long: (seconds of each call, CPU time here, CPU time there).

        The CPU time is that of all threads, by calls.
        """
        operation = self._operation(wire, UNARY, system, np.arange(size_bytes, dtype=np.uint8))
        operation()

        def work(_: int) -> list[float]:
            times = []
            while time.perf_counter() < until:
                began = time.perf_counter()
                operation()
                times.append(time.perf_counter() - began)
            return times

        here, there = time.process_time(), self._remote_cpu()
        until = time.perf_counter() + seconds
        with ThreadPoolExecutor(clients) as pool:
            times = [each for some in pool.map(work, range(clients)) for each in some]
        here, there = time.process_time() - here, self._remote_cpu() - there
        return times, here / len(times), there / len(times)

    def _remote_cpu(self) -> float:
        self._link.send(("cpu",))
        return float(self._link.recv())

    def _operation(
        self, wire: str, case: str, system: str, payload: NDArray[np.uint8]
    ) -> Callable[[], object]:
        if system == MEMCPY:
            return _copies(payload, case)
        channel = self._channels[wire, system]
        kind = channel.unary_unary if case == UNARY else channel.unary_stream
        if system == TENSOR:
            call = kind(f"/bench/tensor_{case}", *_TYPES)
            if case == UNARY:
                return lambda: read(rpc.array(call(rpc.tensor(payload))))
            return lambda: [read(rpc.array(each)) for each in call(rpc.tensor(payload))]
        call, data = kind(f"/bench/{case}"), payload.tobytes()
        if case == UNARY:
            return lambda: read(call(data))
        return lambda: [read(each) for each in call(data)]

    def close(self) -> None:
        """Closes the channels."""
        self._aio.close()
        for channel in self._channels.values():
            channel.close()


def _copies(payload: NDArray[np.uint8], case: str) -> Callable[[], None]:
    """What moving the payload costs at least: a copy into the other's memory, and a look at it."""
    there, back = np.empty_like(payload), np.empty_like(payload)

    def copy() -> None:
        np.copyto(there, payload)
        read(there)
        for _ in range(STREAMED if case in (STREAM, AIO_STREAM) else 1):
            np.copyto(back, there)
            read(back)

    return copy
