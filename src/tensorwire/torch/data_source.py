"""Finds out which data a script gives to `job.loader`, in which order, and how they are read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    TensorDataset,
)

from .order import (
    Dealing,
    IndexPlan,
    PassPlan,
    Step,
    Steps,
    call_set_epoch,
    check_sampler,
    numbers_for,
    samplers_in,
)
from .random_numbers import IN_A_SOURCE, seed_of
from .stream import StreamPass, StreamPlan

# Data whose samples are read for comparison: that takes no time and changes nothing.
_IN_MEMORY = (list, tuple, range, np.ndarray, torch.Tensor, TensorDataset)
# What a DataLoader hands over as it is; its sampler and batches are looked at one by one.
_SAME = (
    "num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn",
    "multiprocessing_context", "prefetch_factor", "persistent_workers",
)  # fmt: skip


@dataclass
class LoaderData:
    """The arguments of `job.loader`, see there; `options` are for a DataLoader."""

    dataset: Any
    batch_size: int
    shuffle: bool
    drop_last: bool
    options: dict[str, Any]


def unpacked(given: LoaderData) -> LoaderData:
    """Returns the parts of a user's own DataLoader, in place of it; else `given` itself.

    Raises:
        TypeError: it is of a class that gives out batches in its own way.
        ValueError: something is given beside it that it has itself; or it makes no batches.
    """
    own = given.dataset
    if not isinstance(own, DataLoader):
        return given
    if type(own).__iter__ is not DataLoader.__iter__:
        raise TypeError(
            f"{type(own).__name__} gives out batches in its own way, which job.loader cannot deal "
            "out: give it the dataset, or a torch.utils.data.DataLoader"
        )
    if given != LoaderData(own, 1, False, False, {}):
        raise ValueError(
            "a DataLoader has its own batch_size, shuffle, drop_last and further options: give "
            "them to it, and job.loader the DataLoader with accumulate= and weights= alone"
        )
    options = {name: getattr(own, name) for name in _SAME}
    if own.batch_sampler is None:
        raise ValueError(
            "a DataLoader with batch_size=None makes no batches, and job.loader deals samples to "
            "batches: let the dataset give single samples, and say batch_size="
        )
    if own.batch_size is None:
        return LoaderData(
            own.dataset, 1, False, False, {**options, "batch_sampler": own.batch_sampler}
        )
    size, last, sampler = int(own.batch_size), bool(own.drop_last), own.sampler
    if isinstance(own.dataset, IterableDataset) or type(sampler) is SequentialSampler:
        return LoaderData(own.dataset, size, False, last, options)
    if type(sampler) is RandomSampler and not sampler.replacement:
        if sampler.num_samples == len(own.dataset):  # type: ignore[arg-type]
            return LoaderData(own.dataset, size, True, last, options)
    return LoaderData(own.dataset, size, False, last, {**options, "sampler": sampler})


class DataSource:
    """The data of a loader and the order in which they are dealt.

    Args:
        given: what the script says; `options` lose what is found here.
        slices: of a step.
        accumulate: as of `job.loader`.

    Attributes:
        dataset: as given.
        batch_size: of a slice; 1 where a batch_sampler makes the batches.
        dealing: of its items.
        shuffle: each pass has another order.
        is_stream: the dataset can only be iterated.
        is_random: each pass may have another order.
        steps: of a pass; None: unknown before it ends.
        is_exact: a pass has exactly `steps`; else it may have one less, if the last batches have
            too few samples for a step.
        name: of the order, for people.
        options: for a DataLoader.

    Raises:
        TypeError, ValueError: it cannot be dealt out; the text says what to give.
    """

    def __init__(self, given: LoaderData, slices: int, accumulate: int) -> None:
        given = unpacked(given)
        self.dataset, self.batch_size = given.dataset, given.batch_size
        self.options = options = dict(given.options)
        self.shuffle = given.shuffle
        for name, number in (("batch_size", given.batch_size), ("accumulate", accumulate)):
            if not isinstance(number, int) or number < 1:
                raise ValueError(f"{name} is a whole number from 1 up, not {number!r}")
        batches = options.pop("batch_sampler", None)
        self._sampler = options.pop("sampler", None) if batches is None else batches
        self._check_options(given, batches)
        self.is_stream = self._find_kind()
        self.is_random = self.shuffle or self._sampler is not None or self.is_stream
        self.dealing = Dealing(
            slices, given.batch_size, given.drop_last, accumulate, batches is not None
        )
        items = self.dataset if self._sampler is None else self._sampler
        length = _length(items)
        self.steps = None if length is None else self.dealing.count(length)
        self.is_exact = length is None or batches is None or length % slices == 0
        what = "batches" if batches is not None else "samples"
        count = "" if length is None else f"{length} "
        by = f" of {type(self._sampler).__name__}" if self._sampler is not None else ""
        self.name = f"{count}{what}{by}"
        if self.is_stream:
            self.name = f"a stream, {type(self.dataset).__name__},"

    def _check_options(self, given: LoaderData, batches: Any) -> None:
        options = self.options
        if options.get("generator") is not None:
            raise ValueError(
                "the job seeds what is random, so that all workers draw the same order; generator= "
                "cannot be given: say tw.init(seed=…)"
            )
        if not options.get("in_order", True):
            raise ValueError("in_order=False: a job keeps the order of its batches; leave it out")
        if batches is not None and (
            given.batch_size != 1 or given.drop_last or given.options.get("sampler") is not None
        ):
            raise ValueError(
                "batch_sampler= makes the batches: batch_size=, sampler= and drop_last= are its own"
            )
        if self._sampler is not None and self.shuffle:
            raise ValueError("shuffle=True and a sampler are two orders: give one of them")
        if self._sampler is not None:
            check_sampler(self._sampler)

    def _find_kind(self) -> bool:
        dataset = self.dataset
        # torch's Dataset has a __getitem__ that raises.
        own = getattr(type(dataset), "__getitem__", None) not in (None, Dataset.__getitem__)
        by_index = own or hasattr(dataset, "__getitems__")
        by_index = by_index and not isinstance(dataset, IterableDataset)
        if by_index and (self._sampler is not None or hasattr(dataset, "__len__")):
            return False
        name = type(dataset).__name__
        if isinstance(dataset, Iterator):
            raise TypeError(
                f"{name} is an iterator, which only one pass can read: give an object whose "
                "__iter__ begins anew, as an IterableDataset"
            )
        if not isinstance(dataset, Iterable):
            raise TypeError(
                f"{name} is no dataset: it has neither __getitem__ and __len__ nor __iter__"
            )
        if self._sampler is not None:
            raise ValueError(
                f"{name} can only be iterated, so that it has an order of its own; sampler= and "
                "batch_sampler= are for data that are read by index"
            )
        if self.shuffle:
            raise ValueError(
                f"{name} can only be iterated, so that shuffle=True cannot be: let its __iter__ "
                "shuffle, with torch's, Python's or numpy's default generator, which are the same "
                "in all workers and others in each epoch"
            )
        return True

    def plan(self, seed: int, epoch: int, number: int, generator: torch.Generator) -> PassPlan:
        """Returns the plan of a pass.

        Args:
            seed: of the job.
            epoch: a part of all seeds of the pass, and what `set_epoch` is told.
            number: differs from those of other passes of this loader.
            generator: makes the order of `shuffle=True`.
        """
        generator.manual_seed(seed_of(seed, epoch))
        own, told = seed_of(seed, epoch, IN_A_SOURCE), epoch & 0x7FFFFFFF
        if self.is_stream:
            return StreamPlan(StreamPass(number, told, own), (seed, epoch))
        sources = () if self._sampler is None else samplers_in(self._sampler)
        call_set_epoch(sources, told)
        reading: AbstractContextManager[None] = nullcontext()
        order: Iterable[Any] = self._sampler
        if self._sampler is not None:
            reading = numbers_for(sources, own)
        elif self.shuffle:  # now: a DataLoader draws from the generator too
            order = torch.randperm(len(self.dataset), generator=generator, device="cpu").tolist()
        else:
            order = range(len(self.dataset))
        shown: Callable[[Step], Any] | None = None
        if isinstance(self.dataset, Subset):  # which may be another part in each worker
            shown = partial(_named, self.dataset.indices)
        elif sources:
            shown = list
        elif isinstance(self.dataset, _IN_MEMORY):
            shown = partial(_first, self.dataset)
        return IndexPlan(Steps(self.dealing.steps(order), reading, shown), (seed, epoch))


def _first(dataset: Any, step: Step) -> Any:
    return dataset[step[0][0]]


def _named(names: Sequence[Any], step: Step) -> list[list[Any]]:
    return [[names[index] for index in part] for part in step]


def _length(items: Any) -> int | None:
    try:
        return len(items)
    except (TypeError, NotImplementedError):
        return None
