"""A process whose threads gevent runs: a call that waits must not stop the other greenlets."""

import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

grpc = pytest.importorskip("grpc")
pytest.importorskip("gevent", reason="gevent is not installed (extra dev)")

from ends import serving  # noqa: E402

from tensorwire import rpc  # noqa: E402
from tensorwire.rpc.runtime.options import offer  # noqa: E402

PROGRAM = """
import sys
from gevent import monkey
monkey.patch_all()
import grpc.experimental.gevent
grpc.experimental.gevent.init_gevent()
import gevent
from concurrent.futures import ThreadPoolExecutor
from tensorwire import rpc

ticks = 0

def tick():
    global ticks
    while True:
        ticks += 1
        gevent.sleep(0.01)

print(rpc.server(ThreadPoolExecutor(1), runtime=True).runtime)
with rpc.insecure_channel("127.0.0.1:" + sys.argv[1], runtime=True) as channel:
    call = channel.unary_unary("/t/sleep")
    call(b"0", timeout=60)
    gevent.spawn(tick)
    before = ticks
    gevent.joinall([gevent.spawn(call, b"1", timeout=60) for _ in range(3)], raise_error=True)
    print(ticks - before)
    print(channel.runtime, flush=True)
"""


def sleep(request: bytes, context: Any) -> bytes:
    time.sleep(float(request))
    return request


def test_greenlets_run_while_others_wait_for_calls() -> None:
    with serving() as start:
        methods = {"/t/sleep": grpc.unary_unary_rpc_method_handler(sleep)}
        server = start(rpc.server(ThreadPoolExecutor(4), runtime=True), methods)
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, str(server.port)],
            capture_output=True, text=True, timeout=90,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    offered, ticks, runtime = done.stdout.splitlines()
    assert offered == runtime
    assert runtime.startswith("grpcio: gevent has patched this process")
    assert int(ticks) > 10  # a call by the runtime lets none of them run


def test_gevent_of_grpcio_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    activated = SimpleNamespace(g_gevent_activated=True)
    monkeypatch.setitem(sys.modules, "grpc._cython.cygrpc", activated)
    assert offer(True, None, None).reason.startswith("gevent has patched this process")
