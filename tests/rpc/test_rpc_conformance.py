"""The behaviour that gRPC documents of its Python API: one test for grpcio and for us.

With a threshold of one byte nearly every message of our systems goes ahead of the call, so a
difference between the systems is a failure here.
"""

import contextvars
import gc
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from ends import Ends, Methods, of_systems
from google.protobuf.wrappers_pb2 import BytesValue

UU, US = grpc.unary_unary_rpc_method_handler, grpc.unary_stream_rpc_method_handler
SU, SS = grpc.stream_unary_rpc_method_handler, grpc.stream_stream_rpc_method_handler
BIG = bytes(range(256)) * 1200  # 300 kB
LONG_S = 20.0


def echo(request: Any, context: Any) -> Any:
    return request


def repeat(request: bytes, context: Any) -> Iterator[bytes]:
    for number in range(3):
        yield request + bytes([number])


def join(requests: Iterator[bytes], context: Any) -> bytes:
    return b"".join(requests)


def echo_all(requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
    yield from requests


@pytest.fixture
def four(ends: Ends) -> Any:
    ends.methods = {
        "/t/uu": UU(echo),
        "/t/us": US(repeat),
        "/t/su": SU(join),
        "/t/ss": SS(echo_all),
    }
    ends.serve()
    return ends.channel()


def wait_for(condition: Any) -> None:
    until = time.monotonic() + LONG_S
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.005)


@pytest.mark.parametrize("message", [b"abc", b"", BIG], ids=["small", "empty", "big"])
def test_four_arities(four: Any, message: bytes) -> None:
    for _ in range(2):
        assert four.unary_unary("/t/uu")(message) == message
        assert list(four.unary_stream("/t/us")(message)) == [message + bytes([i]) for i in range(3)]
        assert (
            four.stream_unary("/t/su")(iter([message, b"-", message])) == message + b"-" + message
        )
        sent = [message, b"x", message]
        assert list(four.stream_stream("/t/ss")(iter(sent))) == sent


def test_a_message_that_looks_like_ours(ends: Ends, four: Any) -> None:
    """Servers of ours mark it; from another server it names no attachment, and is an error."""
    call = four.unary_unary("/t/uu")
    call(b"first")  # an attachment, if there is to be one
    for message in (b"\xff\xfftensorwire-rpc\x01\x01" + bytes(100), b"\xff\xfftensorwire-rpc"):
        if ends.system.name == "our channel, grpcio's server":
            with pytest.raises(grpc.RpcError) as failed:
                call(message)
            assert failed.value.code() is grpc.StatusCode.INTERNAL
        else:
            assert call(message) == message


def test_protobuf_messages(ends: Ends) -> None:
    types = {
        "request_deserializer": BytesValue.FromString,
        "response_serializer": BytesValue.SerializeToString,
    }
    seen = []

    def method(request: BytesValue, context: Any) -> BytesValue:
        seen.append(type(request))
        return BytesValue(value=request.value[::-1])

    ends.methods = {"/t/m": UU(method, **types)}
    call = (
        ends.serve()
        .channel()
        .unary_unary("/t/m", BytesValue.SerializeToString, BytesValue.FromString)
    )
    assert call(BytesValue(value=BIG)).value == BIG[::-1]
    assert call(BytesValue()) == BytesValue()
    assert seen == [BytesValue] * 2


def test_bidirectional_ping_pong(four: Any) -> None:
    turn = threading.Semaphore(1)

    def ask() -> Iterator[bytes]:
        for number in range(5):
            turn.acquire()
            yield BIG + bytes([number])

    answers = four.stream_stream("/t/ss")(ask())
    for number in range(5):
        assert next(answers) == BIG + bytes([number])
        turn.release()
    with pytest.raises(StopIteration):
        next(answers)
    assert answers.code() is grpc.StatusCode.OK


