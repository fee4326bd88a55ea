"""Programs that put tensorwire's factories in the place of grpcio's."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import grpc
import grpc.aio
import pytest
from ends import Methods
from test_aio import echo as aio_echo
from test_rpc_conformance import UU, echo

from tensorwire import rpc

WAYS: dict[str, Callable[[Any], Any]] = {
    "itself": lambda ours: ours,
    "with keywords": lambda ours: partial(ours, limits=rpc.Limits(threshold_bytes=1)),
    "by a function": lambda ours: lambda *given, **named: ours(*given, **named),
}


@pytest.fixture(params=WAYS)
def replaced(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    for module, ours in ((grpc, rpc), (grpc.aio, rpc.aio)):
        for name in ("insecure_channel", "secure_channel", "server"):
            monkeypatch.setattr(module, name, WAYS[request.param](getattr(ours, name)))


def is_grpcios(made: Any) -> bool:
    return type(made).__module__.split(".")[0] == "grpc"


@pytest.mark.usefixtures("replaced")
def test_factories_in_the_place_of_grpcios() -> None:
    with ThreadPoolExecutor(2) as pool:
        server = grpc.server(pool, handlers=(Methods({"/t/m": UU(echo)}),))
        target = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        server.start()
        with grpc.insecure_channel(target) as channel:
            assert channel.attach(50)
            assert channel.unary_unary("/t/m")(b"abc") == b"abc"
            assert channel.payload == "shm"
            assert not is_grpcios(channel)
            assert is_grpcios(channel.inner)
        with grpc.secure_channel(target, grpc.ssl_channel_credentials()) as channel:
            assert not is_grpcios(channel)
            assert is_grpcios(channel.inner)
        assert not is_grpcios(server)
        assert is_grpcios(server.inner)
        server.stop(None).wait()


@pytest.mark.usefixtures("replaced")
def test_factories_in_the_place_of_those_of_asyncio() -> None:
    async def main() -> None:
        server = grpc.aio.server(handlers=(Methods({"/t/m": UU(aio_echo)}),))
        target = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        async with grpc.aio.insecure_channel(target) as channel:
            assert await channel.attach(50)
            assert await channel.unary_unary("/t/m")(b"abc") == b"abc"
            assert channel.payload == "shm"
            assert not is_grpcios(channel)
            assert is_grpcios(channel.inner)
        async with grpc.aio.secure_channel(target, grpc.ssl_channel_credentials()) as channel:
            assert not is_grpcios(channel)
            assert is_grpcios(channel.inner)
        assert not is_grpcios(server)
        assert is_grpcios(server.inner)
        await server.stop(None)

    asyncio.run(main())


@pytest.mark.filterwarnings("ignore::grpc.experimental.ExperimentalApiWarning")
@pytest.mark.usefixtures("replaced")
def test_static_methods_of_generated_services() -> None:
    with ThreadPoolExecutor(2) as pool:
        server = grpc.server(pool, handlers=(Methods({"/t/m": UU(echo)}),))
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        for _ in range(2):  # the channel is made, and found again
            answer = grpc.experimental.unary_unary(
                b"abc", f"127.0.0.1:{port}", "/t/m", insecure=True, _registered_method=True
            )
            assert answer == b"abc"
        server.stop(None).wait()
