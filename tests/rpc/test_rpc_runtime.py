"""The runtime: which calls it carries, and what becomes of them when an end misbehaves."""

import gc
import os
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import numpy as np
import pytest
import rpc_serving
from ends import (
    ALONE,
    RUNTIME_SHM,
    RUNTIME_TCP,
    Ends,
    Methods,
    System,
    attached_channel,
    stop_process,
)
from test_death import SCRIPT, TYPES
from test_rpc_conformance import BIG, LONG_S, SS, SU, US, UU, echo, echo_all, wait_for

from tensorwire import Node, rpc
from tensorwire.rpc.attach import memory, negotiation, registry
from tensorwire.rpc.payload import tensors
from tensorwire.rpc.payload.attachment import LAST_GENERATION
from tensorwire.rpc.payload.threads import Callbacks, Deadlines
from tensorwire.rpc.runtime import client as runtime_client
from tensorwire.rpc.runtime import frames, ring
from tensorwire.rpc.runtime.behavior import Performance
from tensorwire.rpc.runtime.server import ServerEnd

WIRES = {"shm": RUNTIME_SHM, "tcp": RUNTIME_TCP}


@pytest.fixture(params=WIRES)
def wire(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def both(wire: str) -> Iterator[Ends]:
    made = Ends(System(wire, WIRES[wire], WIRES[wire]))
    yield made
    made.close()


def way(request: Any, context: Any) -> bytes:
    """A servicer that says how its call has come."""
    return b"runtime" if isinstance(context, Performance) else b"grpcio"


def test_which_calls_go_by_it(both: Ends) -> None:
    both.methods = {
        "/t/way": UU(way),
        "/t/us": US(lambda request, context: iter([way(None, context)])),
        "/t/su": SU(lambda requests, context: b"".join(requests) + way(None, context)),
        "/t/ss": SS(lambda requests, context: (each + way(None, context) for each in requests)),
    }
    channel = both.serve().channel()
    call = channel.unary_unary("/t/way")
    assert call(b"") == b"runtime"
    assert channel.runtime == channel.payload == both.system.name
    assert call.with_call(b"")[0] == call.future(b"").result(LONG_S) == b"runtime"
    assert call(BIG, timeout=20, metadata=(("a", "b"),), wait_for_ready=True) == b"runtime"
    assert call(b"", compression=grpc.Compression.Gzip) == b"grpcio"
    assert list(channel.unary_stream("/t/us")(b"")) == [b"runtime"]
    back, stream = channel.stream_unary("/t/su"), channel.stream_stream("/t/ss")
    assert back(iter([b"a", b"b"])) == back.with_call(iter([b"ab"]))[0] == b"abruntime"
    assert back.future(iter([b"ab"]), timeout=20).result(LONG_S) == b"abruntime"
    assert list(stream(iter([BIG, b"a"]))) == [BIG + b"runtime", b"aruntime"]
    plain = {"compression": grpc.Compression.Gzip}
    assert list(channel.unary_stream("/t/us")(b"", **plain)) == [b"grpcio"]
    assert back(iter([b"a"]), **plain) == b"agrpcio"
    assert list(stream(iter([b"a"]), **plain)) == [b"agrpcio"]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"runtime": False}, "it was not asked for"),
        ({"compression": grpc.Compression.Gzip}, "messages are to be compressed"),
        ({"options": [("grpc.service_config", "{}")]}, "the option grpc.service_config"),
    ],
)
@pytest.mark.parametrize("side", ["channel", "server"])
def test_ends_that_stay_with_grpcio(side: str, options: dict[str, Any], reason: str) -> None:
    ends = Ends(System("shm", RUNTIME_SHM, RUNTIME_SHM), {"/t/way": UU(way)})
    server = {**RUNTIME_SHM, **(options if side == "server" else {})}
    ends.system = System("shm", {**RUNTIME_SHM, **(options if side == "channel" else {})}, server)
    channel = ends.serve().channel()
    assert channel.unary_unary("/t/way")(b"") == b"grpcio"
    assert channel.payload == "shm"
    said = reason if side == "channel" else "the server does not offer the runtime"
    assert channel.runtime.startswith("grpcio: ")
    assert said in channel.runtime
    told = ends.server.runtime
    if side == "server":
        assert told.startswith("grpcio: ")
        assert reason in told
    else:
        assert told == "offered"
    ends.close()


def test_what_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENSORWIRE_RPC", "runtime")
    ends = Ends(System("shm", {}, {}), {"/t/way": UU(way)})
    assert ends.serve().channel().unary_unary("/t/way")(b"") == b"runtime"
    ends.close()
    monkeypatch.setenv("TENSORWIRE_RPC", "fast")
    with pytest.raises(ValueError, match="not 'fast'"):
        attached_channel("localhost:1")


