"""Changes of gradients and models by scripts, in and between steps, leave the result as it is.

Beside `test_gradient_slots.py`: each case gives the same bits with `placement="plan"` and "copy",
or an error that says what to do; with two workers and a server.
"""

import copy
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from scripts import digest
from team import Team
from test_gradient_slots import STEPS, batch, in_place, loss_of, net, resident, train, wrap
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from twins import make_step

import tensorwire.torch as tw

Case = Callable[..., Any]
PLACEMENTS = ("plan", "copy")


def same(team: Team, case: Case, *args: Any, **options: Any) -> list[Any]:
    """Returns the results of both workers, which are the same with places and with copies."""
    planned = team.run(case, "plan", *args, **options)
    assert planned == team.run(case, "copy", *args, **options)
    return planned


# ---- processes of a DataLoader that import everything anew


def spawning(job: tw.Job, placement: str, workers: int) -> str:
    """Processes start in the middle of training, while gradients are where backward made them."""
    model = net()
    opt = wrap(model, placement)
    train(job, model, opt, 2)
    loss_of(model, batch(job, 2)).backward()
    data = TensorDataset(torch.cat([batch(job, step) for step in range(3, 3 + STEPS)]))
    context = "spawn" if workers else None
    for (x,) in DataLoader(data, 5, num_workers=workers, multiprocessing_context=context):
        opt.step()
        opt.zero_grad()
        loss_of(model, x).backward()
    opt.step()
    return digest(model)


@pytest.mark.slow
def test_loaders_that_are_spawned(team: Team) -> None:
    assert team.run(spawning, "plan", 1) == team.run(spawning, "copy", 0)


# ---- a module that joins


def joining(job: tw.Job, placement: str) -> tuple[str, bool]:
    """A module was no part of the model, has other values on each worker, and joins in mid-step."""
    model = net()
    opt = wrap(model, placement)
    train(job, model, opt)
    loss_of(model, batch(job, 50)).backward()
    torch.manual_seed(job.rank)
    late = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    model.add_module("late", late)
    opt.add_param_group({"params": list(late.parameters())})
    opt.step()  # what left before counts
    opt.zero_grad()
    train(job, model, opt)
    return digest(model), all(in_place(opt))


def test_a_module_that_joins(team: Team, transports: list[str] | None) -> None:
    planned = team.run(joining, "plan", transports=transports)
    copied = team.run(joining, "copy", transports=transports)
    assert planned == [(copied[0][0], True)] * 2
    assert copied == [(copied[0][0], False)] * 2


# ---- gradients that outlive the job

_kept: list[tuple[torch.Tensor, torch.Tensor]] = []


def keeping(job: tw.Job, placement: str) -> None:
    model = net()
    model.append(nn.Linear(3, 30_000))  # large enough for the pool
    opt = wrap(model, placement)
    for step in range(3):  # in the pool, in slots, and where a slot is in use
        loss_of(model, batch(job, step)).backward()
        _kept.extend((p.grad, p.grad.clone()) for p in model.parameters())
        opt.step()
        opt.zero_grad()
    del opt
    job.close()
    for _ in range(3):
        loss_of(model, batch(job, 9)).backward()
        held = [torch.full_like(then, 7.0) for _, then in _kept]
        assert all(torch.equal(now, then) for now, then in _kept)
        del held
        model.zero_grad()


def kept(job: tw.Job, placement: str) -> None:
    """In the next job of these processes."""
    model = net()
    model.append(nn.Linear(3, 30_000))
    train(job, model, wrap(model, placement))
    assert all(torch.equal(now, then) for now, then in _kept)
    for now, _ in _kept:
        now.fill_(3.0)
    assert all(bool((now == 3.0).all()) for now, _ in _kept)
    _kept.clear()


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_gradients_outlive_their_job(
    team: Team, transports: list[str] | None, placement: str
) -> None:
    team.run(keeping, placement, transports=transports)
    team.run(kept, placement, transports=transports)


# ---- hooks that change gradients


