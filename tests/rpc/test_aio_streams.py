"""The behaviour that gRPC documents of `grpc.aio`, further: streams, ends and all servicers."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
import grpc.aio
import pytest
from ends import RUNTIME_SHM, RUNTIME_TCP
from grpc._cython.cygrpc import ExecuteBatchError
from test_aio import BIG, FOUR, echo, echo_all, items, run, runner
from test_rpc_conformance import SS, SU, US, UU, fault

from tensorwire import rpc
from tensorwire.rpc.asyncio.runtime_behavior import AioPerformance, SyncPerformance

__all__ = ["run"]  # a fixture

SMALL = b"x" * 1000
LONG = b"y" * 20_000
MANY = 2000
# Of messages that travel as they are: those that go ahead are bounded by the memory for them.
AS_THEY_ARE: dict[str, Any] = {
    "grpcio": None,
    "shm": {**RUNTIME_SHM, "limits": rpc.Limits(threshold_bytes=1 << 30)},
    "tcp": {**RUNTIME_TCP, "limits": rpc.Limits(threshold_bytes=1 << 30)},
}


@pytest.fixture(params=AS_THEY_ARE)
def run_plain(request: pytest.FixtureRequest) -> Any:
    return runner(AS_THEY_ARE[request.param], AS_THEY_ARE[request.param])


async def until(condition: Any, seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        await asyncio.sleep(0.005)


async def stands_still(made: list[int]) -> None:
    before = -1
    while len(made) != before:
        before = len(made)
        await asyncio.sleep(0.3)
    assert before < MANY


@pytest.mark.slow
def test_a_slow_reader_holds_up_the_servicer(run_plain: Any) -> None:
    made: list[int] = []

    async def endless(request: bytes, context: Any) -> AsyncIterator[bytes]:
        for number in range(MANY):
            made.append(number)
            yield LONG

    async def test(channel: Any) -> None:
        call = channel.unary_stream("/t/m")(b"")
        assert await call.read() == LONG
        await stands_still(made)
        count = 1
        while await call.read() is not grpc.aio.EOF:
            count += 1
        assert count == MANY
        assert await call.code() is grpc.StatusCode.OK

    run_plain({"/t/m": US(endless)}, test)


@pytest.mark.slow
def test_a_slow_servicer_holds_up_the_requests(run_plain: Any) -> None:
    made: list[int] = []
    go = asyncio.Event()

    async def count(requests: AsyncIterator[bytes], context: Any) -> bytes:
        await go.wait()
        return b"%d" % len([each async for each in requests])

    async def requests() -> AsyncIterator[bytes]:
        for number in range(MANY):
            made.append(number)
            yield LONG

    async def test(channel: Any) -> None:
        call = channel.stream_unary("/t/m")(requests())
        await stands_still(made)
        go.set()
        assert await call == b"%d" % MANY

    run_plain({"/t/m": SU(count)}, test)


# grpc.aio takes a message of 1 MB at once, and fails a write while a longer one is under way.
@pytest.mark.parametrize(
    ("ends", "size"),
    [
        (ends, size)
        for ends in AS_THEY_ARE
        for size in (1_000_000, 4_000_000)[: 1 + (ends != "grpcio")]
    ],
)
def test_a_response_whose_write_is_cancelled_is_sent_whole(ends: str, size: int) -> None:
    """The client would take the next message for the rest of it."""

    async def answer(request: bytes, context: Any) -> None:
        await context.write(b"a" * size)
        for letter in (b"b", b"c"):  # the second waits for its turn
            writing = asyncio.ensure_future(context.write(letter * size))
            await asyncio.wait((writing,), timeout=0.02)
            writing.cancel()
            await asyncio.wait((writing,))
        if request:
            await context.write(b"d" * 100)

    async def test(channel: Any) -> None:
        for request in (b"more", b""):
            call = channel.unary_stream("/t/m")(request)
            await asyncio.sleep(0.3)
            found = [(each[:1], len(each)) async for each in call if each.strip(each[:1]) == b""]
            assert found[:2] == [(b"a", size), (b"b", size)]
            assert found[2:] in whole[request]
            assert await call.code() is grpc.StatusCode.OK

    last = (b"d", 100)
    whole = {b"more": ([(b"c", size), last], [last]), b"": ([(b"c", size)], [])}
    runner(AS_THEY_ARE[ends], AS_THEY_ARE[ends])({"/t/m": US(answer)}, test)


@pytest.mark.parametrize("ends", [each for each in AS_THEY_ARE if each != "grpcio"])
def test_messages_that_several_tasks_write_are_whole(ends: str) -> None:
    """In `grpc.aio` such a write fails; here one leaves after the other."""
    sizes = [1_000_000, 10, 2_000_000, 300_000]
    messages = [bytes([65 + i]) * size for i, size in enumerate(sizes)]

    async def exchange(requests: AsyncIterator[bytes], context: Any) -> None:
        found = [each async for each in requests]
        await asyncio.gather(*(context.write(each) for each in found))

    async def test(channel: Any) -> None:
        call = channel.stream_stream("/t/m")()
        writing = asyncio.gather(*(call.write(each) for each in messages))
        await asyncio.sleep(0)
        await call.done_writing()
        await writing
        assert [each async for each in call] == messages

    runner(AS_THEY_ARE[ends], AS_THEY_ARE[ends])({"/t/m": SS(exchange)}, test)


@pytest.mark.parametrize("ends", [each for each in AS_THEY_ARE if each != "grpcio"])
def test_an_end_of_requests_that_is_cancelled_cancels_the_call(ends: str) -> None:
    """A write that is cancelled does so too; else the server would wait for the end."""
    go = asyncio.Event()

    async def wait(requests: AsyncIterator[bytes], context: Any) -> None:
        await go.wait()

    async def test(channel: Any) -> None:
        call = channel.stream_stream("/t/m")()
        writing = [asyncio.ensure_future(call.write(bytes(3_000_000))) for _ in range(5)]
        await asyncio.sleep(0.1)
        assert not all(each.done() for each in writing)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(call.done_writing(), 0.1)
        assert await call.code() is grpc.StatusCode.CANCELLED
        await asyncio.wait(writing)
        go.set()

    runner(AS_THEY_ARE[ends], AS_THEY_ARE[ends])({"/t/m": SS(wait)}, test)


@pytest.mark.slow
@pytest.mark.parametrize("end", ["cancel", "deadline"])
@pytest.mark.parametrize("arity", ["us", "ss"])
def test_an_end_while_the_servicer_waits(run: Any, arity: str, end: str) -> None:
    left: list[str] = []

    async def endless(request: Any, context: Any) -> AsyncIterator[bytes]:
        context.add_done_callback(lambda _: left.append("done"))
        try:
            while True:
                yield SMALL
        finally:
            left.append("left")

    async def test(channel: Any) -> None:
        timeout = 1.0 if end == "deadline" else None
        if arity == "us":
            call = channel.unary_stream("/t/m")(b"", timeout=timeout)
        else:
            call = channel.stream_stream("/t/m")(items(b"1"), timeout=timeout)
        assert await call.read() == SMALL
        if end == "cancel":
            assert call.cancel()
            assert await call.code() is grpc.StatusCode.CANCELLED
            assert call.cancelled()
            assert not call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call.read()
        else:
            assert await call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call.read()
            assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await until(lambda: {"done", "left"} <= set(left))

    run({"/t/m": US(endless) if arity == "us" else SS(endless)}, test)


def test_a_cancelled_unary_call_halts_its_servicer(run: Any) -> None:
    seen: list[str] = []

    async def hang(request: bytes, context: Any) -> bytes:
        seen.append("running")
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            seen.append("cancelled")
            raise
        return b""

    async def test(channel: Any) -> None:
        call = channel.unary_unary("/t/m")(b"")
        await until(lambda: seen == ["running"])
        assert not call.done()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await until(lambda: seen == ["running", "cancelled"])
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary("/t/m")(b"", timeout=0.3)
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await until(lambda: seen == ["running", "cancelled"] * 2)

    run({"/t/m": UU(hang)}, test)


def test_a_task_that_is_cancelled_ends_its_call(run: Any) -> None:
    seen: list[str] = []

    async def hang(request: bytes, context: Any) -> bytes:
        seen.append("running")
        try:
            await asyncio.sleep(30)
        finally:
            seen.append("over")
        return b""

    async def test(channel: Any) -> None:
        async def call() -> None:
            await channel.unary_unary("/t/m")(b"")

        task = asyncio.create_task(call())
        await until(lambda: seen == ["running"])
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: seen == ["running", "over"])

    run({"/t/m": UU(hang)}, test)


def test_servicers_that_are_not_asynchronous(run: Any) -> None:
    main = threading.get_ident()

    def unary(request: bytes, context: Any) -> bytes:
        assert threading.get_ident() != main
        context.set_trailing_metadata((("last", "1"),))
        return request + b"!"

    def stream(request: bytes, context: Any) -> Iterator[bytes]:
        for each in (b"1", b"2"):
            yield request + each

    def join(requests: Iterator[bytes], context: Any) -> bytes:
        return b"".join(requests)

    def abort(request: bytes, context: Any) -> bytes:
        context.abort(grpc.StatusCode.DATA_LOSS, "lost")
        raise AssertionError

    async def test(channel: Any) -> None:
        call = channel.unary_unary("/t/uu")(BIG)
        assert await call == BIG + b"!"
        assert tuple(await call.trailing_metadata()) == (("last", "1"),)
        assert [each async for each in channel.unary_stream("/t/us")(b"x")] == [b"x1", b"x2"]
        assert await channel.stream_unary("/t/su")(items(b"a", BIG)) == b"a" + BIG
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary("/t/abort")(b"")
        assert (caught.value.code(), caught.value.details()) == (
            grpc.StatusCode.DATA_LOSS,
            "lost",
        )

    methods = {"/t/uu": UU(unary), "/t/us": US(stream), "/t/su": SU(join), "/t/abort": UU(abort)}
    run(methods, test)


def test_metadata_and_status_of_a_stream(run: Any) -> None:
    go = asyncio.Event()

    async def answer(requests: Any, context: Any) -> AsyncIterator[bytes]:
        assert ("key", "value") in [tuple(each) for each in context.invocation_metadata()]
        await context.send_initial_metadata((("first", "1"), ("first-bin", b"\0")))
        await go.wait()
        async for each in requests:
            yield each
        context.set_trailing_metadata((("last", "2"),))
        await context.abort(grpc.StatusCode.NOT_FOUND, "none")

    async def test(channel: Any) -> None:
        call = channel.stream_stream("/t/m")(items(BIG), metadata=(("key", "value"),))
        initial = await call.initial_metadata()
        assert tuple(initial) == (("first", "1"), ("first-bin", b"\0"))
        go.set()
        assert await call.read() == BIG
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        error = caught.value
        assert (error.code(), error.details()) == (grpc.StatusCode.NOT_FOUND, "none")
        assert tuple(error.trailing_metadata()) == (("last", "2"),)
        assert call.done()

    run({"/t/m": SS(answer)}, test)


def test_serializers_that_fail(run: Any) -> None:
    async def test(channel: Any) -> None:
        for method in ("/t/request", "/t/response"):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await channel.unary_unary(method)(SMALL)
            assert caught.value.code() is grpc.StatusCode.UNKNOWN
            assert caught.value.details() == "Unexpected <class 'ValueError'>: no"
        assert await channel.unary_unary("/t/uu", None, fault)(SMALL) is None

    run(
        {
            "/t/request": UU(echo, request_deserializer=fault),
            "/t/response": UU(echo, response_serializer=fault),
            "/t/uu": UU(echo),
        },
        test,
    )


def test_messages_of_nothing_and_of_text(run: Any) -> None:
    """Without a serializer None is a message of no bytes, and text is encoded."""

    async def nothing(request: bytes, context: Any) -> Any:
        return None if request else "text"

    async def several(request: bytes, context: Any) -> AsyncIterator[Any]:
        yield None
        yield "ö"
        yield request

    async def test(channel: Any) -> None:
        call = channel.unary_unary("/t/nothing", lambda message: message)
        assert await call(b"x") == b""
        assert await call(None) == b"text"
        stream = channel.unary_stream("/t/several")(b"x")
        assert [each async for each in stream] == [b"", "ö".encode(), b"x"]
        assert await channel.stream_unary("/t/su")(items(b"a", None)) == b"2"

    async def count(requests: Any, context: Any) -> bytes:
        return str(len([each async for each in requests])).encode()

    run({"/t/nothing": UU(nothing), "/t/several": US(several), "/t/su": SU(count)}, test)


@pytest.mark.parametrize("arity", ["uu", "us", "su", "ss"])
def test_metadata_that_cannot_be_sent(run: Any, arity: str) -> None:
    """The call fails, and is not waited for for ever."""

    async def test(channel: Any) -> None:
        kinds = {"u": "unary", "s": "stream"}
        method = getattr(channel, f"{kinds[arity[0]]}_{kinds[arity[1]]}")(f"/t/{arity}")
        call = method(SMALL if arity[0] == "u" else items(SMALL), metadata=(("A B", "1"),))
        with pytest.raises((grpc.aio.AioRpcError, ExecuteBatchError)):
            await asyncio.wait_for(call if arity[1] == "u" else call.read(), 5)
        call = channel.unary_unary("/t/uu")
        assert await call(SMALL) == SMALL

    run(FOUR, test)


def test_requests_that_fail(run: Any) -> None:
    async def requests() -> AsyncIterator[bytes]:
        yield SMALL
        raise RuntimeError("no more")

    async def test(channel: Any) -> None:
        call = channel.stream_stream("/t/ss")(requests())
        with pytest.raises(asyncio.CancelledError):
            async for _ in call:
                pass
        assert await call.code() is grpc.StatusCode.CANCELLED

    run(FOUR, test)


@pytest.mark.parametrize("client", ["uu", "us", "su", "ss"])
@pytest.mark.parametrize("server", ["uu", "us", "su", "ss"])
def test_ends_that_disagree_on_the_arity(run: Any, client: str, server: str) -> None:
    async def stream(request: bytes, context: Any) -> AsyncIterator[bytes]:
        yield request

    async def first(requests: AsyncIterator[bytes], context: Any) -> bytes:
        return b"".join([each async for each in requests])

    handlers = {"uu": UU(echo), "us": US(stream), "su": SU(first), "ss": SS(echo_all)}
    kind = {"u": "unary", "s": "stream"}

    async def test(channel: Any) -> None:
        multi = getattr(channel, f"{kind[client[0]]}_{kind[client[1]]}")("/t/m")
        for message in (SMALL, BIG):
            call = multi(message if client[0] == "u" else items(message))
            if client[1] == "u":
                assert await call == message
            else:
                assert [each async for each in call] == [message]

    run({"/t/m": handlers[server]}, test)


def test_maximum_concurrent_rpcs(run: Any) -> None:
    release = asyncio.Event()
    running = asyncio.Event()

    async def method(request: bytes, context: Any) -> bytes:
        if request == b"wait":
            running.set()
            await release.wait()
        return request

    async def test(channel: Any) -> None:
        call = channel.unary_unary("/t/m")
        held = call(b"wait")
        await asyncio.wait_for(running.wait(), 20)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(b"x")
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        release.set()
        assert await held == b"wait"

    run({"/t/m": UU(method)}, test, maximum_concurrent_rpcs=1)


@pytest.mark.slow
def test_a_thousand_streams_at_a_time(run: Any) -> None:
    """All are open before the first one goes on."""
    count = 1000
    go = asyncio.Event()
    here = 0

    async def stream(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        nonlocal here
        here += 1
        if here == count:
            go.set()
        await go.wait()
        async for each in requests:
            yield each

    async def test(channel: Any) -> None:
        multi = channel.stream_stream("/t/m")

        async def one(number: int) -> bool:
            sent = [b"%d" % number, SMALL]
            return [each async for each in multi(items(*sent))] == sent

        assert all(await asyncio.gather(*map(one, range(count))))

    run({"/t/m": SS(stream)}, test)


WIRES = {"shm": RUNTIME_SHM, "tcp": RUNTIME_TCP}


@pytest.mark.parametrize("wire", WIRES)
def test_which_calls_go_by_the_runtime(wire: str) -> None:
    def way(context: Any) -> bytes:
        return b"runtime" if isinstance(context, AioPerformance | SyncPerformance) else b"grpcio"

    async def unary(request: bytes, context: Any) -> bytes:
        return way(context)

    def sync(request: bytes, context: Any) -> bytes:
        return way(context)

    async def stream(request: bytes, context: Any) -> AsyncIterator[bytes]:
        yield way(context)

    async def back(requests: Any, context: Any) -> bytes:
        return way(context) + b"".join([each async for each in requests])

    async def both(requests: Any, context: Any) -> AsyncIterator[bytes]:
        async for each in requests:
            yield way(context) + each

    methods = {
        "/t/uu": UU(unary), "/t/sync": UU(sync), "/t/us": US(stream), "/t/su": SU(back),
        "/t/ss": SS(both),
    }  # fmt: skip

    async def test(channel: Any) -> None:
        assert await channel.unary_unary("/t/uu")(b"", timeout=20) == b"runtime"
        assert channel.runtime == channel.payload == wire
        assert await channel.unary_unary("/t/sync")(b"", metadata=(("a", "b"),)) == b"runtime"
        assert [each async for each in channel.unary_stream("/t/us")(b"")] == [b"runtime"]
        assert await channel.stream_unary("/t/su")(items(b"a", b"b")) == b"runtimeab"
        call = channel.stream_stream("/t/ss")()
        await call.write(b"1")
        assert await call.read() == b"runtime1"
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF
        # What the server refuses, grpcio makes.
        assert await channel.unary_unary("/t/us")(b"") == b"grpcio"

    runner(WIRES[wire], WIRES[wire])(methods, test)
