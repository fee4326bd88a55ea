"""How much the gradient of a slice counts: by samples, alike, or as the script says."""

import copy
import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from team import Team
from torch import nn
from torch.utils.data import Dataset
from twins import make_step

import tensorwire.torch as tw

SIZES = (8, 8, 5)  # of the steps: the last one has slices of 2 and 3 samples


class Texts(Dataset[Any]):
    """Words, classes, and which of them count: others in each text."""

    def __len__(self) -> int:
        return sum(SIZES)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        generator = torch.Generator().manual_seed(index)
        x = torch.randn(6, 4, generator=generator, dtype=torch.float64)
        return x, torch.randint(3, (6,), generator=generator), torch.arange(6) < 1 + index % 6


def summed(model: nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
    x, y, counts = batch
    return F.cross_entropy(model(x)[counts], y[counts], reduction="sum"), int(counts.sum())


def tokens(batch: Any) -> int:
    return int(batch[2].sum())


def alike(job: tw.Job, model: nn.Module, opt: Any) -> None:
    """DistributedDataParallel's weights; a worker that has both slices adds up by itself."""
    parts: list[Any] = []
    for batch in job.loader(Texts(), batch_size=4, weights="equal"):
        parts.append(batch)
        if len(parts) < len(job.my_slices):
            continue
        total = job.sum([sum(map(tokens, parts))])[0]
        for part in parts:
            loss, _ = summed(model, part)
            make_step(opt, loss / total * job.slices)
        parts.clear()


def told_to_the_loader(job: tw.Job, model: nn.Module, opt: Any) -> None:
    for batch in job.loader(Texts(), batch_size=4, weights=tokens):
        loss, count = summed(model, batch)
        assert job.weight() == count
        make_step(opt, loss / count)


def told_by_batch(job: tw.Job, model: nn.Module, opt: Any) -> None:
    for batch in job.loader(Texts(), batch_size=4):
        opt.zero_grad()
        assert job.weight() == len(batch[0])
        loss, count = summed(model, batch)
        (loss / count).backward()
        assert job.weight(count) == count
        opt.step()


def own_batches(job: tw.Job, model: nn.Module, opt: Any) -> None:
    """Without a loader, before backward and after it; what is withdrawn does not count."""
    data, first = Texts(), 0
    for number, size in enumerate(SIZES):
        for index in job.my_slices:
            cut = [first + size * i // 2 for i in range(3)]
            rows = [data[i] for i in range(cut[index], cut[index + 1])]
            batch = [torch.stack(each) for each in zip(*rows, strict=True)]
            for is_last in (False, True):
                loss, count = summed(model, batch)
                if number % 2:
                    job.weight(count)
                    if is_last:
                        opt.zero_grad()
                    (loss / count).backward()
                else:
                    opt.zero_grad()
                    (loss / count).backward()
                    job.weight(count)
            assert job.weight() == count
            opt.step()
            opt.zero_grad()
        first += size


WAYS: tuple[Callable[..., None], ...] = (alike, told_to_the_loader, told_by_batch, own_batches)


def token_means(job: tw.Job) -> list[float]:
    """How far each way leads from one process that has each step as a whole."""
    found = []
    for way in WAYS:
        torch.manual_seed(0)
        model = nn.Linear(4, 3).double()
        twin = copy.deepcopy(model)
        opt = tw.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5), model)
        way(job, model, opt)
        data, first = Texts(), 0
        for size in SIZES:
            rows = [data[i] for i in range(first, first + size)]
            loss, count = summed(twin, [torch.stack(each) for each in zip(*rows, strict=True)])
            gradients = torch.autograd.grad(loss / count, list(twin.parameters()))
            with torch.no_grad():
                for parameter, gradient in zip(twin.parameters(), gradients, strict=True):
                    parameter -= 0.5 * gradient
            first += size
        pairs = zip(model.parameters(), twin.parameters(), strict=True)
        found.append(max(float((a - b).detach().abs().max()) for a, b in pairs))
        opt.close()
    return found


def test_a_token_mean_is_exact(team: Team) -> None:
    """Named for a bug: a loss that the script had scaled was weighted by samples once more."""
    for found in (*team.run(token_means), team.alone(token_means, slices=2)):
        assert max(found) < 1e-15, dict(zip([way.__name__ for way in WAYS], found, strict=True))


