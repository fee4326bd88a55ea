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

from .rpc_names import BYTES, CLIENTS, GRPCIO, MEMCPY, RUNTIME, STREAM, TENSOR, UNARY

STREAMED = 8
"""Messages of a call with a stream of answers."""
_UNLIMITED = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
_TYPES = rpc.Tensor.SerializeToString, rpc.Tensor.FromString


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


def serve(link: Connection, options: dict[str, Any]) -> None:
    """A server of grpcio and two of ours, each on a unix socket and a port."""
    tensors = {"request_deserializer": _TYPES[1], "response_serializer": _TYPES[0]}
    handlers = {
        "unary": grpc.unary_unary_rpc_method_handler(_echo),
        "stream": grpc.unary_stream_rpc_method_handler(_stream),
        "tensor_unary": grpc.unary_unary_rpc_method_handler(_echo_tensor, **tensors),
        "tensor_stream": grpc.unary_stream_rpc_method_handler(_stream_tensors, **tensors),
    }
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(4) as pool:
        targets, servers = {}, []
        runtime = partial(rpc.server, runtime=True)
        for name, make in ((GRPCIO, grpc.server), (BYTES, rpc.server), (RUNTIME, runtime)):
            server = make(pool, options=_UNLIMITED)
            generic = grpc.method_handlers_generic_handler("bench", handlers)
            server.add_generic_rpc_handlers((generic,))
            socket = f"unix:{Path(folder) / name}"
            server.add_insecure_port(socket)
            targets[name] = {
                "shm": socket, "tcp": f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
            }  # fmt: skip
            server.start()
            servers.append(server)
        serve_messages(link, {"targets": lambda: targets, "cpu": time.process_time})
        for server in servers:
            server.stop(0).wait()


class Driver:
    """The client."""

    def __init__(self, link: Connection, options: dict[str, Any]) -> None:
        link.recv()
        self._link = link
        link.send(("targets",))
        targets = link.recv()
        self._channels: dict[tuple[str, str], Any] = {}
        for wire in options["wires"]:
            plain = grpc.insecure_channel(targets[GRPCIO][wire], options=_UNLIMITED)
            ours = rpc.insecure_channel(targets[BYTES][wire], _UNLIMITED, transports=(wire,))
            ours.unary_unary("/bench/unary")(bytes(8))
            if ours.payload != wire:
                raise RuntimeError(f"payload does not travel by {wire}: {ours.payload}")
            frames = rpc.insecure_channel(
                targets[RUNTIME][wire], _UNLIMITED, transports=(wire,), runtime=True
            )
            frames.unary_unary("/bench/unary")(bytes(8))
            if frames.runtime != wire:
                raise RuntimeError(f"calls do not travel by {wire}: {frames.runtime}")
            self._channels |= {
                (wire, GRPCIO): plain, (wire, BYTES): ours, (wire, TENSOR): ours,
                (wire, RUNTIME): frames,
            }  # fmt: skip

    def time(self, wire: str, case: str, system: str, size_bytes: int, count: int) -> list[float]:
        """Seconds of each of so many calls; of a stream of each message."""
        payload = np.arange(size_bytes, dtype=np.uint8)
        operation = self._operation(wire, case, system, payload)
        operation()
        return [each / (STREAMED if case == STREAM else 1) for each in time_each(operation, count)]

    def crowd(
        self, wire: str, system: str, size_bytes: int, seconds: float
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
        with ThreadPoolExecutor(CLIENTS) as pool:
            times = [each for some in pool.map(work, range(CLIENTS)) for each in some]
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
        for channel in self._channels.values():
            channel.close()


def _copies(payload: NDArray[np.uint8], case: str) -> Callable[[], None]:
    """What moving the payload costs at least: a copy into the other's memory, and a look at it."""
    there, back = np.empty_like(payload), np.empty_like(payload)

    def copy() -> None:
        np.copyto(there, payload)
        read(there)
        for _ in range(1 if case == UNARY else STREAMED):
            np.copyto(back, there)
            read(back)

    return copy
