"""The payload that travels ahead, the messages that must not, and that all memory comes back."""

import _thread
import copy
import dataclasses
import gc
import pickle
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import numpy as np
import pytest
from ends import ALONE, SHM, TCP, Methods, attached_channel, serving
from google.protobuf import any_pb2, json_format
from google.protobuf.message import EncodeError
from test_rpc_conformance import SS, SU, US, UU, echo, echo_all, wait_for

from tensorwire import StaleHandleError, rpc
from tensorwire.rpc import logs
from tensorwire.rpc.attach.terms import MARK, OPEN
from tensorwire.rpc.payload import envelope as envelopes
from tensorwire.rpc.payload import outgoing, tensors
from tensorwire.rpc.payload.inbox import Landed
from tensorwire.rpc.payload.janitor import Janitor
from tensorwire.rpc.tensor_pb2 import NEVER_SET

BIG = bytes(range(256)) * 4096  # 1 MiB
UNLIMITED = [("grpc.max_receive_message_length", -1)]
TENSORS = {
    "request_deserializer": rpc.Tensor.FromString,
    "response_serializer": rpc.Tensor.SerializeToString,
}


@pytest.fixture(params=[SHM, TCP], ids=["shm", "tcp"])
def options(request: pytest.FixtureRequest) -> dict[str, Any]:
    return {**request.param, "limits": rpc.Limits(threshold_bytes=1000)}


@pytest.fixture
def serve(options: dict[str, Any]) -> Iterator[Callable[..., Any]]:
    with serving() as start:

        def of_ours(methods: dict[str, Any], **more: Any) -> Any:
            given = {**options, **more}
            return start(rpc.server(ThreadPoolExecutor(8), options=UNLIMITED, **given), methods)

        yield of_ours


def connect(server: Any, keywords: dict[str, Any], **more: Any) -> Any:
    given = {"options": UNLIMITED, **keywords, **more}
    return attached_channel(f"127.0.0.1:{server.port}", **given)


def tensor_call(channel: Any, method: str = "/t/m") -> Any:
    return channel.unary_unary(method, rpc.Tensor.SerializeToString, rpc.Tensor.FromString)


def moved(end: Any) -> int:
    """Bytes that an end has written into the memory of the other."""
    return int(end._node.stats()["bytes_written"])


def nothing_is_left(channel: Any, server: Any) -> bool:
    ends = [channel.attachment, *server.attachments]
    return (
        all(each.leases_there.used == each.leases_here.held == 0 for each in ends)
        and tensors.held_tensors() == tensors.lent_arrays() == 0
    )


def test_large_payload_goes_ahead_both_ways(serve: Any, options: dict[str, Any]) -> None:
    lengths = []

    class Notes(grpc.ServerInterceptor):  # type: ignore[misc]
        def intercept_service(self, continuation: Any, details: Any) -> Any:
            handler = continuation(details)
            return UU(handler.unary_unary, lambda data: (lengths.append(len(data)), data)[1])

    server = serve({"/t/m": UU(echo)}, interceptors=[Notes()])
    with connect(server, options) as channel:
        call = channel.unary_unary("/t/m")
        assert call(b"small") == b"small"
        small = moved(channel.attachment)
        assert call(BIG) == BIG
        assert moved(channel.attachment) - small >= len(BIG)
        assert moved(server.attachments[0]) >= len(BIG)
        assert channel.payload == options["transports"][0]
        assert lengths == [5, len(BIG)]
        wait_for(lambda: nothing_is_left(channel, server))


def test_more_than_grpc_allows_in_a_message(serve: Any, options: dict[str, Any]) -> None:
    server = serve({"/t/m": UU(echo)})
    message = bytes(9 << 20)
    target = f"127.0.0.1:{server.port}"
    with attached_channel(target, **options) as channel:
        assert channel.unary_unary("/t/m")(message) == message


def test_arrays_are_messages(serve: Any, options: dict[str, Any]) -> None:
    kept = []

    def method(request: Any, context: Any) -> Any:
        array = rpc.unpack(request)
        kept.append(array)
        return rpc.pack(array + array)

    server = serve({"/t/m": UU(method, **TENSORS)})
    with connect(server, options) as channel:
        call = tensor_call(channel)
        for dtype in ("float32", "int8", "complex128", "bool", ">i4"):
            sent = np.arange(60000).reshape(3, 4, 5000).astype(dtype)
            answer = call(rpc.pack(sent))
            assert answer.data == b""
            got = rpc.unpack(answer)
            assert got.dtype == sent.dtype.newbyteorder("=")
            assert got.flags.writeable
            np.testing.assert_array_equal(got, sent + sent)
            got[0] = 0  # it is ours
        assert tensors.lent_arrays() == 0
        assert server.attachments[0].leases_here.held == 5
        del got, answer
        kept.clear()
        wait_for(lambda: nothing_is_left(channel, server))


