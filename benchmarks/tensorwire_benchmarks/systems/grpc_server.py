"""A parameter server on gRPC: raw bytes, generic handlers, torch's fused optimizer.

All parameters with dense gradients are one flat array, cut into buckets of equal size. A bucket is
updated as soon as the gradients of all workers have arrived, while other buckets are still on their
way; the workers get the new parameters as the answer to their gradients. Gradients are added from
the received bytes without a copy, in float32 and in the order of ranks, into the gradient that the
optimizer reads.

Tables are parameters with sparse gradients. All tables with rows of the same length are one block,
one table after the other. Only rows are sent, those of a block in one message. They are updated as
soon as the rows of all workers have arrived: the sum of gradients, in float32 and in the order of
ranks, is divided by the number of workers, and SGD changes these rows. The answer has all rows that
any worker sent, with their new values.

    call       message
    Start      the flat array and the blocks, float32, and the learning rate, pickled
    Configure  u32 bytes of a bucket, or nothing to keep them; answer: the bytes now
    Stream     u32 rank, u32 bucket, gradients; answer: u32 0, u32 bucket, parameters
               for rows: u32 rank, u32 (number of buckets + index of the block), i64 rows of the
               block in ascending order, each once, their gradients, float32; answer: u32 0, u32
               the same, i64 changed rows, their new values
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import pickle
import struct
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tensorwire_benchmarks.rivals.grpc_unary import OPTIONS
from tensorwire_benchmarks.systems.base import LEARNING_RATE, PLAIN_SGD, make_optimizer

SERVICE = "tensorwire.bench.ParameterServer"
HEADER = struct.Struct("<II")
BUCKET_BYTES = struct.Struct("<I")

Floats = NDArray[np.float32]
Indices = NDArray[np.int64]


def pack_rows(first: int, index: int, rows: Indices, values: Floats) -> bytes:
    """Packs a message of rows; `first` is the rank, or 0 in an answer; arrays are contiguous."""
    return b"".join((HEADER.pack(first, index), rows.data, values.data))


def unpack_rows(message: bytes, wide: int) -> tuple[Indices, Floats]:
    """Returns rows and values of a message of `pack_rows`, as views of it."""
    count = (len(message) - HEADER.size) // (8 + 4 * wide)
    rows = np.frombuffer(message, np.int64, count, HEADER.size)
    values = np.frombuffer(message, np.float32, count * wide, HEADER.size + 8 * count)
    return rows, values.reshape(count, wide)


def cut(elements: int, bucket_bytes: int) -> list[tuple[int, int]]:
    """Returns the buckets as ranges of elements; all but the last have `bucket_bytes`."""
    size = max(1, bucket_bytes // 4)
    return [(at, min(at + size, elements)) for at in range(0, elements, size)]


class _Meeting(ABC):
    """A meeting of the gradients of all workers for the same parameters.

    Any thread may call `push`, once per worker and step; the call of the last worker updates and
    answers all of them.
    """

    def __init__(self, index: int, workers: int) -> None:
        self._index = index
        self._workers = workers
        self._lock = threading.Lock()
        self._arrived: dict[int, tuple[bytes, Callable[[bytes], None]]] = {}

    def push(self, rank: int, request: bytes, done: Callable[[bytes], None]) -> None:
        """Takes one worker's gradients; calls `done` with the answer once all are applied."""
        with self._lock:
            self._arrived[rank] = (request, done)
            if len(self._arrived) < self._workers:
                return
            arrived, self._arrived = self._arrived, {}
        answer = self._apply([arrived[rank][0] for rank in sorted(arrived)])
        for _, tell in arrived.values():
            tell(answer)

    @abstractmethod
    def _apply(self, requests: list[bytes]) -> bytes:
        """Updates the parameters; returns the answer for all workers."""


class BucketSum(_Meeting):
    """A range of the flat array with its optimizer state."""

    def __init__(
        self, torch: Any, index: int, parameters: Floats, workers: int, optimizer: str,
        learning_rate: float,
    ):  # fmt: skip
        super().__init__(index, workers)
        self._parameters = parameters
        self._gradient = np.zeros_like(parameters)
        parameter = torch.nn.Parameter(torch.from_numpy(parameters))
        parameter.grad = torch.from_numpy(self._gradient)
        self._optimizer = make_optimizer(torch, optimizer, [parameter], learning_rate, fused=True)

    def _apply(self, requests: list[bytes]) -> bytes:
        first, *others = (np.frombuffer(r, np.float32, offset=HEADER.size) for r in requests)
        if not others:
            np.copyto(self._gradient, first)
        for other in others:
            np.add(first, other, out=self._gradient)
            first = self._gradient
        np.multiply(self._gradient, np.float32(1 / self._workers), out=self._gradient)
        self._optimizer.step()
        return b"".join((HEADER.pack(0, self._index), self._parameters.data.cast("B")))


