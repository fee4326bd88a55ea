"""A client and a server of the runtime, each in a machine."""

import asyncio
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import numpy as np

from tensorwire import rpc
from tensorwire.testing import Channel

SIZES = [0, 5, 70_000, 300_000, 5_000_000]
THRESHOLD_BYTES = 100_000
LONG_S = 150.0
WAY: dict[str, Any] = {
    "transports": ("rdma",), "runtime": True, "limits": rpc.Limits(threshold_bytes=THRESHOLD_BYTES)
}  # fmt: skip
UNLIMITED = [("grpc.max_receive_message_length", -1)]
TYPES = rpc.Tensor.SerializeToString, rpc.Tensor.FromString


def echo(request: bytes, context: Any) -> bytes:
    return request


def fail(request: bytes, context: Any) -> bytes:
    context.abort(grpc.StatusCode.NOT_FOUND, "nothing is here")
    raise AssertionError


def sleep(request: bytes, context: Any) -> bytes:
    while context.is_active():
        time.sleep(0.01)
    return request


def triple(request: Any, context: Any) -> Any:
    return rpc.pack(rpc.unpack(request) * 3)


def serve(channel: Channel, host: str) -> None:
    """Process function: tells its target, and serves until it is told to stop."""
    tensors = {"request_deserializer": TYPES[1], "response_serializer": TYPES[0]}
    handlers = {
        "Echo": grpc.unary_unary_rpc_method_handler(echo),
        "Fail": grpc.unary_unary_rpc_method_handler(fail),
        "Sleep": grpc.unary_unary_rpc_method_handler(sleep),
        "Triple": grpc.unary_unary_rpc_method_handler(triple, **tensors),
        "Thrice": grpc.unary_stream_rpc_method_handler(lambda request, _: iter([request] * 3)),
        "Join": grpc.stream_unary_rpc_method_handler(lambda requests, _: b"".join(requests)),
    }
    server = rpc.server(ThreadPoolExecutor(4), options=UNLIMITED, listen=host, **WAY)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("t", handlers),))
    port = server.add_insecure_port(f"{host}:0")
    server.start()
    channel.send(f"{host}:{port}")
    channel.recv(LONG_S)
    server.stop(0).wait()


def serve_aio(channel: Channel, host: str) -> None:
    """Process function: as `serve`, in an event loop; then tells how much it has offered."""
    server: Any = None

    async def same(request: bytes, context: Any) -> bytes:
        return request

    async def thrice(request: bytes, context: Any) -> AsyncIterator[bytes]:
        for _ in range(3):
            yield request

    offered = 0

    async def join(requests: AsyncIterator[bytes], context: Any) -> bytes:
        nonlocal offered
        (end,) = server.attachments
        offered = end.leases_there.leased_bytes  # for the responses so far
        return b"".join([each async for each in requests])

    async def main() -> None:
        nonlocal server
        handlers = {
            "Echo": grpc.unary_unary_rpc_method_handler(same),
            "Thrice": grpc.unary_stream_rpc_method_handler(thrice),
            "Join": grpc.stream_unary_rpc_method_handler(join),
        }
        server = rpc.aio.server(options=UNLIMITED, listen=host, **WAY)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("t", handlers),))
        port = server.add_insecure_port(f"{host}:0")
        await server.start()
        channel.send(f"{host}:{port}")
        await asyncio.to_thread(channel.recv, LONG_S)
        channel.send(offered)
        await server.stop(0)

    asyncio.run(main())


def call_aio(channel: Channel, target: str) -> dict[str, Any]:
    """Process function: as `call`, from an event loop."""

    async def main() -> dict[str, Any]:
        said: dict[str, Any] = {}
        async with rpc.aio.insecure_channel(target, UNLIMITED, **WAY) as client:
            echoes = client.unary_unary("/t/Echo")
            until = time.monotonic() + 60.0
            while not await client.attach(60) and time.monotonic() < until:
                await asyncio.sleep(0.1)  # a machine may take longer for it than this end waits
            assert client.runtime == "rdma", client.runtime
            messages = [bytes(size) for size in SIZES]
            said["echoed"] = [len(each) for each in messages if await echoes(each) == each]
            stream = client.unary_stream("/t/Thrice")(messages[-1])
            said["streamed"] = [len(each) async for each in stream]
            said["joined"] = len(await client.stream_unary("/t/Join")(iter(messages)))
            said["threshold_bytes"] = client.attachment.runtime_threshold_bytes
            assert client.attachment is not None
            said["offered"] = client.attachment.leases_there.leased_bytes
        return said

    return asyncio.run(main())


def call(channel: Channel, target: str) -> dict[str, Any]:
    """Process function: makes calls, and tells what came of them."""
    said: dict[str, Any] = {}
    with rpc.insecure_channel(target, UNLIMITED, **WAY) as client:
        echoes = client.unary_unary("/t/Echo")
        until = time.monotonic() + 60.0
        while not client.attach(60) and time.monotonic() < until:
            time.sleep(0.1)  # a machine may take longer for it than this end waits
        assert client.runtime == "rdma", client.runtime
        messages = [np.arange(size, dtype=np.uint8).tobytes() for size in SIZES]
        said["echoed"] = [len(each) for each in messages if echoes(each) == each]
        said["runtime"], said["payload"] = client.runtime, client.payload
        streamed = client.unary_stream("/t/Thrice")(messages[-1])
        said["streamed"] = [len(each) for each in streamed if each == messages[-1]]
        said["joined"] = len(client.stream_unary("/t/Join")(iter(messages)))
        said["code"] = client.unary_unary("/t/Fail").future(b"").code().name
        said["late"] = client.unary_unary("/t/Sleep").future(b"", timeout=2).code().name
        array = rpc.pack(np.ones(200_000))
        said["array"] = float(rpc.unpack(client.unary_unary("/t/Triple", *TYPES)(array)).sum())
        said["threshold_bytes"] = client.attachment.runtime_threshold_bytes
        said["offered"] = client.attachment.leases_there.leased_bytes
    return said
