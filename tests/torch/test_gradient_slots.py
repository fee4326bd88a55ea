"""Gradients are produced in place, and nothing that a script may do makes the result another one.

Every case trains with `placement="plan"` and with "copy" and gives the same bits; on shared memory
with two workers, and alone. The addresses of the gradients tell which were in place.
"""

import ctypes
import functools
import gc
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scripts import digest
from team import Team
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset
from twins import make_step

import tensorwire.torch as tw
from tensorwire.torch.allocator import gradient_slots
from tensorwire_benchmarks.workloads.catalog import WORKLOADS, workload

STEPS = 6
Case = Callable[[tw.Job, str], tuple[str, list[bool]]]


def net() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 9), nn.Tanh(),
        nn.Linear(9, 3),
    )  # fmt: skip


def batch(job: tw.Job, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + job.rank)
    return torch.randn(5, 1, 6, 6, generator=generator)


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = model(x).square().mean()
    return result


def wrap(model: nn.Module, placement: str, **options: Any) -> Any:
    opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return tw.DistributedOptimizer(opt, model, placement=placement, **options)


def train(job: tw.Job, model: nn.Module, opt: Any, steps: int = STEPS) -> None:
    for step in range(steps):
        make_step(opt, loss_of(model, batch(job, step)))


def in_place(opt: Any) -> list[bool]:
    """Returns for every gradient, by its address, whether it is in place, if any is placed."""
    return [row.in_place for row in tw.explain_optimizer(opt).gradients]


def by_address(opt: Any) -> list[bool]:
    """Tells whether `.grad` lies in its slot, independent of the optimizer's opinion."""
    core = opt._tensorwire
    addresses = core.reducer._slots._addresses
    gradients = [core.parameters[i].grad for i in core.trained]
    return [
        gradient is not None and gradient.data_ptr() == addresses[i]
        for i, gradient in zip(core.trained, gradients, strict=True)
    ]


# ---- cases: each returns a digest of the result, and what was in place in the last step


def steps(make: Callable[[], nn.Module] = net, count: int = STEPS, **options: Any) -> Any:
    """Makes a case of a function that computes gradients: `backward(job, model, opt, step)`."""

    def case_of(backward: Callable[[tw.Job, Any, Any, int], None]) -> Case:
        @functools.wraps(backward)
        def case(job: tw.Job, placement: str) -> tuple[str, list[bool]]:
            torch.manual_seed(3)
            model = make()
            opt = wrap(model, placement, **options)
            for step in range(count):
                backward(job, model, opt, step)
                opt.step()
                opt.zero_grad()
            return digest(model), in_place(opt)

        return case

    return case_of


def plain(job: tw.Job, placement: str) -> tuple[str, list[bool]]:
    model = net()
    opt = wrap(model, placement)
    for step in range(STEPS):
        opt.zero_grad()
        loss_of(model, batch(job, step)).backward()
        if placement == "plan":
            assert by_address(opt) == [step > 0] * 8
        opt.step()
    return digest(model), in_place(opt)


def set_to_zero(job: tw.Job, placement: str) -> tuple[str, list[bool]]:
    """Gradients keep their memory and are added to."""
    model = net()
    opt = wrap(model, placement)
    for step in range(STEPS):
        opt.zero_grad(set_to_none=step < 2)
        loss_of(model, batch(job, step)).backward()
        opt.step()
    return digest(model), in_place(opt)


@steps()
def accumulated(job: tw.Job, model: Any, opt: Any, step: int) -> None:
    with opt.accumulate():
        loss_of(model, batch(job, step)).backward()
    loss_of(model, batch(job, step + 100)).backward()


@steps(max_norm=0.1)
def clipped(job: tw.Job, model: Any, opt: Any, step: int) -> None:
    loss_of(model, batch(job, step)).backward()


