"""Details that programs rely on, as grpcio's own tests show: the same for grpcio and for us."""

from typing import Any

import grpc
import pytest
from ends import Ends
from test_rpc_conformance import echo, echo_all, join, repeat

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
