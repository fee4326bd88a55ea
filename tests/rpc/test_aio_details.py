"""Details of `grpc.aio` that programs rely on, as grpcio's own tests show: the same for all."""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import grpc.aio
import numpy as np
import pytest
from ends import Methods
from test_aio import echo, echo_all, join, repeat, run, runner
from test_aio_streams import AS_THEY_ARE, until
from test_rpc_conformance import SS, SU, US, UU
from test_rpc_details import BareHandler

from tensorwire import StaleHandleError, rpc
from tensorwire.rpc.payload.tensors import delivered

__all__ = ["run"]  # a fixture

BEHAVIORS = {"unary_unary": echo, "unary_stream": repeat, "stream_unary": join,
             "stream_stream": echo_all}  # fmt: skip


@pytest.mark.parametrize("arity", BEHAVIORS)
def test_handlers_that_have_their_own_arity_only(run: Any, arity: str) -> None:
    async def test(channel: Any) -> None:
        for _ in range(2):
            request: Any = iter([b"abc"]) if arity.startswith("stream") else b"abc"
            answer = getattr(channel, arity)("/t/m")(request)
            if arity.endswith("stream"):
                assert b"".join([each async for each in answer]).startswith(b"abc")
            else:
                assert await answer == b"abc"

    run({"/t/m": BareHandler(arity, BEHAVIORS[arity])}, test)


def begin(channel: Any, arity: str, **options: Any) -> Any:
    """A call whose requests, if they are a stream, are written."""
    given = () if arity.startswith("stream") else (b"abc",)
    return getattr(channel, arity)("/t/m")(*given, **options)


async def hang(request: Any, context: Any) -> bytes:
    await asyncio.sleep(60)
    return b""


async def hang_stream(request: Any, context: Any) -> AsyncIterator[bytes]:
    await asyncio.sleep(60)
    yield b""


HANDLERS = {"unary_unary": UU, "unary_stream": US, "stream_unary": SU, "stream_stream": SS}
HANGING = {"unary_unary": UU(hang), "unary_stream": US(hang_stream), "stream_unary": SU(hang),
           "stream_stream": SS(hang_stream)}  # fmt: skip


@pytest.mark.parametrize("arity", BEHAVIORS)
@pytest.mark.parametrize("when", ["at once", "later", "by closing the channel"])
def test_a_cancelled_call_is_cancelled_at_once(run: Any, arity: str, when: str) -> None:
    async def test(channel: Any) -> None:
        call = begin(channel, arity)
        if when == "later":
            await asyncio.sleep(0.3)
        if when == "by closing the channel":
            await channel.close()
        else:
            assert call.cancel()
        assert call.cancelled()
        assert call.done()
        assert not call.cancel()
        assert await call.code() is grpc.StatusCode.CANCELLED
        assert await call.details()
        assert tuple(await call.trailing_metadata()) == ()
        with pytest.raises(asyncio.CancelledError):
            await (call.read() if arity.endswith("stream") else call)
        if arity.startswith("stream"):
            with pytest.raises(asyncio.InvalidStateError):
                await call.write(b"abc")

    run({"/t/m": HANGING[arity]}, test)


@pytest.mark.parametrize("arity", BEHAVIORS)
def test_who_stops_waiting_for_metadata_does_not_end_the_call(run: Any, arity: str) -> None:
    ready = asyncio.Event()

    async def one(request: Any, context: Any) -> bytes:
        await ready.wait()
        return b"def"

    async def many(request: Any, context: Any) -> AsyncIterator[bytes]:
        await ready.wait()
        yield b"def"

    async def test(channel: Any) -> None:
        ready.clear()
        call = begin(channel, arity, timeout=20)
        for wait in (call.initial_metadata, call.code):
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(wait(), 0.2)
        assert not call.done()
        assert 0 < call.time_remaining() <= 20
        ready.set()
        if arity.startswith("stream"):
            await call.write(b"abc")
            await call.done_writing()
            await call.done_writing()
        if arity.endswith("stream"):
            assert await call.read() == b"def"
            assert await call.read() is grpc.aio.EOF
        else:
            assert await call == b"def"
        assert await call.code() is grpc.StatusCode.OK
        assert await call.debug_error_string() == ""
        assert not call.cancelled()
        assert not call.cancel()

    kinds = {"unary_unary": UU(one), "unary_stream": US(many), "stream_unary": SU(one),
             "stream_stream": SS(many)}  # fmt: skip
    run({"/t/m": kinds[arity]}, test)


