"""Large messages of the runtime beside its frames, where one of the ends is of asyncio, or both."""

import asyncio
import dataclasses
import gc
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import grpc.aio
import pytest
from ends import Methods, attached_channel, serving
from test_aio import echo, echo_all, items, join
from test_aio_streams import until
from test_rpc_conformance import LONG_S, SS, SU, US, UU, wait_for
from test_rpc_conformance import echo as sync_echo
from test_rpc_large import LIES, UNLIMITED, Liar, message, nothing_is_used

from tensorwire import rpc
from tensorwire.rpc.payload import outgoing, push, route
from tensorwire.rpc.payload.leases import Lease, LeasePool
from tensorwire.rpc.payload.threads import THREADS

CHUNK = 1 << 16
SIZES = (999, 1000, CHUNK, CHUNK + 1, 5 * CHUNK + 123)


async def repeat(request: bytes, context: Any) -> AsyncIterator[bytes]:
    for each in (request, b"", request):
        yield each


async def make(request: bytes, context: Any) -> bytes:
    return message(int(request))


FOUR = {
    "/t/uu": UU(echo),
    "/t/us": US(repeat),
    "/t/su": SU(join),
    "/t/ss": SS(echo_all),
    "/t/make": UU(make),
}


@pytest.fixture(params=["shm", "tcp"])
def wire(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """In small chunks."""
    for name in ("CHUNK_BYTES", "MAPPED_CHUNK_BYTES"):
        monkeypatch.setattr(push, name, CHUNK)
    monkeypatch.setattr(route, "PUSHED_BYTES", CHUNK)
    return str(request.param)


def options(wire: str, **given: Any) -> dict[str, Any]:
    return {
        "transports": (wire,),
        "runtime": True,
        "limits": rpc.Limits(threshold_bytes=1000),
        **given,
    }


def run(
    wire: str,
    methods: dict[str, Any],
    test: Callable[[Any, Any], Awaitable[None]],
    **given: Any,
) -> None:
    """Runs a test with a channel and its server, both of asyncio."""

    async def main() -> None:
        server = rpc.aio.server(options=UNLIMITED, **options(wire, **given))
        server.add_generic_rpc_handlers((Methods(methods),))
        target = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        keywords = options(wire, **given)
        async with rpc.aio.insecure_channel(target, options=UNLIMITED, **keywords) as channel:
            await channel.attach()
            await asyncio.wait_for(test(channel, server), LONG_S)
        await server.stop(None)

    asyncio.run(main())
    gc.collect()


def test_messages_of_all_sizes_both_ways(wire: str) -> None:
    async def test(channel: Any, server: Any) -> None:
        unary = channel.unary_unary("/t/uu")
        assert await unary(message(999)) == message(999)
        assert channel.attachment.runtime_threshold_bytes == 1000
        ends = [channel.attachment, *server.attachments]
        assert [each.leases_there.leased_bytes for each in ends] == [0, 0]
        for size in SIZES:
            assert await unary(message(size)) == message(size)
        assert all(each.leases_there.leased_bytes >= 5 * CHUNK for each in ends)
        big, small = message(5 * CHUNK + 7), message(5)
        assert await channel.stream_unary("/t/su")(items(big, small, big)) == big + small + big
        assert [each async for each in channel.unary_stream("/t/us")(big)] == [big, b"", big]
        mixed = [big, small, b"", big, message(1000), big]
        stream = channel.stream_stream("/t/ss")(items(*mixed))
        assert [each async for each in stream] == mixed
        assert channel.runtime == wire
        assert await asyncio.gather(*(unary(big) for _ in range(20))) == [big] * 20
        await until(lambda: nothing_is_used(channel, server))

    run(wire, FOUR, test)


def test_what_has_memory_is_sent_without_a_thread(
    wire: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread at each end of each message cost more than all else up to 1 MiB."""
    ran: list[Callable[[], object]] = []
    run_in_thread = THREADS.run

    def counted(work: Callable[[], object]) -> None:
        ran.append(work)
        run_in_thread(work)

    async def test(channel: Any, server: Any) -> None:
        unary = channel.unary_unary("/t/uu")
        await unary(message(CHUNK))  # makes the memory
        monkeypatch.setattr(THREADS, "run", counted)
        calls = 10
        for _ in range(calls):
            await until(lambda: nothing_is_used(channel, server))
            assert await unary(message(CHUNK)) == message(CHUNK)
        # Of two messages each. What overtakes its payload is still read in a thread.
        assert len(ran) <= 2 * calls
        ran.clear()
        await unary(message(CHUNK + 1))
        assert len(ran) >= 2 or wire == "shm"

    run(wire, FOUR, test)


def test_a_loop_takes_the_memory_that_it_has_found(
    wire: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread could take it between a look and the message, for which the loop waited."""
    pick, picks, waited = LeasePool._pick, [1], list[int]()
    take = LeasePool.take

    def picked_once(pool: LeasePool, size_bytes: int) -> Lease | None:
        return pick(pool, size_bytes) if picks and picks.pop() else None

    def taken(pool: LeasePool, *given: Any) -> Lease | None:
        waited.append(threading.get_ident())
        return take(pool, *given)

    async def test(channel: Any, server: Any) -> None:
        unary = channel.unary_unary("/t/uu")
        await unary(message(CHUNK))  # makes the memory
        await until(lambda: nothing_is_used(channel, server))
        monkeypatch.setattr(LeasePool, "take", taken)
        monkeypatch.setattr(LeasePool, "_pick", picked_once)
        await unary(message(CHUNK))
        assert wire == "shm" or threading.get_ident() not in waited

    run(wire, FOUR, test)


def with_sync_client(wire: str, methods: dict[str, Any], test: Callable[[Any, Any], None]) -> None:
    """Runs a test in a thread, with a synchronous channel and its server, one of asyncio."""

    async def main() -> None:
        server = rpc.aio.server(options=UNLIMITED, **options(wire))
        server.add_generic_rpc_handlers((Methods(methods),))
        target = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()

        def in_thread() -> None:
            with attached_channel(target, options=UNLIMITED, **options(wire)) as channel:
                test(channel, server)

        await asyncio.to_thread(in_thread)
        await server.stop(None)

    asyncio.run(main())


def test_a_sync_client_of_an_asyncio_server(wire: str) -> None:
    def test(channel: Any, server: Any) -> None:
        unary, stream = channel.unary_unary("/t/uu"), channel.stream_stream("/t/ss")
        for size in SIZES:
            assert unary(message(size)) == message(size)
            assert list(stream(iter([message(size)] * 3))) == [message(size)] * 3
        assert channel.attachment.runtime_threshold_bytes == 1000
        for each in (channel.attachment, *server.attachments):
            assert each.leases_there.leased_bytes >= 5 * CHUNK

    with_sync_client(wire, FOUR, test)


def test_an_asyncio_client_of_a_sync_server(wire: str) -> None:
    server = rpc.server(ThreadPoolExecutor(4), options=UNLIMITED, **options(wire))
    methods = {"/t/uu": UU(sync_echo), "/t/ss": SS(lambda requests, context: requests)}
    server.add_generic_rpc_handlers((Methods(methods),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()

    async def main() -> None:
        target = f"127.0.0.1:{port}"
        async with rpc.aio.insecure_channel(target, options=UNLIMITED, **options(wire)) as channel:
            await channel.attach()
            unary, stream = channel.unary_unary("/t/uu"), channel.stream_stream("/t/ss")
            for size in SIZES:
                sent = message(size)
                assert await unary(sent) == sent
                assert [each async for each in stream(items(sent, sent))] == [sent, sent]
            assert all(
                each.leases_there.leased_bytes >= 5 * CHUNK
                for each in (channel.attachment, *server.attachments)
            )

    asyncio.run(main())
    server.stop(None).wait()


def test_who_does_not_read_holds_the_sender_up(wire: str) -> None:
    sent: list[int] = []
    size = 1_000_000

    async def many(request: bytes, context: Any) -> AsyncIterator[bytes]:
        for number in range(12):
            sent.append(number)
            yield message(size)

    async def test(channel: Any, server: Any) -> None:
        stream = channel.unary_stream("/t/us")(b"")
        await until(lambda: len(sent) >= 5)
        await asyncio.sleep(0.2)
        assert len(sent) <= 6  # what the window of the stream takes, and one that waits for it
        assert [len(each) async for each in stream] == [size] * 12
        await until(lambda: nothing_is_used(channel, server))
        assert server.attachments[0].leases_there.leased_bytes < 8 * size

    run(wire, {"/t/us": US(many)}, test, limits=rpc.Limits(threshold_bytes=1000, patience_s=LONG_S))


def test_memory_is_limited_and_what_does_not_fit_travels_otherwise(wire: str) -> None:
    async def test(channel: Any, server: Any) -> None:
        unary = channel.unary_unary("/t/uu")
        for size in (1 << 20, 1 << 19):
            assert await unary(message(size)) == message(size)
        for each in (channel.attachment, *server.attachments):
            assert 1 << 19 <= each.leases_there.leased_bytes
            assert each.leases_there.leased_bytes < 1 << 20

    run(wire, FOUR, test, limits=rpc.Limits(threshold_bytes=1000, pool_bytes=(1 << 20) - 1))


@pytest.fixture
def stalled(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """Threads stop after the first chunk of a message that they send, until the list is empty."""
    stops, finish = [True], outgoing.SentMessage.finish

    def stalling(message: Any) -> None:
        while stops and message.staging is not None and message.link.awaits_messages():
            time.sleep(0.01)
        finish(message)

    monkeypatch.setattr(outgoing.SentMessage, "finish", stalling)
    yield stops
    stops.clear()


def waiting(channel: Any, kind: str, **given: Any) -> Any:
    """A call that waits for the rest of a response, and the coroutine that does."""
    request = str(5 * CHUNK).encode()
    if kind == "unary":
        unary = channel.unary_unary("/t/make")(request, **given)
        return unary, unary
    stream = channel.unary_stream("/t/many")(request, **given)
    return stream, stream.read()


@pytest.mark.parametrize("kind", ["unary", "stream"])
def test_calls_that_wait_for_a_sender_end(wire: str, kind: str, stalled: list[bool]) -> None:
    """By their deadlines, by their callers, and with their servers; the event loop goes on."""
    server = rpc.server(ThreadPoolExecutor(8), options=UNLIMITED, **options(wire))
    methods = {
        "/t/uu": UU(sync_echo),
        "/t/make": UU(lambda request, context: message(int(request))),
        "/t/many": US(lambda request, context: iter([message(int(request))])),
    }
    server.add_generic_rpc_handlers((Methods(methods),))
    target = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()

    async def test(channel: Any) -> None:
        assert await channel.unary_unary("/t/uu")(b"1") == b"1"
        began = time.monotonic()
        call, reading = waiting(channel, kind, timeout=0.2)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await reading
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert time.monotonic() - began < 2
        call, reading = waiting(channel, kind)
        task = asyncio.ensure_future(reading)
        for _ in range(50):
            assert await channel.unary_unary("/t/uu")(b"1") == b"1"
        assert not task.done()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await call.code() is grpc.StatusCode.CANCELLED
        await until(lambda: nothing_is_used(channel, server))
        await until(lambda: len(channel.attachment._idle_calls) == 1024)
        call, reading = waiting(channel, kind)
        task = asyncio.ensure_future(reading)
        await asyncio.sleep(0.1)
        server.attachments[0].close()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await task
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE

    async def main() -> None:
        keywords = options(wire)
        async with rpc.aio.insecure_channel(target, options=UNLIMITED, **keywords) as channel:
            await channel.attach()
            await asyncio.wait_for(test(channel), LONG_S)

    asyncio.run(main())
    stalled.clear()
    server.stop(None).wait()


def test_a_request_whose_sender_does_not_go_on(wire: str, stalled: list[bool]) -> None:
    """Its servicer does not run, and others do; what was offered is given back."""
    served: list[int] = []

    async def method(request: bytes, context: Any) -> bytes:
        served.append(len(request))
        return b""

    def test(channel: Any, server: Any) -> None:
        unary = channel.unary_unary("/t/m")
        assert unary(b"1") == b""
        with pytest.raises(grpc.RpcError) as caught:
            unary(message(5 * CHUNK), timeout=0.2)
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        held = ThreadPoolExecutor(1).submit(unary, message(5 * CHUNK))
        for _ in range(50):
            assert unary(b"1") == b""
        assert set(served) == {1}
        stalled.clear()
        assert held.result(LONG_S) == b""
        wait_for(lambda: nothing_is_used(channel, server))
        assert set(served) == {1, 5 * CHUNK}

    with_sync_client(wire, {"/t/m": UU(method)}, test)


def test_lies_are_refused(wire: str) -> None:
    def test(channel: Any, server: Any) -> None:
        liar = Liar(channel)
        for changes in LIES:
            with pytest.raises(grpc.RpcError) as caught:
                liar.send(dataclasses.replace(liar.pushed(), **changes))
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT, changes
            assert channel.unary_unary("/t/m")(message(5000)) == message(5000)
        good = liar.pushed()
        assert len(liar.send(good)) == 100
        with pytest.raises(grpc.RpcError) as caught:  # a second time
            liar.send(good)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        with pytest.raises(grpc.RpcError) as caught:
            liar.send(liar.pushed(there=False), timeout=0.5)
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED

    with_sync_client(wire, {"/t/m": UU(echo)}, test)


def test_a_loop_that_is_held_up_has_sent_what_it_began_to() -> None:
    """Memory is mapped, so the loop sends all of it before any other task has a turn."""
    wire = "shm"
    arrived = threading.Event()

    def take(request: bytes, context: Any) -> bytes:
        arrived.set()
        return request

    async def hold_up(request: bytes, context: Any) -> bytes:
        return b"in time" if arrived.wait(LONG_S) else b"late"

    def client(channel: Any, server: Any) -> None:
        made = channel.unary_unary("/t/make").future(str(8 * CHUNK).encode())
        held_up = channel.unary_unary("/t/hold").future(b"")
        assert take(made.result(), None) == message(8 * CHUNK)
        assert held_up.result() == b"in time"

    with_sync_client(wire, {**FOUR, "/t/hold": UU(hold_up)}, client)
    arrived.clear()

    async def main(target: str) -> None:
        keywords = options(wire)
        async with rpc.aio.insecure_channel(target, options=UNLIMITED, **keywords) as channel:
            await channel.attach()
            unary = channel.unary_unary("/t/take")
            await unary(b"attached")
            arrived.clear()
            call = asyncio.ensure_future(_awaited(unary(message(8 * CHUNK))))
            while not call.done() and not channel.attachment.leases_there.used:
                await asyncio.sleep(0)
            assert arrived.wait(LONG_S)  # and nothing runs in the loop
            assert await call == message(8 * CHUNK)

    with serving() as start:
        server = rpc.server(ThreadPoolExecutor(2), options=UNLIMITED, **options(wire))
        start(server, {"/t/take": UU(take)})
        asyncio.run(main(f"127.0.0.1:{server.port}"))


async def _awaited(call: Any) -> Any:
    return await call
