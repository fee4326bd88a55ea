"""A worker of the gRPC parameter server, tuned as its users would.

The parameters are views of one flat array in the order in which backward produces gradients, so a
bucket is a contiguous range; it is copied once, into the message. Parameters with sparse gradients
lie in blocks (`grpc_server.py`), of which only rows are sent, and only changed rows come back.

All buckets and rows are sent in one stream, and a bucket is sent as soon as its last gradient was
produced, while backward goes on: a call per bucket was no faster for any model, nor was sending
after backward, nor several messages for the rows of a block. The bucket size with the shortest step
is searched at the start. Over shm the channel is a unix socket.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import pickle
from collections.abc import Callable, Iterable, Iterator
from queue import SimpleQueue
from typing import Any, ClassVar

import numpy as np

from tensorwire.bench.harness import median
from tensorwire.bench.rows import format_size
from tensorwire_benchmarks.rivals.grpc_unary import OPTIONS
from tensorwire_benchmarks.systems.base import PLAIN_SGD, Trainer, TrainerPlace
from tensorwire_benchmarks.systems.grpc_server import (
    BUCKET_BYTES,
    HEADER,
    SERVICE,
    Floats,
    cut,
    pack_rows,
    unpack_rows,
)

_BUCKETS = (1 << 18, 1 << 20, 1 << 22, 1 << 24)
_TRIAL_STEPS = 3
_ROUNDS = 3  # in which bucket sizes take turns
_LARGE_BYTES = 256 << 20  # above it a step takes seconds, and one is enough for a trial


class _Bucket:
    """A range of the flat array.

    Attributes:
        parameters: the parameters with elements in it.
    """

    def __init__(self, flat: Floats, parameters: list[Any], begin: int, end: int) -> None:
        self._values = flat[begin:end]
        self.parameters: list[Any] = []
        self._ranges: list[slice] = []  # of each parameter's elements
        first = 0
        for parameter in parameters:
            last = first + parameter.numel()
            if first < end and begin < last:
                self.parameters.append(parameter)
                self._ranges.append(slice(max(begin, first) - first, min(end, last) - first))
            first = last

    def message(self, rank: int, index: int, gradients: dict[int, Floats]) -> bytes:
        parts = [HEADER.pack(rank, index)]
        for parameter, elements in zip(self.parameters, self._ranges, strict=True):
            parts.append(gradients[id(parameter)][elements].data.cast("B"))  # type: ignore[arg-type]
        return b"".join(parts)

    def take(self, answer: bytes) -> None:
        self._values[:] = np.frombuffer(answer, np.float32, offset=HEADER.size)


class _Block:
    """Tables with rows of the same length: views of one array, one table after the other.

    Attributes:
        parameters: the tables.
        array: all rows.
    """

    def __init__(self, torch: Any, parameters: list[Any]) -> None:
        self._torch = torch
        self.parameters = parameters
        whole = torch.cat([parameter.detach() for parameter in parameters])
        for parameter, rows in zip(
            parameters, whole.split(list(map(len, parameters))), strict=True
        ):
            parameter.data = rows
        self.array: Floats = whole.numpy()

    def message(self, rank: int, index: int, gradients: object) -> bytes:
        """Returns the message of rows with gradients, in ascending order, each once."""
        del gradients
        rows, values, first = [], [], 0
        for parameter in self.parameters:
            gradient = parameter.grad.coalesce()
            rows.append(gradient.indices()[0] + first)
            values.append(gradient.values())
            first += len(parameter)
        cat = self._torch.cat
        return pack_rows(rank, index, cat(rows).numpy(), cat(values).numpy())

    def take(self, answer: bytes) -> None:
        """Copies an answer into the rows that changed."""
        rows, values = unpack_rows(answer, self.array.shape[1])
        self.array[rows] = values


def _blocks(torch: Any, module: Any, parameters: Iterable[Any]) -> list[_Block]:
    """Returns the parameters with sparse gradients, as a block for each length of rows."""
    sparse = {
        id(part.weight)
        for part in module.modules()
        if isinstance(part, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and part.sparse
    }
    by_width: dict[int, list[Any]] = {}
    for parameter in parameters:
        if id(parameter) in sparse:
            by_width.setdefault(parameter.shape[1], []).append(parameter)
    return [_Block(torch, tables) for tables in by_width.values()]


def ways(address: str) -> tuple[str, ...]:
    """Returns the transports of payload to a server, so that it uses the wire of the address."""
    return ("shm",) if address.startswith("unix:") else ("tcp",)


class GrpcTrainer(Trainer):
    """A worker of the gRPC parameter server.

    Attributes:
        library: the module whose `insecure_channel` is called like grpcio's.
        settings: of the channel, in addition to grpcio's.


    Raises:
        ValueError: gradients are sparse, and the optimizer is not `PLAIN_SGD`.
    """

    library = "grpc"
    settings: ClassVar[dict[str, Any]] = {}

    def __init__(self, place: TrainerPlace, module: Any) -> None:
        os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
        library: Any = importlib.import_module(self.library)
        self.module = module
        self._place = place
        order = list(reversed(list(module.parameters())))
        self._blocks = _blocks(place.torch, module, order)
        if self._blocks and place.optimizer != PLAIN_SGD:
            raise ValueError(f"sparse gradients need {PLAIN_SGD}, not {place.optimizer}")
        tables = {id(table) for each in self._blocks for table in each.parameters}
        self._tables = len(tables)
        self._dense = [parameter for parameter in order if id(parameter) not in tables]
        self._flat: Floats = np.concatenate(
            [np.zeros(0, np.float32), *(p.detach().numpy().reshape(-1) for p in self._dense)]
        )
        parts = place.torch.from_numpy(self._flat).split([p.numel() for p in self._dense])
        for parameter, part in zip(self._dense, parts, strict=True):
            parameter.data = part.view_as(parameter)
        for parameter in order:
            parameter.register_post_accumulate_grad_hook(self._arrived)
        settings = {**self.settings, "transports": ways(place.server)} if self.settings else {}
        self._channel = library.insecure_channel(place.server, options=OPTIONS, **settings)
        if settings:
            self._channel.attach()  # before the only call, which is a stream
        self._set_bucket_bytes = self._channel.unary_unary(f"/{SERVICE}/Configure")
        self._outgoing: SimpleQueue[bytes | None] = SimpleQueue()
        stream = self._channel.stream_stream(f"/{SERVICE}/Stream")
        self._answers = stream(iter(self._outgoing.get, None))
        if place.rank == 0:
            blocks = [each.array for each in self._blocks]
            values = self._flat, blocks, place.learning_rate
            self._channel.unary_unary(f"/{SERVICE}/Start")(pickle.dumps(values))
        self.configure(1 << 22)

    def configure(self, wanted_bytes: int) -> int:
        """Cuts new buckets in server and workers. All workers call it together; rank 0 decides.

        Returns:
            The bytes of a bucket.
        """
        self._place.barrier()
        if self._place.rank == 0:
            self._set_bucket_bytes(BUCKET_BYTES.pack(wanted_bytes))
        self._place.barrier()
        (bucket_bytes,) = BUCKET_BYTES.unpack(self._set_bucket_bytes(b""))
        ranges = cut(len(self._flat), bucket_bytes)
        buckets = [_Bucket(self._flat, self._dense, *bounds) for bounds in ranges]
        self._parts: list[_Bucket | _Block] = [*buckets, *self._blocks]
        self._touching: dict[int, list[int]] = {}
        for index, part in enumerate(self._parts):
            for parameter in part.parameters:
                self._touching.setdefault(id(parameter), []).append(index)
        self._reset()
        count = len(buckets)
        self.note = f"{count} buckets of {format_size(bucket_bytes)}" if count > 1 else "a bucket"
        if self._blocks:
            messages = f"{len(self._blocks)} message{'s' * (len(self._blocks) > 1)}"
            self.note += f" and rows of {self._tables} tables in {messages}"
        self.note += " as one stream, sent during backward"
        self.tuned = int(bucket_bytes)
        return int(bucket_bytes)

    def use(self, tuned: Any) -> None:
        self.configure(tuned)

    def _reset(self) -> None:
        self._missing = [len(part.parameters) for part in self._parts]
        self._gradients: dict[int, Floats] = {}
        self._holding = False

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Delays all buckets until `exchange`."""
        self._holding = True
        yield  # `exchange` ends the delay

    def _arrived(self, parameter: Any) -> None:
        if not parameter.grad.is_sparse:
            self._gradients[id(parameter)] = parameter.grad.contiguous().numpy().reshape(-1)
        for index in self._touching[id(parameter)]:
            self._missing[index] -= 1
            if self._missing[index] == 0 and not self._holding:
                self._send(index)

    def _send(self, index: int) -> None:
        self._outgoing.put(self._parts[index].message(self._place.rank, index, self._gradients))

    def exchange(self) -> None:
        """Sends delayed buckets, then copies the answers into the parameters as they arrive."""
        if self._holding:
            for index in range(len(self._parts)):
                self._send(index)
        for _ in self._parts:
            answer = next(self._answers)
            _, index = HEADER.unpack_from(answer)
            self._parts[index].take(answer)
        self._reset()

    def tune(self, run: Callable[[int], float]) -> None:
        """Tries bucket sizes, and configures the one with the shortest step."""
        sizes = [
            size
            for smaller, size in zip((0, *_BUCKETS), _BUCKETS, strict=False)
            if smaller < self._flat.nbytes  # the last one has room for all, if possible
        ]
        if self._flat.nbytes > 16 << 20:  # hundreds of messages a step never won
            sizes = [size for size in sizes if size > 1 << 18]
        steps = 1 if self._flat.nbytes > _LARGE_BYTES else _TRIAL_STEPS
        tried: dict[int, list[float]] = {}
        for size in (sizes or [_BUCKETS[-1]]) * _ROUNDS:
            self.configure(size)
            run(1)
            tried.setdefault(size, []).append(run(steps))
        # Workers may find different sizes; rank 0 decides.
        self.configure(min(tried, key=lambda size: median(tried[size])))
        self.note += f", the shortest step of {len(tried)} settings; fused optimizer"

    def close(self) -> None:
        self._outgoing.put(None)
        self._channel.close()


class AttachedTrainer(GrpcTrainer):
    """A worker whose large messages do not travel in gRPC's.

    Attributes:
        way: the channel's property that names their transport.

    Raises:
        RuntimeError: the transport is not that of the server's address.
    """

    library = "tensorwire.rpc"
    settings: ClassVar[dict[str, Any]] = {"runtime": False}
    way = "payload"

    def __init__(self, place: TrainerPlace, module: Any) -> None:
        super().__init__(place, module)
        (wanted,) = ways(place.server)
        if (way := getattr(self._channel, self.way)) != wanted:
            raise RuntimeError(f"the channel's {self.way} travels by {way}, not by {wanted}")


class RuntimeTrainer(AttachedTrainer):
    """A worker whose calls use the runtime of `tensorwire.rpc`."""

    settings: ClassVar[dict[str, Any]] = {"runtime": True}
    way = "runtime"