def test_metadata_and_status(ends: Ends) -> None:
    got = []

    def method(request: bytes, context: Any) -> bytes:
        got.extend(context.invocation_metadata())
        context.send_initial_metadata((("first", "1"), ("first-bin", b"\x00\xff")))
        context.set_trailing_metadata((("last", "2"), ("last-bin", b"\x01")))
        return request

    ends.methods = {"/t/m": UU(method)}
    channel = ends.serve().channel()
    sent = (("key", "value"), ("key", "again"), ("key-bin", b"\x00\x01\xfe"))
    for _ in range(2):
        got.clear()
        answer, call = channel.unary_unary("/t/m").with_call(BIG, metadata=sent)
        assert answer == BIG
        assert [tuple(each) for each in got if each[0].startswith("key")] == list(sent)
        assert [*map(tuple, call.initial_metadata())] == [
            ("first", "1"),
            ("first-bin", b"\x00\xff"),
        ]
        assert [*map(tuple, call.trailing_metadata())] == [("last", "2"), ("last-bin", b"\x01")]
        assert (call.code(), call.details()) == (grpc.StatusCode.OK, "")


def test_metadata_that_is_not_valid(four: Any) -> None:
    four.unary_unary("/t/uu")(b"first")
    with pytest.raises((ValueError, TypeError)):
        four.unary_unary("/t/uu")(b"x", metadata=(("Upper", "case"), ("a",)))
    with pytest.raises(TypeError):
        four.unary_unary("/t/uu")(b"x", metadata=(("key-bin", "text"),))


@pytest.mark.parametrize("arity", ["uu", "us", "su", "ss"])
def test_abort_in_every_arity(ends: Ends, arity: str) -> None:
    def fail(request: Any, context: Any) -> Any:
        context.set_trailing_metadata((("why", "because"),))
        context.abort(grpc.StatusCode.DATA_LOSS, "lost it")

    def fail_late(request: Any, context: Any) -> Any:
        yield BIG
        fail(request, context)

    handler = {"uu": UU(fail), "us": US(fail_late), "su": SU(fail), "ss": SS(fail_late)}[arity]
    ends.methods = {"/t/m": handler}
    channel = ends.serve().channel()
    for _ in range(2):
        error = error_of(channel, arity, BIG)
        assert (error.code(), error.details()) == (grpc.StatusCode.DATA_LOSS, "lost it")
        assert [*map(tuple, error.trailing_metadata())] == [("why", "because")]


def error_of(channel: Any, arity: str, message: bytes, **options: Any) -> Any:
    """The error of a call, as it is raised where the arity raises it."""
    kind = {"u": "unary", "s": "stream"}
    call = getattr(channel, f"{kind[arity[0]]}_{kind[arity[1]]}")("/t/m")
    request = message if arity[0] == "u" else iter([message, message])
    with pytest.raises(grpc.RpcError) as caught:
        list(call(request, **options))
    return caught.value


@pytest.mark.parametrize("arity", ["uu", "us", "su", "ss"])
def test_exception_of_the_servicer(ends: Ends, arity: str) -> None:
    def fail(request: Any, context: Any) -> Any:
        raise RuntimeError("a fault")

    def fail_late(request: Any, context: Any) -> Any:
        yield BIG
        raise RuntimeError("a fault")

    ends.methods = {
        "/t/m": {"uu": UU(fail), "us": US(fail_late), "su": SU(fail), "ss": SS(fail_late)}[arity]
    }
    error = error_of(ends.serve().channel(), arity, BIG)
    assert error.code() is grpc.StatusCode.UNKNOWN
    kind = "iterating responses" if arity[1] == "s" else "calling application"
    assert error.details() == f"Exception {kind}: a fault"


@pytest.mark.parametrize("arity", ["uu", "us", "su", "ss"])
def test_unknown_method(ends: Ends, arity: str) -> None:
    error = error_of(ends.serve().channel(), arity, BIG)
    assert (error.code(), error.details()) == (grpc.StatusCode.UNIMPLEMENTED, "Method not found!")


def fault(_: Any) -> Any:
    raise ValueError("no")


