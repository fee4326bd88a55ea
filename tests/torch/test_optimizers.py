"""Groups, schedulers and the state of optimizers are as in plain torch."""

import io
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from scripts import digest
from team import Team
from torch import nn
from twins import STEPS, Model, adamw, batch, loss, make_step, mean_gradients, net, same, sgd

import tensorwire.torch as tw

# ---- hyper-parameters and schedulers


def scheduling(job: tw.Job, before: bool, cycle: bool) -> None:
    model, twin = net(), net()

    def make(model: Any) -> Any:
        groups = [
            {"params": model[0].parameters(), "lr": 0.3, "weight_decay": 0.1},
            {"params": model[2].parameters(), "lr": 0.01},
        ]
        return torch.optim.SGD(groups, lr=0.1, momentum=0.5)

    def schedule(opt: Any) -> Any:
        if cycle:
            return torch.optim.lr_scheduler.OneCycleLR(opt, [0.3, 0.1], total_steps=2 * STEPS)
        return torch.optim.lr_scheduler.ExponentialLR(opt, 0.7)

    opt, plain = make(model), make(twin)
    if before:
        ours = schedule(opt)
        assert tw.DistributedOptimizer(opt, model) is opt
    else:
        tw.DistributedOptimizer(opt, model)
        ours = schedule(opt)
    assert isinstance(opt, torch.optim.SGD)
    theirs = schedule(plain)
    for step in range(STEPS):
        make_step(opt, loss(model, batch(step, job.rank)))
        mean_gradients(twin, step)
        plain.step()
        plain.zero_grad()
        ours.step()
        theirs.step()
    same(model, twin)


@pytest.mark.parametrize("cycle", [False, True], ids=["exponential", "one cycle"])
@pytest.mark.parametrize("before", [False, True], ids=["after", "before"])
def test_groups_and_schedulers(team: Team, before: bool, cycle: bool) -> None:
    team.run(scheduling, before, cycle)


# ---- closures


def adam(model: Model) -> torch.optim.Adam:
    return torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=0.1)


def stepping(job: tw.Job, make: Callable[..., Any], way: str) -> tuple[str, list[float]]:
    """Trains; a failing closure and what is said of gradients leave nothing behind."""
    model = net()
    opt = tw.DistributedOptimizer(make(model), model)
    losses: list[float] = []

    def closure(step: int, index: int, fails: bool = False) -> torch.Tensor:
        opt.zero_grad()
        found = loss(model, batch(step, index))
        found.backward()
        if way == "clipping":
            tw.clip_grad_norm_(model, 0.05)
        if fails:
            raise ArithmeticError("of the closure")
        return found

    for step in range(STEPS):
        for index in job.my_slices:
            if way == "without":
                found = closure(step, index)
                assert opt.step() is None
            else:
                before = digest(model)
                with pytest.raises(ArithmeticError, match="of the closure"):
                    opt.step(lambda: closure(step + 1, index, fails=True))  # noqa: B023
                assert digest(model) == before
                with torch.set_grad_enabled(way != "no_grad"):
                    found = opt.step(lambda: closure(step, index))  # noqa: B023
            losses.append(found.item())
    return digest(model), losses


@pytest.mark.parametrize("make", [sgd, adam, adamw], ids=["SGD", "Adam", "AdamW"])
def test_a_closure_leaves_the_bits_of_the_same_calls(
    team: Team, transports: list[str] | None, make: Callable[..., Any]
) -> None:
    plain = team.run(stepping, make, "without", transports=transports)
    for way in ("with", "no_grad"):
        assert team.run(stepping, make, way, transports=transports) == plain
    bits = plain[0][0]
    assert team.alone(stepping, make, "with", slices=2)[0] == bits
    clipped = team.run(stepping, make, "clipping", transports=transports)
    assert clipped[0][0] == clipped[1][0] != bits


def scheduling_by_batch(job: tw.Job) -> str:
    model = net()
    opt = tw.DistributedOptimizer(sgd(model), model)
    sched = torch.optim.lr_scheduler.ExponentialLR(opt, 0.7)
    slices = [(step, index) for step in range(STEPS) for index in job.my_slices]
    for i, (step, index) in enumerate(slices):
        make_step(opt, loss(model, batch(step, index)))
        if (i + 1) % len(job.my_slices) == 0:
            sched.step()
    assert sched.get_last_lr() == pytest.approx([0.1 * 0.7**STEPS])
    return digest(model)