def accumulated(job: tw.Job) -> list[float]:
    """The weights of the batches of a step add up; a GAN's optimizers count one batch each."""
    model, other = nn.Linear(4, 3).double(), nn.Linear(4, 3).double()
    opt, second = (
        tw.DistributedOptimizer(torch.optim.SGD(each.parameters(), lr=0.1), each)
        for each in (model, other)
    )
    found = []
    loader = job.loader(Texts(), batch_size=2, accumulate=2, weights=tokens)
    for number, batch in enumerate(loader):
        if number % 2 == 0:
            with opt.accumulate(), second.accumulate():
                (summed(model, batch)[0] + summed(other, batch)[0]).backward()
            before = tokens(batch)
            continue
        (summed(model, batch)[0] + summed(other, batch)[0]).backward()
        for replica in job.local_replicas:
            found.append(replica.reducer.samples.weight() - before - tokens(batch))
        opt.step(), opt.zero_grad(), second.step(), second.zero_grad()
    return found


def nothing(job: tw.Job) -> list[Any]:
    """Slices with weight 0 have nan for a gradient, which is not read."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).double()
    opt = tw.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.1), model, max_norm=1.0)
    found: list[Any] = []
    weights = [0, 3, 0, 0]  # of both slices of two steps
    x = torch.randn(16, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for number, (part,) in enumerate(job.loader(torch.utils.data.TensorDataset(x), batch_size=4)):
        step, turn = divmod(number, len(job.my_slices))
        weight = weights[2 * step + job.my_slices[turn]]
        job.weight(weight)
        (model(part).square().sum() / weight).backward() if weight else (
            model(part).sum() * math.nan
        ).backward()
        opt.step()
        opt.zero_grad()
        if job.step_complete:
            found.append(torch.cat([p.detach().flatten() for p in model.parameters()]).tolist())
            found.append(opt.last_norm)
    found.append([float(each["step"]) for each in opt.state_dict()["state"].values()])
    return found


def test_weights_add_up_and_may_be_nothing(team: Team) -> None:
    for found in (*team.run(accumulated), team.alone(accumulated, slices=2)):
        assert set(found) == {0.0}
    first, second = team.run(nothing)
    assert first == second == team.alone(nothing, slices=2)
    assert all(map(math.isfinite, first[0]))
    assert first[2] == first[0], "nothing counts, and parameters have changed"
    assert first[1] > 0
    assert first[3] == 0
    assert set(first[4]) == {1.0}


def at_its_own_pace(job: tw.Job) -> list[float]:
    model = nn.Linear(2, 2)
    opt = tw.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.1), model)
    before = model.weight.tolist()
    for _ in range(2):
        job.weight(0)
        make_step(opt, model(torch.ones(1, 2)).sum() * math.nan)
    job.barrier()
    assert model.weight.tolist() == before
    return [float(each["step"]) for each in opt.state_dict()["state"].values()]


def test_nothing_counts_in_a_step_of_one_worker(team: Team) -> None:
    for found in team.run(at_its_own_pace, mode="async"):
        assert set(found) <= {0.0}


def told_of(job: tw.Job, weights: Any, before: bool, size: int) -> list[str]:
    """Returns the warning of a script that sums up before its backward, or only after its step."""
    model = nn.Linear(4, 3).double()
    opt = tw.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(2):
            for batch in job.loader(Texts(), batch_size=size, weights=weights):
                if before:
                    job.sum([1.0])
                loss, _ = summed(model, batch)
                loss.backward()
                job.mean(loss)
                opt.step()
                job.barrier()
                opt.zero_grad()
    return [each.category.__name__ for each in found]


def test_a_loss_that_is_scaled_by_hand_is_told(team: Team) -> None:
    told = ["UnevenStepWarning"]
    assert team.run(told_of, None, True, 4) == [told, []]
    assert team.alone(told_of, None, False, 4, slices=2) == []
    assert team.alone(told_of, "equal", False, 4, slices=2) == []
    assert team.alone(told_of, "equal", True, 4) == []
    assert team.alone(told_of, "equal", True, 4, slices=2) == told, "a sum over one slice of two"
    assert team.alone(told_of, tokens, True, 4, slices=2) == []
    assert team.alone(told_of, None, True, 7, slices=3) == []  # all steps are even


def refused(job: tw.Job) -> list[str]:
    found = []
    for weights in ("tokens", 3, lambda batch: None, lambda batch: -1.0, lambda batch: math.nan):
        try:
            next(iter(job.loader(Texts(), batch_size=4, weights=weights)))
        except (TypeError, ValueError) as error:
            found.append(str(error))
    try:
        job.weight(2)
    except RuntimeError as error:
        found.append(str(error))
    return found


def test_what_is_no_weight(team: Team) -> None:
    found = team.alone(refused)
    assert all("lambda batch: int(batch['mask'].sum())" in each for each in found[:2])
    assert "a weight is a number, of tokens for example, and not None" in found[2]
    assert all("a weight is a finite number from 0 up" in each for each in found[3:5])
    assert "before tw.DistributedOptimizer" in found[5]
