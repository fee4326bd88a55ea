"""`tensorwire rpc trace`, on programs in processes of their own: nothing of them changes."""

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import pytest

from tensorwire.rpc.payload.route import THRESHOLDS
from tensorwire.rpctrace.figures import SHM_BITS, TCP_BITS

TRACE = [sys.executable, "-m", "tensorwire", "rpc", "trace"]

SERVICE = """
import asyncio, sys
from concurrent import futures
import grpc
from grpc import insecure_channel, server as make_server

def double(request, context):
    if request == b"ABORT":
        context.abort(grpc.StatusCode.NOT_FOUND, "not here")
    return request * 2

def repeat(request, context):
    for _ in range(3):
        yield request

def join(requests, context):
    return b"".join(requests)

def echo(requests, context):
    yield from requests

def handlers(double=double, repeat=repeat, join=join, echo=echo):
    return (grpc.method_handlers_generic_handler("example.Model", {
        "Double": grpc.unary_unary_rpc_method_handler(double, bytes.upper, bytes.lower),
        "Repeat": grpc.unary_stream_rpc_method_handler(repeat),
        "Join": grpc.stream_unary_rpc_method_handler(join),
        "Echo": grpc.stream_stream_rpc_method_handler(echo),
    }),)
"""
SERVER = (
    SERVICE
    + """
server = make_server(futures.ThreadPoolExecutor(2), handlers())
port = server.add_insecure_port("127.0.0.1:0")
server.start()
print(port, flush=True)
sys.stdin.read()
server.stop(None).wait()
"""
)
SYNC = (
    SERVICE
    + """
with insecure_channel("127.0.0.1:" + sys.argv[1]) as channel:
    double = channel.unary_unary("/example.Model/Double", bytes.upper, bytes.lower)
    assert double(b"x" * 1000) == b"x" * 2000
    assert double.with_call(b"x" * 1000)[0] == b"x" * 2000
    assert double.future(b"x" * 300_000).result() == b"x" * 600_000
    for request, code in ((b"abort", "NOT_FOUND"), ("no bytes", "INTERNAL")):
        try:
            double(request)
        except grpc.RpcError as error:
            print(error.code().name, error.details())
    assert list(channel.unary_stream("/example.Model/Repeat")(b"four")) == [b"four"] * 3
    assert channel.stream_unary("/example.Model/Join")(iter([b"a", b"bc"])) == b"abc"
    assert list(channel.stream_stream("/example.Model/Echo")(iter([b"a", b""]))) == [b"a", b""]
"""
)
AIO = (
    SERVICE
    + """
async def repeat_later(request, context):
    for _ in range(3):
        yield request

async def double_later(request, context):
    if request == b"ABORT":
        await context.abort(grpc.StatusCode.NOT_FOUND, "not here")
    return request * 2

async def main():
    server = grpc.aio.server()
    server.add_generic_rpc_handlers(handlers(double_later, repeat_later))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        double = channel.unary_unary("/example.Model/Double", bytes.upper, bytes.lower)
        assert await double(b"x" * 3_000_000) == b"x" * 6_000_000
        try:
            await double(b"abort")
        except grpc.aio.AioRpcError as error:
            print(error.code().name)
        repeat = channel.unary_stream("/example.Model/Repeat")
        assert [each async for each in repeat(b"four")] == [b"four"] * 3
    await server.stop(None)

asyncio.run(main())
""".replace("grpc.aio.server()", "grpc.aio.server(options=LARGE)").replace(
        'insecure_channel(f"127.0.0.1:{port}")', 'insecure_channel(f"127.0.0.1:{port}", LARGE)'
    )
).replace("import asyncio", 'LARGE = [("grpc.max_receive_message_length", -1)]\nimport asyncio')


def run(
    tmp_path: Path, *command: str, timeout_s: float = 60, **more: Any
) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    """The command under the trace, and its figures."""
    figures = tmp_path / "figures.json"
    done = subprocess.run(
        [*TRACE, "--json", str(figures), "--", *command],
        capture_output=True, text=True, timeout=timeout_s, **more,
    )  # fmt: skip
    return done, json.loads(figures.read_text()) if figures.exists() else {}


