"""Streams by the runtime: what bounds them, and what becomes of them when an end misbehaves."""

import struct
import threading
import time
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from ends import ALONE, Ends, System
from test_rpc_conformance import BIG, LONG_S, SS, SU, US, UU, wait_for
from test_rpc_runtime import WIRES, frame, way

from tensorwire import rpc
from tensorwire.rpc.runtime import flow, frames


@pytest.fixture(params=WIRES)
def both(request: pytest.FixtureRequest) -> Iterator[Ends]:
    made = Ends(System(request.param, WIRES[request.param], WIRES[request.param]))
    yield made
    made.close()


PLAIN = {"limits": rpc.Limits(threshold_bytes=1 << 30)}


def hang(requests: Any, context: Any) -> Iterator[bytes]:
    yield b"1"
    while context.is_active():
        time.sleep(0.01)


def test_memory_of_a_slow_reader_is_bounded(both: Ends) -> None:
    """A servicer's responses lie at the client up to the window, and one piece."""
    both.system.our_channel = {**WIRES[both.system.name], **PLAIN}
    both.system.our_server = {**WIRES[both.system.name], **PLAIN}
    size, made = 10_000, []

    def endless(request: bytes, context: Any) -> Iterator[bytes]:
        for _ in range(1000):
            made.append(size)
            yield bytes(size)

    both.methods = {"/t/us": US(endless)}
    call = both.serve().channel().unary_stream("/t/us")(b"")
    assert next(call) == bytes(size)
    before = 0
    while before != len(made):
        before = len(made)
        time.sleep(0.3)
    assert sum(made) <= 2 * flow.WINDOW_BYTES
    held = sum(sum(map(len, pieces)) for pieces, _ in call._inflow._messages)
    assert 0 < held <= flow.WINDOW_BYTES + size
    assert sum(len(each) for each in call) == 999 * size


def test_responses_that_several_threads_call_back_are_whole(both: Ends) -> None:
    """In grpcio such a response fails; here one leaves after the other."""
    both.system.our_channel = {**WIRES[both.system.name], **PLAIN}
    both.system.our_server = {**WIRES[both.system.name], **PLAIN}
    messages = [bytes([65 + i]) * size for i, size in enumerate([1_000_000, 10, 2_000_000, 10])]

    def answer(request: bytes, context: Any, respond: Any) -> None:
        def work() -> None:
            threads = [threading.Thread(target=respond, args=(each,)) for each in messages]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            respond(None)

        threading.Thread(target=work).start()

    answer.experimental_non_blocking = True  # type: ignore[attr-defined]
    both.methods = {"/t/us": US(answer)}
    got = []
    for each in both.serve().channel().unary_stream("/t/us")(b""):
        got.append(each)
        time.sleep(0.05)  # so that the window is used up
    assert sorted(got) == sorted(messages)


def test_a_message_that_is_longer_than_the_window(both: Ends) -> None:
    both.system.our_channel = {**WIRES[both.system.name], **PLAIN}
    both.system.our_server = {**WIRES[both.system.name], **PLAIN}
    both.methods = {"/t/ss": SS(lambda requests, context: requests)}
    channel = both.serve().channel()
    long = BIG * 8
    for _ in range(2):
        got = channel.stream_stream("/t/ss")(iter([b"a", long, b"", long, b"b"]))
        assert next(got) == b"a"
        time.sleep(0.05)  # so that what follows has to wait for this reader
        assert list(got) == [long, b"", long, b"b"]


def test_streams_leave_nothing_behind(both: Ends) -> None:
    both.methods = {"/t/ss": SS(lambda requests, context: requests), "/t/hang": US(hang)}
    channel = both.serve().channel()
    call, never = channel.stream_stream("/t/ss"), channel.unary_stream("/t/hang")
    assert list(call(iter([BIG]))) == [BIG]
    end = next(iter(both.server._service._ends))
    client = channel.attachment.runtime
    for number in range(60):
        assert list(call(iter([b"a", BIG]), timeout=60)) == [b"a", BIG]
        if number % 10 == 0:
            with pytest.raises(grpc.RpcError):
                list(never(b"", timeout=0.05))
            next(never(b""))  # and forgotten
    wait_for(lambda: end.active == 0 and both.server._service._running == 0)
    wait_for(lambda: not client._calls and not client._kept)
    assert len(channel.attachment._idle_calls) == 1024
    names = [each.name for each in threading.enumerate()]
    assert names.count("tensorwire-rpc-work") < 8


def test_threads_that_send_requests_end(both: Ends) -> None:
    both.methods = {"/t/ss": SS(lambda requests, context: requests)}
    channel = both.serve().channel()
    assert list(channel.stream_stream("/t/ss")(iter([b"a"]))) == [b"a"]
    wait_for(lambda: "tensorwire-rpc-work" not in [each.name for each in threading.enumerate()])


