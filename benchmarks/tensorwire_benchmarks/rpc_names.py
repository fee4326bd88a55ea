"""What `bench rpc` calls its systems, wires and cases; without grpcio."""

from __future__ import annotations

GRPCIO, BYTES, TENSOR, MEMCPY = "grpcio", "bytes", "tensor", "memcpy"
SYSTEMS = (GRPCIO, BYTES, TENSOR, MEMCPY)
UNARY, STREAM = "unary", "stream"
CASES = (UNARY, STREAM)
WIRES = ("shm", "tcp")