@steps()
def synchronized(job: tw.Job, model: Any, opt: Any, step: int) -> None:
    """`.grad` becomes the average, where it lies, and is edited there."""
    loss_of(model, batch(job, step)).backward()
    opt.synchronize()
    for parameter in model.parameters():
        parameter.grad.mul_(0.5)


def halved() -> nn.Sequential:
    model = net()
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient * 0.5)
    return model


@steps(halved)
def changing_hooks(job: tw.Job, model: Any, opt: Any, step: int) -> None:
    """Hooks on tensors replace the gradient before it is accumulated."""
    loss_of(model, batch(job, step)).backward()


@steps()
def retained(job: tw.Job, model: Any, opt: Any, step: int) -> None:
    """Two backwards through one graph before a step."""
    loss = loss_of(model, batch(job, step))
    loss.backward(retain_graph=True)
    loss.backward()


@steps(lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)))
def double_backward(job: tw.Job, model: Any, opt: Any, step: int) -> None:
    """A penalty on the gradient with respect to the input, and gradients of gradients."""
    x = batch(job, step)[:, 0, 0].requires_grad_()
    value = model(x).square().mean()
    (inner,) = torch.autograd.grad(value, x, create_graph=True)
    (value + inner.square().sum()).backward()


def grad_between(job: tw.Job, placement: str) -> tuple[str, list[bool]]:
    """torch.autograd.grad allocates the same, and its result is kept while backward runs."""
    model = net()
    opt = wrap(model, placement)
    for step in range(STEPS):
        loss = loss_of(model, batch(job, step))
        kept = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
        before = [each.clone() for each in kept]
        make_step(opt, loss)
        assert all(torch.equal(a, b) for a, b in zip(kept, before, strict=True))
    return digest(model), in_place(opt)


def kept_gradients(job: tw.Job, placement: str) -> tuple[str, list[bool]]:
    """Gradients of earlier steps stay what they were."""
    model = net()
    opt = wrap(model, placement)
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []
    for step in range(STEPS):
        loss_of(model, batch(job, step)).backward()
        kept += [(p.grad, p.grad.clone()) for p in model.parameters()]
        opt.step()
        opt.zero_grad()
        assert all(torch.equal(now, then) for now, then in kept), step
    kept.clear()
    train(job, model, opt, 3)  # their slots are free again
    return digest(model), in_place(opt)


def gan(job: tw.Job, placement: str) -> tuple[str, list[bool]]:
    """Two optimizers; the generator's backward runs through the discriminator too."""
    torch.manual_seed(3)
    generator = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 6))
    critic = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
    first, second = wrap(generator, placement), wrap(critic, placement)
    for step in range(STEPS):
        noise, real = batch(job, step)[:, 0, 0, :4], batch(job, step)[:, 0, 1]
        second.zero_grad()
        (critic(real).mean() - critic(generator(noise).detach()).mean()).backward()
        second.step()
        first.zero_grad()
        second.zero_grad()
        critic(generator(noise)).mean().backward()
        first.step()
    return digest(nn.ModuleList([generator, critic])), in_place(first) + in_place(second)


def tied() -> nn.Sequential:
    model = nn.Sequential(nn.Embedding(11, 6), nn.Linear(6, 6), nn.Linear(6, 11, bias=False))
    model[2].weight = model[0].weight
    return model


@steps(tied)
def shared_weight(job: tw.Job, model: Any, opt: Any, step: int) -> None:
    generator = torch.Generator().manual_seed(10 * step + job.rank)
    words = torch.randint(11, (5,), generator=generator)
    F.cross_entropy(model(words), words).backward()


@steps(count=3 * STEPS)
def unfrozen(job: tw.Job, model: Any, opt: Any, step: int) -> None:
    """A layer is frozen and trained again: planned anew each time."""
    if step and step % STEPS == 0:
        with tw.edit(model):
            model[4].weight.requires_grad_(step == 2 * STEPS)
    loss_of(model, batch(job, step)).backward()