def script(tmp_path: Path, name: str, text: str) -> str:
    path = tmp_path / name
    path.write_text(textwrap.dedent(text))
    return str(path)


def calls(figures: dict[str, Any]) -> dict[tuple[str, str, str], int]:
    """(side, method, code): how many."""
    return {
        (row["side"], row["method"].rpartition("/")[2], row["code"]): row["count"]
        for row in figures["rows"]
        if row["kind"] == "calls"
    }


def messages(figures: dict[str, Any]) -> dict[tuple[str, str, str, str], tuple[int, ...]]:
    """(side, method, direction, protocol): messages, bytes, those encoded, those beside."""
    return {
        (row["side"], row["method"].rpartition("/")[2], row["direction"], row["protocol"]): (
            row["count"], row["bytes"], row["bytes_encoded"], row["bytes_beside"],
        )
        for row in figures["rows"]
        if row["kind"] == "messages"
    }  # fmt: skip


def test_processes_of_plain_grpcio(tmp_path: Path) -> None:
    """A server and a client that their parent starts; each byte is known."""
    program = script(
        tmp_path,
        "program.py",
        """
        import subprocess, sys
        server = subprocess.Popen(
            [sys.executable, sys.argv[1]], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        port = server.stdout.readline().strip()
        subprocess.run([sys.executable, sys.argv[2], port], check=True)
        server.communicate()
        sys.exit(7)
        """,
    )
    server = script(tmp_path, "server.py", SERVER)
    done, figures = run(
        tmp_path, sys.executable, program, server, script(tmp_path, "client.py", SYNC)
    )
    assert done.returncode == 7, done.stderr
    assert done.stdout == ("NOT_FOUND not here\nINTERNAL Exception serializing request!\n")
    assert figures["processes"] == {"python": 3, "with_rpcs": 2}
    assert (figures["lost"], figures["unknown"]) == (0, [])
    sent = 2 * 1000 + 300_000
    assert messages(figures) == {
        ("client", "Double", "sent", "grpc"): (4, sent + 5, sent + 5, 0),
        ("client", "Double", "received", "grpc"): (3, 2 * sent, 2 * sent, 0),
        ("client", "Repeat", "sent", "grpc"): (1, 4, 0, 0),
        ("client", "Repeat", "received", "grpc"): (3, 12, 0, 0),
        ("client", "Join", "sent", "grpc"): (2, 3, 0, 0),
        ("client", "Join", "received", "grpc"): (1, 3, 0, 0),
        ("client", "Echo", "sent", "grpc"): (2, 1, 0, 0),
        ("client", "Echo", "received", "grpc"): (2, 1, 0, 0),
        ("server", "Double", "received", "grpc"): (4, sent + 5, sent + 5, 0),
        ("server", "Double", "sent", "grpc"): (3, 2 * sent, 2 * sent, 0),
        ("server", "Repeat", "received", "grpc"): (1, 4, 0, 0),
        ("server", "Repeat", "sent", "grpc"): (3, 12, 0, 0),
        ("server", "Join", "received", "grpc"): (2, 3, 0, 0),
        ("server", "Join", "sent", "grpc"): (1, 3, 0, 0),
        ("server", "Echo", "received", "grpc"): (2, 1, 0, 0),
        ("server", "Echo", "sent", "grpc"): (2, 1, 0, 0),
    }
    assert calls(figures) == {
        ("client", "Double", "OK"): 3,
        ("client", "Double", "NOT_FOUND"): 1,
        ("client", "Double", "INTERNAL"): 1,
        ("client", "Repeat", "OK"): 1,
        ("client", "Join", "OK"): 1,
        ("client", "Echo", "OK"): 1,
        ("server", "Double", "answered"): 3,
        ("server", "Double", "not answered"): 1,
        ("server", "Repeat", "over"): 1,
        ("server", "Join", "answered"): 1,
        ("server", "Echo", "over"): 1,
    }
    double = next(
        row["histogram"]
        for row in figures["rows"]
        if row.get("direction") == "sent" and row["method"].endswith("Double")
    )
    assert double == [
        {"below_bytes": 8, "count": 1, "bytes": 5},
        {"below_bytes": 1024, "count": 2, "bytes": 2000},
        {"below_bytes": 1 << 19, "count": 1, "bytes": 300_000},
    ]
    assert (
        "client: 2 of 18 messages, 900,000 of 906,029 bytes (99.3 %), would travel one-sidedly"
        in done.stderr
    )
    assert "tensorwire.rpc.server, or its aio twin, for grpc.server" in done.stderr


