"""Arrays of calls of the runtime: their envelope leaves first, and they are written meanwhile."""

import asyncio
import contextlib
import dataclasses
import gc
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import numpy as np
import pytest
from ends import Ends, Methods, attached_channel
from test_rpc_conformance import LONG_S, SS, UU, wait_for
from test_rpc_large import Liar, between

from tensorwire import rpc
from tensorwire.memory import RemoteRegion
from tensorwire.rpc.payload import envelope as envelopes
from tensorwire.rpc.payload import push, route, tensors
from tensorwire.rpc.payload.route import PUSHED_BYTES

UNLIMITED = [("grpc.max_receive_message_length", -1)]
OF_TENSORS = {
    "request_deserializer": rpc.Tensor.FromString,
    "response_serializer": rpc.Tensor.SerializeToString,
}
FROM_TENSORS = (rpc.Tensor.SerializeToString, rpc.Tensor.FromString)
LONG = 3 << 20


@pytest.fixture
def both() -> Iterator[Ends]:
    with contextlib.closing(between("shm")) as made:
        made.methods = {"/t/m": UU(give_back, **OF_TENSORS), "/t/ss": SS(give_all, **OF_TENSORS)}
        yield made
    tensors._lent.clear()  # of calls that did not end well, for ten minutes
    gc.collect()


@pytest.fixture(autouse=True)
def cores_are_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else nothing is pushed; here all of them may be in use."""
    monkeypatch.setattr(route, "crowded", lambda: False)


def give_back(request: Any, context: Any) -> Any:
    return rpc.pack(rpc.unpack(request))


def give_all(requests: Any, context: Any) -> Iterator[Any]:
    for each in requests:
        yield rpc.pack(rpc.unpack(each))


def numbers(size: int, first: int = 0) -> Any:
    return (np.arange(size) + first).astype(np.uint8)


def open_channel(both: Ends, **given: Any) -> Any:
    return both.serve(options=UNLIMITED, **given).channel(options=UNLIMITED)


def nothing_is_left(both: Ends, channel: Any) -> bool:
    gc.collect()
    ends = (channel.attachment, *both.server.attachments)
    return tensors.held_tensors() == tensors.lent_arrays() == 0 and all(
        each.leases_there.used == each.leases_here.held == 0 for each in ends
    )


@pytest.fixture
def pushed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of what this process has pushed."""
    sizes: list[int] = []
    pushes = push.Pushing.push

    def counted(itself: Any, lease: Any, sources: Any, *given: Any, **named: Any) -> Any:
        sizes.append(sum(each.nbytes for each in sources))
        return pushes(itself, lease, sources, *given, **named)

    monkeypatch.setattr(push.Pushing, "push", counted)
    return sizes


