"""A servicer answers with a part of what arrived: it has the memory until the response has left."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import numpy as np
import pytest
from ends import attached_channel

from tensorwire import rpc

CODERS = rpc.Tensor.FromString, rpc.Tensor.SerializeToString


def part(request: Any, context: Any) -> Any:
    answer = rpc.Tensor()
    answer.CopyFrom(request)  # as a message that has it as a field does
    return answer


async def part_later(request: Any, context: Any) -> Any:
    return part(request, context)


def sync_server(runtime: bool, handlers: Any) -> tuple[int, Callable[[], object]]:
    server = rpc.server(ThreadPoolExecutor(2), runtime=runtime)
    server.add_generic_rpc_handlers((handlers(part),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    return port, lambda: server.stop(None).wait()


def aio_server(runtime: bool, handlers: Any) -> tuple[int, Callable[[], object]]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    async def start() -> tuple[Any, int]:
        server = rpc.aio.server(runtime=runtime)
        server.add_generic_rpc_handlers((handlers(part_later),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        return server, port

    server, port = asyncio.run_coroutine_threadsafe(start(), loop).result(20)

    def stop() -> None:
        asyncio.run_coroutine_threadsafe(server.stop(None), loop).result(20)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(20)
        loop.close()

    return port, stop


@pytest.fixture(params=[sync_server, aio_server], ids=["sync", "asyncio"])
def serve(request: pytest.FixtureRequest) -> Iterator[Any]:
    stops = []

    def start(runtime: bool) -> int:
        def handlers(behavior: Any) -> Any:
            method = grpc.unary_unary_rpc_method_handler(behavior, *CODERS)
            return grpc.method_handlers_generic_handler("t", {"part": method})

        port, stop = request.param(runtime, handlers)
        stops.append(stop)
        return int(port)

    yield start
    for stop in stops:
        stop()


@pytest.mark.parametrize("runtime", [False, True], ids=["beside grpcio", "runtime"])
def test_a_part_of_the_request_is_the_response(serve: Any, runtime: bool) -> None:
    with attached_channel(f"127.0.0.1:{serve(runtime)}", runtime=runtime) as channel:
        method = channel.unary_unary("/t/part", rpc.Tensor.SerializeToString, rpc.Tensor.FromString)
        for number, size in enumerate([8, 100_000, 200_000, 3 << 20] * 5):
            sent = np.full(size, number, np.uint8)
            got = rpc.unpack(method(rpc.pack(sent), timeout=20))
            assert np.array_equal(got, sent), size
        assert channel.payload == "shm"
