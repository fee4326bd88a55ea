"""What users of DistributedDataParallel know, holds here too: accumulation, clipping, scaling, …

Each case trains a small model in float64 on samples that depend on the rank, and compares with
plain torch on the samples of all workers, computed in the same process.
"""

import copy
import io
import pickle
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from scripts import digest
from team import Team
from torch import nn
from torch.utils.checkpoint import checkpoint

import tensorwire.torch as tw

EXACT: dict[str, float] = {"rtol": 1e-12, "atol": 1e-14}
STEPS = 4
Model = nn.Module


def net(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).to(dtype)


def sgd(model: Model, **options: Any) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), **{"lr": 0.1, "momentum": 0.9, **options})


def adamw(model: Model, **options: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), **{"lr": 0.01, **options})


def batch(step: int, rank: int, count: int = 4) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(count, 5, generator=generator, dtype=torch.float64)


def loss(model: Model, x: torch.Tensor) -> torch.Tensor:
    return (model(x) ** 2).mean() + model(x).sin().mean()


def mean_gradients(model: Model, step: int, of: Callable[..., torch.Tensor] = loss) -> None:
    """Plain torch's gradients: the mean of those of both workers."""
    for rank in range(2):
        (of(model, batch(step, rank)) / 2).backward()


def same(model: Model, twin: Model, **tolerance: float) -> None:
    ours, theirs = list(model.parameters()), list(twin.parameters())
    torch.testing.assert_close(ours, theirs, **(tolerance or EXACT))


# ---- accumulation


def accumulating(job: tw.Job) -> str:
    model, twin = net(), net()
    opt, plain = tw.DistributedOptimizer(sgd(model), model), sgd(twin)
    for step in range(STEPS):
        x = batch(step, job.rank)
        with opt.accumulate():
            (loss(model, x[:2]) / 2).backward()
        (loss(model, x[2:]) / 2).backward()
        opt.step()
        opt.zero_grad()
        mean_gradients(twin, step)
        plain.step()
        plain.zero_grad()
    same(model, twin)
    return digest(model)


def test_accumulation_equals_the_big_batch(team: Team, transports: list[str] | None) -> None:
    first, second = team.run(accumulating, transports=transports)
    assert first == second


def backward_twice(job: tw.Job, inside: bool) -> None:
    model, twin = net(), net()
    opt, plain = tw.DistributedOptimizer(sgd(model), model), sgd(twin)
    for step in range(STEPS):
        x = batch(step, job.rank)
        (loss(model, x[:2]) / 2).backward()
        if inside:
            with opt.accumulate():
                (loss(model, x[2:]) / 2).backward()
        else:
            (loss(model, x[2:]) / 2).backward()
        opt.step()
        opt.zero_grad(set_to_none=step % 2 == 0)
        mean_gradients(twin, step)
        plain.step()
        plain.zero_grad()
    same(model, twin)


@pytest.mark.parametrize("inside", [False, True], ids=["plain", "second accumulates"])
def test_two_backwards_before_a_step(
    team: Team, transports: list[str] | None, inside: bool
) -> None:
    """Named for a bug: the second one inside accumulate() was taken for a change by hand."""
    team.run(backward_twice, inside, transports=transports)


def withdrawing(job: tw.Job) -> None:
    model, twin = net(), net()
    opt, plain = tw.DistributedOptimizer(adamw(model), model), adamw(twin)
    for step in range(STEPS):
        loss(model, 100 * batch(step, 7)).backward()
        opt.zero_grad()  # does not count
        loss(model, 100 * batch(step, 7)).backward()
        model.zero_grad()  # neither does this
        loss(model, batch(step, job.rank)).backward()
        opt.step()
        opt.zero_grad()
        mean_gradients(twin, step)
        plain.step()
        plain.zero_grad()
    same(model, twin)


def test_zero_grad_withdraws(team: Team, transports: list[str] | None) -> None:
    team.run(withdrawing, transports=transports)


# ---- averaged gradients and clipping


