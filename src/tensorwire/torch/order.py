"""Deals the samples of a pass to the slices of its steps, in one order that all workers draw alike.

Items are indices of a dataset, batches of such indices, or the samples of a stream: see `Dealing`.
A plan has the facts of a pass and the requests of its batches: with indices here, of a stream in
`stream.py`. The `Loader` reads and gives out batches.
"""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import enum
import fractions
import pathlib
import random
import uuid
from collections import UserDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Any, Protocol
from zlib import crc32

import numpy as np
import torch
from torch.utils.data import Dataset, get_worker_info

from .random_numbers import OwnNumbers, seed_of

Step = list[list[Any]]
"""The samples of each slice, or their indices."""

_MOST_BYTES, _MOST_PARTS = 4096, 32  # of what `mark_of` looks at


@dataclass(frozen=True)
class Dealing:
    """The rule by which items make steps.

    The rest that does not fill a step is a step of its own, shared equally by samples; if it has
    not a sample for every slice, the step before takes it too, and is shared equally.

    Attributes:
        slices: of a step.
        batch_size: samples of a slice; of no meaning where `batches`.
        drop_last: what does not fill a step is left out.
        accumulate: steps of the data that make one of the optimizer. What does not fill such a
            group is left out.
        batches: an item is a batch of one slice, a sequence of indices; else one sample.
    """

    slices: int
    batch_size: int
    drop_last: bool
    accumulate: int
    batches: bool = False

    def __str__(self) -> str:
        size = "a batch" if self.batches else str(self.batch_size)
        return f"{self.slices} slices of {size}"

    @property
    def _whole(self) -> int:
        return self.slices if self.batches else self.slices * self.batch_size

    def count(self, items: int) -> int:
        """Returns how many steps a number of items makes, if the last batches are enough for one.

        Raises:
            ValueError: they make no step, or too few for `accumulate`.
        """
        if items < self.slices and not self.batches:
            raise self._too_few(items)
        whole, rest = divmod(items, self._whole)
        fills = rest > 0 if self.batches else rest >= self.slices
        steps = whole + (fills and not self.drop_last)
        if not steps:
            raise self._nothing(items)
        return self._groups(steps)

    def _groups(self, steps: int) -> int:
        if steps < self.accumulate:
            raise ValueError(
                f"the data makes {steps} steps, fewer than accumulate={self.accumulate}: use more "
                "data, smaller batches, or a smaller accumulate="
            )
        return steps // self.accumulate * self.accumulate

    def steps(self, items: Iterable[Any]) -> Iterator[Step]:
        """Yields the steps, each when the items of the one after it were read.

        Raises:
            ValueError: the items make no step, or too few for `accumulate`.
        """
        made, group = 0, []
        for step in self._dealt(iter(items)):  # begins when the first step is asked for
            made += 1
            group.append(step)
            if len(group) == self.accumulate:
                yield from group
                group = []
        self._groups(made)

    def _dealt(self, items: Iterator[Any]) -> Iterator[Step]:
        step = list(islice(items, self._whole))
        if not step or (self.drop_last and len(step) < self._whole):
            raise self._nothing(len(step))
        while len(step) == self._whole or (step and not self.drop_last):
            after = list(islice(items, self._whole)) if len(step) == self._whole else []
            joins = len(after) < self._whole and len(self._flat(after)) < self.slices
            yield self._shared(step, after if joins and not self.drop_last else [])
            step = [] if joins else after

    def _flat(self, items: list[Any]) -> list[Any]:
        return [index for batch in items for index in batch] if self.batches else items

    def _shared(self, step: list[Any], more: list[Any]) -> Step:
        if self.batches and len(step) == self.slices and not more:
            if not all(map(len, step)):
                raise ValueError("batch_sampler= has given an empty batch: give each one a sample")
            return [list(batch) for batch in step]
        found, slices = self._flat([*step, *more]), self.slices
        if len(found) < slices:
            raise self._too_few(len(found))
        bounds = [len(found) * i // slices for i in range(slices + 1)]
        return [found[start:stop] for start, stop in pairwise(bounds)]

    def _too_few(self, samples: int) -> ValueError:
        return ValueError(
            f"{samples} samples cannot be dealt to {self.slices} slices, as each needs one: use "
            "more data or fewer slices"
        )

    def _nothing(self, items: int) -> ValueError:
        what, size = ("batches", "1") if self.batches else ("samples", str(self.batch_size))
        return ValueError(
            f"{items} {what} do not fill one step, which takes {size} for each of {self.slices} "
            "slices: use more data, smaller batches, or drop_last=False"
        )


class Steps:
    """The steps of a pass as far as they were read, from the first that is not forgotten.

    Args:
        steps: are read when they are asked for.
        reading: is entered meanwhile.
        shown: returns what is compared of a step; None: nothing is.
    """

    def __init__(
        self,
        steps: Iterator[Step],
        reading: AbstractContextManager[None],
        shown: Callable[[Step], Any] | None,
    ) -> None:
        self._steps, self._reading, self._shown = steps, reading, shown
        self._read: deque[Step] = deque()
        self._marks: deque[int] = deque()
        self._mark = 0
        self.first = 0

    def has(self, step: int) -> bool:
        """Tells whether the pass has a step, which is read for that."""
        while step >= self.first + len(self._read):
            with self._reading:
                found = next(self._steps, None)
            if found is None:
                return False
            self._read.append(found)
            if self._shown is not None:
                sizes = [len(each) for each in found]
                self._mark = mark_of([self._mark, sizes, self._shown(found)])
            self._marks.append(self._mark)
        return True

    def __getitem__(self, step: int) -> Step:
        """Returns a step that `has` has found."""
        return self._read[step - self.first]

    def mark(self, step: int) -> int:
        """Returns a checksum of the compared values of all steps up to one that `has` has found."""
        return self._marks[step - self.first]

    def forget(self, before: int) -> None:
        """Forgets the steps before one."""
        while self._read and self.first < before:
            self._read.popleft()
            self._marks.popleft()
            self.first += 1


class PassPlan(Protocol):
    """The steps of one pass, as far as this process knows them."""

    def has(self, step: int) -> bool:
        """Tells whether there is a step; of a stream true until its end has come."""

    def request(self, step: int, index: int) -> Any:
        """Returns the request to a DataLoader for the batch of a slice."""

    def take(self, step: int, data: Any) -> Any:
        """Returns the batch in a DataLoader's answer for a step.

        Raises:
            ValueError: the pass has no such step.
        """

    def sizes(self, step: int) -> Sequence[int]:
        """Returns the samples of each slice of a step that was taken and is not forgotten."""

    def mark(self, step: int) -> int:
        """Returns a checksum of the compared samples up to a step."""

    def forget(self, before: int) -> None:
        """Forgets the steps before one, which are not asked for any more."""


class Batch(list[Any]):
    """Indices of samples, and the seed for randomness in reading them."""

    def __init__(self, indices: Iterable[Any], seed: int) -> None:
        super().__init__(indices)
        self.seed = seed


class IndexPlan:
    """The plan of a pass over a dataset that is read by index.

    Args:
        steps: of indices.
        seed: parts of the seed of every batch.
    """

    def __init__(self, steps: Steps, seed: tuple[int, ...]) -> None:
        self._steps, self._seed = steps, seed

    def has(self, step: int) -> bool:
        """See `PassPlan`."""
        return self._steps.has(step)

    def request(self, step: int, index: int) -> Batch:
        """See `PassPlan`."""
        return Batch(self._steps[step][index], seed_of(*self._seed, step, index, 0))

    def take(self, step: int, data: Any) -> Any:
        """See `PassPlan`."""
        return data

    def sizes(self, step: int) -> Sequence[int]:
        """See `PassPlan`."""
        return [len(indices) for indices in self._steps[step]]

    def mark(self, step: int) -> int:
        """See `PassPlan`."""
        return self._steps.mark(step)

    def forget(self, before: int) -> None:
        """See `PassPlan`."""
        self._steps.forget(before)


class Seeded(Dataset[Any]):
    """A dataset whose random numbers depend on the batch, not on the process that reads it."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __getitems__(self, batch: Batch) -> list[Any]:
        seed_for_a_batch(batch.seed)
        if hasattr(self._dataset, "__getitems__"):
            items: list[Any] = self._dataset.__getitems__(list(batch))
            return items
        return [self._dataset[index] for index in batch]


def seed_for_a_batch(seed: int) -> None:
    """Seeds all generators that reading a batch uses, in any process."""
    torch.default_generator.manual_seed(seed)
    if get_worker_info() is not None:  # a process of the loader: these are its own
        random.seed(seed)
        np.random.seed(seed & 0xFFFFFFFF)


def call_set_epoch(sources: Iterable[Any], epoch: int) -> None:
    """Tells samplers or a dataset that want it which epoch begins."""
    for source in sources:
        if callable(told := getattr(source, "set_epoch", None)):
            told(epoch)


def numbers_for(sources: Iterable[Any], seed: int) -> OwnNumbers:
    """Returns the random numbers of a pass, also of generators that a sampler has itself."""
    found = (getattr(source, "generator", None) for source in sources)
    own = {id(each): each for each in found if isinstance(each, torch.Generator)}
    own.pop(id(torch.default_generator), None)
    return OwnNumbers(seed, list(own.values()))


def samplers_in(sampler: Any) -> list[Any]:
    """Returns a sampler and, if it makes batches of another one's indices, that one too."""
    inner = getattr(sampler, "sampler", None)
    return [sampler, *([] if inner is None else samplers_in(inner))]


def check_sampler(sampler: Any) -> None:
    """Raises TypeError or ValueError for a sampler of which not all workers draw the same order."""
    for each in samplers_in(sampler):
        if (parts := getattr(each, "num_replicas", 1)) != 1:
            raise ValueError(
                f"{type(each).__name__} gives each of {parts} processes its part of the samples, "
                "and job.loader deals these parts out again, so that an epoch would not have each "
                "sample once: leave it out, and say job.loader(dataset, batch_size, shuffle=True)"
            )
    if isinstance(sampler, Iterator):
        raise TypeError(
            "sampler= and batch_sampler= are iterated once in each pass; a generator or another "
            "iterator is empty after the first: give a list, or an object with __iter__"
        )


def mark_of(value: Any) -> int:
    """Returns a checksum of samples; of large ones, of a part of each.

    For objects that are no numbers, texts, times, paths, arrays, tensors, containers or dataclasses
    the class counts.
    """
    return crc32(b"\0".join(_parts(value)))


_PLAIN = (
    int, float, complex, bool, np.generic, type(None), datetime.date,
    datetime.time, datetime.timedelta, decimal.Decimal, fractions.Fraction, pathlib.PurePath,
    uuid.UUID,
)  # fmt: skip


def _parts(value: Any) -> Iterator[bytes]:
    if isinstance(value, torch.Tensor) and value.layout == torch.strided and value.numel():
        yield str((value.dtype, *value.shape)).encode()
        some = value.detach().reshape(-1)[:_MOST_BYTES].cpu().contiguous()
        yield some.view(torch.uint8).numpy().tobytes()[:_MOST_BYTES]
    elif isinstance(value, np.ndarray) and not value.dtype.hasobject:
        yield str((value.dtype, *value.shape)).encode()
        yield np.ascontiguousarray(value.reshape(-1)[:_MOST_BYTES]).tobytes()[:_MOST_BYTES]
    elif isinstance(value, dict | UserDict):
        yield b"{%d" % len(value)
        for key, item in islice(value.items(), _MOST_PARTS):
            yield from _parts(key)
            yield from _parts(item)
    elif isinstance(value, list | tuple | deque | range):
        yield b"[%d" % len(value)
        for item in islice(value, _MOST_PARTS):
            yield from _parts(item)
    elif isinstance(value, set | frozenset):  # in whatever order
        yield b"(%d, %d" % (len(value), sum(map(mark_of, value)))
    elif isinstance(value, enum.Enum):
        yield f"{type(value).__qualname__}.{value.name}".encode()
    elif isinstance(value, str | bytes | bytearray):
        yield repr(value[:_MOST_BYTES]).encode()
    elif isinstance(value, _PLAIN):
        yield repr(value).encode()
    else:
        yield type(value).__qualname__.encode()
        for item in map(value.__getattribute__, _compared_fields(value)):
            yield from _parts(item)


def _compared_fields(value: Any) -> list[str]:
    """Returns the fields by which two objects of a dataclass, or of a class of attrs, are equal."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [each.name for each in dataclasses.fields(value) if each.compare]
    return [each.name for each in getattr(type(value), "__attrs_attrs__", ()) if each.eq]