def test_a_unary_call_of_a_method_that_streams_is_made_by_grpcio(both: Ends) -> None:
    """The server refuses such a call, so grpcio carries it out; futures are then its own."""
    both.methods = {"/t/us": US(lambda request, context: iter([request])), "/t/way": UU(way)}
    channel = both.serve().channel()
    assert channel.unary_unary("/t/way")(b"") == b"runtime"
    call = channel.unary_unary("/t/us")
    future = call.future(b"x")
    called = threading.Event()
    future.add_done_callback(lambda each: called.set())
    assert future.result(LONG_S) == call(b"x") == call.with_call(b"x")[0] == b"x"
    assert called.wait(LONG_S)
    assert (future.code(), future.details()) == (grpc.StatusCode.OK, "")


def test_context_of_the_servicer(both: Ends) -> None:
    """The context tells a servicer the same of its call as grpcio's."""
    seen: list[Any] = []

    def method(request: bytes, context: Any) -> bytes:
        assert context.code() is None
        assert context.trailing_metadata() is None
        seen.append(
            (
                context.peer().rpartition(":")[0],
                context.peer_identities(),
                context.peer_identity_key(),
                dict(context.auth_context()),
                sorted(map(tuple, context.invocation_metadata())),
                context.time_remaining() > 1e8,
            )
        )
        context.set_compression(grpc.Compression.Gzip)
        context.disable_next_message_compression()
        return way(request, context)

    both.methods = {"/t/m": UU(method)}
    call = both.serve().channel().unary_unary("/t/m")
    assert call(b"", metadata=(("a", "b"),)) == b"runtime"
    again = call(b"", metadata=(("a", "b"),), compression=grpc.Compression.NoCompression)
    assert again == b"grpcio"
    ours, theirs = seen
    theirs[4][:] = [each for each in theirs[4] if not each[0].startswith(("tensorwire", "grpc-"))]
    assert ours == theirs


def test_limits_of_messages(wire: str) -> None:
    limit = [("grpc.max_receive_message_length", 100_000)]
    ours = {"transports": (wire,), "limits": rpc.Limits(threshold_bytes=1 << 30), "runtime": True}
    outcomes = []
    for options in (None, ours):
        ends = Ends(System(wire, options, options))
        ends.methods = {"/t/m": UU(echo), "/t/big": UU(lambda request, context: bytes(100_001))}
        ends.serve(options=limit)
        channel = ends.channel(options=limit)
        assert len(channel.unary_unary("/t/m")(bytes(100_000))) == 100_000
        for method, request in (("/t/m", bytes(100_001)), ("/t/big", b"x")):
            with pytest.raises(grpc.RpcError) as caught:
                channel.unary_unary(method)(request)
            outcomes.append((method, caught.value.code()))
            assert "larger than max" in caught.value.details()
        short = ends.channel(options=[("grpc.max_send_message_length", 10)])
        with pytest.raises(grpc.RpcError) as caught:
            short.unary_unary("/t/m")(bytes(11))
        outcomes.append(("sent", caught.value.code(), caught.value.details()))
        ends.close()
    assert outcomes[:3] == outcomes[3:]


@pytest.mark.parametrize(
    ("trailing", "details", "code", "said"),
    [
        ((("Upper", "x"),), "", grpc.StatusCode.INTERNAL, "not valid"),
        ((("a", "x" * 17_000),), "", grpc.StatusCode.RESOURCE_EXHAUSTED, "value length 17000 vs."),
        ((), "x" * 17_000, grpc.StatusCode.RESOURCE_EXHAUSTED, "value length 17000 vs. 16384"),
    ],
)
def test_an_end_that_cannot_be_sent(
    both: Ends, trailing: Any, details: str, code: grpc.StatusCode, said: str
) -> None:
    """The client learns the fault in the servicer's status."""

    def method(request: bytes, context: Any) -> bytes:
        context.set_trailing_metadata(trailing)
        if details:  # OK has no details
            context.set_code(grpc.StatusCode.ABORTED)
            context.set_details(details)
        return b"x"

    both.methods = {"/t/m": UU(method), "/t/way": UU(way)}
    channel = both.serve().channel()
    with pytest.raises(grpc.RpcError) as caught:
        channel.unary_unary("/t/m")(b"")
    assert caught.value.code() is code
    assert said in caught.value.details()
    assert channel.unary_unary("/t/way")(b"") == b"runtime"


def test_a_callback_may_wait_for_other_calls(both: Ends) -> None:
    both.methods = {"/t/m": UU(echo)}
    call = both.serve().channel().unary_unary("/t/m")
    got: list[bytes] = []
    future = call.future(b"1")
    future.add_done_callback(lambda each: got.append(each.result() + call(b"2")))
    assert call(b"3") == b"3"
    wait_for(lambda: got == [b"12"])


def test_threads_and_futures_at_a_time(both: Ends) -> None:
    """Every answer reaches its own call, in any thread that reads."""
    both.methods = {"/t/m": UU(echo)}
    call = both.serve().channel().unary_unary("/t/m")

    def work(number: int) -> bool:
        for turn in range(60):
            message = struct.pack("<II", number, turn) * (1 if turn % 10 else 20_000)
            futures = [call.future(message + bytes([i])) for i in range(turn % 4)]
            if call(message, timeout=LONG_S) != message:
                return False
            if [each.result(LONG_S) for each in futures] != [
                message + bytes([i]) for i in range(turn % 4)
            ]:
                return False
        return True

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(8)))


