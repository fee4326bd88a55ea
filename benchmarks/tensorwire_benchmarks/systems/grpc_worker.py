"""A worker of the gRPC parameter server, tuned as its users would.

The parameters are views of one flat array in the order in which backward produces gradients, so a
bucket is a contiguous range; it is copied once, into the message. Parameters with sparse gradients
lie in blocks (`grpc_server`); of these only rows are sent, and only rows that changed come back.
All buckets and rows are under way together. What gives the shortest step of a few settings is found
at the start: the bucket size, the way of sending (a call per bucket, or one stream), the messages
that carry the rows of a block, and whether a bucket leaves during backward, as soon as its last
gradient was produced, or after it. Over shm the channel is a unix socket.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import os
import time
from collections.abc import Callable, Iterable, Iterator
from queue import SimpleQueue
from typing import Any, NamedTuple

import numpy as np

from tensorwire.bench.harness import median
from tensorwire.bench.rows import format_size
from tensorwire.bench.verdicts import EQUAL
from tensorwire_benchmarks.rivals.grpc_unary import OPTIONS
from tensorwire_benchmarks.systems.base import PLAIN_SGD, Place, Trainer
from tensorwire_benchmarks.systems.grpc_server import (
    CONFIGURATION,
    HEADER,
    SERVICE,
    WAYS,
    Block,
    Floats,
    Indices,
    cut,
    pack_rows,
    pack_start,
    unpack_rows,
)

_BUCKETS = (1 << 18, 1 << 20, 1 << 22, 1 << 24)
_MESSAGES = (2, 4)  # per block, beside one
_TRIAL_STEPS = 3
_LARGE_BYTES = 256 << 20  # from here on a step takes seconds, and one tells enough
_FINALS = 3  # in which sending during and after backward take turns


class Setting(NamedTuple):
    """One way to do it; see `grpc_server` for the ways."""

    bucket_bytes: int
    way: str
    during_backward: bool
    messages: int = 1

    def pack(self) -> bytes:
        """As the server keeps it."""
        way = WAYS.index(self.way)
        return CONFIGURATION.pack(self.bucket_bytes, way, self.during_backward, self.messages)

    @classmethod
    def unpack(cls, data: bytes) -> Setting:
        """The reverse of `pack`."""
        bucket_bytes, way, during_backward, messages = CONFIGURATION.unpack(data)
        return cls(bucket_bytes, WAYS[way], bool(during_backward), messages)

    def text(self, buckets: int, tables: int = 0, messages: int = 0) -> str:
        """For a note; `messages` carry the rows of the tables."""
        cut = (
            f"{buckets} buckets of {format_size(self.bucket_bytes)}" if buckets > 1 else "a bucket"
        )
        if tables:
            cut += f" and rows of {tables} tables in {messages} message{'s' * (messages > 1)}"
        way = "one stream" if self.way == "stream" else "calls"
        return f"{cut} as {way}, sent {'during' if self.during_backward else 'after'} backward"


class _Tables:
    """A block: tables whose rows have as many elements, views of one array.

    Attributes:
        parameters: the tables, from the top down.
        array: all rows.
        block: what the server must know.
    """

    def __init__(self, torch: Any, parameters: list[Any]) -> None:
        self._torch = torch
        self.parameters = parameters
        whole = torch.cat([parameter.detach() for parameter in parameters])
        self._firsts: list[int] = []
        at = 0
        for parameter in parameters:
            self._firsts.append(at)
            parameter.data = whole[at : at + len(parameter)]
            at += len(parameter)
        self.array: Floats = whole.numpy()
        self.block = Block(len(parameters), *whole.shape)

    def cut(self, messages: int) -> list[range]:
        """The tables of each message."""
        count = self.block.messages(messages)
        ends = [self.block.tables * index // count for index in range(count + 1)]
        return [range(a, b) for a, b in itertools.pairwise(ends)]

    def gradients(self, tables: range) -> tuple[Indices, Floats]:
        """Rows in ascending order, each once."""
        found = [self.parameters[index].grad.coalesce() for index in tables]
        rows = [
            gradient.indices()[0] + self._firsts[index]
            for index, gradient in zip(tables, found, strict=True)
        ]
        values = [gradient.values() for gradient in found]
        return self._torch.cat(rows).numpy(), self._torch.cat(values).numpy()

    def take(self, answer: bytes) -> None:
        """Into the rows that changed."""
        rows, values = unpack_rows(answer, self.block.wide)
        self.array[rows] = values


def _blocks(torch: Any, module: Any, parameters: Iterable[Any]) -> list[_Tables]:
    """The parameters with sparse gradients, those with rows of the same length together."""
    sparse = {
        id(part.weight)
        for part in module.modules()
        if isinstance(part, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and part.sparse
    }
    by_width: dict[int, list[Any]] = {}
    for parameter in parameters:
        if id(parameter) in sparse:
            by_width.setdefault(parameter.shape[1], []).append(parameter)
    return [_Tables(torch, tables) for tables in by_width.values()]


class GrpcTrainer(Trainer):
    """One worker.

    Raises:
        ValueError: gradients are sparse, and the optimizer is not `PLAIN_SGD`.
    """

    def __init__(self, place: Place, module: Any) -> None:
        os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
        grpc: Any = importlib.import_module("grpc")
        self.module = module
        self._place = place
        order = list(reversed(list(module.parameters())))
        self._blocks = _blocks(place.torch, module, order)
        if self._blocks and place.optimizer != PLAIN_SGD:
            raise ValueError(f"sparse gradients need {PLAIN_SGD}, not {place.optimizer}")
        tables = [table for each in self._blocks for table in each.parameters]
        self._tables = len(tables)
        apart = set(map(id, tables))
        self._dense = [p for p in order if id(p) not in apart]
        self._flat: Floats = np.concatenate(
            [np.zeros(0, np.float32), *(p.detach().numpy().reshape(-1) for p in self._dense)]
        )
        self._starts: list[int] = []
        self._gradients: list[Floats | None] = [None] * len(self._dense)
        self._adopt(place.torch.from_numpy(self._flat))
        self._parameters = [*self._dense, *tables]
        for index, parameter in enumerate(self._parameters):
            parameter.register_post_accumulate_grad_hook(self._hook(index))
        self._channel = grpc.insecure_channel(place.server, options=OPTIONS)
        self._calls = {
            name: self._channel.unary_unary(f"/{SERVICE}/{name}")
            for name in ("Start", "Configure", "Describe", "Exchange")
        }
        self._open_stream = self._channel.stream_stream(f"/{SERVICE}/Stream")
        self._outgoing: SimpleQueue[bytes | None] | None = None
        self._answers: Any = None
        self._first_sent = 0.0
        self._hidden_s = 0.0
        if place.rank == 0:
            arrays = [self._flat, *(each.array for each in self._blocks)]
            self._calls["Start"](pack_start([each.block for each in self._blocks], arrays))
        self._configure(Setting(1 << 22, "calls", True))

    def _adopt(self, flat: Any) -> None:
        """Makes the parameters views of the flat array."""
        at = 0
        for parameter in self._dense:
            self._starts.append(at)
            parameter.data = flat[at : at + parameter.numel()].view_as(parameter)
            at += parameter.numel()

    @property
    def _during_backward(self) -> bool:
        return self._setting.during_backward and not self._holding

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """All buckets leave in `exchange`, together."""
        self._holding = True
        yield  # until they have left

    def _hook(self, index: int) -> Callable[[Any], None]:
        def arrived(parameter: Any) -> None:
            if index < len(self._dense):
                self._gradients[index] = parameter.grad.contiguous().numpy().reshape(-1)
            for bucket in self._touching[index]:
                self._missing[bucket] -= 1
                if self._missing[bucket] == 0 and self._during_backward:
                    self._send(bucket)

        return arrived

    def _configure(self, wanted: Setting) -> None:
        """Cuts anew on all sides. All workers call it together; rank 0 decides."""
        self._place.barrier()
        if self._place.rank == 0:
            self._calls["Configure"](wanted.pack())
        self._place.barrier()
        self._setting = Setting.unpack(self._calls["Describe"](b""))
        self._ranges = cut(len(self._flat), self._setting.bucket_bytes)
        ends = [*self._starts[1:], len(self._flat)]
        self._members = [
            [
                (index, max(begin, first) - first, min(end, last) - first)
                for index, (first, last) in enumerate(zip(self._starts, ends, strict=True))
                if max(begin, first) < min(end, last)
            ]
            for begin, end in self._ranges
        ]
        self._touching: list[list[int]] = [[] for _ in self._parameters]
        for bucket, members in enumerate(self._members):
            for index, _, _ in members:
                self._touching[index].append(bucket)
        self._rows: list[tuple[_Tables, range]] = []
        index = len(self._dense)
        for each in self._blocks:
            for tables in each.cut(self._setting.messages):
                for _ in tables:
                    self._touching[index].append(len(self._ranges) + len(self._rows))
                    index += 1
                self._rows.append((each, tables))
        self._reset()
        self._stop_stream()
        if self._setting.way == "stream":
            self._outgoing = SimpleQueue()
            self._answers = self._open_stream(iter(self._outgoing.get, None))
        self.note = self._setting.text(len(self._ranges), self._tables, len(self._rows))

    def _reset(self) -> None:
        self._missing = [len(members) for members in self._members]
        self._missing += [len(tables) for _, tables in self._rows]
        self._futures: list[Any] = []
        self._first_sent = 0.0
        self._holding = False

    def _send(self, bucket: int) -> None:
        """A bucket, or the rows behind all buckets."""
        self._first_sent = self._first_sent or time.monotonic()
        if bucket < len(self._ranges):
            message = self._bucket(bucket)
        else:
            block, tables = self._rows[bucket - len(self._ranges)]
            message = pack_rows(self._place.rank, bucket, *block.gradients(tables))
        if self._outgoing is not None:
            self._outgoing.put(message)
        else:
            self._futures.append(self._calls["Exchange"].future(message))

    def _bucket(self, bucket: int) -> bytes:
        parts = [HEADER.pack(self._place.rank, bucket)]
        for index, begin, end in self._members[bucket]:
            gradient = self._gradients[index]
            assert gradient is not None
            parts.append(gradient[begin:end].data.cast("B"))  # type: ignore[arg-type]
        return b"".join(parts)

    def _answered(self) -> Iterator[bytes]:
        if self._outgoing is None:
            for future in self._futures:
                yield future.result()
        else:
            for _ in self._missing:
                yield next(self._answers)

    def exchange(self) -> None:
        """Takes the answers, in the order in which messages left, into the parameters."""
        if self._first_sent:
            self._hidden_s += time.monotonic() - self._first_sent
        if not self._during_backward:
            for bucket in range(len(self._missing)):
                self._send(bucket)
        for answer in self._answered():
            _, bucket = HEADER.unpack_from(answer)
            if bucket < len(self._ranges):
                begin, end = self._ranges[bucket]
                self._flat[begin:end] = np.frombuffer(answer, np.float32, offset=HEADER.size)
            else:
                self._rows[bucket - len(self._ranges)][0].take(answer)
        self._reset()

    def zero_grad(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    def hidden_s(self) -> float:
        """From the first bucket that left until backward had ended."""
        return self._hidden_s

    def tune(self, run: Callable[[int], float]) -> None:
        """Tries bucket sizes, both ways of sending, messages of rows, sending after backward."""
        sizes = [
            size
            for smaller, size in zip((0, *_BUCKETS), _BUCKETS, strict=False)
            if smaller < self._flat.nbytes  # the last of them takes all, if any can
        ]
        if self._flat.nbytes > 16 << 20:  # hundreds of messages a step never won
            sizes = [size for size in sizes if size > 1 << 18]
        steps = 1 if self._flat.nbytes > _LARGE_BYTES else _TRIAL_STEPS
        tried: dict[Setting, list[float]] = {}

        def attempt(setting: Setting) -> None:
            self._configure(setting)
            run(1)
            # Another worker may be of another opinion: what counts is what rank 0 configured.
            tried.setdefault(self._setting, []).append(run(steps))

        for size in sizes or [_BUCKETS[-1]]:
            for way in WAYS:
                attempt(Setting(size, way, True))
        during = min(tried, key=lambda setting: tried[setting])
        if any(each.block.tables > 1 for each in self._blocks):
            for messages in _MESSAGES:
                attempt(during._replace(messages=messages))
            during = min(tried, key=lambda setting: tried[setting])
        after = during._replace(during_backward=False)
        for _ in range(_FINALS):
            attempt(after)
            attempt(during)
        during, after = (self._setting._replace(during_backward=flag) for flag in (True, False))
        shorter = median(tried[after]) < EQUAL * median(tried[during])
        self._configure(after if shorter else during)
        self.note += f", the shortest step of {len(tried)} settings; fused optimizer"

    def _stop_stream(self) -> None:
        if self._outgoing is not None:
            self._outgoing.put(None)
            self._outgoing = None

    def close(self) -> None:
        self._stop_stream()
        self._channel.close()
