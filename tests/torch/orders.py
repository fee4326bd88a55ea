"""Data in orders of samplers, batch samplers and streams, and a small model that trains on them."""

import itertools
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import (
    Dataset,
    IterableDataset,
    Sampler,
    WeightedRandomSampler,
    get_worker_info,
)

import tensorwire.torch as tw

COUNT = 43  # samples: the last step of a pass has fewer


class Numbered(Dataset[Any]):
    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        return index, torch.randn(5, generator=torch.Generator().manual_seed(index))


class Buckets(Sampler[list[int]]):
    """Batches of 1 to 4 samples, in another order in each pass, by numpy's random numbers."""

    def __len__(self) -> int:
        return 17

    def __iter__(self) -> Iterator[list[int]]:
        order = iter(np.random.permutation(COUNT).tolist())
        sizes = [1 + i % 4 for i in range(16)]
        for size in random.sample([*sizes, COUNT - sum(sizes)], 17):
            yield list(itertools.islice(order, size))


class Stream(IterableDataset[Any]):
    """Shuffles by itself, with all generators that there are, and splits itself among processes."""

    def __init__(self, by_rank: tuple[int, int] = (0, 1)) -> None:
        self.by_rank, self.data = by_rank, Numbered()

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        mine = range(COUNT) if info is None else range(info.id, COUNT, info.num_workers)
        order = np.random.permutation(list(mine)[self.by_rank[0] :: self.by_rank[1]]).tolist()
        while order:
            at = random.randrange(min(5, len(order)))
            yield (*self.data[order.pop(at)], torch.rand(1))


def endless() -> Any:
    """An endless stream without a length; each number is a sample."""

    class Endless(IterableDataset[Any]):
        def __iter__(self) -> Iterator[int]:
            return itertools.cycle(range(100))

    return Endless()


SOURCES = ("sampler", "batch_sampler", "stream")


def loader_of(job: tw.Job, source: str, readers: int = 0) -> Any:
    if source == "sampler":
        weights = torch.arange(1.0, COUNT + 1)
        sampler = WeightedRandomSampler(weights, COUNT, replacement=False)
        return job.loader(Numbered(), 3, sampler=sampler, num_workers=readers)
    if source == "batch_sampler":
        return job.loader(Numbered(), batch_sampler=Buckets(), num_workers=readers)
    return job.loader(
        Stream(), 3, num_workers=readers, persistent_workers=readers > 0, prefetch_factor=None
    )


class Training:
    """Dropout and momentum; counts the samples and checks that its own numbers are left alone."""

    def __init__(self, job: tw.Job) -> None:
        torch.manual_seed(0)
        self.job = job
        self.model = nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.3), nn.ReLU(), nn.Linear(8, 3))
        sgd = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.opt = tw.DistributedOptimizer(sgd, self.model)
        self.seen: list[int] = []
        job.track(model=self.model, opt=self.opt)

    def step(self, batch: Any) -> None:
        index, x, *_ = batch
        F.cross_entropy(self.model(x), index % 3).backward()
        self.opt.step()
        self.opt.zero_grad()
        self.seen += index.tolist()