def test_a_stream_is_written_and_read_in_one_way_only(run: Any) -> None:
    async def test(channel: Any) -> None:
        call = channel.stream_stream("/t/m")()
        await call.write(b"abc")
        assert await call.read() == b"abc"
        with pytest.raises(grpc.aio.UsageError):
            [each async for each in call]
        await call.done_writing()
        with pytest.raises(asyncio.InvalidStateError):
            await call.write(b"abc")
        assert await call.read() is grpc.aio.EOF
        call = channel.stream_stream("/t/m")(iter([b"abc"]))
        with pytest.raises(grpc.aio.UsageError):
            await call.write(b"abc")
        assert [each async for each in call] == [b"abc"]
        assert await call.read() is grpc.aio.EOF
        with pytest.raises(grpc.aio.UsageError):
            await call.write(b"abc")
        with pytest.raises(grpc.aio.UsageError):
            await call.done_writing()

    run({"/t/m": SS(echo_all)}, test)


def test_requests_without_a_serializer_are_bytes(run: Any) -> None:
    async def test(channel: Any) -> None:
        for request in ("abc", bytearray(b"abc"), 5):
            with pytest.raises(TypeError):
                await channel.unary_unary("/t/u")(request)
            call = channel.stream_stream("/t/s")()
            with pytest.raises(TypeError):
                await call.write(request)
            call.cancel()
        assert await channel.unary_unary("/t/u")(None) == b""

    run({"/t/u": UU(echo), "/t/s": SS(echo_all)}, test)


def test_responses_without_a_serializer_may_be_text(run: Any) -> None:
    async def text(request: bytes, context: Any) -> Any:
        return request.decode()

    async def test(channel: Any) -> None:
        for _ in range(2):
            assert await channel.unary_unary("/t/m")(b"abc") == b"abc"

    run({"/t/m": UU(text)}, test)


def test_credentials_of_a_call_need_a_secure_channel(run: Any) -> None:
    async def test(channel: Any) -> None:
        for _ in range(2):
            with pytest.raises(grpc.aio.UsageError):
                channel.unary_unary("/t/m")(
                    b"abc", credentials=grpc.access_token_call_credentials("abc")
                )
            assert await channel.unary_unary("/t/m")(b"abc") == b"abc"

    run({"/t/m": UU(echo)}, test)


@pytest.mark.parametrize("arity", BEHAVIORS)
def test_a_compressed_call(run: Any, arity: str) -> None:
    async def test(channel: Any) -> None:
        for _ in range(2):
            call = begin(channel, arity, compression=grpc.Compression.Gzip)
            if arity.startswith("stream"):
                await call.write(b"abc")
                await call.done_writing()
            answer = await (call.read() if arity.endswith("stream") else call)
            assert answer.startswith(b"abc")
            call.cancel()

    kinds = {"unary_unary": UU, "unary_stream": US, "stream_unary": SU, "stream_stream": SS}
    run({"/t/m": kinds[arity](BEHAVIORS[arity])}, test)


def test_an_interceptor_gets_a_call_that_goes_on(run: Any) -> None:
    class Cancelling(grpc.aio.UnaryUnaryClientInterceptor):
        async def intercept_unary_unary(self, continuation: Any, details: Any, request: Any) -> Any:
            call = await continuation(details, request)
            assert not call.done()
            if request == b"cancel":
                assert call.cancel()
            return call

    async def test(channel: Any) -> None:
        for _ in range(2):
            assert await channel.unary_unary("/t/m")(b"abc") == b"abc"
            call = channel.unary_unary("/t/m")(b"cancel")
            with pytest.raises(asyncio.CancelledError):
                await call
            assert call.cancelled()
            assert await call.code() is grpc.StatusCode.CANCELLED

    run({"/t/m": UU(echo)}, test, interceptors=[Cancelling()])


def test_a_callback_of_a_servicer_that_fails_ends_no_call(run: Any) -> None:
    called: list[int] = []

    def fail(context: Any) -> None:
        called.append(1)
        raise RuntimeError("on purpose")

    async def method(request: bytes, context: Any) -> bytes:
        context.add_done_callback(fail)
        context.add_done_callback(lambda _: called.append(2))
        return request

    async def test(channel: Any) -> None:
        called.clear()
        for _ in range(2):
            assert await channel.unary_unary("/t/m")(b"abc") == b"abc"
        await until(lambda: len(called) == 2)
        assert called == [1, 1]

    run({"/t/m": UU(method)}, test)


