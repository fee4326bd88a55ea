"""Channels share attachments, which are opened beside calls, and cost nothing until they pay."""

import asyncio
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

grpc = pytest.importorskip("grpc")

from ends import ALONE, Methods, attached_channel  # noqa: E402
from test_rpc_conformance import US, UU, wait_for  # noqa: E402

from tensorwire import rpc  # noqa: E402
from tensorwire.rpc.attach import sharing  # noqa: E402
from tensorwire.rpc.payload.attachment import RpcAttachment  # noqa: E402

BIG = bytes(1 << 20)
LONG_S = 20.0


@pytest.fixture(params=[False, True], ids=["beside grpcio", "runtime"])
def runtime(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def hang(request: bytes, context: Any) -> Iterator[bytes]:
    yield b"1"
    while context.is_active():
        time.sleep(0.01)


@pytest.fixture
def server(runtime: bool) -> Iterator[Any]:
    made = rpc.server(ThreadPoolExecutor(8), runtime=runtime)
    methods = {
        "/t/count": UU(lambda request, context: b"%d" % len(request)),
        "/t/big": UU(lambda request, context: BIG),
        "/t/hang": US(hang),
    }
    made.add_generic_rpc_handlers((Methods(methods),))
    made.target = f"127.0.0.1:{made.add_insecure_port('127.0.0.1:0')}"
    made.start()
    yield made
    made.stop(0).wait()


def count(channel: Any, size: int = len(BIG)) -> None:
    assert channel.unary_unary("/t/count")(bytes(size), timeout=LONG_S) == b"%d" % size


@pytest.mark.parametrize("runtime", [False], indirect=True)
def test_small_calls_open_nothing(server: Any) -> None:
    with rpc.insecure_channel(server.target) as channel:
        for _ in range(20):
            count(channel, 1000)
        assert channel.payload.startswith("inside: no message was large enough")
        assert threading.active_count() < 100
    assert server.attachments == []


@pytest.mark.parametrize("runtime", [False], indirect=True)
@pytest.mark.parametrize("what", ["request", "response"])
def test_a_large_message_opens_the_attachment(server: Any, what: str) -> None:
    """The message itself travels inside, and no call waits."""
    with rpc.insecure_channel(server.target) as channel:
        if what == "request":
            count(channel)
        else:
            assert channel.unary_unary("/t/big")(b"") == BIG
        wait_for(lambda: channel.payload == "shm")


@pytest.mark.parametrize("runtime", [True], indirect=True)
def test_the_first_call_opens_the_runtime(server: Any) -> None:
    with rpc.insecure_channel(server.target, runtime=True) as channel:
        count(channel, 1)
        wait_for(lambda: channel.runtime == "shm")
        count(channel, 1)


def test_a_first_message_may_be_as_long_as_later_ones(server: Any, runtime: bool) -> None:
    """The limit of 4 MiB that grpcio has by itself does not depend on the way a message takes."""
    for _ in range(2):
        with rpc.insecure_channel(server.target, runtime=runtime) as channel:
            for _ in range(2):
                count(channel, 8 << 20)
                channel.attach(LONG_S)
    named = [("grpc.max_receive_message_length", len(BIG) - 1)]
    with rpc.insecure_channel(server.target, named, runtime=runtime) as channel:
        with pytest.raises(grpc.RpcError) as caught:
            channel.unary_unary("/t/big")(b"")
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_channels_to_one_server_share_an_attachment(server: Any, runtime: bool) -> None:
    one, other = (attached_channel(server.target, runtime=runtime) for _ in range(2))
    assert one.attachment is other.attachment is not None
    assert len(server.attachments) == 1
    streams = [each.unary_stream("/t/hang")(b"") for each in (one, other)]
    assert [next(each) for each in streams] == [b"1", b"1"]
    one.close()
    assert streams[0].code() is grpc.StatusCode.CANCELLED
    assert "Channel closed!" in streams[0].details()
    assert one.payload == "inside: the channel is closed"
    with pytest.raises(ValueError, match=r"[Cc]losed"):
        count(one)
    assert streams[1].is_active()
    assert other.payload == "shm"
    assert other.runtime.startswith("shm" if runtime else "grpcio")
    count(other)
    other.close()


@pytest.mark.parametrize(
    "other",
    [
        {"options": [ALONE]},
        {"options": [("grpc.max_reconnect_backoff_ms", 1000)]},
        {"limits": rpc.Limits(pool_bytes=1 << 24)},
        {"transports": ("tcp",)},
    ],
    ids=["alone", "option", "limits", "transports"],
)
def test_channels_that_differ_do_not_share(
    server: Any, runtime: bool, other: dict[str, Any]
) -> None:
    with (
        attached_channel(server.target, runtime=runtime) as one,
        attached_channel(server.target, runtime=runtime, **other) as two,
    ):
        assert one.attachment is not two.attachment
        assert one.attachment
        assert two.attachment


def test_the_last_channel_gives_the_attachment_up(
    server: Any, runtime: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharing, "LINGER_S", 0.1)
    channels = [attached_channel(server.target, runtime=runtime) for _ in range(3)]
    attachment = channels[0].attachment
    for each in channels[:2]:
        each.close()
        each.close()  # twice does nothing more
    time.sleep(0.2)
    assert channels[2].attachment is attachment
    count(channels[2])
    channels[2].close()
    wait_for(lambda: server.attachments == [])
    assert attachment.lost or attachment._node.closed


def test_closing_does_not_wait(server: Any, runtime: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """For the memory to be given back, which may take long."""
    monkeypatch.setattr(sharing, "LINGER_S", 0.0)
    release, closes = threading.Event(), []
    real = RpcAttachment.close

    def close(attachment: RpcAttachment) -> None:
        closes.append(attachment)
        release.wait(LONG_S)
        real(attachment)

    channel = attached_channel(server.target, runtime=runtime)
    monkeypatch.setattr(RpcAttachment, "close", close)
    channel.close()
    assert not release.is_set()
    wait_for(lambda: bool(closes))
    release.set()


def test_a_channel_for_each_call(server: Any, runtime: bool) -> None:
    """A channel costs the same as grpcio's, as it finds the attachment of the one before."""
    with rpc.insecure_channel(server.target, runtime=runtime) as channel:
        channel.attach(LONG_S)
    before, ways = len(os.listdir("/proc/self/fd")), []
    for _ in range(200):
        with rpc.insecure_channel(server.target, runtime=runtime) as channel:
            count(channel)
            ways.append(channel.payload)
    assert set(ways) == {"shm"}
    assert len(server.attachments) == 1
    assert len(os.listdir("/proc/self/fd")) < before + 20


@pytest.mark.parametrize("runtime", [False], indirect=True)
def test_channels_that_come_and_go_open_at_most_one(server: Any) -> None:
    """A channel may be closed before its attachment is there, which the next one then finds."""
    for _ in range(100):
        with rpc.insecure_channel(server.target) as channel:
            count(channel)
        if len(server.attachments) == 1:
            break
    assert len(server.attachments) <= 1
    with rpc.insecure_channel(server.target) as channel:
        wait_for(lambda: channel.payload == "shm")


@pytest.fixture
def silent() -> Iterator[str]:
    """The target of a server that takes connections, and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


def test_nothing_waits_for_a_silent_server(silent: str, runtime: bool) -> None:
    channel = rpc.insecure_channel(silent, runtime=runtime)
    call, began = channel.unary_unary("/t/count"), time.monotonic()
    futures = [call.future(BIG, timeout=0.5) for _ in range(3)]
    with pytest.raises(grpc.RpcError) as caught:
        call(BIG, timeout=0.5)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert {each.code() for each in futures} == {grpc.StatusCode.DEADLINE_EXCEEDED}
    assert not channel.attach(0.01)
    channel.close()
    assert time.monotonic() - began < 4.0  # opening gives up after five seconds


def test_asyncio_shares_within_an_event_loop(server: Any, runtime: bool) -> None:
    async def connect() -> Any:
        return rpc.aio.insecure_channel(server.target, runtime=runtime)

    async def two() -> Any:
        one, other = await connect(), await connect()
        assert await one.unary_unary("/t/count")(BIG) == b"%d" % len(BIG)
        assert await one.attach(LONG_S)
        assert await other.attach(LONG_S)
        assert one.attachment is other.attachment
        stream = other.unary_stream("/t/hang")(b"")
        assert await stream.read() == b"1"
        await one.close()
        assert not stream.done()
        assert await other.unary_unary("/t/count")(BIG) == b"%d" % len(BIG)
        attachment = other.attachment
        assert attachment is not None
        await other.close()
        assert await stream.code() is grpc.StatusCode.CANCELLED
        return attachment

    first = asyncio.run(two())
    assert asyncio.run(two()) is not first


SCARCE = """
import os, resource, sys
from tensorwire import rpc
limit, number, *targets = sys.argv[1:]
resource.setrlimit(resource.RLIMIT_NOFILE, (int(limit), int(limit)))
channels, ways = [], set()
for i in range(int(number)):
    channel = rpc.insecure_channel(targets[i % len(targets)])
    channels.append(channel)
    for size in (1 << 20, 3 << 20):
        size += (1 << 20) * i // len(targets)
        assert channel.unary_unary("/t/count")(bytes(size), timeout=20) == b"%d" % size
    channel.attach(20)
    ways.add(channel.payload.partition(",")[0])
    open("/etc/hostname").close()
print(*sorted(ways), len(os.listdir("/proc/self/fd")), sep="; ")
"""


@pytest.mark.parametrize("runtime", [False], indirect=True)
def test_a_client_keeps_descriptors_for_its_program(server: Any, tmp_path: Path) -> None:
    """A client with few descriptors makes calls and opens files as with grpcio."""
    program = tmp_path / "scarce.py"
    program.write_text(SCARCE)
    port = server.target.rpartition(":")[2]
    hosts = ["127.0.0.1", "ipv4:127.0.0.1", "dns:127.0.0.1", "dns:///127.0.0.1"]
    hosts += ["localhost", "dns:localhost", "dns:///localhost"]
    targets = [f"{host}:{port}" for host in hosts]
    done = subprocess.run(
        [sys.executable, str(program), "70", "24", *targets],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    *ways, most = done.stdout.strip().split("; ")
    assert ways == ["inside: this process has most of its file descriptors in use", "shm"]
    assert int(most) <= 66
    assert done.stderr.count("channels send all messages inside gRPC") == 1, "it is told once"


def test_a_fork_leaves_the_table_usable(tmp_path: Path) -> None:
    """Also where another thread was at it."""
    program = tmp_path / "forks.py"
    program.write_text("""
import os, threading
from tensorwire import rpc
from tensorwire.rpc.attach import sharing
held, over = threading.Event(), threading.Event()
def hold():
    with sharing._lock:
        held.set()
        over.wait(20)
threading.Thread(target=hold).start()
held.wait(20)
child = os.fork()
if child == 0:
    share = rpc.insecure_channel("localhost:1").share
    os._exit(0 if share.ready is None else 1)
over.set()
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
""")
    done = subprocess.run(
        [sys.executable, str(program)], capture_output=True, text=True, timeout=30
    )
    assert done.stdout == "0\n", done.stderr
