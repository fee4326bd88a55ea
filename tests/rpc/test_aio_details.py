"""Details of `grpc.aio` that programs rely on, as grpcio's own tests show: the same for all."""

from typing import Any

import pytest
from test_aio import echo, echo_all, join, repeat, run
from test_rpc_details import BareHandler

__all__ = ["run"]  # a fixture

BEHAVIORS = {"unary_unary": echo, "unary_stream": repeat, "stream_unary": join,
             "stream_stream": echo_all}  # fmt: skip


@pytest.mark.parametrize("arity", BEHAVIORS)
def test_handlers_that_have_their_own_arity_only(run: Any, arity: str) -> None:
    async def test(channel: Any) -> None:
        for _ in range(2):
            request: Any = iter([b"abc"]) if arity.startswith("stream") else b"abc"
            answer = getattr(channel, arity)("/t/m")(request)
            if arity.endswith("stream"):
                assert b"".join([each async for each in answer]).startswith(b"abc")
            else:
                assert await answer == b"abc"

    run({"/t/m": BareHandler(arity, BEHAVIORS[arity])}, test)
