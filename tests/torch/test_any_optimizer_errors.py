"""Optimizers that misbehave, and what cannot be: told to all workers, with what to do."""

import contextlib
import io
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import foreign
import pytest
import torch
from odd import Make, Odd, bits, check_same_state, plain_gradients
from team import Team
from test_any_optimizer import way_of
from torch import nn, optim
from twins import make_step

import tensorwire.torch as tw
from tensorwire.errors import UnavailableError

SMALL: tuple[tuple[int, ...], ...] = ((40, 50), (7,))


def lion(params: Any) -> optim.Optimizer:
    return foreign.Lion(params)


class Local(foreign.Lion):
    """A class of a module that servers were not told to import."""


def local(params: Any) -> optim.Optimizer:
    return Local(params)


def failing(params: Any) -> optim.Optimizer:
    return foreign.Failing(params)


def later_state(params: Any) -> optim.Optimizer:
    return foreign.LaterState(params)


def later_otherwise(params: Any) -> optim.Optimizer:
    return foreign.LaterOtherwise(params)


def growing(params: Any) -> optim.Optimizer:
    return foreign.Growing(params)


def noisy(params: Any) -> optim.Optimizer:
    return foreign.Noisy(params)


def lbfgs(params: Any) -> optim.Optimizer:
    return optim.LBFGS(params)


def needs_closure(params: Any) -> optim.Optimizer:
    return foreign.NeedsClosure(params)


def schedule_free(params: Any) -> optim.Optimizer:
    return foreign.ScheduleFree(params)


def rmsprop(params: Any) -> optim.Optimizer:
    return optim.RMSprop(params, lr=0.1)


def with_a_tensor(params: Any) -> optim.Optimizer:
    """An option that is no number."""
    return foreign.Bare(params, mask=torch.ones(2))


def steps(job: tw.Job, make: Make, apply: str, count: int, compare: bool = False) -> str:
    """Makes steps; returns how."""
    model, twin = Odd(SMALL, torch.float32), Odd(SMALL, torch.float32)
    opt, plain = make(list(model.all)), make(list(twin.all))
    before = torch.get_rng_state()
    opt = tw.DistributedOptimizer(opt, model, apply=apply)
    assert torch.equal(before, torch.get_rng_state())
    for step in range(count):
        for rank in job.my_slices:
            make_step(opt, model(step, rank))
        if compare:
            plain_gradients(twin, step, job.slices)
            plain.step()
            plain.zero_grad()
            assert bits(model) == bits(twin), step
    return way_of(opt._tensorwire.arithmetic)


@pytest.mark.parametrize(
    ("make", "way"),
    [
        (noisy, "worker"),
        (growing, "worker"),
        (local, "worker"),
        (with_a_tensor, "worker"),
        (later_otherwise, "elementwise"),
    ],
)
def test_who_makes_the_steps(team: Team, make: Make, way: str) -> None:
    same = make is not noisy
    assert set(team.run(steps, make, "auto", 25, same, imports="foreign")) == {way}
    assert set(team.run(steps, make, "worker", 25, same)) == {"worker"}
    alone = "elementwise" if make is local else way
    assert team.alone(steps, make, "auto", 25, same) == alone


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (noisy, "depend on how tensors are cut"),
        (growing, "its state has other entries after some steps"),
        (local, "tensorwire run --import test_any_optimizer_errors"),
        (with_a_tensor, "its option 'mask' is a Tensor"),
    ],
)
def test_servers_are_asked_to_and_cannot(team: Team, make: Make, says: str) -> None:
    for failure in team.failures(steps, make, "servers", 1, imports="foreign"):
        assert failure.kind == "UnavailableError"
        assert failure.text.startswith("servers cannot apply ")
        assert says in failure.text


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lbfgs, "evaluates the model several times per step"),
        (needs_closure, "evaluates the model several times per step"),
        (schedule_free, "train() and eval()"),
    ],
)
def test_what_nobody_can_apply(team: Team, make: Make, says: str) -> None:
    for apply in ("auto", "worker", "servers"):
        for failure in team.failures(steps, make, apply, 1, imports="foreign"):
            assert failure.kind == "UnavailableError"
            assert says in failure.text


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (failing, "step() of foreign.Failing raised ArithmeticError: fifteen is too much (/"),
        (
            later_state,
            "foreign.LaterState keeps the state ['count', 'late'], and not the ['count']",
        ),
    ],
)
def test_a_step_fails_on_a_server(team: Team, make: Make, says: str) -> None:
    """All workers get the class and its error; none hangs."""
    for failure in team.failures(steps, make, "servers", 25, imports="foreign", servers=2):
        assert says in failure.text
        assert 'apply="worker") has worker 0 apply it' in failure.text


