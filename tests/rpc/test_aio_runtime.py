"""The runtime of asyncio channels and servers: ends that misbehave, stop or die, and mixed ones."""

import asyncio
import gc
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import grpc.aio
import numpy as np
import pytest
import rpc_serving
from ends import RUNTIME_SHM, RUNTIME_TCP, Ends, Methods, System, attached_channel
from test_aio import echo, echo_all, items, runner
from test_aio_streams import until
from test_death import SCRIPT, TYPES
from test_rpc_conformance import BIG, SS, US, UU
from test_rpc_conformance import echo as sync_echo
from test_rpc_runtime import TO_CLIENT
from test_rpc_runtime_streams import TO_SERVER

from tensorwire import rpc
from tensorwire.rpc.asyncio.runtime_behavior import AioPerformance
from tensorwire.rpc.payload import tensors
from tensorwire.rpc.runtime import client, frames, ring

WIRES = {"shm": RUNTIME_SHM, "tcp": RUNTIME_TCP}


@pytest.fixture(params=WIRES)
def wire(request: pytest.FixtureRequest) -> str:
    return str(request.param)


async def way(request: bytes, context: Any) -> bytes:
    return b"runtime" if isinstance(context, AioPerformance) else b"grpcio"


async def hang(requests: Any, context: Any) -> AsyncIterator[bytes]:
    yield b"1"
    await asyncio.sleep(30)


FOUR = {"/t/way": UU(way), "/t/uu": UU(echo), "/t/ss": SS(echo_all), "/t/hang": SS(hang)}


def test_calls_leave_nothing_behind(wire: str) -> None:
    async def test(channel: Any) -> None:
        unary, stream = channel.unary_unary("/t/uu"), channel.stream_stream("/t/ss")
        assert await unary(BIG) == BIG
        client = channel.attachment.runtime
        for number in range(50):
            assert await unary(b"x") == b"x"
            assert [each async for each in stream(items(b"1", BIG))] == [b"1", BIG]
            held = channel.stream_stream("/t/hang")(items())
            assert await held.read() == b"1"
            if number % 2:
                held.cancel()
            del held
        gc.collect()  # grpcio's calls are circles
        await until(lambda: not client._calls)
        await until(lambda: len(channel.attachment._idle_calls) == 1024)

    runner(WIRES[wire], WIRES[wire])(FOUR, test)


@pytest.mark.parametrize("runtime", [True, False])
def test_a_call_that_is_cancelled_by_a_collector_takes_no_lock(wire: str, runtime: bool) -> None:
    """A collector runs anywhere: here where memory for a message is looked for."""
    options = {**WIRES[wire], "runtime": runtime}

    async def test(channel: Any) -> None:
        call = channel.stream_stream("/t/hang")(items(BIG))
        assert await call.read() == b"1"
        with channel.attachment.leases_there._lock:
            call.cancel()
        assert await call.code() is grpc.StatusCode.CANCELLED
        await until(lambda: len(channel.attachment._idle_calls) == 1024)

    runner(options, options)(FOUR, test)


def test_a_message_is_written_at_once(wire: str) -> None:
    """Each write that waits for the one before wakes threads at both ends."""
    options = {**WIRES[wire], "limits": rpc.Limits(threshold_bytes=1 << 30)}

    async def answer(request: bytes, context: Any) -> bytes:
        return b"x"

    async def test(channel: Any) -> None:
        unary, stream = channel.unary_unary("/t/uu"), channel.stream_stream("/t/ss")
        message = bytes(200_000)
        assert await unary(b"x") == b"x"
        node = channel.attachment._node
        before = node.stats()["writes"]
        assert await unary(message) == b"x"
        assert node.stats()["writes"] - before == 1
        before = node.stats()["writes"]
        assert [each async for each in stream(items(message))] == [message]
        # The call, its only request, that there are no more, and two credits at most.
        assert node.stats()["writes"] - before <= 5

    runner(options, options)({"/t/uu": UU(answer), "/t/ss": SS(echo_all)}, test)


def test_a_sync_client_of_an_asyncio_server(wire: str) -> None:
    async def main() -> None:
        server = rpc.aio.server(**WIRES[wire])
        assert server.runtime == "offered"
        server.add_generic_rpc_handlers((Methods(FOUR),))
        target = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()

        def call() -> None:
            with attached_channel(target, **WIRES[wire]) as channel:
                assert channel.unary_unary("/t/way")(b"") == b"runtime"
                assert list(channel.stream_stream("/t/ss")(iter([b"1", BIG]))) == [b"1", BIG]
                with pytest.raises(grpc.RpcError) as caught:
                    list(channel.stream_stream("/t/hang")(iter([]), timeout=0.3))
                assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED

        await asyncio.to_thread(call)
        await server.stop(None)

    asyncio.run(main())


