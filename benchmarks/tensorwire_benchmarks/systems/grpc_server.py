"""A parameter server on gRPC: raw bytes, generic handlers, torch's fused optimizer.

All parameters with dense gradients are one flat array, cut into buckets of equal size. A bucket is
updated as soon as every worker's gradients of it are there, while others are still on their way;
its workers get the new parameters as the answer to the gradients that they sent. Gradients are
added from the received bytes where they lie, in float32 and in the order of ranks, straight into
the gradient that the optimizer reads.

Tables, the parameters with sparse gradients, lie one below the other: all tables whose rows have as
many elements are one block, and the row of a block says which table it is of. Of a block only rows
travel, those of some tables in one message. A message's rows are updated as soon as those of every
worker are there: their sum, in float32 and in the order of ranks, by the number of workers, and SGD
on these rows. The answer has all rows that any worker sent, with their new values.

There are two ways to send buckets and rows: a call for each, or one stream per worker.

    message          bytes
    Start            u32 blocks, per block u32 tables, u32 rows, u32 elements of a row; the flat
                     array, the blocks, float32
    Configure        u32 bytes of a bucket, u8 way, u8 during backward, u8 messages per block;
                     answer: the same
    Describe         none; answer: as Configure
    Exchange, Stream u32 rank, u32 bucket, gradients; answer: u32 0, u32 bucket, parameters
                     for rows: u32 rank, u32 buckets + which of all messages of rows, i64 rows of
                     the block in ascending order, each once, their gradients, float32; answer:
                     u32 0, u32 the same, i64 changed rows, their new values
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import struct
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tensorwire_benchmarks.rivals.grpc_unary import OPTIONS
from tensorwire_benchmarks.systems.base import LEARNING_RATE, PLAIN_SGD, make_optimizer

SERVICE = "tensorwire.bench.ParameterServer"
HEADER = struct.Struct("<II")
CONFIGURATION = struct.Struct("<IBBB")
COUNT = struct.Struct("<I")
BLOCK = struct.Struct("<III")
WAYS = ("calls", "stream")
_THREADS = 4096  # a call that waits for the other workers holds a thread; most are never started

Floats = NDArray[np.float32]
Indices = NDArray[np.int64]


class Block(NamedTuple):
    """Tables one below the other."""

    tables: int
    rows: int
    wide: int

    def messages(self, wanted: int) -> int:
        """Into how many its tables are cut."""
        return min(wanted, self.tables)


def pack_start(blocks: list[Block], arrays: list[Floats]) -> bytes:
    """The message Start: the flat array, then that of each block."""
    parts = [COUNT.pack(len(blocks)), *(BLOCK.pack(*block) for block in blocks)]
    return b"".join([*parts, *(array.tobytes() for array in arrays)])


def pack_rows(first: int, index: int, rows: Indices, values: Floats) -> bytes:
    """A message of rows: `first` is the rank, or 0 in an answer. Both arrays are contiguous."""
    return b"".join((HEADER.pack(first, index), rows.data, values.data))


def unpack_rows(message: bytes, wide: int) -> tuple[Indices, Floats]:
    """The reverse of `pack_rows`: views of the message."""
    count = (len(message) - HEADER.size) // (8 + 4 * wide)
    rows = np.frombuffer(message, np.int64, count, HEADER.size)
    values = np.frombuffer(message, np.float32, count * wide, HEADER.size + 8 * count)
    return rows, values.reshape(count, wide)


def cut(elements: int, bucket_bytes: int) -> list[tuple[int, int]]:
    """The buckets as ranges of elements; all but the last have `bucket_bytes`."""
    size = max(1, bucket_bytes // 4)
    return [(at, min(at + size, elements)) for at in range(0, elements, size)]


class _Meeting(ABC):
    """Where the gradients of all workers for the same parameters meet.

    `push` may be called by any thread, once per worker and step; the call of the last worker
    updates and answers all of them.
    """

    def __init__(self, index: int, workers: int) -> None:
        self._index = index
        self._workers = workers
        self._lock = threading.Lock()
        self._arrived: dict[int, tuple[bytes, Callable[[bytes], None]]] = {}

    def push(self, rank: int, request: bytes, done: Callable[[bytes], None]) -> None:
        """Takes one worker's gradients; `done` gets the answer when all workers' were applied."""
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
        """Updates; returns the answer for all workers."""


class Bucket(_Meeting):
    """A range of the flat array with its optimizer state."""

    def __init__(self, torch: Any, index: int, parameters: Floats, workers: int, optimizer: str):
        super().__init__(index, workers)
        self._parameters = parameters
        self._gradient = np.zeros_like(parameters)
        parameter = torch.nn.Parameter(torch.from_numpy(parameters))
        parameter.grad = torch.from_numpy(self._gradient)
        self._optimizer = make_optimizer(torch, optimizer, [parameter], fused=True)

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


class Rows(_Meeting):
    """Some tables of a block. Nothing but SGD without state changes only rows with a gradient."""

    def __init__(self, index: int, block: Floats, workers: int) -> None:
        super().__init__(index, workers)
        self._block = block

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
        new = self._block[changed] - np.float32(LEARNING_RATE / self._workers) * total
        self._block[changed] = new
        return pack_rows(0, self._index, changed, new)


class Shard:
    """All parameters of the server."""

    def __init__(self, torch: Any, workers: int, optimizer: str) -> None:
        self._torch = torch
        self._workers = workers
        self._optimizer = optimizer
        self._parameters: Floats = np.zeros(0, np.float32)
        self._blocks: list[tuple[Block, Floats]] = []
        self._meetings: list[_Meeting] = []
        self.configuration = CONFIGURATION.pack(4 << 20, 0, 0, 1)

    def start(self, message: bytes) -> None:
        """Takes the values that training starts with.

        Raises:
            ValueError: there are tables, and the optimizer would change all of their rows.
        """
        (count,) = COUNT.unpack_from(message)
        at = COUNT.size + count * BLOCK.size
        blocks = [Block(*each) for each in BLOCK.iter_unpack(message[COUNT.size : at])]
        if blocks and self._optimizer != PLAIN_SGD:
            raise ValueError(f"tables need {PLAIN_SGD}, not {self._optimizer}")
        values = np.frombuffer(message, np.float32, offset=at).copy()
        first = len(values) - sum(block.rows * block.wide for block in blocks)
        self._parameters, self._blocks = values[:first], []
        for block in blocks:
            end = first + block.rows * block.wide
            self._blocks.append((block, values[first:end].reshape(block.rows, block.wide)))
            first = end
        self.configure(self.configuration)

    def configure(self, configuration: bytes) -> None:
        """Cuts the parameters anew; their values stay, the optimizer's state starts again."""
        bucket_bytes, _, _, messages = CONFIGURATION.unpack(configuration)
        self.configuration = configuration
        self._meetings = [
            Bucket(self._torch, index, self._parameters[begin:end], self._workers, self._optimizer)
            for index, (begin, end) in enumerate(cut(len(self._parameters), bucket_bytes))
        ]
        for block, values in self._blocks:
            for _ in range(block.messages(messages)):
                self._meetings.append(Rows(len(self._meetings), values, self._workers))

    def push(self, request: bytes, done: Callable[[bytes], None]) -> None:
        """Takes one worker's gradients of a bucket or of rows; `done` gets the new parameters."""
        rank, index = HEADER.unpack_from(request)
        self._meetings[index].push(rank, request, done)


