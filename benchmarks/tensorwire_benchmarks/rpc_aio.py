"""The asyncio side of `bench rpc`: servers in an event loop in a thread, and a client's calls."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from tensorwire import rpc

from .rpc_names import AIO, ATTACH_S, BYTES, GRPCIO, GRPCIO_MARKED, RUNTIME, UNARY, server_of
from .rpc_payloads import CODECS, METADATA, Codec, codec_of

UNLIMITED = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
_BOTH = ("shm", "tcp")
_MAKE: dict[str, Callable[..., Any]] = {
    GRPCIO: grpc.aio.server,
    BYTES: partial(rpc.aio.server, transports=_BOTH),
    RUNTIME: partial(rpc.aio.server, transports=_BOTH, runtime=True),
}


def _handler(codec: Codec) -> Any:
    async def unary(request: Any, context: Any) -> Any:
        return codec.unary(request, context)

    return grpc.unary_unary_rpc_method_handler(unary, **codec.served_types())


class AioServers:
    """A server of each system, each on a unix socket and a port.

    Args:
        folder: the folder of the sockets.

    Attributes:
        targets: addresses, by system and wire.
    """

    def __init__(self, folder: Path) -> None:
        self.targets: dict[str, dict[str, str]] = {}
        self._folder = folder
        self._loop = asyncio.new_event_loop()
        self._servers: list[Any] = []
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result()

    async def _start(self) -> None:
        handlers = {f"{codec.name}_{UNARY}": _handler(codec) for codec in CODECS}
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
        """Stops all servers and the event loop."""
        for server in self._servers:
            asyncio.run_coroutine_threadsafe(server.stop(0), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()


class AioCalls:
    """A client's calls, in an event loop that runs only during a call.

    Args:
        targets: of `AioServers`.
        wires: the wires to connect by.

    Raises:
        RuntimeError: a channel does not use its wire.
    """

    def __init__(self, targets: dict[str, dict[str, str]], wires: list[str]) -> None:
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
                    await channel.unary_unary(f"/bench/bytes_{UNARY}")(bytes(8))
                else:
                    await channel.attach(ATTACH_S)
                self._channels[wire, name] = channel
                way = wire if name == GRPCIO else channel.payload
                if name == RUNTIME and way == wire:
                    way = channel.runtime
                if way != wire:
                    raise RuntimeError(f"{name} of asyncio does not travel by {wire}: {way}")

    def time(self, wire: str, system: str, payload: Any, count: int) -> list[float]:
        """Returns the seconds of each of `count` calls, after one that is not counted."""
        channel, codec = self._channels[wire, server_of(system)], codec_of(AIO, system)
        call = channel.unary_unary(f"/bench/{codec.name}_{UNARY}", *codec.types())
        if system == GRPCIO_MARKED:
            call = partial(call, metadata=METADATA)
        message = codec.messages([payload])

        async def timed() -> list[float]:
            samples = []
            for _ in range(count + 1):
                began = time.perf_counter()
                codec.read(await call(message()))
                samples.append(time.perf_counter() - began)
            return samples[1:]

        return self._loop.run_until_complete(timed())

    def close(self) -> None:
        """Closes the channels."""
        self._loop.run_until_complete(self._close())
        self._loop.close()

    async def _close(self) -> None:
        for channel in self._channels.values():
            await channel.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        await asyncio.gather(*others, return_exceptions=True)