def halve(parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(0.5)


def replace(parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad = parameter.grad * 0.5


def hooked(job: tw.Job, placement: str, hook: Case | None, order: str) -> str:
    """Without a hook the loss is halved, which gives the same bits."""
    model = net()
    if hook and order == "before":
        register(model, hook)
    opt = wrap(model, placement)
    if hook and order == "after":
        register(model, hook)
    for step in range(STEPS):
        loss = loss_of(model, batch(job, step)) * (1.0 if hook else 0.5)
        if order == "after":  # they see the sum, and it leaves with step()
            with opt.accumulate():
                loss.backward()
        else:
            loss.backward()
        opt.step()
        opt.zero_grad()
    return digest(model)


def register(model: nn.Module, hook: Case) -> None:
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(hook)


def hooked_too_late(job: tw.Job, placement: str, hook: Case) -> str:
    model = net()
    opt = wrap(model, placement)
    train(job, model, opt)
    register(model, hook)
    loss_of(model, batch(job, 9)).backward()
    with pytest.raises(RuntimeError) as caught:
        opt.step()
    job.barrier()
    return str(caught.value)


@pytest.mark.parametrize("hook", [halve, replace], ids=lambda hook: hook.__name__)
def test_hooks_that_change_gradients(team: Team, transports: list[str] | None, hook: Case) -> None:
    """Hooks from before the optimizer count; later ones only while gradients add up."""
    plain = same(team, hooked, None, "before", transports=transports)
    for order in "before", "after":
        assert same(team, hooked, hook, order, transports=transports) == plain
    for text in same(team, hooked_too_late, hook, transports=transports):
        assert "the gradient of '0.weight' was changed after it had left" in text


# ---- gradients and parameters that are elsewhere


def share(parameter: torch.Tensor) -> None:
    """Shares like a queue of torch.multiprocessing: the old memory is free."""
    assert parameter.grad is not None
    parameter.grad.share_memory_()


def assign_data(parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.data = parameter.grad * 0.5


@pytest.mark.parametrize("hook", [share, assign_data], ids=lambda hook: hook.__name__)
def test_gradients_that_move_after_they_left(team: Team, hook: Case) -> None:
    """Their old memory is free, and may hold anything by then."""
    for text in team.run(hooked_too_late, "plan", hook):
        assert "the gradient of '0.weight' was changed after it had left" in text


def edited_through_data(job: tw.Job, placement: str, how: str) -> str:
    """Averaged gradients are clipped in the way of old scripts."""
    model = net()
    opt = wrap(model, placement)
    for step in range(STEPS):
        loss_of(model, batch(job, step)).backward()
        opt.synchronize()
        for parameter in model.parameters():
            if how == "assign":
                parameter.grad.data = parameter.grad.clamp(-1e-3, 1e-3)
            elif how == "in place":
                parameter.grad.data.clamp_(-1e-3, 1e-3)
            else:
                parameter.grad.clamp_(-1e-3, 1e-3)
        opt.step()
        opt.zero_grad()
    return digest(model)


def test_averages_that_are_edited_through_data(team: Team, transports: list[str] | None) -> None:
    usual = same(team, edited_through_data, "as usual", transports=transports)
    for how in "in place", "assign":
        assert same(team, edited_through_data, how, transports=transports) == usual
        assert {team.alone(edited_through_data, "plan", how)} == {
            team.alone(edited_through_data, "plan", "as usual")
        }


def changing(job: tw.Job, placement: str, change: str, last: int) -> str:
    model = net().append(nn.Linear(3, last))
    opt = wrap(model, placement)
    train(job, model, opt, 3)
    if change == "assign":
        other = net().append(nn.Linear(3, last))
        model.load_state_dict(other.state_dict(), assign=True)
    else:
        model.to(torch.float64)
    with pytest.raises(RuntimeError) as caught:
        make_step(opt, loss_of(model, batch(job, 9).to(model[4].weight.dtype)))
    job.barrier()
    return str(caught.value)


REPLACED = {
    "assign": "replaced in the model",
    "dtype": "torch.float32 on cpu, and is torch.float64",
}


@pytest.mark.parametrize("change", REPLACED)
def test_parameters_that_were_replaced(
    team: Team, transports: list[str] | None, change: str
) -> None:
    alone = team.alone(changing, "plan", change, 3)
    for text in (alone, *same(team, changing, change, 3, transports=transports)):
        assert f"parameter '0.weight' was {REPLACED[change]}" in text


def test_a_large_parameter_of_another_dtype(team: Team) -> None:
    """Its gradient leaves during backward and has other bytes than its place."""
    for text in same(team, changing, "dtype", 60_000):
        assert "parameter '0.weight' was torch.float32 on cpu, and is torch.float64" in text


# ---- a copy of the model that is trained beside it


def beside(job: tw.Job, placement: str, copied: bool) -> str:
    """The twin trains before each backward, and between it and the step, in the same memory."""
    model = net()
    opt = wrap(model, placement)
    twins: list[tuple[nn.Module, Any]] = []

    def train_twins(seed: int) -> None:
        for twin, own in twins:
            own.zero_grad()
            loss_of(twin, batch(job, seed)).backward()
            own.step()

    for step in range(2 * STEPS):
        train_twins(100 + step)
        loss_of(model, batch(job, step)).backward()
        if copied and step in (2, STEPS):  # with gradients in their slots
            twin = copy.deepcopy(model)
            twins.append((twin, torch.optim.SGD(twin.parameters(), lr=0.5)))
        train_twins(200 + step)
        opt.step()
        opt.zero_grad()
        if step == STEPS + 2:
            del twins[:1]
    return digest(model)


def test_a_copy_that_is_trained_beside(team: Team, transports: list[str] | None) -> None:
    alone = team.run(beside, "copy", False)
    assert same(team, beside, True, transports=transports) == alone


# ---- gradients that are withdrawn while they are sent

LARGE = 1100  # 4.6 MiB per layer, several units


def withdrawing(job: tw.Job, placement: str, how: str) -> str:
    """Every second step leaves out a layer, of which the withdrawn gradient must not count."""
    torch.manual_seed(3)
    model = nn.ModuleList([nn.Linear(LARGE, LARGE) for _ in range(3)])
    opt = wrap(model, placement)

    def backward(seed: int, whole: bool) -> None:
        generator = torch.Generator().manual_seed(10 * seed + job.rank)
        x = torch.randn(3, LARGE, generator=generator)
        for layer in model if whole else (model[0], model[2]):
            x = layer(x).tanh()
        x.square().mean().backward()

    for step in range(4):
        if how != "never":
            backward(100 + step, True)
            gradients = [p.grad for p in model.parameters()]
            (opt if how == "opt.zero_grad" else model).zero_grad()
            for gradient in gradients:
                gradient.fill_(float("nan"))
            del gradients, gradient
        backward(step, step % 2 == 0)
        opt.step()
        opt.zero_grad()
    return digest(model)


@pytest.mark.parametrize("how", ["opt.zero_grad", "model.zero_grad"])
def test_gradients_that_are_withdrawn(team: Team, how: str) -> None:
    never = team.run(withdrawing, "copy", "never", transports=["tcp"])
    assert same(team, withdrawing, how, transports=["tcp"]) == never


# ---- memory of the whole host, by kind of region

WIDTH = 1500
SLACK = 0.1  # large pages, threads; less than half a layer
ONCE = ("view", "state/momentum_buffer", "produced/0", "produced/1")
KINDS = (*ONCE, "slot/0", "slot/1", "pool/0", "pool/1")


def regions(pids: list[int]) -> dict[int, int]:
    """Bytes of every piece of shared memory that has pages, mapped or not, by its inode."""
    found = {}
    for pid in pids:
        for name in os.listdir(f"/proc/{pid}/fd"):
            path = Path(f"/proc/{pid}/fd/{name}")
            try:
                if "memfd:tensorwire" in os.readlink(path):
                    status = path.stat()
                    found[status.st_ino] = 512 * status.st_blocks
            except FileNotFoundError:
                continue  # closed meanwhile
    return found


def inode_at(address: int) -> int:
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, stop = (int(word, 16) for word in line.split()[0].split("-"))
        if start <= address < stop:
            return int(line.split()[4])
    raise AssertionError("nothing is mapped there")


def memory_by_kind(job: tw.Job) -> dict[str, float]:
    """Returns memory by kind, in sizes of the model; also shared memory that no process maps."""
    server = job.session.member.servers[0]  # type: ignore[union-attr]
    pids = [int(pid) for pid in job.sum([os.getpid() * (r == job.rank) for r in range(job.size)])]
    before, (_, private) = regions([*pids, server.pid]), resident(server.pid)
    job.barrier()
    torch.manual_seed(3)
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(4)])
    opt = wrap(model, "plan")
    for _ in range(12):  # the first pushes into the slots, whose pages go back after eight more
        opt.zero_grad()
        loss_of(model, torch.ones(2, WIDTH)).backward()
        opt.step()
    job.barrier()
    after, (_, now) = regions([*pids, server.pid]), resident(server.pid)
    job.barrier()
    found = {"private memory of the server": now - private}
    for kind in KINDS:
        memory = server.region(f"0/{kind}").array()
        found[kind] = after.pop(inode_at(memory.__array_interface__["data"][0]))
    found["other"] = sum(size for inode, size in after.items() if inode not in before)
    size = sum(p.nbytes for p in model.parameters())
    return {kind: bytes_ / size for kind, bytes_ in found.items()}


def test_memory_by_kind(team: Team) -> None:
    """One version of the parameters, the momentum, and each worker's gradients once."""
    for found in team.run(memory_by_kind):
        for kind, size in found.items():
            assert abs(size - (kind in ONCE)) <= SLACK, (kind, found)
