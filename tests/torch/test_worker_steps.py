"""Steps that worker 0 makes: what is not finite, another order in memory, random numbers."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from scripts import digest
from team import Team
from torch import nn, optim
from twins import make_step

import tensorwire.torch as tw


class Script(optim.Optimizer):
    """An optimizer of no module that servers import."""

    def __init__(self, params: Any, do: Callable[[nn.Parameter], None]) -> None:
        super().__init__(params, {"lr": 0.5})
        self.do = do

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad, alpha=group["lr"])
                self.do(p)


def transpose(p: nn.Parameter) -> None:
    p.data = p.data.t().contiguous().t()


def noise(p: nn.Parameter) -> None:
    p.add_(torch.randn_like(p))


def reshape(p: nn.Parameter) -> None:
    p.data = p.data.reshape(-1)


def trained(job: tw.Job, do: Callable[[nn.Parameter], None]) -> tuple[Any, Any, Any]:
    torch.manual_seed(0)
    model = nn.Linear(3, 2, bias=False)
    before = model.weight.detach().clone()
    opt = tw.DistributedOptimizer(Script(model.parameters(), do), model, apply="worker")
    for _ in range(2):
        make_step(opt, (model.weight * torch.arange(6.0).view(2, 3)).sum())
    return (model.weight - before).tolist(), model.weight.stride(), torch.randperm(9).tolist()


def test_another_order_in_memory(team: Team) -> None:
    """Named for a bug: the other workers read the values in the order that they had before."""
    for moved, stride, _ in team.run(trained, transpose):
        assert stride == (3, 1)
        torch.testing.assert_close(torch.tensor(moved), -torch.arange(6.0).view(2, 3))


def test_random_numbers_of_a_step(team: Team) -> None:
    """Named for a bug: afterwards worker 0 drew others than the rest. Each step has its own."""
    first, second = team.run(trained, noise)
    assert first == second
    assert first[2] == team.run(trained, transpose)[0][2], "the script's own are as without"


def test_another_shape(team: Team) -> None:
    failures = team.failures(trained, reshape)
    assert any("has made a parameter of the shape (2, 3)" in each.trace for each in failures), (
        failures
    )


def undefined(job: tw.Job, apply: str, max_norm: float | None) -> list[bool]:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    opt = tw.DistributedOptimizer(
        optim.NAdam(model.parameters()), model, apply=apply, max_norm=max_norm
    )
    loss = model.weight[0, 0] * (float("nan") if job.rank else 1.0) + model.bias.sum()
    loss.backward()
    opt.step()
    return [bool(p.isnan().any()) for p in model.parameters()]


@pytest.mark.parametrize("apply", ["servers", "worker"])
def test_what_is_not_finite_is_applied_without_a_scaler(team: Team, apply: str) -> None:
    """Named for a bug: where worker 0 applies, such a step was left out without a notice."""
    assert team.run(undefined, apply, None) == [[True, False]] * 2
    assert team.run(undefined, apply, 1.0) == [[True, True]] * 2  # the norm is of both


def clipped(job: tw.Job, infinite: bool, make: Callable[[Any], Any]) -> tuple[Any, float]:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    opt = tw.DistributedOptimizer(make(model.parameters()), model)
    scaler = tw.GradScaler(init_scale=256.0)
    before = digest(model)
    factor = float("inf") if infinite and job.rank else 1.0
    scaler.scale(model.weight[0, 0] * factor + model.bias.sum()).backward()
    scaler.unscale_(opt)
    nn.utils.clip_grad_value_(model.parameters(), 0.1)
    scaler.step(opt)
    scaler.update()
    return digest(model) != before, scaler.get_scale()


def script(params: Any) -> optim.Optimizer:
    return Script(params, noise)


@pytest.mark.parametrize("make", [optim.SGD, optim.NAdam, script])
def test_a_scaler_remembers_what_was_clipped(team: Team, make: Any) -> None:
    """Named for a bug: clipping by value made an infinite gradient finite, and it was applied."""
    assert team.run(clipped, True, make) == [(False, 128.0)] * 2
    assert team.run(clipped, False, make) == [(True, 256.0)] * 2
