"""The data of a job, dealt to slices. The order depends on seed and epoch, never on the workers."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

if TYPE_CHECKING:
    from .job import Job


def seed_of(*parts: int) -> int:
    """A seed that differs wherever a part differs (splitmix64 over the parts)."""
    state = 0
    for part in parts:
        state = (state ^ (part & _MASK)) + 0x9E3779B97F4A7C15 & _MASK
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & _MASK
        state = (state ^ state >> 27) * 0x94D049BB133111EB & _MASK
        state ^= state >> 31
    return state >> 1


_MASK = (1 << 64) - 1


def deal(count: int, slices: int, batch_size: int, drop_last: bool) -> list[list[tuple[int, int]]]:
    """For every step, for every slice: [start, stop) of the samples in the epoch's order.

    What does not fill a step is a step of its own, shared equally; if it has not a sample for every
    slice, the step before takes it too.

    Raises:
        ValueError: fewer samples than slices.
    """
    if count < slices:
        raise ValueError(f"{count} samples cannot be dealt to {slices} slices; each needs one")
    whole = batch_size * slices
    ends = list(range(whole, count + 1, whole))
    rest = count - (ends[-1] if ends else 0)
    if rest and not drop_last:
        if rest < slices and ends:
            ends[-1] = count
        else:
            ends.append(count)
    steps, start = [], 0
    for end in ends:
        size = end - start
        bounds = [start + size * i // slices for i in range(slices + 1)]
        steps.append(list(pairwise(bounds)))
        start = end
    return steps


class _Slices(Sampler[list[int]]):
    """This worker's batches of one epoch, step by step, slice by slice."""

    def __init__(self, batches: list[list[int]]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


class Loader:
    """Made by `Job.loader`. Iterating it is one epoch."""

    def __init__(
        self,
        job: Job,
        dataset: Dataset[Any],
        batch_size: int,
        shuffle: bool,
        drop_last: bool,
        options: dict[str, Any],
    ) -> None:
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
            raise TypeError("a loader needs a dataset with a length; iterate others yourself")
        if not isinstance(batch_size, int) or batch_size < 1:
            raise ValueError(f"batch_size is a whole number from 1 up, not {batch_size!r}")
        for name in ("sampler", "batch_sampler", "generator"):
            if options.get(name) is not None:
                raise ValueError(f"the job chooses the samples; {name}= cannot be given")
        self._job, self._dataset, self._shuffle = job, dataset, shuffle
        self._batch_size, self._drop_last, self._options = batch_size, drop_last, options
        self._length = len(dataset)
        self._passes = 0
        steps = deal(self._length, job.slices, batch_size, drop_last)
        if not steps:
            raise ValueError(
                f"{self._length} samples do not fill one step of {job.slices} x {batch_size}"
            )
        self._steps = steps

    def __len__(self) -> int:
        """Batches that this worker gets in an epoch."""
        return len(self._steps) * len(self._job.my_slices)

    def __iter__(self) -> Iterator[Any]:
        job = self._job
        epoch = max(job.epoch, self._passes)
        self._passes = epoch + 1
        generator = torch.Generator().manual_seed(seed_of(job.seed, epoch))
        order = (
            torch.randperm(self._length, generator=generator).tolist()
            if self._shuffle
            else range(self._length)
        )
        mine = [(step, index) for step in range(len(self._steps)) for index in job.my_slices]
        batches = []
        for step, index in mine:
            start, stop = self._steps[step][index]
            batches.append(list(order[start:stop]))
        loader = iter(
            DataLoader(
                self._dataset, batch_sampler=_Slices(batches), generator=generator, **self._options
            )
        )
        job.expect_steps(len(self._steps))
        for (step, index), batch in zip(mine, batches, strict=True):
            # Samples that are made in this process may use random numbers too.
            torch.default_generator.manual_seed(seed_of(job.seed, epoch, step, index, 0))
            data = next(loader)
            torch.default_generator.manual_seed(seed_of(job.seed, epoch, step, index, 1))
            job.samples += len(batch)
            yield data
