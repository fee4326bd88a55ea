"""Classes that a trial must find out: they treat some tensors, groups or steps otherwise."""

import json
from typing import Any

import pytest
import torch
from foreign import Bare, Lion
from team import Team
from torch import nn, optim
from twins import make_step

import tensorwire.torch as tw
from tensorwire.torch.kernels import (
    NotOnServersError,
    OptimizerSpec,
    ParameterKind,
    describe,
    has_other_attributes,
)


def text_of(optimizer: optim.Optimizer) -> str:
    """Its description, as the servers of a process alone have it."""
    kinds = {
        ParameterKind(index, p.dtype, p.dim(), False, tuple(p.shape))
        for index, group in enumerate(optimizer.param_groups)
        for p in group["params"]
    }
    return describe(optimizer, kinds, None)


def method_of(make: Any, *shapes: tuple[int, ...]) -> str:
    made = make([nn.Parameter(torch.zeros(shape)) for shape in shapes])
    return str(json.loads(text_of(made))["method"])


class FactoredIfLarge(Bare):
    """Keeps rows and columns of large matrices alone, and all of others."""

    def update(self, p: nn.Parameter, group: dict[str, Any]) -> None:
        assert p.grad is not None
        state, square = self.state[p], p.grad.square()
        if p.dim() == 2 and min(p.shape) >= 128:
            state.setdefault("row", torch.zeros(p.shape[0])).add_(square.mean(1))
            state.setdefault("column", torch.zeros(p.shape[1])).add_(square.mean(0))
            square = torch.outer(state["row"], state["column"])
        else:
            square = state.setdefault("square", torch.zeros_like(p)).add_(square)
        p.add_(p.grad / (square.sqrt() + 1e-8), alpha=-group["lr"])


class RoundedIfEven(Bare):
    """Rounds its mean by blocks of 256 elements, where a tensor has many and nothing else."""

    def update(self, p: nn.Parameter, group: dict[str, Any]) -> None:
        mean = self.state[p].setdefault("mean", torch.zeros_like(p)).lerp_(p.grad, 0.1)
        if p.numel() >= 4096 and p.numel() % 256 == 0:
            blocks = mean.view(-1, 256)
            unit = blocks.abs().amax(1, True).clamp_(1e-12) / 127
            mean.copy_(((blocks / unit).round() * unit).view_as(p))
        p.add_(mean, alpha=-group["lr"])


class ClippedByTensor(Bare):
    """Shortens a gradient that is longer than 10."""

    def update(self, p: nn.Parameter, group: dict[str, Any]) -> None:
        assert p.grad is not None
        gradient, norm = p.grad, p.grad.norm()
        if norm > 10:
            gradient = gradient * (10 / norm)
        p.add_(gradient, alpha=-group["lr"])


class SquareOtherwise(Bare):
    """Makes the update of square matrices symmetric."""

    def update(self, p: nn.Parameter, group: dict[str, Any]) -> None:
        assert p.grad is not None
        update = p.grad
        if p.dim() == 2 and p.shape[0] == p.shape[1]:
            update = (update + update.T) / 2
        p.add_(update, alpha=-group["lr"])


class HugeOtherwise(Bare):
    """Halves the steps of tensors that are larger than all of a trial."""

    def update(self, p: nn.Parameter, group: dict[str, Any]) -> None:
        p.add_(p.grad, alpha=-group["lr"] / (2 if p.numel() > 10**7 else 1))


class LargerThanItself(Bare):
    """Keeps an array that is larger than a matrix with one row."""

    def update(self, p: nn.Parameter, group: dict[str, Any]) -> None:
        self.state[p].setdefault("both", torch.zeros(sum(p.shape))).add_(1)
        p.add_(p.grad, alpha=-group["lr"])


@pytest.mark.parametrize(
    "cls", [FactoredIfLarge, RoundedIfEven, ClippedByTensor, SquareOtherwise, HugeOtherwise]
)
def test_what_depends_on_size_or_shape_or_magnitude_gets_whole_tensors(cls: Any) -> None:
    assert method_of(cls, (40, 50), (7,)) == "whole"


def test_what_looks_at_no_shape_is_cut() -> None:
    assert method_of(Lion, (40, 50), (7,)) == "elementwise"
    assert method_of(optim.RMSprop, (40, 50), (7,)) == "elementwise"


def test_the_shapes_of_the_model_are_tried() -> None:
    assert method_of(LargerThanItself, (40, 50)) == "whole"
    with pytest.raises(NotOnServersError, match="keeps 'both', a tensor of"):
        method_of(LargerThanItself, (40, 50), (1, 40))


class DecaysAll(Bare):
    """Decays parameters that have no gradient too."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.mul_(0.9)
        super().step()


class CountsAll(Bare):
    """Counts the steps of parameters that have no gradient too."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["count"] = self.state[p].get("count", 0) + 1
        super().step()


class CountsInState(Bare):
    """Counts its steps in an entry of the state that belongs to no parameter."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        entry: dict[str, Any] = self.state["all"]  # type: ignore[index]
        entry["count"] = entry.get("count", 0) + 1
        super().step()


@pytest.mark.parametrize(
    ("cls", "says"),
    [
        (DecaysAll, "changes parameters that have no gradient"),
        (CountsAll, "changes parameters that have no gradient"),
        (CountsInState, "its state has 'all', which is no parameter"),
    ],
)
def test_what_servers_would_do_otherwise(cls: Any, says: str) -> None:
    with pytest.raises(NotOnServersError, match=says):
        method_of(cls, (40, 50), (7,))


class WithFactor(Bare):
    """A group may have a factor that is no default; so may the optimizer and a parameter."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr)
        self.factor = 1.0

    def update(self, p: nn.Parameter, group: dict[str, Any]) -> None:
        factor = group.get("factor", 1.0) * getattr(p, "factor", 1.0) * self.factor
        p.add_(p.grad, alpha=-group["lr"] * factor)


