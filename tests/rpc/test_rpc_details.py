"""Details that programs rely on, as grpcio's own tests show: the same for grpcio and for us."""

from typing import Any

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
        self.request_streaming = arity.startswith("stream")
        self.response_streaming = arity.endswith("stream")
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
