"""Optimizers beyond SGD and Adam in loops that clip, scale, accumulate, resume, edit and freeze."""

import copy
import io
from collections.abc import Sequence
from typing import Any

import foreign
import pytest
import torch
from odd import (
    Make,
    Odd,
    bits,
    check_same_optimizers,
    check_same_state,
    plain_gradients,
)
from team import Team
from torch import nn, optim
from twins import make_step

import tensorwire.torch as tw

SMALL: tuple[tuple[int, ...], ...] = ((40, 50), (7,), (), (600, 600))
STEPS = 4


def adagrad(params: Any) -> torch.optim.Optimizer:
    return optim.Adagrad(params, lr=0.1, initial_accumulator_value=0.3)


def rmsprop(params: Any) -> torch.optim.Optimizer:
    return optim.RMSprop(params, lr=0.03, momentum=0.9)


def asgd(params: Any) -> torch.optim.Optimizer:
    return optim.ASGD(params, lr=0.1, t0=2)


def nadam(params: Any) -> torch.optim.Optimizer:
    return optim.NAdam(params, lr=0.1)


def adafactor(params: Any) -> torch.optim.Optimizer:
    return optim.Adafactor(params, lr=0.1)


def counting(params: Any) -> torch.optim.Optimizer:
    """Servers cannot, as its groups change."""
    return foreign.CountingInGroup(params)


MAKES: list[Make] = [rmsprop, adafactor, counting, adagrad, asgd, nadam]
APPLIES = ["auto", "worker"]


def pair(make: Make, dtype: torch.dtype = torch.float32) -> tuple[Odd, Odd, Any, Any]:
    """A model and its plain twin, and their optimizers."""
    model, twin = Odd(SMALL, dtype), Odd(SMALL, dtype)
    return model, twin, make(list(model.all)), make(list(twin.all))


def step_both(job: tw.Job, model: Odd, twin: Odd, opt: Any, plain: Any, step: int) -> None:
    """One step of both, and they are the same."""
    for rank in job.my_slices:
        make_step(opt, model(step, rank))
    plain_gradients(twin, step, job.slices)
    plain.step()
    plain.zero_grad()
    assert bits(model) == bits(twin), step


# ---- what happens to the gradient before it is applied


def norm_of(twin: Odd) -> float:
    """Returns the norm, summed like the servers sum it."""
    squares = [float(p.grad.double().square().sum()) for p in twin.all if p.grad is not None]
    return float(sum(squares) ** 0.5)


def clipped(job: tw.Job, make: Make, way: str, apply: str) -> None:
    """Scaled down to a norm, with the factor that we used."""
    model, twin, opt, plain = pair(make)
    limit = 5.0 if way == "max_norm" else None
    opt = tw.DistributedOptimizer(opt, model, max_norm=limit, apply=apply)
    for step in range(STEPS):
        model(step, job.rank).backward()
        if way == "clip":
            tw.clip_grad_norm_(model, 5.0)
        elif way == "synchronize":
            opt.synchronize()
            for p in model.all:
                p.grad.clamp_(-0.5, 0.5)
        opt.step()
        opt.zero_grad()
        plain_gradients(twin, step, job.slices)
        if way == "synchronize":
            for p in twin.all:
                p.grad.clamp_(-0.5, 0.5)
        else:
            assert opt.last_norm == pytest.approx(norm_of(twin), rel=1e-5)
            assert opt.last_norm > 5.0
            for p in twin.all:
                p.grad.mul_(min(5.0 / (opt.last_norm + 1e-6), 1.0))
        plain.step()
        plain.zero_grad()
        assert bits(model) == bits(twin), (way, step)
    opt.close()


@pytest.mark.parametrize("apply", APPLIES)
@pytest.mark.parametrize("way", ["max_norm", "clip", "synchronize"])
def test_clipping(team: Team, way: str, apply: str) -> None:
    for make in MAKES[:3] if apply == "auto" else MAKES[:2]:
        team.run(clipped, make, way, apply, servers=2)