def test_deadlines_of_threads_that_wait_for_each_other(both: Ends) -> None:
    """A thread that gives up hands its turn to read to a thread that waits."""

    def slow(request: bytes, context: Any) -> bytes:
        time.sleep(request[0] / 2000)
        return request

    both.methods = {"/t/m": UU(slow)}
    call = both.serve(workers=12).channel().unary_unary("/t/m")
    call(bytes([0]))

    def work(number: int) -> int:
        late = 0
        for turn in range(60):
            try:
                hurried = (number + turn) % 2
                call(bytes([turn % 9]), timeout=0.002 if hurried else LONG_S)
            except grpc.RpcError as error:
                late += 1 if hurried and error.code() is grpc.StatusCode.DEADLINE_EXCEEDED else 1000
        return late

    with ThreadPoolExecutor(8) as pool:
        assert 0 < sum(pool.map(work, range(8))) < 1000


def test_many_large_messages_wait_for_room(wire: str) -> None:
    """More than fits into the ring, both ways at a time."""
    ours = {"transports": (wire,), "limits": rpc.Limits(threshold_bytes=1 << 30), "runtime": True}
    ends = Ends(System(wire, ours, ours), {"/t/m": UU(echo)})
    call = ends.serve().channel().unary_unary("/t/m")
    messages = [bytes([number]) * 3_000_000 for number in range(6)]
    futures = [call.future(each) for each in messages]
    assert [each.result(LONG_S) for each in futures] == messages
    ends.close()


def test_an_interrupt_ends_the_call(both: Ends) -> None:
    ended = threading.Event()

    def method(request: bytes, context: Any) -> bytes:
        context.add_callback(ended.set)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        ended.wait(LONG_S)
        return request

    both.methods = {"/t/m": UU(method), "/t/way": UU(way)}
    channel = both.serve().channel()
    with pytest.raises(KeyboardInterrupt):
        channel.unary_unary("/t/m")(b"x")
    assert ended.wait(LONG_S)
    assert channel.unary_unary("/t/way")(b"") == b"runtime"


def test_calls_leave_nothing_behind(both: Ends) -> None:
    both.methods = {"/t/m": UU(echo), "/t/fail": UU(lambda request, context: 1 / 0)}
    channel = both.serve().channel()
    call, fail = channel.unary_unary("/t/m"), channel.unary_unary("/t/fail")
    call(BIG)
    end = next(iter(both.server._service._ends))
    client = channel.attachment.runtime
    threads, files = threading.active_count(), len(os.listdir("/proc/self/fd"))
    for number in range(300):
        call(b"x", timeout=60)
        call.future(BIG if number % 50 == 0 else b"x", timeout=60).result(LONG_S)
        if number % 50 == 0:
            assert fail.future(b"x").code() is grpc.StatusCode.UNKNOWN
            call.future(b"x").cancel()
    wait_for(lambda: end.active == 0 and both.server._service._running == 0)
    # Who waits for a call goes on before the thread that has read its end has put all away.
    wait_for(lambda: not client._calls and not client._kept)
    wait_for(lambda: threading.active_count() <= threads + 12)  # of pools, callbacks, deadlines
    wait_for(lambda: len(os.listdir("/proc/self/fd")) <= files + 2)
    wait_for(lambda: len(channel.attachment._idle_calls) == 1024)


def is_next(attachment: Any, slot: int) -> None:
    """Lets the next call have a slot that is idle."""
    attachment._idle_calls.remove(slot)
    attachment._idle_calls.appendleft(slot)


def test_a_slot_that_is_used_again_before_its_first_call_goes_on_by_grpcio(both: Ends) -> None:
    """A refused future gives its number back, and its later fate touches no other call."""
    held, hold, release = threading.Event(), threading.Event(), threading.Event()

    def slow(request: bytes, context: Any) -> bytes:
        time.sleep(0.1)  # until its callback is there
        return request

    def wait(future: Any) -> None:  # futures go on after it
        held.set()
        hold.wait(LONG_S)

    both.methods = {
        "/t/slow": UU(slow),
        "/t/us": US(lambda request, context: iter([request])),
        "/t/hang": UU(lambda request, context: bytes(release.wait(LONG_S))),
    }
    channel = both.serve().channel()
    first = channel.unary_unary("/t/slow").future(b"")
    first.add_done_callback(wait)
    assert held.wait(LONG_S)
    refused = channel.unary_unary("/t/us").future(b"x")
    wait_for(lambda: refused.number[0] in channel.attachment._idle_calls)
    is_next(channel.attachment, refused.number[0])
    other = channel.unary_unary("/t/hang").future(b"")
    assert other.number[0] == refused.number[0]
    hold.set()
    assert refused.result(LONG_S) == b"x"
    release.set()
    assert other.result(LONG_S) == b"\0"


