"""Calls that end while a message is pushed: by deadlines, deaths and otherwise."""

import threading
import time
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from ends import Ends
from test_rpc_conformance import LONG_S, US, UU, echo, wait_for
from test_rpc_large import WIRES, between, message, nothing_is_used
from test_rpc_runner import runner_of

from tensorwire import rpc
from tensorwire.rpc.payload import push, route

CHUNK = 1 << 16


@pytest.fixture(params=WIRES)
def both(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ends]:
    """Ends whose messages are pushed from 1000 bytes on, in small chunks."""
    for name in ("CHUNK_BYTES", "MAPPED_CHUNK_BYTES"):
        monkeypatch.setattr(push, name, CHUNK)
    monkeypatch.setattr(route, "PUSHED_BYTES", CHUNK)
    made = between(request.param, limits=rpc.Limits(threshold_bytes=1000))
    yield made
    made.close()


@pytest.fixture
def stalled(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Senders stop after the first chunk of a message, until it is set."""
    goes_on, run = threading.Event(), push.Push.run

    def stalling(staging: Any, needed: Any) -> None:
        goes_on.wait(LONG_S)
        run(staging, needed)

    monkeypatch.setattr(push.Push, "run", stalling)
    yield goes_on
    goes_on.set()


def outcome(kind: str, channel: Any, size: int, timeout: float) -> grpc.StatusCode:
    """The code of a call whose response is that long; each kind waits in its own way."""
    request = str(size).encode()
    unary, stream = channel.unary_unary("/t/make"), channel.unary_stream("/t/many")
    call = {
        "blocking": lambda: unary(request, timeout=timeout),
        "future": lambda: unary.future(request, timeout=timeout).result(),
        "stream": lambda: list(stream(request, timeout=timeout)),
    }[kind]
    with pytest.raises(grpc.RpcError) as caught:
        call()
    code: grpc.StatusCode = caught.value.code()
    return code


METHODS = {
    "/t/make": UU(lambda request, context: message(int(request))),
    "/t/many": US(lambda request, context: iter([message(int(request))])),
    "/t/echo": UU(echo),
}
KINDS = "blocking", "future", "stream"
LATE, GONE = grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE


def test_a_response_is_sent_before_all_of_it_is_copied(
    both: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A quick servicer's response too, whose frames are otherwise held back in its thread."""
    both.methods = METHODS
    call = both.serve().channel().unary_unary("/t/make")
    call(b"1")
    runner, run = runner_of(both), push.Push.run
    wait_for(lambda: call(b"1") and runner.takes("/t/make"))
    left: list[int] = []

    def looking(staging: Any, needed: Any) -> None:
        left.append(len(runner._line.outbox))
        run(staging, needed)

    monkeypatch.setattr(push.Push, "run", looking)
    assert call(str(5 * CHUNK).encode()) == message(5 * CHUNK)
    assert left == [0]


def test_a_deadline_while_the_sender_does_not_go_on(both: Ends, stalled: threading.Event) -> None:
    both.methods = METHODS
    channel = both.serve().channel()
    assert channel.unary_unary("/t/echo")(b"1") == b"1"
    assert [outcome(kind, channel, 5 * CHUNK, 0.2) for kind in KINDS] == [LATE] * 3


def test_a_deadline_while_the_sender_goes_on_slowly(
    both: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunk after chunk comes before anybody would ask whether it is still needed."""
    step = push.Push._step

    def slowly(staging: Any, most_bytes: int) -> None:
        time.sleep(0.03)
        step(staging, most_bytes)

    monkeypatch.setattr(push.Push, "_step", slowly)
    both.methods = METHODS
    channel = both.serve().channel()
    assert channel.unary_unary("/t/echo")(b"1") == b"1"
    began = time.monotonic()
    assert [outcome(kind, channel, 60 * CHUNK, 0.2) for kind in KINDS] == [LATE] * 3
    assert time.monotonic() - began < 1.5  # and not 1.8 s each
    began = time.monotonic()
    with pytest.raises(grpc.RpcError) as caught:
        channel.unary_unary("/t/echo")(message(60 * CHUNK), timeout=0.2)
    assert caught.value.code() is LATE
    assert time.monotonic() - began < 1.0
    wait_for(lambda: nothing_is_used(channel, both.server))


def test_the_sender_goes_while_its_message_is_read(both: Ends, stalled: threading.Event) -> None:
    both.methods = METHODS
    both.serve()
    for kind in KINDS:
        channel = both.channel()
        assert channel.unary_unary("/t/echo")(b"1") == b"1"
        (there,) = (each for each in both.server.attachments if not each.lost)
        closing = threading.Timer(0.2, there.close)
        closing.start()
        assert outcome(kind, channel, 5 * CHUNK, LONG_S) is GONE, kind
        closing.join()