def scaled(job: tw.Job, make: Make, apply: str, unscale: bool) -> None:
    """A scaler finds an infinity of one worker; no worker steps, and no state changes."""
    model, twin, opt, plain = pair(make)
    opt = tw.DistributedOptimizer(opt, model, apply=apply)
    scaler = tw.GradScaler("cpu", init_scale=8.0)
    for step in range(STEPS):
        loss = model(step, job.rank)
        if step == 1 and job.rank == job.size - 1:
            loss = loss * torch.inf
        scaler.scale(loss).backward()
        if unscale:
            scaler.unscale_(opt)
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
        if step != 1:
            plain_gradients(twin, step, job.slices)
            plain.step()
            plain.zero_grad()
        assert bits(model) == bits(twin), step
        if job.rank == 0:
            check_same_optimizers(opt, plain)
    assert scaler.get_scale() == 4.0


@pytest.mark.parametrize("unscale", [False, True], ids=["step", "unscale"])
@pytest.mark.parametrize("apply", APPLIES)
def test_with_a_scaler(team: Team, apply: str, unscale: bool) -> None:
    for make in MAKES[:3] if apply == "auto" else MAKES[:2]:
        team.run(scaled, make, apply, unscale)


def accumulated(job: tw.Job, make: Make, apply: str) -> None:
    model, twin, opt, plain = pair(make)
    opt = tw.DistributedOptimizer(opt, model, apply=apply)
    for step in range(0, 2 * STEPS, 2):
        with opt.accumulate():
            model(step, job.rank).backward()
        model(step + 1, job.rank).backward()
        opt.step()
        opt.zero_grad(set_to_none=step % 4 == 0)
        for rank in range(2):
            grads = []
            for number in range(2):
                grads.append(torch.autograd.grad(twin(step + number, rank), list(twin.all)))
            for p, first, second in zip(twin.all, *grads, strict=True):
                mine = (first + second) / 2
                p.grad = mine if p.grad is None else p.grad + mine
        plain.step()
        plain.zero_grad()
        assert bits(model) == bits(twin), step


@pytest.mark.parametrize("apply", APPLIES)
def test_accumulating(team: Team, apply: str) -> None:
    for make in (rmsprop, adafactor):
        team.run(accumulated, make, apply)


# ---- state


def resumed(job: tw.Job, make: Make, apply: str) -> None:
    """Ours to torch's and back, through a file; rank 0 has what worker 0 keeps."""
    model, twin, opt, plain = pair(make)
    opt = tw.DistributedOptimizer(opt, model, apply=apply)
    has = not opt._tensorwire.arithmetic.by_worker or job.rank == 0
    for step in range(2):
        step_both(job, model, twin, opt, plain, step)
    fresh = make(list(twin.all))
    if has:
        file = io.BytesIO()
        torch.save(opt.state_dict(), file)
        file.seek(0)
        saved = torch.load(file, weights_only=True)
        check_same_state(saved, plain.state_dict())
        fresh.load_state_dict(saved)
    else:
        with pytest.raises(RuntimeError, match="worker 0 makes this optimizer's steps"):
            opt.state_dict()
        fresh.load_state_dict(plain.state_dict())
    plain = fresh
    for step in range(2, 4):
        step_both(job, model, twin, opt, plain, step)
    # Torch goes on alone for two steps, and we take what it has.
    for step in range(4, 6):
        plain_gradients(twin, step, job.slices)
        plain.step()
        plain.zero_grad()
    with tw.edit(model):
        model.load_state_dict(twin.state_dict())
    opt.load_state_dict(copy.deepcopy(plain.state_dict()))  # torch shares what it loads
    if has:
        check_same_optimizers(opt, plain)
    for step in range(6, 8):
        step_both(job, model, twin, opt, plain, step)
    opt.close()
    # A resumed optimizer is distributed.
    again = make(list(model.all))
    again.load_state_dict(copy.deepcopy(plain.state_dict()))
    again = tw.DistributedOptimizer(again, model, apply=apply)
    for step in range(8, 10):
        step_both(job, model, twin, again, plain, step)
    if has:
        check_same_optimizers(again, plain)