@pytest.mark.parametrize("carried", [True, False])
def test_a_slot_is_given_up_after_its_last_number(both: Ends, carried: bool) -> None:
    """A number that does not fit into its 4 bytes is never taken, whatever the call goes by."""
    both.methods = {"/t/way": UU(way)}
    channel = both.serve().channel()
    call = channel.unary_unary("/t/way")
    other = {} if carried else {"compression": grpc.Compression.NoCompression}
    assert call(b"") == b"runtime"
    attachment = channel.attachment
    attachment._generations[7:9] = [LAST_GENERATION - 2, LAST_GENERATION - 1]
    attachment._idle_calls.clear()
    attachment._idle_calls.extend([7, 8])
    name = b"runtime" if carried else b"grpcio"
    assert [call(b"", **other) for _ in range(3)] == [name] * 3  # of slots 7, 8 and 7
    assert list(attachment._idle_calls) == []
    assert [call(b"", **other), call(b"")] == [b"grpcio"] * 2
    assert call.future(b"").result(LONG_S) == b"grpcio"


def test_a_slot_that_is_used_again_as_its_call_ends(
    both: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client gives up a call that the server is ending, and makes the next one."""
    forget, ending = ServerEnd.forget, threading.Event()

    def slowly(end: ServerEnd, call: Any) -> None:
        if call.method == "/t/end":
            ending.set()
            time.sleep(0.3)
        forget(end, call)

    both.methods = {"/t/way": UU(way), "/t/end": UU(echo)}
    channel = both.serve().channel()
    assert channel.unary_unary("/t/way")(b"") == b"runtime"
    monkeypatch.setattr(ServerEnd, "forget", slowly)
    given_up = channel.unary_unary("/t/end").future(b"")
    assert ending.wait(LONG_S)
    assert given_up.cancel()
    is_next(channel.attachment, given_up.number[0])
    following = channel.unary_unary("/t/way").future(b"")
    assert following.number[0] == given_up.number[0]
    assert following.result(LONG_S) == b"runtime"


def test_a_call_in_the_place_of_one_that_was_given_up(both: Ends) -> None:
    """A CANCEL, or a CALL, may arrive after the next call of its slot has begun."""
    release = threading.Event()

    def hang(request: bytes, context: Any) -> bytes:
        release.wait(LONG_S)
        return b""

    both.methods = {"/t/way": UU(way), "/t/hang": UU(hang)}
    channel = both.serve().channel()
    assert channel.unary_unary("/t/way")(b"") == b"runtime"
    end = next(iter(both.server._service._ends))
    line = channel.attachment.runtime.line
    for generation in (7, 8, 6):
        call = frames.call_frames((0, generation), b"/t/hang", frames.NO_DEADLINE, (), b"")
        line.send(call)
    line.send((frames.short_frame(frames.CANCEL, (0, 7)),))
    assert channel.unary_unary("/t/way")(b"") == b"runtime"
    assert end._calls[0].number == (0, 8)
    line.send((frames.short_frame(frames.CANCEL, (0, 8)),))
    assert channel.unary_unary("/t/way")(b"") == b"runtime"
    assert 0 not in end._calls
    release.set()


@pytest.mark.parametrize("size", [0, 100_000], ids=["small", "large"])
def test_an_interrupt_among_the_frames_of_others_ends_their_calls(both: Ends, size: int) -> None:
    """Calls whose answers were lost with the thread that had read them do not wait for ever.

    A large response is not made where frames of others are read, and they go on.
    """
    running, release = threading.Event(), threading.Event()

    def hang(request: bytes, context: Any) -> bytes:
        running.set()
        release.wait(LONG_S)
        return b""

    def interrupted(data: bytes) -> bytes:
        raise KeyboardInterrupt

    both.methods = {"/t/way": UU(way), "/t/hang": UU(hang), "/t/make": UU(lambda r, c: bytes(size))}
    channel = both.serve().channel()
    assert channel.unary_unary("/t/way")(b"") == b"runtime"
    other = channel.unary_unary("/t/hang").future(b"")
    assert running.wait(LONG_S)
    reader = channel.attachment.runtime.reader
    reader.unwatch()  # so that this thread reads
    wait_for(lambda: not reader._turn)
    with pytest.raises(KeyboardInterrupt):
        channel.unary_unary("/t/make", response_deserializer=interrupted)(b"")
    reader.watch()
    if size:
        release.set()
        assert other.result(LONG_S) == b""
        return
    assert other.code() is grpc.StatusCode.UNAVAILABLE
    assert "interrupted" in other.details()
    release.set()
    wait_for(lambda: channel.unary_unary("/t/way")(b"", wait_for_ready=True) == b"runtime")


@pytest.mark.parametrize("runtime", [False, True])
def test_futures_of_a_channel_that_is_closed(runtime: bool) -> None:
    release = threading.Event()
    options = RUNTIME_SHM if runtime else {}
    ends = Ends(
        System("shm", options, options),
        {"/t/way": UU(way), "/t/hang": UU(lambda request, context: bytes(release.wait(LONG_S)))},
    )
    channel = ends.serve().channel()
    assert channel.unary_unary("/t/way")(b"") == (b"runtime" if runtime else b"grpcio")
    future = channel.unary_unary("/t/hang").future(b"")
    channel.close()
    with pytest.raises(grpc.RpcError) as caught:
        future.result(LONG_S)
    assert caught.value.code() is grpc.StatusCode.CANCELLED
    assert future.details() == "Channel closed!"
    assert not future.cancelled()
    release.set()
    ends.close()


def test_a_deadline_beyond_what_locks_wait_for() -> None:
    """A peer may name any; those of others pass all the same."""
    deadlines, passed = Deadlines(), threading.Event()
    far = deadlines.add(time.monotonic() + frames.NO_DEADLINE / 1e6, passed.set)
    time.sleep(0.05)  # the thread waits for it
    assert far.action is not None
    deadlines.add(time.monotonic() + 0.05, passed.set)
    assert passed.wait(LONG_S)


# What cannot be


def frame(kind: int, flags: int = 0, slot: int = 7, body: bytes = b"", zero: int = 0) -> bytes:
    size = frames.HEADER.size + len(body)
    return frames.HEADER.pack(size, kind, flags, zero, slot, 1) + body


(CALL,) = frames.call_frames((7, 1), b"/t/hang", frames.NO_DEADLINE, (), b"x")
TO_SERVER = {
    "no frame": b"x" * 40,
    "cut off": CALL[:-1],
    "an unknown kind": frame(9),
    "an unknown flag": frame(frames.CALL, 64),
    "a slot that there is not": frames.call_frames((1024, 1), b"/t/way", 0, (), b"")[0],
    "a slot twice": CALL + CALL,
    "a request twice": CALL + frame(frames.MESSAGE, frames.WHOLE),
    "a body that is none": frame(frames.CALL, frames.WHOLE),
    "metadata with a bad key": frame(
        frames.CALL,
        frames.WHOLE,
        body=struct.pack("<QHH", 1, 1, 1) + b"m" + struct.pack("<HI", 1, 1) + b"A1",
    ),
    "an end": frames.end_frames((7, 1), 0)[0],
}


def hold_a_call(both: Ends) -> tuple[Any, Any, Any, threading.Event]:
    """Two channels by the runtime, a call of the second that hangs, and what lets it end."""
    release = threading.Event()
    both.methods = {
        "/t/way": UU(way),
        "/t/hang": UU(lambda request, context: bytes(release.wait(LONG_S))),
    }
    both.serve()
    good, bad = both.channel(), both.channel(options=[ALONE])
    assert good.unary_unary("/t/way")(b"") == bad.unary_unary("/t/way")(b"") == b"runtime"
    return good, bad, bad.unary_unary("/t/hang").future(b""), release


@pytest.mark.parametrize("what", TO_SERVER)
def test_a_client_that_sends_what_cannot_be(both: Ends, what: str) -> None:
    """Its attachment is closed; the others notice nothing."""
    good, bad, running, release = hold_a_call(both)
    attachment = bad.attachment
    attachment.runtime.line.send((TO_SERVER[what],))
    assert running.code() is grpc.StatusCode.UNAVAILABLE
    wait_for(lambda: attachment.lost)
    assert good.unary_unary("/t/way")(b"") == b"runtime"
    assert bad.unary_unary("/t/way")(b"", wait_for_ready=True) in (b"runtime", b"grpcio")
    release.set()


TO_CLIENT = {
    "no frame": b"x" * 40,
    "a call": CALL,
    "a head that is none": frame(frames.HEAD, body=b"xx"),
    "an end that is none": frame(frames.END, body=b"xx"),
}


@pytest.mark.parametrize("what", TO_CLIENT)
def test_a_server_that_sends_what_cannot_be(
    both: Ends, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its calls end with UNAVAILABLE, and the next one goes on by another attachment."""
    close = Node.close

    def slowly(node: Node) -> None:
        time.sleep(0.1)
        close(node)

    running, release = threading.Event(), threading.Event()

    def hang(request: bytes, context: Any) -> bytes:
        running.set()
        release.wait(LONG_S)
        return b""

    both.methods = {"/t/way": UU(way), "/t/hang": UU(hang)}
    channel = both.serve().channel()
    assert channel.unary_unary("/t/way")(b"") == b"runtime"
    call = channel.unary_unary("/t/hang").future(b"")
    assert running.wait(LONG_S)
    data = bytearray(TO_CLIENT[what])
    if what != "no frame":  # about the call that is under way
        data[8:16] = struct.pack("<II", *call.number)
    monkeypatch.setattr(Node, "close", slowly)
    next(iter(both.server._service._ends)).line.send((bytes(data),))
    assert call.code() is grpc.StatusCode.UNAVAILABLE
    assert "broke the protocol" in call.details()
    release.set()
    assert channel.attach(LONG_S)
    assert channel.unary_unary("/t/way")(b"", wait_for_ready=True) == b"runtime"


@pytest.mark.parametrize("word", [0, 8])
def test_counters_that_lie(both: Ends, word: int) -> None:
    good, bad, running, release = hold_a_call(both)
    other = bad.attachment.peer.region(ring.RING)
    other.word(word).set(1 << 40)
    sent = bad.unary_unary("/t/way").future(b"")  # so that the server has something to send
    assert running.code() is grpc.StatusCode.UNAVAILABLE
    assert good.unary_unary("/t/way")(b"") == b"runtime"
    release.set()
    assert sent.code() in (grpc.StatusCode.OK, grpc.StatusCode.UNAVAILABLE)


def test_payload_that_is_not_there(both: Ends) -> None:
    """An envelope without leased memory ends its call alone."""
    both.methods = {"/t/way": UU(way)}
    channel = both.serve().channel()
    call = channel.unary_unary("/t/way")
    call(b"")
    from tensorwire.rpc.payload.envelope import Envelope, seal

    forged = seal(Envelope(channel.attachment.id, 3, 99, 9, ((0, 0, 5),), b""))
    client, number = channel.attachment.runtime, channel.attachment.begin_call()
    sent = frames.call_frames(number, b"/t/way", frames.NO_DEADLINE, (), forged)
    answers: list[Any] = []
    client.arrived, arrived = answers.append, client.arrived
    client.line.send(sent)
    client.reader.watch()
    wait_for(lambda: answers)
    client.reader.unwatch()
    client.arrived = arrived
    body = frames.parse_end(answers[0].body)
    assert body.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
    assert call(b"") == b"runtime"


def test_a_handler_that_changes(both: Ends) -> None:
    """One object of a class of the user's, which is asked anew for each call, as grpcio does."""

    class Changing(grpc.RpcMethodHandler):  # type: ignore[misc]
        request_streaming = response_streaming = False
        request_deserializer = response_serializer = None
        unary_unary = staticmethod(lambda request, context: b"first")

    class Service(grpc.GenericRpcHandler):  # type: ignore[misc]
        handler = Changing()

        def service(self, handler_call_details: Any) -> Any:
            return self.handler

    both.methods = {"/t/way": UU(way)}
    channel = both.serve().channel()
    both.server.add_generic_rpc_handlers((Service(),))
    call = channel.unary_unary("/t/changes")
    assert [call(b"") for _ in range(3)] == [b"first"] * 3
    Service.handler.unary_unary = lambda request, context: b"second"
    assert call(b"") == b"second"
    assert channel.unary_unary("/t/way")(b"") == b"runtime"


# Ends that end


@pytest.fixture
def start(wire: str) -> Iterator[Callable[..., Any]]:
    started = []

    def run(*arguments: str) -> Any:
        process = subprocess.Popen(
            [sys.executable, str(SCRIPT), *arguments],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "TENSORWIRE_RPC": "runtime"},
        )  # fmt: skip
        started.append(process)
        return process

    yield run
    for process in started:
        process.kill()
        process.communicate()