def test_asyncio_of_plain_grpcio(tmp_path: Path) -> None:
    done, figures = run(tmp_path, sys.executable, script(tmp_path, "both.py", AIO))
    assert (done.returncode, done.stdout) == (0, "NOT_FOUND\n"), done.stderr
    size = 3_000_000
    expected = {
        ("client", "Double", "sent", "grpc"): (2, size + 5, size + 5, 0),
        ("client", "Double", "received", "grpc"): (1, 2 * size, 2 * size, 0),
        ("client", "Repeat", "sent", "grpc"): (1, 4, 0, 0),
        ("client", "Repeat", "received", "grpc"): (3, 12, 0, 0),
    }
    other = {"sent": "received", "received": "sent"}
    expected |= {
        ("server", method, other[direction], protocol): found
        for (_, method, direction, protocol), found in expected.items()
    }
    assert messages(figures) == expected
    assert calls(figures) == {
        ("client", "Double", "OK"): 1,
        ("client", "Double", "NOT_FOUND"): 1,
        ("client", "Repeat", "OK"): 1,
        ("server", "Double", "answered"): 1,
        ("server", "Double", "not answered"): 1,
        ("server", "Repeat", "over"): 1,
    }


def test_payload_that_goes_ahead(tmp_path: Path) -> None:
    """With tensorwire.rpc: what left the messages, what passed through protobuf all the same."""
    text = """
    from concurrent import futures
    import grpc
    import numpy as np
    from tensorwire import rpc

    def double(request, context):
        return rpc.pack(rpc.unpack(request) * 2)

    def size(request, context):
        return b"%d" % len(request)

    server = rpc.server(futures.ThreadPoolExecutor(2))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("example.Model", {
        "Double": grpc.unary_unary_rpc_method_handler(
            double, rpc.Tensor.FromString, rpc.Tensor.SerializeToString
        ),
        "Size": grpc.unary_unary_rpc_method_handler(size, bytes, bytes),
    }),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    with rpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        assert channel.attach()
        call = channel.unary_unary(
            "/example.Model/Double", rpc.Tensor.SerializeToString, rpc.Tensor.FromString
        )
        assert rpc.unpack(call(rpc.pack(np.arange(100_000.0))))[-1] == 199_998
        size = channel.unary_unary("/example.Model/Size", bytes, bytes)
        assert size(bytes(600_000)) == b"600000"
        assert size(bytes(5_000)) == b"5000"
    server.stop(None).wait()
    """
    done, figures = run(tmp_path, sys.executable, script(tmp_path, "tensors.py", text))
    assert done.returncode == 0, done.stderr
    found = messages(figures)
    assert found[("client", "Size", "sent", "shm")] == (1, 600_000, 600_000, 600_000)
    assert found[("client", "Size", "sent", "grpc")] == (1, 5_000, 5_000, 0)
    assert found[("server", "Size", "received", "shm")] == (1, 600_000, 600_000, 600_000)
    for side, direction in (("client", "sent"), ("server", "sent"), ("client", "received")):
        count, size, encoded, beside = found[(side, "Double", direction, "shm")]
        assert (count, beside, size - beside) == (1, 800_000, encoded)
        assert 0 < encoded < 100
    assert {method for _, method, _ in calls(figures)} == {"Double", "Size"}
    assert "client: nothing by gRPC is of 128 KiB or more, 2,200,000 of" in done.stderr