@pytest.mark.parametrize("apply", APPLIES)
@pytest.mark.parametrize("make", MAKES)
def test_state_of_plain_torch_and_back(team: Team, make: Make, apply: str) -> None:
    team.run(resumed, make, apply, servers=2)
    team.alone(resumed, make, apply)


def saving(job: tw.Job, make: Make, path: str, apply: str, load: bool) -> list[bytes]:
    """Four steps; with a checkpoint after the second, or from it."""
    model = Odd(SMALL, torch.float32)
    opt = make(list(model.all))
    opt = tw.DistributedOptimizer(opt, model, apply=apply)
    schedule = optim.lr_scheduler.ExponentialLR(opt, 0.5)
    job.track(model=model, optimizer=opt, schedule=schedule)
    if load:
        job.load(path)
    for step in range(2 if load else 0, 4):
        for rank in job.my_slices:
            make_step(opt, model(step, rank))
        schedule.step()
        if step == 1 and not load:
            if job.rank == 0:
                job.save(path)
            job.barrier()
    return bits(model)


@pytest.mark.parametrize("make", MAKES)
def test_a_checkpoint_goes_on_with_other_servers(team: Team, make: Make, tmp_path: Any) -> None:
    path = str(tmp_path / "saved")
    (wanted, _) = team.run(saving, make, path, "auto", False, servers=2)
    places: list[Any] = [{"servers": 3}, {"transports": ["tcp"]}, {"workers": 0, "slices": 2}]
    for number, options in enumerate(places, MAKES.index(make)):
        apply = APPLIES[number % 2]
        for found in team.run(saving, make, path, apply, True, **options):
            assert found == wanted, (options, apply)


# ---- other changes


def growing(job: tw.Job, make: Make, apply: str) -> None:
    """A group comes while training; then a parameter is frozen, and thawed."""
    model, twin = Odd(SMALL, torch.float32), Odd(SMALL, torch.float32)
    opt, plain = make(list(model.all)[:2]), make(list(twin.all)[:2])
    opt = tw.DistributedOptimizer(opt, model, apply=apply)
    for step in range(2):
        step_both(job, model, twin, opt, plain, step)
        twin.zero_grad()
    opt.add_param_group({"params": list(model.all)[2:], "lr": 0.02})
    plain.add_param_group({"params": list(twin.all)[2:], "lr": 0.02})
    model.zero_grad()
    for step in range(2, 4):
        step_both(job, model, twin, opt, plain, step)
    for frozen in (True, False):
        with tw.edit(model), torch.no_grad():
            for each in (model, twin):
                each.all[0].requires_grad_(not frozen)
                each.all[1].mul_(0.5)
        for step in range(2):
            step_both(job, model, twin, opt, plain, 4 + 2 * frozen + step)
    if job.rank == 0:
        check_same_optimizers(opt, plain)


@pytest.mark.parametrize("apply", APPLIES)
@pytest.mark.parametrize("make", MAKES)
def test_groups_come_and_parameters_freeze(team: Team, make: Make, apply: str) -> None:
    team.run(growing, make, apply, servers=2)
    team.alone(growing, make, apply)