def test_a_server_that_is_killed(start: Any, wire: str) -> None:
    process = start("serve", "ours", wire)
    target = f"127.0.0.1:{process.stdout.readline().strip()}"
    options = {"transports": (wire,), "runtime": True, **rpc_serving.OPTIONS}
    with attached_channel(target, **options) as channel:
        call = rpc_serving.start_call(channel, "uu", rpc.pack(np.ones(rpc_serving.SIZE)))
        assert process.stdout.readline() == f"in the servicer {float(rpc_serving.SIZE)}\n"
        assert channel.runtime == wire
        waiting = channel.unary_unary("/t/uu", *TYPES)
        with ThreadPoolExecutor(1) as pool:
            blocked = pool.submit(waiting, rpc.pack(np.ones(rpc_serving.SIZE)))
            assert process.stdout.readline() == f"in the servicer {float(rpc_serving.SIZE)}\n"
            process.send_signal(signal.SIGKILL)
            assert blocked.exception(LONG_S).code() is grpc.StatusCode.UNAVAILABLE
        assert call.code() is grpc.StatusCode.UNAVAILABLE
        with pytest.raises(grpc.RpcError) as caught:
            channel.unary_unary("/t/echo", *TYPES)(rpc.pack(np.ones(10)))
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    tensors._lent.clear()  # of calls that did not end well, for ten minutes