@pytest.mark.parametrize("shape", [(), (0, 3), (1,), (7, 1)])
def test_small_arrays_travel_inside(serve: Any, options: dict[str, Any], shape: Any) -> None:
    server = serve({"/t/m": UU(lambda r, c: rpc.pack(rpc.unpack(r) + 1), **TENSORS)})
    with connect(server, options) as channel:
        sent = np.full(shape, 3, "float64")
        got = rpc.unpack(tensor_call(channel)(rpc.pack(sent)))
        assert got.shape == shape
        assert got.flags.writeable
        np.testing.assert_array_equal(got, sent + 1)


@pytest.mark.parametrize("ours", ["channel", "server"])
def test_arrays_with_a_plain_peer(options: dict[str, Any], ours: str) -> None:
    """The plain peer finds the elements in `data`, and no ticket of ours."""
    seen = []

    def method(request: Any, context: Any) -> Any:
        seen.append((len(request.data), request.held.ticket))
        return rpc.pack(rpc.unpack(request) + 1) if ours == "server" else request

    server = (
        rpc.server(ThreadPoolExecutor(2), options=UNLIMITED, **options)
        if ours == "server"
        else grpc.server(ThreadPoolExecutor(2), options=UNLIMITED)
    )
    server.add_generic_rpc_handlers((Methods({"/t/m": UU(method, **TENSORS)}),))
    target = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    sent = np.arange(1 << 18, dtype="float32")
    if ours == "channel":
        with attached_channel(target, options=UNLIMITED, **options) as channel:
            got = rpc.unpack(tensor_call(channel)(rpc.pack(sent)))
            assert channel.payload == "inside: the server has no tensorwire"
    else:
        with grpc.insecure_channel(target, options=UNLIMITED) as channel:
            answer = tensor_call(channel)(rpc.Tensor(
                dtype="float32", shape=[1 << 18], data=(sent - 1).tobytes()
            ))  # fmt: skip
            assert answer.held.ticket == 0
            got = np.frombuffer(answer.data, answer.dtype)
    np.testing.assert_array_equal(got, sent)
    assert seen == [(sent.nbytes, 0)]
    assert tensors.lent_arrays() == 0
    server.stop(0).wait()


def test_an_array_keeps_its_memory(serve: Any, options: dict[str, Any]) -> None:
    server = serve({"/t/m": UU(lambda r, c: rpc.pack(np.full(5000, 7, "int64")), **TENSORS)})
    with connect(server, options) as channel:
        views = [rpc.unpack(tensor_call(channel)(rpc.Tensor()))[10:] for _ in range(3)]
        time.sleep(0.2)  # some turns of the janitor
        assert channel.attachment.leases_here.held == 3
        assert all((view == 7).all() for view in views)
    gc.collect()
    assert all((view == 7).all() for view in views)  # also when the channel is closed


def test_a_message_keeps_its_memory_and_a_copy_does_not(
    serve: Any, options: dict[str, Any]
) -> None:
    server = serve({"/t/m": UU(lambda r, c: rpc.pack(np.ones(5000)), **TENSORS)})
    with connect(server, options) as channel:
        answer = tensor_call(channel)(rpc.Tensor())
        copied = rpc.Tensor()
        copied.CopyFrom(answer)
        time.sleep(0.2)
        assert rpc.unpack(copied).sum() == rpc.unpack(answer).sum() == 5000
        del answer
        wait_for(lambda: nothing_is_left(channel, server))
        with pytest.raises(StaleHandleError, match="gone"):
            rpc.unpack(copied)


def test_what_arrived_does_not_leave_without_its_arrays(
    serve: Any, options: dict[str, Any]
) -> None:
    """Serializing fails at once, so that missing bytes are not found only by their reader."""
    server = serve({"/t/m": UU(lambda r, c: rpc.pack(np.ones(5000)), **TENSORS)})
    with connect(server, options) as channel:
        answer = tensor_call(channel)(rpc.Tensor())
        assert not answer.data
        for each in (answer, copy.deepcopy(answer)):
            for make in (
                rpc.Tensor.SerializeToString,
                any_pb2.Any().Pack,
                json_format.MessageToJson,
                json_format.MessageToDict,
            ):
                with pytest.raises((EncodeError, TypeError), match=r"tensorwire.rpc.embed"):
                    make(each)
        inside = rpc.embed(answer)
        assert rpc.unpack(rpc.Tensor.FromString(inside.SerializeToString())).sum() == 5000
        assert json_format.MessageToDict(inside)["data"]
    to_be_sent = rpc.pack(np.ones(3), owner=server)
    with (
        grpc.insecure_channel("127.0.0.1:1") as plain,
        pytest.raises(grpc.RpcError, match="Exception serializing request!"),
    ):
        tensor_call(plain)(to_be_sent, timeout=20)
    tensors._lent.clear()