def two_groups(**second: Any) -> list[dict[str, Any]]:
    first, other = nn.Parameter(torch.zeros(40, 50)), nn.Parameter(torch.zeros(7))
    return [{"params": [first]}, {"params": [other], **second}]


def test_options_that_are_no_defaults_are_described() -> None:
    made = WithFactor(two_groups(factor=0.5))
    found = json.loads(text_of(made))
    assert "factor" not in found["groups"][0]["constants"]
    assert found["groups"][1]["constants"]["factor"] == 0.5
    made.param_groups[0]["factor"] = 2.0
    assert "factor" in json.loads(text_of(made))["numbers"]


def test_what_schedulers_put_into_groups_is_no_option() -> None:
    made = WithFactor(two_groups())
    before = text_of(made)
    optim.lr_scheduler.OneCycleLR(made, 0.1, 10, cycle_momentum=False)
    for group in made.param_groups:
        group["lr"] = 0.1
    assert text_of(made) == before


def test_attributes_of_parameters() -> None:
    made = WithFactor(two_groups())
    first = made.param_groups[0]["params"][0]
    first._is_hf_initialized = True
    text_of(made)
    first.factor = 0.5
    with pytest.raises(NotOnServersError, match="a parameter has the attribute 'factor'"):
        text_of(made)
    text_of(optim.RMSprop(made.param_groups[0]["params"]))  # torch's own look at none


def test_attributes_of_the_optimizer() -> None:
    made = WithFactor(two_groups())
    described = OptimizerSpec.from_text(text_of(made)).attributes
    assert not has_other_attributes(made, described)
    made.factor = 0.5
    assert has_other_attributes(made, described)
    made.factor = 1.0
    made.callback = print  # type: ignore[attr-defined]
    assert has_other_attributes(made, described)
    plain = optim.RMSprop(made.param_groups)
    plain.callback = print  # type: ignore[attr-defined]
    assert not has_other_attributes(plain, {})


def changing_midway(job: tw.Job, what: str) -> None:
    """An option that is no default, or an attribute, comes after a step."""
    model = nn.Linear(3, 2)
    opt = tw.DistributedOptimizer(WithFactor(model.parameters()), model, apply="servers")
    for step in range(2):
        if step and what == "attribute":
            opt.factor = 0.5
        if step and what == "option":
            opt.param_groups[0]["factor"] = 0.5
        make_step(opt, model(torch.ones(1, 3)).sum())


@pytest.mark.parametrize("what", ["attribute", "option"])
def test_what_changes_midway_is_an_error(team: Team, what: str) -> None:
    failure = team.failure_alone(changing_midway, what)
    assert "or an attribute of the optimizer; set it" in failure.text
    assert team.alone(changing_midway, "nothing") is None


def with_momentum_later(job: tw.Job, dampening: float) -> None:
    """The second group of SGD begins with momentum in the third step."""
    model, twin = nn.Linear(2, 2), nn.Linear(2, 2)
    twin.load_state_dict(model.state_dict())

    def sgd(of: nn.Linear) -> optim.Optimizer:
        groups = [{"params": [of.weight]}, {"params": [of.bias], "momentum": 0.0}]
        return optim.SGD(groups, lr=0.5, momentum=0.5, dampening=dampening, foreach=False)

    opt, plain = tw.DistributedOptimizer(sgd(model), model), sgd(twin)
    for step in range(5):
        if step == 2:
            opt.param_groups[1]["momentum"] = plain.param_groups[1]["momentum"] = 0.5
        for each, its in (model, opt), (twin, plain):
            its.zero_grad()
            (each.weight.sum() + each.bias.sum()).backward()
            its.step()
        assert torch.equal(model.bias, twin.bias)
        assert torch.equal(model.weight, twin.weight)


def test_momentum_of_a_group_begins_later(team: Team) -> None:
    """Torch does not damp its first step; servers cannot tell, and say so."""
    team.alone(with_momentum_later, 0.0)
    failure = team.failure_alone(with_momentum_later, 0.5)
    assert failure.text.startswith("momentum, amsgrad or another option")


class WiderIfHuge(Bare):
    """Keeps one number of a tensor that is larger than all of a trial, and else as many as it."""

    def update(self, p: nn.Parameter, group: dict[str, Any]) -> None:
        size = torch.Size((1,)) if p.numel() > 10**6 else p.shape
        self.state[p].setdefault("mean", torch.zeros(size)).add_(1)
        p.add_(p.grad, alpha=-group["lr"])


def of_another_shape(job: tw.Job) -> None:
    model = nn.Linear(1001, 1000)
    opt = tw.DistributedOptimizer(WiderIfHuge(model.parameters()), model, apply="servers")
    model(torch.ones(1, 1001)).sum().backward()
    opt.step()


def test_state_has_another_shape_than_in_the_trial(team: Team) -> None:
    text = team.failure_alone(of_another_shape).text
    assert "keeps 'mean' of (1,), and not of (1000, 1001) as in its first steps" in text
    assert 'apply="worker"' in text
