"""A server or a client in a process of its own, for tests that kill it.

python rpc_serving.py serve KIND TRANSPORT     prints its port, and a line for what it does
python rpc_serving.py call TRANSPORT PORT ARITY PHASE     prints a line when it is in that phase
"""

import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import numpy as np

from tensorwire import rpc

TYPES = rpc.Tensor.SerializeToString, rpc.Tensor.FromString
SIZE = 500_000
OPTIONS: Any = {"limits": rpc.Limits(threshold_bytes=1000)}


def say(*words: object) -> None:
    print(*words, flush=True)


def hang(request: Any, context: Any) -> Any:
    """A servicer that has got its payload and never answers."""
    array = rpc.unpack(request if isinstance(request, rpc.Tensor) else next(request))
    say("in the servicer", array.sum())
    while context.is_active():
        time.sleep(0.01)
    say("call ended")
    return rpc.Tensor()


def hang_after_one(request: Any, context: Any) -> Any:
    yield rpc.pack(np.ones(SIZE))
    hang(request, context)


def echo(request: Any, context: Any) -> Any:
    return rpc.pack(rpc.unpack(request) + 1)


def count(requests: Any, context: Any) -> bytes:
    return b"%d" % sum(1 for _ in requests)


class Methods(grpc.GenericRpcHandler):  # type: ignore[misc]
    def service(self, details: Any) -> Any:
        types = {"request_deserializer": TYPES[1], "response_serializer": TYPES[0]}
        return {
            "/t/uu": grpc.unary_unary_rpc_method_handler(hang, **types),
            "/t/us": grpc.unary_stream_rpc_method_handler(hang_after_one, **types),
            "/t/su": grpc.stream_unary_rpc_method_handler(hang, **types),
            "/t/ss": grpc.stream_stream_rpc_method_handler(hang_after_one, **types),
            "/t/count": grpc.stream_unary_rpc_method_handler(count),
            "/t/echo": grpc.unary_unary_rpc_method_handler(echo, **types),
        }.get(details.method)


def serve(kind: str, transport: str) -> None:
    pool = ThreadPoolExecutor(8)
    if kind == "ours":
        server = rpc.server(pool, transports=(transport,), **OPTIONS)
    else:
        server = grpc.server(pool)
    server.add_generic_rpc_handlers((Methods(),))
    say(server.add_insecure_port("127.0.0.1:0"))
    server.start()
    sys.stdin.read()
    server.stop(0).wait()


def start_call(channel: Any, arity: str, message: Any) -> Any:
    """Starts a call of a method that hangs."""
    kind = {"u": "unary", "s": "stream"}
    call = getattr(channel, f"{kind[arity[0]]}_{kind[arity[1]]}")(f"/t/{arity}", *TYPES)
    request = message if arity[0] == "u" else iter([message])
    return call(request) if arity[1] == "s" else call.future(request)


def call(transport: str, port: str, arity: str) -> None:
    channel = rpc.insecure_channel(f"127.0.0.1:{port}", transports=(transport,), **OPTIONS)
    channel.attach()
    running = start_call(channel, arity, rpc.pack(np.ones(SIZE)))
    if arity[1] == "s":
        say("got", rpc.unpack(next(running)).sum())
    say("calling")
    sys.stdin.read()


if __name__ == "__main__":
    {"serve": serve, "call": call}[sys.argv[1]](*sys.argv[2:])