def _handlers(grpc: Any, shard: Shard) -> dict[str, Any]:
    def start(request: bytes, context: object) -> bytes:
        shard.start(request)
        return b""

    def configure(request: bytes, context: object) -> bytes:
        shard.configure(request)
        return request

    def describe(request: bytes, context: object) -> bytes:
        return shard.configuration

    def exchange(request: bytes, context: object) -> bytes:
        answer: SimpleQueue[bytes] = SimpleQueue()
        shard.push(request, answer.put)
        return answer.get()

    def stream(requests: Iterator[bytes], context: object) -> Iterator[bytes]:
        answers: SimpleQueue[bytes | None] = SimpleQueue()

        def take() -> None:
            with contextlib.suppress(grpc.RpcError):  # the worker has closed its channel
                for request in requests:
                    shard.push(request, answers.put)
            answers.put(None)

        threading.Thread(target=take, daemon=True).start()
        while (answer := answers.get()) is not None:
            yield answer

    return {
        "Start": grpc.unary_unary_rpc_method_handler(start),
        "Configure": grpc.unary_unary_rpc_method_handler(configure),
        "Describe": grpc.unary_unary_rpc_method_handler(describe),
        "Exchange": grpc.unary_unary_rpc_method_handler(exchange),
        "Stream": grpc.stream_stream_rpc_method_handler(stream),
    }


def listen(shard: Shard, where: str) -> tuple[Any, str]:
    """Serves in threads of its own.

    Args:
        shard: what is served.
        where: as on the command line.

    Returns:
        The server, and the address for workers.
    """
    grpc: Any = importlib.import_module("grpc")
    server = grpc.server(
        ThreadPoolExecutor(_THREADS),
        handlers=[grpc.method_handlers_generic_handler(SERVICE, _handlers(grpc, shard))],
        options=OPTIONS,
    )
    port = server.add_insecure_port(where)
    server.start()
    return server, where if where.startswith("unix:") else f"{where.rpartition(':')[0]}:{port}"


def main() -> None:
    """Serves until standard input ends, which is when the bench closes it or dies."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument("--optimizer", required=True)
    parser.add_argument("--listen", required=True, help="unix:PATH or HOST:PORT")
    parser.add_argument("--address-fd", type=int, required=True)
    arguments = parser.parse_args()
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    torch: Any = importlib.import_module("torch")
    torch.set_num_threads(1)
    _server, address = listen(
        Shard(torch, arguments.workers, arguments.optimizer), arguments.listen
    )
    os.write(arguments.address_fd, f"{address}\n".encode())
    os.close(arguments.address_fd)
    sys.stdin.buffer.read()
    os._exit(0)  # calls of workers that are gone still hold threads


if __name__ == "__main__":
    main()