def test_a_stream_that_begins_as_the_server_stops(both: Ends) -> None:
    both.methods = {"/t/way": UU(way), "/t/us": US(hang)}
    channel = both.serve().channel()
    assert channel.unary_unary("/t/way")(b"") == b"runtime"
    both.server._service._stopping = True  # and the client has not heard of it
    with pytest.raises(grpc.RpcError) as caught:
        next(channel.unary_stream("/t/us")(b""))
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert caught.value.details() == "the server is stopping"


def credit(size: int) -> bytes:
    return frame(frames.CREDIT, body=struct.pack("<Q", size))


PIECE = frame(frames.MESSAGE, frames.WHOLE, body=bytes(frames.PIECE_BYTES))
TO_SERVER = {
    "more than the window": [PIECE] * (flow.WINDOW_BYTES // frames.PIECE_BYTES + 2),
    "a request behind the last one": [frame(frames.MESSAGE, frames.LAST), PIECE],
    "an end in the middle of a message": [
        frame(frames.MESSAGE, frames.MORE, body=b"x"),
        frame(frames.MESSAGE, frames.LAST),
    ],
    "a piece without a flag": [frame(frames.MESSAGE, 0, body=b"x")],
    "a credit for nothing": [credit(1 << 20)],
    "a credit that is none": [frame(frames.CREDIT, body=b"xx")],
    "a head": [frames.head_frame((7, 1), ())],
}
BEGIN = frames.call_frames((7, 1), b"/t/stream", frames.NO_DEADLINE, (), None, streams=True)


@pytest.mark.parametrize("what", TO_SERVER)
def test_a_client_that_sends_what_cannot_be(both: Ends, what: str) -> None:
    """Its attachment is closed, with its streams; others notice nothing."""
    begun, seen = threading.Event(), []

    def stream(requests: Any, context: Any) -> Iterator[bytes]:
        yield b"1"
        context.add_callback(lambda: seen.append("over"))
        begun.set()
        while context.is_active():
            time.sleep(0.01)

    both.methods = {"/t/way": UU(way), "/t/stream": SS(stream)}
    both.serve()
    good, bad = both.channel(), both.channel(options=[ALONE])
    assert good.unary_unary("/t/way")(b"") == bad.unary_unary("/t/way")(b"") == b"runtime"
    attachment = bad.attachment
    attachment.runtime.line.send((*BEGIN,))
    assert begun.wait(LONG_S)
    attachment.runtime.line.send(TO_SERVER[what])
    wait_for(lambda: attachment.lost)
    wait_for(lambda: seen == ["over"])
    assert good.unary_unary("/t/way")(b"") == b"runtime"


@pytest.mark.parametrize("what", ["a piece", "no message"])
def test_a_call_that_begins_as_it_cannot(both: Ends, what: str) -> None:
    both.methods = {"/t/way": UU(way)}
    channel = both.serve().channel()
    assert channel.unary_unary("/t/way")(b"") == b"runtime"
    attachment = channel.attachment
    head = struct.pack("<QHH", frames.NO_DEADLINE, 6, 0) + b"/t/way"
    if what == "a piece":
        attachment.runtime.line.send((frame(frames.CALL, 0, body=head + b"x"),))
    else:
        attachment.runtime.line.send((frame(frames.CALL, frames.LAST, body=head),))
    wait_for(lambda: attachment.lost)


TO_CLIENT = {
    "more than the window": [PIECE] * (flow.WINDOW_BYTES // frames.PIECE_BYTES + 2),
    "a piece without a flag": [frame(frames.MESSAGE, 0, body=b"x")],
    "the last of requests": [frame(frames.MESSAGE, frames.LAST)],
    "a credit for nothing": [credit(1 << 20)],
}


@pytest.mark.parametrize("what", TO_CLIENT)
def test_a_server_that_sends_what_cannot_be(both: Ends, what: str) -> None:
    both.methods = {"/t/way": UU(way), "/t/hang": SS(hang)}
    channel = both.serve().channel()
    assert channel.unary_unary("/t/way")(b"") == b"runtime"
    call = channel.stream_stream("/t/hang")(iter([]))
    assert next(call) == b"1"
    for data in TO_CLIENT[what]:
        about = bytearray(data)
        about[8:16] = struct.pack("<II", *call.number)
        next(iter(both.server._service._ends)).line.send((bytes(about),))
    assert call.code() is grpc.StatusCode.UNAVAILABLE
    assert "broke the protocol" in call.details()
    assert channel.unary_unary("/t/way")(b"", wait_for_ready=True) in (b"runtime", b"grpcio")


def test_a_client_that_takes_one_response_of_many(both: Ends) -> None:
    """A servicer that streams to a client that takes one is not held up by it, as in grpcio."""

    def many(requests: Any, context: Any) -> Iterator[bytes]:
        for number in range(20):
            yield bytes([number]) * 40_000

    both.methods = {"/t/ss": SS(many), "/t/su": SU(lambda requests, context: b"")}
    channel, begun = both.serve().channel(), time.monotonic()
    assert channel.stream_unary("/t/ss")(iter([b"x"])) == bytes(40_000)
    # It may be waited for memory that the client does not give back, but not by each response.
    assert time.monotonic() - begun < 5
