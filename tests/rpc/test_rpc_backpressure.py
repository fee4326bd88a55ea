"""A stream whose payload travels beside its messages does not run ahead of a slow reader."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

grpc = pytest.importorskip("grpc")

import numpy as np  # noqa: E402
from ends import attached_channel, serving  # noqa: E402
from test_rpc_conformance import SU, US, wait_for  # noqa: E402

from tensorwire import rpc  # noqa: E402

BIG = bytes(1 << 20)
MOST = 12
"""Messages of 1 MiB that may be under way: those of the window, and what gRPC itself takes."""
ALL = 40
TYPES = rpc.Tensor.SerializeToString, rpc.Tensor.FromString
LIMITS = rpc.Limits(threshold_bytes=1000, patience_s=0.05)


@pytest.fixture(params=["shm", "tcp"])
def wire(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=[False, True], ids=["beside grpcio", "runtime"])
def keywords(request: pytest.FixtureRequest, wire: str) -> dict[str, Any]:
    return {"transports": (wire,), "runtime": request.param, "limits": LIMITS}


def settled(made: list[Any]) -> int:
    """How many were made when no more come for a while, which is longer than patience."""
    before, until = -1, time.monotonic() + 20
    while before != len(made):
        assert time.monotonic() < until
        before = len(made)
        time.sleep(0.4)
    return before


def test_a_servicer_waits_for_a_slow_reader(keywords: dict[str, Any]) -> None:
    made: list[int] = []

    def many(request: bytes, context: Any) -> Iterator[bytes]:
        for number in range(ALL):
            made.append(number)
            yield number.to_bytes(4, "little") + BIG

    with serving() as start:
        server = start(rpc.server(ThreadPoolExecutor(4), **keywords), {"/t/many": US(many)})
        with attached_channel(f"127.0.0.1:{server.port}", **keywords) as channel:
            assert channel.payload == keywords["transports"][0]
            call = channel.unary_stream("/t/many")(b"")
            next(call)
            assert settled(made) <= MOST
            read = [int.from_bytes(each[:4], "little") for each in call]
            assert read == list(range(1, ALL))


def test_a_client_waits_for_a_slow_servicer(keywords: dict[str, Any]) -> None:
    made: list[int] = []
    seen: list[int] = []

    def slow(requests: Iterator[bytes], context: Any) -> bytes:
        next(requests)
        seen.append(settled(made))
        return b"%d" % sum(1 for _ in requests)

    def requests() -> Iterator[bytes]:
        for number in range(ALL):
            made.append(number)
            yield BIG

    with serving() as start:
        server = start(rpc.server(ThreadPoolExecutor(4), **keywords), {"/t/slow": SU(slow)})
        with attached_channel(f"127.0.0.1:{server.port}", **keywords) as channel:
            answer = channel.stream_unary("/t/slow")(requests(), timeout=60)
            assert answer == b"%d" % (ALL - 1)
    assert seen[0] <= MOST


def test_who_keeps_what_it_reads_reads_on(keywords: dict[str, Any]) -> None:
    """Memory that is not given back holds up no message: the next one takes other memory."""

    def many(request: bytes, context: Any) -> Iterator[Any]:
        for number in range(ALL):
            yield rpc.pack(np.full(1 << 17, float(number)))

    methods = {"/t/many": US(many, response_serializer=TYPES[0])}
    with serving() as start:
        server = start(rpc.server(ThreadPoolExecutor(4), **keywords), methods)
        with attached_channel(f"127.0.0.1:{server.port}", **keywords) as channel:
            call = channel.unary_stream("/t/many", None, TYPES[1])(b"", timeout=60)
            kept = [rpc.unpack(each) for each in call]
            assert [each[-1] for each in kept] == list(map(float, range(ALL)))


def test_a_call_that_is_given_up_releases_who_waits(keywords: dict[str, Any]) -> None:
    made: list[int] = []
    over: list[bool] = []

    def many(request: bytes, context: Any) -> Iterator[bytes]:
        context.add_callback(lambda: over.append(True))
        try:
            for number in range(ALL):
                made.append(number)
                yield BIG
        finally:
            over.append(False)

    with serving() as start:
        server = start(rpc.server(ThreadPoolExecutor(1), **keywords), {"/t/many": US(many)})
        with attached_channel(f"127.0.0.1:{server.port}", **keywords) as channel:
            for _ in range(2):  # there is one thread
                call = channel.unary_stream("/t/many")(b"")
                next(call)
                settled(made)
                call.cancel()
                wait_for(lambda: True in over)
                over.clear()
                made.clear()


def test_asyncio_waits_for_a_slow_reader(keywords: dict[str, Any]) -> None:
    made: list[int] = []

    async def many(request: bytes, context: Any) -> AsyncIterator[bytes]:
        for number in range(ALL):
            made.append(number)
            yield number.to_bytes(4, "little") + BIG

    async def main() -> None:
        server = rpc.aio.server(**keywords)
        handlers = {"many": US(many)}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("t", handlers),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        async with rpc.aio.insecure_channel(f"127.0.0.1:{port}", **keywords) as channel:
            assert await channel.attach(20)
            call = channel.unary_stream("/t/many")(b"")
            await call.read()
            before = -1
            while before != len(made):
                before = len(made)
                await asyncio.sleep(0.4)
            # Beside the messages of the window, gRPC has its own under way.
            assert before <= 2 * MOST
            read = [int.from_bytes((await call.read())[:4], "little") for _ in range(1, ALL)]
            assert read == list(range(1, ALL))
        await server.stop(None)

    asyncio.run(main())