@steps(lambda: nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)]), 2 * STEPS)
def unused(job: tw.Job, model: Any, opt: Any, step: int) -> None:
    """A layer takes part in every second step only, on one worker in others than on the other."""
    x = model[0](batch(job, step)[:, 0, 0])
    if (step + job.rank) % 2:
        x = model[1](x)
    x.square().mean().backward()


def group_added(job: tw.Job, placement: str) -> tuple[str, list[bool]]:
    """A module joins in mid-training; gradients of before stay what they were."""
    model = net()
    model.add_module("late", nn.Linear(3, 3))
    early = [p for name, p in model.named_parameters() if "late" not in name]
    opt: Any = torch.optim.SGD(early, lr=0.05, momentum=0.9)
    opt = tw.DistributedOptimizer(opt, model, placement=placement)
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []
    for step in range(2 * STEPS):
        if step == STEPS:
            opt.add_param_group({"params": list(model.late.parameters())})  # type: ignore[union-attr]
        loss_of(model, batch(job, step)).backward()
        kept = kept or [(p.grad, p.grad.clone()) for p in early]
        opt.step()
        opt.zero_grad()
        model.late.zero_grad()  # type: ignore[union-attr]
    assert all(torch.equal(now, then) for now, then in kept)
    return digest(model), in_place(opt)


@steps(lambda: nn.ParameterList([torch.randn(6, 6), torch.randn(6, 6), torch.randn(3, 6)]))
def transposed(job: tw.Job, model: Any, opt: Any, step: int) -> None:
    """Backward makes gradients whose elements are in another order, and parts of larger ones."""
    x = batch(job, step)[:, 0, 0]
    whole = torch.cat([model[2], model[2]]).t()
    (x @ model[0].t() @ model[1].permute(1, 0) @ whole).square().mean().backward()


@steps(lambda: net().to(memory_format=torch.channels_last))
def channels_last(job: tw.Job, model: Any, opt: Any, step: int) -> None:
    loss_of(model, batch(job, step).to(memory_format=torch.channels_last)).backward()


def raising(job: tw.Job, placement: str) -> tuple[str, list[bool]]:
    """Backward breaks off in the middle; the script goes on with the next batch."""
    model = net()
    opt = wrap(model, placement)

    def sometimes(gradient: torch.Tensor) -> None:
        if failing:
            raise ArithmeticError("on purpose")

    model[4].bias.register_hook(sometimes)
    for step in range(2 * STEPS):
        failing = step % 3 == 2
        try:
            loss_of(model, batch(job, step)).backward()
        except ArithmeticError:
            opt.zero_grad()
            continue
        opt.step()
        opt.zero_grad()
    return digest(model), in_place(opt)


def checkpointed(reentrant: bool, job: tw.Job, model: Any, opt: Any, step: int) -> None:
    x = batch(job, step).requires_grad_()
    x = checkpoint(model[:3], x, use_reentrant=reentrant)
    model[3:](x).square().mean().backward()


@steps()
def reentrant(job: tw.Job, model: Any, opt: Any, step: int) -> None:
    checkpointed(True, job, model, opt, step)


@steps()
def not_reentrant(job: tw.Job, model: Any, opt: Any, step: int) -> None:
    checkpointed(False, job, model, opt, step)


@steps()
def other_thread(job: tw.Job, model: Any, opt: Any, step: int) -> None:
    """Backward runs in a thread of its own, another one in every step."""
    thread = threading.Thread(target=loss_of(model, batch(job, step)).backward)
    thread.start()
    thread.join()


