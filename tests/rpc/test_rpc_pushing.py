"""Messages that are pushed: written into memory of the receiver while their envelope travels."""

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from ends import Ends
from test_rpc_conformance import LONG_S, SU, UU, echo, wait_for
from test_rpc_large import between, message, nothing_is_used

from tensorwire import rpc
from tensorwire.memory import RemoteRegion
from tensorwire.rpc.payload import push
from tensorwire.rpc.payload.inbox import RefusedError
from tensorwire.rpc.payload.push import CHUNK_BYTES, Pushing
from tensorwire.testing import node_pair

UNLIMITED = [("grpc.max_receive_message_length", -1)]


@pytest.fixture
def both() -> Iterator[Ends]:
    with contextlib.closing(between("tcp", limits=rpc.Limits(threshold_bytes=1000))) as made:
        made.methods = {"/t/m": UU(echo), "/t/su": SU(lambda requests, context: b"".join(requests))}
        yield made


@pytest.fixture
def pushed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of what this process has pushed."""
    sizes: list[int] = []
    push = Pushing.push

    def counted(pushing: Any, lease: Any, sources: Any, *given: Any, **named: Any) -> Any:
        sizes.append(sum(each.nbytes for each in sources))
        return push(pushing, lease, sources, *given, **named)

    monkeypatch.setattr(Pushing, "push", counted)
    return sizes


def test_what_is_pushed(both: Ends, pushed: list[int]) -> None:
    """Messages of all sizes, both ways."""
    channel = both.serve(options=UNLIMITED).channel(options=UNLIMITED)
    call = channel.unary_unary("/t/m")
    for size in (1000, 70_000, CHUNK_BYTES, CHUNK_BYTES + 1):
        pushed.clear()
        assert call(message(size)) == call.future(message(size)).result(LONG_S) == message(size)
        assert pushed == [size] * 4
    pushed.clear()
    assert call(message(999)) == message(999)
    assert not pushed
    sent = [message(100_000)] * 5
    assert channel.stream_unary("/t/su")(iter(sent)) == b"".join(sent)
    wait_for(lambda: nothing_is_used(channel, both.server))


def test_a_servicer_does_not_begin_before_all_is_there(
    both: Ends, pushed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The envelope overtakes what it stands for."""
    size, late = 100_000, threading.Event()
    write_at = RemoteRegion.write_at
    began: list[tuple[bool, bool]] = []

    def held(region: Any, local: Any, *given: Any, **named: Any) -> Any:
        if sum(each.nbytes for each in local) != size:
            return write_at(region, local, *given, **named)

        def write() -> None:
            late.set()
            write_at(region, local, *given, **named)

        threading.Timer(0.3, write).start()
        return None

    def method(request: bytes, context: Any) -> bytes:
        began.append((late.is_set(), request == message(size)))
        return b"yes"

    both.methods["/t/late"] = UU(method)
    channel = both.serve().channel()
    wait_for(lambda: channel.unary_unary("/t/m")(message(size)) and len(pushed) >= 2)
    monkeypatch.setattr(RemoteRegion, "write_at", held)
    assert channel.unary_unary("/t/late")(message(size)) == b"yes"
    assert began == [(True, True)]


@pytest.mark.parametrize("goes_on", [False, True])
def test_who_goes_on_is_waited_for(goes_on: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long a message takes on a link that many share."""
    monkeypatch.setattr(push, "STALLED_S", 0.3)
    arrived = iter(range(1_000_000))
    with node_pair(["tcp"]) as pair:
        word = pair.near.allocate(64, name="word").word(0)
        timer = threading.Timer(1.0, lambda: pair.to_near.region("word").word(0).set(5))
        timer.start()
        news = (lambda: next(arrived)) if goes_on else (lambda: 0)
        began = time.monotonic()
        if goes_on:
            push.wait_word(word, 5, pair.to_far, lambda: True, news)
            assert word.value == 5
        else:
            with pytest.raises(RefusedError, match="has not come further"):
                push.wait_word(word, 5, pair.to_far, lambda: True, news)
            assert time.monotonic() - began < 0.9
        timer.join()


def test_a_call_that_begins_as_its_channel_is_closed(both: Ends) -> None:
    channel = both.serve().channel()
    call = channel.unary_unary("/t/m")
    assert call(b"x") == b"x"
    client, begin_call = channel.attachment.runtime, channel.attachment.begin_call

    def close_and_begin() -> Any:
        client.close(lost=False)  # and tells the calls that there are
        return begin_call()

    channel.attachment.begin_call = close_and_begin
    future = call.future(b"y")
    assert future.code() is grpc.StatusCode.CANCELLED
    assert future.details() == "Channel closed!"
