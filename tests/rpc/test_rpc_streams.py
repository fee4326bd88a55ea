"""The behaviour that gRPC documents of calls that stream: one test for grpcio and for us."""

import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from ends import Ends, of_systems
from test_rpc_conformance import BIG, LONG_S, SS, SU, US, UU, echo, echo_all, fault, join, wait_for

KIND = {"u": "unary", "s": "stream"}
SMALL = b"x" * 4000
MANY = 5_000  # 20 MB, several times what may be on its way


def method(channel: Any, arity: str, *serializers: Any) -> Any:
    return getattr(channel, f"{KIND[arity[0]]}_{KIND[arity[1]]}")("/t/m", *serializers)


def error_of(call: Any) -> Any:
    """How a call failed that was begun by `call`, at whichever point it says so."""
    with pytest.raises(grpc.RpcError) as caught:
        list(call())
    return caught.value


@pytest.mark.parametrize("message", [b"", SMALL, BIG], ids=["empty", "small", "big"])
def test_many_messages_arrive_in_order(ends: Ends, message: bytes) -> None:
    count = 40 if message == BIG else 2000
    ends.methods = {"/t/m": SS(echo_all)}
    sent = [message + b"%d" % number if message else b"" for number in range(count)]
    assert list(ends.serve().channel().stream_stream("/t/m")(iter(sent))) == sent


@pytest.mark.slow
def test_a_slow_reader_holds_up_the_servicer(ends: Ends) -> None:
    made = []

    def endless(request: bytes, context: Any) -> Iterator[bytes]:
        for number in range(MANY):
            made.append(number)
            yield SMALL

    ends.methods = {"/t/m": US(endless)}
    call = ends.serve().channel().unary_stream("/t/m")(b"")
    assert next(call) == SMALL
    stands_still(made)
    assert sum(1 for _ in call) == MANY - 1
    assert call.code() is grpc.StatusCode.OK


def stands_still(made: list[int]) -> None:
    """Until nothing is made any more; and not all was."""
    until, before = time.monotonic() + LONG_S, -1
    while len(made) != before:
        before = len(made)
        time.sleep(0.3)
        assert time.monotonic() < until
    assert before < MANY


@pytest.mark.slow
def test_a_slow_servicer_holds_up_the_requests(ends: Ends) -> None:
    made: list[int] = []
    go = threading.Event()

    def requests() -> Iterator[bytes]:
        for number in range(MANY):
            made.append(number)
            yield SMALL

    def count(every: Iterator[bytes], context: Any) -> bytes:
        go.wait(LONG_S)
        return b"%d" % sum(1 for _ in every)

    ends.methods = {"/t/m": SU(count)}
    future = ends.serve().channel().stream_unary("/t/m").future(requests())
    stands_still(made)
    go.set()
    assert future.result(LONG_S) == b"%d" % MANY


@pytest.mark.slow
@of_systems("end arity", ["cancel", "deadline"], ["us", "su", "ss"])
def test_an_end_while_the_sender_waits(ends: Ends, arity: str, end: str) -> None:
    """A sender that waits for its reader goes on when the call ends, at both ends."""
    made: list[int] = []
    left, go = threading.Event(), threading.Event()

    def endless(_: Any = None, context: Any = None) -> Iterator[bytes]:
        try:
            for number in range(MANY):
                made.append(number)
                yield SMALL
        finally:
            left.set()

    def wait(requests: Any, context: Any) -> bytes:
        go.wait(LONG_S)
        return b""

    ends.methods = {"/t/m": {"us": US(endless), "su": SU(wait), "ss": SS(endless)}[arity]}
    channel = ends.serve().channel()
    requests = b"" if arity == "us" else iter([b""]) if arity == "ss" else endless()
    timeout = 1.5 if end == "deadline" else None
    begun = method(channel, arity)
    if arity == "su":
        call = begun.future(requests, timeout=timeout)
    else:
        call = begun(requests, timeout=timeout)
        assert next(call) == SMALL
    wait_for(lambda: len(made) > 3)
    del requests
    if end == "cancel":
        stands_still(made)
        call.cancel()
        assert call.code() is grpc.StatusCode.CANCELLED
    else:
        assert call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert left.wait(LONG_S)
    go.set()


def test_a_cancel_while_a_thread_waits_for_the_next_message(ends: Ends) -> None:
    running, ended = threading.Event(), threading.Event()

    def nothing(request: bytes, context: Any) -> Iterator[bytes]:
        context.add_callback(ended.set)
        running.set()
        ended.wait(LONG_S)
        yield b""

    ends.methods = {"/t/m": US(nothing)}
    call = ends.serve().channel().unary_stream("/t/m")(b"")
    caught: list[Any] = []

    def read() -> None:
        caught.append(error_of(lambda: call))

    thread = threading.Thread(target=read)
    thread.start()
    assert running.wait(LONG_S)
    assert call.cancel() in (True, None)
    thread.join(LONG_S)
    assert caught[0].code() is call.code() is grpc.StatusCode.CANCELLED
    assert ended.wait(LONG_S)


