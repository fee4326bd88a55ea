"""A response that is an envelope of an unknown attachment: an error, never bytes for the caller."""

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

grpc = pytest.importorskip("grpc")

from ends import Methods, serving  # noqa: E402
from test_rpc_conformance import US, UU  # noqa: E402

from tensorwire import rpc  # noqa: E402
from tensorwire.rpc.payload import envelope, outgoing  # noqa: E402

SIZE = 3 << 20


def other_attachment(sealed: bytes) -> bytes:
    return sealed[:24] + bytes([sealed[24] ^ 1]) + sealed[25:]


def version_to_come(sealed: bytes) -> bytes:
    return sealed[:16] + b"\x09" + sealed[17:]


def made(_: bytes, __: Any) -> bytes:
    return bytes(SIZE)


def made_twice(_: bytes, __: Any) -> Any:
    yield b"first"
    yield bytes(SIZE)


METHODS = {"/t/uu": UU(made), "/t/us": US(made_twice)}


@pytest.fixture(params=[other_attachment, version_to_come])
def changed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    change: Callable[[bytes], bytes] = request.param
    monkeypatch.setattr(outgoing, "seal", lambda *given: change(envelope.seal(*given)))


@pytest.mark.usefixtures("changed")
@pytest.mark.parametrize("runtime", [False, True])
def test_threads(runtime: bool) -> None:
    with serving() as start:
        server = start(rpc.server(ThreadPoolExecutor(2), runtime=runtime), METHODS)
        with rpc.insecure_channel(f"127.0.0.1:{server.port}", runtime=runtime) as channel:
            assert channel.attach(20)
            for _ in range(2):
                with pytest.raises(grpc.RpcError) as caught:
                    channel.unary_unary("/t/uu")(b"", timeout=20)
                assert caught.value.code() is grpc.StatusCode.INTERNAL
                assert caught.value.details() == "Exception deserializing response!"
                answers = channel.unary_stream("/t/us")(b"", timeout=20)
                assert next(answers) == b"first"
                with pytest.raises(grpc.RpcError) as caught:
                    next(answers)
                assert caught.value.code() is grpc.StatusCode.INTERNAL


@pytest.mark.usefixtures("changed")
@pytest.mark.parametrize("runtime", [False, True])
def test_asyncio(runtime: bool) -> None:
    async def main() -> None:
        server = rpc.aio.server(ThreadPoolExecutor(2), [Methods(METHODS)], runtime=runtime)
        target = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        async with rpc.aio.insecure_channel(target, runtime=runtime) as channel:
            assert await channel.attach(20)
            for _ in range(2):
                with pytest.raises(grpc.aio.AioRpcError):
                    await channel.unary_unary("/t/uu")(b"", timeout=20)
                answers = channel.unary_stream("/t/us")(b"", timeout=20)
                assert await answers.read() == b"first"
                with pytest.raises(grpc.aio.AioRpcError):
                    await answers.read()
        await server.stop(0)

    with contextlib.closing(asyncio.new_event_loop()) as loop:
        loop.run_until_complete(main())