class Normed(nn.Module):
    """A model with buffers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first, self.norm = nn.Linear(5, 8), nn.BatchNorm1d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.first(x)).square().sum() + self.first(x).sum()  # type: ignore[no-any-return]


def with_buffers(job: tw.Job, make: Make, apply: str, buffers: str) -> list[bytes]:
    """All workers have the same buffers afterwards."""
    model = Normed()
    opt = make(list(model.parameters()))
    opt = tw.DistributedOptimizer(opt, model, buffers=buffers, apply=apply)
    for step in range(STEPS):
        for rank in job.my_slices:
            generator = torch.Generator().manual_seed(10 * step + rank)
            make_step(opt, model(torch.randn(6, 5, generator=generator)))
    assert int(model.norm.num_batches_tracked) == STEPS
    return [*bits(model), *(each.numpy().tobytes() for each in model.buffers())]


@pytest.mark.parametrize("buffers", ["average", "broadcast"])
@pytest.mark.parametrize("make", [rmsprop, adafactor])
def test_buffers(team: Team, make: Make, buffers: str) -> None:
    found = [team.alone(with_buffers, make, "auto", buffers, slices=2)]
    for apply in APPLIES:
        found += team.run(with_buffers, make, apply, buffers, servers=2)
    assert all(each == found[0] for each in found)


def two_optimizers(job: tw.Job, apply: str) -> None:
    """One for each half of a model."""
    model, twin = Odd(SMALL, torch.float32), Odd(SMALL, torch.float32)
    opts, plains = [], []
    for half, make in (slice(0, 2), rmsprop), (slice(2, 4), adafactor):
        opts.append(tw.DistributedOptimizer(make(list(model.all)[half]), model, apply=apply))
        plains.append(make(list(twin.all)[half]))
    for step in range(STEPS):
        model(step, job.rank).backward()
        plain_gradients(twin, step, job.slices)
        for each in (*opts, *plains):
            each.step()
            each.zero_grad()
        assert bits(model) == bits(twin), step
    opts[0].close()
    model(9, job.rank).backward()
    plain_gradients(twin, 9, job.slices)
    opts[1].step()
    plains[1].step()
    assert bits(model) == bits(twin)


@pytest.mark.parametrize("apply", APPLIES)
def test_two_optimizers_of_one_model(team: Team, apply: str) -> None:
    team.run(two_optimizers, apply, servers=2)


def many(job: tw.Job, make: Make, groups: int, tensors: int) -> None:
    shapes = [(3 + i % 5,) for i in range(tensors)]
    model, twin = Odd(shapes, torch.float32), Odd(shapes, torch.float32)

    def grouped(model: Odd) -> Any:
        every = list(model.all)
        return make([{"params": every[i::groups], "lr": 0.01 * (i + 1)} for i in range(groups)])

    opt, plain = tw.DistributedOptimizer(grouped(model), model), grouped(twin)
    for step in range(2):
        step_both(job, model, twin, opt, plain, step)
    if job.rank == 0:
        check_same_optimizers(opt, plain)


@pytest.mark.parametrize("make", [nadam, adafactor])
@pytest.mark.slow
def test_many_groups_and_tensors(team: Team, make: Make) -> None:
    team.run(many, make, 200, 1000, servers=2)


# ---- options that change while training


def changing(job: tw.Job, make: Make, changes: Sequence[dict[str, Any]], apply: str) -> None:
    """Options are set before each step; what torch takes, we take. A text is made a tensor."""
    model, twin, opt, plain = pair(make)
    opt = tw.DistributedOptimizer(opt, model, apply=apply)
    for step, change in enumerate(changes):
        for each in (opt, plain):
            for name, value in change.items():
                is_tensor = isinstance(value, str)
                each.param_groups[0][name] = torch.tensor(float(value)) if is_tensor else value
        step_both(job, model, twin, opt, plain, step)
    if job.rank == 0:
        check_same_optimizers(opt, plain)


def whole_rate(params: Any) -> torch.optim.Optimizer:
    """A rate without a point."""
    return optim.Adadelta(params, lr=1)


def warming_up(params: Any) -> torch.optim.Optimizer:
    """Begins with a rate of 0."""
    return optim.RMSprop(params, lr=0.0, weight_decay=0)


def tensor_rate(params: Any) -> torch.optim.Optimizer:
    """A rate that is a tensor."""
    return optim.NAdam(params, lr=torch.tensor(0.125))


CHANGES: list[tuple[Make, list[dict[str, Any]]]] = [
    (whole_rate, [{}, {"lr": 0.5}, {"lr": 1}, {"lr": 0}, {"lr": 0.25}]),
    (warming_up, [{}, {"lr": 0.1}, {"weight_decay": 0.01}, {"lr": 0, "weight_decay": 0}]),
    (nadam, [{}, {"betas": (0.5, 0.6)}, {"betas": [0.5, 0.7]}, {"weight_decay": 0.5}]),
    (nadam, [{}, {"more": 5}, {"maximize": True}, {"maximize": False, "eps": 1}]),
    (adafactor, [{}, {"weight_decay": 0.1}, {"lr": 1, "d": 2}, {"maximize": True}]),
    (tensor_rate, [{}, {"lr": "0.5"}, {"lr": 0.25}]),
]


@pytest.mark.parametrize("apply", APPLIES)
@pytest.mark.slow
def test_options_change_while_training(team: Team, apply: str) -> None:
    for make, changes in CHANGES:
        team.run(changing, make, changes, apply)


def other_options(job: tw.Job, make: Make, change: dict[str, Any]) -> None:
    """Options change after some steps that told nothing new; then a step is refused."""
    model, twin, opt, plain = pair(make)
    opt = tw.DistributedOptimizer(opt, model, apply="servers")
    for step in range(3):
        step_both(job, model, twin, opt, plain, step)
    opt.param_groups[0].update(change)
    model(3, 0).backward()
    opt.step()


@pytest.mark.parametrize(
    ("make", "change"),
    [(warming_up, {"momentum": 0.9}), (warming_up, {"centered": True}), (nadam, {"eps": None})],
)
def test_options_that_decide_what_servers_keep(
    team: Team, make: Make, change: dict[str, Any]
) -> None:
    for failure in team.failures(other_options, make, change):
        assert "another option that decides what servers keep was changed" in failure.text


def frozen_otherwise(job: tw.Job) -> None:
    """A frozen parameter that is not contiguous does not send whole tensors to worker 0."""
    model = Odd(((5, 4), (3,)), torch.float32, turned=True)
    model.all[2].requires_grad_(False)
    opt = tw.DistributedOptimizer(adafactor(list(model.all)), model, apply="servers")
    model(0, 0).backward()
    opt.step()


def test_a_frozen_parameter_that_is_not_contiguous(team: Team) -> None:
    team.alone(frozen_otherwise)


def damaged(job: tw.Job, make: Make, damage: dict[str, Any]) -> None:
    """A state of other entries or shapes is loaded."""
    model, twin, opt, plain = pair(make)
    opt = tw.DistributedOptimizer(opt, model)
    for each, its in (model, opt), (twin, plain):
        make_step(its, each(0, 0))
    state = plain.state_dict()
    for key, value in damage.items():
        if value is None:
            del state["state"][0][key]
        else:
            state["state"][0][key] = torch.zeros(value)
    opt.load_state_dict(state)


@pytest.mark.parametrize(
    ("make", "damage", "says"),
    [
        (rmsprop, {"momentum_buffer": None}, "has ['square_avg', 'step'], and"),
        (rmsprop, {"more": (40, 50)}, "has ['momentum_buffer', 'more', 'square_avg', 'step'], and"),
        (rmsprop, {"square_avg": (50,)}, "has the shape (50,), and not (40, 50)"),
        (adafactor, {"row_var": (1, 1)}, "has the shape (1, 1), and not (40, 1)"),
        (optim.AdamW, {"exp_avg": (50,)}, "has the shape (50,), and not (40, 50)"),
    ],
)
def test_state_of_something_else(team: Team, make: Make, damage: Any, says: str) -> None:
    failure = team.failure_alone(damaged, make, damage)
    assert failure.kind == "ValueError"
    assert "state" in failure.text
    assert says in failure.text
    assert says in team.failures(damaged, make, damage)[0].text
