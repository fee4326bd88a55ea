"""A server that runs short of descriptors or threads, and one that does not answer."""

import contextlib
import os
import resource
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

grpc = pytest.importorskip("grpc")

import numpy as np  # noqa: E402
import rpc_serving  # noqa: E402
from ends import ALONE, attached_channel  # noqa: E402
from test_rpc_conformance import wait_for  # noqa: E402

from tensorwire import rpc  # noqa: E402
from tensorwire.rpc.attach import memory, registry  # noqa: E402
from tensorwire.rpc.attach.registry import DeclinedError, Registry  # noqa: E402
from tensorwire.rpc.attach.terms import Terms, encode  # noqa: E402
from tensorwire.rpc.payload import janitor  # noqa: E402
from tensorwire.rpc.payload.limits import Limits  # noqa: E402

MOST = 160
"""Descriptors of the server."""


@pytest.fixture
def serving() -> Iterator[Any]:
    process = subprocess.Popen(
        [sys.executable, rpc_serving.__file__, "serve", "ours", "shm"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    yield process
    process.kill()
    process.communicate()


@pytest.mark.parametrize("at_once", [1, 40])
def test_descriptors_are_left_to_connections(serving: Any, at_once: int) -> None:
    """gRPC works as without tensorwire, for many clients and for many messages of few clients."""
    port = int(serving.stdout.readline())
    _, most = resource.prlimit(serving.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(serving.pid, resource.RLIMIT_NOFILE, (MOST, most))
    with contextlib.ExitStack() as stack:
        channels = [
            stack.enter_context(
                attached_channel(
                    f"127.0.0.1:{port}", [ALONE], transports=("shm",), **rpc_serving.OPTIONS
                )
            )
            for _ in range(20 if at_once == 1 else 3)
        ]
        for channel in channels:
            call = channel.unary_unary("/t/echo", *rpc_serving.TYPES)
            running = [
                # Of other sizes, as memory is used again for those that are alike.
                call.future(rpc.pack(np.ones(20_000 << i // 8)), timeout=60)
                for i in range(at_once)
            ]
            for each in running:
                assert rpc.unpack(each.result())[0] == 2
        ways = {each.payload.partition("FAILED_PRECONDITION: ")[2][:50] for each in channels}
        declined = {"the server has most of its file descriptors in use"}
        assert ways == ({""} | declined if at_once == 1 else {""})
        # Each client has asked by a connection of its own, which it closes meanwhile.
        wait_for(lambda: len(os.listdir(f"/proc/{serving.pid}/fd")) < MOST - 10)
        with grpc.insecure_channel(f"127.0.0.1:{port}") as plain:
            hello = plain.unary_unary("/t/nothing")
            with pytest.raises(grpc.RpcError) as caught:
                hello(b"", timeout=20)
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.parametrize("what", ["thread", "memory"])
def test_nothing_stays_of_an_attachment_that_could_not_be_made(
    monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    class Thread(threading.Thread):
        def start(self) -> None:
            raise RuntimeError("can't start new thread")

    def no_memory(*_: Any) -> Any:
        raise MemoryError("none is left")

    found = Registry(Terms(Limits(max_attachments=2), ("shm", "tcp")))
    request = encode(versions=[3], host=registry.host_id(), transports=["shm"], pool_bytes=1 << 20)
    before = len(list(Path("/proc/self/fd").iterdir()))
    with monkeypatch.context() as patched:
        if what == "thread":
            patched.setattr(registry, "threading", SimpleNamespace(Thread=Thread))
        else:
            patched.setattr(memory, "make_board", no_memory)
        for _ in range(3):
            with pytest.raises(DeclinedError, match=r"another client: (can.t start|none is left)"):
                found.open(request, encrypted=False)
        assert not found._waiting
    assert len(list(Path("/proc/self/fd").iterdir())) <= before + 2  # the eventfd of a loop
    found.close()


def test_a_request_that_is_nested_too_deeply_is_refused() -> None:
    found = Registry(Terms(Limits(max_attachments=2), ("shm", "tcp")))
    with pytest.raises(ValueError, match="nested"):
        found.open(b"[" * 3000, encrypted=False)


def test_the_janitor_begins_when_a_thread_can_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    """And goes on whatever its work raises: nothing would be given back any more."""

    class Thread(threading.Thread):
        def start(self) -> None:
            raise RuntimeError("can't start new thread")

    class Looked:
        def look(self) -> bool:
            looks.set()
            raise SystemExit

    made, looked, looks = janitor.Janitor(), Looked(), threading.Event()
    with monkeypatch.context() as patched:
        patched.setattr(janitor, "threading", SimpleNamespace(Thread=Thread))
        with pytest.raises(RuntimeError):
            made.watch(looked)
    for _ in range(3):
        looks.clear()
        made.watch(looked)
        assert looks.wait(20)