@pytest.mark.parametrize("kind", AS_THEY_ARE)
def test_responses_before_one_that_is_too_long(kind: str) -> None:
    limits = [("grpc.max_receive_message_length", 1000)]

    async def main() -> None:
        ours = AS_THEY_ARE[kind]
        server = grpc.aio.server() if ours is None else rpc.aio.server(**ours)
        server.add_generic_rpc_handlers((Methods({"/t/m": US(three)}),))
        target = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        make = grpc.aio.insecure_channel if ours is None else rpc.aio.insecure_channel
        async with make(target, options=limits, **(ours or {})) as channel:
            for _ in range(2):
                call = channel.unary_stream("/t/m")(b"x" * 900)
                await asyncio.sleep(0.3)  # all has come
                assert [await call.read() for _ in range(2)] == [b"x" * 900] * 2
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await call.read()
                assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
                assert "1000" in caught.value.details()
                assert await call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        await server.stop(None)

    asyncio.run(main())


async def three(request: bytes, context: Any) -> AsyncIterator[bytes]:
    yield request
    yield request
    yield request * 2


def test_a_server_without_tensorwire_is_replaced_by_one_with_it() -> None:
    async def serve(server: Any, address: str) -> int:
        server.add_generic_rpc_handlers((Methods({"/t/m": UU(echo)}),))
        port: int = server.add_insecure_port(address)
        await server.start()
        return port

    async def main() -> None:
        plain, ours = grpc.aio.server(), rpc.aio.server()
        address = f"127.0.0.1:{await serve(plain, '127.0.0.1:0')}"
        async with rpc.aio.insecure_channel(address, [("grpc.max_reconnect_backoff_ms", 100)]) as c:
            await c.attach()
            call = c.unary_unary("/t/m")
            for _ in range(3):
                assert await call(b"a") == b"a"
                assert c.payload == "inside: the server has no tensorwire"
            await plain.stop(0)
            while c.get_state() is grpc.ChannelConnectivity.READY:
                await asyncio.sleep(0.01)
            await serve(ours, address)
            large = bytes(1 << 20)
            for _ in range(50):
                assert await call(large, wait_for_ready=True) == large
                if c.attachment is not None:
                    break
                await asyncio.sleep(0.1)
            assert c.attachment is not None
        await ours.stop(None)

    asyncio.run(main())


def test_a_plain_channel_that_reconnects_by_itself_asks_again() -> None:
    """The channel is never idle when a call begins, if a task watches its state."""

    def start(make: Any, port: int) -> Any:
        server = make(ThreadPoolExecutor(2))
        server.add_generic_rpc_handlers((Methods({"/t/uu": UU(lambda request, _: request)}),))
        server.port = server.add_insecure_port(f"127.0.0.1:{port}")
        server.start()
        return server

    async def talk() -> None:
        first = start(grpc.server, 0)
        fast = [(f"grpc.{each}_reconnect_backoff_ms", 100) for each in ("initial", "min", "max")]
        async with rpc.aio.insecure_channel(f"127.0.0.1:{first.port}", fast) as channel:
            await channel.attach()
            call = channel.unary_unary("/t/uu")
            assert await call(b"x") == b"x"
            assert channel.payload == "inside: the server has no tensorwire"
            await asyncio.to_thread(first.stop(0).wait)
            while channel.get_state(True) is not grpc.ChannelConnectivity.TRANSIENT_FAILURE:
                await asyncio.sleep(0.01)
            with pytest.raises(grpc.aio.AioRpcError):
                await call(b"x")
            second = start(rpc.server, first.port)
            await asyncio.wait_for(channel.channel_ready(), 20)
            assert await call(b"x") == b"x"
            assert await channel.attach(20)
        await asyncio.to_thread(second.stop(0).wait)

    asyncio.run(talk())


CLOSING = """
import asyncio, socket
from tensorwire.rpc import aio

silent = socket.create_server(("127.0.0.1", 0))

async def begin():
    channel = aio.insecure_channel(f"127.0.0.1:{silent.getsockname()[1]}")
    call = channel.unary_unary("/t/uu")(b"x")
    await asyncio.sleep(0.2)  # it asks for its attachment
    return channel, call

loop = asyncio.new_event_loop()
kept = loop.run_until_complete(begin())
loop.close()
print("over", flush=True)
"""


