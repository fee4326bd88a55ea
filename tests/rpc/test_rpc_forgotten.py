"""Objects that are no longer needed are gone at once: no payload waits for cycle collection."""

import asyncio
import gc
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import grpc.aio
import numpy as np
import pytest
from ends import attached_channel

from tensorwire import rpc
from tensorwire.rpc.attach import sharing
from tensorwire.rpc.payload import leases
from tensorwire.rpc.payload.janitor import Janitor
from tensorwire.rpc.payload.tensors import Holding

MIB = 1 << 20
PAYLOAD = 4 * MIB  # beyond every threshold
KINDS = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")


BEHAVIORS: dict[str, Callable[..., Any]] = {
    "unary_unary": lambda request, context: again(request),
    "unary_stream": lambda request, context: (again(request) for _ in range(2)),
    "stream_unary": lambda requests, context: again(list(requests)[-1]),
    "stream_stream": lambda requests, context: (again(each) for each in requests),
}


def again(request: Any) -> Any:
    """The same payload, as a message that leaves."""
    return rpc.pack(rpc.unpack(request)) if isinstance(request, rpc.Tensor) else request


def handlers(*coders: Any) -> dict[str, Any]:
    return {
        kind: getattr(grpc, f"{kind}_rpc_method_handler")(behavior, *coders)
        for kind, behavior in BEHAVIORS.items()
    }