def test_a_scheduler_that_steps_with_the_last_slice(team: Team) -> None:
    """The advice of the error about a scheduler between slices."""
    assert team.alone(scheduling_by_batch, slices=2) == team.run(scheduling_by_batch)[0]


def adding_a_group(job: tw.Job, make: Callable[..., Any]) -> str:
    model, twin = net(), net()
    opts = []
    for each in (model, twin):
        each.extra = nn.Linear(3, 3).double()
        with torch.no_grad():
            each.extra.weight.fill_(0.1)
            each.extra.bias.fill_(0.1)
        opts.append(make(nn.ModuleList(list(each)[:3])))
    opt, plain = tw.DistributedOptimizer(opts[0], model), opts[1]
    for step in range(STEPS):
        if step == 2:
            opt.add_param_group({"params": model.extra.parameters(), "lr": 0.3})
            plain.add_param_group({"params": twin.extra.parameters(), "lr": 0.3})
        loss(model, batch(step, job.rank)).backward()
        opt.step()
        model.zero_grad()
        mean_gradients(twin, step)
        plain.step()
        twin.zero_grad()
    same(model, twin)
    return digest(model)


@pytest.mark.parametrize("make", [sgd, adamw])
def test_a_group_added_while_training(
    team: Team, transports: list[str] | None, make: Callable[..., Any]
) -> None:
    """Named for a bug: the new store began with the version of the old one."""
    first, second = team.run(adding_a_group, make, transports=transports)
    assert first == second
    team.alone(adding_a_group_alone, make)


def adding_a_group_alone(job: tw.Job, make: Callable[..., Any]) -> None:
    model = net()
    opt = tw.DistributedOptimizer(make(model[0]), model)
    loss(model, batch(0, 0)).backward()
    opt.step()
    opt.add_param_group({"params": model[2].parameters()})
    opt.zero_grad()
    loss(model, batch(1, 0)).backward()
    before = digest(model[2])
    opt.step()
    assert digest(model[2]) != before


def a_group_while_accumulating(job: tw.Job) -> str:
    """All of the sum counts, though the store is another one from the first backward on."""
    model, twin = net(), net()
    opt, plain = tw.DistributedOptimizer(sgd(model[0]), model), sgd(twin[0])
    with opt.accumulate():
        opt.add_param_group({"params": model[2].parameters()})
        loss(model, batch(0, job.rank)).backward()
        assert not opt._tensorwire.never_stepped  # nothing has left
    plain.add_param_group({"params": twin[2].parameters()})
    loss(model, batch(1, job.rank)).backward()
    opt.step()
    mean_gradients(twin, 0)
    mean_gradients(twin, 1)
    plain.step()
    same(model, twin)
    return digest(model)


def test_a_group_added_while_gradients_accumulate(team: Team) -> None:
    first, second = team.run(a_group_while_accumulating)
    assert first == second


# ---- state


def state_to_plain(job: tw.Job, make: Callable[..., Any]) -> None:
    """Ours to plain torch's and back, and both go on alike."""
    model, twin = net(), net()
    opt, plain = tw.DistributedOptimizer(make(model), model), make(twin)
    for step in range(2):
        make_step(opt, loss(model, batch(step, job.rank)))
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "opt": opt.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    assert pickle.loads(pickle.dumps(saved)).keys() == saved.keys()
    twin.load_state_dict(saved["model"])
    plain.load_state_dict(saved["opt"])
    for step in range(2, 5):
        make_step(opt, loss(model, batch(step, job.rank)))
        mean_gradients(twin, step)
        plain.step()
        plain.zero_grad()
    same(model, twin)
    # Back: plain torch goes on for some steps, we take what it has.
    for step in range(5, 7):
        mean_gradients(twin, step)
        plain.step()
        plain.zero_grad()
    with tw.edit(model):
        model.load_state_dict(twin.state_dict())
    opt.load_state_dict(plain.state_dict())
    for step in range(7, 9):
        make_step(opt, loss(model, batch(step, job.rank)))
        mean_gradients(twin, step)
        plain.step()
        plain.zero_grad()
    same(model, twin)


