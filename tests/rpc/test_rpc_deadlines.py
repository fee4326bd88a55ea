"""Calls that travel inside grpcio end at their deadline although grpcio does not end them.

The server of these tests grants any window and reads nothing, so that the socket is full in the
middle of a message: grpcio 1.85 then ends the call when the socket ends.
"""

import asyncio
import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

grpc = pytest.importorskip("grpc")

from tensorwire import rpc  # noqa: E402
from tensorwire.rpc.threads import channel as channel_module  # noqa: E402
from tensorwire.rpc.threads.calls import Overdue, Resent  # noqa: E402

DEADLINE_EXCEEDED = grpc.StatusCode.DEADLINE_EXCEEDED
LARGE = bytes(16 << 20)
OPTIONS = (("grpc.max_send_message_length", -1),)


def frame(kind: int, flags: int, payload: bytes) -> bytes:
    """A frame of HTTP/2 that is of no stream."""
    return len(payload).to_bytes(3, "big") + struct.pack("!BBI", kind, flags, 0) + payload


SETTINGS, WINDOW_UPDATE, ACK, INITIAL_WINDOW, MOST = 4, 8, 1, 4, (1 << 31) - 1
GREETING = (
    frame(SETTINGS, 0, struct.pack("!HI", INITIAL_WINDOW, MOST))
    + frame(SETTINGS, ACK, b"")
    + frame(WINDOW_UPDATE, 0, struct.pack("!I", MOST - 65535))
)


@contextlib.contextmanager
def reading_nothing(listener: socket.socket) -> Iterator[None]:
    """A server that greets and reads nothing."""
    accepted = []

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                accepted.append(connection)
                connection.sendall(GREETING)

    thread = threading.Thread(target=serve)
    thread.start()
    yield
    listener.shutdown(socket.SHUT_RDWR)
    thread.join()
    for each in accepted:
        each.close()


@pytest.fixture
def deaf() -> Iterator[str]:
    """The target of such a server."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        with reading_nothing(listener):
            yield f"127.0.0.1:{listener.getsockname()[1]}"


@pytest.fixture(autouse=True)
def closes_quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Channels wait a moment for calls that grpcio keeps."""
    monkeypatch.setattr(channel_module, "_CLOSE_S", 0.05)


def raised(call: Callable[[], Any]) -> Any:
    with pytest.raises(grpc.RpcError) as caught:
        call()
    return caught.value


