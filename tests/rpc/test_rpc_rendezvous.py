"""Large messages of the runtime by rendezvous, and the threshold: measured, adapted, or set."""

import contextlib
import dataclasses
import json
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import grpc
import pytest
from ends import RUNTIME_SHM, RUNTIME_TCP, Ends, System
from test_rpc_conformance import LONG_S, SS, SU, US, UU, echo, echo_all, wait_for

from tensorwire import rpc
from tensorwire.rpc.attach.terms import MARK, OPEN, RUNTIME_VERSION
from tensorwire.rpc.payload import envelope as envelopes
from tensorwire.rpc.payload.attachment import THRESHOLDS
from tensorwire.rpc.payload.host import host_id
from tensorwire.rpc.payload.inbox import GivenUpError
from tensorwire.rpc.payload.rendezvous import CHUNK_BYTES, Rendezvous
from tensorwire.rpc.payload.threshold import LEAST_BYTES, Threshold
from tensorwire.rpc.runtime import measuring
from tensorwire.rpc.runtime.call import RuntimeCall

UNLIMITED = [("grpc.max_receive_message_length", -1)]
WIRES = {"shm": RUNTIME_SHM, "tcp": RUNTIME_TCP}
ABOUT = ("client", "shm")
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


class Memory(NamedTuple):
    """What an end has for messages: memory of its own that is read, or pushed into."""

    used: int
    leased_bytes: int


def pools(attachment: Any) -> tuple[Any, Any]:
    return attachment.rendezvous.offers, attachment.leases_there


def offers(attachment: Any) -> Memory:
    both = pools(attachment)
    return Memory(sum(each.used for each in both), sum(each.leased_bytes for each in both))


def nothing_is_offered(channel: Any, server: Any) -> bool:
    return all(offers(each).used == 0 for each in (channel.attachment, *server.attachments))


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
    assert channel.rendezvous_bytes == 1000
    ends = [channel.attachment, *both.server.attachments]
    assert [offers(each).leased_bytes for each in ends] == [0, 0]
    for size in (1000, 70_000, CHUNK_BYTES, CHUNK_BYTES + 1, 2 * CHUNK_BYTES + 12_345):
        sent = message(size)
        assert call(sent) == call.future(sent).result(LONG_S) == sent
        assert all(offers(each).leased_bytes >= size for each in ends)
    big, small = message(CHUNK_BYTES + 7), message(5)
    assert channel.stream_unary("/t/su")(iter([big, small, big])) == big + small + big
    assert list(channel.unary_stream("/t/us")(big)) == [big, b"", big]
    mixed = [big, small, b"", big, message(1000), big]
    assert list(channel.stream_stream("/t/ss")(iter(mixed))) == mixed
    assert channel.runtime == both.system.name
    wait_for(lambda: nothing_is_offered(channel, both.server))


def test_a_closed_end_lets_go_of_what_it_has_offered(both: Ends) -> None:
    """Whoever still has the attachment does not keep the memory of its messages."""
    both.methods = {"/t/m": UU(echo)}
    channel = both.serve(options=UNLIMITED).channel(options=UNLIMITED)
    assert channel.unary_unary("/t/m")(message(2 * CHUNK_BYTES)) == message(2 * CHUNK_BYTES)
    wait_for(lambda: nothing_is_offered(channel, both.server))
    attachment = channel.attachment
    (lease,) = attachment.rendezvous.offers.all()
    array = weakref.ref(lease.memory.array())
    assert array() is not None
    channel.close()
    assert array() is None
    assert lease.memory.freed


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
            yield message(100_000)

    both.methods = {"/t/us": US(many)}
    both.system = between(
        both.system.name, limits=rpc.Limits(threshold_bytes=1000, patience_s=LONG_S)
    ).system
    channel = both.serve().channel()
    stream = channel.unary_stream("/t/us")(b"")
    wait_for(lambda: len(sent) >= 3)
    time.sleep(0.2)
    assert len(sent) == 3  # two are under way, and the third waits for memory
    assert [len(each) for each in stream] == [100_000] * 12
    wait_for(lambda: nothing_is_offered(channel, both.server))
    assert offers(both.server.attachments[0]).leased_bytes < 400_000


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
    wait_for(lambda: channel.attachment is not None and offers(channel.attachment).used == 2)
    call.cancel()
    goes_on.set()
    with pytest.raises(grpc.RpcError) as caught:
        channel.unary_unary("/t/abort")(message(5000))
    assert caught.value.code() is grpc.StatusCode.ABORTED
    stream = channel.unary_stream("/t/us")(message(5000))
    assert next(stream) == message(5000)
    stream.cancel()
    wait_for(lambda: nothing_is_offered(channel, both.server))