def test_a_step_fails_in_worker_0(team: Team) -> None:
    first, second = team.failures(steps, failing, "worker", 25)
    assert first.kind == "ArithmeticError"
    assert "worker 0" in second.text
    assert team.failure_alone(steps, failing, "worker", 25).kind == "ArithmeticError"


def disagreeing(job: tw.Job) -> str:
    """Each worker has another class."""
    return steps(job, rmsprop if job.rank else lion, "auto", 1)


def test_workers_disagree(team: Team) -> None:
    """Workers disagree on the class, on the servers' imports, and on the place that applies."""
    for failure in team.failures(disagreeing, imports="foreign"):
        assert "optimizer" in failure.text
        assert "foreign:Lion" in failure.text
        assert "RMSprop" in failure.text
    for failure in team.failures(steps, lion, "auto", 1, imports={0: "foreign", 1: ""}):
        assert "foreign:Lion" in failure.text
        assert "average only" in failure.text


def twice(job: tw.Job) -> None:
    model = Odd(SMALL, torch.float32)
    opt = tw.DistributedOptimizer(rmsprop(list(model.all)), model)
    tw.DistributedOptimizer(opt, model)


def unknown(job: tw.Job, apply: Any) -> None:
    model = Odd(SMALL, torch.float32)
    tw.DistributedOptimizer(rmsprop(list(model.all)), model, apply=apply)


def test_wrong_arguments(team: Team) -> None:
    assert "distributed already" in team.failure_alone(twice).text
    for apply in ("server", None, 3):
        failure = team.failure_alone(unknown, apply)
        assert failure.kind == "ValueError"
        assert "apply is 'auto', 'servers', 'worker'" in failure.text


def capturable(params: Any) -> optim.Optimizer:
    return optim.RMSprop(params, capturable=True, differentiable=False)


def differentiable(params: Any) -> optim.Optimizer:
    return optim.Adamax([{"params": params, "differentiable": True, "capturable": True}])


def heard(job: tw.Job, make: Make, apply: str) -> str:
    """Returns the message of worker 0."""
    with contextlib.redirect_stderr(io.StringIO()) as lines:
        model = Odd(SMALL, torch.float32)
        opt = tw.DistributedOptimizer(make(list(model.all)), model, apply=apply)
        model(0, 0).backward()
        opt.step()
    return lines.getvalue()


def test_what_is_told(team: Team) -> None:
    """Worker 0 says once which choices it has changed, and which process makes the steps."""
    assert team.run(heard, rmsprop, "auto") == ["", ""]
    assert team.run(heard, rmsprop, "worker") == ["", ""]
    for make, words in (
        (capturable, "capturable"),
        (differentiable, "capturable and differentiable"),
    ):
        first, second = team.run(heard, make, "auto")
        assert f"tensorwire: {words} of torch.optim." in first
        assert first.count("\n") == 1
        assert second == ""
    first, second = team.run(heard, local, "auto")
    assert "worker 0 applies test_any_optimizer_errors.Local, as servers cannot" in first
    assert first.count("\n") == 1
    assert second == ""


# ---- opt.state


