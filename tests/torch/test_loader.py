"""Every sample once per epoch, the same order and the same random numbers for any workers."""

import itertools
import random
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from scripts import digest
from team import Team
from torch import nn
from torch.utils.data import Dataset
from twins import make_step

import tensorwire.torch as tw
from tensorwire.torch.order import Dealing
from tensorwire.torch.random_numbers import seed_of


@given(
    count=st.integers(1, 300),
    slices=st.integers(1, 9),
    size=st.integers(1, 20),
    drop_last=st.booleans(),
)
def test_deal(count: int, slices: int, size: int, drop_last: bool) -> None:
    dealing = Dealing(slices, size, drop_last, 1)
    whole, rest = divmod(count, slices * size)
    if count < slices or (drop_last and not whole):
        for call in (dealing.count, lambda n: list(dealing.steps(iter(range(n))))):
            with pytest.raises(ValueError, match=r"each needs one|do not fill one step"):
                call(count)
        return
    steps = list(dealing.steps(iter(range(count))))
    assert dealing.count(count) == len(steps)
    samples = [i for step in steps for part in step for i in part]
    assert samples == list(range(count - rest if drop_last else count))
    for number, step in enumerate(steps):
        sizes = [len(part) for part in step]
        assert len(sizes) == slices
        assert min(sizes) >= 1
        assert max(sizes) - min(sizes) <= 1
        if number < whole - 1 or (drop_last and number < whole):
            assert sizes == [size] * slices


@given(
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=20),
    slices=st.integers(1, 5),
    drop_last=st.booleans(),
)
def test_deal_batches(sizes: list[int], slices: int, drop_last: bool) -> None:
    ends = list(itertools.accumulate(sizes))
    batches = [list(range(end - size, end)) for size, end in zip(sizes, ends, strict=True)]
    dealing = Dealing(slices, 1, drop_last, 1, batches=True)
    whole = len(batches) // slices
    if ends[-1] < slices or (drop_last and not whole):
        with pytest.raises(ValueError, match=r"each needs one|do not fill one step"):
            list(dealing.steps(batches))
        return
    steps = list(dealing.steps(batches))
    assert len(steps) in (dealing.count(len(batches)), dealing.count(len(batches)) - 1)
    assert len(steps) >= whole
    given = ends[whole * slices - 1] if drop_last else ends[-1]
    assert [i for step in steps for part in step for i in part] == list(range(given))
    assert all(len(step) == slices and all(step) for step in steps)
    assert [part for step in steps[: whole - 1] for part in step] == batches[: slices * (whole - 1)]


@given(st.lists(st.integers(-(1 << 64), 1 << 64), min_size=1, max_size=5), st.integers(0, 4))
def test_seeds_differ(parts: list[int], at: int) -> None:
    other = list(parts)
    other[at % len(parts)] ^= 1
    assert 0 <= seed_of(*parts) < 1 << 63
    assert seed_of(*parts) != seed_of(*other)


class Noisy(Dataset[Any]):
    """Samples that use every random generator there is in a process that reads data."""

    def __init__(self, count: int, everything: bool) -> None:
        self.count, self.everything = count, everything

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        noise = torch.rand(3)
        if self.everything:
            noise += random.random() + np.random.random()
        return index, noise


def samples(job: tw.Job, count: int, processes: int) -> list[Any]:
    options: dict[str, Any] = {"num_workers": processes}
    if processes:
        options["persistent_workers"] = True
    loader = job.loader(Noisy(count, processes > 0), batch_size=4, shuffle=True, **options)
    result = []
    for epoch in job.epochs(2):
        batches = [(tuple(i.tolist()), noise.tolist()) for i, noise in loader]
        assert len(batches) == len(loader)
        result.append(batches)
        assert epoch == job.epoch
    return result


@pytest.mark.parametrize("count", [2, 7, 8, 9, 16, 17, 23])
def test_every_sample_once(team: Team, count: int) -> None:
    one = team.alone(samples, count, 0, slices=2)
    two = team.run(samples, count, 0)
    for epoch in range(2):
        seen = [i for worker in two for indices, _ in worker[epoch] for i in indices]
        assert sorted(seen) == list(range(count))
        # The order of one process with two slices: step by step, slice by slice.
        assert one[epoch] == [
            b for both in zip(*(w[epoch] for w in two), strict=True) for b in both
        ]
    if count > 4:
        assert two[0][0] != two[0][1], "both epochs have the same order"