def test_serializers_that_fail(ends: Ends) -> None:
    ends.methods = {
        "/t/request": UU(echo, request_deserializer=fault),
        "/t/response": UU(echo, response_serializer=fault),
        "/t/none": UU(echo),
        "/t/stream": SU(join),
    }
    channel = ends.serve().channel()
    for method, details in (
        ("/t/request", "Exception deserializing request!"),
        ("/t/response", "Failed to serialize response!"),
    ):
        with pytest.raises(grpc.RpcError) as caught:
            channel.unary_unary(method)(BIG)
        assert (caught.value.code(), caught.value.details()) == (grpc.StatusCode.INTERNAL, details)
    for serializers, details in (
        ((fault, None), "Exception serializing request!"),
        ((None, fault), "Exception deserializing response!"),
    ):
        for call in (
            channel.unary_unary("/t/none", *serializers),
            lambda m, s=serializers: channel.unary_unary("/t/none", *s).future(m).result(),
        ):
            with pytest.raises(grpc.RpcError) as caught:
                call(BIG)
            error = caught.value
            assert (error.code(), error.details()) == (grpc.StatusCode.INTERNAL, details)
    with pytest.raises(grpc.RpcError) as caught:
        channel.stream_unary("/t/stream", fault)(iter([BIG]))
    assert caught.value.code() is grpc.StatusCode.INTERNAL


def test_requests_that_fail(four: Any) -> None:
    def requests() -> Iterator[bytes]:
        yield BIG
        raise RuntimeError("no more")

    with pytest.raises(grpc.RpcError) as caught:
        four.stream_unary("/t/su")(requests())
    error = caught.value
    assert (error.code(), error.details()) == (
        grpc.StatusCode.UNKNOWN,
        "Exception iterating requests!",
    )


@pytest.mark.parametrize("arity", ["uu", "us", "su", "ss"])
def test_deadline(ends: Ends, arity: str) -> None:
    release, ended = threading.Event(), threading.Event()

    def late(request: Any, context: Any) -> Any:
        context.add_callback(ended.set)
        assert 0 < context.time_remaining() <= 0.6
        release.wait(LONG_S)
        return b""

    def late_stream(request: Any, context: Any) -> Any:
        yield BIG
        yield late(request, context)

    ends.methods = {
        "/t/warm": UU(echo),
        "/t/m": {"uu": UU(late), "us": US(late_stream), "su": SU(late), "ss": SS(late_stream)}[
            arity
        ],
    }
    channel = ends.serve().channel()
    channel.unary_unary("/t/warm")(b"x")
    error = error_of(channel, arity, BIG, timeout=0.5)
    assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert ended.wait(LONG_S)
    release.set()


def test_deadline_that_is_over(four: Any) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        four.unary_unary("/t/uu")(BIG, timeout=-1.0)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


@pytest.mark.parametrize("arity", ["uu", "us", "su", "ss"])
def test_cancelled_by_the_client(ends: Ends, arity: str) -> None:
    running, ended, release = threading.Event(), threading.Event(), threading.Event()

    def wait(request: Any, context: Any) -> Any:
        assert context.add_callback(ended.set)
        running.set()
        release.wait(LONG_S)
        return b""

    def wait_stream(request: Any, context: Any) -> Any:
        yield BIG
        yield wait(request, context)

    ends.methods = {
        "/t/m": {"uu": UU(wait), "us": US(wait_stream), "su": SU(wait), "ss": SS(wait_stream)}[
            arity
        ]
    }
    channel = ends.serve().channel()
    requests = BIG if arity[0] == "u" else iter([BIG])
    if arity[1] == "s":
        kind = "unary_stream" if arity[0] == "u" else "stream_stream"
        call = getattr(channel, kind)("/t/m")(requests)
        assert next(call) == BIG
    else:
        kind = "unary_unary" if arity[0] == "u" else "stream_unary"
        call = getattr(channel, kind)("/t/m").future(requests)
    assert running.wait(LONG_S)
    assert call.is_active()
    call.cancel()
    assert ended.wait(LONG_S)
    release.set()
    assert call.code() is grpc.StatusCode.CANCELLED
    assert call.cancelled()
    if arity[1] == "s":
        with pytest.raises(grpc.RpcError):
            next(call)
    else:
        with pytest.raises(grpc.FutureCancelledError):
            call.result()
        with pytest.raises(grpc.FutureCancelledError):
            call.exception()


