"""Calls with small requests, which share a number and a mark, whatever their responses are."""

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

grpc = pytest.importorskip("grpc")

from ends import Methods, serving  # noqa: E402
from test_payload import TENSORS, moved, nothing_is_left  # noqa: E402
from test_rpc_conformance import wait_for  # noqa: E402

from tensorwire import rpc  # noqa: E402
from tensorwire.rpc.attach.terms import MARK  # noqa: E402
from tensorwire.rpc.payload import envelope as envelopes  # noqa: E402

UU = grpc.unary_unary_rpc_method_handler
LARGE = 5 << 20  # more than grpc takes in a message
BIG = bytes(range(256)) * 4096


@pytest.fixture(params=["shm", "tcp"])
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def seen() -> list[bytes | None]:
    """The mark of each call that a servicer has seen."""
    return []


@pytest.fixture
def serve(transport: str, seen: list[bytes | None]) -> Iterator[Callable[..., Any]]:
    def noting(behavior: Any) -> Any:
        def run(request: Any, context: Any) -> Any:
            seen.append(dict(context.invocation_metadata()).get(MARK))
            return behavior(request, context)

        return run

    def methods() -> dict[str, Any]:
        return {
            "/t/make": UU(noting(lambda request, _: bytes(int(request)))),
            "/t/ones": UU(noting(lambda request, _: rpc.pack(np.ones(LARGE, np.uint8))),
                          response_serializer=rpc.Tensor.SerializeToString),
            "/t/late": UU(noting(lambda request, _: time.sleep(0.3) or bytes(int(request)))),
            "/t/raw": UU(lambda request, _: request),
            "/t/tensor": UU(lambda request, _: request, **TENSORS),
            "/t/fails": UU(lambda request, _: object(), response_serializer=lambda _: 1 / 0),
        }  # fmt: skip

    def made(make: Any = rpc.server, **options: Any) -> Any:
        if make is rpc.server:
            options["transports"] = (transport,)
        return make(ThreadPoolExecutor(4), **options)

    with serving() as start:
        yield lambda *given, **options: start(made(*given, **options), methods())


def connect(server: Any, transport: str, **more: Any) -> Any:
    channel = rpc.insecure_channel(f"127.0.0.1:{server.port}", transports=(transport,), **more)
    channel.attach(20)
    return channel


def test_small_calls_share_a_mark_and_large_answers_go_ahead(
    serve: Any, transport: str, seen: list[bytes | None]
) -> None:
    server = serve()
    with connect(server, transport) as channel:
        assert channel.payload == transport
        make = channel.unary_unary("/t/make")
        ones = channel.unary_unary("/t/ones", None, rpc.Tensor.FromString)
        before = moved(server.attachments[0])
        assert make(b"7") == bytes(7)
        assert make(str(LARGE).encode()) == bytes(LARGE)
        assert len(make.future(str(LARGE).encode()).result(timeout=20)) == LARGE
        answer, call = make.with_call(str(LARGE).encode())
        assert (len(answer), call.code()) == (LARGE, grpc.StatusCode.OK)
        assert rpc.unpack(ones(b"x")).sum() == LARGE
        assert moved(server.attachments[0]) - before >= 4 * LARGE
        assert len(seen) == 5
        assert len(set(seen)) == 1
        assert seen[0] is not None
        answer = call = None
        wait_for(lambda: nothing_is_left(channel, server))
        # A request that is not small has a mark of its own. A small Tensor travels inside.
        big = 3 * BIG
        assert channel.unary_unary("/t/raw")(big) == big
        tensor = channel.unary_unary(
            "/t/tensor", rpc.Tensor.SerializeToString, rpc.Tensor.FromString
        )
        assert rpc.unpack(tensor(rpc.pack(np.arange(9))))[-1] == 8


def test_what_looks_like_an_envelope_arrives_as_it_is(serve: Any, transport: str) -> None:
    server = serve()
    with connect(server, transport) as channel:
        message = envelopes.MAGIC + bytes(100)
        assert channel.unary_unary("/t/raw")(message) == message
    with grpc.insecure_channel(f"127.0.0.1:{server.port}") as plain:
        assert plain.unary_unary("/t/raw")(message) == message


def test_an_answer_that_nobody_takes_is_taken_back(
    serve: Any, transport: str, seen: list[bytes | None]
) -> None:
    """When its call has failed, and all others with the same number have ended."""
    server = serve()
    with connect(server, transport) as channel:
        (end,) = server.attachments
        make = channel.unary_unary("/t/make")
        other = channel.unary_unary("/t/late").future(b"1")
        wait_for(lambda: len(seen) == 1)
        shared = channel.attachment.share()
        # Without our deserializer, as where the client has given up the call in this moment.
        marked = [(MARK, shared.mark)]
        lost = channel.inner.unary_unary("/t/make")(str(LARGE).encode(), metadata=marked)
        assert lost.startswith(envelopes.MAGIC)
        assert end.leases_there.used == 1
        shared.end(False)
        end.look()
        assert end.leases_there.used == 1  # the other call may have an answer there, too
        assert other.result(timeout=20) == bytes(1)
        wait_for(lambda: end.leases_there.used == 0)
        assert len(make(str(LARGE).encode())) == LARGE
    assert seen[0] == seen[1] == shared.mark
    assert seen[2] not in (None, shared.mark)