def synchronizing(job: tw.Job, way: str) -> str:
    model, twin = net(), net()
    limit = 0.05
    opt = tw.DistributedOptimizer(sgd(model), model, max_norm=limit if way == "max_norm" else None)
    plain = sgd(twin)
    for step in range(STEPS):
        loss(model, batch(step, job.rank)).backward()
        mean_gradients(twin, step)
        norm = nn.utils.clip_grad_norm_(twin.parameters(), limit)
        if way == "synchronize":
            opt.synchronize()
            opt.synchronize()  # changes nothing
            ours = nn.utils.clip_grad_norm_(model.parameters(), limit)
            opt.synchronize()  # keeps what was edited
        elif way == "tw":
            ours = tw.clip_grad_norm_(model.parameters(), limit)
        opt.step()
        if way == "max_norm":
            ours = torch.tensor(opt.last_norm)
        torch.testing.assert_close(ours.double(), norm, rtol=1e-6, atol=0)
        assert norm > limit
        plain.step()
        opt.zero_grad()
        plain.zero_grad()
    same(model, twin)
    return digest(model)


@pytest.mark.parametrize("way", ["synchronize", "max_norm", "tw"])
def test_clipping_equals_torch(team: Team, transports: list[str] | None, way: str) -> None:
    bits = team.run(synchronizing, way, transports=transports)
    assert bits == team.run(synchronizing, way, servers=2)
    assert len(set(bits)) == 1


def averaged(job: tw.Job) -> list[torch.Tensor]:
    model, twin = net(), net()
    opt = tw.DistributedOptimizer(sgd(model), model)
    loss(model, batch(0, job.rank)).backward()
    mean_gradients(twin, 0)
    opt.synchronize()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    torch.testing.assert_close(gradients, [p.grad for p in twin.parameters()], **EXACT)
    for gradient in gradients:
        gradient.mul_(0.5)
    opt.step()
    for p in twin.parameters():
        p.grad.mul_(0.5)
    sgd(twin).step()
    same(model, twin)
    return [gradient.clone() for gradient in gradients]


def test_synchronize_makes_the_average(team: Team, transports: list[str] | None) -> None:
    first, second = team.run(averaged, transports=transports)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def synchronizing_absent(job: tw.Job) -> None:
    """The second layer has a gradient on worker 1 only, the third on none."""
    torch.manual_seed(1)
    model = nn.ModuleList([nn.Linear(5, 2, dtype=torch.float64) for _ in range(3)])
    twin = copy.deepcopy(model)
    opt = tw.DistributedOptimizer(sgd(model), model)
    plain = sgd(twin)
    for step in range(STEPS):

        def output(model: Any, rank: int, step: int = step) -> torch.Tensor:
            y = model[0](batch(step, rank)).square().sum()
            return y + model[1](batch(step, rank)).square().sum() if rank == 1 else y

        output(model, job.rank).backward()
        opt.synchronize()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        for rank in range(2):
            (output(twin, rank) / 2).backward()
        expected = nn.utils.clip_grad_norm_(twin.parameters(), 0.5)
        torch.testing.assert_close(norm, expected, **EXACT)
        assert model[2].weight.grad is None
        opt.step()
        plain.step()
        opt.zero_grad()
        plain.zero_grad()
    same(model, twin)


def test_synchronize_gives_everybody_a_gradient_that_one_has(team: Team) -> None:
    """Named for a bug: worker 0 had none, and its norm and its edit lacked the others' part."""
    team.run(synchronizing_absent)


def changed_after_clip(job: tw.Job) -> None:
    model = net()
    opt = tw.DistributedOptimizer(sgd(model), model)
    loss(model, batch(0, job.rank)).backward()
    tw.clip_grad_norm_(model, 1.0)
    model[0].weight.grad.mul_(2)
    opt.step()


def test_a_gradient_changed_after_clipping_is_an_error(team: Team) -> None:
    """Named for a bug: the change was ignored."""
    for failure in [*team.failures(changed_after_clip), team.failure_alone(changed_after_clip)]:
        assert "'0.weight' was changed after" in failure.text


