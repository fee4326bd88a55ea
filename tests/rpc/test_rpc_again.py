"""Requests that are sent again, by us or by grpcio: as they were, as often as grpcio sends them."""

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from ends import EVERYTHING, RUNTIME_SHM, SHM, Ends, System

from tensorwire import rpc
from tensorwire.rpc.payload import push
from tensorwire.rpc.payload.push import Push
from tensorwire.rpc.threads import methods

POLICY = {
    "maxAttempts": 3,
    "initialBackoff": "0.02s",
    "maxBackoff": "0.1s",
    "backoffMultiplier": 1,
    "retryableStatusCodes": ["UNAVAILABLE"],
}
RETRIES = (
    "grpc.service_config",
    json.dumps({"methodConfig": [{"name": [{}], "retryPolicy": POLICY}]}),
)


def joined(requests: Iterator[bytes], _: Any) -> bytes:
    return b"".join(requests)


def forget_attachments(ends: Ends) -> None:
    """The server refuses what goes ahead; what it has forgotten is closed with the rest."""
    attachments = ends.server._registry._attachments
    until = time.monotonic() + 10
    while not attachments and time.monotonic() < until:
        time.sleep(0.01)
    assert attachments
    known = dict(attachments)
    attachments.clear()
    ends.closing.insert(0, lambda: attachments.update(known))


def test_a_request_that_is_changed_behind_its_call_is_sent_again_as_it_was(ends: Ends) -> None:
    """Over a method of another arity, which the runtime leaves to grpcio."""
    ends.methods = {"/t/m": grpc.stream_unary_rpc_method_handler(joined)}
    channel = ends.serve().channel()
    call = channel.unary_unary("/t/m", request_serializer=lambda message: bytes(message))
    call(bytearray(b"warm"))
    for size in (5, 300_000):
        message = bytearray(b"a" * size)
        future = call.future(message, timeout=10)
        message[:] = b"b" * size
        assert future.result() == b"a" * size


@pytest.mark.parametrize("arity", ["future", "stream"])
def test_a_request_that_is_refused_and_sent_again_is_as_it_was(arity: str) -> None:
    """By a server that does not know the attachment any more."""
    ends = Ends(System("shm", SHM, SHM))
    ends.methods = {
        "/t/one": grpc.unary_unary_rpc_method_handler(lambda request, _: request),
        "/t/many": grpc.unary_stream_rpc_method_handler(lambda request, _: iter([request])),
    }
    channel = ends.serve().channel()
    one = channel.unary_unary("/t/one", request_serializer=bytes)
    many = channel.unary_stream("/t/many", request_serializer=bytes)
    one(bytearray(b"warm"))
    forget_attachments(ends)
    message = bytearray(b"a" * 1000)
    if arity == "future":
        future = one.future(message, timeout=10)
        message[:] = b"b" * 1000
        assert future.result() == b"a" * 1000
    else:
        responses = many(message, timeout=10)
        message[:] = b"b" * 1000
        assert list(responses) == [b"a" * 1000]
    ends.close()


@pytest.mark.parametrize("size", [10, 300_000])
@pytest.mark.parametrize(
    "ours", [None, {}, {"limits": rpc.Limits(threshold_bytes=EVERYTHING)}, {"runtime": True}]
)
def test_a_retry_policy_means_what_it_means_in_grpcio(size: int, ours: Any) -> None:
    """The buffer of grpcio for sending again has 256 KiB, so that a long request is sent once."""
    ends = Ends(System("", ours, ours))
    runs: list[int] = []

    def fail_once(context: Any, size: int) -> bytes:
        runs.append(size)
        if len(runs) == 1:
            context.abort(grpc.StatusCode.UNAVAILABLE, "no")
        return b"ok"

    ends.methods = {
        "/t/one": grpc.unary_unary_rpc_method_handler(lambda r, c: fail_once(c, len(r))),
        "/t/many": grpc.stream_unary_rpc_method_handler(
            lambda requests, c: fail_once(c, sum(map(len, requests)))
        ),
    }
    channel = ends.serve().channel(options=[RETRIES])
    calls = (
        lambda: channel.unary_unary("/t/one")(bytes(size), timeout=10),
        lambda: channel.stream_unary("/t/many")(iter([bytes(size)]), timeout=10),
    )
    for call in calls:
        runs.clear()
        if size == 10:
            assert call() == b"ok"
            assert runs == [size, size]
        else:
            with pytest.raises(grpc.RpcError) as caught:
                call()
            assert (caught.value.code(), caught.value.details()) == (
                grpc.StatusCode.UNAVAILABLE,
                "no",
            )
            assert runs == [size]
    ends.close()


def unserializable(port: int) -> Exception:
    """Returns the error of grpcio for a request that cannot be serialized."""
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        try:
            channel.unary_unary("/t/one", request_serializer=lambda _: 1 / 0)(b"")
        except grpc.RpcError as error:
            return error
    raise AssertionError