def test_a_client_that_is_killed(start: Any, wire: str) -> None:
    options = {"transports": (wire,), "runtime": True, **rpc_serving.OPTIONS}
    server = rpc.server(ThreadPoolExecutor(4), **options)
    server.add_generic_rpc_handlers((rpc_serving.Methods(),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    process = start("call", wire, str(port), "uu")
    assert process.stdout.readline() == "calling\n"
    wait_for(lambda: server._service.active == 1)
    wait_for(lambda: tensors.held_tensors() > 0)
    process.send_signal(signal.SIGKILL)
    wait_for(lambda: server.attachments == [] and server._service.active == 0)
    wait_for(lambda: tensors.held_tensors() == 0)
    server.stop(0).wait()
    tensors._lent.clear()


def test_a_stopped_server_meets_the_deadline(start: Any, wire: str) -> None:
    process = start("serve", "ours", wire)
    target = f"127.0.0.1:{process.stdout.readline().strip()}"
    options = {"transports": (wire,), "runtime": True, **rpc_serving.OPTIONS}
    with attached_channel(target, **options) as channel:
        call = channel.unary_unary("/t/echo", *TYPES)
        call(rpc.pack(np.ones(10)))
        stop_process(process)
        futures = [call.future(rpc.pack(np.ones(10)), timeout=0.3) for _ in range(2)]
        with pytest.raises(grpc.RpcError) as caught:
            call(rpc.pack(np.ones(10)), timeout=0.3)
        codes = [caught.value.code(), *(each.code() for each in futures)]
        assert set(codes) == {grpc.StatusCode.DEADLINE_EXCEEDED}
        process.send_signal(signal.SIGCONT)
        assert rpc.unpack(call(rpc.pack(np.ones(10)), timeout=20))[-1] == 2
    tensors._lent.clear()


def test_calls_of_a_stopped_server_do_not_pile_up(
    start: Any, wire: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their frames wait here though their time is over; further calls go by grpcio."""
    monkeypatch.setattr(runtime_client, "_MOST_WAITING", 20)
    process = start("serve", "ours", wire)
    target = f"127.0.0.1:{process.stdout.readline().strip()}"
    options = {
        "transports": (wire,),
        "runtime": True,
        "limits": rpc.Limits(threshold_bytes=1 << 30),
    }
    with attached_channel(target, **options) as channel:
        call = channel.unary_unary("/t/echo", *TYPES)
        message = rpc.embed(rpc.pack(np.ones(25_000)))
        assert rpc.unpack(call(message))[-1] == 2
        stop_process(process)
        for _ in range(40):
            with pytest.raises(grpc.RpcError) as caught:
                call(message, timeout=0.01)
            assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert 20 < len(channel.attachment.runtime.line.outbox) < 40
        process.send_signal(signal.SIGCONT)
        assert rpc.unpack(call(message, timeout=20))[-1] == 2
        wait_for(lambda: channel.attachment.runtime.usable)
    tensors._lent.clear()


def test_a_server_that_stops_lets_calls_end_and_begins_none(both: Ends) -> None:
    running, release = threading.Event(), threading.Event()

    def method(request: bytes, context: Any) -> bytes:
        running.set()
        release.wait(LONG_S)
        return way(request, context)

    both.methods = {"/t/m": UU(method), "/t/way": UU(way)}
    channel = both.serve().channel()
    assert channel.unary_unary("/t/way")(b"") == b"runtime"
    future = channel.unary_unary("/t/m").future(b"")
    assert running.wait(LONG_S)
    stopped = both.server.stop(LONG_S)
    assert not stopped.wait(0.05)
    for call in (channel.unary_unary("/t/way"), channel.unary_unary("/t/way").with_call):
        with pytest.raises(grpc.RpcError) as caught:
            call(b"")
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert channel.unary_unary("/t/way").future(b"").code() is grpc.StatusCode.UNAVAILABLE
    assert both.server.wait_for_termination(0.05)
    release.set()
    assert future.result(LONG_S) == b"runtime"
    assert stopped.wait(LONG_S)
    assert not both.server.wait_for_termination(LONG_S)


def test_streams_beside_calls(both: Ends) -> None:
    both.methods = {"/t/way": UU(way), "/t/ss": SS(echo_all)}
    channel = both.serve().channel()
    for _ in range(3):
        assert channel.unary_unary("/t/way")(b"") == b"runtime"
        assert list(channel.stream_stream("/t/ss")(iter([BIG, b"x"]))) == [BIG, b"x"]


def test_a_forgotten_channel_gives_everything_back(both: Ends) -> None:
    both.methods = {"/t/way": UU(way)}
    both.serve()
    channel = attached_channel(f"127.0.0.1:{both.port}", **both.system.our_channel)
    assert channel.unary_unary("/t/way")(b"") == b"runtime"
    attachment = channel.attachment
    del channel
    gc.collect()
    wait_for(lambda: attachment.lost or attachment._node.closed)
    wait_for(lambda: both.server.attachments == [])


def test_calls_after_a_server_that_is_started_again(start: Any, wire: str) -> None:
    process = start("serve", "ours", wire)
    port = process.stdout.readline().strip()
    options = {"transports": (wire,), "runtime": True, **rpc_serving.OPTIONS}
    with attached_channel(f"127.0.0.1:{port}", **options) as channel:
        call = channel.unary_unary("/t/echo", *TYPES)
        call(rpc.pack(np.ones(10)))
        process.kill()
        process.wait()
        server = rpc.server(ThreadPoolExecutor(2), **options)
        server.add_generic_rpc_handlers((rpc_serving.Methods(),))
        server.add_insecure_port(f"127.0.0.1:{port}")
        server.start()

        def again() -> bool:
            message = rpc.pack(np.ones(10))
            code = call.future(message, timeout=LONG_S, wait_for_ready=True).code()
            assert code in (grpc.StatusCode.OK, grpc.StatusCode.UNAVAILABLE)
            return bool(channel.runtime == wire)

        wait_for(again)
        server.stop(0).wait()
    tensors._lent.clear()


def test_a_cancelled_call_that_waits_for_a_thread_keeps_no_request(both: Ends) -> None:
    """The threads of the server have it in their queue until they come to it."""
    busy, release, seen = threading.Event(), threading.Event(), []

    def hold(request: bytes, context: Any) -> bytes:
        busy.set()
        release.wait(LONG_S)
        return b""

    def see(request: bytes, context: Any) -> bytes:
        seen.append(request)
        return b"seen"

    both.methods = {"/t/way": UU(way), "/t/hold": UU(hold), "/t/see": UU(see)}
    channel = both.serve(workers=1).channel()
    assert channel.unary_unary("/t/way")(b"") == b"runtime"
    end = next(iter(both.server._service._ends))
    holding = channel.unary_unary("/t/hold").future(b"")
    assert busy.wait(LONG_S)
    waiting = channel.unary_unary("/t/see").future(b"x" * 1000)
    wait_for(lambda: end.active == 2)
    call = next(each for each in end._calls.values() if each.method == "/t/see")
    assert call.pieces != []
    waiting.cancel()
    wait_for(lambda: end.active == 1)
    assert call.pieces == []
    assert call.only_request() is None
    release.set()
    assert holding.result() == b""
    assert channel.unary_unary("/t/see")(b"y") == b"seen"
    assert seen == [b"y"]


def test_callbacks_after_the_last_one() -> None:
    """No thread stays for it."""
    callbacks, called = Callbacks(), threading.Event()
    threads: list[threading.Thread] = []
    callbacks.call([lambda: threads.append(threading.current_thread()), called.set])
    assert called.wait(LONG_S)
    threads[0].join(LONG_S)
    assert not threads[0].is_alive()


@pytest.mark.parametrize("what", ["handling", "writing"])
def test_a_wait_within_what_must_not_be_interrupted(both: Ends, what: str) -> None:
    """No frame can be read or written there, so a thread that waits gets an error."""
    both.methods = {"/t/way": UU(way)}
    channel = both.serve().channel()
    call = channel.unary_unary("/t/way")
    assert call(b"") == b"runtime"
    client, errors = channel.attachment.runtime, []
    owner, name = (client, "arrived") if what == "handling" else (client.line, "_write_out")
    inner = getattr(owner, name)

    def interrupted(*given: Any) -> Any:
        if not errors:
            errors.append(None)
            with pytest.raises(RuntimeError, match="leave that to another thread") as caught:
                call(b"")
            errors.append(caught.value)
        return inner(*given)

    setattr(owner, name, interrupted)
    assert call(b"") == b"runtime"
    assert len(errors) == 2
    assert call(b"") == b"runtime"
    wait_for(lambda: len(channel.attachment._idle_calls) == 1024)


@pytest.mark.parametrize(("side", "size"), [("client", 16), ("client", 1000), ("server", 1000)])
def test_a_ring_of_another_size(
    both: Ends, side: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no attachment then, and nothing of one stays."""
    made = []

    class Memory(memory.OwnMemory):
        def __init__(self, node: Node, *, runs: bool) -> None:
            super().__init__(node, runs=False)
            self._ring, self._words = (node.allocate(size, name=ring.RING),) * 2
            made.append(node)

    monkeypatch.setattr(registry if side == "server" else negotiation, "OwnMemory", Memory)
    for module in (registry, negotiation):
        monkeypatch.setattr(module, "CONNECT_S", 1.0)
    both.methods = {"/t/way": UU(way)}
    channel = both.serve().channel()
    there = both.server._registry
    assert channel.unary_unary("/t/way")(b"") == b"grpcio"
    wait_for(lambda: bool(made) and not there._waiting and not there.attachments)


@pytest.mark.parametrize("how", ["call", "future", "callback"])
@pytest.mark.parametrize("message", [bytes(100_000), bytes(5 << 20)], ids=["framed", "offered"])
@pytest.mark.parametrize("threshold", [1, 1 << 20], ids=["leased", "measured"])
def test_a_large_response_holds_up_no_other_call(how: str, message: bytes, threshold: int) -> None:
    """The thread that waits for it makes it, and other threads read meanwhile."""
    begun, others_done = threading.Event(), threading.Event()

    def slowly(data: bytes) -> bytes:
        begun.set()
        assert others_done.wait(10)
        return data

    server = rpc.server(ThreadPoolExecutor(4), transports=("shm",), runtime=True)
    methods = {"/t/m": UU(echo), "/t/b": UU(lambda request, context: message)}
    server.add_generic_rpc_handlers((Methods(methods),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    options = {
        "transports": ("shm",),
        "runtime": True,
        "limits": rpc.Limits(threshold_bytes=threshold),
    }
    with attached_channel(f"127.0.0.1:{port}", **options) as channel:
        small = channel.unary_unary("/t/m")
        assert small(b"x") == b"x"
        large = channel.unary_unary("/t/b", response_deserializer=slowly)
        got: list[bytes] = []

        def take() -> None:
            if how == "call":
                got.append(large(b""))
            elif how == "future":
                got.append(large.future(b"").result())
            else:
                future = large.future(b"")
                future.add_done_callback(lambda each: got.append(each.result()))
                assert future.result(20) == message

        thread = threading.Thread(target=take)
        thread.start()
        assert begun.wait(10)
        try:
            for number in range(20):
                assert small(b"%d" % number, timeout=5) == b"%d" % number
        finally:
            others_done.set()
            thread.join(20)
        wait_for(lambda: got == [message])
    server.stop(None)