def state_is_elsewhere(job: tw.Job, apply: str) -> None:
    """The optimizer has no state where servers keep it, before the first step and after."""
    model = Odd(SMALL, torch.float32)
    parameter = next(iter(model.all))
    opt = tw.DistributedOptimizer(rmsprop(list(model.all)), model, apply=apply)
    uses: list[Callable[[], Any]] = [
        lambda: opt.state[parameter]["square_avg"],
        lambda: opt.state.get(parameter),
        lambda: parameter in opt.state,
        lambda: list(opt.state),
        lambda: [each["square_avg"].zero_() for each in opt.state.values()],
        lambda: opt.state.pop(parameter, None),
        lambda: opt.state.update({}),
        lambda: opt.state.clear(),
        lambda: setattr(opt, "state", defaultdict(dict)),
    ]
    for step in range(2):
        for use in uses:
            with pytest.raises(RuntimeError, match="edit that, and opt"):
                use()
        assert len(opt.state) == 0
        assert not opt.state
        assert list(opt.state.items()) == []  # as Lightning looks
        model(step, job.rank).backward()
        opt.step()
    saved = opt.state_dict()
    saved["state"][0]["square_avg"].zero_()
    opt.load_state_dict(saved)
    assert opt.state_dict()["state"][0]["square_avg"].eq(0).all()
    assert opt.state_dict()["state"][1]["square_avg"].ne(0).any()
    opt.close()
    opt.state.clear()
    opt.state = defaultdict(dict)


def state_is_here(job: tw.Job) -> None:
    """Worker 0 has it, and the others nothing: the same lines run on all workers."""
    model = Odd(SMALL, torch.float32)
    opt = tw.DistributedOptimizer(rmsprop(list(model.all)), model, apply="worker")
    model(0, job.rank).backward()
    opt.step()
    assert len(opt.state) == (2 if job.rank == 0 else 0)
    opt.state.clear()
    opt.state = defaultdict(dict)
    opt.zero_grad()
    model(1, job.rank).backward()
    opt.step()
    assert [each["step"].item() for each in opt.state.values()] == [1.0] * len(opt.state)


def test_state_at_the_servers_is_not_used(team: Team) -> None:
    """Named for a bug: what a script did to opt.state was ignored in silence."""
    team.run(state_is_elsewhere, "auto", servers=2)
    team.alone(state_is_elsewhere, "servers")
    team.run(state_is_here)


# ---- a group that cannot be added


class Turned(nn.Module):
    """The second parameter is not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.linspace(-1, 1, 42).view(6, 7))
        self.second = nn.Parameter(torch.linspace(-1, 1, 42).view(6, 7).t())


def adding(job: tw.Job) -> None:
    """The optimizer goes on as one to which nothing was added, and takes another group."""
    model, untouched = Turned(), Turned()
    opts = [
        tw.DistributedOptimizer(optim.Adafactor([each.first]), each, ema=0.9)
        for each in (model, untouched)
    ]
    groups: list[tuple[type[Exception], str, Any]] = [
        (ValueError, "is not the model's", nn.Parameter(torch.ones(3))),
        (UnavailableError, "ema= needs an optimizer that servers apply", model.second),
        (ValueError, "can't optimize a non-leaf|some parameters appear", model.first),
    ]
    for error, text, parameter in groups:
        with pytest.raises(error, match=text):
            opts[0].add_param_group({"params": [parameter]})
        assert len(opts[0].param_groups) == 1
        for opt, each in zip(opts, (model, untouched), strict=True):
            opt.zero_grad()
            (each.first.square().sum() * (job.rank + 1)).backward()
            opt.step()
        assert torch.equal(model.first, untouched.first)
        first, second = (opt.state_dict() for opt in opts)
        check_same_state(first["state"], second["state"])
        assert torch.equal(first["ema"][0], second["ema"][0])


def test_a_group_that_cannot_be_added(team: Team) -> None:
    """Named for a bug: the group stayed, and every step was an error."""
    team.run(adding, servers=2)
    team.alone(adding)
