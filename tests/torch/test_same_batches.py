"""Workers that train with the same batches get a warning, and no others."""

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from team import Team
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import tensorwire.torch as tw
from tensorwire.parameters import SYNC
from tensorwire.torch.replica.same_batches import STEPS, SameBatches

POINTS = torch.arange(80.0).view(40, 2).sin()


def train(job: tw.Job, batches: str, average: bool = False) -> list[str]:
    """The warnings of a training whose batches come from somewhere."""
    data, seen = TensorDataset(POINTS), 0
    loaders: dict[str, Any] = {
        "plain": DataLoader(data, 4, shuffle=True),
        "job": job.loader(TensorDataset(torch.ones(40, 2)), 4),
        "shard": DataLoader(job.shard(data), 4),
        "full": [(POINTS,)] * 6,
        "late": [(POINTS + (job.rank if i == STEPS - 1 else 0),) for i in range(6)],
        "zero": [(torch.zeros(4, 2),)] * 6,
        "rows": [(POINTS[job.rank :],)] * 6,
    }
    model = nn.Linear(2, 1, bias=False)
    parameters: list[nn.Parameter] = list(model.parameters())
    words = nn.EmbeddingBag(90, 2, mode="sum", sparse=True)
    if batches == "rows":
        model, parameters = nn.Sequential(words), list(words.parameters())
    opt = tw.DistributedOptimizer(torch.optim.SGD(parameters, lr=0.1), model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for (x,) in loaders[batches]:
            if batches == "rows":
                x = torch.arange(4)[None] + 10 * job.rank
            model(x).sum().backward()
            if average:
                opt.synchronize()
            opt.step()
            opt.zero_grad()
            seen += 1
            if seen == 6:
                break
    assert all(each.category is tw.SameBatchesWarning for each in caught)
    assert all(each.filename == __file__ for each in caught)  # the line that calls step()
    return [str(each.message) for each in caught]


@pytest.mark.parametrize("batches", ["plain", "full"])
def test_equal_batches_are_told(team: Team, batches: str) -> None:
    """A forgotten DataLoader(shuffle=True), and the same tensor on purpose: once, by worker 0."""
    first, second = team.run(train, batches)
    assert len(first) == 1
    assert "workers 0 and 1 computed the same gradients" in first[0]
    assert "use job.loader" in first[0]
    assert 'warnings.filterwarnings("ignore", category=tw.SameBatchesWarning)' in first[0]
    assert second == []


def test_some_workers_with_equal_batches(team: Team) -> None:
    """Slices are compared worker by worker: both slices of one with both of the other."""
    first, second = team.run(train, "plain", slices=4)
    assert "workers 0 and 1" in first[0]
    assert second == []


@pytest.mark.parametrize("batches", ["job", "shard", "late", "zero", "rows"])
def test_no_false_alarm(team: Team, batches: str) -> None:
    """No alarm for the loader's equal samples, dealt data, two equal steps, zero gradients."""
    assert team.run(train, batches) == [[], []]


def test_averaged_gradients_are_equal_anyway(team: Team) -> None:
    """After synchronize() every worker has the average; what it computed itself is compared."""
    assert team.run(train, "shard", True) == [[], []]
    assert "workers 0 and 1" in team.run(train, "plain", True)[0][0]


def test_one_worker_compares_nothing(team: Team) -> None:
    assert team.alone(train, "full", slices=2) == []


def test_a_pipeline_compares_nothing() -> None:
    def looks(replicas: int, pipeline: int) -> bool:
        job: Any = SimpleNamespace(replicas=replicas, pipeline=pipeline, batches=0, mode=SYNC)
        return SameBatches(job).looks

    assert looks(2, 1)
    assert not looks(1, 1)
    assert not looks(1, 2)
    assert not looks(2, 2)


# ---- random numbers of a slice


def noise(job: tw.Job) -> list[list[float]]:
    """Returns noise for two steps, by slice."""
    steps = range(2)
    return [
        [float(torch.randn((), generator=job.generator(step, i))) for step in steps]
        for i in job.my_slices
    ]


def test_a_generator_depends_on_the_slice_not_on_the_worker(team: Team) -> None:
    alone = team.alone(noise, slices=2)
    together = [each for worker in team.run(noise, slices=2) for each in worker]
    assert together == alone
    assert len({number for each in alone for number in each}) == 4


def arguments(job: tw.Job) -> list[int]:
    assert list(job.epochs(2)) == [0, 1]
    same = job.generator(3, 1, epoch=1).initial_seed(), job.generator(3, 1).initial_seed()
    assert same[0] == same[1]
    with pytest.raises(ValueError, match=r"the slices \[0, 1\]: say for which"):
        job.generator(3)
    with pytest.raises(ValueError, match="from 0 up"):
        job.generator(-1, 0)
    every = [job.generator(*each, epoch=e) for each in [(0, 0), (0, 1), (1, 0)] for e in (0, 1)]
    return [each.initial_seed() for each in every]


def test_the_arguments_of_a_generator(team: Team) -> None:
    seeds = team.alone(arguments, slices=2)
    assert len(set(seeds)) == len(seeds)
