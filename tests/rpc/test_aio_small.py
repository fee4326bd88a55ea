"""Calls with small requests, where the client, the server or both are of `grpc.aio`."""

import asyncio
import contextlib
import gc
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

grpc = pytest.importorskip("grpc")

from ends import Methods  # noqa: E402
from test_payload import TENSORS, moved  # noqa: E402

from tensorwire import rpc  # noqa: E402
from tensorwire.rpc.attach.terms import MARK  # noqa: E402
from tensorwire.rpc.payload import envelope as envelopes  # noqa: E402

UU = grpc.unary_unary_rpc_method_handler
LARGE = 5 << 20  # more than grpc takes in a message
ONES = {"response_serializer": rpc.Tensor.SerializeToString}


class Served:
    """Methods, and the marks that they have seen."""

    def __init__(self) -> None:
        self.seen: list[bytes | None] = []

    def _note(self, context: Any) -> None:
        self.seen.append(dict(context.invocation_metadata()).get(MARK))

    def make(self, request: bytes, context: Any) -> bytes:
        self._note(context)
        return bytes(int(request))

    def ones(self, request: bytes, context: Any) -> Any:
        self._note(context)
        return rpc.pack(np.ones(LARGE, np.uint8))

    def methods(self, *, asynchronous: bool) -> Any:
        async def make(request: bytes, context: Any) -> bytes:
            return self.make(request, context)

        async def ones(request: bytes, context: Any) -> Any:
            return self.ones(request, context)

        makes = {"/t/make": UU(make if asynchronous else self.make)}
        makes["/t/ones"] = UU(ones if asynchronous else self.ones, **ONES)
        makes["/t/raw"] = UU(lambda request, _: request)
        makes["/t/tensor"] = UU(lambda request, _: request, **TENSORS)
        return Methods(makes)


@contextlib.asynccontextmanager
async def running(
    server: Any, *more: Any, port: int = 0, asynchronous: bool = True
) -> AsyncIterator[tuple[str, Served]]:
    """Runs a server of either kind; its address, and what its methods see."""
    served = Served()
    server.add_generic_rpc_handlers((served.methods(asynchronous=asynchronous), *more))
    address = f"127.0.0.1:{server.add_insecure_port(f'127.0.0.1:{port}')}"
    started = server.start()
    if started is not None:
        await started
    try:
        yield address, served
    finally:
        stopped = server.stop(None)
        if asyncio.iscoroutine(stopped):
            await stopped
        else:
            await asyncio.to_thread(stopped.wait)


SERVERS: dict[str, tuple[Callable[[], Any], bool]] = {
    "coroutines": (lambda: rpc.aio.server(), True),
    "functions": (lambda: rpc.aio.server(ThreadPoolExecutor(2)), False),
    "threads": (lambda: rpc.server(ThreadPoolExecutor(2)), False),
}


@pytest.mark.parametrize("kind", SERVERS)
@pytest.mark.parametrize("client", ["aio", "sync"])
def test_small_calls_share_a_mark_and_large_answers_go_ahead(kind: str, client: str) -> None:
    make_server, asynchronous = SERVERS[kind]

    async def main() -> None:
        server = make_server()
        async with running(server, asynchronous=asynchronous) as (target, served):
            if client == "aio":
                async with rpc.aio.insecure_channel(target) as channel:
                    await channel.attach()
                    await talk(
                        server, channel, lambda method, *given: channel.unary_unary(*method)(*given)
                    )
            else:
                with rpc.insecure_channel(target, transports=("shm",)) as channel:
                    await asyncio.to_thread(channel.attach)
                    await talk(
                        server,
                        channel,
                        lambda method, *given: asyncio.to_thread(
                            channel.unary_unary(*method), *given
                        ),
                    )
            assert len(served.seen) == 4
            assert len(set(served.seen)) == 1
            assert served.seen[0] is not None

    async def talk(server: Any, channel: Any, call: Any) -> None:
        assert await call(("/t/raw",), b"") == b""  # negotiates
        assert channel.payload == "shm"
        (end,) = server.attachments
        before = moved(end)
        assert await call(("/t/make",), b"7") == bytes(7)
        assert await call(("/t/make",), str(LARGE).encode()) == bytes(LARGE)
        ones = "/t/ones", None, rpc.Tensor.FromString
        assert rpc.unpack(await call(ones, b"x")).sum() == LARGE
        assert len(await call(("/t/make",), str(LARGE).encode())) == LARGE
        assert moved(end) - before >= 3 * LARGE
        # A request that is not small has a mark of its own. A small Tensor travels inside.
        big = bytes(LARGE)
        assert await call(("/t/raw",), big) == big
        tensor = "/t/tensor", rpc.Tensor.SerializeToString, rpc.Tensor.FromString
        assert rpc.unpack(await call(tensor, rpc.pack(np.arange(9))))[-1] == 8
        # What looks like an envelope arrives as it is.
        message = envelopes.MAGIC + bytes(100)
        assert await call(("/t/raw",), message) == message

    asyncio.run(main())