class Held:
    """Writes of arrays begin when they are let go.

    Attributes:
        begun: a thread wants to write.
        free: they may.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.free = threading.Event(), threading.Event()
        self.over: list[float] = []
        write_at = RemoteRegion.write_at

        def held(region: Any, local: Any, offsets: Any, **named: Any) -> Any:
            if "signal" in named:
                self.begun.set()
                self.free.wait(LONG_S)
                self.over.append(time.monotonic())
            return write_at(region, local, offsets, **named)

        monkeypatch.setattr(RemoteRegion, "write_at", held)


SIZES = (
    [PUSHED_BYTES - 64],
    [PUSHED_BYTES],
    [LONG],
    [1 << 20, 0, 8, LONG],
    [LONG, 5, 1 << 19],
    [100_000] * 9,
)


@pytest.mark.parametrize("sizes", SIZES, ids=lambda sizes: f"{len(sizes)}-{sizes[0]}")
def test_what_is_pushed_arrives(both: Ends, pushed: list[int], sizes: list[int]) -> None:
    """Both ways, as requests and as responses, and in streams."""
    from tensorwire_benchmarks import rpc_payloads as payloads

    def method(request: Any, context: Any) -> Any:
        return payloads.of_tensors([each + 1 for each in payloads.arrays(request)])

    message = payloads.Tensors
    types = {
        "request_deserializer": message.FromString,
        "response_serializer": message.SerializeToString,
    }
    both.methods["/t/many"] = UU(method, **types)
    channel = open_channel(both)
    call = channel.unary_unary("/t/many", message.SerializeToString, message.FromString)
    for first in range(3):
        sent = [numbers(size, first) for size in sizes]
        for answer in (
            call(payloads.of_tensors(sent)),
            call.future(payloads.of_tensors(sent)).result(LONG_S),
        ):
            got = payloads.arrays(answer)
            assert all(np.array_equal(one, other + 1) for one, other in zip(got, sent, strict=True))
        del got, answer
    total = sum(sizes)
    assert pushed == ([total] * 12 if total >= PUSHED_BYTES else [])
    stream = channel.stream_stream("/t/ss", *FROM_TENSORS)
    sent = [numbers(max(sizes), first) for first in range(5)]
    for one, answer in zip(sent, stream(rpc.pack(each) for each in sent), strict=True):
        np.testing.assert_array_equal(rpc.unpack(answer), one)
    del answer
    wait_for(lambda: nothing_is_left(both, channel))


@pytest.mark.parametrize("way", ["request", "response"])
def test_nobody_sees_a_message_before_its_arrays_are_there(
    both: Ends, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """But it is made meanwhile."""
    made: list[float] = []

    def make(data: bytes) -> Any:
        made.append(time.monotonic())
        return rpc.Tensor.FromString(data)

    seen: list[tuple[float, bool]] = []

    def look(message: Any) -> None:
        seen.append((time.monotonic(), np.array_equal(rpc.unpack(message), numbers(LONG))))

    def method(request: Any, context: Any) -> Any:
        if way == "request":
            look(request)
        return rpc.pack(numbers(LONG if way == "response" else 8))

    both.methods["/t/m"] = UU(method, make, rpc.Tensor.SerializeToString)
    channel = open_channel(both)
    call = channel.unary_unary("/t/m", rpc.Tensor.SerializeToString, make)
    call(rpc.pack(numbers(8)))
    made.clear()
    seen.clear()
    held = Held(monkeypatch)
    answers: list[Any] = []
    sent = rpc.pack(numbers(LONG if way == "request" else 8))
    thread = threading.Thread(target=lambda: answers.append(call(sent)))
    thread.start()
    assert held.begun.wait(LONG_S)
    wait_for(lambda: len(made) == (1 if way == "request" else 2))
    time.sleep(0.2)
    assert not seen
    assert not answers
    held.free.set()
    thread.join(LONG_S)
    if way == "response":
        look(answers[0])
    assert seen[0][1]
    assert made[0] < held.over[0] < seen[0][0]
    answers.clear()
    wait_for(lambda: nothing_is_left(both, channel))


def test_nothing_is_pushed_where_cores_are_wanted(
    both: Ends, pushed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The receiver would take the core of who copies."""
    channel = open_channel(both)
    call = channel.unary_unary("/t/m", *FROM_TENSORS)
    monkeypatch.setattr(route, "crowded", lambda: True)
    np.testing.assert_array_equal(rpc.unpack(call(rpc.pack(numbers(LONG)))), numbers(LONG))
    assert not pushed
    monkeypatch.setattr(route, "crowded", lambda: False)
    call(rpc.pack(numbers(LONG)))
    assert pushed == [LONG, LONG]


