"""The protocol of a client's call, without threads, event loops and a line."""

import threading
from typing import Any

import grpc
import pytest

from tensorwire.rpc.runtime import frames
from tensorwire.rpc.runtime.engine import CallState, StreamState
from tensorwire.rpc.runtime.flow import WINDOW_BYTES, Outflow
from tensorwire.rpc.runtime.frames import END, MESSAGE, MORE, REFUSED, WHOLE, Frame, FrameError
from tensorwire.rpc.runtime.options import MessageLimits

NUMBER = 3, 1
CANCELLED = frames.short_frame(frames.CANCEL, NUMBER)


class Client:
    """Keeps what its calls send."""

    def __init__(self, most_bytes: int = -1) -> None:
        self.limits = MessageLimits(-1, most_bytes)
        self.mutex = threading.RLock()
        self.call_back: Any = None
        self.sent: list[bytes] = []
        self.forgotten: list[object] = []

    def send(self, sent: Any) -> None:
        self.sent += sent

    def forget(self, call: object) -> None:
        self.forgotten.append(call)

    def keep(self, call: object) -> None:
        """Keeps no call."""

    def unkeep(self, call: object) -> None:
        """Keeps no call."""


class Call(CallState):
    def _make_soon(self, body: Any, *, large: bool) -> None:
        self._make(body)


class Stream(StreamState, Call):
    """Its responses are taken by the test."""


def begun(kind: type[CallState], client: Client, **given: Any) -> tuple[Any, list[Any]]:
    ended: list[Any] = []
    call = kind(
        client,
        NUMBER,
        None,
        lambda data, _: data.upper(),
        lambda _, code: ended.append(code),
        **given,
    )
    return call, ended


def end(code: grpc.StatusCode = grpc.StatusCode.OK, piece: bytes | None = None) -> Frame:
    (data,) = frames.end_frames(NUMBER, code.value[0], b"why", (), (), piece)
    return Frame(END, 0 if piece is None else WHOLE, NUMBER, data[frames.HEADER.size :])


def piece(data: bytes, flags: int = WHOLE) -> Frame:
    return Frame(MESSAGE, flags, NUMBER, data)


def test_an_answer_ends_a_call_once() -> None:
    client = Client()
    call, ended = begun(Call, client)
    call.message(piece(b"a", MORE))
    call.message(piece(b"b"))
    assert not call.done()
    call.answered(end())
    assert (call._ending.response, ended) == (b"AB", [grpc.StatusCode.OK])
    assert client.forgotten == [call]
    assert not call.cancel()
    assert client.sent == []


@pytest.mark.parametrize("kind", [Call, Stream])
def test_a_cancelled_call_tells_the_server(kind: type[CallState]) -> None:
    client = Client()
    call, ended = begun(kind, client)
    assert call.cancel()
    assert call.finished
    assert client.sent == [CANCELLED]
    call.answered(end(piece=b"late"))
    assert ended == [grpc.StatusCode.CANCELLED]


def test_a_response_that_is_too_long_ends_the_call() -> None:
    client = Client(most_bytes=3)
    call, ended = begun(Call, client)
    call.message(piece(b"ab", MORE))
    call.message(piece(b"cd", MORE))
    assert ended == [grpc.StatusCode.RESOURCE_EXHAUSTED]
    assert call._ending.details == "CLIENT: Received message larger than max (4 vs. 3)"
    assert client.sent == [CANCELLED]


def test_a_call_that_is_refused_has_not_ended() -> None:
    call, ended = begun(Call, Client())
    call.answered(Frame(END, REFUSED, NUMBER, b""))
    assert (call.finished, call.done(), ended) == (True, False, [None])
    call, ended = begun(Call, Client(), outflow=Outflow())
    call.answered(Frame(END, REFUSED, NUMBER, end().body))
    assert ended == [grpc.StatusCode.UNAVAILABLE]


def test_a_stream_ends_when_its_responses_are_taken() -> None:
    client = Client()
    call, ended = begun(Stream, client)
    call.message(piece(b"a"))
    call.answered(end(grpc.StatusCode.ABORTED))
    assert not call.done()
    assert call._inflow.take() == b"a"
    assert not call.done()
    assert call._settle(b"A")
    assert ended == [grpc.StatusCode.ABORTED]
    assert client.sent == []


def test_what_is_taken_of_a_stream_opens_its_window() -> None:
    client = Client()
    call, _ = begun(Stream, client)
    for _ in range(2):
        call.message(piece(bytes(WINDOW_BYTES // 2)))
    with pytest.raises(FrameError):
        call.message(piece(b"more than there was credit for"))
    call._inflow.take()
    call._settle(b"")
    (credit,) = client.sent
    assert frames.parse_credit(credit[frames.HEADER.size :]) >= WINDOW_BYTES // 2


def test_frames_that_make_no_sense_are_refused() -> None:
    call, _ = begun(Call, Client())
    with pytest.raises(FrameError):
        call.message(piece(b"", 77))
    call.cancel()