def test_pickles_have_the_arrays(serve: Any, options: dict[str, Any]) -> None:
    server = serve({"/t/m": UU(lambda r, c: rpc.pack(np.ones(5000)), **TENSORS)})
    with connect(server, options) as channel:
        answer = tensor_call(channel)(rpc.Tensor())
        deep, shallow = copy.deepcopy(answer), copy.copy(answer)
        pickled = pickle.dumps(answer), pickle.dumps({"a": [deep]})
        del answer
        gc.collect()  # errors of another test, and with them its messages
        wait_for(lambda: nothing_is_left(channel, server))
        for kept in (pickle.loads(pickled[0]), pickle.loads(pickled[1])["a"][0], shallow):
            assert rpc.unpack(kept).sum() == 5000
        with pytest.raises(StaleHandleError, match="gone"):
            pickle.dumps(deep)


@pytest.mark.parametrize("runtime", [False, True])
def test_serializers_of_ones_own(serve: Any, options: dict[str, Any], runtime: bool) -> None:
    """Which protobuf would refuse a message whose arrays travel beside it."""
    own = {
        "request_deserializer": lambda data: rpc.Tensor.FromString(data),
        "response_serializer": lambda message: message.SerializeToString(),
    }
    server = serve({"/t/m": UU(lambda r, c: rpc.pack(rpc.unpack(r) + 1), **own)}, runtime=runtime)
    with connect(server, options, runtime=runtime) as channel:
        call = channel.unary_unary("/t/m", own["response_serializer"], own["request_deserializer"])
        for _ in range(2):
            assert rpc.unpack(call(rpc.pack(np.ones(5000)))).sum() == 10_000
        assert moved(channel.attachment) > 0


def test_a_tensor_with_an_owner_is_sent_again(serve: Any, options: dict[str, Any]) -> None:
    class Model:
        pass

    model = Model()
    weights = rpc.pack(np.arange(5000.0), owner=model)
    server = serve({"/t/m": UU(lambda r, c: weights, **TENSORS)})
    with connect(server, options) as channel:
        for _ in range(3):
            assert rpc.unpack(tensor_call(channel)(rpc.Tensor()))[-1] == 4999
        del model
        gc.collect()
        with pytest.raises(grpc.RpcError) as caught:
            tensor_call(channel)(rpc.Tensor())
        assert caught.value.details() == "Failed to serialize response!"


