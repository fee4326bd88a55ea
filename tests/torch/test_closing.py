"""An optimizer that is not used any more: its memory is given back, and every use is an error."""

import copy
import os
import pickle
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from scripts import digest
from team import Team
from torch import nn
from twins import adamw, batch, loss, make_step, net, same, sgd

import tensorwire.torch as tw

FOLDS = 10


def shared_bytes(pid: int) -> int:
    """Returns the bytes of all shared memory that a process has mapped."""
    total = 0
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        if "memfd:" in line:
            start, stop = (int(part, 16) for part in line.split()[0].split("-"))
            total += stop - start
    return total


def used(pid: int) -> tuple[int, int, int]:
    """Shared memory, descriptors, threads."""
    tasks = os.listdir(f"/proc/{pid}/task")
    return shared_bytes(pid), len(os.listdir(f"/proc/{pid}/fd")), len(tasks)


def await_use(pid: int, most: tuple[int, int, int]) -> None:
    """Waits, as a server frees after its answer. It may also free memory of an earlier job."""
    deadline = time.monotonic() + 20
    while any(a > b for a, b in zip(used(pid), most, strict=True)):
        assert time.monotonic() < deadline, f"process {pid}: {used(pid)}, more than {most}"
        time.sleep(0.01)


def folds(job: tw.Job) -> int:
    """Cross-validation: every fold has a model and an optimizer of its own."""
    pids = [os.getpid()]
    if job.session.member is not None:
        pids += [peer.pid for peer in job.session.member.servers]
    before = {pid: used(pid) for pid in pids}
    job.barrier()
    size = 0
    for _ in range(FOLDS):
        model = nn.Sequential(nn.Linear(5, 512), nn.Linear(512, 512), nn.Linear(512, 1)).double()
        opt = tw.DistributedOptimizer(adamw(model), model)
        job.track(model=model, optimizer=opt)
        store = weakref.ref(opt._tensorwire.store)
        for step in range(2):
            make_step(opt, model(batch(step, job.rank)).square().mean())
        opt.state_dict()
        size = max(size, shared_bytes(pids[-1]))
        bits = digest(model)
        opt.close()
        opt.close()
        assert digest(model) == bits
        assert store() is None
        assert job.optimizers == []
        job.barrier()
        for pid in pids:
            await_use(pid, before[pid])
        job.barrier()
    return size


@pytest.mark.parametrize("servers", [1, 2])
def test_folds_take_the_memory_of_one(
    team: Team, transports: list[str] | None, servers: int
) -> None:
    """Named for a bug: every optimizer of a job kept its memory until the end."""
    for size in team.run(folds, transports=transports, servers=servers):
        assert size > 10_000_000 / servers, "the model is not in shared memory"


def folds_alone(job: tw.Job) -> None:
    for _ in range(3):
        model = net()
        opt = tw.DistributedOptimizer(sgd(model), model)
        store = weakref.ref(opt._tensorwire.store)
        loss(model, batch(0, 0)).backward()
        opt.step()
        bits = digest(model)
        opt.close()
        assert digest(model) == bits
        assert store() is None
    report = job.report()
    assert report["exposed_communication_s"] > 0  # of optimizers that are closed
    assert report["bytes_of_parameters"] == 0


def test_folds_alone(team: Team) -> None:
    team.alone(folds_alone)


def going_on(job: tw.Job) -> str:
    """One of two optimizers ends; the other one goes on, and so does the model in a new one."""
    first, second = net(), net()
    with torch.no_grad():
        second[0].weight.add_(1.0)
    twins = copy.deepcopy(first), copy.deepcopy(second)
    opts = [tw.DistributedOptimizer(adamw(model), model) for model in (first, second)]
    plain = [adamw(twin) for twin in twins]

    def step(which: int, at: int) -> None:
        model, twin = (first, second)[which], twins[which]
        loss(model, batch(at, job.rank)).backward()
        opts[which].step()
        opts[which].zero_grad()
        for rank in range(job.size):
            (loss(twin, batch(at, rank)) / job.size).backward()
        plain[which].step()
        plain[which].zero_grad()

    for at in range(2):
        step(0, at)
        step(1, at)
    saved = opts[0].state_dict()
    loss(first, batch(9, job.rank)).backward()  # withdrawn
    opts[0].close()
    step(1, 2)
    again = adamw(first)
    again.load_state_dict(saved)
    again.zero_grad()
    opts[0] = tw.DistributedOptimizer(again, first)
    step(0, 2)
    step(1, 3)
    same(first, twins[0])
    same(second, twins[1])
    assert job.report()["bytes_of_parameters"] > 0
    return digest(first) + digest(second)


@pytest.mark.parametrize("transports", ["shm", "tcp"], indirect=True)
def test_others_go_on(team: Team, transports: list[str] | None) -> None:
    first, second = team.run(going_on, transports=transports)
    assert first == second
    team.alone(going_on)


# ---- errors

USES: dict[str, Callable[[Any, nn.Module], Any]] = {
    "step": lambda opt, model: opt.step(),
    "state_dict": lambda opt, model: opt.state_dict(),
    "load_state_dict": lambda opt, model: opt.load_state_dict({}),
    "synchronize": lambda opt, model: opt.synchronize(),
    "accumulate": lambda opt, model: opt.accumulate().__enter__(),
    "last_norm": lambda opt, model: opt.last_norm,
    "add_param_group": lambda opt, model: opt.add_param_group({"params": []}),
    "clip": lambda opt, model: tw.clip_grad_norm_(opt, 1.0),
    "scaler": lambda opt, model: tw.GradScaler().step(opt),
}