def test_a_program_ends_whose_loop_is_closed_while_a_channel_asks() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CLOSING], capture_output=True, text=True, timeout=30, check=True
    )
    assert done.stdout == "over\n"


class Owner:
    """An owner of arrays that are gone with it."""


class Passing(grpc.aio.UnaryUnaryClientInterceptor):  # type: ignore[misc]
    async def intercept_unary_unary(self, continuation: Any, details: Any, request: Any) -> Any:
        return await continuation(details, request)


async def all_of(call: Any, arity: str) -> None:
    """Waits for the answers."""
    if arity.endswith("stream"):
        async for _ in call:
            pass
    else:
        await call


WAYS = {
    "attachments": ({}, {}),
    "grpcio's server": ({}, None),
    "no transports": ({"transports": ()}, {}),
    "runtime": ({"runtime": True}, {"runtime": True}),
}


@pytest.mark.parametrize("arity", BEHAVIORS)
@pytest.mark.parametrize("way", WAYS)
def test_a_message_whose_array_is_gone_is_not_sent_empty(arity: str, way: str) -> None:
    """grpcio sends an empty message, which is answered, where a serializer fails."""
    seen: list[Any] = []

    async def one(request: Any, context: Any) -> Any:
        seen.append(request)
        return rpc.Tensor()

    async def many(request: Any, context: Any) -> AsyncIterator[Any]:
        seen.append(request)
        yield rpc.Tensor()

    async def one_of_many(requests: Any, context: Any) -> Any:
        async for each in requests:
            seen.append(each)
        return rpc.Tensor()

    async def many_of_many(requests: Any, context: Any) -> AsyncIterator[Any]:
        async for each in requests:
            seen.append(each)
            yield rpc.Tensor()

    types = (rpc.Tensor.FromString, rpc.Tensor.SerializeToString)
    make = getattr(grpc, f"{arity}_rpc_method_handler")
    servicers = dict(zip(BEHAVIORS, (one, many, one_of_many, many_of_many), strict=True))
    streams = arity.startswith("stream")

    async def attempt(call: Any, good: Any, *, written: bool) -> None:
        gone = rpc.pack(np.ones(1000), owner=Owner())
        if not streams:
            await all_of(call(gone), arity)
        elif written:
            under_way = call()
            await under_way.write(good)
            await under_way.write(gone)
        else:
            await all_of(call(iter([good, gone])), arity)

    async def test(channel: Any) -> None:
        call = getattr(channel, arity)("/t/m", *reversed(types))
        errors = (StaleHandleError, TypeError, grpc.aio.AioRpcError, asyncio.CancelledError)
        for written in (False, False, True):  # the first before there is an attachment
            good = rpc.pack(np.ones(1000))
            with pytest.raises(errors):
                await attempt(call, good, written=written)
            delivered([good.held.ticket])
        assert all(each.shape == [1000] for each in seen)
        assert streams or not seen

    for interceptors in ([], [Passing()]):
        handler = make(servicers[arity], *types)
        runner(*WAYS[way])({"/t/m": handler}, test, interceptors=interceptors)


@pytest.mark.parametrize("arity", BEHAVIORS)
def test_a_request_that_cannot_be_serialized_is_not_sent_empty(arity: str) -> None:
    seen: list[bytes] = []

    class Notes(grpc.aio.ServerInterceptor):  # type: ignore[misc]
        async def intercept_service(self, continuation: Any, details: Any) -> Any:
            handler = await continuation(details)
            if details.method != "/t/m":
                return handler

            def read(data: bytes) -> bytes:
                seen.append(data)
                return data

            return handler._replace(request_deserializer=read)

    def refuse(request: Any) -> bytes:
        raise ValueError("it cannot be")

    async def test(channel: Any) -> None:
        for _ in range(2):
            given: Any = iter([b"abc"]) if arity.startswith("stream") else b"abc"
            answer = getattr(channel, arity)("/t/m", refuse)(given)
            with pytest.raises((TypeError, asyncio.CancelledError)):
                await all_of(answer, arity)
        assert seen == []

    for way in ("attachments", "no transports"):
        at_client, at_server = WAYS[way]
        run = runner(at_client, {**at_server, "interceptors": [Notes()]})
        run({"/t/m": HANDLERS[arity](BEHAVIORS[arity])}, test)
