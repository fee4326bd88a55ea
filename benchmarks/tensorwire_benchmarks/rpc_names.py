"""Names of the systems, wires and cases of `bench rpc`; without grpcio."""

from __future__ import annotations

GRPCIO, BYTES, TENSOR, RUNTIME, MEMCPY = "grpcio", "bytes", "tensor", "runtime", "memcpy"
RUNTIME_TENSOR, TORCH, BY_HAND = "runtime-tensor", "torch-rpc", "by-hand"
BY_HAND_BYTES, IN_TURN, IN_TURN_BYTES = "by-hand-bytes", "in-turn", "in-turn-bytes"
GRPCIO_MARKED, GRPCIO_TENSOR = "grpcio-marked", "grpcio-tensor"
LARGE_LIMITS = (BY_HAND_BYTES, IN_TURN, IN_TURN_BYTES)
"""Limits of payload that does not travel in its message."""
LIMITS = {"bytes": IN_TURN_BYTES, "tensor": IN_TURN, "runtime": BY_HAND_BYTES}
"""The limit of each system whose payload does not travel in its message."""
SMALL_LIMITS = {"bytes": GRPCIO_MARKED, "tensor": GRPCIO_TENSOR}
"""The limit of each system whose payload travels in its message."""
UNARY, STREAM, AIO, AIO_STREAM = "unary", "stream", "aio", "aio_stream"
REQUESTS = "requests"
"""A stream of requests."""
UNIFORM, RANDOM, SKEW = "uniform", "random", "skew"
CLIENTS = (1, 4, 16)
"""Threads that call at a time."""
CROWDS = {f"clients{count}": count for count in CLIENTS}
CROWD = f"clients{CLIENTS[-1]}"
PROCESSES = {f"processes{count}": count for count in CLIENTS}
"""Client processes, each of which calls one at a time."""
PUSH_PULL = "push_pull"
WORKERS, SERVERS = 3, 2
"""Of PUSH_PULL: each worker calls all servers at a time."""
CHANNEL = "channel"
"""A channel for each call."""
DESCRIPTORS, SLOW_READER = "descriptors", "slow_reader"
"""Descriptors of a client that has many channels; memory of both ends while a reader waits."""
HELD = (DESCRIPTORS, SLOW_READER)
"""Cases that are not about time, in processes of their own."""
SCHEMES = (UNIFORM, RANDOM, SKEW)
SIZED = (UNARY, STREAM, REQUESTS, AIO, AIO_STREAM)
"""Cases with one buffer, of each size."""
CASES = (*SIZED, *SCHEMES, *CROWDS, *PROCESSES, PUSH_PULL, CHANNEL, *HELD)
STREAMS = (STREAM, REQUESTS, AIO_STREAM)
"""Whose payload moves once for each message."""
STREAMED = 8
"""Messages of a call with a stream."""
KINDS = {UNARY: "unary_unary", STREAM: "unary_stream", REQUESTS: "stream_unary"}
"""Kinds of call, as gRPC names them."""
KIND_OF = {STREAM: STREAM, REQUESTS: REQUESTS, AIO_STREAM: STREAM}
"""By case; calls of the others are `UNARY`."""
WIRES = ("shm", "tcp")
ATTACH_S = 60.0
"""The time for an attachment: the processes of a busy machine take long to start."""

SYSTEMS = {
    UNARY: (
        GRPCIO, BYTES, TENSOR, RUNTIME, TORCH, GRPCIO_MARKED, GRPCIO_TENSOR, BY_HAND, *LARGE_LIMITS,
        MEMCPY,
    ),
    STREAM: (GRPCIO, BYTES, TENSOR, RUNTIME, MEMCPY),
    REQUESTS: (GRPCIO, BYTES, TENSOR, RUNTIME, MEMCPY),
    AIO: (GRPCIO, BYTES, TENSOR, RUNTIME, GRPCIO_MARKED, GRPCIO_TENSOR, MEMCPY),
    AIO_STREAM: (GRPCIO, BYTES, RUNTIME, MEMCPY),
    **dict.fromkeys(SCHEMES, (GRPCIO, BYTES, TENSOR, RUNTIME, RUNTIME_TENSOR, BY_HAND, MEMCPY)),
    **dict.fromkeys(CROWDS, (GRPCIO, BYTES, RUNTIME, BY_HAND)),
    **dict.fromkeys(PROCESSES, (GRPCIO, BYTES, RUNTIME)),
    PUSH_PULL: (GRPCIO, BYTES, TENSOR, RUNTIME, RUNTIME_TENSOR),
    **dict.fromkeys((CHANNEL, *HELD), (GRPCIO, BYTES, RUNTIME)),
}  # fmt: skip
"""By case, the rival first and the limit last."""


def server_of(system: str) -> str:
    """The system whose servers another one calls: grpcio, bytes or runtime."""
    servers = {GRPCIO_MARKED: GRPCIO, GRPCIO_TENSOR: GRPCIO, RUNTIME_TENSOR: RUNTIME, TENSOR: BYTES}
    return servers.get(system, system)
