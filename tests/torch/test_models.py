"""Models of all kinds: tied, frozen, compiled, of two optimizers, with buffers, edited."""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from scripts import digest
from team import Team
from torch import nn
from torch.utils.checkpoint import checkpoint
from twins import EXACT, STEPS, Model, adamw, batch, loss, make_step, mean_gradients, net, same, sgd

import tensorwire.torch as tw


class Zoo(nn.Module):
    """Tied, frozen, empty, scalar, transposed parameters, and one that is used now and then."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.a = nn.Linear(5, 5, bias=False)
        self.b = nn.Linear(5, 5)
        self.b.weight = self.a.weight
        self.frozen = nn.Linear(5, 5).requires_grad_(False)
        self.empty = nn.Parameter(torch.empty(0, 4))
        self.scalar = nn.Parameter(torch.tensor(1.5))
        self.transposed = nn.Parameter(torch.randn(3, 5).t())
        self.sometimes = nn.Linear(5, 3)
        self.never = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor, use: bool) -> torch.Tensor:
        y = self.frozen(self.b(torch.tanh(self.a(x)))) * self.scalar @ self.transposed
        return y + self.sometimes(x) + self.empty.sum() if use else y


def zoo(job: tw.Job, dtype: torch.dtype, make: Callable[..., Any]) -> str:
    model, twin = Zoo().to(dtype), Zoo().to(dtype)
    if job.rank == 1:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1.0)  # worker 0's values win, of frozen ones too
    opt, plain = tw.DistributedOptimizer(make(model), model), make(twin)
    uses = [(True, True), (False, False), (False, True), (True, True), (True, False)]
    for step, use in enumerate(uses):
        make_step(opt, model(batch(step, job.rank).to(dtype), use[job.rank]).square().mean())
        for rank in range(2):
            (twin(batch(step, rank).to(dtype), use[rank]).square().mean() / 2).backward()
        plain.step()
        plain.zero_grad()
    rough = {torch.float64: EXACT, torch.float32: {"rtol": 1e-4, "atol": 1e-5}}
    same(model, twin, **rough.get(dtype, {"rtol": 0.05, "atol": 0.05}))
    assert model.b.weight is model.a.weight
    assert model.transposed.stride() == (1, 5)
    assert torch.equal(model.never.float(), torch.ones(3))
    return digest(model)


@pytest.mark.parametrize("make", [sgd, adamw])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_parameters_of_all_kinds(
    team: Team, transports: list[str] | None, dtype: torch.dtype, make: Callable[..., Any]
) -> None:
    first, second = team.run(zoo, dtype, make, transports=transports)
    assert first == second


def hooked(job: tw.Job, reentrant: bool) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = checkpoint(self.net, x, use_reentrant=reentrant)
            return checkpoint(self.net[0], y @ y.t() @ x, use_reentrant=reentrant)

    model, twin = Net(), Net()
    opt, plain = tw.DistributedOptimizer(sgd(model), model), sgd(twin)
    calls = []
    for each in (model, twin):
        each.net[2].weight.register_hook(lambda gradient: gradient * 2)
    opt.register_step_post_hook(lambda *_: calls.append(1))

    def squares(model: Model, x: torch.Tensor) -> torch.Tensor:
        return model(x.clone().requires_grad_()).square().mean()

    for step in range(STEPS):
        make_step(opt, squares(model, batch(step, job.rank)))
        mean_gradients(twin, step, squares)
        plain.step()
        plain.zero_grad()
    same(model, twin)
    assert len(calls) == STEPS


@pytest.mark.parametrize("reentrant", [False, True], ids=["not reentrant", "reentrant"])
def test_hooks_and_checkpoints(team: Team, transports: list[str] | None, reentrant: bool) -> None:
    team.run(hooked, reentrant, transports=transports)


def compiled(job: tw.Job) -> None:
    warnings.simplefilter("ignore")  # torch's compiler warns of torch
    model, twin = net(), net()
    fast = torch.compile(model)
    opt, plain = tw.DistributedOptimizer(sgd(model), fast), sgd(twin)
    for step in range(2):
        make_step(opt, fast(batch(step, job.rank)).square().mean())
        mean_gradients(twin, step, lambda model, x: model(x).square().mean())
        plain.step()
        plain.zero_grad()
    warnings.simplefilter("error")
    same(model, twin)


@pytest.mark.slow
def test_a_compiled_model(team: Team) -> None:
    team.run(compiled)


def two_optimizers(job: tw.Job, whole: bool) -> str:
    torch.manual_seed(2)
    model = nn.ModuleDict({"maker": nn.Linear(5, 5), "judge": nn.Linear(5, 1)}).double()
    twin = copy.deepcopy(model)

    def train(model: Any, opts: Any, xs: list[torch.Tensor]) -> None:
        maker, judge = model["maker"], model["judge"]
        for x in xs:
            y = judge(x).square().mean() - judge(maker(x).detach()).mean()
            (y / len(xs)).backward()
        opts["judge"].step()
        opts["judge"].zero_grad()
        for x in xs:
            (judge(maker(x)).mean() / len(xs)).backward()
        opts["maker"].step()
        opts["maker"].zero_grad()
        opts["judge"].zero_grad()

    plain = {name: adamw(part) for name, part in twin.items()}
    ours = {
        name: tw.DistributedOptimizer(adamw(part), model if whole else part)
        for name, part in model.items()
    }
    for step in range(STEPS):
        train(model, ours, [batch(step, job.rank)])
        train(twin, plain, [batch(step, rank) for rank in range(2)])
    same(model, twin)
    with tw.edit(model), torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    train(model, ours, [batch(9, job.rank)])
    return digest(model)


@pytest.mark.parametrize("whole", [False, True], ids=["parts", "whole model"])
def test_two_optimizers_as_in_a_gan(team: Team, transports: list[str] | None, whole: bool) -> None:
    """Named for a bug: an optimizer of a part took the other part too, as if frozen."""
    first, second = team.run(two_optimizers, whole, transports=transports)
    assert first == second


# ---- buffers


class Counting(nn.Module):
    """Buffers of many kinds, changed by forward in a way that depends on the samples."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(5, dtype=torch.float64))
        self.register_buffer("mean", torch.zeros(5, dtype=torch.float64))
        self.register_buffer("calls", torch.tensor(0))
        self.register_buffer("phase", torch.ones(2, dtype=torch.complex64))
        self.register_buffer("mask", torch.ones(3, dtype=torch.bool))
        self.register_buffer("places", torch.arange(4).expand(3, 4))
        self.register_buffer("turned", torch.arange(6.0).view(2, 3).t())
        self.register_buffer("nothing", None)
        self.register_buffer("replaced", torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
            self.calls += 1
            self.replaced = (self.replaced + float(x.detach().sum()))[:1].expand(2)
            self.turned.add_(1)
        return x * self.weight


def counting(job: tw.Job, kind: str) -> list[list[float]]:
    model = Counting()
    if job.rank == 1:
        model.mean += 1  # worker 0's win
    opt = tw.DistributedOptimizer(sgd(model), model, buffers=kind)
    result = []
    for step in range(3):
        for index in job.my_slices:
            make_step(opt, model(batch(step, index)).square().mean())
            model.eval()
            with torch.no_grad():
                model(batch(step, 9))
            model.train()
        result.append(model.mean.tolist())
    calls = int(model.calls)
    return [*result, [calls], model.replaced.tolist(), model.turned.flatten().tolist()]


def expected_buffers(kind: str) -> tuple[list[list[float]], list[list[float]]]:
    means = [torch.zeros(5, dtype=torch.float64) for _ in range(2)]
    rows: tuple[list[list[float]], list[list[float]]] = ([], [])
    for step in range(3):
        means = [mean * 0.9 + batch(step, i).mean(0) * 0.1 for i, mean in enumerate(means)]
        if kind == "broadcast":
            means[1] = means[0]
        if kind == "average":
            means = [(means[0] + means[1]) / 2] * 2
        for mean, row in zip(means, rows, strict=True):
            row.append(mean.tolist())
    return rows


@pytest.mark.parametrize("transports", ["shm", "tcp"], indirect=True)
@pytest.mark.parametrize("kind", ["broadcast", "average", "local"])
def test_buffers(team: Team, transports: list[str] | None, kind: str) -> None:
    first, second = team.run(counting, kind, transports=transports)
    for ours, theirs in zip((first, second), expected_buffers(kind), strict=True):
        torch.testing.assert_close(torch.tensor(ours[:3]), torch.tensor(theirs))
    assert first[3] == second[3] == [3]
    assert (first == second) == (kind != "local")
    assert team.alone(counting, kind, slices=2) == first


def editing(job: tw.Job) -> str:
    model = net()
    opt = tw.DistributedOptimizer(sgd(model), model)
    with tw.edit(model), torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.1 + job.rank)
    assert all((p == 0.1).all() for p in model.parameters())
    ema = copy.deepcopy(model)
    try:
        with tw.edit(model), torch.no_grad():
            model[0].weight.zero_()
            raise ZeroDivisionError
    except ZeroDivisionError:
        pass
    same(model, ema)
    loss(model, batch(0, job.rank)).backward()
    with torch.no_grad():
        for mine, p in zip(ema.parameters(), model.parameters(), strict=True):
            mine.lerp_(p, 0.5)  # a copy is private
    loss(ema, batch(0, job.rank)).backward()
    opt.step()
    return digest(model)