@pytest.fixture(params=[False, True], ids=["beside grpcio", "runtime"])
def runtime(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
def serving(runtime: bool) -> Iterator[tuple[Any, str]]:
    """A server and its address."""
    server = rpc.server(ThreadPoolExecutor(4), runtime=runtime)
    coders = rpc.Tensor.FromString, rpc.Tensor.SerializeToString
    server.add_generic_rpc_handlers(
        (
            grpc.method_handlers_generic_handler("bytes", handlers()),
            grpc.method_handlers_generic_handler("Tensor", handlers(*coders)),
        )
    )
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield server, f"127.0.0.1:{port}"
    server.stop(None).wait()


@pytest.fixture
def target(serving: tuple[Any, str]) -> str:
    return serving[1]


def in_cycles(calls: Callable[[], None]) -> list[str]:
    """Returns the objects that these calls leave to the collector, if they lead to payload."""
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        calls()
        time.sleep(0.2)  # other threads let go of the last call
        gc.collect()
        found = gc.garbage[:]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    return [
        f"{type(each).__name__} has {type(held).__name__}"
        for each in found
        for held in gc.get_referents(each)
        if isinstance(held, Holding)
        or (isinstance(held, bytes | np.ndarray | memoryview) and len(held) >= MIB)
    ]


def request_of(coders: tuple[Any, ...]) -> Any:
    return rpc.pack(np.ones(PAYLOAD, np.uint8)) if coders else bytes(PAYLOAD)


MESSAGES = pytest.mark.parametrize(
    ("service", "coders"),
    [("bytes", ()), ("Tensor", (rpc.Tensor.SerializeToString, rpc.Tensor.FromString))],
    ids=["bytes", "tensors"],
)


@MESSAGES
@pytest.mark.parametrize("wire", ["shm", "tcp"])
def test_calls_leave_no_payload_to_the_collector(
    target: str, runtime: bool, wire: str, service: str, coders: tuple[Any, ...]
) -> None:
    with attached_channel(target, transports=(wire,), runtime=runtime) as channel:
        for kind in KINDS:
            method = getattr(channel, kind)(f"/{service}/{kind}", *coders)

            def calls(method: Any = method, kind: str = kind) -> None:
                for _ in range(5):
                    request = request_of(coders)
                    given = iter([request]) if kind.startswith("stream") else request
                    answer = method(given)
                    if kind.endswith("stream"):
                        list(answer)
                    if kind == "unary_unary":
                        method.future(request_of(coders)).result()

            calls()
            assert channel.payload == wire
            assert not runtime or channel.runtime == wire
            assert in_cycles(calls) == [], kind


@MESSAGES
@pytest.mark.parametrize("wire", ["shm", "tcp"])
def test_calls_of_asyncio_leave_none_either(
    target: str, runtime: bool, wire: str, service: str, coders: tuple[Any, ...]
) -> None:
    loop = asyncio.new_event_loop()

    async def connect() -> Any:
        channel = rpc.aio.insecure_channel(target, transports=(wire,), runtime=runtime)
        await channel.attach()
        return channel

    channel = loop.run_until_complete(connect())

    async def call(kind: str) -> None:
        method = getattr(channel, kind)(f"/{service}/{kind}", *coders)
        for _ in range(5):
            request = request_of(coders)
            began = method(iter([request]) if kind.startswith("stream") else request)
            if kind.endswith("stream"):
                async for _ in began:
                    pass
            else:
                await began

    for kind in KINDS:
        loop.run_until_complete(call(kind))
        assert channel.payload == wire
        assert in_cycles(lambda kind=kind: loop.run_until_complete(call(kind))) == [], kind  # type: ignore[misc]
    loop.run_until_complete(channel.close())
    loop.close()


def test_a_channel_that_is_forgotten_gives_up_its_attachment(
    target: str, runtime: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharing, "LINGER_S", 0.1)
    gc.collect()
    gc.disable()
    try:
        channel = attached_channel(target, runtime=runtime)
        method = channel.unary_unary("/bytes/unary_unary")
        assert len(method(bytes(PAYLOAD))) == PAYLOAD
        attachment = channel.attachment
        assert attachment is not None
        node, known = attachment._node, weakref.ref(channel)
        del channel, attachment
        assert known() is not None, "a stub keeps its channel"
        assert len(method(bytes(PAYLOAD))) == PAYLOAD
        del method
        assert known() is None
        ends = time.monotonic() + 10  # another thread closes it
        while not node.closed:
            assert time.monotonic() < ends
            time.sleep(0.01)
    finally:
        gc.enable()


def test_a_call_goes_on_whose_channel_is_forgotten(target: str, runtime: bool) -> None:
    def begun(kind: str, request: Any) -> Any:
        channel = attached_channel(target, runtime=runtime)
        method = getattr(channel, kind)(f"/bytes/{kind}")
        return method.future(request) if kind == "unary_unary" else method(request)

    for _ in range(5):
        assert len(begun("unary_unary", bytes(PAYLOAD)).result(20)) == PAYLOAD
        assert [len(each) for each in begun("unary_stream", bytes(PAYLOAD))] == [PAYLOAD] * 2
        requests = iter([bytes(PAYLOAD)] * 3)
        assert [len(each) for each in begun("stream_stream", requests)] == [PAYLOAD] * 3


def test_a_stream_of_asyncio_goes_on_whose_channel_is_forgotten(target: str, runtime: bool) -> None:
    def begun(kind: str, request: Any) -> Any:
        channel = rpc.aio.insecure_channel(target, runtime=runtime)
        return getattr(channel, kind)(f"/bytes/{kind}")(request)

    async def read(kind: str, request: Any) -> list[int]:
        call = begun(kind, request)
        found = []
        async for each in call:
            await asyncio.sleep(0.02)  # who closes forgotten channels has time for it
            found.append(len(each))
        return found

    async def calls() -> None:
        for size in (8, PAYLOAD):
            assert await read("unary_stream", bytes(size)) == [size] * 2
            assert await read("stream_stream", iter([bytes(size)] * 3)) == [size] * 3
            assert len(await begun("unary_unary", bytes(size))) == size
            assert len(await begun("stream_unary", iter([bytes(size)] * 2))) == size

    asyncio.run(calls())


@pytest.mark.parametrize("size", [8, PAYLOAD])
@pytest.mark.parametrize("kind", ["unary_unary", "stream_unary"])
@pytest.mark.parametrize("system", ["grpcio", "beside grpcio", "runtime"])
def test_calls_of_asyncio_that_nobody_keeps_are_made(system: str, kind: str, size: int) -> None:
    """A caller that needs no answer drops the call, and its response."""
    seen: list[int] = []

    def note(request: Any, context: Any) -> Any:
        requests = list(request) if kind == "stream_unary" else [request]
        seen.append(sum(map(len, requests)))
        return b""

    async def requests() -> Any:
        for _ in range(2):
            await asyncio.sleep(0)
            yield bytes(size // 2)

    async def calls() -> None:
        options: dict[str, Any] = {"options": [("grpc.max_send_message_length", -1)]}
        make: Any = grpc.aio.insecure_channel
        if system != "grpcio":
            make, options["runtime"] = rpc.aio.insecure_channel, system == "runtime"
        async with make(f"127.0.0.1:{port}", **options) as channel:
            method = getattr(channel, kind)("/t/note")
            for _ in range(10):
                method(requests() if kind == "stream_unary" else bytes(size))
                gc.collect(0)
            ends = time.monotonic() + 20
            while len(seen) < 10 and time.monotonic() < ends:
                await asyncio.sleep(0.01)

    options = [("grpc.max_receive_message_length", -1)]
    server = rpc.server(ThreadPoolExecutor(4), runtime=system == "runtime", options=options)
    behaviors = {"note": getattr(grpc, f"{kind}_rpc_method_handler")(note)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("t", behaviors),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    asyncio.run(calls())
    server.stop(None).wait()
    assert seen == [size] * 10


def test_a_future_that_has_ended_does_not_keep_its_request(target: str, runtime: bool) -> None:
    """Nor its channel, unless it is grpcio's own, which keeps what deserializes."""
    channel = attached_channel(target, runtime=runtime)
    known = weakref.ref(channel)
    method = channel.unary_unary("/bytes/unary_unary")
    method(bytes(PAYLOAD))
    requests = [bytes([number]) * PAYLOAD for number in range(3)]
    others = [sys.getrefcount(each) for each in requests]
    futures = [method.future(each) for each in requests]
    assert [future.result(20) for future in futures] == requests
    del channel, method
    gc.disable()
    try:
        ends = time.monotonic() + 10  # other threads let go of them
        while [sys.getrefcount(each) for each in requests] != others:
            assert time.monotonic() < ends
            time.sleep(0.01)
        assert known() is None or not runtime
    finally:
        gc.enable()
    assert [future.code() for future in futures] == [grpc.StatusCode.OK] * 3


@pytest.mark.parametrize("wire", ["shm", "tcp"])
def test_memory_that_nobody_uses_is_given_back(
    serving: tuple[Any, str], runtime: bool, wire: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory of both ends goes, while the channel stays; arrays that are in use keep theirs."""
    monkeypatch.setattr(leases, "IDLE_S", 0.2)
    server, target = serving
    with attached_channel(target, runtime=runtime, transports=(wire,)) as channel:
        plain = channel.unary_unary("/bytes/unary_unary")
        arrays = channel.unary_unary(
            "/Tensor/unary_unary", rpc.Tensor.SerializeToString, rpc.Tensor.FromString
        )
        values = np.arange(PAYLOAD // 8)
        kept = rpc.unpack(arrays(rpc.pack(values)))
        for _ in range(2):
            assert plain(bytes(PAYLOAD)) == bytes(PAYLOAD)
            ends = [channel.attachment, *server.attachments]
            assert len(ends) == 2
            pools = [end.leases_there for end in ends]
            assert sum(pool.leased_bytes for pool in pools) > 2 * PAYLOAD
            until = time.monotonic() + 10
            while (left := sum(pool.leased_bytes for pool in pools)) > 1.1 * PAYLOAD:
                assert time.monotonic() < until, f"{left} bytes are left"
                time.sleep(0.05)
            assert left >= PAYLOAD, "but for what is kept"
        assert (kept == values).all()


def test_in_a_forked_child_nothing_is_closed_where_it_is_noticed() -> None:
    """A thread of the parent may have had the lock that this needs."""
    janitor, done = Janitor(), []
    janitor.soon(lambda: done.append("first"))
    assert done == ["first"], "it has no thread, and nothing to wait for"
    janitor.forked()
    janitor.soon(lambda: done.append("in the child"))
    assert done == ["first"]
