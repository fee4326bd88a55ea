"""Details that programs rely on, as grpcio's own tests show: the same for grpcio and for us."""

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import grpc
import pytest
from ends import Ends
from test_rpc_conformance import echo, echo_all, join, repeat

from tensorwire import rpc

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
    if ends.system.our_channel is not None and not ends.system.our_channel.get("runtime"):
        pytest.skip("limits do not count payload that goes ahead")

    def three(request: bytes, context: Any) -> Iterator[bytes]:
        yield request
        yield request
        yield request * 2

    ends.methods = {"/t/m": grpc.unary_stream_rpc_method_handler(three)}
    limits = [("grpc.max_receive_message_length", 1000)]
    keywords = {"limits": rpc.Limits(threshold_bytes=1 << 30)}
    if ends.system.our_channel is not None:
        ours = {**ends.system.our_channel, **keywords}
        ends.system = replace(ends.system, our_channel=ours, our_server=ours)
    channel = ends.serve().channel(options=limits)
    for _ in range(2):
        call = channel.unary_stream("/t/m")(b"x" * 900)
        time.sleep(0.3)  # all has come
        assert [next(call) for _ in range(2)] == [b"x" * 900] * 2
        with pytest.raises(grpc.RpcError) as caught:
            next(call)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "1000" in caught.value.details()


def test_a_server_that_is_deleted_ends_for_who_waits(ends: Ends) -> None:
    ends.serve()
    waiting = threading.Thread(target=ends.server.wait_for_termination)
    waiting.start()
    ends.server.__del__()
    waiting.join(20)
    assert not waiting.is_alive()