class RowSums(_Meeting):
    """The tables of a block, with SGD without state, which changes only rows with gradients."""

    def __init__(self, index: int, block: Floats, workers: int, learning_rate: float) -> None:
        super().__init__(index, workers)
        self._block = block
        self._learning_rate = learning_rate

    def _apply(self, requests: list[bytes]) -> bytes:
        wide = self._block.shape[1]
        arrived = [unpack_rows(request, wide) for request in requests]
        changed, places = np.unique(
            np.concatenate([rows for rows, _ in arrived]), return_inverse=True
        )
        total = np.zeros((len(changed), wide), np.float32)
        at = 0
        for rows, values in arrived:
            total[places[at : at + len(rows)]] += values  # a worker has every row once
            at += len(rows)
        new = self._block[changed] - np.float32(self._learning_rate / self._workers) * total
        self._block[changed] = new
        return pack_rows(0, self._index, changed, new)


class GrpcShard:
    """All parameters of the server."""

    def __init__(self, torch: Any, workers: int, optimizer: str) -> None:
        self._torch = torch
        self._workers = workers
        self._optimizer = optimizer
        self._bucket_bytes = BUCKET_BYTES.pack(4 << 20)

    def start(
        self, flat: Floats, blocks: Sequence[Floats], learning_rate: float = LEARNING_RATE
    ) -> None:
        """Copies the initial values of training; a later call starts anew.

        Raises:
            ValueError: there are tables, and the optimizer would change all of their rows.
        """
        if blocks and self._optimizer != PLAIN_SGD:
            raise ValueError(f"tables need {PLAIN_SGD}, not {self._optimizer}")
        self._learning_rate = learning_rate
        self._parameters = flat.copy()  # numpy asks for huge pages
        self._blocks = [block.copy() for block in blocks]
        self.configure(self._bucket_bytes)

    def configure(self, bucket_bytes: bytes) -> bytes:
        """Cuts the parameters into new buckets, unless `bucket_bytes` is b""; returns their size.

        Values stay; the optimizer's state starts again.
        """
        if bucket_bytes:
            self._bucket_bytes = bucket_bytes
            ranges = cut(len(self._parameters), *BUCKET_BYTES.unpack(bucket_bytes))
            self._meetings: list[_Meeting] = [
                BucketSum(
                    self._torch,
                    index,
                    self._parameters[a:b],
                    self._workers,
                    self._optimizer,
                    self._learning_rate,
                )
                for index, (a, b) in enumerate(ranges)
            ]
            self._meetings += [
                RowSums(index, block, self._workers, self._learning_rate)
                for index, block in enumerate(self._blocks, len(ranges))
            ]
        return self._bucket_bytes

    def push(self, request: bytes, done: Callable[[bytes], None]) -> None:
        """Takes one worker's gradients of a bucket or of rows; calls `done` with the answer."""
        rank, index = HEADER.unpack_from(request)
        self._meetings[index].push(rank, request, done)


def _handlers(grpc: Any, shard: GrpcShard) -> dict[str, Any]:
    def start(request: bytes, context: object) -> bytes:
        shard.start(*pickle.loads(request))
        return b""

    def configure(request: bytes, context: object) -> bytes:
        return shard.configure(request)

    def stream(requests: Iterator[bytes], context: object) -> Iterator[bytes]:
        answers: SimpleQueue[bytes | None] = SimpleQueue()

        def take() -> None:
            with contextlib.suppress(grpc.RpcError):  # the worker has closed its channel
                for request in requests:
                    shard.push(request, answers.put)
            answers.put(None)

        threading.Thread(target=take, daemon=True).start()
        yield from iter(answers.get, None)

    return {
        "Start": grpc.unary_unary_rpc_method_handler(start),
        "Configure": grpc.unary_unary_rpc_method_handler(configure),
        "Stream": grpc.stream_stream_rpc_method_handler(stream),
    }


def listen(
    shard: GrpcShard, workers: int, where: str, library: str = "grpc", **settings: Any
) -> tuple[Any, str]:
    """Serves in threads of its own.

    Args:
        shard: the parameters to serve.
        workers: the number of workers; the stream of each holds a thread.
        where: unix:PATH or HOST:PORT.
        library: the module whose `server` is called like grpcio's.
        settings: of the server, in addition to grpcio's.

    Returns:
        The server, and the address for workers.
    """
    grpc: Any = importlib.import_module("grpc")
    server = importlib.import_module(library).server(
        ThreadPoolExecutor(2 * workers),
        handlers=[grpc.method_handlers_generic_handler(SERVICE, _handlers(grpc, shard))],
        options=OPTIONS,
        **settings,
    )
    port = server.add_insecure_port(where)
    server.start()
    return server, where if where.startswith("unix:") else f"{where.rpartition(':')[0]}:{port}"


def main(arguments: Sequence[str]) -> None:
    """Serves until the process is ended."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument("--optimizer", required=True)
    parser.add_argument("--listen", required=True, help="unix:PATH or HOST:PORT")
    parser.add_argument("--attached", action="store_true", help="large messages travel beside gRPC")
    parser.add_argument("--runtime", action="store_true", help="so do calls, by the runtime")
    parser.add_argument("--address-fd", type=int, required=True)
    options = parser.parse_args(arguments)
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    torch: Any = importlib.import_module("torch")
    torch.set_num_threads(1)
    shard = GrpcShard(torch, options.workers, options.optimizer)
    library, settings = "grpc", {}
    if options.attached:
        library, settings = "tensorwire.rpc", {"runtime": options.runtime}
    server, address = listen(shard, options.workers, options.listen, library, **settings)
    os.write(options.address_fd, f"{address}\n".encode())
    os.close(options.address_fd)
    server.wait_for_termination()
