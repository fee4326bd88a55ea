"""NIXL: a prepared transfer over UCX, posted and polled until done.

Measured: `transfer` of a handle made once, polled with `check_xfer_state`, as in its examples.
On one host UCX may use all its transports (data goes by cross-memory attach), without peer error
handling and without progress threads: the fastest of the settings tried, as the target has nothing
to do. The tcp wire emulates one-sided access, so the target needs a progress thread.

"nixl" has plain pages, like torch tensors, our regions and the limits; "nixl-huge" has memory of
numpy, huge pages for large arrays where the kernel allows them. "nixl-gpu" is between two processes
that use one GPU: GPU memory is a torch tensor, registered as VRAM; pinned memory is a tensor that
torch has pinned. UCX chooses its transports (CUDA IPC between processes of one host). So far this
was run only with host memory in place of GPU memory.
"""

from __future__ import annotations

import importlib
import mmap
import os
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from tensorwire.bench.processes import serve_messages
from tensorwire_benchmarks.rivals.base import Operation, RivalDriver

_TYPES = {"gpu": "VRAM"}
"""NIXL's types of memory by kind, if not DRAM."""


def _agent(name: str, wire: str) -> Any:
    if wire == "tcp":
        os.environ["UCX_TLS"] = "tcp"
        os.environ.setdefault("UCX_NET_DEVICES", "lo")
    os.environ.setdefault("UCX_LOG_LEVEL", "error")
    os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")
    api = _module()
    progress = wire == "gpu" or (wire == "tcp" and name == "target")
    config = api.nixl_agent_config(enable_prog_thread=progress, backends=[])
    agent = api.nixl_agent(name, config)
    agent.create_backend("UCX", {"ucx_error_handling_mode": "none"} if wire == "shm" else {})
    return agent


def _module() -> Any:
    """Imports NIXL under any of its package names."""
    for name in ("nixl._api", "nixl_cu12", "nixl_cu13"):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError:
            continue
    raise ModuleNotFoundError("no nixl package; pip install nixl-cu12")


def _memory(kind: str, size_bytes: int) -> tuple[Any, int]:
    """Returns touched memory and its address.

    The kind is "gpu", "pinned", "plain" (host pages, never huge) or "host" (numpy's memory, which
    asks the kernel for huge pages).
    """
    if kind in ("gpu", "pinned"):
        torch = importlib.import_module("torch")
        where = {"device": "cuda:0"} if kind == "gpu" else {"pin_memory": True}
        tensor = torch.ones(size_bytes, dtype=torch.uint8, **where)
        torch.cuda.synchronize()
        return tensor, tensor.data_ptr()
    if kind == "host":
        array = np.ones(size_bytes, np.uint8)
        return array, array.ctypes.data
    pages = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages.madvise(mmap.MADV_NOHUGEPAGE)
    array = np.frombuffer(pages, np.uint8)
    array[:] = 1
    return array, array.ctypes.data


class Driver(RivalDriver):
    """The initiator."""

    def __init__(self, link: Connection, options: dict[str, Any]) -> None:
        super().__init__(link, options)
        self._wire = str(options["wire"])
        self._agent = _agent("driver", self._wire)
        link.send(("start", self._wire))
        link.recv()
        self._cleanup: list[Any] = []

    def connect_case(self, case: str, size_bytes: int) -> tuple[Operation, str]:
        """Prepares a case: "write", "read", or a batch such as "batch_256x1KiB".

        The pieces of a batch have gaps between them. A batch "…_by_index" makes its transfer from
        the prepared lists each time. With a GPU cases have names such as "write_gpu_to_pinned".
        """
        agent = self._agent
        self._release()
        pieces = int(case.removeprefix("batch_").partition("x")[0]) if "batch" in case else 1
        piece = size_bytes // pieces
        stride = piece * 2 if pieces > 1 else piece
        near_kind = far_kind = "host" if self.options["huge"] else "plain"
        if self._wire == "gpu":
            _, near_kind, _, far_kind = case.split("_")
        near_type, far_type = (_TYPES.get(kind, "DRAM") for kind in (near_kind, far_kind))
        self.link.send(("prepare", far_kind, stride * pieces))
        base, metadata = self.link.recv()
        peer = agent.add_remote_agent(metadata)
        memory, address = _memory(near_kind, stride * pieces)
        registered = agent.register_memory([(address, stride * pieces, 0, "")], near_type)
        near = [(address + i * stride, piece, 0) for i in range(pieces)]
        far = [(base + i * stride, piece, 0) for i in range(pieces)]
        local = agent.prep_xfer_dlist("NIXL_INIT_AGENT", near, near_type)
        remote = agent.prep_xfer_dlist(peer, far, far_type)
        indices = np.arange(pieces, dtype=np.int32)
        direction = "READ" if case == "read" else "WRITE"
        handle = agent.make_prepped_xfer(direction, local, indices, remote, indices)
        self._cleanup = [handle, local, remote, registered, peer, memory]

        def finish(transfer: Any) -> None:
            state = agent.transfer(transfer)
            while state == "PROC":
                state = agent.check_xfer_state(transfer)
            if state != "DONE":
                raise RuntimeError(f"NIXL transfer ended as {state}")

        def by_index() -> None:
            chosen = agent.make_prepped_xfer(direction, local, indices, remote, indices)
            finish(chosen)
            chosen.release()

        if case.endswith("_by_index"):
            return by_index, f"transfer made by index each time, polled, UCX over {self._wire}"
        way = "as it chooses" if self._wire == "gpu" else f"over {self._wire}"
        return (lambda: finish(handle)), f"prepared transfer, polled, UCX {way}"

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
    """Runs the target, which owns the memory, and does nothing else."""
    state: dict[str, Any] = {}

    def start(wire: str) -> bool:
        state["agent"] = _agent("target", wire)
        return True

    def prepare(kind: str, size_bytes: int) -> tuple[int, bytes]:
        agent = state["agent"]
        if "registered" in state:
            agent.deregister_memory(state.pop("registered"))
        state["memory"], address = _memory(kind, size_bytes)
        where = [(address, size_bytes, 0, "")]
        state["registered"] = agent.register_memory(where, _TYPES.get(kind, "DRAM"))
        return address, agent.get_agent_metadata()

    serve_messages(link, {"start": start, "prepare": prepare})
