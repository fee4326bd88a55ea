"""The systems that every test of conformance runs on, and the server that they talk to."""

import contextlib
import itertools
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

grpc = pytest.importorskip("grpc")

from tensorwire import rpc  # noqa: E402
from tensorwire._core import rpc as core  # noqa: E402
from tensorwire.rpc.runtime.frames import Frame  # noqa: E402

# Everything with a byte in it goes ahead, so that tests of behaviour need no large messages.
EVERYTHING = 1

# Of a channel that shares neither connection nor attachment with others.
ALONE = ("grpc.use_local_subchannel_pool", 1)


@dataclass
class System:
    """A way to make the two ends. Ours or grpcio's."""

    name: str
    our_channel: dict[str, Any] | None
    our_server: dict[str, Any] | None

    def channel(self, target: str, **options: Any) -> Any:
        if self.our_channel is None:
            return grpc.insecure_channel(target, **options)
        return rpc.insecure_channel(target, **options, **self.our_channel)

    def server(self, *args: Any, **options: Any) -> Any:
        if self.our_server is None:
            return grpc.server(*args, **options)
        return rpc.server(*args, **options, **self.our_server)


SHM = {"limits": rpc.Limits(threshold_bytes=EVERYTHING), "transports": ("shm",)}
TCP = {"limits": rpc.Limits(threshold_bytes=EVERYTHING), "transports": ("tcp",)}
# The runtime: payload by leases over shm, in pieces of frames over tcp.
RUNTIME_SHM = {**SHM, "runtime": True}
RUNTIME_TCP = {"transports": ("tcp",), "runtime": True}
RUNTIME_RDMA = {
    "limits": rpc.Limits(threshold_bytes=EVERYTHING),
    "transports": ("rdma",),
    "runtime": True,
}
SYSTEMS = (
    System("shm", SHM, SHM),
    System("tcp", TCP, TCP),
    System("runtime over shm", RUNTIME_SHM, RUNTIME_SHM),
    System("runtime over tcp", RUNTIME_TCP, RUNTIME_TCP),
    System("grpcio", None, None),
    System("our channel, grpcio's server", SHM, None),
    System("grpcio's channel, our server", None, SHM),
)


# Where a device is: in an emulated machine, for tests/rdma/test_machines_rpc.py.
if os.environ.get("TENSORWIRE_TESTS_RPC_RDMA"):
    SYSTEMS = (*SYSTEMS, System("runtime over rdma", RUNTIME_RDMA, RUNTIME_RDMA))


def pairwise(first: Sequence[Any], *others: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Returns cases in which each two values of different lists meet; not all that there are.

    The first cases have the values of the first list in their order.
    """
    lists = (first, *others)
    open_pairs = {
        (i, a, j, b)
        for (i, one), (j, other) in itertools.combinations(enumerate(lists), 2)
        for a in range(len(one))
        for b in range(len(other))
    }

    def pairs_of(case: tuple[int, ...]) -> set[tuple[int, int, int, int]]:
        return {(i, a, j, b) for (i, a), (j, b) in itertools.combinations(enumerate(case), 2)}

    every = list(itertools.product(*(range(len(each)) for each in lists)))
    found, turn = [], itertools.cycle(range(len(first)))
    while open_pairs:
        place = next(turn)
        best = max((c for c in every if c[0] == place), key=lambda c: len(pairs_of(c) & open_pairs))
        if pairs_of(best) & open_pairs:
            found.append(tuple(each[at] for each, at in zip(lists, best, strict=True)))
            open_pairs -= pairs_of(best)
    return found


def of_systems(names: str, *others: Sequence[Any]) -> pytest.MarkDecorator:
    """Runs a test pairwise on all systems and the values of its other parameters."""
    return pytest.mark.parametrize(
        ("system", *names.split()),
        pairwise(SYSTEMS, *others),
        ids=lambda value: value.name if isinstance(value, System) else None,
    )


@dataclass
class Ends:
    """A server with the handlers of a test, and channels to it."""

    system: System
    methods: dict[str, Any] = field(default_factory=dict)
    closing: list[Callable[[], object]] = field(default_factory=list)
    server: Any = None
    port: int = 0

    def serve(self, workers: int = 8, **options: Any) -> "Ends":
        pool = ThreadPoolExecutor(workers)
        self.server = self.system.server(pool, **options)
        self.server.add_generic_rpc_handlers((Methods(self.methods),))
        self.port = self.server.add_insecure_port("127.0.0.1:0")
        self.server.start()
        self.closing += [lambda: self.server.stop(0).wait(), lambda: pool.shutdown(wait=False)]
        return self

    def channel(self, **options: Any) -> Any:
        channel = attached(self.system.channel(f"127.0.0.1:{self.port}", **options))
        self.closing.insert(0, channel.close)
        return channel

    def close(self) -> None:
        for each in self.closing:
            each()


def attached(channel: Any) -> Any:
    """A channel, after it has asked its server for an attachment; calls do not wait for it."""
    if hasattr(channel, "attach"):
        channel.attach(10)
    return channel


def attached_channel(*given: Any, **named: Any) -> Any:
    """Makes a channel like `rpc.insecure_channel`, once it is `attached`."""
    return attached(rpc.insecure_channel(*given, **named))


class Methods(grpc.GenericRpcHandler):  # type: ignore[misc]
    def __init__(self, methods: dict[str, Any]) -> None:
        self.methods = methods

    def service(self, details: Any) -> Any:
        return self.methods.get(details.method)


@contextlib.contextmanager
def serving() -> Iterator[Callable[[Any, dict[str, Any]], Any]]:
    """Yields a function that starts servers, each with its methods and a port. All stop at last."""
    servers: list[Any] = []

    def start(server: Any, methods: dict[str, Any]) -> Any:
        server.add_generic_rpc_handlers((Methods(methods),))
        server.port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        servers.append(server)
        return server

    yield start
    for server in servers:
        server.stop(0).wait()


def parse(data: bytes) -> list[Frame]:
    """The frames that bytes are made of, as the reader of a line gives them."""
    return core.parse(data, Frame)


def stop_process(process: subprocess.Popen[Any]) -> None:
    """Stops a process, and waits until all its threads stand, which takes a moment."""
    process.send_signal(signal.SIGSTOP)
    until = time.monotonic() + 10
    while time.monotonic() < until:
        states = []
        for task in Path(f"/proc/{process.pid}/task").iterdir():
            with contextlib.suppress(OSError):  # a thread that has ended
                states.append((task / "stat").read_text().rpartition(")")[2].split()[0])
        if all(state == "T" for state in states):
            return
        time.sleep(0.001)
    raise AssertionError("the process goes on")