@pytest.mark.parametrize("raised", ["by grpcio", "by anything else"])
def test_a_request_that_cannot_be_sent_again_ends_its_future(
    monkeypatch: pytest.MonkeyPatch, raised: str
) -> None:
    """And a callback that raises keeps no other from being called."""
    ends = Ends(System("shm", SHM, SHM))
    ends.methods = {"/t/one": grpc.unary_unary_rpc_method_handler(lambda request, _: request)}
    call = ends.serve().channel().unary_unary("/t/one")
    call(b"warm")
    by_grpcio = raised == "by grpcio"
    error = unserializable(ends.port) if by_grpcio else RuntimeError("no memory, for example")
    forget_attachments(ends)

    def fail(*_: Any) -> Any:
        raise error

    monkeypatch.setattr(methods, "as_sent", fail)
    future = call.future(bytes(1000), timeout=10)
    called = threading.Event()
    with contextlib.suppress(ZeroDivisionError):  # where it is over already
        future.add_done_callback(lambda _: 1 / 0)
    future.add_done_callback(lambda _: called.set())
    with pytest.raises(grpc.RpcError) as caught:
        future.result(timeout=5)
    internal = caught.value.code() is grpc.StatusCode.INTERNAL
    assert internal == by_grpcio  # else what the first attempt says
    assert called.wait(5)
    ends.close()


@pytest.mark.parametrize("stream", [False, True])
def test_a_sender_that_stands_still_for_long(monkeypatch: pytest.MonkeyPatch, stream: bool) -> None:
    """A debugger, or a machine that sleeps: its message is not one that lies."""
    monkeypatch.setattr(push, "STALLED_S", 0.2)
    stage = Push.run

    def stage_late(self: Push, needed: Any) -> Any:
        time.sleep(0.8)
        return stage(self, needed)

    ends = Ends(System("", RUNTIME_SHM, RUNTIME_SHM))
    runs: list[int] = []

    def count(request: bytes, _: Any) -> bytes:  # after the end of a stream
        runs.append(len(request))
        return b"ok"

    ends.methods = {
        "/t/one": grpc.unary_unary_rpc_method_handler(count),
        "/t/many": grpc.stream_unary_rpc_method_handler(lambda r, c: count(b"".join(r), c)),
    }
    options = [("grpc.max_receive_message_length", -1)]
    channel = ends.serve(options=options).channel()
    one, many = channel.unary_unary("/t/one"), channel.stream_unary("/t/many")
    assert one(b"warm") == b"ok"
    monkeypatch.setattr(Push, "run", stage_late)
    runs.clear()
    if stream:
        with pytest.raises(grpc.RpcError) as caught:
            many(iter([bytes(3_000_000)]), timeout=20)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert runs == []
    else:
        assert one(bytes(3_000_000), timeout=20) == b"ok"
        assert runs == [3_000_000]
    ends.close()


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_requests_that_break_off_do_not_look_complete(transport: str) -> None:
    """One is longer than may be: the servicer's iterator raises, or it would store a part.

    In grpcio it depends on which thread comes first.
    """
    ours = {"transports": (transport,), "runtime": True}
    ends = Ends(System("", ours, ours))
    ended: list[str] = []
    over = threading.Event()

    def take(requests: Iterator[bytes], _: Any) -> bytes:
        try:
            for _ in requests:
                pass
            ended.append("complete")
        except grpc.RpcError:
            ended.append("broken off")
            raise
        finally:
            over.set()
        return b""

    def requests() -> Iterator[bytes]:
        yield b"1"
        time.sleep(0.1)  # the servicer waits for the next one
        yield bytes(2000)
        time.sleep(0.1)
        yield b"3"

    ends.methods = {
        "/t/m": grpc.stream_unary_rpc_method_handler(take),
        "/t/warm": grpc.unary_unary_rpc_method_handler(lambda request, _: request),
    }
    channel = ends.serve(options=[("grpc.max_receive_message_length", 1000)]).channel()
    channel.unary_unary("/t/warm")(b"")
    with pytest.raises(grpc.RpcError) as caught:
        channel.stream_unary("/t/m")(requests(), timeout=10)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert over.wait(10)
    assert ended == ["broken off"]
    ends.close()


OF_GRPC = ("te", "content-type", "content-length", "lb-cost-bin", "x-envoy-peer-metadata")
OF_SERVERS = (*OF_GRPC, "grpc-status", "grpc-message", "grpc-encoding", "grpc-tags-bin")


def entry(key: str) -> tuple[str, Any]:
    return key, b"0" if key.endswith("-bin") else "0"


def test_metadata_that_grpc_takes_for_its_own_reach_nobody(ends: Ends) -> None:
    seen: list[str] = []

    def answer(request: bytes, context: Any) -> bytes:
        found = dict(context.invocation_metadata())
        assert found["user-agent"] != "0"
        seen.extend(found)
        context.send_initial_metadata([entry("a"), *map(entry, OF_SERVERS)])
        context.set_trailing_metadata([entry("b"), *map(entry, OF_SERVERS)])
        return request

    ends.methods = {"/t/m": grpc.unary_unary_rpc_method_handler(answer)}
    method = ends.serve().channel().unary_unary("/t/m")
    sent = [entry("c"), *map(entry, OF_GRPC), ("user-agent", "0")]
    for _ in range(2):
        seen.clear()
        _, call = method.with_call(b"abc", metadata=sent, timeout=10)
        assert "c" in seen
        keys = {key for key, _ in (*call.initial_metadata(), *call.trailing_metadata())}
        assert {"a", "b"} <= keys
        assert not {*seen, *keys} & set(OF_SERVERS)