@pytest.mark.parametrize("way", ["blocking", "future"])
def test_calls_that_fail_leave_nothing(serve: Any, transport: str, way: str) -> None:
    server = serve()
    with connect(server, transport) as channel:
        late, raw = channel.unary_unary("/t/late"), channel.unary_unary("/t/raw")
        for number in range(6):
            if way == "future":
                call = late.future(str(LARGE + number).encode())
                time.sleep(0.02)
                call.cancel()
                continue
            with contextlib.suppress(grpc.RpcError):
                late(str(LARGE + number).encode(), timeout=0.28 + 0.01 * number)
        call = None
        assert raw(b"x") == b"x"
        wait_for(lambda: nothing_is_left(channel, server))


def test_numbers_that_are_shared_end_with_their_last_call(serve: Any, transport: str) -> None:
    server = serve()
    with connect(server, transport) as channel:
        attachment = channel.attachment
        ended = []
        end_call = attachment.end_call
        attachment.end_call = lambda number, *rest, **more: (
            ended.append(number), end_call(number, *rest, **more)
        )  # fmt: skip
        first, second = attachment.share(), attachment.share()
        assert first is second
        first.end(True)
        assert attachment.share() is first
        first.end(False)
        third = attachment.share()
        assert third is not first
        assert third.mark != first.mark
        assert ended == []
        second.end(True)
        assert len(ended) == 1
        third.end(False)
        assert len(set(ended)) == 2


def test_errors_are_those_of_grpcio(serve: Any, transport: str) -> None:
    def found(server: Any, make: Any) -> list[Any]:
        codes = []
        with make(f"127.0.0.1:{server.port}") as channel:
            channel.unary_unary("/t/raw")(b"")
            bad = channel.unary_unary("/t/raw", lambda _: 1 / 0)
            odd = channel.unary_unary("/t/raw", lambda _: "no bytes")
            worse = channel.unary_unary("/t/raw", None, lambda _: 1 / 0)
            calls = (
                lambda: channel.unary_unary("/t/fails")(b"x"),
                lambda: channel.unary_unary("/t/none")(b"x"),
                lambda: channel.unary_unary("/t/make")(b"no number"),
                lambda: channel.unary_unary("/t/raw")(b"x", timeout=-1),
                lambda: bad(b"x"),
                lambda: odd(b"x"),
                lambda: worse(b"x"),
                lambda: worse.future(b"x").result(timeout=20),
            )
            for call in calls:
                with pytest.raises((grpc.RpcError, TypeError)) as caught:
                    call()
                error = caught.value
                if isinstance(error, grpc.Call):
                    codes.append((error.code(), error.details()))
                else:
                    codes.append(type(error))
        return codes

    def ours(target: str) -> Any:
        return rpc.insecure_channel(target, transports=(transport,))

    assert found(serve(), ours) == found(serve(grpc.server), grpc.insecure_channel)


def test_an_attachment_that_is_lost_is_named_by_no_call(
    serve: Any, transport: str, seen: list[bytes | None]
) -> None:
    server = serve(limits=rpc.Limits(max_attachments=1))
    with connect(server, transport, options=[("grpc.max_receive_message_length", -1)]) as channel:
        make = channel.unary_unary("/t/make")
        channel.attachment.close()
        channel.share.pause()  # nothing is asked for at the moment
        before = moved(server.attachments[0]) if server.attachments else 0
        assert len(make(str(LARGE).encode())) == LARGE
        assert seen == [None]
        assert all(moved(each) == before for each in server.attachments)
        wait_for(lambda: not server.attachments)
        channel.share.disconnected()
        assert channel.attach(20)
        assert len(make(str(LARGE).encode())) == LARGE
        assert channel.payload == transport
        assert seen[-1] is not None


FORKING = """
import os, sys
from concurrent.futures import ThreadPoolExecutor
import grpc
from tensorwire import rpc

os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "false"
server = rpc.server(ThreadPoolExecutor(2))
handler = grpc.unary_unary_rpc_method_handler(lambda request, context: request)
server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("t", {"m": handler}),))
port = server.add_insecure_port("127.0.0.1:0")
server.start()
channel = rpc.insecure_channel(f"127.0.0.1:{port}")
channel.attach()
parent = channel.attachment
def say():
    print(channel.attachment is None, parent.lost, flush=True)
if os.fork() == 0:
    say()
    os._exit(0)
os.wait()
say()
os._exit(0)
"""


