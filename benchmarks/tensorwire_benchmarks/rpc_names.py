"""What `bench rpc` calls its systems, wires and cases; without grpcio."""

from __future__ import annotations

GRPCIO, BYTES, TENSOR, RUNTIME, MEMCPY = "grpcio", "bytes", "tensor", "runtime", "memcpy"
SYSTEMS = (GRPCIO, BYTES, TENSOR, RUNTIME, MEMCPY)
UNARY, STREAM = "unary", "stream"
CASES = (UNARY, STREAM)
CLIENTS = 16
"""Threads that call at a time in the case of many clients."""
CROWD = f"clients{CLIENTS}"
WIRES = ("shm", "tcp")
