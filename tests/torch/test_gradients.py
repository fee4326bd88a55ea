"""Accumulation, averages, clipping and weights of gradients are as in plain torch."""

import copy
import time
from typing import Any

import pytest
import torch
from scripts import digest
from team import Team
from torch import nn
from twins import EXACT, STEPS, adamw, batch, loss, make_step, mean_gradients, net, same, sgd

import tensorwire.torch as tw

# ---- accumulation


def accumulating(job: tw.Job) -> str:
    model, twin = net(), net()
    opt, plain = tw.DistributedOptimizer(sgd(model), model), sgd(twin)
    for step in range(STEPS):
        x = batch(step, job.rank)
        with opt.accumulate():
            (loss(model, x[:2]) / 2).backward()
        make_step(opt, loss(model, x[2:]) / 2)
        mean_gradients(twin, step)
        plain.step()
        plain.zero_grad()
    same(model, twin)
    return digest(model)


@pytest.mark.parametrize("transports", ["shm", "tcp"], indirect=True)
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
        make_step(opt, loss(model, batch(step, job.rank)))
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


def measuring(job: tw.Job, measure: bool) -> tuple[str, list[float]]:
    model = net()
    opt = tw.DistributedOptimizer(adamw(model), model)
    norms = []
    for step in range(STEPS):
        loss(model, batch(step, job.rank)).backward()
        if measure:
            norms.append(tw.clip_grad_norm_(model, float("inf")).item())
            twin = net()
            twin.load_state_dict(model.state_dict())
            mean_gradients(twin, step)
            theirs = nn.utils.clip_grad_norm_(twin.parameters(), float("inf")).item()
            assert norms[-1] == pytest.approx(theirs, rel=1e-6)
        opt.step()
        opt.zero_grad()
    return digest(model), norms


def test_an_infinite_norm_is_told_and_changes_nothing(
    team: Team, transports: list[str] | None
) -> None:
    first, second = team.run(measuring, True, transports=transports)
    assert first == second
    assert first[0] == team.run(measuring, False, transports=transports)[0][0]


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


def behind(job: tw.Job) -> None:
    """Worker 1 is slow; worker 0 is ahead, as far as it gets. Their values must not move.

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


@pytest.mark.parametrize("transports", ["shm", "tcp"], indirect=True)
def test_values_move_only_in_step(team: Team, transports: list[str] | None) -> None:
    team.run(behind, transports=transports)


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
        make_step(opt, (model(x) - x).mean())
        seen.append(float(model.weight.detach()))
    return seen


def test_batches_without_a_gradient_have_no_weight(team: Team) -> None:
    """Named for a bug: a worker that looked at a batch or evaluated counted more later."""
    ours = team.run(peek_and_evaluate)
    # Steps of 8 and of 4 samples in their order: means 3.5 and 9.5.
    expected = [-0.035, -0.13]
    assert ours[0] == pytest.approx(expected)
    assert ours[1] == pytest.approx(expected)


def clipped_together(job: tw.Job) -> str:
    """Two optimizers of one model: the norm is of all parameters, as in torch."""
    model, twin = net(), net()
    parts = [list(model.parameters())[:2], list(model.parameters())[2:]]
    plain = [list(twin.parameters())[:2], list(twin.parameters())[2:]]
    opts = [
        tw.DistributedOptimizer(torch.optim.SGD(parts[0], lr=0.1), model),
        tw.DistributedOptimizer(torch.optim.Adam(parts[1], lr=0.1), model),
    ]
    twins = [torch.optim.SGD(plain[0], lr=0.1), torch.optim.Adam(plain[1], lr=0.1)]
    for step in range(3):
        loss(model, batch(step, job.rank)).backward()
        mean_gradients(twin, step)
        norm = tw.clip_grad_norm_(model.parameters() if step else model, 0.05)
        wanted = torch.nn.utils.clip_grad_norm_(twin.parameters(), 0.05)
        torch.testing.assert_close(norm.double(), wanted.double(), equal_nan=True)
        for opt in (*opts, *twins):
            opt.step()
            opt.zero_grad()
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, equal_nan=True)
    with pytest.raises(ValueError, match="for some of them call"):
        tw.clip_grad_norm_(parts[0] + parts[1][:1], 1.0)
    return digest(model)


def test_two_optimizers_are_clipped_together(team: Team) -> None:
    first, second = team.run(clipped_together)
    assert first == second
