"""The behaviour that gRPC documents of `grpc.aio`, for grpcio and for us; and payload's ways."""

import asyncio
import gc
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import grpc
import grpc.aio
import numpy as np
import pytest
from ends import RUNTIME_SHM, RUNTIME_TCP, SHM, TCP, Methods
from test_rpc_conformance import SS, SU, US, UU

from tensorwire import rpc
from tensorwire.rpc.payload import tensors

BIG = bytes(range(256)) * 1200
TENSORS = {
    "request_deserializer": rpc.Tensor.FromString,
    "response_serializer": rpc.Tensor.SerializeToString,
}
TYPES = rpc.Tensor.SerializeToString, rpc.Tensor.FromString
# One more user of grpcio's poller, which otherwise ends and begins with the servers and channels of
# each test: whichever thread collects the last of them waits for the poller without an end, and has
# waited for one that was gone.
grpc.aio.init_grpc_aio()

SYSTEMS = {
    "shm": (SHM, SHM),
    "tcp": (TCP, TCP),
    "runtime over shm": (RUNTIME_SHM, RUNTIME_SHM),
    "runtime over tcp": (RUNTIME_TCP, RUNTIME_TCP),
    "grpcio": (None, None),
    "our channel": (SHM, None),
    "our server": (None, SHM),
}