def test_memory_that_is_still_written_is_not_used_again(
    both: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its receiver gives up; later writes of the sender, and later messages, stay apart."""
    channel = open_channel(both)
    call = channel.unary_unary("/t/m", *FROM_TENSORS)
    call(rpc.pack(numbers(LONG)))
    wait_for(lambda: nothing_is_left(both, channel))
    held = Held(monkeypatch)
    late = rpc.pack(np.full(LONG, 255, np.uint8))
    codes: list[Any] = []

    def give_up() -> None:
        with pytest.raises(grpc.RpcError) as caught:
            call(late, timeout=0.3)
        codes.append(caught.value.code())

    thread = threading.Thread(target=give_up)
    thread.start()
    assert held.begun.wait(LONG_S)
    (there,) = both.server.attachments
    wait_for(lambda: there.leases_here.held == 1)
    wait_for(lambda: there.leases_here.held == 0)  # the deadline is over
    assert channel.attachment.leases_there.used == 1
    monkeypatch.undo()
    answer = call(rpc.pack(numbers(LONG)))
    held.free.set()
    thread.join(LONG_S)
    assert codes == [grpc.StatusCode.DEADLINE_EXCEEDED]
    np.testing.assert_array_equal(rpc.unpack(answer), numbers(LONG))
    del answer
    tensors.delivered([late.held.ticket])
    wait_for(lambda: nothing_is_left(both, channel))


def test_memory_of_a_later_turn_is_not_taken_for_that_of_an_earlier_one(
    both: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client gives up in the middle and sends again; the servicer gets no half of the first."""
    seen: list[int] = []

    def method(request: Any, context: Any) -> Any:
        array = rpc.unpack(request)
        seen.append(int(array[0]))
        assert (array == array[0]).all()
        return rpc.pack(array[:8].copy())

    both.methods["/t/m"] = UU(method, **OF_TENSORS)
    channel = open_channel(both)
    call = channel.unary_unary("/t/m", *FROM_TENSORS)
    call(rpc.pack(np.zeros(LONG, np.uint8)))
    wait_for(lambda: nothing_is_left(both, channel))
    # The server's thread looks at nothing but the word, as if it had not been woken since.
    monkeypatch.setattr(push, "_SLICE_S", LONG_S)
    step = push.Push._step

    def half(arrays: Any, most_bytes: int) -> None:
        if arrays.sources[0][0] == 1:
            step(arrays, 1 << 20)
            arrays.sources = []
        else:
            step(arrays, most_bytes)

    monkeypatch.setattr(push.Push, "_step", half)
    first = rpc.pack(np.ones(LONG, np.uint8))
    with pytest.raises(grpc.RpcError) as caught:
        call(first, timeout=0.3)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    tensors.delivered([first.held.ticket])
    for number in range(2, 6):
        assert rpc.unpack(call(rpc.pack(np.full(LONG, number, np.uint8))))[0] == number
    assert seen == [0, 2, 3, 4, 5]
    wait_for(lambda: nothing_is_left(both, channel))


def test_callbacks_of_a_call_run_behind_its_arrays(both: Ends) -> None:
    """Callbacks may use the memory of the arrays for other things."""
    memory = numbers(LONG).copy()

    def method(request: Any, context: Any) -> Any:
        memory[:] = numbers(LONG)
        context.add_callback(lambda: memory.fill(0))
        return rpc.pack(memory)

    both.methods["/t/m"] = UU(method, **OF_TENSORS)
    call = open_channel(both).unary_unary("/t/m", *FROM_TENSORS)
    for _ in range(5):
        np.testing.assert_array_equal(rpc.unpack(call(rpc.pack(numbers(8)))), numbers(LONG))


def test_a_message_that_cannot_be_made_waits_for_its_arrays(
    both: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So its memory can be used again at once."""

    def make(data: bytes) -> Any:
        if fails:
            raise ValueError("no message")
        return rpc.Tensor.FromString(data)

    fails: list[bool] = []
    both.methods["/t/m"] = UU(give_back, make, rpc.Tensor.SerializeToString)
    channel = open_channel(both)
    call = channel.unary_unary("/t/m", *FROM_TENSORS)
    call(rpc.pack(numbers(LONG)))
    fails.append(True)
    for _ in range(5):
        request = rpc.pack(numbers(LONG))
        with pytest.raises(grpc.RpcError) as caught:
            call(request)
        assert caught.value.code() is grpc.StatusCode.INTERNAL
        tensors.delivered([request.held.ticket])
    wait_for(lambda: nothing_is_left(both, channel))
    fails.clear()
    np.testing.assert_array_equal(rpc.unpack(call(rpc.pack(numbers(LONG)))), numbers(LONG))


def test_who_pushes_and_does_not_go_on_is_not_waited_for(
    both: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call is made again by grpcio, as the servicer has not run."""
    monkeypatch.setattr(push, "STALLED_S", 0.3)
    channel = open_channel(both)
    call = channel.unary_unary("/t/m", *FROM_TENSORS)
    call(rpc.pack(numbers(8)))
    monkeypatch.setattr(push.Push, "run", lambda arrays, needed: None)
    began = time.monotonic()
    answer = call(rpc.pack(numbers(LONG)), timeout=LONG_S)
    np.testing.assert_array_equal(rpc.unpack(answer), numbers(LONG))
    assert time.monotonic() - began < LONG_S / 2
    monkeypatch.undo()
    np.testing.assert_array_equal(rpc.unpack(call(rpc.pack(numbers(LONG)))), numbers(LONG))


def test_a_sender_that_is_lost_meanwhile(both: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    """No call waits for its payload."""
    began = threading.Event()
    ran: list[Any] = []
    both.methods["/t/m"] = UU(lambda request, context: ran.append(1) or request, **OF_TENSORS)
    channel = open_channel(both, workers=1)
    call = channel.unary_unary("/t/m", *FROM_TENSORS)
    call(rpc.pack(numbers(8)))
    ran.clear()

    def lost(arrays: Any, needed: Any) -> None:
        began.set()
        channel.attachment.close()

    monkeypatch.setattr(push.Push, "run", lost)
    with pytest.raises(grpc.RpcError):
        call(rpc.pack(numbers(LONG)), timeout=LONG_S)
    assert began.is_set()
    monkeypatch.undo()
    assert not ran
    began_s = time.monotonic()
    again = both.channel(options=UNLIMITED).unary_unary("/t/m", *FROM_TENSORS)
    np.testing.assert_array_equal(rpc.unpack(again(rpc.pack(numbers(LONG)))), numbers(LONG))
    assert time.monotonic() - began_s < LONG_S / 2
    assert ran == [1]


LIES: tuple[dict[str, Any], ...] = (
    {"slot": 512},
    {"slot": (1 << 32) - 1},
    {"serial": 77},
    {"turn": 0},
    {"turn": 1 << 63},
    {"turn": (1 << 64) - 1},
    {"pieces": ((5, 0, LONG + (1 << 20)),)},
    {"pieces": ((5, 1 << 40, 1),)},
    {"pieces": ((5, 0, 8), (0, 0, 1 << 50))},
)
"""The false statements of arrays that are pushed."""


@pytest.mark.parametrize("asyncio_server", [False, True])
def test_what_is_said_of_pushed_arrays_and_no_truth(both: Ends, asyncio_server: bool) -> None:
    wire = both.system.name
    with served(wire, asyncio_server) as connect:
        liar, honest = Liar(connect()), connect()

        def envelope(*, there: bool = True, **changes: Any) -> Any:
            lease = liar.attachment.leases_there.take(LONG, (1023, 7), 0, lambda: True)
            if there:
                word = liar.pushing._other_board.word(8 * lease.slot)
                word.set(lease.turn - 1 + LONG)
            place = lease.slot, lease.serial, lease.turn
            made = envelopes.Envelope(
                liar.attachment.id, *place, ((5, 0, LONG),), b"abc", envelopes.PUSHED_VERSION
            )
            return dataclasses.replace(made, **changes)

        for changes in LIES:
            with pytest.raises(grpc.RpcError) as caught:
                liar.send(envelope(**changes), timeout=2)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT, changes
            assert honest.unary_unary("/t/m")(b"x") == b"x"
        good = envelope()
        assert liar.send(good) == b"abc"  # and the array is not asked for
        with pytest.raises(grpc.RpcError) as caught:  # a second time
            liar.send(good)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        with pytest.raises(grpc.RpcError) as caught:
            liar.send(envelope(there=False), timeout=0.5)
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        with pytest.raises(grpc.RpcError) as caught:  # nothing of it was agreed on there
            liar.send_by_grpcio(envelope())
        refused = grpc.StatusCode.UNKNOWN if asyncio_server else grpc.StatusCode.INVALID_ARGUMENT
        assert caught.value.code() is refused
        assert honest.unary_unary("/t/m")(b"x") == b"x"


@contextlib.contextmanager
def served(wire: str, by_asyncio: bool) -> Iterator[Callable[[], Any]]:
    """Yields a function that makes channels to a server, which gives back its requests."""
    keywords: dict[str, Any] = {"transports": (wire,), "runtime": True}
    if not by_asyncio:
        with contextlib.closing(between(wire)) as ends:
            ends.methods = {"/t/m": UU(lambda request, context: request)}
            ends.serve()
            yield ends.channel
        return
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    async def start() -> tuple[Any, int]:
        server = rpc.aio.server(**keywords)
        server.add_generic_rpc_handlers((Methods({"/t/m": UU(lambda request, context: request)}),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        return server, port

    server, port = asyncio.run_coroutine_threadsafe(start(), loop).result(LONG_S)
    with contextlib.ExitStack() as channels:
        yield lambda: channels.enter_context(attached_channel(f"127.0.0.1:{port}", **keywords))
    asyncio.run_coroutine_threadsafe(server.stop(None), loop).result(LONG_S)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(LONG_S)
    loop.close()


@pytest.mark.parametrize("wire", ["shm", "tcp"])
@pytest.mark.slow
def test_in_event_loops(wire: str, pushed: list[int]) -> None:
    """Both ends are loops, in which arrays are placed first."""

    async def method(request: Any, context: Any) -> Any:
        return rpc.pack(rpc.unpack(request) + 1)

    async def methods(requests: Any, context: Any) -> Any:
        async for each in requests:
            yield rpc.pack(rpc.unpack(each) + 1)

    async def main() -> None:
        keywords: dict[str, Any] = {
            "transports": (wire,), "runtime": True, "options": UNLIMITED,
        }  # fmt: skip
        server = rpc.aio.server(**keywords)
        handlers = {"/t/m": UU(method, **OF_TENSORS), "/t/ss": SS(methods, **OF_TENSORS)}
        server.add_generic_rpc_handlers((Methods(handlers),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        async with rpc.aio.insecure_channel(f"127.0.0.1:{port}", **keywords) as channel:
            await channel.attach()
            call = channel.unary_unary("/t/m", *FROM_TENSORS)
            await call(rpc.pack(numbers(8)))
            for size in (PUSHED_BYTES, LONG, 40 << 20):
                answers = await asyncio.gather(
                    *(call(rpc.pack(numbers(size, first))) for first in range(4))
                )
                for first, answer in enumerate(answers):
                    np.testing.assert_array_equal(rpc.unpack(answer), numbers(size, first + 1))
            del answers, answer
            assert not pushed  # other tasks might change them meanwhile
            stream = channel.stream_stream("/t/ss", *FROM_TENSORS)
            sent = [numbers(LONG, first) for first in range(4)]
            count = 0
            async for answer in stream(rpc.pack(each) for each in sent):
                np.testing.assert_array_equal(rpc.unpack(answer), sent[count] + 1)
                count += 1
            assert count == 4
            with pytest.raises(grpc.RpcError):
                await call(rpc.pack(numbers(64 << 20)), timeout=0.002)
            await call(rpc.pack(numbers(LONG)))
            del answer
        await server.stop(None)

    asyncio.run(main())
    tensors._lent.clear()
    gc.collect()
    wait_for(lambda: tensors.held_tensors() == 0)
