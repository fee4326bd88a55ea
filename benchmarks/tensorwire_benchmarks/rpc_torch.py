"""torch RPC in `bench rpc`: `rpc_sync` of a function that gives back the tensor that it got."""

from __future__ import annotations

import importlib
import os
from multiprocessing.connection import Connection
from typing import Any

from tensorwire.bench.harness import time_each
from tensorwire.bench.processes import serve_messages

from .rivals.base import free_port
from .rivals.torch_rpc import join_pair


def _read(tensor: Any) -> int:
    numpy = importlib.import_module("numpy")
    return int(numpy.bitwise_xor.reduce(tensor.numpy().view(numpy.uint64)))


def echo(tensor: Any) -> Any:
    """In the target: reads the payload, and gives it back."""
    _read(tensor)
    return tensor


class Driver:
    """The client, on one wire."""

    def __init__(self, link: Connection, options: dict[str, Any]) -> None:
        self._link = link
        link.recv()
        port, wire = free_port(), options["wire"]
        link.send(("join", port, wire))
        self._torch, self._rpc = join_pair("driver", 0, port, wire)

    def time(self, size_bytes: int, count: int) -> list[float]:
        """Seconds of each of so many calls, after one that is not counted."""
        tensor = self._torch.arange(size_bytes, dtype=self._torch.uint8)
        call = self._rpc.rpc_sync

        def operation() -> None:
            _read(call("target", echo, args=(tensor,)))

        operation()
        return time_each(operation, count)

    def close(self) -> None:
        """Ends it."""
        self._link.send(("stop",))
        os._exit(0)  # as in the rival


def serve(link: Connection, options: dict[str, Any]) -> None:
    """The server."""

    def join(port: int, wire: str) -> None:
        join_pair("target", 1, port, wire)

    serve_messages(link, {"join": join})
    os._exit(0)
