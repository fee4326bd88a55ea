"""torch RPC over TensorPipe: a call whose argument or result is the tensor.

Measured: `rpc_sync` of a function that keeps the tensor (write) or returns one (read), until the
call returns. On one host TensorPipe picks its shared-memory transport and CMA channel; for the tcp
wire it is limited to its libuv transport.
"""

from __future__ import annotations

import importlib
import os
import warnings
from multiprocessing.connection import Connection
from typing import Any

from tensorwire.bench.processes import serve_messages
from tensorwire_benchmarks.rivals.base import Operation, RivalDriver, free_port

_held: dict[str, Any] = {}


def keep(tensor: Any) -> None:
    """Runs in the target: takes a pushed tensor as the parameter to use from now on."""
    _held["tensor"] = tensor


def prepare_target(size_bytes: int) -> None:
    """Runs in the target: makes the tensor that `fetch` returns."""
    torch = importlib.import_module("torch")
    _held["tensor"] = torch.ones(size_bytes, dtype=torch.uint8)


def fetch() -> Any:
    """Runs in the target: returns the tensor."""
    return _held["tensor"]


def _join_pair(name: str, rank: int, port: int, wire: str) -> tuple[Any, Any]:
    """Joins the two processes; returns torch and its RPC module."""
    os.environ.setdefault("TP_SOCKET_IFNAME", "lo")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    warnings.simplefilter("ignore")
    torch = importlib.import_module("torch")
    rpc = importlib.import_module("torch.distributed.rpc")
    limits = {"_transports": ["uv"], "_channels": ["basic"]} if wire == "tcp" else {}
    rpc.init_rpc(
        name,
        rank=rank,
        world_size=2,
        rpc_backend_options=rpc.TensorPipeRpcBackendOptions(
            init_method=f"tcp://127.0.0.1:{port}", num_worker_threads=4, rpc_timeout=60, **limits
        ),
    )
    return torch, rpc


class Driver(RivalDriver):
    """The caller."""

    def __init__(self, link: Connection, options: dict[str, Any]) -> None:
        super().__init__(link, options)
        port = free_port()
        link.send(("join", port, options["wire"]))
        self._torch, self._rpc = _join_pair("driver", 0, port, options["wire"])
        path = "uv transport, basic channel" if options["wire"] == "tcp" else "its own choice"
        self._note = f"rpc_sync over TensorPipe, {path}"

    def connect_case(self, case: str, size_bytes: int) -> tuple[Operation, str]:
        call = self._rpc.rpc_sync
        call("target", prepare_target, args=(size_bytes,))
        tensor = self._torch.ones(size_bytes, dtype=self._torch.uint8)
        if case == "write":
            return (lambda: call("target", keep, args=(tensor,))), self._note
        return (lambda: call("target", fetch)), self._note

    def close(self) -> None:
        self.link.send(("stop",))
        os._exit(0)  # shutting the agent down would wait for the other side


def serve(link: Connection, options: dict[str, Any]) -> None:
    """Runs the callee."""
    del options

    def join(port: int, wire: str) -> None:
        _join_pair("target", 1, port, wire)

    serve_messages(link, {"join": join})
    os._exit(0)