@pytest.fixture(params=SYSTEMS)
def run(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Runs a test in an event loop, with a channel to a server of these methods."""
    return runner(*SYSTEMS[request.param])


def runner(at_client: Any, at_server: Any) -> Callable[..., None]:
    """Runs a test with these options of ours at the two ends; None: of grpcio."""

    def start(
        methods: dict[str, Any],
        test: Callable[[Any], Awaitable[None]],
        *,
        interceptors: Any = None,
        **options: Any,
    ) -> None:
        async def main() -> None:
            make = grpc.aio.server if at_server is None else rpc.aio.server
            server = make(**options, **(at_server or {}))
            server.add_generic_rpc_handlers((Methods(methods),))
            target = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
            async with AsyncExitStack() as stack:
                await server.start()
                stack.push_async_callback(server.stop, None)
                connect = (
                    grpc.aio.insecure_channel if at_client is None else rpc.aio.insecure_channel
                )
                channel = connect(target, interceptors=interceptors, **(at_client or {}))
                await stack.enter_async_context(channel)
                if at_client is not None:
                    await channel.attach()
                await asyncio.wait_for(test(channel), 30)

        asyncio.run(main())
        gc.collect()

    return start


async def echo(request: Any, context: Any) -> Any:
    return request


async def repeat(request: bytes, context: Any) -> AsyncIterator[bytes]:
    for number in range(3):
        yield request + bytes([number])


async def join(requests: AsyncIterator[bytes], context: Any) -> bytes:
    return b"".join([each async for each in requests])


async def echo_all(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
    async for each in requests:
        yield each


FOUR = {"/t/uu": UU(echo), "/t/us": US(repeat), "/t/su": SU(join), "/t/ss": SS(echo_all)}


async def items(*values: bytes) -> AsyncIterator[bytes]:
    for each in values:
        yield each


@pytest.mark.parametrize("message", [BIG, b"abc", b""], ids=["big", "small", "empty"])
def test_four_arities(run: Any, message: bytes) -> None:
    async def test(channel: Any) -> None:
        for _ in range(2):
            assert await channel.unary_unary("/t/uu")(message) == message
            got = [each async for each in channel.unary_stream("/t/us")(message)]
            assert got == [message + bytes([i]) for i in range(3)]
            sent = [message, b"-", message]
            assert await channel.stream_unary("/t/su")(items(*sent)) == b"".join(sent)
            assert await channel.stream_unary("/t/su")(iter(sent)) == b"".join(sent)
            got = [each async for each in channel.stream_stream("/t/ss")(items(*sent))]
            assert got == sent

    run(FOUR, test)


def test_reading_and_writing(run: Any) -> None:
    async def by_context(requests: Any, context: Any) -> None:
        while (message := await context.read()) is not grpc.aio.EOF:
            await context.write(message)

    async def test(channel: Any) -> None:
        call = channel.stream_stream("/t/m")()
        for number in range(3):
            await call.write(BIG + bytes([number]))
            assert await call.read() == BIG + bytes([number])
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF
        assert await call.code() is grpc.StatusCode.OK

    run({"/t/m": SS(by_context)}, test)


def test_metadata_and_status(run: Any) -> None:
    seen = []

    async def method(request: bytes, context: Any) -> bytes:
        seen.extend((key, value) for key, value in context.invocation_metadata())
        await context.send_initial_metadata((("first", "1"),))
        context.set_trailing_metadata((("last-bin", b"\x01"),))
        return request

    async def test(channel: Any) -> None:
        call = channel.unary_unary("/t/m")(BIG, metadata=(("key", "value"), ("key-bin", b"\xfe")))
        assert await call == BIG
        assert list(await call.initial_metadata()) == [("first", "1")]
        assert list(await call.trailing_metadata()) == [("last-bin", b"\x01")]
        assert await call.code() is grpc.StatusCode.OK
        assert {("key", "value"), ("key-bin", b"\xfe")} <= set(seen)
        assert call.done()
        assert not call.cancelled()

    run({"/t/m": UU(method)}, test)


def test_errors(run: Any) -> None:
    async def abort(request: Any, context: Any) -> None:
        await context.abort(grpc.StatusCode.DATA_LOSS, "lost it")

    async def fail(request: Any, context: Any) -> None:
        raise RuntimeError("a fault")

    async def test(channel: Any) -> None:
        for name, code in (
            ("abort", grpc.StatusCode.DATA_LOSS),
            ("fail", grpc.StatusCode.UNKNOWN),
            ("none", grpc.StatusCode.UNIMPLEMENTED),
        ):
            for _ in range(2):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await channel.unary_unary(f"/t/{name}")(BIG)
                assert caught.value.code() is code
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await channel.stream_unary(f"/s/{name}")(items(BIG))
                # grpcio says INTERNAL where a stream is over before its message is sent.
                over = name == "none" and caught.value.code() is grpc.StatusCode.INTERNAL
                assert over or caught.value.code() is code

    def behind_all(method: Any) -> Any:
        async def behavior(requests: Any, context: Any) -> None:
            async for _ in requests:
                pass
            await method(None, context)

        return behavior

    methods = {"/t/abort": UU(abort), "/t/fail": UU(fail)}
    streams = {"/s/abort": SU(behind_all(abort)), "/s/fail": SU(behind_all(fail))}
    run({**methods, **streams}, test)


@pytest.mark.parametrize("how", ["cancelled", "deadline"])
def test_ended_early(run: Any, how: str) -> None:
    ended = asyncio.Event()

    async def hang(request: bytes, context: Any) -> bytes:
        context.add_done_callback(lambda _: ended.set())
        await asyncio.sleep(20)
        return request

    async def hang_later(request: bytes, context: Any) -> AsyncIterator[bytes]:
        yield request
        await hang(request, context)

    async def test(channel: Any) -> None:
        await channel.unary_unary("/t/uu")(b"x")
        timeout = 0.5 if how == "deadline" else None
        code = grpc.StatusCode.DEADLINE_EXCEEDED if timeout else grpc.StatusCode.CANCELLED
        for method in ("/t/m", "/t/s"):
            ended.clear()
            if method == "/t/m":
                call = channel.unary_unary(method)(BIG, timeout=timeout)
                await asyncio.sleep(0.2)
            else:
                call = channel.unary_stream(method)(BIG, timeout=timeout)
                assert await call.read() == BIG
            if how == "cancelled":
                assert call.cancel()
            assert await call.code() is code
            await asyncio.wait_for(ended.wait(), 10)

    run({"/t/uu": UU(echo), "/t/m": UU(hang), "/t/s": US(hang_later)}, test)


def test_interceptors(run: Any) -> None:
    seen = []

    class Client(grpc.aio.UnaryUnaryClientInterceptor):  # type: ignore[misc]
        async def intercept_unary_unary(self, continuation: Any, details: Any, request: Any) -> Any:
            seen.append(request)
            call = await continuation(details, request + b"!")
            seen.append(await call)
            return call

    async def test(channel: Any) -> None:
        for _ in range(2):
            seen.clear()
            assert await channel.unary_unary("/t/uu")(BIG) == BIG + b"!"
            assert seen == [BIG, BIG + b"!"]

    run(FOUR, test, interceptors=[Client()])


def test_arrays(run: Any) -> None:
    async def test(channel: Any) -> None:
        if not hasattr(channel, "payload"):
            return  # a plain channel would send a Tensor without its array
        for number in range(5):
            sent = np.full(5000, number, "float32")
            got = rpc.unpack(await channel.unary_unary("/t/m", *TYPES)(rpc.pack(sent)))
            np.testing.assert_array_equal(got, 2 * sent)
        requests = (rpc.pack(np.full(5000, number)) for number in range(5))
        answers = channel.stream_stream("/t/s", *TYPES)(requests)
        assert [rpc.unpack(each)[0] async for each in answers] == [0, 2, 4, 6, 8]

    async def plain(request: Any, context: Any) -> Any:
        return rpc.embed(rpc.pack(rpc.unpack(request) * 2))

    async def plain_all(requests: Any, context: Any) -> AsyncIterator[Any]:
        async for each in requests:
            yield rpc.embed(rpc.pack(rpc.unpack(each) * 2))

    run({"/t/m": UU(plain, **TENSORS), "/t/s": SS(plain_all, **TENSORS)}, test)
    tensors._lent.clear()


@pytest.mark.parametrize("options", [SHM, TCP], ids=["shm", "tcp"])
def test_payload_goes_ahead_and_comes_back(options: dict[str, Any]) -> None:
    async def double(request: Any, context: Any) -> Any:
        return rpc.pack(rpc.unpack(request) * 2)

    async def main() -> None:
        server = rpc.aio.server(**options)
        server.add_generic_rpc_handlers((Methods({"/t/m": UU(double, **TENSORS)}),))
        target = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        async with rpc.aio.insecure_channel(target, **options) as channel:
            await channel.attach()
            call = channel.unary_unary("/t/m", *TYPES)
            for number in range(20):
                answer = await call(rpc.pack(np.full(50_000, number)))
                assert answer.data == b""
                assert rpc.unpack(answer)[-1] == 2 * number
            answers = await asyncio.gather(
                *(call(rpc.pack(np.full(50_000, number))) for number in range(50))
            )
            assert [rpc.unpack(each)[0] for each in answers] == [2 * n for n in range(50)]
            assert channel.payload == options["transports"][0]
            ends = [channel.attachment, *server.attachments]
            del answer, answers
            for _ in range(400):
                await asyncio.sleep(0.02)
                left = [(each.leases_there.used, each.leases_here.held) for each in ends]
                if left == [(0, 0), (0, 0)]:
                    break
            assert left == [(0, 0), (0, 0)]
            assert tensors.held_tensors() == tensors.lent_arrays() == 0
        await server.stop(None)

    asyncio.run(main())


def test_behind_a_load_balancer() -> None:
    """Requests that went ahead to another server are sent again, and no servicer runs twice."""
    served: list[int] = []

    def methods(number: int) -> dict[str, Any]:
        async def noting(request: Any, context: Any) -> Any:
            served.append(number)
            return request

        async def noting_stream(request: Any, context: Any) -> AsyncIterator[Any]:
            served.append(number)
            yield request

        return {"/t/m": UU(noting, **TENSORS), "/t/us": US(noting_stream, **TENSORS)}

    async def main(second_is_ours: bool) -> None:
        servers, ports = [], []
        for number in range(2):
            ours = number == 0 or second_is_ours
            server = rpc.aio.server(**SHM) if ours else grpc.aio.server()
            server.add_generic_rpc_handlers((Methods(methods(number)),))
            ports.append(server.add_insecure_port("127.0.0.1:0"))
            await server.start()
            servers.append(server)
        target = "ipv4:" + ",".join(f"127.0.0.1:{port}" for port in ports)
        robin = [("grpc.lb_policy_name", "round_robin")]
        async with rpc.aio.insecure_channel(target, options=robin, **SHM) as channel:
            await channel.attach()
            keeper, array = channel.sender.share, np.arange(5000)
            await channel.channel_ready()
            for _ in range(20):  # until the question has met a server of ours
                keeper.disconnected()
                await channel.attach()
                if channel.attachment is not None:
                    break
                # So that it is not always the turn of the other one.
                await channel.unary_unary("/t/m", *TYPES)(rpc.Tensor())
            keeper.disconnected()
            assert channel.attachment is not None
            served.clear()
            for turn in range(16):
                keeper.disconnected()  # no pause: each one tries
                if turn % 4 == 0:  # so that it is not always the turn of the same server
                    await channel.unary_unary("/t/m", *TYPES)(rpc.Tensor())
                if turn % 2:
                    answer = await channel.unary_unary("/t/m", *TYPES)(rpc.pack(array))
                else:
                    stream = channel.unary_stream("/t/us", *TYPES)(rpc.pack(array))
                    (answer,) = [each async for each in stream]
                np.testing.assert_array_equal(rpc.unpack(answer), array)
            assert len(served) == 20
            assert set(served) == {0, 1}
        for server in servers:
            await server.stop(None)

    for second_is_ours in (True, False):
        asyncio.run(main(second_is_ours))
    tensors._lent.clear()