def test_an_asyncio_client_of_a_sync_server(wire: str) -> None:
    ends = Ends(System(wire, WIRES[wire], WIRES[wire]))
    ends.methods = {
        "/t/uu": UU(sync_echo),
        "/t/us": US(lambda request, context: iter([request, b"2"])),
        "/t/fail": UU(lambda request, context: 1 / 0),
    }
    ends.serve()

    async def main() -> None:
        target = f"127.0.0.1:{ends.port}"
        async with rpc.aio.insecure_channel(target, **WIRES[wire]) as channel:
            await channel.attach()
            assert await channel.unary_unary("/t/uu")(BIG) == BIG
            assert channel.runtime == wire
            assert [each async for each in channel.unary_stream("/t/us")(b"1")] == [b"1", b"2"]
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await channel.unary_unary("/t/fail")(b"")
            assert caught.value.code() is grpc.StatusCode.UNKNOWN

    asyncio.run(main())
    ends.close()


def test_closing_a_channel_ends_its_calls(wire: str) -> None:
    async def test(channel: Any) -> None:
        call = channel.stream_stream("/t/hang")(items())
        assert await call.read() == b"1"
        await channel.close()
        assert await call.code() is grpc.StatusCode.CANCELLED

    runner(WIRES[wire], WIRES[wire])(FOUR, test)


@pytest.mark.parametrize("grace", [None, 0.1])
def test_a_server_that_stops_ends_its_calls(wire: str, grace: float | None) -> None:
    async def main() -> None:
        server = rpc.aio.server(**WIRES[wire])
        server.add_generic_rpc_handlers((Methods(FOUR),))
        target = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        async with rpc.aio.insecure_channel(target, **WIRES[wire]) as channel:
            await channel.attach()
            call = channel.stream_stream("/t/hang")(items())
            assert await call.read() == b"1"
            stopping = asyncio.create_task(server.stop(grace))
            code = await asyncio.wait_for(call.code(), 20)
            assert code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
            await asyncio.wait_for(stopping, 20)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await channel.unary_unary("/t/way")(b"")
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE

    asyncio.run(main())


@pytest.mark.parametrize("what", TO_SERVER)
def test_a_client_that_sends_what_cannot_be(wire: str, what: str) -> None:
    async def test(channel: Any) -> None:
        assert await channel.unary_unary("/t/way")(b"") == b"runtime"
        attachment = channel.attachment
        begin = frames.call_frames((7, 1), b"/t/hang", frames.NO_DEADLINE, (), None, streams=True)
        attachment.runtime.line.send(begin)
        assert await channel.unary_unary("/t/way")(b"") == b"runtime"  # and the other has begun
        attachment.runtime.line.send(TO_SERVER[what])
        await until(lambda: attachment.lost)
        again = await channel.unary_unary("/t/way")(b"", wait_for_ready=True)
        assert again in (b"runtime", b"grpcio")

    runner(WIRES[wire], WIRES[wire])(FOUR, test)


@pytest.mark.parametrize("what", TO_CLIENT)
def test_a_server_that_sends_what_cannot_be(wire: str, what: str) -> None:
    async def main() -> None:
        server = rpc.aio.server(**WIRES[wire])
        server.add_generic_rpc_handlers((Methods(FOUR),))
        target = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        async with rpc.aio.insecure_channel(target, **WIRES[wire]) as channel:
            await channel.attach()
            assert await channel.unary_unary("/t/way")(b"") == b"runtime"
            call = channel.stream_stream("/t/hang")(items())
            assert await call.read() == b"1"
            ((_, held),) = channel.attachment.runtime._calls.items()
            data = bytearray(TO_CLIENT[what])
            if what != "no frame":  # about the call that is under way
                data[8:16] = frames.HEADER.pack(0, 0, 0, 0, *held().number)[8:16]
            next(iter(server._service._ends)).line.send((bytes(data),))
            assert await asyncio.wait_for(call.code(), 20) is grpc.StatusCode.UNAVAILABLE
            assert "broke the protocol" in await call.details()
        await server.stop(None)

    asyncio.run(main())