@pytest.mark.parametrize("arity", ["uu", "ss"])
def test_cancelled_by_the_server(ends: Ends, arity: str) -> None:
    def cancel(request: Any, context: Any) -> Any:
        context.cancel()
        return BIG

    def cancel_stream(requests: Any, context: Any) -> Any:
        yield next(requests)
        context.cancel()
        yield BIG

    ends.methods = {"/t/m": UU(cancel) if arity == "uu" else SS(cancel_stream)}
    assert error_of(ends.serve().channel(), arity, BIG).code() is grpc.StatusCode.CANCELLED


def test_a_forgotten_stream_is_cancelled(ends: Ends) -> None:
    ended = threading.Event()

    def endless(request: bytes, context: Any) -> Iterator[bytes]:
        context.add_callback(ended.set)
        while True:
            yield request

    ends.methods = {"/t/m": US(endless)}
    call = ends.serve().channel().unary_stream("/t/m")(BIG)
    assert next(call) == BIG
    del call
    gc.collect()
    assert ended.wait(LONG_S)


def test_a_forgotten_future_is_cancelled(ends: Ends) -> None:
    running, ended, release = threading.Event(), threading.Event(), threading.Event()

    def method(request: bytes, context: Any) -> bytes:
        context.add_callback(ended.set)
        running.set()
        release.wait(LONG_S)
        return request

    ends.methods = {"/t/m": UU(method)}
    future = ends.serve().channel().unary_unary("/t/m").future(BIG)
    assert running.wait(LONG_S)
    del future
    gc.collect()
    assert ended.wait(LONG_S)
    release.set()


def test_a_forgotten_future_with_a_callback_goes_on(ends: Ends) -> None:
    running, release = threading.Event(), threading.Event()
    got: list[bytes] = []

    def method(request: bytes, context: Any) -> bytes:
        running.set()
        release.wait(LONG_S)
        return request

    ends.methods = {"/t/m": UU(method)}
    future = ends.serve().channel().unary_unary("/t/m").future(BIG)
    future.add_done_callback(lambda each: got.append(each.result()))
    assert running.wait(LONG_S)
    del future
    gc.collect()
    release.set()
    wait_for(lambda: got == [BIG])


def test_futures(ends: Ends) -> None:
    release = threading.Event()

    def method(request: bytes, context: Any) -> bytes:
        release.wait(LONG_S)
        return request

    def fail(request: bytes, context: Any) -> None:
        context.abort(grpc.StatusCode.NOT_FOUND, "none")

    ends.methods = {"/t/m": UU(method), "/t/fail": UU(fail)}
    channel = ends.serve().channel()
    future = channel.unary_unary("/t/m").future(BIG)
    called = threading.Event()
    seen: list[Any] = []
    future.add_done_callback(lambda each: (seen.append(each), called.set()))
    assert not future.done()
    assert future.running()
    with pytest.raises(grpc.FutureTimeoutError):
        future.result(timeout=0.02)
    with pytest.raises(grpc.FutureTimeoutError):
        future.exception(timeout=0.02)
    release.set()
    assert future.result(timeout=LONG_S) == BIG
    assert called.wait(LONG_S)
    assert seen == [future]
    assert future.done()
    assert not future.running()
    assert not future.cancelled()
    assert future.exception() is None
    assert future.traceback() is None
    assert future.code() is grpc.StatusCode.OK
    late = threading.Event()
    future.add_done_callback(lambda _: late.set())
    assert late.is_set()

    failed = channel.unary_unary("/t/fail").future(BIG)
    error = failed.exception(timeout=LONG_S)
    assert isinstance(error, grpc.RpcError)
    assert error.code() is failed.code() is grpc.StatusCode.NOT_FOUND
    assert failed.details() == "none"
    assert failed.traceback() is not None
    with pytest.raises(grpc.RpcError):
        failed.result()