KINDS: dict[str, Callable[[Any, bytes], Any]] = {
    "call": lambda channel, data: raised(lambda: channel.unary_unary("/t/x")(data, timeout=0.3)),
    "with_call": lambda channel, data: raised(
        lambda: channel.unary_unary("/t/x").with_call(data, timeout=0.3)
    ),
    "future": lambda channel, data: channel.unary_unary("/t/x").future(data, timeout=0.3),
    "responses": lambda channel, data: channel.unary_stream("/t/x")(data, timeout=0.3),
    "requests": lambda channel, data: raised(
        lambda: channel.stream_unary("/t/x")(iter([data]), timeout=0.3)
    ),
    "requests with_call": lambda channel, data: raised(
        lambda: channel.stream_unary("/t/x").with_call(iter([data]), timeout=0.3)
    ),
    "requests future": lambda channel, data: channel.stream_unary("/t/x").future(
        iter([data]), timeout=0.3
    ),
    "both": lambda channel, data: channel.stream_stream("/t/x")(iter([data]), timeout=0.3),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_call_ends_at_its_deadline(deaf: str, kind: str) -> None:
    with rpc.insecure_channel(deaf, options=OPTIONS, transports=()) as channel:
        call = KINDS[kind](channel, LARGE)
        ended = threading.Event()
        if call.add_callback(ended.set):
            assert ended.wait(30)
        assert call.code() is DEADLINE_EXCEEDED
        # grpcio itself says either, at random: "Stream removed (Deadline Exceeded)".
        assert "deadline exceeded" in call.details().lower()
        assert call.done()
        assert not call.is_active()
        assert not call.cancelled()
        assert not call.cancel()
        assert list(call.initial_metadata()) == list(call.trailing_metadata()) == []
        assert call.exception().code() is DEADLINE_EXCEEDED
        assert raised(call.result).code() is DEADLINE_EXCEEDED
        assert not call.add_callback(ended.set)


@pytest.mark.parametrize("kind", ["responses", "both"])
def test_who_waits_for_a_response_is_released(deaf: str, kind: str) -> None:
    with rpc.insecure_channel(deaf, options=OPTIONS, transports=()) as channel:
        call = KINDS[kind](channel, LARGE)
        assert raised(lambda: next(call)).code() is DEADLINE_EXCEEDED
        assert raised(lambda: next(call)).code() is DEADLINE_EXCEEDED


def test_a_call_that_waits_for_the_attachment_ends_too(deaf: str) -> None:
    """Half of the time goes to that; the server answers neither."""
    with rpc.insecure_channel(deaf, options=OPTIONS) as channel:
        assert KINDS["call"](channel, LARGE).code() is DEADLINE_EXCEEDED


def test_small_calls_fill_the_socket(tmp_path: Path) -> None:
    """One of them meets the end of it."""
    path = str(tmp_path / "socket")  # of a unix socket, as it takes least
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        with (
            reading_nothing(listener),
            rpc.insecure_channel(f"unix:{path}", options=OPTIONS, transports=()) as channel,
        ):
            call = channel.unary_unary("/t/x")
            for _ in range(10):
                error = raised(lambda: call(bytes(60_000), timeout=0.05))
                assert error.code() is DEADLINE_EXCEEDED


class Never:
    """In the place of a method of grpcio that is not to be called."""

    def __call__(self, *given: Any) -> Any:
        raise AssertionError("the call was sent after its deadline")

    future = with_call = __call__


@pytest.mark.parametrize("kind", ["call", "with_call", "future", "responses"])
def test_what_is_ready_after_the_deadline_is_not_sent(deaf: str, kind: str) -> None:
    def serialize(message: bytes) -> bytes:
        until = time.monotonic() + 0.05
        while time.monotonic() < until:  # as when there is no memory at the other end
            time.sleep(0.01)
        return message

    with rpc.insecure_channel(deaf, transports=()) as channel:
        arity = "unary_stream" if kind == "responses" else "unary_unary"
        method = getattr(channel, arity)("/t/x", serialize)
        method._inner = Never()
        begin = method if kind in ("call", "responses") else getattr(method, kind)
        if kind in ("call", "with_call"):
            assert raised(lambda: begin(b"", timeout=0.05)).code() is DEADLINE_EXCEEDED
        else:
            assert begin(b"", timeout=0.05).code() is DEADLINE_EXCEEDED


def test_callbacks_run_once(deaf: str) -> None:
    with rpc.insecure_channel(deaf, options=OPTIONS, transports=()) as channel:
        call = KINDS["future"](channel, LARGE)
        called: list[Any] = []
        ended = threading.Event()
        call.add_done_callback(called.append)
        call.add_done_callback(lambda _: ended.set())
        assert ended.wait(30)
        call._ended()  # as when grpcio lets go of it
        assert called == [call]
        call.add_done_callback(called.append)
        assert called == [call, call]


def test_a_cancelled_call_has_ended(deaf: str) -> None:
    with rpc.insecure_channel(deaf, options=OPTIONS, transports=()) as channel:
        call = channel.unary_unary("/t/x").future(LARGE, timeout=60)
        assert call.cancel()
        assert call.cancelled()
        assert call.code() is grpc.StatusCode.CANCELLED
        with pytest.raises(grpc.FutureCancelledError):
            call.result()


def test_an_overdue_call_is_one_of_grpc() -> None:
    call = Overdue()
    assert isinstance(call, grpc.Call)
    assert isinstance(call, grpc.Future)
    assert not call.running()
    assert call.time_remaining() == 0
    assert call.traceback() is not None
    assert "Deadline Exceeded" in str(call)
    assert "Deadline Exceeded" in call.debug_error_string()
    assert raised(lambda: next(iter(call))) is call


def test_a_call_without_a_deadline_is_grpcios_own(deaf: str) -> None:
    with rpc.insecure_channel(deaf, options=OPTIONS, transports=()) as channel:
        call = channel.unary_unary("/t/x").future(b"")
        assert not isinstance(call, Resent)
        call.cancel()


async def awaited(call: Any) -> Any:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code()


async def taken(call: Any) -> Any:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in call:
            pass
    return caught.value.code()


async def called_back(call: Any) -> Any:
    """Returns the code once a callback has run, while no task waits in the call."""
    ended, count = asyncio.Event(), []
    call.add_done_callback(count.append)
    call.add_done_callback(lambda _: ended.set())
    await ended.wait()
    assert count == [call]
    return await call.code()


async def written(call: Any) -> Any:
    return await awaited(call.write(LARGE))


AIO_KINDS: dict[str, Callable[[Any], Any]] = {
    "response": lambda channel: awaited(channel.unary_unary("/t/x")(LARGE, timeout=0.3)),
    "code": lambda channel: channel.unary_unary("/t/x")(LARGE, timeout=0.3).code(),
    "callback": lambda channel: called_back(channel.unary_unary("/t/x")(LARGE, timeout=0.3)),
    "responses": lambda channel: taken(channel.unary_stream("/t/x")(LARGE, timeout=0.3)),
    "read": lambda channel: awaited(channel.unary_stream("/t/x")(LARGE, timeout=0.3).read()),
    "requests": lambda channel: awaited(channel.stream_unary("/t/x")(iter([LARGE]), timeout=0.3)),
    "both": lambda channel: taken(channel.stream_stream("/t/x")(iter([LARGE]), timeout=0.3)),
    "write": lambda channel: written(channel.stream_stream("/t/x")(timeout=0.3)),
    "write of one": lambda channel: written(channel.stream_unary("/t/x")(timeout=0.3)),
}


class Interceptor(grpc.aio.UnaryUnaryClientInterceptor):  # type: ignore[misc]
    async def intercept_unary_unary(self, continuation: Any, details: Any, request: Any) -> Any:
        return await continuation(details, request)


@pytest.mark.parametrize("transports", [(), ("shm",)], ids=["plain", "asked"])
@pytest.mark.parametrize("kind", AIO_KINDS)
def test_a_call_of_asyncio_ends_at_its_deadline(
    deaf: str, kind: str, transports: tuple[str, ...]
) -> None:
    async def main() -> None:
        async with rpc.aio.insecure_channel(
            deaf, options=OPTIONS, transports=transports
        ) as channel:
            assert await AIO_KINDS[kind](channel) is DEADLINE_EXCEEDED

    asyncio.run(main())


def test_an_intercepted_call_of_asyncio_ends_at_its_deadline(deaf: str) -> None:
    async def main() -> None:
        async with rpc.aio.insecure_channel(
            deaf, options=OPTIONS, interceptors=[Interceptor()], transports=()
        ) as channel:
            assert await AIO_KINDS["response"](channel) is DEADLINE_EXCEEDED

    asyncio.run(main())


def test_an_overdue_call_of_asyncio_has_ended(deaf: str) -> None:
    async def main() -> None:
        async with rpc.aio.insecure_channel(deaf, options=OPTIONS, transports=()) as channel:
            call = channel.unary_unary("/t/x")(LARGE, timeout=0.3)
            assert not call.done()
            assert await awaited(call) is DEADLINE_EXCEEDED
            assert call.done()
            assert not call.cancelled()
            assert not call.cancel()
            assert (await call.details()).lower() == "deadline exceeded"
            assert len(await call.initial_metadata()) == len(await call.trailing_metadata()) == 0
            assert await awaited(call) is DEADLINE_EXCEEDED

    asyncio.run(main())
