"""The common part of adapters to other libraries; tests/integrations has the libraries."""

import importlib
import math
import subprocess
import sys
from typing import Any

import pytest
import torch
from scripts import digest
from team import Team
from torch import nn
from twins import STEPS, adamw, batch, loss, net, sgd

import tensorwire.torch as tw
from tensorwire.errors import UnavailableError
from tensorwire.torch.integrations import adapter

LIBRARIES = ["lightning", "accelerate", "transformers"]


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_missing_library_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, library: str
) -> None:
    name = f"tensorwire.torch.integrations.{library}"
    monkeypatch.setitem(sys.modules, library, None)
    monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises(UnavailableError, match=f"or pip install {library}$"):
        importlib.import_module(name)


def test_nothing_is_imported_before_it_is_asked_for() -> None:
    program = "import sys, tensorwire.torch.integrations.adapter; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    names = loaded.stdout.decode().split()
    assert "tensorwire.torch.integrations.adapter" in names
    assert not set(LIBRARIES) & set(names)


def joining(job: tw.Job) -> None:
    before = torch.get_rng_state()
    assert adapter.join("it", job.rank, job.size, "do this") is job
    assert torch.equal(torch.get_rng_state(), before)
    with pytest.raises(RuntimeError, match=rf"number 0 of 5, .* worker {job.rank} of .*: do this"):
        adapter.join("it", 0, 5, "do this")


def test_joining(team: Team) -> None:
    team.run(joining)
    team.alone(joining)


def joining_slices(job: tw.Job) -> None:
    with pytest.raises(ValueError, match="has 4 slices and pipelines of 1 for 2 workers"):
        adapter.join("it", job.rank, job.size, "")


def test_slices_are_refused(team: Team) -> None:
    team.run(joining_slices, slices=4)


def joining_first() -> tuple[bool, int]:
    """In a process that has no job yet: what the library has seeded stays."""
    torch.manual_seed(77)
    before = torch.get_rng_state()
    job = adapter.join("it", 0, 1, "")
    again = adapter.join("it", 0, 1, "")
    assert again is job
    return torch.equal(torch.get_rng_state(), before), job.size


@pytest.mark.slow
def test_the_job_is_joined_and_random_numbers_stay() -> None:
    program = f"import sys; sys.path[:0] = {sys.path!r}; import test_integrations as t"
    command = [sys.executable, "-c", f"{program}; print(t.joining_first())"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "(True, 1)\n"


def clipping(job: tw.Job, way: str) -> tuple[str, float]:
    """One optimizer, clipped in one of several ways that mean the same."""
    model = net()
    opt = tw.DistributedOptimizer(sgd(model), model)
    parameters = list(model.parameters())
    for step in range(STEPS):
        loss(model, batch(step, job.rank)).backward()
        if way == "servers":
            norm = adapter.clip_norm(job, parameters, 0.05)
            assert parameters[0].grad is not None  # and is this worker's own
        elif way == "here":  # with a parameter that nobody distributes
            other = nn.Parameter(torch.zeros(2, dtype=torch.float64))
            norm = adapter.clip_norm(job, [*parameters, other], 0.05)
        else:
            opt.synchronize()
            norm = nn.utils.clip_grad_norm_(parameters, 0.05)
        opt.step()
        opt.zero_grad()
    return digest(model), norm.item()


def test_ways_to_clip(team: Team, transports: list[str] | None) -> None:
    plain = team.run(clipping, "synchronize", transports=transports)
    assert plain[0] == plain[1]
    assert team.run(clipping, "here", transports=transports) == plain
    servers = team.run(clipping, "servers", transports=transports)
    assert servers[0] == servers[1]
    assert servers[0][1] == pytest.approx(plain[0][1], rel=1e-6)


def several(job: tw.Job) -> None:
    """Two optimizers that are clipped together, with another norm, and by value."""
    first, second = net(), net()
    adapter.distribute(sgd(first), [first, second])
    both = nn.ModuleList([nn.Linear(5, 3).double(), nn.Linear(5, 3).double()])
    shared = torch.optim.SGD(both.parameters(), lr=0.1)
    adapter.distribute(shared, [second, *both])  # of two models
    adapter.distribute(shared, [])  # is already
    assert adapter.optimizers_of(job, second) == []
    assert adapter.optimizers_of(job, both[1]) == [shared]
    parameters = [*first.parameters(), *both.parameters()]
    for way in ("2", "max", "value"):
        x = batch(0, job.rank)
        (loss(first, x) + loss(both[0], x) + loss(both[1], x)).backward()
        own = [p.grad.clone() for p in parameters]  # type: ignore[union-attr]
        if way == "value":
            adapter.clip_value(job, parameters, 0.01)
        else:
            norm = adapter.clip_norm(job, parameters, 0.05, 2.0 if way == "2" else math.inf)
        gradients: list[Any] = [p.grad for p in parameters]
        assert any(not torch.equal(a, b) for a, b in zip(own, gradients, strict=True))
        means = [job.mean(gradient) for gradient in gradients]
        torch.testing.assert_close(gradients, means, rtol=1e-9, atol=1e-12)  # the same everywhere
        largest = max(gradient.abs().max().item() for gradient in gradients)
        whole = math.sqrt(sum(gradient.square().sum().item() for gradient in gradients))
        assert norm.item() > 0.05
        found = {"2": whole / 0.05, "max": largest / 0.05, "value": largest / 0.01}[way]
        assert found == pytest.approx(1.0, rel=1e-4)
        for optimizer in job.optimizers:
            optimizer.step()
            optimizer.zero_grad()


def test_several_optimizers_and_models(team: Team) -> None:
    team.run(several)
    team.alone(several)


def unknown(job: tw.Job) -> None:
    with pytest.raises(ValueError, match="prepare its model in the same call, or before it"):
        adapter.distribute(adamw(net()), [net()])


def test_an_optimizer_of_no_known_model(team: Team) -> None:
    team.alone(unknown)


def editing(job: tw.Job) -> list[str]:
    """Edits a model that is trained, and one that is not."""
    trained, other = net(), net()
    opt = tw.DistributedOptimizer(sgd(trained), trained)
    with adapter.editing(job, [trained, other]), torch.no_grad():
        for model in (trained, other):
            model[0].weight.fill_(1.0)
    loss(trained, batch(0, job.rank)).backward()
    with adapter.accumulating([opt]):
        loss(trained, batch(1, job.rank)).backward()
    opt.step()
    assert bool((other[0].weight == 1.0).all())
    return [digest(trained)]


def test_edits_of_what_is_trained_and_of_what_is_not(team: Team) -> None:
    first, second = team.run(editing)
    assert first == second
