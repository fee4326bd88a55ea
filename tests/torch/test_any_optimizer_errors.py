"""Optimizers that misbehave, and what cannot be: told to all workers, with what to do."""

import contextlib
import io
from typing import Any

import foreign
import pytest
import torch
from odd import Make, Odd, bits, plain_gradients
from team import Team
from test_any_optimizer import way_of
from torch import optim

import tensorwire.torch as tw

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
            model(step, rank).backward()
            opt.step()
            opt.zero_grad()
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
    """All workers are told the class and what it raised; nobody hangs."""
    for failure in team.failures(steps, make, "servers", 25, imports="foreign", servers=2):
        assert says in failure.text


def test_a_step_fails_in_worker_0(team: Team) -> None:
    first, second = team.failures(steps, failing, "worker", 25)
    assert first.kind == "ArithmeticError"
    assert "worker 0" in second.text
    assert team.failure_alone(steps, failing, "worker", 25).kind == "ArithmeticError"


def disagreeing(job: tw.Job) -> str:
    """Each worker has another class."""
    return steps(job, rmsprop if job.rank else lion, "auto", 1)


def test_workers_disagree(team: Team) -> None:
    """On the class, on what servers may import, and on who applies."""
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
    """What worker 0 says."""
    with contextlib.redirect_stderr(io.StringIO()) as lines:
        model = Odd(SMALL, torch.float32)
        opt = tw.DistributedOptimizer(make(list(model.all)), model, apply=apply)
        model(0, 0).backward()
        opt.step()
    return lines.getvalue()


def test_what_is_told(team: Team) -> None:
    """Worker 0 says once what is done otherwise than it was asked for, and who makes the steps."""
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