def test_edit_and_deepcopy(team: Team, transports: list[str] | None) -> None:
    first, second = team.run(editing, transports=transports)
    assert first == second


def freeze_and_unfreeze(job: tw.Job) -> list[list[float]]:
    """A backbone is trained only from the fourth step on."""
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.5)
    model[0].requires_grad_(False)
    plain = torch.optim.Adam(model.parameters(), lr=0.1)
    opt = tw.DistributedOptimizer(plain, model)
    for step in range(6):
        if step == 3:
            with tw.edit(model):
                model[0].requires_grad_(True)
        x = torch.full((2, 4), 1.0 + job.my_slices[0], dtype=torch.float64)
        make_step(opt, model(x).pow(2).sum())
    assert opt.state_dict()["state"][2]["step"] == 6
    assert opt.state_dict()["state"][0]["step"] == 3
    return [parameter.detach().flatten().tolist() for parameter in model.parameters()]


def test_unfreezing_inside_edit_replans(team: Team, transports: list[str] | None) -> None:
    ours = team.run(freeze_and_unfreeze, transports=transports)
    assert ours[0] == ours[1]
    assert ours[0][0] != [0.5] * 12

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.5)
    model[0].requires_grad_(False)
    opt = torch.optim.Adam(model.parameters(), lr=0.1)
    for step in range(6):
        if step == 3:
            model[0].requires_grad_(True)
        for value in (1.0, 2.0):
            (model(torch.full((2, 4), value, dtype=torch.float64)).pow(2).sum() / 2).backward()
        opt.step()
        opt.zero_grad()
    for mine, theirs in zip(ours[0], model.parameters(), strict=True):
        torch.testing.assert_close(
            torch.tensor(mine, dtype=torch.float64), theirs.flatten().detach()
        )


def unfreeze_silently(job: tw.Job) -> None:
    model = nn.Linear(4, 3)
    model.bias.requires_grad_(False)
    opt = tw.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    model.bias.requires_grad_(True)
    model(torch.ones(2, 4)).sum().backward()
    opt.step()


def test_unfreezing_elsewhere_is_an_error(team: Team) -> None:
    assert "'bias' was unfrozen" in team.failure_alone(unfreeze_silently).text
    for failure in team.failures(unfreeze_silently):
        assert "'bias' was unfrozen" in failure.text
