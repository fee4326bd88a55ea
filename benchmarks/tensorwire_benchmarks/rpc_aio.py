"""The asyncio side of `bench rpc`: servers in an event loop of a thread, and a client's calls."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import numpy as np
from numpy.typing import NDArray

from tensorwire import rpc

from . import rpc_payloads as payloads
from .rpc_names import (
    AIO_STREAM,
    ATTACH_S,
    BYTES,
    GRPCIO,
    GRPCIO_MARKED,
    GRPCIO_TENSOR,
    RUNTIME,
    TENSOR,
)

UNLIMITED = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
_BOTH = ("shm", "tcp")
_TENSORS = rpc.Tensor.SerializeToString, rpc.Tensor.FromString
_SERVER = {GRPCIO_MARKED: GRPCIO, GRPCIO_TENSOR: GRPCIO, TENSOR: BYTES}
"""Whose channel a system has, where it is another one's."""
_MAKE: dict[str, Callable[..., Any]] = {
    GRPCIO: grpc.aio.server,
    BYTES: partial(rpc.aio.server, transports=_BOTH),
    RUNTIME: partial(rpc.aio.server, transports=_BOTH, runtime=True),
}


class AioServers:
    """A server of each system, each on a unix socket and a port.

    Args:
        folder: of the sockets.
        read: looks at every byte of a payload.
        streamed: messages of a stream of answers.

    Attributes:
        targets: by system and wire.
    """

    def __init__(self, folder: Path, read: Callable[[Any], object], streamed: int) -> None:
        self.targets: dict[str, dict[str, str]] = {}
        self._folder, self._read, self._streamed = folder, read, streamed
        self._loop = asyncio.new_event_loop()
        self._servers: list[Any] = []
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result()

    async def _echo(self, request: bytes, context: Any) -> bytes:
        self._read(request)
        return request

    async def _echo_tensor(self, request: Any, context: Any) -> Any:
        array = rpc.unpack(request)
        self._read(array)
        return rpc.pack(array)

    async def _echo_by_hand(self, request: Any, context: Any) -> Any:
        array = payloads.unpack_by_hand(request)
        self._read(array)
        return payloads.pack_by_hand(array)

    async def _stream(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        self._read(request)
        for _ in range(self._streamed):
            yield request

    async def _start(self) -> None:
        handlers = {
            "aio": grpc.unary_unary_rpc_method_handler(self._echo),
            "aio_tensor": grpc.unary_unary_rpc_method_handler(
                self._echo_tensor,
                request_deserializer=_TENSORS[1],
                response_serializer=_TENSORS[0],
            ),
            "aio_by_hand": grpc.unary_unary_rpc_method_handler(
                self._echo_by_hand,
                request_deserializer=_TENSORS[1],
                response_serializer=_TENSORS[0],
            ),
            "aio_stream": grpc.unary_stream_rpc_method_handler(self._stream),
        }
        for name, make in _MAKE.items():
            server = make(options=UNLIMITED)
            generic = grpc.method_handlers_generic_handler("bench", handlers)
            server.add_generic_rpc_handlers((generic,))
            socket = f"unix:{self._folder / name}.aio"
            server.add_insecure_port(socket)
            port = server.add_insecure_port("127.0.0.1:0")
            self.targets[name] = {"shm": socket, "tcp": f"127.0.0.1:{port}"}
            await server.start()
            self._servers.append(server)

    def close(self) -> None:
        """Stops all."""
        for server in self._servers:
            asyncio.run_coroutine_threadsafe(server.stop(0), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()


class AioCalls:
    """A client's calls, in an event loop that runs while they are made.

    Args:
        targets: of `AioServers`.
        wires: that are asked for.
        read: looks at every byte of a payload.
    """

    def __init__(
        self, targets: dict[str, dict[str, str]], wires: list[str], read: Callable[[Any], object]
    ) -> None:
        self._read = read
        self._loop = asyncio.new_event_loop()
        self._channels: dict[tuple[str, str], Any] = {}
        self._loop.run_until_complete(self._connect(targets, wires))

    async def _connect(self, targets: dict[str, dict[str, str]], wires: list[str]) -> None:
        for wire in wires:
            for name, where in targets.items():
                if name == GRPCIO:
                    channel = grpc.aio.insecure_channel(where[wire], options=UNLIMITED)
                else:
                    channel = rpc.aio.insecure_channel(
                        where[wire], UNLIMITED, transports=(wire,), runtime=name == RUNTIME
                    )
                if name == GRPCIO:
                    await channel.unary_unary("/bench/aio")(bytes(8))
                else:
                    await channel.attach(ATTACH_S)
                self._channels[wire, name] = channel
                way = wire if name == GRPCIO else channel.payload
                if name == RUNTIME and way == wire:
                    way = channel.runtime
                if way != wire:
                    raise RuntimeError(f"{name} of asyncio does not travel by {wire}: {way}")

    def time(
        self, wire: str, case: str, system: str, payload: NDArray[np.uint8], count: int
    ) -> list[float]:
        """Seconds of each of so many calls, after one that is not counted."""
        channel = self._channels[wire, _SERVER.get(system, system)]
        data = payload.tobytes()
        operation: Callable[[], Awaitable[None]]
        if case == AIO_STREAM:
            operation = partial(self._stream, channel.unary_stream("/bench/aio_stream"), data)
        elif system == TENSOR:
            call = channel.unary_unary("/bench/aio_tensor", *_TENSORS)
            operation = partial(self._tensor, call, payload, rpc.pack, rpc.unpack)
        elif system == GRPCIO_TENSOR:
            call = channel.unary_unary("/bench/aio_by_hand", *_TENSORS)
            ways = payloads.pack_by_hand, payloads.unpack_by_hand
            operation = partial(self._tensor, call, payload, *ways)
        else:
            call = channel.unary_unary("/bench/aio")
            if system == GRPCIO_MARKED:
                call = partial(call, metadata=payloads.METADATA)
            operation = partial(self._unary, call, data)
        return self._loop.run_until_complete(_timed(operation, count))

    async def _unary(self, call: Any, data: bytes) -> None:
        self._read(await call(data))

    async def _tensor(
        self,
        call: Any,
        payload: NDArray[np.uint8],
        pack: Callable[[Any], Any],
        unpack: Callable[[Any], Any],
    ) -> None:
        self._read(unpack(await call(pack(payload))))

    async def _stream(self, call: Any, data: bytes) -> None:
        async for each in call(data):
            self._read(each)

    def close(self) -> None:
        """Closes the channels."""
        self._loop.run_until_complete(self._close())
        self._loop.close()

    async def _close(self) -> None:
        for channel in self._channels.values():
            await channel.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        await asyncio.gather(*others, return_exceptions=True)


async def _timed(operation: Callable[[], Awaitable[None]], count: int) -> list[float]:
    await operation()
    samples = []
    for _ in range(count):
        began = time.perf_counter()
        await operation()
        samples.append(time.perf_counter() - began)
    return samples