@pytest.fixture
def serving(wire: str) -> Iterator[Any]:
    process = subprocess.Popen(
        [sys.executable, str(SCRIPT), "serve", "ours", wire],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "TENSORWIRE_RPC": "runtime"},
    )  # fmt: skip
    yield process
    process.kill()
    process.communicate()


def test_a_server_that_is_killed(serving: Any, wire: str) -> None:
    target = f"127.0.0.1:{serving.stdout.readline().strip()}"

    async def main() -> None:
        options = {"transports": (wire,), "runtime": True, **rpc_serving.OPTIONS}
        async with rpc.aio.insecure_channel(target, **options) as channel:
            await channel.attach()
            echo = channel.unary_unary("/t/echo", *TYPES)
            assert rpc.unpack(await echo(rpc.pack(np.ones(10))))[-1] == 2
            assert channel.runtime == wire
            held = channel.unary_unary("/t/uu", *TYPES)(rpc.pack(np.ones(rpc_serving.SIZE)))
            stream = channel.unary_stream("/t/us", *TYPES)(rpc.pack(np.ones(10)))
            assert rpc.unpack(await stream.read())[-1] == 1
            serving.send_signal(signal.SIGKILL)
            for call in (held, stream):
                code = await asyncio.wait_for(call.code(), 20)
                assert code is grpc.StatusCode.UNAVAILABLE

    asyncio.run(main())
    tensors._lent.clear()  # of calls that did not end well, for ten minutes


def test_ends_that_stay_with_grpcio(wire: str) -> None:
    for at_client, at_server in (
        ({**WIRES[wire], "runtime": False}, WIRES[wire]),
        (WIRES[wire], {**WIRES[wire], "runtime": False}),
    ):

        async def test(channel: Any) -> None:
            assert await channel.unary_unary("/t/way")(b"") == b"grpcio"
            assert channel.payload == wire
            assert channel.runtime.startswith("grpcio: ")

        runner(at_client, at_server)(FOUR, test)


def test_servicers_in_threads_of_a_pool(wire: str) -> None:
    def block(request: bytes, context: Any) -> bytes:
        return request

    async def test(channel: Any) -> None:
        calls = [channel.unary_unary("/t/m")(b"%d" % number) for number in range(20)]
        assert await asyncio.gather(*calls) == [b"%d" % number for number in range(20)]

    pool = ThreadPoolExecutor(3)
    runner(WIRES[wire], WIRES[wire])({"/t/m": UU(block)}, test, migration_thread_pool=pool)
    pool.shutdown()


def test_a_client_that_takes_no_answers(wire: str) -> None:
    """The server reads no more of it, so that answers do not pile up there."""
    size = 10_000

    async def main() -> None:
        server = rpc.aio.server(**{**WIRES[wire], "limits": rpc.Limits(threshold_bytes=1 << 30)})
        server.add_generic_rpc_handlers((Methods(FOUR),))
        target = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        channel = await asyncio.to_thread(attached_channel, target, **WIRES[wire])
        call = channel.unary_unary("/t/way")
        assert await asyncio.to_thread(call, b"") == b"runtime"
        line = channel.attachment.runtime.line
        end = next(iter(server._service._ends))
        for number in range(2000):  # the answers are not read
            slot = number % 1000, 1 + number // 1000
            line.send(frames.call_frames(slot, b"/t/uu", frames.NO_DEADLINE, (), bytes(size)))
        await until(lambda: len(end.line.outbox) > 256 and end.active == 0)
        before = -1
        while before != len(line.outbox):
            before = len(line.outbox)
            await asyncio.sleep(0.2)
        assert len(end.line.outbox) <= 256 + 2 * ring.CAPACITY_BYTES // size
        assert before > 1000
        channel.close()
        await server.stop(0)

    asyncio.run(main())


def test_a_call_behind_frames_that_wait_goes_by_grpcio(
    wire: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """See `test_calls_of_a_stopped_server_do_not_pile_up`."""

    async def test(channel: Any) -> None:
        call = channel.unary_unary("/t/way")
        assert await call(b"") == b"runtime"
        with monkeypatch.context() as patch:
            patch.setattr(client, "_MOST_WAITING", -1)  # as if some waited
            assert await call(b"") == b"grpcio"
        assert await call(b"") == b"runtime"

    runner(WIRES[wire], WIRES[wire])(FOUR, test)