def test_an_answer_that_nobody_takes_is_taken_back() -> None:
    async def main() -> None:
        server = rpc.aio.server()
        async with (
            running(server) as (target, _),
            rpc.aio.insecure_channel(target) as channel,
        ):
            await channel.attach()
            # Without our deserializer, as where the client has given up the call in this moment.
            shared = channel.attachment.share()
            marked = ((MARK, shared.mark),)
            make = channel.inner.unary_unary("/t/make")
            lost = await make(str(LARGE).encode(), metadata=marked)
            assert lost.startswith(envelopes.MAGIC)
            (end,) = server.attachments
            assert end.leases_there.used == 1
            shared.end(False)
            until = time.monotonic() + 20
            while end.leases_there.used and time.monotonic() < until:
                await asyncio.sleep(0.05)
            assert end.leases_there.used == 0
            assert len(await channel.unary_unary("/t/make")(str(LARGE).encode())) == LARGE

    asyncio.run(main())


def test_a_server_that_is_replaced() -> None:
    """Small calls find out, and none of another server's answers goes to the former client's."""

    async def main() -> None:
        options = [(f"grpc.{each}_reconnect_backoff_ms", 100) for each in ("initial", "min", "max")]
        async with contextlib.AsyncExitStack() as stack:
            async with running(rpc.aio.server()) as (target, _):
                channel = rpc.aio.insecure_channel(target, options)
                await stack.enter_async_context(channel)
                raw, make = channel.unary_unary("/t/raw"), channel.unary_unary("/t/make")
                assert await channel.attach()
            with pytest.raises(grpc.aio.AioRpcError) as failed:
                await raw(b"x", timeout=5)
            assert failed.value.code() is grpc.StatusCode.UNAVAILABLE
            port = int(target.rpartition(":")[2])
            async with running(rpc.aio.server(), port=port) as (_, served):
                until = time.monotonic() + 20
                while len(served.seen) < 2 or served.seen[-1] is None:
                    assert await make(b"5", wait_for_ready=True, timeout=10) == bytes(5)
                    await channel.attach()
                    assert time.monotonic() < until
                assert channel.payload == "shm"
                assert len(await make(str(LARGE).encode())) == LARGE

    asyncio.run(main())


@pytest.mark.parametrize("library", [grpc, rpc], ids=["grpcio", "ours"])
@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_response_that_is_text_comes_to_its_serializer_as_bytes(
    library: Any, asynchronous: bool
) -> None:
    """The serializer gets the same as in grpcio."""
    given = []

    async def text(request: bytes, context: Any) -> str:
        return "text"

    def serialize(response: Any) -> bytes:
        given.append(type(response))
        return bytes(response)

    async def main() -> None:
        behavior = text if asynchronous else lambda *_: "text"
        more = Methods({"/t/text": UU(behavior, response_serializer=serialize)})
        async with (
            running(library.aio.server(), more) as (target, _),
            rpc.aio.insecure_channel(target) as channel,
        ):
            for _ in range(2):
                assert await channel.unary_unary("/t/text")(b"") == b"text"

    asyncio.run(main())
    assert given == [bytes, bytes]


def count_of(numbers: list[int]) -> Callable[[bytes], bytes]:
    """A serializer that gives each request a number."""

    def serialize(request: bytes) -> bytes:
        numbers.append(len(numbers))
        return b"%d" % numbers[-1]

    return serialize