def test_calls_of_the_runtime(tmp_path: Path) -> None:
    """Both sides count them, with what they carried by frames and beside them."""
    text = """
    from concurrent import futures
    import grpc
    from tensorwire import rpc

    def size(request, context):
        if not request:
            context.abort(grpc.StatusCode.NOT_FOUND, "nothing")
        return b"%d" % len(request)

    server = rpc.server(futures.ThreadPoolExecutor(2), runtime=True)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("example.Model", {
        "Size": grpc.unary_unary_rpc_method_handler(size, bytes, bytes),
    }),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    target = f"127.0.0.1:{port}"
    limits = rpc.Limits(threshold_bytes=20_000)
    with rpc.insecure_channel(target, runtime=True, limits=limits) as channel:
        assert channel.attach()
        size = channel.unary_unary("/example.Model/Size", bytes, bytes)
        assert size(bytes(500_000)) == b"500000"
        assert size.future(bytes(5_000)).result() == b"5000"
        assert size(bytes(5_000), compression=grpc.Compression.NoCompression) == b"5000"
        assert size.future(b"").code() is grpc.StatusCode.NOT_FOUND
    server.stop(None).wait()
    """
    done, figures = run(tmp_path, sys.executable, script(tmp_path, "runtime.py", text))
    assert done.returncode == 0, done.stderr
    found = messages(figures)
    for side, direction in (("client", "sent"), ("server", "received")):
        assert found[(side, "Size", direction, "shm")] == (1, 500_000, 500_000, 500_000)
        assert found[(side, "Size", direction, "runtime")] == (2, 5_000, 5_000, 0)
        assert found[(side, "Size", direction, "grpc")] == (1, 5_000, 5_000, 0)
    assert calls(figures) == {
        ("client", "Size", "OK"): 3,
        ("client", "Size", "NOT_FOUND"): 1,
        ("server", "Size", "answered"): 3,
        ("server", "Size", "not answered"): 1,
    }


def test_streams_of_the_runtime(tmp_path: Path) -> None:
    """The channels and servers of both worlds are traced."""
    text = """
    import asyncio
    from concurrent import futures
    import grpc
    from tensorwire import rpc

    async def both(requests, context):
        async for each in requests:
            yield each

    def out(request, context):
        yield from [request] * 3

    kinds = {
        "Out": grpc.unary_stream_rpc_method_handler(out, bytes, bytes),
        "Both": grpc.stream_stream_rpc_method_handler(both, bytes, bytes),
    }
    handlers = grpc.method_handlers_generic_handler("example.Model", kinds)

    server = rpc.server(futures.ThreadPoolExecutor(2), runtime=True)
    server.add_generic_rpc_handlers((handlers,))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    with rpc.insecure_channel(f"127.0.0.1:{port}", runtime=True) as channel:
        assert channel.attach()
        assert len(list(channel.unary_stream("/example.Model/Out", bytes, bytes)(bytes(10)))) == 3
    server.stop(None).wait()

    async def main():
        server = rpc.aio.server(runtime=True)
        server.add_generic_rpc_handlers((handlers,))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        async with rpc.aio.insecure_channel(f"127.0.0.1:{port}", runtime=True) as channel:
            assert await channel.attach()
            call = channel.stream_stream("/example.Model/Both", bytes, bytes)(iter([bytes(20)] * 2))
            assert [each async for each in call] == [bytes(20)] * 2
            assert channel.runtime == "shm"
        await server.stop(None)

    asyncio.run(main())
    """
    done, figures = run(tmp_path, sys.executable, script(tmp_path, "streams.py", text))
    assert done.returncode == 0, done.stderr
    found = messages(figures)
    for side, there, back in (("client", "sent", "received"), ("server", "received", "sent")):
        assert found[(side, "Out", there, "runtime")] == (1, 10, 10, 0)
        assert found[(side, "Out", back, "runtime")] == (3, 30, 30, 0)
        assert found[(side, "Both", there, "runtime")] == (2, 40, 40, 0)
        assert found[(side, "Both", back, "runtime")] == (2, 40, 40, 0)
    assert calls(figures) == {
        ("client", "Out", "OK"): 1,
        ("server", "Out", "over"): 1,
        ("client", "Both", "OK"): 1,
        ("server", "Both", "over"): 1,
    }


