"""The records and their loggers: what grpcio logs is logged by the same logger here."""

import asyncio
import fcntl
import json
import logging
import os
import pty
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import grpc.aio
import hosts
import numpy as np
import pytest
from ends import Ends, attached_channel

from tensorwire import rpc
from tensorwire.rpc import logs
from tensorwire.rpc.attach.registry import DeclinedError, Registry
from tensorwire.rpc.attach.terms import Terms
from tensorwire.rpc.payload.host import host_id
from tensorwire.rpc.payload.limits import Limits


def test_errors_of_users_are_logged_where_grpcio_logs_them(
    ends: Ends, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(request: bytes, context: Any) -> bytes:
        raise ZeroDivisionError("of the servicer")

    ends.methods = {"/t/fail": grpc.unary_unary_rpc_method_handler(fail)}
    method = ends.serve().channel().unary_unary("/t/fail")
    cannot = ends.channel().unary_unary("/t/fail", lambda request: 1 / 0)
    with caplog.at_level(logging.INFO):
        for each in (method, cannot):
            with pytest.raises(grpc.RpcError):
                each(b"x", timeout=20)
    assert logs.wait(20)
    told = {(record.name, record.getMessage()) for record in caplog.records}
    assert ("grpc._server", "Exception calling application: of the servicer") in told
    assert ("grpc._common", "Exception serializing message!") in told


@pytest.mark.parametrize("system", ["grpcio", "beside grpcio", "runtime"])
def test_errors_of_users_of_asyncio_are_logged_there_too(
    caplog: pytest.LogCaptureFixture, system: str
) -> None:
    async def fail(request: bytes, context: Any) -> bytes:
        raise ZeroDivisionError("of the servicer")

    async def answer(request: bytes, context: Any) -> bytes:
        context.add_done_callback(lambda _: 1 / 0)
        return b"x"

    async def calls() -> None:
        make: Any = (grpc.aio.server, grpc.aio.insecure_channel)
        options: dict[str, Any] = {}
        if system != "grpcio":
            make = (rpc.aio.server, rpc.aio.insecure_channel)
            options["runtime"] = system == "runtime"
        server = make[0](**options)
        methods = {"fail": fail, "answer": answer}
        unary = {name: grpc.unary_unary_rpc_method_handler(each) for name, each in methods.items()}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("t", unary),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        async with make[1](f"127.0.0.1:{port}", **options) as channel:
            with pytest.raises(grpc.RpcError):
                await channel.unary_unary("/t/fail")(b"")
            await channel.unary_unary("/t/answer", None, lambda data: 1 / 0)(b"")
        await server.stop(None)

    with caplog.at_level(logging.INFO):
        asyncio.run(calls())
    assert logs.wait(20)
    told = {(record.name, record.getMessage()) for record in caplog.records}
    assert told >= {
        (
            "grpc._cython.cygrpc",
            "Unexpected [ZeroDivisionError] raised by servicer method [/t/fail]",
        ),
        ("grpc._cython.cygrpc", "Error in callback for method [/t/answer]"),
        ("grpc._common", "Exception deserializing message!"),
    }


def test_a_host_that_cannot_be_known_is_asked_for() -> None:
    """A port of all addresses has no known host, if no route leads out."""
    registry = Registry(Terms(Limits(max_attachments=1), ("tcp",), listen="no such host"))
    asked = {"versions": [3], "host": "another", "transports": ["tcp"], "pool_bytes": 1 << 20}
    with pytest.raises(DeclinedError, match="name one by listen="):
        registry.open(json.dumps(asked).encode(), encrypted=False)
    registry.close()


@pytest.mark.parametrize("runtime", [False, True], ids=["beside grpcio", "runtime"])
def test_it_is_told_once_that_all_memory_is_kept(
    caplog: pytest.LogCaptureFixture, runtime: bool
) -> None:
    server = rpc.server(ThreadPoolExecutor(2), runtime=runtime, limits=rpc.Limits(patience_s=0.05))
    coders = rpc.Tensor.FromString, rpc.Tensor.SerializeToString
    answer = grpc.unary_unary_rpc_method_handler(lambda request, context: one(), *coders)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("t", {"one": answer}),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()

    def one() -> Any:
        return rpc.pack(np.ones(1 << 20, np.uint8))

    with (
        attached_channel(
            f"127.0.0.1:{port}", runtime=runtime, limits=rpc.Limits(pool_bytes=8 << 20)
        ) as channel,
        caplog.at_level(logging.WARNING),
    ):
        method = channel.unary_unary("/t/one", rpc.Tensor.SerializeToString, rpc.Tensor.FromString)
        kept = [method(rpc.Tensor(), timeout=20) for _ in range(12)]
        assert all(rpc.unpack(each).sum() == 1 << 20 for each in kept)
    server.stop(None).wait()
    assert logs.wait(20)
    (told,) = [each for each in caplog.records if "sent inside gRPC" in each.getMessage()]
    assert told.name == "tensorwire.rpc"
    assert f"pool_bytes: {8 << 20} at the other end" in told.getMessage()


@pytest.mark.skipif(hosts.missing() is not None, reason=str(hosts.missing()))
def test_a_network_of_its_own_is_another_host() -> None:
    """127.0.0.1 is somebody else there, as in a container."""
    script = "from tensorwire.rpc.payload.host import host_id; print(host_id())"
    name = f"tw-logs-{os.getpid()}"
    subprocess.run(["ip", "netns", "add", name], check=True)
    try:
        there = subprocess.check_output(
            ["ip", "netns", "exec", name, sys.executable, "-c", script], text=True
        )
    finally:
        subprocess.run(["ip", "netns", "del", name], check=True)
    assert there.strip() != host_id()
    here = subprocess.check_output([sys.executable, "-c", script], text=True)
    assert here.strip() == host_id()


@pytest.mark.cold
def test_a_torch_tensor_is_made_where_nobody_has_imported_torch() -> None:
    script = """
import sys
from tensorwire import rpc
message = rpc.Tensor(dtype="bfloat16", shape=[2], data=bytes([128, 63, 0, 64]))
assert "torch" not in sys.modules
assert rpc.unpack(message, like="torch").tolist() == [1.0, 2.0]
"""
    subprocess.run([sys.executable, "-c", script], check=True)


SERVER = """
import logging, os, signal, sys
from concurrent.futures import ThreadPoolExecutor
import grpc
from tensorwire import rpc

def fail(request, context):
    raise ZeroDivisionError("of the servicer")

logging.basicConfig(filename="/dev/stderr" if sys.argv[2] == "file" else None)
if sys.argv[2]:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
server = rpc.server(ThreadPoolExecutor(1), runtime=True)
handlers = {"fail": grpc.unary_unary_rpc_method_handler(fail)}
server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("t", handlers),))
port = server.add_insecure_port("127.0.0.1:0")
server.start()
os.write(int(sys.argv[1]), b"%d" % port)
server.wait_for_termination()
"""


@pytest.mark.parametrize(
    ("kind", "exits"), [("pipe", ""), ("terminal", ""), ("pipe", "stream"), ("pipe", "file")]
)
def test_a_server_answers_while_nobody_reads_its_log(kind: str, exits: str) -> None:
    """And ends when it is told to, by a handler of its own too, with any handler of logging."""
    ours, theirs = os.pipe() if kind == "pipe" else pty.openpty()
    if kind == "pipe":
        fcntl.fcntl(theirs, fcntl.F_SETPIPE_SZ, 4096)
    told, tells = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER, str(tells), exits],
        stdout=theirs, stderr=theirs, pass_fds=[tells],
    )  # fmt: skip
    try:
        port = int(os.read(told, 100))
        with attached_channel(f"127.0.0.1:{port}", runtime=True) as channel:
            method = channel.unary_unary("/t/fail")
            for _ in range(100):
                with pytest.raises(grpc.RpcError) as caught:
                    method(b"x", timeout=20)
                assert caught.value.code() == grpc.StatusCode.UNKNOWN
        process.terminate()
        assert process.wait(30) == (3 if exits else -signal.SIGTERM)
    finally:
        process.kill()
        process.wait()
        for descriptor in (ours, theirs, told, tells):
            os.close(descriptor)
