"""Names of the systems, wires and cases of `bench rpc`; without grpcio."""

from __future__ import annotations

GRPCIO, BYTES, TENSOR, RUNTIME, MEMCPY = "grpcio", "bytes", "tensor", "runtime", "memcpy"
RUNTIME_TENSOR, TORCH, BY_HAND = "runtime-tensor", "torch-rpc", "by-hand"
BY_HAND_BYTES, IN_TURN, IN_TURN_BYTES = "by-hand-bytes", "in-turn", "in-turn-bytes"
GRPCIO_MARKED, GRPCIO_TENSOR = "grpcio-marked", "grpcio-tensor"
LARGE_LIMITS = (BY_HAND_BYTES, IN_TURN, IN_TURN_BYTES)
"""Limits of systems whose payload does not travel in its message."""
LIMITS = {"bytes": IN_TURN_BYTES, "tensor": IN_TURN, "runtime": BY_HAND_BYTES}
"""The limit of each system whose payload does not travel in its message."""
SMALL_LIMITS = {"bytes": GRPCIO_MARKED, "tensor": GRPCIO_TENSOR}
"""The limit of each system whose payload travels in its message."""
UNARY, STREAM, AIO, AIO_STREAM = "unary", "stream", "aio", "aio_stream"
REQUESTS = "requests"
"""A stream of requests."""
UNIFORM, RANDOM, SKEW = "uniform", "random", "skew"
CLIENTS = (1, 4, 16)
"""Numbers of threads that call at the same time."""
CROWDS = {f"clients{count}": count for count in CLIENTS}
CROWD = f"clients{CLIENTS[-1]}"
PROCESSES = {f"processes{count}": count for count in CLIENTS}
"""Numbers of client processes, each of which makes one call at a time."""
PUSH_PULL = "push_pull"
WORKERS, SERVERS = 3, 2
"""Processes of PUSH_PULL: each worker calls all servers at the same time."""
CHANNEL = "channel"
"""A channel for each call."""
DESCRIPTORS, SLOW_READER = "descriptors", "slow_reader"
"""Descriptors of a client that has many channels; memory of both ends while a reader waits."""
HELD = (DESCRIPTORS, SLOW_READER)
"""Cases about memory and descriptors, in processes of their own."""
SCHEMES = (UNIFORM, RANDOM, SKEW)
SIZED = (UNARY, STREAM, REQUESTS, AIO, AIO_STREAM)
"""Cases with one buffer, of each size."""
CASES = (*SIZED, *SCHEMES, *CROWDS, *PROCESSES, PUSH_PULL, CHANNEL, *HELD)
STREAMS = (STREAM, REQUESTS, AIO_STREAM)
"""Cases whose payload moves once for each message."""
STREAMED = 8
"""Messages of a call with a stream."""
KINDS = {UNARY: "unary_unary", STREAM: "unary_stream", REQUESTS: "stream_unary"}
"""Kinds of call, as gRPC names them."""
KIND_OF = {STREAM: STREAM, REQUESTS: REQUESTS, AIO_STREAM: STREAM}
"""The kind of call, by case; `UNARY` in other cases."""
WIRES = ("shm", "tcp")
ATTACH_S = 60.0
"""The longest wait for an attachment: on a busy machine processes start slowly."""

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
"""Systems by case, the rival first and the limit last."""


def server_of(system: str) -> str:
    """Returns the system whose servers this one calls: grpcio, bytes or runtime."""
    servers = {GRPCIO_MARKED: GRPCIO, GRPCIO_TENSOR: GRPCIO, RUNTIME_TENSOR: RUNTIME, TENSOR: BYTES}
    return servers.get(system, system)