def test_nobody_listens(ends: Ends) -> None:
    ends.port = 1
    channel = ends.channel()
    for call in (channel.unary_unary("/t/m"), channel.unary_unary("/t/m").with_call):
        with pytest.raises(grpc.RpcError) as caught:
            call(BIG)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert channel.unary_unary("/t/m").future(BIG).code() is grpc.StatusCode.UNAVAILABLE
    with pytest.raises(grpc.RpcError):
        next(channel.stream_stream("/t/m")(iter([BIG])))


def test_wait_for_ready(ends: Ends) -> None:
    ends.methods = {"/t/m": UU(echo)}
    first = ends.serve()
    first.server.stop(0).wait()
    channel = ends.channel()
    future = channel.unary_unary("/t/m").future(BIG, wait_for_ready=True)
    stream = channel.unary_unary("/t/m").future(b"second", wait_for_ready=True)
    assert not future.done()
    second = ends.system.server(ThreadPoolExecutor(2))
    second.add_generic_rpc_handlers((Methods(ends.methods),))
    assert second.add_insecure_port(f"127.0.0.1:{ends.port}") == ends.port
    second.start()
    assert future.result(timeout=LONG_S) == BIG
    assert stream.result(timeout=LONG_S) == b"second"
    second.stop(0).wait()


# grpcio's thread that looks at connectivity does not survive that its channel is closed.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_connectivity(four: Any) -> None:
    states: list[Any] = []
    four.subscribe(states.append, try_to_connect=True)
    grpc.channel_ready_future(four).result(timeout=LONG_S)
    wait_for(lambda: grpc.ChannelConnectivity.READY in states)
    four.unsubscribe(states.append)