def test_no_more_memory_than_both_ends_grant(both: Ends) -> None:
    """What does not fit travels otherwise."""
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
    assert all(1 << 19 <= offers(each).leased_bytes for each in ends)
    assert all(each.rendezvous.offers.leased_bytes <= 1 << 20 for each in ends)
    assert ends[1].leases_there.leased_bytes <= 1 << 20  # of the client's memory


def test_limits_do_not_depend_on_what_was_measured(wire: str) -> None:
    """A message that is too long for frames is so below every threshold that is not the user's."""
    ends = between(wire)
    ends.methods = {"/t/m": UU(lambda request, context: bytes(len(request) // 10 * 10))}
    limit = [("grpc.max_receive_message_length", 100_000)]
    channel = ends.serve(options=limit).channel(options=UNLIMITED)
    call = channel.unary_unary("/t/m")
    call(b"")
    for size in (LEAST_BYTES, 1 << 17):
        for each in (channel.attachment, *ends.server.attachments):
            each.rendezvous.threshold.measured(size)
        assert len(call(bytes(100_000))) == 100_000
        with pytest.raises(grpc.RpcError) as caught:
            call(bytes(100_001))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "larger than max (100001 vs. 100000)" in caught.value.details()
    ends.close()


# Hostile ----------------------------------------------------------------------


class Liar:
    """A client that offers what it likes."""

    def __init__(self, channel: Any) -> None:
        self.channel = channel
        self.channel.unary_unary("/t/m")(message(5000))
        self.attachment = self.channel.attachment
        self.rendezvous = self.attachment.rendezvous

    def offered(
        self, size: int = 100, *, stage: bool = True, pushed: bool = False
    ) -> envelopes.Envelope:
        pool = pools(self.attachment)[pushed]
        lease = pool.take(size, (1023, 7), 0, lambda: True)
        if stage:
            first, told = (1025, 2 * lease.turn) if pushed else (513, lease.turn - 1 + size)
            self.rendezvous._other_board.word(8 * (first + lease.slot)).set(told)
        pieces = ((0, 0, size),)
        place = lease.slot, lease.serial, lease.turn
        version = envelopes.PUSHED_VERSION if pushed else envelopes.OFFERED_VERSION
        return envelopes.Envelope(self.attachment.id, *place, pieces, b"", version)

    def send(self, envelope: envelopes.Envelope, timeout: float = LONG_S) -> Any:
        client, number = self.attachment.runtime, self.attachment.begin_call()
        deadline = time.monotonic() + timeout
        call = RuntimeCall(client, number, deadline, bytes, lambda code: None)
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
    {"turn": (1 << 63) - 1},
    {"pieces": ((0, 8, 100),)},
    {"pieces": ((0, 0, 0),)},
    {"pieces": ((0, 0, 1 << 20),)},
    {"pieces": ((0, 0, 1 << 50),)},
    {"pieces": ((5, 0, 100),)},
    {"pieces": ((0, 0, 50), (5, 50, 50))},
)
"""What no honest end says of an offer of its own."""


def test_offers_that_lie_are_refused(both: Ends) -> None:
    served = []

    def method(request: bytes, context: Any) -> bytes:
        served.append(len(request))
        return b"yes"

    both.methods = {"/t/m": UU(method)}
    liar, honest = Liar(both.serve().channel()), both.channel()
    for changes in LIES:
        with pytest.raises(grpc.RpcError) as caught:
            liar.send(dataclasses.replace(liar.offered(), **changes))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT, changes
        assert honest.unary_unary("/t/m")(message(5000)) == b"yes"
    assert set(served) == {5000}
    good = liar.offered()
    assert liar.send(good) == b"yes"
    assert served[-1] == 100
    with pytest.raises(grpc.RpcError) as caught:  # a second time
        liar.send(good)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


PUSHED_LIES: tuple[dict[str, Any], ...] = (
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
"""The same of what it has pushed."""


def test_what_is_said_of_pushed_messages_and_no_truth_is_refused() -> None:
    served = []

    def method(request: bytes, context: Any) -> bytes:
        served.append(len(request))
        return b"yes"

    with contextlib.closing(between("tcp", limits=rpc.Limits(threshold_bytes=1000))) as both:
        both.methods = {"/t/m": UU(method)}
        liar, honest = Liar(both.serve().channel()), both.channel()
        for changes in PUSHED_LIES:
            with pytest.raises(grpc.RpcError) as caught:
                liar.send(dataclasses.replace(liar.offered(pushed=True), **changes))
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT, changes
            assert honest.unary_unary("/t/m")(message(5000)) == b"yes"
        assert set(served) == {5000}
        good = liar.offered(pushed=True)
        assert liar.send(good) == b"yes"
        assert served[-1] == 100
        with pytest.raises(grpc.RpcError) as caught:  # a second time
            liar.send(good)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_nothing_is_pushed_where_memory_is_mapped() -> None:
    with contextlib.closing(between("shm", limits=rpc.Limits(threshold_bytes=1000))) as both:
        both.methods = {"/t/m": UU(echo)}
        liar = Liar(both.serve().channel())
        with pytest.raises(grpc.RpcError) as caught:
            liar.send(liar.offered(pushed=True))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("pushed", [False, True], ids=["offered", "pushed"])
def test_who_offers_and_does_not_go_on_holds_no_thread(both: Ends, pushed: bool) -> None:
    if pushed and both.system.name == "shm":
        return  # nothing is pushed there, see above
    both.methods = {"/t/m": UU(echo)}
    liar = Liar(both.serve(workers=1).channel())
    with pytest.raises(grpc.RpcError) as caught:
        liar.send(liar.offered(stage=False, pushed=pushed), timeout=0.5)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert both.channel().unary_unary("/t/m")(message(5000), timeout=LONG_S) == message(5000)


def test_an_offer_to_who_has_agreed_on_none(both: Ends) -> None:
    both.methods = {"/t/m": UU(echo)}
    liar = Liar(both.serve().channel())
    with pytest.raises(grpc.RpcError) as caught:
        liar.send_by_grpcio(liar.offered())
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    (end,) = both.server.attachments
    end.rendezvous = None
    with pytest.raises(grpc.RpcError) as caught:
        liar.send(liar.offered())
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("limit", [-2, 1 << 62, "1", None, True, 1.5])
def test_a_limit_that_is_none(both: Ends, limit: Any) -> None:
    both.methods = {"/t/m": UU(echo)}
    both.serve()
    asked = {"versions": [1], "host": host_id(), "pool_bytes": 1 << 20, "runtime": RUNTIME_VERSION}
    asked |= {"transports": [both.system.name], "most_bytes": limit}
    with grpc.insecure_channel(f"127.0.0.1:{both.port}") as channel:
        with pytest.raises(grpc.RpcError) as caught:
            channel.unary_unary(OPEN)(json.dumps(asked).encode())
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "most_bytes is" in caught.value.details()
    assert not both.server._registry._waiting


# The threshold ----------------------------------------------------------------


def test_what_is_measured_holds_at_both_ends(wire: str) -> None:
    ends = between(wire)
    ends.methods = {"/t/m": UU(echo)}
    channel = ends.serve().channel()
    assert channel.rendezvous_bytes is None
    channel.unary_unary("/t/m")(b"")
    found = channel.rendezvous_bytes
    assert LEAST_BYTES <= found <= THRESHOLDS[wire]
    assert found & (found - 1) == 0
    (there,) = ends.server.attachments
    channel.attachment.rendezvous.threshold.measured(LEAST_BYTES * 2)
    wait_for(lambda: there.rendezvous.threshold.size_bytes == LEAST_BYTES * 2)
    ends.close()


@pytest.mark.parametrize("side", ["channel", "server"])
def test_a_threshold_of_the_user_is_kept(wire: str, side: str) -> None:
    plain = {"transports": (wire,), "runtime": True}
    given = {**plain, "limits": rpc.Limits(threshold_bytes=12_345)}
    ends = Ends(System("", *((given, plain) if side == "channel" else (plain, given))))
    ends.methods = {"/t/m": UU(echo)}
    channel = ends.serve().channel()
    channel.unary_unary("/t/m")(message(20_000))
    (there,) = ends.server.attachments
    here, there = channel.attachment.rendezvous.threshold, there.rendezvous.threshold
    set_one, other = (here, there) if side == "channel" else (there, here)
    set_one.measured(1 << 16)
    assert set_one.size_bytes == 12_345
    assert set_one.fixed
    assert not other.fixed
    ends.close()


def test_a_threshold_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "30000")
    ends = between("shm")
    ends.methods = {"/t/m": UU(echo)}
    channel = ends.serve().channel()
    channel.unary_unary("/t/m")(b"")
    assert channel.rendezvous_bytes == 30_000
    assert ends.server.attachments[0].rendezvous.threshold.size_bytes == 30_000
    ends.close()
    given = between("shm", limits=rpc.Limits(threshold_bytes=40_000))
    given.methods = {"/t/m": UU(echo)}
    channel = given.serve().channel()
    channel.unary_unary("/t/m")(b"")
    assert channel.rendezvous_bytes == 40_000  # who asks for it here has said more
    given.close()


@pytest.mark.parametrize("value", ["-1", "1 MiB", "1e6", "²"])
def test_a_threshold_that_is_none(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv(VARIABLE, value)
    makers: list[Callable[[], object]] = [
        lambda: rpc.insecure_channel("localhost:1"),
        lambda: rpc.server(ThreadPoolExecutor(1)),
        lambda: rpc.aio.server(),
    ]
    for make in makers:
        with pytest.raises(ValueError, match=f"{VARIABLE} is a number of bytes"):
            make()


class Path:
    """A path with a clock of its own: frames take 10 ns a byte, rendezvous a fixed time."""

    def __init__(self, offered_s: float) -> None:
        self.offered_s = offered_s
        self.now = 5.0

    def monotonic(self) -> float:
        return self.now

    def probe(self, size_bytes: int, *, offered: bool, timeout_s: float) -> bool:
        took = self.offered_s if offered else size_bytes * 1e-8
        self.now += min(took, timeout_s)
        return took <= timeout_s


@pytest.mark.parametrize(
    ("offered_s", "most", "found"),
    [
        (0.0, 1 << 18, LEAST_BYTES),
        (0.0005, 1 << 18, 1 << 16),
        (0.001, 1 << 14, 1 << 14),  # no lower one is known
        (0.0, 1 << 21, 1 << 16),
        (0.04, 1 << 18, None),  # it would take too long
        (1.0, 1 << 18, None),
    ],
)
def test_measuring_finds_where_the_lines_cross(
    offered_s: float, most: int, found: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = Path(offered_s)
    monkeypatch.setattr(measuring, "time", path)
    assert measuring.measure(path, most) == found
    assert path.now <= 5.11


def observe(threshold: Threshold, size: int, framed_s: float, offered_s: float, calls: int) -> None:
    for _ in range(calls):
        by = threshold.passed(size)
        threshold.observe(size, by, offered_s if by else framed_s)


def test_the_threshold_follows_what_calls_take() -> None:
    told: list[int] = []
    threshold = Threshold(1 << 18, fixed=False, about=ABOUT)
    threshold.changed = told.append
    threshold.measured(1 << 16)
    observe(threshold, 40_000, framed_s=2.0, offered_s=1.0, calls=400)
    assert threshold.size_bytes == 1 << 15
    observe(threshold, 40_000, framed_s=1.0, offered_s=2.0, calls=400)
    assert threshold.size_bytes == 1 << 16
    observe(threshold, 40_000, framed_s=1.0, offered_s=1.0, calls=400)  # as good: it stays
    observe(threshold, 1 << 20, framed_s=1.0, offered_s=9.0, calls=400)  # far from it
    assert threshold.size_bytes == 1 << 16
    assert told == [1 << 16, 1 << 15, 1 << 16]


def test_the_threshold_stays_within_its_bounds() -> None:
    threshold = Threshold(1 << 18, fixed=False, about=ABOUT)
    threshold.measured(1)
    assert threshold.size_bytes == LEAST_BYTES
    threshold.measured(1 << 30)
    assert threshold.size_bytes == 1 << 18
    assert all(threshold.passed(1 << 18) for _ in range(100))
    fixed = Threshold(1000, fixed=True, about=ABOUT)
    fixed.measured(LEAST_BYTES)
    observe(fixed, 999, framed_s=2.0, offered_s=1.0, calls=400)
    assert fixed.size_bytes == 1000
    assert not any(fixed.passed(999) for _ in range(100))


def test_memory_of_probes_that_the_server_gives_up_comes_back(
    wire: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def give_up(*given: Any) -> bytes:
        raise GivenUpError("nobody needs it")

    monkeypatch.setattr(Rendezvous, "read", give_up)
    both = between(wire)
    try:
        both.methods = {"/t/m": UU(echo)}
        channel = both.serve().channel()
        assert channel.unary_unary("/t/m")(b"x") == b"x"
        pool = offers(channel.attachment)
        assert channel.attachment.runtime._probes > 0
        assert pool.used == pool.leased_bytes == 0
    finally:
        both.close()