def test_a_request_that_is_sent_again(tmp_path: Path) -> None:
    """The server forgets the attachment, so it refuses the envelope."""
    text = """
    from concurrent import futures
    import grpc
    from tensorwire import rpc

    def size(request, context):
        return b"%d" % len(request)

    server = rpc.server(futures.ThreadPoolExecutor(2))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("example.Model", {
        "Size": grpc.unary_unary_rpc_method_handler(size, bytes, bytes),
    }),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    with rpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        size = channel.unary_unary("/example.Model/Size", bytes, bytes)
        assert channel.attach()
        kept = dict(server._registry._attachments)
        server._registry._attachments.clear()
        assert size(bytes(600_000)) == b"600000"
    server.stop(None).wait()
    """
    done, figures = run(tmp_path, sys.executable, script(tmp_path, "again.py", text))
    assert done.returncode == 0, done.stderr
    found = messages(figures)
    assert found[("client", "Size", "sent", "shm")][0] == 1
    assert found[("client", "Size", "sent", "again")] == (1, 600_000, 600_000, 0)
    assert calls(figures)[("client", "Size", "INVALID_ARGUMENT")] == 1
    assert calls(figures)[("client", "Size", "OK")] == 1


def test_what_is_killed_has_counted_all(tmp_path: Path) -> None:
    """A user's sitecustomize ran before it, and forks count for themselves."""
    (tmp_path / "sitecustomize.py").write_text("import builtins; builtins.ours = 'ran'")
    text = """
    import os, signal, sys
    import sitecustomize
    assert ours == "ran" and "startup" not in sitecustomize.__file__
    assert not [each for each in sys.path if "startup" in each]
    from _tensorwire_rpctrace.patches import Tracer
    recorder = next(x for x in sys.meta_path if isinstance(x, Tracer))._recorder
    row = recorder.row(("calls", "client", "unary_unary", "/x/Y", "OK"))
    recorder.add(row, 5)
    if os.fork() == 0:
        recorder.add(row, 7)
        recorder.add(recorder.row(("calls", "client", "unary_unary", "/x/Z", "OK")), 1)
        os._exit(0)
    os.wait()
    recorder.add(row, 9)
    os.kill(os.getpid(), signal.SIGKILL)
    """
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = (sys.executable, script(tmp_path, "killed.py", text))
    done, figures = run(tmp_path, *command, env=environment)
    assert done.returncode == 128 + signal.SIGKILL, done.stderr
    assert calls(figures) == {("client", "Y", "OK"): 3, ("client", "Z", "OK"): 1}
    assert figures["rows"][0]["total_ns"] == 21
    assert figures["processes"]["with_rpcs"] == 2


def test_what_cannot_be_counted_is_told(tmp_path: Path) -> None:
    """The folder of the trace takes no more files: the program runs, and a line says so."""
    text = """
    import os, resource, sys
    from _tensorwire_rpctrace.patches import Tracer
    recorder = next(x for x in sys.meta_path if isinstance(x, Tracer))._recorder
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
    import signal
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    recorder.add(recorder.row(("calls", "client", "unary_unary", "/x/Y", "OK")), 5)
    print("ran")
    """
    done, figures = run(tmp_path, sys.executable, script(tmp_path, "full.py", text))
    assert (done.returncode, done.stdout) == (0, "ran\n"), done.stderr
    assert re.search(r"process \d+ is not counted: .*File too large", done.stderr), done.stderr
    assert figures["rows"] == []


def test_a_grpcio_that_is_another_inside_is_told(tmp_path: Path) -> None:
    """Its modules have the usual names, but not the parts that the trace replaces."""
    package = tmp_path / "grpc"
    package.mkdir()
    (package / "__init__.py").write_text("from grpc import _channel, _server")
    (package / "_channel.py").write_text("class Channel: pass")
    (package / "_server.py").write_text("")
    command = (sys.executable, script(tmp_path, "other.py", "import grpc; print(grpc.__file__)"))
    done, figures = run(tmp_path, *command)
    assert (done.returncode, done.stdout) == (0, f"{package / '__init__.py'}\n"), done.stderr
    assert [each.partition(":")[0] for each in figures["unknown"]] == [
        "grpc._channel",
        "grpc._server",
    ]
    assert "not traced, as this grpcio is another inside: grpc._channel: " in done.stderr


