"""gloo as torch.distributed offers it: send and a one-byte acknowledgement; request and receive.

Measured: `dist.send` of a contiguous tensor until the target has received it into its own tensor
and acknowledged it. gloo has only TCP, so the choice of the wire does not matter.
"""

from __future__ import annotations

import importlib
import os
from multiprocessing.connection import Connection
from typing import Any

from tensorwire.bench.processes import serve_messages
from tensorwire_benchmarks.rivals.base import Operation, RivalDriver, free_port

NOTE = "torch.distributed send/recv over loopback TCP, one-byte ack"


def _join(rank: int, port: int) -> tuple[Any, Any]:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch = importlib.import_module("torch")
    distributed = importlib.import_module("torch.distributed")
    distributed.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2
    )
    return torch, distributed


class Driver(RivalDriver):
    """Rank 0: pushes to and pulls from rank 1."""

    def __init__(self, link: Connection, options: dict[str, Any]) -> None:
        super().__init__(link, options)
        port = free_port()
        link.send(("join", port))
        self._torch, self._distributed = _join(0, port)
        self._byte = self._torch.zeros(1, dtype=self._torch.uint8)

    def connect_case(self, case: str, size_bytes: int) -> tuple[Operation, str]:
        tensor = self._torch.ones(size_bytes, dtype=self._torch.uint8)
        byte, distributed = self._byte, self._distributed
        self.link.send(("prepare", case, size_bytes))

        def write() -> None:
            distributed.send(tensor, 1)
            distributed.recv(byte, 1)

        def read() -> None:
            distributed.send(byte, 1)
            distributed.recv(tensor, 1)

        return (write if case == "write" else read), NOTE

    def announce(self, count: int) -> None:
        self.link.send(("run", count))

    def close(self) -> None:
        self.link.send(("stop",))
        os._exit(0)  # destroying the group would wait for the other side


def serve(link: Connection, options: dict[str, Any]) -> None:
    """Runs rank 1, the target."""
    del options
    state: dict[str, Any] = {}

    def join(port: int) -> None:
        state["torch"], state["distributed"] = _join(1, port)
        state["byte"] = state["torch"].zeros(1, dtype=state["torch"].uint8)

    def prepare(case: str, size_bytes: int) -> None:
        state["case"] = case
        state["tensor"] = state["torch"].ones(size_bytes, dtype=state["torch"].uint8)

    def run(count: int) -> None:
        receive, send = state["distributed"].recv, state["distributed"].send
        tensor, byte = state["tensor"], state["byte"]
        arriving, leaving = (tensor, byte) if state["case"] == "write" else (byte, tensor)
        for _ in range(count):
            receive(arriving, 0)
            send(leaving, 0)

    serve_messages(link, {"join": join, "prepare": prepare, "run": run})
    os._exit(0)
