"""Details that programs rely on, as grpcio's own tests show: the same for grpcio and for us."""

import re
import threading
import time
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from ends import SHM, Ends, System, of_systems
from test_rpc_conformance import US, UU, echo, echo_all, join, repeat

BEHAVIORS = {"unary_unary": echo, "unary_stream": repeat, "stream_unary": join,
             "stream_stream": echo_all}  # fmt: skip


class BareHandler:
    """A handler with nothing but what gRPC asks for of its arity."""

    request_deserializer = None
    response_serializer = None

    def __init__(self, arity: str, behavior: Any) -> None:
        # Not False, which gRPC does not ask for either.
        self.request_streaming = arity.startswith("stream") or None
        self.response_streaming = arity.endswith("stream") or None
        setattr(self, arity, behavior)


@pytest.mark.parametrize("arity", BEHAVIORS)
def test_handlers_that_have_their_own_arity_only(ends: Ends, arity: str) -> None:
    # Without a "/" in front, which grpcio does not ask for.
    ends.methods = {"Method": BareHandler(arity, BEHAVIORS[arity])}
    channel = ends.serve().channel()
    for _ in range(2):
        if arity.startswith("stream"):
            answer = getattr(channel, arity)("Method")(iter([b"abc"]))
        else:
            answer = getattr(channel, arity)("Method")(b"abc")
        assert (b"".join(answer) if arity.endswith("stream") else answer).startswith(b"abc")


def test_a_handler_without_its_behavior(ends: Ends) -> None:
    if ends.system.our_server is None:
        pytest.skip("a server of grpcio ends all its calls then")
    wrong = BareHandler("unary_stream", repeat)
    wrong.response_streaming = None
    ends.methods = {"/t/wrong": wrong, "/t/right": BareHandler("unary_unary", echo)}
    channel = ends.serve().channel()
    assert channel.unary_unary("/t/right")(b"abc") == b"abc"
    with pytest.raises(grpc.RpcError) as caught:
        channel.unary_unary("/t/wrong")(b"abc", timeout=10)
    assert caught.value.code() is grpc.StatusCode.UNKNOWN
    assert channel.unary_unary("/t/right")(b"abc") == b"abc"


def test_a_call_that_ended_well_has_no_error_to_tell_of(ends: Ends) -> None:
    ends.methods = {"/t/m": grpc.unary_unary_rpc_method_handler(echo)}
    channel = ends.serve().channel()
    for _ in range(2):
        _, call = channel.unary_unary("/t/m").with_call(b"abc")
        assert call.debug_error_string() == ""


def test_responses_before_one_that_is_too_long(ends: Ends) -> None:
    def three(request: bytes, context: Any) -> Iterator[bytes]:
        yield request
        yield request
        yield request * 2

    ends.methods = {"/t/m": grpc.unary_stream_rpc_method_handler(three)}
    limits = [("grpc.max_receive_message_length", 1000)]
    channel = ends.serve().channel(options=limits)
    for _ in range(2):
        call = channel.unary_stream("/t/m")(b"x" * 900)
        time.sleep(0.3)  # all has come
        assert [next(call) for _ in range(2)] == [b"x" * 900] * 2
        with pytest.raises(grpc.RpcError) as caught:
            next(call)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "1000" in caught.value.details()


@pytest.mark.parametrize("where", ["client sends", "client takes", "server sends", "server takes"])
def test_named_limits_count_what_travels_beside(ends: Ends, where: str) -> None:
    """A limit that a user names protects, whatever way a longer message would have taken."""
    name = "send" if where.endswith("sends") else "receive"
    limit = [(f"grpc.max_{name}_message_length", 1000)]
    at_server = {"options": limit} if where.startswith("server") else {}
    at_client = {} if at_server else {"options": limit}
    is_request = where in ("client sends", "server takes")
    ends.methods = {"/t/m": UU(lambda request, _: request if is_request else bytes(int(request)))}
    call = ends.serve(**at_server).channel(**at_client).unary_unary("/t/m")
    for size in (1000, 1001, 1000, 300_000):
        request = bytes(size) if is_request else str(size).encode()
        if size == 1000:
            assert call(request, timeout=20) == bytes(size)
            continue
        with pytest.raises(grpc.RpcError) as caught:
            call(request, timeout=20)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        side, verb = where.upper().split()[0], "Sent" if name == "send" else "Received"
        told = re.search(rf"{side}: {verb} message larger than max \((\d+) vs\. 1000\)",
                         caught.value.details())  # fmt: skip
        assert told is not None
        assert size in (300_000, int(told[1]))  # the runtime tells how much had arrived


def test_a_longer_message_beside_than_was_told_is_refused() -> None:
    """The other end does not heed the limit that it was told."""
    ends = Ends(System("shm", SHM, SHM), {"/t/m": UU(lambda request, _: request)})
    channel = ends.serve(options=[("grpc.max_receive_message_length", 1000)]).channel()
    call = channel.unary_unary("/t/m")
    call(b"x", timeout=20)
    assert channel.attachment.sent_bytes == 1000
    channel.attachment.sent_bytes = -1
    with pytest.raises(grpc.RpcError, match=r"Received message larger than max \(1001 vs\. 1000\)"):
        call(bytes(1001), timeout=20)  # sent once more, inside
    ends.close()


@of_systems("which arity", ["initial", "trailing", "details"], ["unary_unary", "unary_stream"])
def test_metadata_of_a_server_that_are_too_long(ends: Ends, arity: str, which: str) -> None:
    def run(request: bytes, context: Any) -> Iterator[bytes]:
        many = tuple((f"k{i}", "v" * 1000) for i in range(int(request)))
        if which == "initial":
            context.send_initial_metadata(many)
        yield b"answer"
        if which == "trailing":
            context.set_trailing_metadata(many)
        if which == "details":
            context.abort(grpc.StatusCode.ABORTED, "d" * 1000 * int(request))

    def run_once(request: bytes, context: Any) -> bytes:
        (answer,) = run(request, context)
        return answer

    ends.methods = {"/t/m": US(run) if arity == "unary_stream" else UU(run_once)}
    ends.serve()
    channel = ends.channel()

    def call(request: bytes) -> Any:
        method = getattr(channel, arity)("/t/m")
        return method(request, timeout=20) if arity == "unary_unary" else [*method(request)]

    if which != "details":
        call(b"6")
    with pytest.raises(grpc.RpcError) as caught:
        call(b"20")
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    said = re.search(
        r"received metadata size exceeds hard limit \((value length )?(\d+) vs\. 16384\)",
        caught.value.details(),
    )
    assert said is not None
    assert which == "initial" or int(said[2]) == (20_000 if which == "details" else 16_638)


def test_a_server_that_is_deleted_ends_for_who_waits(ends: Ends) -> None:
    ends.serve()
    waiting = threading.Thread(target=ends.server.wait_for_termination)
    waiting.start()
    ends.server.__del__()
    waiting.join(20)
    assert not waiting.is_alive()