# ---- GradScaler


def scaling(job: tw.Job, unscale: bool) -> tuple[str, float]:
    model, twin = net(), net()
    opt, plain = tw.DistributedOptimizer(adamw(model), model), adamw(twin)
    scaler = tw.GradScaler(init_scale=1024.0, growth_interval=2)
    scales = []
    for step in range(6):
        before = digest(model)
        factor = float("inf") if step == 3 and job.rank == 1 else 1.0
        scaler.scale(loss(model, batch(step, job.rank)) * factor).backward()
        if unscale:
            scaler.unscale_(opt)
            nn.utils.clip_grad_norm_(model.parameters(), 1e6)
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
        scales.append(scaler.get_scale())
        if step == 3:
            assert digest(model) == before, "a step that is not finite was applied"
            continue
        mean_gradients(twin, step)
        plain.step()
        plain.zero_grad()
    assert scales == [1024, 2048, 2048, 1024, 1024, 2048]
    same(model, twin, rtol=1e-9, atol=1e-12)
    return digest(model), scaler.get_scale()


@pytest.mark.parametrize("unscale", [False, True], ids=["step", "unscale_"])
def test_a_scaler_skips_for_all(team: Team, transports: list[str] | None, unscale: bool) -> None:
    first, second = team.run(scaling, unscale, transports=transports)
    assert first == second


def scaling_slices(job: tw.Job) -> tuple[str, list[float]]:
    model = net()
    opt = tw.DistributedOptimizer(adamw(model), model)
    scaler = tw.GradScaler(init_scale=1024.0, growth_interval=2)
    scales = []
    for step in range(6):
        for index in job.my_slices:
            factor = float("inf") if step == 3 and index == 1 else 1.0
            scaler.scale(loss(model, batch(step, index)) * factor).backward()
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()
        scales.append(scaler.get_scale())
    return digest(model), scales


def test_a_scaler_updates_once_per_step_of_several_slices(team: Team) -> None:
    """Named for a bug: it counted slices as steps, so that its scale grew too early."""
    assert team.alone(scaling_slices, slices=2) == team.run(scaling_slices)[0]


def scaler_forgotten(job: tw.Job) -> None:
    model = net()
    opt = tw.DistributedOptimizer(sgd(model), model)
    scaler = tw.GradScaler()
    scaler.scale(loss(model, batch(0, job.rank))).backward()
    tw.clip_grad_norm_(opt, 1.0)
    scaler.step(opt)


def test_clipping_scaled_gradients_is_an_error(team: Team) -> None:
    """Named for a bug: the step was applied with the scale in it."""
    for failure in team.failures(scaler_forgotten):
        assert "unscale_" in failure.text


# ---- what a model may have


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
        model(batch(step, job.rank).to(dtype), use[job.rank]).square().mean().backward()
        opt.step()
        opt.zero_grad()
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
        squares(model, batch(step, job.rank)).backward()
        opt.step()
        opt.zero_grad()
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
        fast(batch(step, job.rank)).square().mean().backward()
        opt.step()
        opt.zero_grad()
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
        loss(model, batch(step, job.rank)).backward()
        opt.step()
        opt.zero_grad()
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


# ---- state


def state_to_plain(job: tw.Job, make: Callable[..., Any]) -> None:
    """Ours to plain torch's and back, and both go on alike."""
    model, twin = net(), net()
    opt, plain = tw.DistributedOptimizer(make(model), model), make(twin)
    for step in range(2):
        loss(model, batch(step, job.rank)).backward()
        opt.step()
        opt.zero_grad()
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "opt": opt.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    assert pickle.loads(pickle.dumps(saved)).keys() == saved.keys()
    twin.load_state_dict(saved["model"])
    plain.load_state_dict(saved["opt"])
    for step in range(2, 5):
        loss(model, batch(step, job.rank)).backward()
        opt.step()
        opt.zero_grad()
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
        loss(model, batch(step, job.rank)).backward()
        opt.step()
        opt.zero_grad()
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
        loss(model, batch(step, job.rank)).backward()
        opt.step()
        opt.zero_grad()
        mean_gradients(twin, step)
        plain.step()
        plain.zero_grad()
    same(model, twin)