def test_what_the_servicer_sees_of_the_end(ends: Ends) -> None:
    """Requests end by StopIteration after half close, and by an RpcError after a cancel.

    grpcio takes a cancel for a half close if that is how it hears of it first.
    """
    seen: list[Any] = []
    begun = threading.Event()

    def read(requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
        yield next(requests)
        begun.set()
        try:
            for each in requests:
                seen.append(each)
            seen.append("over")
        except grpc.RpcError:
            seen.append("cancelled")
            raise
        yield b"end"

    ends.methods = {"/t/m": SS(read)}
    channel = ends.serve().channel()
    assert list(channel.stream_stream("/t/m")(iter([b"1", b"2"]))) == [b"1", b"end"]
    assert seen == [b"2", "over"]
    hold = threading.Event()

    def requests() -> Iterator[bytes]:
        yield b"1"
        hold.wait(LONG_S)

    seen.clear()
    begun.clear()
    call = channel.stream_stream("/t/m")(requests())
    assert next(call) == b"1"
    assert begun.wait(LONG_S)
    call.cancel()
    ours = ends.system.our_server is not None and "runtime" in ends.system.our_server
    wait_for(lambda: seen == ["cancelled"] or (seen == ["over"] and not ours))
    hold.set()


def test_an_answer_before_the_requests_are_over(ends: Ends) -> None:
    """The servicer reads one request; the sender of more notices that they are not wanted."""
    over = threading.Event()

    def requests() -> Iterator[bytes]:
        try:
            for _ in range(MANY):
                yield SMALL
        finally:
            over.set()

    ends.methods = {"/t/m": SU(lambda every, context: next(every) + b"!")}
    call = ends.serve().channel().stream_unary("/t/m")
    assert call(requests()) == SMALL + b"!"
    assert over.wait(LONG_S)
    ends.methods["/t/m"] = SU(lambda every, context: b"none")
    assert call(iter([])) == b"none"


def test_no_messages_at_all(ends: Ends) -> None:
    ends.methods = {"/t/m": SS(echo_all)}
    call = ends.serve().channel().stream_stream("/t/m")(iter([]))
    assert list(call) == []
    assert (call.code(), call.details()) == (grpc.StatusCode.OK, "")
    assert [*call.trailing_metadata()] == []
    with pytest.raises(StopIteration):
        next(call)


def test_metadata_of_a_stream(ends: Ends) -> None:
    go = threading.Event()

    def answer(requests: Any, context: Any) -> Iterator[bytes]:
        context.send_initial_metadata((("first", "1"), ("first-bin", b"\0")))
        go.wait(LONG_S)
        yield BIG
        context.set_trailing_metadata((("last", "2"),))

    ends.methods = {"/t/m": SS(answer), "/t/plain": SS(echo_all)}
    channel = ends.serve().channel()
    call = channel.stream_stream("/t/m")(iter([]), metadata=(("a", "b"),))
    assert [*map(tuple, call.initial_metadata())] == [("first", "1"), ("first-bin", b"\0")]
    assert call.is_active()
    assert not call.done()
    go.set()
    assert list(call) == [BIG]
    assert [*map(tuple, call.trailing_metadata())] == [("last", "2")]
    assert not call.is_active()
    assert call.done()
    assert call.result() is call.exception() is call.traceback() is None
    plain = channel.stream_stream("/t/plain")(iter([b"1"]))
    assert next(plain) == b"1"
    assert [*plain.initial_metadata()] == []


def test_initial_metadata_that_come_too_late(ends: Ends) -> None:
    def late(request: bytes, context: Any) -> Iterator[bytes]:
        yield b"1"
        context.send_initial_metadata((("k", "v"),))
        yield b"2"

    ends.methods = {"/t/m": US(late)}
    call = ends.serve().channel().unary_stream("/t/m")(b"")
    assert next(call) == b"1"
    error = error_of(lambda: call)
    assert error.code() is grpc.StatusCode.UNKNOWN
    assert "Initial metadata no longer allowed" in error.details()


def test_a_response_that_is_none_ends_a_stream(ends: Ends) -> None:
    ends.methods = {"/t/m": US(lambda request, context: iter([b"1", None, b"2"]))}
    assert list(ends.serve().channel().unary_stream("/t/m")(b"")) == [b"1"]


@pytest.mark.parametrize("waiting", ["call", "future", "stream"])
def test_a_handler_of_a_signal_that_calls(ends: Ends, waiting: str) -> None:
    """The handler runs in the thread that waits, in the middle of the wait."""
    release, got = threading.Event(), []

    def held(request: bytes, context: Any) -> bytes:
        release.wait(LONG_S)
        return b"held"

    def some(request: bytes, context: Any) -> Iterator[bytes]:
        yield b"1"
        yield held(request, context)

    ends.methods = {"/t/echo": UU(echo), "/t/held": UU(held), "/t/some": US(some)}
    channel = ends.serve().channel()
    call = channel.unary_unary("/t/echo")
    assert call(SMALL) == SMALL

    def handle(*_: object) -> None:
        try:
            got.append(call(b"within", timeout=5))
        finally:
            release.set()

    before = signal.signal(signal.SIGUSR1, handle)
    interrupt = threading.Timer(0.2, signal.pthread_kill, (threading.get_ident(), signal.SIGUSR1))
    interrupt.start()
    try:
        if waiting == "call":
            assert channel.unary_unary("/t/held")(b"") == b"held"
        elif waiting == "future":
            assert channel.unary_unary("/t/held").future(b"").result() == b"held"
        else:
            assert list(channel.unary_stream("/t/some")(b"")) == [b"1", b"held"]
    finally:
        interrupt.join()
        signal.signal(signal.SIGUSR1, before)
    assert got == [b"within"]


def test_a_deserializer_that_calls(ends: Ends) -> None:
    ends.methods = {"/t/echo": UU(echo), "/t/m": SS(echo_all)}
    channel = ends.serve().channel()
    call = channel.unary_unary("/t/echo")

    def deserialize(data: bytes) -> bytes:
        return bytes(call(data + b"!", timeout=5))

    assert channel.unary_unary("/t/echo", None, deserialize)(b"1") == b"1!"
    futures = [channel.unary_unary("/t/echo", None, deserialize).future(b"2") for _ in range(20)]
    assert [each.result() for each in futures] == [b"2!"] * 20
    stream = channel.stream_stream("/t/m", None, deserialize)
    assert list(stream(iter([b"3", b"4"]))) == [b"3!", b"4!"]


def test_callbacks_of_a_stream(ends: Ends) -> None:
    ends.methods = {"/t/m": US(lambda request, context: iter([b"1", b"2"]))}
    channel = ends.serve().channel()
    call = channel.unary_stream("/t/m")(b"")
    called: list[Any] = []
    call.add_done_callback(called.append)
    assert call.add_callback(lambda: called.append("context"))
    assert list(call) == [b"1", b"2"]
    wait_for(lambda: called == [call, "context"])
    assert not call.add_callback(lambda: None)


def test_serializers_of_streams_that_fail(ends: Ends) -> None:
    channel = None
    for handler, arity, serializers, details in (
        (SU(join, request_deserializer=fault), "su", (), "Exception deserializing request!"),
        (SS(echo_all, response_serializer=fault), "ss", (), "Failed to serialize response!"),
        (SS(echo_all), "ss", (fault, None), "Exception serializing request!"),
        (SS(echo_all), "ss", (None, fault), "Exception deserializing response!"),
        (US(lambda r, c: iter([r])), "us", (None, fault), "Exception deserializing response!"),
        (US(lambda r, c: iter([r])), "us", (fault, None), "Exception serializing request!"),
    ):
        ends.methods["/t/m"] = handler
        if channel is None:
            channel = ends.serve().channel()
        request = SMALL if arity == "us" else iter([SMALL])
        call = method(channel, arity, *serializers)
        error = error_of(lambda c=call, r=request: c(r))
        assert (error.code(), error.details()) == (grpc.StatusCode.INTERNAL, details)
    if "runtime" not in (ends.system.our_server or {}):
        # grpcio's server does not always see that all of these calls are over.
        ends.closing[1] = lambda: ends.server.stop(0)


def test_requests_that_are_no_iterator(ends: Ends) -> None:
    ends.methods = {"/t/m": SS(echo_all)}
    channel = ends.serve().channel()
    error = error_of(lambda: channel.stream_stream("/t/m")([b"1"]))
    assert error.code() is grpc.StatusCode.UNKNOWN
    assert error.details() == "Exception iterating requests!"


def test_responses_that_are_no_iterator(ends: Ends) -> None:
    ends.methods = {"/t/m": US(lambda request, context: [b"1"])}
    channel = ends.serve().channel()
    error = error_of(lambda: channel.unary_stream("/t/m")(b""))
    assert error.code() is grpc.StatusCode.UNKNOWN
    assert error.details() == "Exception iterating responses: 'list' object is not an iterator"


@of_systems("client server", ["uu", "us", "su", "ss"], ["uu", "us", "su", "ss"])
def test_ends_that_disagree_on_the_arity(ends: Ends, client: str, server: str) -> None:
    """With one message each way there is no difference."""
    handlers = {
        "uu": UU(echo),
        "us": US(lambda request, context: iter([request])),
        "su": SU(join),
        "ss": SS(echo_all),
    }
    ends.methods = {"/t/m": handlers[server]}
    channel = ends.serve().channel()
    for message in (SMALL, BIG):
        got = method(channel, client)(message if client[0] == "u" else iter([message]))
        assert (got if client[1] == "u" else next(got)) == message
        if client[1] == "s":
            assert list(got) == []
    if (client[0], server[0]) == ("s", "u"):
        error = error_of(lambda: method(channel, client)(iter([])))
        assert error.code() is grpc.StatusCode.UNIMPLEMENTED
        assert "requires exactly one request message" in error.details()


@of_systems("marked arity", ["behavior", "handler too"], ["us", "ss"])
def test_a_behavior_that_does_not_block(ends: Ends, arity: str, marked: str) -> None:
    """grpcio lets a behavior give its responses to a callback, if it says so."""

    def answer(request: Any, context: Any, respond: Any) -> None:
        def work() -> None:
            for each in (request,) if isinstance(request, bytes) else request:
                respond(each)
            respond(b"2")
            respond(None)

        threading.Thread(target=work).start()

    answer.experimental_non_blocking = True  # type: ignore[attr-defined]
    handler = {"us": US, "ss": SS}[arity](answer)
    if marked == "handler too":  # as code that wraps handlers may need it
        handler.experimental_non_blocking = True
    ends.methods = {"/t/m": handler}
    call = method(ends.serve().channel(), arity)
    for request in (b"1", b"long" * 100_000):
        assert list(call(request if arity == "us" else iter([request]))) == [request, b"2"]


@pytest.mark.parametrize("arity", ["uu", "us", "su", "ss"])
def test_a_behavior_with_threads_of_its_own(ends: Ends, arity: str) -> None:
    """grpcio runs a behavior in the threads that it names itself."""
    own = ThreadPoolExecutor(1, thread_name_prefix="own")
    ends.closing.append(own.shutdown)

    def name(request: Any, context: Any) -> Any:
        return threading.current_thread().name.encode()

    def names(request: Any, context: Any) -> Any:
        yield name(request, context)

    behavior = name if arity[1] == "u" else names
    behavior.experimental_thread_pool = own  # type: ignore[attr-defined]
    ends.methods = {"/t/m": {"uu": UU, "us": US, "su": SU, "ss": SS}[arity](behavior)}
    got = method(ends.serve().channel(), arity)(b"1" if arity[0] == "u" else iter([b"1"]))
    assert (got if arity[1] == "u" else next(iter(got))).startswith(b"own")


def test_limits_of_messages_in_streams(ends: Ends) -> None:
    limit = [("grpc.max_receive_message_length", len(SMALL))]
    ends.methods = {"/t/m": SS(echo_all)}
    channel = ends.serve().channel(options=limit)
    assert list(channel.stream_stream("/t/m")(iter([SMALL]))) == [SMALL]
    error = error_of(lambda: channel.stream_stream("/t/m")(iter([SMALL, SMALL + b"x"])))
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "larger than max" in error.details()


def test_streams_in_many_threads(ends: Ends) -> None:
    ends.methods = {"/t/m": SS(echo_all)}
    call = ends.serve(workers=8).channel().stream_stream("/t/m")
    failed: list[Any] = []

    def work(seed: int) -> None:
        for turn in range(10):
            sent = [bytes([seed]) * (turn * 700 + number) for number in range(30)]
            if list(call(iter(sent))) != sent:
                failed.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(LONG_S * 3)
    assert not failed
    assert not any(each.is_alive() for each in threads)


@pytest.mark.parametrize("grace", [None, 0.1])
def test_stop_with_a_stream_under_way(ends: Ends, grace: float | None) -> None:
    def endless(request: bytes, context: Any) -> Iterator[bytes]:
        yield b"1"
        while context.is_active():
            time.sleep(0.01)

    ends.methods = {"/t/m": US(endless)}
    call = ends.serve().channel().unary_stream("/t/m")(b"")
    assert next(call) == b"1"
    stopped = ends.server.stop(grace)
    assert error_of(lambda: call).code() in (
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.CANCELLED,
    )
    assert stopped.wait(LONG_S)


def test_closing_a_channel_ends_its_streams(ends: Ends) -> None:
    def endless(request: bytes, context: Any) -> Iterator[bytes]:
        yield b"1"
        while context.is_active():
            time.sleep(0.01)

    ends.methods = {"/t/m": US(endless)}
    channel = ends.serve().channel()
    call = channel.unary_stream("/t/m")(b"")
    assert next(call) == b"1"
    channel.close()
    error = error_of(lambda: call)
    assert error.code() is grpc.StatusCode.CANCELLED
    assert "Channel closed!" in error.details()