def amsgrad(model: Model) -> torch.optim.Adam:
    return torch.optim.Adam(model.parameters(), lr=0.01, amsgrad=True, weight_decay=0.1)


def no_momentum(model: Model) -> torch.optim.SGD:
    return sgd(model, momentum=0)


@pytest.mark.parametrize("make", [sgd, adamw, amsgrad, no_momentum])
def test_state_of_plain_torch_and_back(
    team: Team, transports: list[str] | None, make: Callable[..., Any]
) -> None:
    team.run(state_to_plain, make, transports=transports)
    if transports is None:
        team.run(state_to_plain, make, servers=2)


def used_before(job: tw.Job, other: bool) -> None:
    """A resumed optimizer is wrapped; worker 0's state wins. Or: state with other fields comes."""
    model, twin = net(), net()
    opt, plain = (no_momentum(model) if other else sgd(model)), sgd(twin)
    mean_gradients(twin, 0)
    plain.step()
    plain.zero_grad()
    model.load_state_dict(twin.state_dict())
    if other:
        tw.DistributedOptimizer(opt, model)
        opt.load_state_dict(plain.state_dict())
    else:
        opt.load_state_dict(plain.state_dict())
        tw.DistributedOptimizer(opt, model)
    for step in range(1, 3):
        make_step(opt, loss(model, batch(step, job.rank)))
        mean_gradients(twin, step)
        plain.step()
        plain.zero_grad()
    same(model, twin)


@pytest.mark.parametrize("other", [False, True], ids=["wrapped late", "other fields"])
def test_state_from_before(team: Team, other: bool) -> None:
    """Named for bugs: the state of an optimizer used before was lost; momentum came unexpected."""
    team.run(used_before, other)


def only_amsgrad_in_one_group(job: tw.Job) -> list[list[float]]:
    model = nn.Linear(4, 3).double()
    with torch.no_grad():
        model.weight.fill_(0.5)
        model.bias.fill_(0.5)
    groups = [{"params": [model.weight], "amsgrad": True}, {"params": [model.bias]}]
    opt = torch.optim.Adam(groups, lr=0.1)
    if isinstance(job, tw.Job):
        opt = tw.DistributedOptimizer(opt, model)
    for scale in (1.0, 0.1, 3.0):
        make_step(opt, model(torch.full((2, 4), scale, dtype=torch.float64)).pow(2).sum())
    return [parameter.detach().flatten().tolist() for parameter in model.parameters()]


def test_amsgrad_in_some_groups(team: Team) -> None:
    plain = only_amsgrad_in_one_group(None)  # type: ignore[arg-type]
    for ours in team.run(only_amsgrad_in_one_group):
        for mine, theirs in zip(ours, plain, strict=True):
            assert mine == pytest.approx(theirs, rel=1e-12)


# ---- two optimizers with one batch


def turns(job: tw.Job, adversarial: bool) -> list[str]:
    """Returns what is told of a GAN, or of one loss that two optimizers lower."""
    first, second = nn.Linear(4, 4), nn.Linear(4, 1)
    opts = [
        tw.DistributedOptimizer(torch.optim.SGD(each.parameters(), lr=0.1), each)
        for each in (first, second)
    ]
    data = torch.utils.data.TensorDataset(torch.randn(16, 4))
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for (x,) in job.loader(data, batch_size=4):
            made = first(x)
            if adversarial:
                make_step(opts[1], second(made.detach()).mean())
                opts[0].zero_grad()
                (-second(made)).mean().backward()
                opts[0].step()
                continue
            second(made).mean().backward()
            for opt in opts:
                opt.step()
            for opt in opts:
                opt.zero_grad()
    return [str(each.message).partition(":")[0] for each in found]


def test_optimizers_that_take_turns_with_several_slices_are_told(team: Team) -> None:
    """Named for a bug: a GAN got other bits with fewer workers, and nobody was told."""
    told = (
        "this worker computes several slices of a step, and optimizers take turns with each of them"
    )
    assert team.alone(turns, True, slices=2) == [told]
    assert team.alone(turns, False, slices=2) == []
    assert team.alone(turns, True, slices=1) == []
    assert team.run(turns, True) == [[], []]