@pytest.mark.parametrize("other", [False, True], ids=["wrapped late", "other fields"])
def test_state_from_before(team: Team, other: bool) -> None:
    """Named for bugs: the state of an optimizer used before was lost; momentum came unexpected."""
    team.run(used_before, other)


def saving(job: tw.Job, path: str, resume: bool) -> tuple[str, list[int]]:
    torch.manual_seed(job.rank)  # initial weights differ; worker 0's or the file's win
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Dropout(0.3), nn.Linear(4, 1))
    opt = torch.optim.AdamW(model.parameters(), lr=0.01)
    sched = torch.optim.lr_scheduler.StepLR(opt, 2, 0.5)
    opt = tw.DistributedOptimizer(opt, model)
    scaler = tw.GradScaler(init_scale=4.0, growth_interval=3)
    job.keep(model=model, optimizer=opt, scheduler=sched, scaler=scaler)
    if resume:
        job.load(path)
    data = torch.randn(24, 5, generator=torch.Generator().manual_seed(8))
    loader = job.loader(data, batch_size=4, shuffle=True)  # type: ignore[arg-type]
    epochs = []
    for epoch in job.epochs(4):
        epochs.append(epoch)
        for x in loader:
            scaler.scale(model(x).square().mean()).backward()
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()
        sched.step()
        if epoch == 1 and not resume and job.rank == 0:
            job.save(path)  # no other worker takes part
    return digest(model), epochs


def test_a_job_resumes(team: Team, transports: list[str] | None, tmp_path: Path) -> None:
    path = str(tmp_path / "checkpoint")
    (whole, epochs), other = team.run(saving, path, False, transports=transports)
    assert (whole, epochs) == other
    assert epochs == [0, 1, 2, 3]
    again = team.run(saving, path, True, transports=transports)
    assert again == [(whole, [2, 3])] * 2
    assert team.alone(saving, path, True, slices=2) == (whole, [2, 3])
    content = torch.load(path, weights_only=True)
    plain = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Dropout(0.3), nn.Linear(4, 1))
    plain.load_state_dict(content["model"])
    torch.optim.AdamW(plain.parameters()).load_state_dict(content["optimizer"])
    assert Path(path).stat().st_size < 20_000, "the file has more than the tensors"
    assert list(tmp_path.iterdir()) == [Path(path)]


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
            self.replaced = self.replaced + float(x.detach().sum())
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
            model(batch(step, index)).square().mean().backward()
            opt.step()
            opt.zero_grad()
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


@pytest.mark.parametrize("kind", ["broadcast", "average", "local"])
def test_buffers(team: Team, transports: list[str] | None, kind: str) -> None:
    first, second = team.run(counting, kind, transports=transports)
    for ours, theirs in zip((first, second), expected_buffers(kind), strict=True):
        torch.testing.assert_close(torch.tensor(ours[:3]), torch.tensor(theirs))
    assert first[3] == second[3] == [3]
    assert (first == second) == (kind != "local")
    assert team.alone(counting, kind, slices=2) == first


# ---- the job's own


def together(job: tw.Job) -> None:
    assert job.mean(float(job.rank)) == 0.5
    assert job.mean(float(job.rank), weight=3.0 - 2 * job.rank) == 0.25
    assert job.mean({"a": job.rank, "b": torch.full((2, 2), 2.0)})["b"].tolist() == [[2, 2]] * 2
    assert job.mean(torch.ones(10_000) * job.rank).mean() == 0.5
    shard = job.shard(range(7))  # type: ignore[arg-type]
    assert list(shard) == list(range(job.rank, 7, 2))
    assert job.mean(sum(shard) / len(shard), weight=len(shard)) == 3.0
    job.barrier()