def test_arrays_that_are_too_long_for_protobuf(
    serve: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The arrays travel beside the message alone; where they cannot, the log says so."""
    monkeypatch.setattr(outgoing, "MOST_BYTES", 4999 * 8)
    server = serve({"/t/m": UU(lambda r, c: rpc.Tensor(), **TENSORS)})
    with connect(server, {"limits": rpc.Limits(threshold_bytes=1)}) as channel:
        assert tensor_call(channel)(rpc.pack(np.ones(5000))) == rpc.Tensor()
    with connect(server, {"transports": ()}) as channel, pytest.raises(grpc.RpcError) as caught:
        tensor_call(channel)(rpc.pack(np.ones(5000)))
    assert caught.value.details() == "Exception serializing request!"
    assert logs.wait(20)
    assert "takes more pool_bytes at the receiver" in caplog.text
    tensors.delivered(list(tensors._lent))


def test_a_tensor_without_owner_is_sent_once_well(
    serve: Any, options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    tries = []

    def method(request: Any, context: Any) -> Any:
        tries.append(rpc.unpack(request).sum())
        if len(tries) < 3:
            context.abort(grpc.StatusCode.UNAVAILABLE, "not now")
        return rpc.Tensor()

    server = serve({"/t/m": UU(method, **TENSORS)})
    with connect(server, options) as channel:
        call, message = tensor_call(channel), rpc.pack(np.ones(5000))
        for _ in range(2):  # as an interceptor does that tries again
            with pytest.raises(grpc.RpcError):
                call(message)
        call(message)
        assert tries == [5000] * 3
        with pytest.raises(grpc.RpcError) as caught:
            call(message)
        assert caught.value.details() == "Exception serializing request!"
        assert logs.wait(20)
        assert "Make it with pack(array, owner=...)" in caplog.text


def test_arrays_are_forwarded(serve: Any, options: dict[str, Any]) -> None:
    behind = serve({"/t/m": UU(lambda r, c: rpc.pack(rpc.unpack(r) + 1), **TENSORS)})
    with connect(behind, options) as inner:
        server = serve({"/t/m": UU(lambda r, c: tensor_call(inner)(r), **TENSORS)})
        with connect(server, options) as channel:
            for _ in range(5):
                got = rpc.unpack(tensor_call(channel)(rpc.pack(np.arange(5000))))
                np.testing.assert_array_equal(got, np.arange(1, 5001))
            del got
            wait_for(lambda: nothing_is_left(channel, server))


def test_streams_of_arrays(serve: Any, options: dict[str, Any]) -> None:
    def total(requests: Any, context: Any) -> Any:
        return rpc.pack(sum(rpc.unpack(each).sum() for each in requests))

    def count(request: Any, context: Any) -> Iterator[Any]:
        for number in range(int(rpc.unpack(request))):
            yield rpc.pack(np.full(5000, number))

    methods = {"/t/su": SU(total, **TENSORS), "/t/us": US(count, **TENSORS)}
    server = serve({**methods, "/t/ss": SS(echo_all, **TENSORS)})
    serializers = rpc.Tensor.SerializeToString, rpc.Tensor.FromString
    with connect(server, options) as channel:

        def requests() -> Iterator[Any]:
            return (rpc.pack(np.full(5000, number)) for number in range(20))

        expected = sum(range(20)) * 5000
        before = moved_or_0(channel)
        assert rpc.unpack(channel.stream_unary("/t/su", *serializers)(requests())) == expected
        assert moved(channel.attachment) - before >= 20 * 40_000
        answers = channel.unary_stream("/t/us", *serializers)(rpc.pack(np.array(20)))
        assert sum(rpc.unpack(each).sum() for each in answers) == expected
        answers = channel.stream_stream("/t/ss", *serializers)(requests())
        assert sum(rpc.unpack(each).sum() for each in answers) == expected
        wait_for(lambda: nothing_is_left(channel, server))


def moved_or_0(channel: Any) -> int:
    return 0 if channel.attachment is None else moved(channel.attachment)


def test_a_slow_reader_bounds_memory(serve: Any, options: dict[str, Any]) -> None:
    """Messages that it has not read do not fill its memory, and it gets all of them."""

    def stream(request: bytes, context: Any) -> Iterator[bytes]:
        for number in range(40):
            yield bytes([number]) * (1 << 20)

    server = serve({"/t/m": US(stream)}, limits=rpc.Limits(threshold_bytes=1000, patience_s=30))
    with connect(
        server, options, limits=rpc.Limits(threshold_bytes=1000, pool_bytes=4 << 20)
    ) as channel:
        kept = []
        for answer in channel.unary_stream("/t/m")(b""):
            assert server.attachments[0].leases_there.leased_bytes <= 4 << 20
            kept.append(answer[0])
            time.sleep(0.005)
        assert kept == list(range(40))


@pytest.mark.parametrize("runtime", [False, True])
def test_the_runtime_has_smaller_arrays_go_ahead(
    serve: Callable[..., Any], options: dict[str, Any], runtime: bool
) -> None:
    """Arrays have sizes around the threshold of each transport, which the user has not set.

    By TCP calls of the runtime have payload beside them already below it.
    """
    own = {"limits": rpc.Limits(), "runtime": runtime}
    size = 300_000
    server = serve({"/t/m": UU(lambda request, context: request, **TENSORS)}, **own)
    with connect(server, options, **own) as channel:
        sent = np.arange(size, dtype=np.uint8)
        for _ in range(2):  # the first may still go by grpcio
            answer = rpc.unpack(tensor_call(channel)(rpc.pack(sent)))
            assert (answer == sent).all()
        beside = runtime or options["transports"] == ("shm",)
        assert (channel.attachment.leases_there.leased_bytes > 0) == beside


def test_arrays_that_were_dropped_let_the_same_memory_be_used_again(
    serve: Callable[..., Any], options: dict[str, Any]
) -> None:
    """One piece of memory each way: each end gives back before it sends, also what it sends on."""

    def double(request: Any, context: Any) -> Any:
        array = rpc.unpack(request)
        array *= 2
        return rpc.pack(array)

    server = serve({"/t/m": grpc.unary_unary_rpc_method_handler(double, **TENSORS)})
    with connect(server, options) as channel:
        call = tensor_call(channel)
        for number in range(20):
            answer = rpc.unpack(call(rpc.pack(np.full(30_000, number, np.int16))))
            assert (answer == 2 * number).all()
            del answer
        # A credit by TCP may come after the message that follows it.
        most = 1 if channel.attachment.transport == "shm" else 2
        assert channel.attachment.leases_there.leased_bytes <= most * 65536
        assert server.attachments[0].leases_there.leased_bytes <= most * 65536


def test_an_array_that_a_finalizer_has_looked_at_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """The collector runs while the reference counts of the message are read."""
    kept: list[Any] = []

    class Last:
        def __init__(self, message: Any) -> None:
            self.message, self.circle = message, self

        def __del__(self) -> None:
            kept.append(rpc.unpack(self.message))

    def after_collecting(counted: Any) -> int:
        gc.collect()
        return sys.getrefcount(counted) - 1  # this function has it too

    monkeypatch.setattr(tensors.JANITOR, "watch", lambda watched: None)
    message = rpc.Tensor(dtype="uint8", shape=[8])
    tensors.give_ticket(message, tensors.new_ticket())
    given_back: list[bool] = []
    landed = Landed(memoryview(bytearray(64)), {1: (0, 8)}, given_back.append)
    holding = tensors.Holding(landed, {message.held.ticket: 1}, [message])
    monkeypatch.setattr(tensors, "getrefcount", after_collecting)
    Last(message)
    del message
    assert holding.look()
    assert len(kept) == 1
    assert not given_back
    kept.clear()
    assert not holding.look()
    assert given_back == [True]


@pytest.mark.parametrize("name", ["f4,f4", ",", "i4, (", "(1,2", "object", "f4", ""])
def test_a_name_from_outside_is_no_dtype(name: str) -> None:
    """Whatever numpy makes of it, which evaluates some."""
    with pytest.raises(TypeError, match="no dtype"):
        rpc.unpack(rpc.Tensor(dtype=name, shape=[1], data=bytes(4)))


def test_a_finalizer_makes_an_array_in_the_thread_that_gives_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The thread that starts the janitor's waits for it to have begun meanwhile."""
    janitor, done = Janitor(), threading.Event()

    class Nothing:
        def look(self) -> bool:
            return False

    def start(thread: threading.Thread) -> None:
        begun = threading.Event()
        _thread.start_new_thread(lambda: (janitor.watch(Nothing()), begun.set()), ())
        assert begun.wait(20)
        done.set()

    monkeypatch.setattr(threading.Thread, "start", start)
    janitor.watch(Nothing())
    assert done.is_set()


def test_a_mask_is_not_left_behind() -> None:
    with pytest.raises(TypeError, match="has a mask"):
        rpc.pack(np.ma.masked_array([1, 2], [False, True]))


def test_a_call_is_made_while_memory_is_given_back(
    serve: Callable[..., Any], options: dict[str, Any]
) -> None:
    """By a handler of a signal, or a finalizer, in the thread that does that."""
    server = serve({"/t/m": UU(echo, **TENSORS)})
    with connect(server, options) as channel:
        call = tensor_call(channel)
        sums = []

        def add() -> None:
            sums.append(rpc.unpack(call(rpc.pack(np.ones(10_000)))).sum())

        add()
        inbox = channel.attachment.leases_here
        tell, nested = inbox._tell, []

        def interrupted(slot: int, turn: int) -> None:
            if not nested:
                nested.append(True)
                add()
            tell(slot, turn)

        inbox._tell = interrupted
        thread = threading.Thread(target=lambda: [add() for _ in range(5)], daemon=True)
        thread.start()
        thread.join(20)
        assert (len(sums), set(sums)) == (7, {10_000.0})
        assert nested
        wait_for(lambda: nothing_is_left(channel, server))


def test_a_word_never_falls(serve: Callable[..., Any], options: dict[str, Any]) -> None:
    """Memory is given back late, after the sender has used its slot otherwise, or twice."""
    server = serve({"/t/m": UU(echo, **TENSORS)})
    with connect(server, options) as channel:
        call = tensor_call(channel)
        assert rpc.unpack(call(rpc.pack(np.ones(10_000)))).sum() == 10_000
        wait_for(lambda: nothing_is_left(channel, server))
        inbox = server.attachments[0].leases_here
        given_back = channel.attachment.leases_there._given_back
        ((slot, turn),) = inbox._turns.items()
        inbox._give_back(slot, turn, True)
        inbox._held.add((slot, turn - 1))
        inbox._give_back(slot, turn - 1, True)
        assert inbox.held == 0
        call(rpc.pack(np.ones(100)))
        assert given_back[slot] == turn


def test_without_credits_messages_travel_inside(serve: Any, options: dict[str, Any]) -> None:
    server = serve({"/t/m": UU(lambda r, c: rpc.pack(np.ones(100_000)), **TENSORS)},
                   limits=rpc.Limits(threshold_bytes=1000, patience_s=0.05))  # fmt: skip
    with connect(
        server, options, limits=rpc.Limits(threshold_bytes=1000, pool_bytes=2 << 20)
    ) as channel:
        held = [rpc.unpack(tensor_call(channel)(rpc.Tensor())) for _ in range(5)]
        assert [each.sum() for each in held] == [100_000] * 5
        assert server.attachments[0].leases_there.used == 2


def test_memory_of_short_messages_makes_room_for_a_long_one(
    serve: Any, options: dict[str, Any]
) -> None:
    """Named for a bug: the receiver kept what the sender had freed, and had no other memory."""
    together, count = threading.Barrier(4, timeout=20), [0]

    def method(request: Any, context: Any) -> Any:
        if rpc.unpack(request).nbytes == 1 << 20:
            together.wait()
        count[0] += rpc.unpack(request).nbytes
        return rpc.Tensor()

    server = serve(
        {"/t/m": UU(method, **TENSORS)}, limits=rpc.Limits(threshold_bytes=1000, pool_bytes=4 << 20)
    )
    with connect(server, options) as channel:
        call = tensor_call(channel)
        call(rpc.pack(np.ones(0)))  # an attachment is there
        short = [call.future(rpc.pack(np.ones(1 << 17))) for _ in range(4)]
        assert all(each.result(20) == rpc.Tensor() for each in short)
        wait_for(lambda: nothing_is_left(channel, server))
        assert channel.attachment.leases_there.leased_bytes >= 4 << 20
        call(rpc.pack(np.ones(1 << 19)))
        assert count == [8 << 20]
        assert channel.attachment.leases_there.leased_bytes == 4 << 20
        assert len(channel.attachment.leases_there.all()) == 1


@pytest.mark.parametrize("how", ["refused", "cancelled", "deadline", "servicer fails"])
def test_memory_comes_back_however_a_call_ends(
    serve: Any, options: dict[str, Any], how: str
) -> None:
    release = threading.Event()

    def method(requests: Any, context: Any) -> Iterator[Any]:
        if how == "servicer fails":
            next(requests)
            raise RuntimeError("a fault")
        yield from requests
        release.wait(20)

    server = serve({"/t/m": SS(method, **TENSORS), "/t/echo": UU(echo)})
    with connect(server, options) as channel:
        channel.unary_unary("/t/echo")(b"")  # an attachment is there, however long that takes
        call = channel.stream_stream("/t/m", rpc.Tensor.SerializeToString, rpc.Tensor.FromString)
        for _ in range(3):
            requests = (rpc.pack(np.ones(5000)) for _ in range(6))
            answers = call(requests, timeout=0.5 if how == "deadline" else None)
            if how != "servicer fails":
                assert rpc.unpack(next(answers)).sum() == 5000
            if how == "cancelled":
                answers.cancel()
            if how == "refused":  # the answers are just not read
                del answers
                gc.collect()
                continue
            with pytest.raises(grpc.RpcError):
                list(answers)
        release.set()
        answers = requests = None
        wait_for(lambda: nothing_is_left(channel, server))


@pytest.mark.timeout(600)
def test_many_calls_leave_nothing(serve: Any, options: dict[str, Any], request: Any) -> None:
    """Also regions: those that are there are used over and over."""
    server = serve({"/t/m": UU(echo, **TENSORS), "/t/b": UU(echo)})
    rounds = request.config.getoption("--rpc-calls") // 2
    message = bytes(2000)
    with connect(server, options) as channel:
        tensor, plain = tensor_call(channel), channel.unary_unary("/t/b")
        for number in range(rounds):
            assert rpc.unpack(tensor(rpc.pack(np.full(1000, number))))[-1] == number
            assert plain(message) == message
        wait_for(lambda: nothing_is_left(channel, server))
        assert channel.attachment.leases_there.leased_bytes <= 64 * 65536
        assert server.attachments[0].leases_there.leased_bytes <= 64 * 65536


# Attachments ---------------------------------------------------------------------


def test_a_restarted_server_is_found_again(options: dict[str, Any]) -> None:
    def start(port: int, ours: bool) -> Any:
        pool = ThreadPoolExecutor(2)
        server = rpc.server(pool, **options) if ours else grpc.server(pool)
        server.add_generic_rpc_handlers((Methods({"/t/m": UU(echo)}),))
        server.port = server.add_insecure_port(f"127.0.0.1:{port}")
        server.start()
        return server

    server = start(0, True)
    with attached_channel(f"127.0.0.1:{server.port}", **options) as channel:
        call = channel.unary_unary("/t/m")
        payloads = []
        for ours in (False, True, False):
            assert call(BIG, wait_for_ready=True) == BIG
            channel.attach(10)
            payloads.append(channel.payload)
            server.stop(0).wait()
            with pytest.raises(grpc.RpcError):
                call(BIG)
            server = start(server.port, ours)
        assert call(BIG, wait_for_ready=True) == BIG
        channel.attach(10)
        payloads.append(channel.payload)
    server.stop(0).wait()
    inside = "inside: the server has no tensorwire"
    transport = options["transports"][0]
    assert payloads == [transport, inside, transport, inside]


class TwoBackends:
    """A load balancer: the second of two servers answers from some moment on.

    Both listen on one port, and the first one goes away for new connections.
    """

    def __init__(self, options: dict[str, Any], second_is_ours: bool, methods: Any) -> None:
        self.calls: list[str] = []
        self.servers = []
        for number, ours in enumerate((True, second_is_ours)):
            pool = ThreadPoolExecutor(4)
            server = rpc.server(pool, **options) if ours else grpc.server(pool, options=UNLIMITED)
            server.add_generic_rpc_handlers((Methods(methods(number)),))
            server.port = server.add_insecure_port("127.0.0.1:0")
            server.start()
            self.servers.append(server)

    @property
    def target(self) -> str:
        return "ipv4:" + ",".join(f"127.0.0.1:{each.port}" for each in self.servers)

    def close(self) -> None:
        for server in self.servers:
            server.stop(0).wait()


@pytest.mark.parametrize("second_is_ours", [True, False], ids=["ours", "plain"])
def test_behind_a_load_balancer(options: dict[str, Any], second_is_ours: bool) -> None:
    """Calls go to two servers in turns; the payload of one is not known to the other."""
    served: list[int] = []

    def methods(number: int) -> dict[str, Any]:
        def noting(request: Any, context: Any) -> Any:
            served.append(number)
            return request

        def noting_stream(requests: Any, context: Any) -> Any:
            served.append(number)
            yield from requests

        def one(request: Any, context: Any) -> Any:
            return iter([noting(request, context)])

        # Protobuf: a server without tensorwire must not take an envelope for a message.
        methods = {"/t/m": UU(noting, **TENSORS), "/t/us": US(one, **TENSORS)}
        return {**methods, "/t/ss": SS(noting_stream, **TENSORS)}

    two = TwoBackends(options, second_is_ours, methods)
    robin = [("grpc.lb_policy_name", "round_robin"), *UNLIMITED]
    serializers = rpc.Tensor.SerializeToString, rpc.Tensor.FromString
    options["limits"] = rpc.Limits(threshold_bytes=1000, patience_s=0.1)
    with attached_channel(two.target, options=robin, **options) as channel:
        grpc.channel_ready_future(channel).result(timeout=20)
        call, array = channel.unary_unary("/t/m", *serializers), np.arange(5000)
        for turn in range(6):  # until the question has met a server of ours
            if channel.attachment is None:
                channel.share.disconnected()
                channel.attach(10)
                for _ in range(turn % 2):
                    channel.inner.unary_unary("/t/m")(b"")
        assert channel.attachment is not None
        served.clear()
        for turn in range(24):
            channel.share.disconnected()  # no pause: each one tries
            message = rpc.pack(array)
            match turn % 4:
                case 0:
                    answer = call(message)
                case 1:
                    answer = call.future(message).result(timeout=20)
                case 2:
                    (answer,) = channel.unary_stream("/t/us", *serializers)(message)
                case 3:
                    (answer,) = channel.stream_stream("/t/ss", *serializers)(iter([message]))
            np.testing.assert_array_equal(rpc.unpack(answer), array)
        assert len(served) == 24  # no servicer ran twice
        assert set(served) == {0, 1}
    two.close()


# Hostile ----------------------------------------------------------------------


class Hostile:
    """A client that has an attachment and says what it likes in it."""

    def __init__(self, server: Any, options: dict[str, Any]) -> None:
        self.channel = connect(server, options, options=[*UNLIMITED, ALONE])
        self.channel.unary_unary("/t/m")(BIG)
        self.attachment = self.channel.attachment
        self.raw = self.channel.inner.unary_unary("/t/m")
        self.lease = self.attachment.leases_there.take(70_000, (3, 1), 1, lambda: True)
        self.good = envelopes.Envelope(
            self.attachment.id,
            self.lease.slot,
            self.lease.serial,
            self.lease.turn,
            ((0, 0, 100),),
            b"",
        )

    def send(self, data: bytes, mark: bytes | None = None) -> Any:
        if mark is None:
            mark = envelopes.mark(self.attachment.id, 3, 1)
        return self.raw(data, metadata=((MARK, mark),))


def forged(good: envelopes.Envelope) -> dict[str, bytes]:
    def but(**changes: Any) -> bytes:
        return envelopes.seal(dataclasses.replace(good, **changes))

    whole = envelopes.seal(good)
    return {
        "attachment": but(attachment=bytes(16)),
        "slot": but(slot=good.slot - 1, serial=good.serial + 1),
        "slot out of range": but(slot=(1 << 32) - 1),
        "serial": but(serial=good.serial + 5),
        "turn 0": but(turn=0),
        "turn of the end": but(turn=(1 << 64) - 1),
        "offset": but(pieces=((0, 1 << 20, 100),)),
        "offset that wraps": but(pieces=((0, (1 << 64) - 50, 100),)),
        "size": but(pieces=((0, 0, 1 << 40),)),
        "twice": but(pieces=((0, 0, 10), (0, 0, 10))),
        "cut off": whole[:-1],
        "header": whole[:20],
        "version": whole[:16] + b"\x09" + whole[17:],
        "too many": whole[:20] + b"\xff\xff\xff\xff" + whole[24:],
        "a body and a piece": but(body=b"x"),
    }


def test_forged_envelopes_are_refused(serve: Any, options: dict[str, Any]) -> None:
    served = []

    def method(request: bytes, context: Any) -> bytes:
        served.append(len(request))
        return request

    server = serve({"/t/m": UU(method)})
    hostile = Hostile(server, options)
    with connect(server, options) as honest:
        for name, data in forged(hostile.good).items():
            with pytest.raises(grpc.RpcError) as caught:
                hostile.send(data)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT, name
            assert honest.unary_unary("/t/m")(BIG) == BIG
        assert set(served) == {len(BIG)}
        whole = envelopes.seal(hostile.good)
        assert len(hostile.send(whole)) > 0
        with pytest.raises(grpc.RpcError) as caught:  # replayed
            hostile.send(whole)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        # Of another attachment, though that is known to the server.
        with pytest.raises(grpc.RpcError) as caught:
            hostile.send(whole, envelopes.mark(honest.attachment.id, 3, 1))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        for mark in (b"x" * 24, envelopes.mark(hostile.attachment.id, 1 << 31, 1)):
            with pytest.raises(grpc.RpcError) as caught:
                hostile.send(whole, mark)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    hostile.channel.close()


def test_a_ticket_from_outside_means_nothing(serve: Any, options: dict[str, Any]) -> None:
    secret = rpc.pack(np.ones(5000), owner=np)
    seen = []

    def method(request: Any, context: Any) -> Any:
        seen.append(request.held.ticket)
        return rpc.Tensor()

    server = serve({"/t/m": UU(method, **TENSORS)})
    message = rpc.Tensor(dtype="float64", shape=[5000], held=secret.held)
    setattr(message.held, NEVER_SET, True)
    with grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        tensor_call(channel)(message)
    tensors.delivered([secret.held.ticket])
    assert seen == [0]
    tensors._lent.clear()


def test_strangers_at_the_reserved_methods(serve: Any, options: dict[str, Any]) -> None:
    server = serve({"/t/m": UU(echo)}, limits=rpc.Limits(threshold_bytes=1000, max_attachments=2))
    with grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        for request in (b"", b"{", b"[]", b"null", b'{"versions": 3}', b"9" * 5000, b"\xff"):
            with pytest.raises(grpc.RpcError) as caught:
                channel.unary_unary(OPEN)(request)
            assert caught.value.code() in (
                grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION
            )  # fmt: skip
    channels = [connect(server, options, options=[*UNLIMITED, ALONE]) for _ in range(3)]
    for each in channels:
        assert each.unary_unary("/t/m")(BIG) == BIG
    assert [each.payload.startswith("inside") for each in channels] == [False, False, True]
    for each in channels:
        each.close()
    wait_for(lambda: server.attachments == [])


def test_a_short_deadline_says_nothing_of_the_server() -> None:
    """A stream that ends before the server can confirm it does not keep later ones inside."""
    slow = threading.Event()

    class Slow(grpc.ServerInterceptor):  # type: ignore[misc]
        def intercept_service(self, continuation: Any, details: Any) -> Any:
            if slow.is_set() and details.method == "/t/m":
                time.sleep(0.3)
            return continuation(details)

    with serving() as start:
        server = rpc.server(ThreadPoolExecutor(4), interceptors=[Slow()], options=UNLIMITED, **SHM)
        start(server, {"/t/m": SS(echo_all)})
        with connect(server, SHM) as channel:
            call = channel.stream_stream("/t/m")
            assert list(call(iter([BIG]))) == [BIG]
            slow.set()
            for timeout in (0.001, 0.01, 0.1):
                with pytest.raises(grpc.RpcError) as caught:
                    list(call(iter([BIG]), timeout=timeout))
                assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
                assert channel.payload == "shm"
            # Here the server had its time, and was silent.
            with pytest.raises(grpc.RpcError):
                list(call(iter([BIG]), timeout=0.6))
            wait_for(lambda: channel.payload.startswith("inside: a call met a server"))