def test_random_samples_do_not_depend_on_who_reads_them(team: Team) -> None:
    """Named for a bug: with num_workers, noise depended on the process that read a sample."""
    one = team.alone(samples, 23, 2, slices=2)
    two = team.run(samples, 23, 1)
    three = team.run(samples, 23, 2)
    assert two == three
    for epoch in range(2):
        assert one[epoch] == [
            b for both in zip(*(w[epoch] for w in two), strict=True) for b in both
        ]


def uneven(job: tw.Job) -> str:
    """The last step has 3 and 4 samples: its gradient is the mean over 7 samples."""
    torch.manual_seed(0)
    model, twin = nn.Linear(3, 2).double(), nn.Linear(3, 2).double()
    twin.load_state_dict(model.state_dict())
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(23, 3, dtype=torch.float64, generator=generator)
    y = torch.randint(2, (23,), generator=generator)
    opt = tw.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.3), model)
    plain = torch.optim.SGD(twin.parameters(), lr=0.3)
    for _ in job.epochs(2):
        for a, b in job.loader(torch.utils.data.TensorDataset(x, y), batch_size=4):
            make_step(opt, F.cross_entropy(model(a), b))
        with torch.no_grad():  # an evaluation over a loader counts for no step
            for a, _ in job.loader(torch.utils.data.TensorDataset(x[:7], y[:7]), batch_size=2):
                model(a)
        for first in range(0, 23, 8):
            make_step(plain, F.cross_entropy(twin(x[first : first + 8]), y[first : first + 8]))
    torch.testing.assert_close(model.state_dict(), twin.state_dict(), rtol=1e-12, atol=1e-13)
    return digest(model)


def test_the_last_batch_is_a_mean_over_samples(team: Team) -> None:
    """Named for a bug: samples that were only evaluated counted for the next step."""
    first, second = team.run(uneven)
    assert first == second == team.alone(uneven, slices=2)


class ByRank(nn.Module):
    """Its gradient is the rank; with SGD a step is the weight of worker 1."""

    def __init__(self, job: tw.Job) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1, dtype=torch.float64))
        self.rank = job.rank

    def forward(self) -> torch.Tensor:
        return self.w.sum() * self.rank


def weights(job: tw.Job) -> list[list[float]]:
    model = ByRank(job)
    opt = tw.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model)

    def step() -> float:
        before = model.w.item()
        make_step(opt, model())
        return round(before - model.w.item(), 6)

    uneven, even = torch.arange(11.0), torch.arange(16.0)
    seen = [[step() for _ in job.loader(uneven, 4)], [step() for _ in range(2)]]  # type: ignore[arg-type]
    inside = []
    for _ in job.loader(even, 4):  # type: ignore[arg-type]
        with torch.no_grad():
            for _ in job.loader(uneven, 4):  # type: ignore[arg-type]
                model()
        inside.append(step())
    for _ in job.loader(uneven, 4):  # type: ignore[arg-type]
        break
    return [*seen, inside, [step()]]


def test_a_batch_counts_while_its_loader_is_iterated(team: Team) -> None:
    """Named for a bug: the last batch of a pass that was over had a part in all later steps."""
    seen = team.run(weights)
    assert seen[0] == seen[1] == [[0.5, 0.666667], [0.5, 0.5], [0.5, 0.5], [0.5]]


def accumulated(job: tw.Job) -> list[Any]:
    loader = job.loader(range(40), batch_size=4, accumulate=2)  # type: ignore[arg-type]
    return [batch.tolist() for batch in loader]


def test_what_is_accumulated_is_of_one_slice(team: Team) -> None:
    """Named for a bug: a process of two slices accumulated samples of both."""
    one = team.alone(accumulated, slices=2)
    first, second = team.run(accumulated)
    assert one == first[:2] + second[:2] + first[2:4] + second[2:4] + first[4:] + second[4:]
