"""A hundred thousand calls of every kind and end, over four ways, leave nothing behind."""

import contextlib
import gc
import os
import random
import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

grpc = pytest.importorskip("grpc")

from ends import Methods, attached_channel  # noqa: E402
from test_rpc_conformance import wait_for  # noqa: E402

from tensorwire import rpc  # noqa: E402
from tensorwire.rpc.payload import tensors  # noqa: E402
from tensorwire.testing.leaks import Footprint  # noqa: E402

CALLS = int(os.environ.get("CALLS", "25000"))  # of each of the four
THREADS = 4
LARGE = b"x" * 20_000
OPTIONS: Any = {"limits": rpc.Limits(threshold_bytes=10_000)}
MOST_GROWTH_BYTES = 8 << 20  # an object of Python that each call leaves would be more


def anonymous_bytes() -> int:
    """Returns the bytes of memory of this process that are of no file."""
    gc.collect()
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Anonymous:"):
            return int(line.split()[1]) << 10
    raise AssertionError("the kernel does not tell")


def wait_until_ended(request: bytes, context: Any) -> bytes:
    ended = threading.Event()
    if context.add_callback(ended.set):
        ended.wait(30)
    return request


METHODS = Methods(
    {
        "/t/uu": grpc.unary_unary_rpc_method_handler(lambda request, context: request),
        "/t/us": grpc.unary_stream_rpc_method_handler(lambda request, context: iter([request] * 3)),
        "/t/su": grpc.stream_unary_rpc_method_handler(lambda every, context: list(every)[-1]),
        "/t/ss": grpc.stream_stream_rpc_method_handler(lambda every, context: every),
        "/t/abort": grpc.unary_unary_rpc_method_handler(
            lambda request, context: context.abort(grpc.StatusCode.ABORTED, "as asked")
        ),
        "/t/hang": grpc.unary_unary_rpc_method_handler(wait_until_ended),
    }
)


def call_of(channel: Any, kind: str) -> Callable[[bytes], None]:
    """Makes a call of this kind, and checks its end."""
    if kind == "unary":
        unary = channel.unary_unary("/t/uu")

        def run(message: bytes) -> None:
            assert unary(message) == message

    elif kind == "streams":
        out, back, both = (
            channel.unary_stream("/t/us"),
            channel.stream_unary("/t/su"),
            channel.stream_stream("/t/ss"),
        )

        def run(message: bytes) -> None:
            assert list(out(message)) == [message] * 3
            assert back(iter([b"", message])) == message
            assert list(both(iter([message, b""]))) == [message, b""]

    elif kind == "abort":
        abort = channel.unary_unary("/t/abort")

        def run(message: bytes) -> None:
            with pytest.raises(grpc.RpcError) as caught:
                abort(message)
            assert caught.value.code() is grpc.StatusCode.ABORTED

    elif kind == "cancel":
        hang = channel.unary_unary("/t/hang")

        def run(message: bytes) -> None:
            call = hang.future(message)
            call.cancel()
            assert call.code() is grpc.StatusCode.CANCELLED

    else:
        late = channel.unary_unary("/t/hang")

        def run(message: bytes) -> None:
            with pytest.raises(grpc.RpcError) as caught:
                late(message, timeout=0.002)
            assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED

    return run


# Of a thousand calls; streams are three each.
SHARES = {"unary": 940, "streams": 10, "abort": 10, "cancel": 10, "deadline": 10}
LARGE_ONE_IN = 12


def run(channel: Any, calls: int) -> None:
    """Makes so many calls, in an order of its own in each thread."""
    kinds = {kind: call_of(channel, kind) for kind in SHARES}

    def work(seed: int) -> None:
        drawn = random.Random(seed)
        for kind in drawn.choices(list(SHARES), SHARES.values(), k=calls // THREADS):
            large = drawn.randrange(LARGE_ONE_IN) == 0
            kinds[kind](LARGE if large else b"abc")

    with ThreadPoolExecutor(THREADS) as pool:
        for each in [pool.submit(work, seed) for seed in range(THREADS)]:
            each.result()


@contextlib.contextmanager
def connected(transport: str, runtime: bool) -> Iterator[Any]:
    """A channel to a server of this process."""
    options = {**OPTIONS, "transports": (transport,), "runtime": runtime}
    with ThreadPoolExecutor(8) as pool:
        server = rpc.server(pool, **options)
        server.add_generic_rpc_handlers((METHODS,))
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        with attached_channel(f"127.0.0.1:{port}", **options) as channel:
            channel.unary_unary("/t/uu")(LARGE)
            assert channel.attachment.transport == transport
            assert (channel.runtime == transport) == runtime
            yield channel
        server.stop(0).wait()
    wait_for(lambda: tensors.held_tensors() == 0)


def grown(before: Footprint) -> list[str]:
    """Returns the growth since a footprint. Threads of grpcio's own pools come and go."""
    gc.collect()
    own = re.compile(r"threads: .*\((event_engine|grpc_|resolver|timer)")
    return [line for line in Footprint.now().growth(before) if not own.match(line)]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("runtime", [False, True], ids=["grpcio", "runtime"])
def test_nothing_is_left_of_many_calls(transport: str, runtime: bool) -> None:
    with connected(transport, runtime) as channel:  # what a process has once, it has now
        run(channel, 1000)
    del channel  # a closed one keeps a mapping for as long as it is there
    gc.collect()
    before = Footprint.now()
    with connected(transport, runtime) as channel:
        run(channel, CALLS // 5)
        memory = anonymous_bytes()
        run(channel, CALLS)
        assert anonymous_bytes() - memory < MOST_GROWTH_BYTES
    del channel
    deadline = time.monotonic() + 10
    while left := grown(before):
        assert time.monotonic() < deadline, left
        time.sleep(0.05)