def test_nothing_is_held(tmp_path: Path) -> None:
    """Messages, futures, channels are freed as without the trace; a dropped call is cancelled."""
    text = """
    import asyncio, gc, threading, time, weakref
    from concurrent import futures
    import grpc

    gc.disable()
    cancelled = threading.Event()

    class Message:
        def __init__(self, data):
            self.data = data

    def serialize(message):
        return message.data

    def forever(request, context):
        context.add_callback(cancelled.set)
        while context.is_active():
            yield Message(b"1")
            time.sleep(0.01)

    def gone(reference):
        until = time.monotonic() + 5
        while reference() is not None and time.monotonic() < until:
            time.sleep(0.001)
        return reference() is None

    server = grpc.server(futures.ThreadPoolExecutor(2))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("example.Model", {
        "Same": grpc.unary_unary_rpc_method_handler(lambda m, _: m, Message, serialize),
        "Forever": grpc.unary_stream_rpc_method_handler(forever, Message, serialize),
    }),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    channel = grpc.insecure_channel(f"127.0.0.1:{port}")
    same = channel.unary_unary("/example.Model/Same", serialize, Message)
    request = Message(b"x")
    response = same(request)
    references = [weakref.ref(request), weakref.ref(response)]
    del request, response
    future = same.future(Message(b"x"))
    print(type(future).__name__, future.result().data, future.code().name)
    references.append(weakref.ref(future))
    del future
    stream = channel.unary_stream("/example.Model/Forever", serialize, Message)(Message(b""))
    next(stream)
    del stream
    print(cancelled.wait(5))
    references.append(weakref.ref(channel))
    del channel, same
    print([gone(each) for each in references])

    async def main():
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            request = Message(b"x")
            call = channel.unary_unary("/example.Model/Same", serialize, Message)(request)
            print(type(call).__name__, (await call).data)
            reference = weakref.ref(request)
            del request, call
            await asyncio.sleep(0)
            print(gone(reference))

    asyncio.run(main())
    server.stop(None).wait()
    """
    program = script(tmp_path, "held.py", text)
    plain = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=30)
    assert "[True, True, True, True]" in plain.stdout, plain.stderr
    done, figures = run(tmp_path, sys.executable, program)
    assert (done.returncode, done.stdout) == (0, plain.stdout), done.stderr
    assert calls(figures)[("client", "Forever", "CANCELLED")] == 1


@pytest.mark.parametrize(
    ("command", "output", "code", "said"),
    [
        (["sh", "-c", "echo out; exit 3"], "out\n", 3, "the command started no Python"),
        ([sys.executable, "-c", "print(input())"], "in\n", 0, "1 Python processes, none of which"),
        (["/nowhere/at/all"], "", 127, "cannot run /nowhere/at/all"),
    ],
    ids=["sh", "python", "missing"],
)
def test_a_command_without_calls(
    command: list[str], output: str, code: int, said: str, tmp_path: Path
) -> None:
    done, _ = run(tmp_path, *command, input="in\n")
    assert (done.stdout, done.returncode) == (output, code)
    assert said in done.stderr


def test_signals_are_passed_on() -> None:
    text = textwrap.dedent("""
        import os, signal, sys, time
        got = []
        def take(number, frame):
            got.append(number)
            os.write(1, b"%d\\n" % number)
        for each in (signal.SIGTERM, signal.SIGINT):
            signal.signal(each, take)
        os.write(1, b"ready\\n")
        while len(got) < 2:
            time.sleep(0.01)
        sys.exit(5)
    """)
    command = [*TRACE, "--", sys.executable, "-c", text]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None
    # A signal that does not come is waited for in vain.
    too_late = threading.Timer(30.0, os.killpg, (process.pid, signal.SIGKILL))
    too_late.start()
    with process:
        assert process.stdout.readline() == "ready\n"
        for number in (signal.SIGTERM, signal.SIGINT):
            process.send_signal(number)
            assert process.stdout.readline() == f"{int(number)}\n"
        assert process.wait(20) == 5
    too_late.cancel()


def test_the_thresholds_are_those_of_attachments() -> None:
    assert 1 << (SHM_BITS - 1) == THRESHOLDS["shm"]
    assert 1 << (TCP_BITS - 1) == THRESHOLDS["tcp"]