def test_a_forked_child_names_no_attachment_of_its_parent() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORKING], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "True True\nFalse False\n"


def test_a_proxy_that_hands_the_mark_on(
    serve: Any, transport: str, seen: list[bytes | None]
) -> None:
    server = serve()
    with grpc.insecure_channel(f"127.0.0.1:{server.port}") as behind:

        class Forwarding(grpc.GenericRpcHandler):  # type: ignore[misc]
            def service(self, details: Any) -> Any:
                metadata = [
                    (key, value) for key, value in details.invocation_metadata if key == MARK
                ]
                return UU(
                    lambda request, _: behind.unary_unary(details.method)(
                        request, metadata=metadata
                    )
                )

        proxy = grpc.server(ThreadPoolExecutor(4))
        proxy.add_generic_rpc_handlers((Forwarding(),))
        proxy.port = proxy.add_insecure_port("127.0.0.1:0")
        proxy.start()
        with connect(proxy, transport) as channel:
            assert channel.payload == transport
            assert len(channel.unary_unary("/t/make")(str(LARGE).encode())) == LARGE
            assert seen[-1] is not None
        proxy.stop(0).wait()


def test_interceptors_that_make_handlers_for_each_call(serve: Any, transport: str) -> None:
    class Making(grpc.ServerInterceptor):  # type: ignore[misc]
        def intercept_service(self, continuation: Any, details: Any) -> Any:
            handler = continuation(details)
            return UU(lambda request, context: handler.unary_unary(request, context))

    server = serve(interceptors=[Making()])
    with connect(server, transport) as channel:
        call = channel.unary_unary("/t/raw")
        for number in range(1500):
            assert call(b"%d" % number) == b"%d" % number


def test_a_server_without_tensorwire_gets_what_grpcio_sends(
    serve: Any, transport: str, seen: list[bytes | None]
) -> None:
    server = serve(grpc.server)
    with connect(server, transport) as channel:
        assert channel.payload == "inside: the server has no tensorwire"
        began = time.monotonic()
        assert channel.unary_unary("/t/make")(b"3") == bytes(3)
        assert len(channel.unary_unary("/t/raw")(3 * BIG)) == 3 * len(BIG)
        assert time.monotonic() - began < 5
        assert seen == [None]


@pytest.mark.parametrize("size", [10, 3 * len(BIG)])
def test_a_request_is_serialized_once(serve: Any, transport: str, size: int) -> None:
    server = serve()
    made = []

    def serialize(message: bytes) -> bytes:
        made.append(len(message))
        return message

    with connect(server, transport) as channel:
        call = channel.unary_unary("/t/raw", serialize)
        assert call(bytes(size)) == bytes(size)
        assert call.with_call(bytes(size))[0] == bytes(size)
        assert call.future(bytes(size)).result(timeout=20) == bytes(size)
    assert made == [size] * 3


@pytest.mark.parametrize("way", ["future", "unary_stream", "stream_stream"])
def test_what_a_future_or_a_stream_meets_tells_of_another_server(transport: str, way: str) -> None:
    def ask(channel: Any) -> bytes:
        if way == "future":
            return bytes(channel.unary_unary("/t/uu").future(b"x").result(timeout=20))
        request = b"x" if way == "unary_stream" else iter([b"x"])
        return bytes(next(getattr(channel, way)("/t/" + way)(request, timeout=20)))

    def start(make: Any, port: int, **options: Any) -> Any:
        server = make(ThreadPoolExecutor(4), **options)
        methods = {
            "/t/uu": UU(lambda request, _: request),
            "/t/unary_stream": grpc.unary_stream_rpc_method_handler(lambda r, _: iter([r])),
            "/t/stream_stream": grpc.stream_stream_rpc_method_handler(lambda rs, _: rs),
        }
        server.add_generic_rpc_handlers((Methods(methods),))
        server.port = server.add_insecure_port(f"127.0.0.1:{port}")
        server.start()
        return server

    server = start(grpc.server, 0)
    fast = [(f"grpc.{each}_reconnect_backoff_ms", 100) for each in ("initial", "min", "max")]
    target = f"127.0.0.1:{server.port}"
    with rpc.insecure_channel(target, fast, transports=(transport,)) as channel:
        assert ask(channel) == b"x"
        assert not channel.attach(20)
        assert channel.payload == "inside: the server has no tensorwire"
        server.stop(0).wait()
        with pytest.raises(grpc.RpcError):
            ask(channel)
        server = start(rpc.server, server.port, transports=(transport,))

        def attached() -> bool:
            try:
                ask(channel)
            except grpc.RpcError:
                return False
            return bool(channel.attach(20))

        try:
            wait_for(attached)
        finally:
            server.stop(0).wait()
