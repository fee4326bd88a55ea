"""A parameter server on gRPC: raw bytes, generic handlers, torch's fused optimizer.

All parameters are one flat array, cut into buckets of equal size. A bucket is updated as soon as
every worker's gradients of it are there, while others are still on their way; its workers get the
new parameters as the answer to the gradients that they sent. Gradients are added from the received
bytes where they lie, in float32 and in the order of ranks, straight into the gradient that the
optimizer reads. There are two ways to send buckets: a call per bucket, or one stream per worker.

    message          bytes
    Start            all parameters, float32
    Configure        u32 bytes of a bucket, u8 way, u8 during backward; answer: the same
    Describe         none; answer: as Configure
    Exchange, Stream u32 rank, u32 bucket, gradients; answer: u32 0, u32 bucket, parameters
"""

from __future__ import annotations

import argparse
import importlib
import os
import struct
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tensorwire.bench.rivals.grpc_unary import OPTIONS
from tensorwire.bench.training.systems.base import make_optimizer

SERVICE = "tensorwire.bench.ParameterServer"
HEADER = struct.Struct("<II")
CONFIGURATION = struct.Struct("<IBB")
WAYS = ("calls", "stream")
_THREADS = 4096  # a call that waits for the other workers holds a thread; most are never started

Floats = NDArray[np.float32]


def cut(elements: int, bucket_bytes: int) -> list[tuple[int, int]]:
    """The buckets as ranges of elements; all but the last have `bucket_bytes`."""
    size = max(1, bucket_bytes // 4)
    return [(at, min(at + size, elements)) for at in range(0, elements, size)]


class Bucket:
    """A range of the parameters with its optimizer state.

    `push` may be called by any thread, once per worker and step; the call of the last worker
    updates and answers all of them.
    """

    def __init__(self, torch: Any, index: int, parameters: Floats, workers: int, optimizer: str):
        self._index = index
        self._workers = workers
        self._parameters = parameters
        self._gradient = np.zeros_like(parameters)
        parameter = torch.nn.Parameter(torch.from_numpy(parameters))
        parameter.grad = torch.from_numpy(self._gradient)
        self._optimizer = make_optimizer(torch, optimizer, [parameter], fused=True)
        self._lock = threading.Lock()
        self._arrived: dict[int, tuple[bytes, Callable[[bytes], None]]] = {}

    def push(self, rank: int, request: bytes, done: Callable[[bytes], None]) -> None:
        """Takes one worker's gradients; `done` gets the answer when all workers' were applied."""
        with self._lock:
            self._arrived[rank] = (request, done)
            if len(self._arrived) < self._workers:
                return
            arrived, self._arrived = self._arrived, {}
        self._apply([arrived[rank][0] for rank in sorted(arrived)])
        answer = b"".join((HEADER.pack(0, self._index), self._parameters.data.cast("B")))
        for _, tell in arrived.values():
            tell(answer)

    def _apply(self, requests: list[bytes]) -> None:
        first, *others = (np.frombuffer(r, np.float32, offset=HEADER.size) for r in requests)
        if not others:
            np.copyto(self._gradient, first)
        for other in others:
            np.add(first, other, out=self._gradient)
            first = self._gradient
        np.multiply(self._gradient, np.float32(1 / self._workers), out=self._gradient)
        self._optimizer.step()


class Shard:
    """All parameters of the server."""

    def __init__(self, torch: Any, workers: int, optimizer: str) -> None:
        self._torch = torch
        self._workers = workers
        self._optimizer = optimizer
        self._parameters: Floats = np.zeros(0, np.float32)
        self._buckets: list[Bucket] = []
        self.configuration = CONFIGURATION.pack(4 << 20, 0, 0)

    def start(self, parameters: bytes) -> None:
        """Takes the values that training starts with."""
        self._parameters = np.frombuffer(parameters, np.float32).copy()
        self.configure(self.configuration)

    def configure(self, configuration: bytes) -> None:
        """Cuts the parameters anew; their values stay, the optimizer's state starts again."""
        bucket_bytes, *_ = CONFIGURATION.unpack(configuration)
        self.configuration = configuration
        self._buckets = [
            Bucket(self._torch, index, self._parameters[begin:end], self._workers, self._optimizer)
            for index, (begin, end) in enumerate(cut(len(self._parameters), bucket_bytes))
        ]

    def push(self, request: bytes, done: Callable[[bytes], None]) -> None:
        """Takes one worker's gradients of one bucket; `done` gets the new parameters."""
        rank, index = HEADER.unpack_from(request)
        self._buckets[index].push(rank, request, done)


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
            try:
                for request in requests:
                    shard.push(request, answers.put)
            finally:
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


def main() -> None:
    """Serves until standard input ends, which is when the bench closes it or dies."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument("--optimizer", required=True)
    parser.add_argument("--listen", required=True, help="unix:PATH or HOST:PORT")
    parser.add_argument("--address-fd", type=int, required=True)
    arguments = parser.parse_args()
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    grpc: Any = importlib.import_module("grpc")
    torch: Any = importlib.import_module("torch")
    torch.set_num_threads(1)
    shard = Shard(torch, arguments.workers, arguments.optimizer)
    server = grpc.server(
        ThreadPoolExecutor(_THREADS),
        handlers=[grpc.method_handlers_generic_handler(SERVICE, _handlers(grpc, shard))],
        options=OPTIONS,
    )
    port = server.add_insecure_port(arguments.listen)
    server.start()
    address = arguments.listen
    if not address.startswith("unix:"):
        address = f"{address.rpartition(':')[0]}:{port}"
    os.write(arguments.address_fd, f"{address}\n".encode())
    os.close(arguments.address_fd)
    sys.stdin.buffer.read()
    os._exit(0)  # calls of workers that are gone still hold threads


if __name__ == "__main__":
    main()