def test_a_request_is_serialized_once_also_where_there_is_no_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main() -> None:
        numbers: list[int] = []
        async with (
            running(rpc.aio.server()) as (target, _),
            rpc.aio.insecure_channel(target) as channel,
        ):
            await channel.unary_unary("/t/raw")(b"")
            # As where grpcio has lost the server, and is about to find it again.
            monkeypatch.setattr(rpc.aio.AioRpcChannel, "is_connected", False)
            assert await channel.unary_unary("/t/raw", count_of(numbers))(b"x") == b"0"
        assert numbers == [0]

    asyncio.run(main())


@contextlib.contextmanager
def answering_late() -> Iterator[tuple[str, Any]]:
    """A server in threads whose answers take so long that a client can do something else."""

    def late(request: bytes, context: Any) -> bytes:
        time.sleep(0.2)
        return bytes(int(request))

    server = rpc.server(ThreadPoolExecutor(2))
    server.add_generic_rpc_handlers((Methods({"/t/late": UU(late)}),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}", server
    finally:
        server.stop(None).wait()


def hold_up(server: Any) -> Any:
    """Holds up the event loop until an answer's payload has come; the server's attachment."""
    (end,) = server.attachments
    until = time.monotonic() + 20
    while not end.leases_there.used:
        assert time.monotonic() < until
        time.sleep(0.02)
    return end


def test_a_loop_that_comes_late_to_an_answer() -> None:
    async def main(target: str, server: Any) -> None:
        limits = rpc.Limits(pool_bytes=2 * LARGE - 1)
        async with rpc.aio.insecure_channel(target, limits=limits) as channel:
            await channel.attach()
            late = channel.unary_unary("/t/late")
            await late(b"1")
            call = late(str(LARGE).encode())
            await asyncio.sleep(0.05)
            end = hold_up(server)
            time.sleep(0.5)
            end.look()
            assert await call == bytes(LARGE)
            assert len(await late(str(LARGE).encode())) == LARGE

    with answering_late() as (target, server):
        asyncio.run(main(target, server))


@pytest.mark.parametrize("closed", [False, True])
def test_an_answer_to_a_channel_that_is_forgotten_or_at_its_end_is_no_envelope(
    closed: bool,
) -> None:
    async def main(target: str, server: Any) -> None:
        channel = rpc.aio.insecure_channel(target)
        await channel.attach()
        late = channel.unary_unary("/t/late")
        await late(b"1")
        call = late(str(LARGE).encode())
        await asyncio.sleep(0.05)
        hold_up(server)
        if closed:  # the attachment, before the answer is read
            channel.sender.share._keeper.close()
            with pytest.raises(grpc.aio.AioRpcError):
                await call
            return
        del channel, late
        gc.collect()
        assert await call == bytes(LARGE)

    with answering_late() as (target, server):
        asyncio.run(main(target, server))


@pytest.mark.parametrize("how", ["iterating", "reading"])
def test_a_stream_whose_payload_is_gone_ends_with_an_error(how: str) -> None:
    """And gives no None, which is what grpcio makes of a response that cannot be read."""

    def late(request: bytes, context: Any) -> Iterator[bytes]:
        time.sleep(0.2)
        yield bytes(LARGE)

    async def main(target: str, server: Any) -> None:
        async with rpc.aio.insecure_channel(target) as channel:
            await channel.attach()
            repeat = channel.unary_stream("/t/late")
            assert [len(each) async for each in repeat(b"")] == [LARGE]
            call = repeat(b"")
            await asyncio.sleep(0.05)
            hold_up(server)
            time.sleep(0.2)
            channel.sender.share._keeper.close()
            taken = call.read() if how == "reading" else anext(aiter(call))
            with pytest.raises(grpc.aio.AioRpcError, match="payload of a response is gone"):
                await taken

    server = rpc.server(ThreadPoolExecutor(2))
    handler = grpc.unary_stream_rpc_method_handler(late)
    server.add_generic_rpc_handlers((Methods({"/t/late": handler}),))
    target = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        asyncio.run(main(target, server))
    finally:
        server.stop(None).wait()