def test_mean_barrier_shard(team: Team, transports: list[str] | None) -> None:
    team.run(together, transports=transports)


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


def behind(job: tw.Job) -> None:
    """Worker 1 is slow; worker 0 is ahead, as far as it gets. What one of them sees must not move.

    The pause only makes it likely that a fault shows; nothing depends on its length.
    """
    model = net()
    opt = tw.DistributedOptimizer(adamw(model), model)
    for step in range(6):
        before = digest(model)
        y = loss(model, batch(step, job.rank))
        if job.rank == step % 2:
            time.sleep(0.05)
        y.backward()
        assert digest(model) == before
        opt.step()
        assert digest(model) != before
        opt.zero_grad()


def test_values_move_only_in_step(team: Team, transports: list[str] | None) -> None:
    team.run(behind, transports=transports)


def closing(job: tw.Job) -> None:
    model = net()
    opt = tw.DistributedOptimizer(sgd(model), model)
    loss(model, batch(0, job.rank)).backward()
    opt.step()
    before = digest(model)
    job.close()
    assert digest(model) == before
    with torch.no_grad():
        model[0].weight.add_(1)  # its own memory again


def test_parameters_stay_after_close(team: Team) -> None:
    team.run(closing)


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
        model(x).pow(2).sum().backward()
        opt.step()
        opt.zero_grad()
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


def two_stages(job: tw.Job) -> tuple[int, dict[str, Any]]:
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)).double()
    opt = tw.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.1), model)
    made = 0
    for stage in range(2):
        for _ in job.epochs(3):
            model(torch.ones(2, 4, dtype=torch.float64)).sum().backward()
            opt.step()
            opt.zero_grad()
            made += 1
        with tw.edit(model):
            model[0].requires_grad_(stage == 1)
    return made, opt.state_dict()["state"][0]


def test_a_second_loop_of_epochs_and_the_state_of_what_was_frozen(team: Team) -> None:
    """Named for two bugs: the second loop was empty; freezing lost the optimizer's state."""
    made, state = team.alone(two_stages)
    assert made == 6
    assert state["step"] == 3
    assert state["exp_avg"].abs().sum() > 0


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
        model(torch.full((2, 4), scale, dtype=torch.float64)).pow(2).sum().backward()
        opt.step()
        opt.zero_grad()
    return [parameter.detach().flatten().tolist() for parameter in model.parameters()]


def test_amsgrad_in_some_groups(team: Team) -> None:
    plain = only_amsgrad_in_one_group(None)  # type: ignore[arg-type]
    for ours in team.run(only_amsgrad_in_one_group):
        for mine, theirs in zip(ours, plain, strict=True):
            assert mine == pytest.approx(theirs, rel=1e-12)


def peek_and_evaluate(job: tw.Job) -> list[float]:
    """Looks at a batch first, and evaluates with no_grad inside the loop."""
    data = torch.utils.data.TensorDataset(torch.arange(12, dtype=torch.float64).reshape(12, 1))
    model = nn.Linear(1, 1, bias=False).double()
    opt = tw.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model)
    with tw.edit(model), torch.no_grad():
        model.weight.fill_(0.0)
    loader = job.loader(data, batch_size=4)
    if job.rank == 0:
        next(iter(loader))
        for (x,) in job.loader(data, batch_size=2):
            with torch.no_grad():
                model(x)
    seen = []
    for (x,) in loader:
        (model(x) - x).mean().backward()
        opt.step()
        opt.zero_grad()
        seen.append(float(model.weight.detach()))
    return seen


def test_batches_without_a_gradient_have_no_weight(team: Team) -> None:
    """Named for a bug: who looked at a batch or evaluated counted more in the next step."""
    ours = team.run(peek_and_evaluate)
    # Steps of 8 and of 4 samples in their order: means 3.5 and 9.5.
    expected = [-0.035, -0.13]
    assert ours[0] == pytest.approx(expected)
    assert ours[1] == pytest.approx(expected)
