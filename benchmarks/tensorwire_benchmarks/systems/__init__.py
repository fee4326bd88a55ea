"""The systems that train, and whether they can run here.

Each names its Trainer, which is in another file of this folder; nothing here imports torch or gRPC.
`SYSTEMS` are the systems of `bench training`.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

_PACKAGE = "tensorwire_benchmarks.systems"
_TORCH = ("torch", "pip install 'tensorwire[torch]'")
_OWN_SERVER = "tensorwire.torch.server"


@dataclass(frozen=True, slots=True)
class System:
    """The description of a system, which imports nothing of it.

    Attributes:
        name: its name in rows and on the command line.
        trainer: its Trainer, "module:class".
        needs: modules to import, each with the remedy if it is missing.
        server: module whose `main` is its server; None without one.
        carries: the transport behind each wire, for notes.
        copies: the most copies of the model in the memory of two workers and the server, roughly.
        exchanges: whether its workers exchange gradients or parameters.
        holds: whether it can delay its whole exchange until backward is over.
        options: more arguments of its server.
    """

    name: str
    trainer: str
    needs: tuple[tuple[str, str], ...]
    server: str | None
    carries: Mapping[str, str]
    copies: int = 8
    exchanges: bool = True
    holds: bool = True
    options: tuple[str, ...] = ()

    @property
    def in_job(self) -> bool:
        """True for tensorwire, whose processes read their job from the environment."""
        return self.server == _OWN_SERVER

    def missing(self) -> str | None:
        """Returns the reason why it cannot run here, with the remedy; None if it can."""
        for name, remedy in self.needs:
            spec = importlib.util.find_spec(name)
            if spec is None or spec.origin is None:  # a folder without __init__.py has no origin
                return f"{name} is not installed; {remedy}"
        return None

    def server_arguments(
        self, wire: str, workers: int, optimizer: str, threads: int, folder: str, host: str,
        count: int = 1, others: Sequence[str] = (),
    ) -> list[str]:  # fmt: skip
        """Returns arguments of the server that starts after `others`, without `--address-fd`."""
        if self.in_job:
            own = ["--index", str(len(others)), "--workers", str(workers), "--count", str(count)]
            own += ["--servers", ",".join(others)] if others else []
            return [*own, "--listen", f"{host}:0", "--threads", str(threads)]
        where = f"unix:{os.path.join(folder, 'grpc')}" if wire == "shm" else f"{host}:0"
        own = ["--workers", str(workers), "--optimizer", optimizer, "--listen", where]
        return [*own, *self.options]


OWN = "tensorwire"
LIMIT = "limit"
LIMIT_COPIES = 6
"""Like `System.copies`, for both ends of the raw socket."""


def _own(name: str, trainer: str = "OwnTrainer") -> System:
    return System(
        name,
        f"{_PACKAGE}.own:{trainer}",
        (_TORCH, ("tensorwire.torch", "it comes with tensorwire")),
        _OWN_SERVER,
        {"shm": "shared memory", "tcp": "loopback TCP"},
        copies=10,
    )


GRPC = System(
    "grpc",
    f"{_PACKAGE}.grpc_worker:GrpcTrainer",
    (_TORCH, ("grpc", "pip install grpcio")),
    f"{_PACKAGE}.grpc_server",
    {"shm": "a unix socket", "tcp": "loopback TCP"},
    copies=28,
)
GRPC_ATTACHED = replace(
    GRPC,
    name="grpc-tensorwire",
    trainer=f"{_PACKAGE}.grpc_worker:AttachedTrainer",
    needs=(*GRPC.needs, ("tensorwire.rpc", "it comes with tensorwire")),
    carries={"shm": "a unix socket and shared memory", "tcp": "loopback TCP, twice"},
    options=("--attached",),
)
"""The program of `GRPC` with the channel and the server of `tensorwire.rpc`."""
GRPC_RUNTIME = replace(
    GRPC_ATTACHED,
    name="grpc-runtime",
    trainer=f"{_PACKAGE}.grpc_worker:RuntimeTrainer",
    carries={"shm": "shared memory", "tcp": "loopback TCP"},
    options=("--attached", "--runtime"),
)
"""The program of `GRPC` with the runtime of `tensorwire.rpc` instead of HTTP/2."""
PLAN, COPY = _own("plan"), _own("copy", "CopyTrainer")
SYNC, ASYNC = _own("sync", "SyncTrainer"), _own("async", "AsyncTrainer")
BOUNDED = _own("bounded", "BoundedTrainer")
COMPUTATION = System(
    "computation", f"{_PACKAGE}.base:Computation", (_TORCH,), None, {}, 5, False, False
)
"""Forward and backward of all workers at the same time, without exchange."""
PLAIN = System("plain", f"{_PACKAGE}.base:Plain", (_TORCH,), None, {}, 5, False, False)
"""All workers at the same time, each with an optimizer and a model of its own."""

DDP = System(
    "ddp-gloo",
    f"{_PACKAGE}.ddp_gloo:DdpTrainer",
    (_TORCH,),
    None,
    {"shm": "loopback TCP, gloo knows nothing else", "tcp": "loopback TCP"},
    holds=False,
)
SYSTEMS: tuple[System, ...] = (_own(OWN), DDP, GRPC)
