"""NIXL between two processes that use one GPU: a prepared transfer over UCX's CUDA path.

Measured as `nixl.py` measures memory of the host: `transfer` of a handle made once, polled until it
is done. Memory of the GPU is a torch tensor, registered as VRAM; pinned memory is one that torch
has pinned. UCX chooses its transports (CUDA IPC between processes of one host).
So far this was run with memory of the host only, in place of that of a GPU.
"""

from __future__ import annotations

import os
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from tensorwire.bench.processes import serve_messages
from tensorwire_benchmarks.rivals import nixl
from tensorwire_benchmarks.rivals.base import Operation, RivalDriver

_KINDS = {"gpu": "VRAM", "pinned": "DRAM", "host": "DRAM"}


def _agent(name: str) -> Any:
    os.environ.setdefault("UCX_LOG_LEVEL", "error")
    os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")
    api = nixl.module()
    agent = api.nixl_agent(name, api.nixl_agent_config(enable_prog_thread=True, backends=[]))
    agent.create_backend("UCX", {})
    return agent


def _memory(kind: str, size_bytes: int) -> tuple[Any, int]:
    """Memory that was written to, and its address."""
    import torch

    if kind == "host":
        array = np.ones(size_bytes, np.uint8)
        return array, array.ctypes.data
    where = {"device": "cuda:0"} if kind == "gpu" else {"pin_memory": True}
    tensor = torch.ones(size_bytes, dtype=torch.uint8, **where)
    torch.cuda.synchronize()
    return tensor, tensor.data_ptr()


class Driver(RivalDriver):
    """The initiator."""

    def __init__(self, link: Connection, options: dict[str, Any]) -> None:
        super().__init__(link, options)
        self._agent = _agent("driver")
        link.send(("start",))
        link.recv()
        self._cleanup: list[Any] = []

    def connect_case(self, case: str, size_bytes: int) -> tuple[Operation, str]:
        """`case` is "write_gpu_to_pinned" and the like."""
        agent = self._agent
        self._release()
        _, near_kind, _, far_kind = case.split("_")
        self.link.send(("prepare", far_kind, size_bytes))
        base, metadata = self.link.recv()
        peer = agent.add_remote_agent(metadata)
        memory, address = _memory(near_kind, size_bytes)
        near_type, far_type = _KINDS[near_kind], _KINDS[far_kind]
        registered = agent.register_memory([(address, size_bytes, 0, "")], near_type)
        local = agent.prep_xfer_dlist("NIXL_INIT_AGENT", [(address, size_bytes, 0)], near_type)
        remote = agent.prep_xfer_dlist(peer, [(base, size_bytes, 0)], far_type)
        indices = np.arange(1, dtype=np.int32)
        handle = agent.make_prepped_xfer("WRITE", local, indices, remote, indices)
        self._cleanup = [handle, local, remote, registered, peer, memory]

        def operation() -> None:
            state = agent.transfer(handle)
            while state == "PROC":
                state = agent.check_xfer_state(handle)
            if state != "DONE":
                raise RuntimeError(f"NIXL transfer ended as {state}")

        return operation, "prepared transfer, polled, UCX as it chooses"

    def _release(self) -> None:
        if not self._cleanup:
            return
        handle, local, remote, registered, peer, _ = self._cleanup
        self._cleanup = []
        for item in (handle, local, remote):
            item.release()
        self._agent.deregister_memory(registered)
        self._agent.remove_remote_agent(peer)

    def close(self) -> None:
        self._release()


def serve(link: Connection, options: dict[str, Any]) -> None:
    """The target: owns the memory, and does nothing else."""
    state: dict[str, Any] = {}

    def start() -> bool:
        state["agent"] = _agent("target")
        return True

    def prepare(kind: str, size_bytes: int) -> tuple[int, bytes]:
        agent = state["agent"]
        if "registered" in state:
            agent.deregister_memory(state.pop("registered"))
        state["memory"], address = _memory(kind, size_bytes)
        state["registered"] = agent.register_memory([(address, size_bytes, 0, "")], _KINDS[kind])
        return address, agent.get_agent_metadata()

    serve_messages(link, {"start": start, "prepare": prepare})