def threads_beside(job: tw.Job, placement: str) -> tuple[str, list[bool]]:
    """Other threads allocate and free tensors of the same sizes all the time."""
    model = net()
    opt = wrap(model, placement)
    over = threading.Event()

    def churn() -> None:
        while not over.is_set():
            held = [torch.full(p.shape, 7.0) for p in model.parameters()]
            assert all(bool((each == 7.0).all()) for each in held)

    threads = [threading.Thread(target=churn) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        train(job, model, opt)
    finally:
        over.set()
        for thread in threads:
            thread.join()
    return digest(model), in_place(opt)


def loaders(job: tw.Job, placement: str) -> tuple[str, list[bool]]:
    """Worker processes of a DataLoader, forked in the middle of training."""
    model = net()
    opt = wrap(model, placement)
    for epoch in range(2):
        data = torch.cat([batch(job, 2 * epoch), batch(job, 2 * epoch + 1)])
        for (x,) in DataLoader(
            TensorDataset(data), 5, num_workers=1, multiprocessing_context="fork"
        ):
            make_step(opt, loss_of(model, x))
    return digest(model), in_place(opt)


class TwoHeads(nn.Module):
    """One trunk and two heads of equal shape."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Flatten(), nn.Linear(36, width), nn.Tanh())
        self.heads = nn.ModuleList(nn.Linear(width, width) for _ in range(2))

    def forward(self, x: torch.Tensor, head: int) -> torch.Tensor:
        result: torch.Tensor = self.heads[head](self.trunk(x))
        return result


def in_turns(job: tw.Job, placement: str, width: int) -> tuple[str, list[bool]]:
    """Backward allocates the same for either head."""
    torch.manual_seed(3)
    model = TwoHeads(width)
    opt = wrap(model, placement)
    for step in range(STEPS):
        make_step(opt, model(batch(job, step), step % 2).square().mean())
        rows = tw.explain_optimizer(opt).gradients
        head = f"heads.{step % 2}"
        missed = [each for each in rows if each.reason and each.name.startswith(("trunk", head))]
        if placement == "plan" and step > 1:
            assert not missed, (step, missed)
    return digest(model), in_place(opt)


def two_heads(job: tw.Job, placement: str) -> tuple[str, list[bool]]:
    return in_turns(job, placement, 20)


def two_large_heads(job: tw.Job, placement: str) -> tuple[str, list[bool]]:
    """Their weights are pooled where memory is shared, but have no need of it."""
    return in_turns(job, placement, 160)


@steps(count=2 * STEPS, apply="worker")
def applied_by_worker(job: tw.Job, model: Any, opt: Any, step: int) -> None:
    """Worker 0 reads the average after a step: its memory is not given back before."""
    loss_of(model, batch(job, step)).backward()


ALL = (
    plain, set_to_zero, accumulated, clipped, synchronized, changing_hooks, retained,
    double_backward, grad_between, kept_gradients, gan, shared_weight, unfrozen, unused,
    group_added, transposed, channels_last, raising, reentrant, not_reentrant, other_thread,
    threads_beside, loaders, two_heads, two_large_heads,
    applied_by_worker,
)  # fmt: skip
NOT_IN_PLACE = {
    # A thread is unknown until its first gradient has arrived.
    "other_thread": 2,
    # Two of the same size: which comes first changes from step to step. They are too small to be
    # pooled.
    "unused": 2,
}


@pytest.mark.parametrize("case", ALL, ids=lambda case: case.__name__)
def test_same_bits_as_with_copies(team: Team, case: Case) -> None:
    copied = team.run(case, "copy")
    assert all(not any(places) for _, places in copied)
    alone, (bits, _) = team.alone(case, "plan"), team.alone(case, "copy")
    assert alone[0] == bits
    planned = team.run(case, "plan"), team.run(case, "plan", transports=["tcp"])
    for each in planned:
        assert [bits for bits, _ in each] == [bits for bits, _ in copied]
    for _, places in (alone, *planned[0], *planned[1]):
        assert places.count(False) <= NOT_IN_PLACE.get(case.__name__, 0), places


# ---- reasons


class _Together(torch.autograd.Function):
    """Both gradients are views of one tensor."""

    @staticmethod
    def forward(ctx: Any, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        ctx.sizes = first.numel(), second.numel()
        return first.sum() * 2 + second.sum() * 3

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        first, second = ctx.sizes
        whole = torch.empty(first + second)
        whole[:first], whole[first:] = 2.0, 3.0
        return whole[:first], whole[first:]


def reasons_of_views(job: tw.Job) -> list[str]:
    model = nn.ParameterList([torch.zeros(30), torch.zeros(50)])
    opt = wrap(model, "plan")
    for _ in range(5):
        make_step(opt, _Together.apply(*model))
    assert model[0].tolist() == model[0].new_full((30,), model[0][0].item()).tolist()
    return [row.reason for row in tw.explain_optimizer(opt).gradients]


def test_parts_of_a_larger_tensor_are_copied(team: Team) -> None:
    first, second = team.alone(reasons_of_views)
    assert "larger tensor" in first
    assert "larger tensor" in second


def reason_of_kept(job: tw.Job) -> list[str]:
    model = net()
    opt = wrap(model, "plan")
    kept = []
    for step in range(STEPS):
        loss_of(model, batch(job, step)).backward()
        kept.append(model[4].weight.grad)
        opt.step()
        opt.zero_grad()
    return [row.reason for row in tw.explain_optimizer(opt).gradients]


def test_a_kept_gradient_keeps_its_slot(team: Team) -> None:
    *rest, weight, bias, _, _ = team.alone(reason_of_kept)
    assert "the gradient of an earlier step was kept" in weight
    assert not any([*rest, bias])


def reasons(job: tw.Job) -> list[str]:
    model = net()
    opt = wrap(model, "plan")
    train(job, model, opt)
    return [row.reason for row in tw.explain_optimizer(opt).gradients]


def test_several_slices_per_worker_are_copied(team: Team) -> None:
    assert set(team.alone(reasons, slices=2)) == {"this worker computes several slices of a step"}


def routes(job: tw.Job) -> list[str]:
    model = net()
    opt = wrap(model, "plan")
    train(job, model, opt)
    return [row.route for row in tw.explain_optimizer(opt).gradients]


def test_over_a_network_gradients_are_sent_from_registered_memory(team: Team) -> None:
    for found in team.run(routes, transports=["tcp"]):
        assert set(found) == {"produced in registered memory, sent from there"}
    for found in team.run(routes):
        assert set(found) == {"produced in place"}


def test_what_is_cut_between_servers_is_copied(team: Team) -> None:
    for found in team.run(large, servers=2):
        assert sorted(set(found)) == ["", "it is cut between servers"]


def large(job: tw.Job) -> list[str]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(300, 2000), nn.Linear(2000, 1500), nn.Linear(1500, 300))
    opt = wrap(model, "plan")
    for _ in range(3):
        make_step(opt, model(torch.ones(2, 300)).square().mean())
    return [row.reason for row in tw.explain_optimizer(opt).gradients]


# ---- storages, copies, the end


def storages(job: tw.Job) -> tuple[list[bool], list[bool]]:
    model = net()
    opt = wrap(model, "plan")
    for step in range(3):
        opt.zero_grad()
        loss_of(model, batch(job, step)).backward()
        opt.step()
    parameters = list(model.parameters())
    assert by_address(opt) == [True] * len(parameters)
    return (
        [p.untyped_storage().nbytes() == p.nbytes for p in parameters],
        [p.grad.untyped_storage().nbytes() == p.grad.nbytes for p in parameters],
    )


def test_a_tensor_has_a_storage_of_its_bytes(team: Team) -> None:
    for parameters, gradients in team.run(storages):
        assert all(parameters)
        assert all(gradients)


def copies_of_a_step(job: tw.Job, placement: str) -> tuple[int, int, int]:
    """By our own counter, and by the profiler: bytes of parameters that something copied."""
    model = nn.Sequential(nn.Linear(37, 41), nn.ReLU(), nn.Linear(41, 7))
    sizes = {tuple(p.shape): p.nbytes for p in model.parameters()}
    opt = wrap(model, placement)
    x = torch.ones(5, 37)

    def step() -> None:
        make_step(opt, model(x).square().mean())

    for _ in range(3):
        step()
    before = job.statistics.bytes_copied
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True
    ) as profile:
        step()
    counted = job.statistics.bytes_copied - before
    seen = 0
    for event in profile.events():
        if event.name == "aten::copy_":
            seen += sizes.get(tuple(event.input_shapes[0]), 0)
    return counted, seen, sum(sizes.values())


def test_the_profiler_sees_the_copies_that_are_counted(team: Team) -> None:
    counted, seen, _ = team.alone(copies_of_a_step, "plan")
    assert counted == seen == 0
    counted, seen, whole = team.alone(copies_of_a_step, "copy")
    assert counted == seen == whole


def python_calls(job: tw.Job, operators: int) -> int:
    """Counts the calls of Python functions while backward runs in steady state."""
    model = nn.Linear(5, 5)
    opt = wrap(model, "plan")
    count = 0

    def seen(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    for _ in range(4):
        count = 0
        x = model(torch.ones(2, 5))
        for _ in range(operators):
            x = x.sin()
        loss = x.sum()
        sys.setprofile(seen)
        loss.backward()
        sys.setprofile(None)
        opt.step()
        opt.zero_grad()
    assert in_place(opt) == [True, True]
    return count


def test_no_python_runs_per_operator(team: Team) -> None:
    few, many = team.alone(python_calls, 1), team.alone(python_calls, 300)
    assert 0 < few == many


def outliving(job: tw.Job) -> None:
    model = net()
    opt = wrap(model, "plan")
    for step in range(3):
        opt.zero_grad()
        loss_of(model, batch(job, step)).backward()
        opt.step()
    gradients = [p.grad for p in model.parameters()]
    before = [gradient.clone() for gradient in gradients]
    opt.close()
    del opt
    job.barrier()
    other = net()  # takes memory again
    for step in range(3):
        loss_of(other, batch(job, step)).backward()
    assert all(torch.equal(a, b) for a, b in zip(gradients, before, strict=True))
    for gradient in gradients:
        gradient.add_(1.0)
    model.zero_grad()
    for step in range(3):  # the hooks are gone
        loss_of(model, batch(job, step)).backward()


def test_gradients_outlive_their_optimizer(team: Team) -> None:
    team.run(outliving)
    team.alone(outliving)


def failing_twice(job: tw.Job) -> str:
    model = net()
    opt = wrap(model, "plan")
    make_step(opt, loss_of(model, batch(job, 0)))
    loss_of(model, batch(job, 1)).backward()
    model[4].weight.grad.mul_(2.0)
    with pytest.raises(RuntimeError, match="changed after it had left") as caught:
        opt.step()
    return str(caught.value)


def test_an_edited_gradient_is_an_error_also_in_place(team: Team) -> None:
    assert "'4.weight'" in team.alone(failing_twice)


@pytest.mark.parametrize("name", [each.name for each in WORKLOADS])
def test_workloads_are_in_place(team: Team, name: str) -> None:
    found = team.without_job(explain_workload, name, workers=1)[0]
    # How many temporaries of a bias's size a BiLSTM makes depends on the lengths of its sentences.
    bar = 0.95 if name == "bilstm" else 0.99
    dense = sum(
        row["bytes"]
        for row in found["rows"]
        if row["role"] == "gradient" and row["route"] != "rows sent"
    )
    assert dense == found["bytes"] or name == "dlrm"
    assert found["bytes_in_place"] >= bar * dense, found


def explain_workload(rank: int, name: str) -> dict[str, Any]:
    small = workload(name).reduced()
    batches, loss = iter(small.batches(torch, 0)), small.loss(torch)

    def step(model: nn.Module) -> torch.Tensor:
        inputs, labels = next(batches)
        result: torch.Tensor = loss(model(inputs), labels)
        return result

    return tw.explain_model(small.build(torch), step, name=name).to_json()


# ---- memory of the whole host

WIDTH = 1500
KIB = 1024


def resident(pid: int) -> tuple[int, int]:
    """Bytes of shared regions, each page counted by its share, and of private memory."""
    shared = private = 0
    name = ""
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        words = line.split()
        if not words[0].endswith(":"):
            name = words[5] if len(words) > 5 else ""
        elif words[0] == "Pss:" and "memfd:" in name:
            shared += KIB * int(words[1])
        elif words[0] == "Anonymous:" and "memfd:" not in name:
            private += KIB * int(words[1])
    return shared, private


def settled(pids: list[int]) -> list[tuple[int, int]]:
    """Returns the numbers when the regions of an earlier job are gone."""
    gc.collect()
    now = [resident(pid) for pid in pids]
    while True:
        time.sleep(0.3)
        before, now = now, [resident(pid) for pid in pids]
        if [shared for shared, _ in before] == [shared for shared, _ in now]:
            return now


def memory_of_the_host(job: tw.Job, placement: str) -> tuple[int, int, int]:
    """The model's bytes; the host's in regions, and in private memory of this worker, beyond what
    was there before the model.
    """
    torch.manual_seed(3)
    x = torch.ones(2, WIDTH)
    first = nn.Linear(WIDTH, 2)
    first(x).sum().backward()
    torch.optim.SGD(first.parameters(), lr=0.1).step()  # imports what it needs
    ctypes.CDLL(None).malloc_trim(0)
    pids = [int(pid) for pid in job.sum([os.getpid() * (r == job.rank) for r in range(job.size)])]
    pids += [peer.pid for peer in job.session.member.servers]  # type: ignore[union-attr]
    before = settled(pids)
    job.barrier()
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(4)])
    size = sum(p.nbytes for p in model.parameters())
    opt = wrap(model, placement)
    for _ in range(3):
        opt.zero_grad()
        model(x).square().mean().backward()
        opt.step()
    ctypes.CDLL(None).malloc_trim(0)  # what was freed is no longer anybody's
    job.barrier()
    after = [resident(pid) for pid in pids]
    job.barrier()
    shared = sum(a[0] - b[0] for a, b in zip(after, before, strict=True))
    private = after[job.rank][1] - before[job.rank][1]
    return size, shared, private


def test_memory_of_the_host(team: Team) -> None:
    """Two versions of the parameters at most, the momentum, and each worker's gradients once."""
    for size, shared, private in team.run(memory_of_the_host, "plan"):
        assert shared <= 1.05 * (2 + 1 + 2) * size
        assert private <= 0.2 * size


class NoAllocator:
    """An allocator that records the calls of a pool."""

    def __init__(self) -> None:
        self.waits: dict[int, bool] = {}

    def add_pool(self) -> int:
        return 0

    def add_block(self, pool: int, address: int, size_bytes: int) -> int:
        return 1

    def miss(self, slot: int, waits: bool) -> None:
        self.waits[slot] = waits


def test_a_pool_waits_for_a_gradient_for_some_steps() -> None:
    """Also late in training, for a parameter whose gradients come in some steps alone."""
    told: Any = NoAllocator()
    pool = gradient_slots._Pool(told)
    pool.add(0, 7, np.zeros(64, np.uint8))
    for _ in range(10):
        for _ in range(gradient_slots._PATIENCE):
            pool.stepped()
            assert told.waits == {7: True}
        pool.seen(0)
    for _ in range(gradient_slots._PATIENCE):
        pool.stepped()
    assert pool.awaits(0)
    pool.stepped()
    assert not pool.awaits(0)
    assert told.waits == {7: False}