def uses_after_closing(job: tw.Job) -> dict[str, str]:
    model = net()
    opt = tw.DistributedOptimizer(sgd(model), model)
    opt.close()
    found = {}
    for name, use in USES.items():
        try:
            use(opt, model)
        except RuntimeError as error:
            found[name] = str(error)
    with torch.no_grad():
        model[0].weight.add_(1)  # its own memory again
    opt.close()
    job.close()
    opt.close()
    return found


def test_every_use_of_a_closed_optimizer_is_an_error(team: Team) -> None:
    text = "this optimizer was closed; make a new one for further steps"
    assert team.alone(uses_after_closing) == dict.fromkeys(USES, text)


def saving_what_was_closed(job: tw.Job) -> None:
    model = net()
    job.track(model=model, optimizer=tw.DistributedOptimizer(sgd(model), model))
    job.optimizers[0].close()
    job.save("nowhere")


def closing_between_slices(job: tw.Job) -> None:
    model = net()
    opt = tw.DistributedOptimizer(sgd(model), model)
    loss(model, batch(0, 0)).backward()
    opt.step()
    opt.close()


def test_closing_at_a_wrong_time(team: Team) -> None:
    assert "was closed" in team.failure_alone(saving_what_was_closed).text
    failure = team.failure_alone(closing_between_slices, slices=2)
    assert "close() after slice 1 of 2" in failure.text


def pair(job: tw.Job) -> tuple[list[nn.Module], list[Any]]:
    models: list[nn.Module] = [net(), net()]
    return models, [tw.DistributedOptimizer(sgd(model), model) for model in models]


def one_closes_one_steps(job: tw.Job) -> None:
    (model, _), (opt, _) = pair(job)
    loss(model, batch(0, job.rank)).backward()
    if job.rank == 0:
        opt.close()
    else:
        opt.step()


def another_order(job: tw.Job) -> None:
    _, opts = pair(job)
    for opt in opts if job.rank == 0 else reversed(opts):
        opt.close()


def one_closes_one_means(job: tw.Job) -> None:
    _, (opt, _) = pair(job)
    if job.rank == 0:
        opt.close()
    job.mean(1.0)


def one_closes_one_makes(job: tw.Job) -> None:
    _, (opt, _) = pair(job)
    if job.rank == 0:
        opt.close()
    pair(job)


def one_closes_one_leaves(job: tw.Job) -> None:
    _, (opt, _) = pair(job)
    if job.rank == 0:
        opt.close()
    job.close()
    raise RuntimeError("worker 1 has left the job, others have not")


def steps_in_another_order(job: tw.Job) -> None:
    """Named for a bug: both waited for ever."""
    models, opts = pair(job)
    for which in (0, 1) if job.rank == 0 else (1, 0):
        loss(models[which], batch(0, job.rank)).backward()
        opts[which].step()


def one_makes_one_means(job: tw.Job) -> None:
    """Named for a bug: both waited for ever."""
    if job.rank == 0:
        pair(job)
    job.mean(1.0)


SUMS = "mean(), sum(), barrier() or load()"

DISAGREEMENTS = {
    "one_closes_one_steps": "close(), add_param_group() or edit() in worker 0, step() in worker 1",
    "another_order": "calls close(), add_param_group() or edit() of another optimizer while",
    "one_closes_one_means": f"has no more data, or calls {SUMS}, while worker 0 calls close()",
    "one_closes_one_makes": "worker 1 makes another optimizer or changes its parameter groups whil",
    "one_closes_one_leaves": "has left the job, others have not",
    "steps_in_another_order": "calls step() of another optimizer while worker",
    "one_makes_one_means": f"worker 1 calls {SUMS} while worker 0 makes an optimizer",
}


@pytest.mark.parametrize("name", DISAGREEMENTS)
def test_workers_whose_calls_differ(team: Team, transports: list[str] | None, name: str) -> None:
    for failure in team.failures(globals()[name], transports=transports):
        assert DISAGREEMENTS[name] in failure.text, failure.trace


# ---- copies

COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "pickle": pickle.dumps,
    "inside": lambda opt: copy.deepcopy({"optimizer": [opt]}),
}


def copies(job: tw.Job) -> dict[str, str]:
    model = net()
    opt = tw.DistributedOptimizer(sgd(model), model)
    found = {}
    for name, make in COPIES.items():
        try:
            make(opt)
        except TypeError as error:
            found[name] = str(error)
    kept = pickle.loads(pickle.dumps(opt.state_dict()))
    opt.load_state_dict(copy.deepcopy(kept))
    loss(model, batch(0, job.rank)).backward()
    opt.step()
    return found


def test_copies_are_an_error_that_tells_what_to_do(team: Team) -> None:
    """Named for a bug: a copy was made, and its first step failed for want of an attribute."""
    for found in [team.alone(copies), *team.run(copies)]:
        assert list(found) == list(COPIES)
        assert all("Keep opt.state_dict(), make a new optimizer" in t for t in found.values())