class Seen(
    grpc.UnaryUnaryClientInterceptor,  # type: ignore[misc]
    grpc.StreamStreamClientInterceptor,  # type: ignore[misc]
    grpc.ServerInterceptor,  # type: ignore[misc]
):
    """An interceptor of either side that notes what it sees and changes it."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def intercept_unary_unary(self, continuation: Any, details: Any, request: Any) -> Any:
        self.seen.append(("request", request))
        answer = continuation(details, request + b"!")
        self.seen.append(("answer", answer.result()))
        return answer

    def intercept_stream_stream(self, continuation: Any, details: Any, requests: Any) -> Any:
        return (each + b"?" for each in continuation(details, (r + b"!" for r in requests)))

    def intercept_service(self, continuation: Any, details: Any) -> Any:
        handler = continuation(details)
        if handler is None or handler.unary_unary is None:
            return handler

        def behavior(request: Any, context: Any) -> Any:
            self.seen.append(("behavior", request))
            answer = handler.unary_unary(request, context)
            self.seen.append(("handled", answer))
            return answer + b"."

        self.seen.append(details.method)
        return UU(behavior, handler.request_deserializer, handler.response_serializer)


def test_interceptors_of_both_sides(ends: Ends) -> None:
    ends.methods = {"/t/m": UU(echo), "/t/ss": SS(echo_all)}
    at_server, at_client = Seen(), Seen()
    ends.serve(interceptors=(at_server,))
    channel = grpc.intercept_channel(ends.channel(), at_client)
    for _ in range(2):
        at_server.seen.clear()
        at_client.seen.clear()
        assert channel.unary_unary("/t/m")(BIG) == BIG + b"!."
        assert at_server.seen == ["/t/m", ("behavior", BIG + b"!"), ("handled", BIG + b"!")]
        assert at_client.seen == [("request", BIG), ("answer", BIG + b"!.")]
    assert list(channel.stream_stream("/t/ss")(iter([BIG, b"x"]))) == [BIG + b"!?", b"x!?"]


variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="unset")


class SetsVariable(grpc.ServerInterceptor):  # type: ignore[misc]
    def intercept_service(self, continuation: Any, details: Any) -> Any:
        variable.set("set")
        return continuation(details)


def test_context_variables_of_interceptors(ends: Ends) -> None:
    ends.methods = {"/t/m": UU(lambda request, context: variable.get().encode())}
    channel = ends.serve(interceptors=(SetsVariable(),)).channel()
    assert channel.unary_unary("/t/m")(BIG) == b"set"


def test_maximum_concurrent_rpcs(ends: Ends) -> None:
    running, release = threading.Event(), threading.Event()

    def method(request: bytes, context: Any) -> bytes:
        if request == b"wait":
            running.set()
            release.wait(LONG_S)
        return request

    ends.methods = {"/t/m": UU(method)}
    call = ends.serve(maximum_concurrent_rpcs=1).channel().unary_unary("/t/m")
    wait_for(lambda: succeeds(call))
    future = call.future(b"wait")
    assert running.wait(LONG_S)
    with pytest.raises(grpc.RpcError) as caught:
        call(b"x")
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    release.set()
    assert future.result(timeout=LONG_S) == b"wait"


def succeeds(call: Any) -> bool:
    """Returns whether a call is admitted; the one before may still be leaving."""
    try:
        return bool(call(b"warm"))
    except grpc.RpcError:
        return False


@pytest.mark.parametrize("grace", [None, 0.1])
def test_stop_with_a_call_under_way(ends: Ends, grace: float | None) -> None:
    running, release = threading.Event(), threading.Event()

    def method(request: bytes, context: Any) -> bytes:
        running.set()
        release.wait(LONG_S)
        return request

    ends.methods = {"/t/m": UU(method)}
    future = ends.serve().channel().unary_unary("/t/m").future(BIG)
    assert running.wait(LONG_S)
    stopped = ends.server.stop(grace)
    assert future.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
    release.set()
    assert stopped.wait(LONG_S)


def test_stop_lets_a_call_end(ends: Ends) -> None:
    """A stop with grace lets a running call end.

    grpcio's server closes the connection with its last call. If the client is still answering to
    a long reply then, the kernel resets the connection and drops the reply: one call in eight of
    300 kB on a busy machine. So only our two ends, whose payload goes ahead, try a long one.
    """
    ours = ends.system.our_channel and ends.system.our_server
    message = BIG if ours else BIG[:10_000]
    running, release = threading.Event(), threading.Event()

    def method(request: bytes, context: Any) -> bytes:
        running.set()
        release.wait(LONG_S)
        return request

    ends.methods = {"/t/m": UU(method)}
    future = ends.serve().channel().unary_unary("/t/m").future(message)
    assert running.wait(LONG_S)
    stopped = ends.server.stop(LONG_S)
    release.set()
    assert future.result(timeout=LONG_S) == message
    assert stopped.wait(LONG_S)
    assert not ends.server.wait_for_termination(timeout=1)


def test_retries_by_service_config(ends: Ends) -> None:
    tries = []

    def method(request: bytes, context: Any) -> bytes:
        tries.append(request)
        if len(tries) % 3:
            context.abort(grpc.StatusCode.UNAVAILABLE, "not now")
        return request

    ends.methods = {"/t/m": UU(method)}
    config = """{"methodConfig": [{"name": [{}], "retryPolicy": {"maxAttempts": 5,
        "initialBackoff": "0.01s", "maxBackoff": "0.01s", "backoffMultiplier": 1,
        "retryableStatusCodes": ["UNAVAILABLE"]}}]}"""
    channel = ends.serve().channel(options=[("grpc.service_config", config)])
    for message in (b"abc", BIG[:100_000]):  # grpcio keeps no more than 256 KiB for a retry
        assert channel.unary_unary("/t/m")(message) == message
    assert tries == [b"abc"] * 3 + [BIG[:100_000]] * 3


@pytest.mark.parametrize("where", ["channel", "call", "server"])
def test_compression(ends: Ends, where: str) -> None:
    gzip = grpc.Compression.Gzip
    ends.methods = {"/t/m": UU(echo), "/t/ss": SS(echo_all)}
    ends.serve(**({"compression": gzip} if where == "server" else {}))
    channel = ends.channel(**({"compression": gzip} if where == "channel" else {}))
    options = {"compression": gzip} if where == "call" else {}
    assert channel.unary_unary("/t/m")(BIG, **options) == BIG
    assert list(channel.stream_stream("/t/ss")(iter([BIG] * 3), **options)) == [BIG] * 3


def test_registered_methods_come_before_generic_ones(ends: Ends) -> None:
    server = ends.system.server(ThreadPoolExecutor(2))
    server.add_generic_rpc_handlers((Methods({"/t/m": UU(lambda r, c: b"generic")}),))
    server.add_registered_method_handlers("t", {"m": UU(lambda r, c: b"registered")})
    ends.port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    call = ends.channel().unary_unary("/t/m", _registered_method=True)
    assert [call(BIG), call(BIG)] == [b"registered"] * 2
    server.stop(0).wait()


def test_a_closed_channel(four: Any) -> None:
    call = four.unary_unary("/t/uu")
    assert call(BIG) == BIG
    four.close()
    four.close()
    with pytest.raises(ValueError, match="closed channel"):
        call(BIG)


def test_closing_cancels(ends: Ends) -> None:
    running, release = threading.Event(), threading.Event()

    def method(request: bytes, context: Any) -> bytes:
        running.set()
        release.wait(LONG_S)
        return request

    ends.methods = {"/t/m": UU(method)}
    channel = ends.serve().channel()
    future = channel.unary_unary("/t/m").future(BIG)
    assert running.wait(LONG_S)
    channel.close()
    release.set()
    assert future.code() is grpc.StatusCode.CANCELLED


def test_rich_status_and_server_side_codes(ends: Ends) -> None:
    def method(request: bytes, context: Any) -> bytes:
        context.set_code(grpc.StatusCode.ALREADY_EXISTS)
        context.set_details("it is there")
        return request

    ends.methods = {"/t/m": UU(method)}
    error = error_of(ends.serve().channel(), "uu", BIG)
    assert (error.code(), error.details()) == (grpc.StatusCode.ALREADY_EXISTS, "it is there")
    assert isinstance(error, grpc.Call)


@of_systems(
    "size_bytes said",
    [0, 5, (48 << 10) - 1, 48 << 10, (48 << 10) + 1],
    ["code", "details", "trailing", "none", "nothing"],
)
def test_a_call_that_ends_well_and_says_more(ends: Ends, said: str, size_bytes: int) -> None:
    def method(request: bytes, context: Any) -> bytes:
        if said == "code":
            context.set_code(grpc.StatusCode.OK)
        elif said == "details":
            context.set_details("all is well")
        elif said == "trailing":
            context.set_trailing_metadata((("key", "value"),))
        elif said == "none":
            context.set_trailing_metadata(())
        return request

    ends.methods = {"/t/m": UU(method)}
    message = bytes(number % 251 for number in range(size_bytes))
    answer, call = ends.serve().channel().unary_unary("/t/m").with_call(message)
    assert answer == message
    assert call.code() is grpc.StatusCode.OK
    assert call.details() == ""  # OK has no details
    trailing = [(key, value) for key, value in call.trailing_metadata() if key == "key"]
    assert trailing == ([("key", "value")] if said == "trailing" else [])


def test_many_at_a_time(four: Any) -> None:
    call = four.unary_unary("/t/uu")
    messages = [bytes([number]) * 5000 for number in range(100)]
    futures = [call.future(each) for each in messages]
    assert [future.result(timeout=LONG_S) for future in futures] == messages
