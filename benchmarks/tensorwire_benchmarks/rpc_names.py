"""Names of the systems, wires and cases of `bench rpc`; without grpcio."""

from __future__ import annotations

GRPCIO, BYTES, TENSOR, RUNTIME, MEMCPY = "grpcio", "bytes", "tensor", "runtime", "memcpy"
RUNTIME_TENSOR, BY_HAND = "runtime-tensor", "by-hand"
BY_HAND_BYTES, IN_TURN, IN_TURN_BYTES = "by-hand-bytes", "in-turn", "in-turn-bytes"
GRPCIO_MARKED, GRPCIO_TENSOR = "grpcio-marked", "grpcio-tensor"
LARGE_LIMITS = (BY_HAND_BYTES, IN_TURN, IN_TURN_BYTES)
"""Limits of systems whose payload does not travel in its message."""
LIMITS = {"bytes": IN_TURN_BYTES, "tensor": IN_TURN, "runtime": BY_HAND_BYTES}
"""The limit of each system whose payload does not travel in its message."""
SMALL_LIMITS = {"bytes": GRPCIO_MARKED, "tensor": GRPCIO_TENSOR}
"""The limit of each system whose payload travels in its message."""
UNARY, STREAM, AIO = "unary", "stream", "aio"
SKEW = "skew"
SKEW_SIZES = (*[1 << 20] * 6, *[10 << 10] * 3, 16)
"""Bytes of the ten buffers of a message in the case SKEW, from micro-benchmarks of TensorFlow."""
CLIENTS = 16
"""The number of threads that call at the same time in the case CROWD."""
CROWD = f"clients{CLIENTS}"
CHANNEL = "channel"
"""A channel for each call."""
DESCRIPTORS, SLOW_READER = "descriptors", "slow_reader"
"""Descriptors of a client that has many channels; memory of both ends while a reader waits."""
HELD = (DESCRIPTORS, SLOW_READER)
"""Cases about memory and descriptors, in processes of their own."""
CASES = (UNARY, STREAM, AIO, SKEW, CROWD, CHANNEL, *HELD)
"""All cases; the first three have one buffer, of each size."""
STREAMED = 8
"""Messages of a call with a stream."""
WIRES = ("shm", "tcp")
ATTACH_S = 60.0
"""The longest wait for an attachment: on a busy machine processes start slowly."""

SYSTEMS = {
    UNARY: (
        GRPCIO, BYTES, TENSOR, RUNTIME, GRPCIO_MARKED, GRPCIO_TENSOR, BY_HAND, *LARGE_LIMITS,
        MEMCPY,
    ),
    STREAM: (GRPCIO, BYTES, TENSOR, RUNTIME, MEMCPY),
    AIO: (GRPCIO, BYTES, TENSOR, RUNTIME, GRPCIO_MARKED, GRPCIO_TENSOR, MEMCPY),
    SKEW: (GRPCIO, BYTES, TENSOR, RUNTIME, RUNTIME_TENSOR, BY_HAND, MEMCPY),
    CROWD: (GRPCIO, BYTES, RUNTIME, BY_HAND),
    **dict.fromkeys((CHANNEL, *HELD), (GRPCIO, BYTES, RUNTIME)),
}  # fmt: skip
"""Systems by case, the rival first and the limit last."""


def server_of(system: str) -> str:
    """Returns the system whose servers this one calls: grpcio, bytes or runtime."""
    servers = {GRPCIO_MARKED: GRPCIO, GRPCIO_TENSOR: GRPCIO, RUNTIME_TENSOR: RUNTIME, TENSOR: BYTES}
    return servers.get(system, system)
