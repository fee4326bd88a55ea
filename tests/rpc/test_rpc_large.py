"""Large messages of the runtime, which are pushed, and the threshold."""

import dataclasses
import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from ends import RUNTIME_SHM, RUNTIME_TCP, Ends, System
from test_rpc_conformance import LONG_S, SS, SU, US, UU, echo, echo_all, wait_for

from tensorwire import rpc
from tensorwire.rpc.attach.terms import MARK, OPEN, RUNTIME_VERSION
from tensorwire.rpc.payload import envelope as envelopes
from tensorwire.rpc.payload.host import host_id
from tensorwire.rpc.payload.push import CHUNK_BYTES
from tensorwire.rpc.payload.route import MOST_IN_FRAMES, THRESHOLDS
from tensorwire.rpc.runtime.call import RuntimeCall

UNLIMITED = [("grpc.max_receive_message_length", -1)]
WIRES = {"shm": RUNTIME_SHM, "tcp": RUNTIME_TCP}
VARIABLE = "TENSORWIRE_RPC_THRESHOLD_BYTES"


@pytest.fixture(params=WIRES)
def wire(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def both(wire: str) -> Iterator[Ends]:
    """Ends whose messages go by rendezvous from 1000 bytes on."""
    made = between(wire, limits=rpc.Limits(threshold_bytes=1000))
    yield made
    made.close()


def between(wire: str, **given: Any) -> Ends:
    keywords = {"transports": (wire,), "runtime": True, **given}
    return Ends(System(wire, keywords, keywords))


def message(size: int) -> bytes:
    return (bytes(range(251)) * (size // 251 + 1))[:size]


def nothing_is_used(channel: Any, server: Any) -> bool:
    return all(each.leases_there.used == 0 for each in (channel.attachment, *server.attachments))


def test_messages_of_all_sizes_both_ways(both: Ends) -> None:
    both.methods = {
        "/t/m": UU(echo),
        "/t/su": SU(lambda requests, context: b"".join(requests)),
        "/t/us": US(lambda request, context: iter([request, b"", request])),
        "/t/ss": SS(echo_all),
    }
    channel = both.serve(options=UNLIMITED).channel(options=UNLIMITED)
    call = channel.unary_unary("/t/m")
    assert call(message(999)) == message(999)
    assert channel.attachment.runtime_threshold_bytes == 1000
    ends = [channel.attachment, *both.server.attachments]
    assert [each.leases_there.leased_bytes for each in ends] == [0, 0]
    for size in (1000, 70_000, CHUNK_BYTES, CHUNK_BYTES + 1, 2 * CHUNK_BYTES + 12_345):
        sent = message(size)
        assert call(sent) == call.future(sent).result(LONG_S) == sent
        assert all(each.leases_there.leased_bytes >= size for each in ends)
    big, small = message(CHUNK_BYTES + 7), message(5)
    assert channel.stream_unary("/t/su")(iter([big, small, big])) == big + small + big
    assert list(channel.unary_stream("/t/us")(big)) == [big, b"", big]
    mixed = [big, small, b"", big, message(1000), big]
    assert list(channel.stream_stream("/t/ss")(iter(mixed))) == mixed
    assert channel.runtime == both.system.name
    wait_for(lambda: nothing_is_used(channel, both.server))


def test_a_message_that_only_looks_like_an_envelope(both: Ends) -> None:
    both.methods = {"/t/m": UU(echo)}
    call = both.serve().channel().unary_unary("/t/m")
    for size in (20, 2000):
        sent = envelopes.MAGIC + b"\x02" + message(size)
        assert call(sent) == sent


def test_who_does_not_read_holds_the_sender_up(both: Ends) -> None:
    sent = []

    def many(request: bytes, context: Any) -> Iterator[bytes]:
        for number in range(12):
            sent.append(number)
            yield message(1_000_000)

    both.methods = {"/t/us": US(many)}
    both.system = between(
        both.system.name, limits=rpc.Limits(threshold_bytes=1000, patience_s=LONG_S)
    ).system
    channel = both.serve().channel()
    stream = channel.unary_stream("/t/us")(b"")
    wait_for(lambda: len(sent) >= 6)
    time.sleep(0.2)
    assert len(sent) == 6  # five use up the window of 4 MiB
    assert [len(each) for each in stream] == [1_000_000] * 12
    wait_for(lambda: nothing_is_used(channel, both.server))
    assert both.server.attachments[0].leases_there.leased_bytes < 9_000_000  # and those being read


def test_calls_that_end_early_give_their_memory_back(both: Ends) -> None:
    goes_on = threading.Event()

    def waits(requests: Iterator[bytes], context: Any) -> bytes:
        goes_on.wait(LONG_S)
        return b""

    def raises(request: bytes, context: Any) -> bytes:
        context.abort(grpc.StatusCode.ABORTED, "no")
        raise AssertionError

    both.methods = {
        "/t/su": SU(waits),
        "/t/abort": UU(raises),
        "/t/us": US(lambda request, context: (request for _ in range(3))),
    }
    channel = both.serve().channel()
    call = channel.stream_unary("/t/su").future(message(5000) for _ in range(2))
    wait_for(lambda: channel.attachment is not None and channel.attachment.leases_there.used == 2)
    call.cancel()
    goes_on.set()
    with pytest.raises(grpc.RpcError) as caught:
        channel.unary_unary("/t/abort")(message(5000))
    assert caught.value.code() is grpc.StatusCode.ABORTED
    stream = channel.unary_stream("/t/us")(message(5000))
    assert next(stream) == message(5000)
    stream.cancel()
    wait_for(lambda: nothing_is_used(channel, both.server))


def test_no_more_memory_than_both_ends_grant(both: Ends) -> None:
    """Messages that do not fit travel inside."""
    both.methods = {"/t/m": UU(echo)}
    keywords = {"transports": (both.system.name,), "runtime": True}
    usual = {**keywords, "limits": rpc.Limits(threshold_bytes=1000)}
    short = {**keywords, "limits": rpc.Limits(threshold_bytes=1000, pool_bytes=1 << 20)}
    both.system = System("", short, usual)
    channel = both.serve(options=UNLIMITED).channel(options=UNLIMITED)
    call = channel.unary_unary("/t/m")
    assert call(message(3 << 20)) == message(3 << 20)
    assert call(message(1 << 19)) == message(1 << 19)
    ends = [channel.attachment, *both.server.attachments]
    assert all(1 << 19 <= each.leases_there.leased_bytes for each in ends)
    assert ends[1].leases_there.leased_bytes <= 1 << 20  # of the client's memory


# Hostile ----------------------------------------------------------------------


class Liar:
    """A client that says of what it pushes what it likes."""

    def __init__(self, channel: Any) -> None:
        self.channel = channel
        self.channel.unary_unary("/t/m")(message(5000))
        self.attachment = self.channel.attachment
        self.pushing = self.attachment.pushing

    def pushed(self, size: int = 100, *, there: bool = True) -> envelopes.Envelope:
        lease = self.attachment.leases_there.take(size, (1023, 7), 0, lambda: True)
        if there:
            self.pushing._other_board.word(8 * lease.slot).set(lease.turn - 1 + size)
        place = lease.slot, lease.serial, lease.turn
        version = envelopes.PUSHED_VERSION
        return envelopes.Envelope(self.attachment.id, *place, ((0, 0, size),), b"", version)

    def send(self, envelope: envelopes.Envelope, timeout: float = LONG_S) -> Any:
        client, number = self.attachment.runtime, self.attachment.begin_call()
        deadline = time.monotonic() + timeout
        call = RuntimeCall(client, number, deadline, lambda data, _: data, lambda *_: None)
        client.begin(call, b"/t/m", (), envelopes.seal(envelope))
        call.wait_blocking()
        return call.result()

    def send_by_grpcio(self, envelope: envelopes.Envelope) -> Any:
        call = self.channel.inner.unary_unary("/t/m")
        mark = envelopes.mark(self.attachment.id, 1023, 1)
        return call(envelopes.seal(envelope), metadata=((MARK, mark),))


LIES: tuple[dict[str, Any], ...] = (
    {"slot": 512},
    {"slot": (1 << 32) - 1},
    {"serial": 77},
    {"turn": 0},
    {"turn": 1 << 63},
    {"pieces": ((0, 0, 1 << 20),)},
    {"pieces": ((0, 1 << 20, 1),)},
    {"pieces": ((0, 0, 1 << 50),)},
    {"pieces": ((5, 0, 1 << 20),)},
    {"pieces": ((0, 0, 50), (5, 50, 1 << 50))},
)
"""The false statements of a message that is pushed."""


def test_lies_are_refused(both: Ends) -> None:
    served = []

    def method(request: bytes, context: Any) -> bytes:
        served.append(len(request))
        return b"yes"

    both.methods = {"/t/m": UU(method)}
    liar, honest = Liar(both.serve().channel()), both.channel()
    for changes in LIES:
        with pytest.raises(grpc.RpcError) as caught:
            liar.send(dataclasses.replace(liar.pushed(), **changes))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT, changes
        assert honest.unary_unary("/t/m")(message(5000)) == b"yes"
    assert set(served) == {5000}
    good = liar.pushed()
    assert liar.send(good) == b"yes"
    assert served[-1] == 100
    with pytest.raises(grpc.RpcError) as caught:  # a second time
        liar.send(good)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_who_pushes_and_does_not_go_on_holds_no_thread(both: Ends) -> None:
    both.methods = {"/t/m": UU(echo)}
    liar = Liar(both.serve(workers=1).channel())
    with pytest.raises(grpc.RpcError) as caught:
        liar.send(liar.pushed(there=False), timeout=0.5)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert both.channel().unary_unary("/t/m")(message(5000), timeout=LONG_S) == message(5000)


def test_what_is_pushed_to_who_has_agreed_on_nothing(both: Ends) -> None:
    both.methods = {"/t/m": UU(echo)}
    liar = Liar(both.serve().channel())
    with pytest.raises(grpc.RpcError) as caught:
        liar.send_by_grpcio(liar.pushed())
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    (end,) = both.server.attachments
    end.pushing = None
    with pytest.raises(grpc.RpcError) as caught:
        liar.send(liar.pushed())
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("limit", [-2, 1 << 62, "1", None, True, 1.5])
def test_a_limit_that_is_none(both: Ends, limit: Any) -> None:
    both.methods = {"/t/m": UU(echo)}
    both.serve()
    asked = {"versions": [1], "host": host_id(), "pool_bytes": 1 << 20, "runtime": RUNTIME_VERSION}
    asked |= {"transports": [both.system.name], "beside_bytes": limit}
    with grpc.insecure_channel(f"127.0.0.1:{both.port}") as channel:
        with pytest.raises(grpc.RpcError) as caught:
            channel.unary_unary(OPEN)(json.dumps(asked).encode())
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "beside_bytes is" in caught.value.details()
    assert not both.server._registry._waiting


# The threshold ----------------------------------------------------------------


def test_thresholds_of_a_wire(wire: str) -> None:
    ends = between(wire)
    ends.methods = {"/t/m": UU(echo)}
    channel = ends.serve().channel()
    assert channel.unary_unary("/t/m")(b"x") == b"x"
    for each in (channel.attachment, *ends.server.attachments):
        assert each.threshold_bytes == THRESHOLDS[wire]
        assert each.runtime_threshold_bytes == min(THRESHOLDS[wire], MOST_IN_FRAMES)
    ends.close()


def test_a_threshold_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "30000")
    assert rpc.Limits().threshold_bytes == 30000
    assert rpc.Limits(threshold_bytes=5).threshold_bytes == 5
    monkeypatch.setenv(VARIABLE, "")
    assert rpc.Limits().threshold_bytes is None


@pytest.mark.parametrize("value", ["-1", "1e5", "many", "0x10", "1.5"])
def test_a_threshold_that_is_none(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv(VARIABLE, value)
    with pytest.raises(ValueError, match=f"{VARIABLE} is a number of bytes"):
        rpc.Limits()
