"""Changes of parameters and gradients by a script between steps, inside `tw.edit` or not."""

import copy
import ctypes
import hashlib
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from team import Team
from torch import nn

import tensorwire.torch as tw
from tensorwire.memory import private
from tensorwire.torch.replica.gradient_checks import TURNS, GradientChecks

MCL_FUTURE = 2  # of mlockall
WIDTH = 200  # a weight has 160,000 bytes: many pages, and a bias shares one with others


def net() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 2))


def ready(job: tw.Job, **options: Any) -> tuple[nn.Sequential, Any]:
    model = net()
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return model, tw.DistributedOptimizer(opt, model, **options)


def backward(model: nn.Module, step: int, rank: int) -> None:
    generator = torch.Generator().manual_seed(100 * step + rank)
    model(torch.randn(4, WIDTH, generator=generator)).square().mean().backward()


def digest(model: nn.Module) -> str:
    every = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    return hashlib.sha256(every).hexdigest()


# ---- outside of edit


def swap(model: nn.Module) -> None:
    """An average of weights, put in by way of `.data`."""
    for p in model.parameters():
        p.data.copy_(torch.full_like(p, 0.5))


def swap_and_back(model: nn.Module) -> None:
    kept = [p.detach().clone() for p in model.parameters()]
    swap(model)
    model(torch.ones(1, WIDTH))
    for p, value in zip(model.parameters(), kept, strict=True):
        p.data.copy_(value)


def clamp(model: nn.Module) -> None:
    model[2].bias.data.clamp_(max=-1.0)  # type: ignore[index, operator, union-attr]


def transpose(model: nn.Module) -> None:
    """The same memory, seen in another form."""
    model[0].weight.data = model[0].weight.data.t()  # type: ignore[index, union-attr]


def negate(model: nn.Module) -> None:
    model[0].weight.data = torch._neg_view(model[0].weight.data)  # type: ignore[index, union-attr, arg-type]


CHANGES = {
    "swap": swap,
    "swap_and_back": swap_and_back,
    "clamp": clamp,
    "transpose": transpose,
    "negate": negate,
}


def disturbed(job: tw.Job, who: int, change: str) -> tuple[list[str], str]:
    """Returns digests of a worker's state in each step, and the error of the changing worker."""
    model, opt = ready(job)
    digests, error = [], ""
    for step in range(4):
        if step == 2 and job.rank == who:
            CHANGES[change](model)
        job.barrier()
        if step != 2 or job.rank != who:
            digests.append(digest(model))
        backward(model, step, job.rank)
        try:
            opt.step()
        except RuntimeError as found:
            error += str(found)
            opt.zero_grad()
            digests.append(digest(model))
            backward(model, step, job.rank)
            opt.step()
        opt.zero_grad()
    return [*digests, digest(model)], error


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_by_way_of_data_harms_nobody(
    team: Team, transports: list[str] | None, change: str
) -> None:
    """The worker that made it gets the error at its next step; no training has other bits."""
    undisturbed = team.run(disturbed, -1, change, transports=transports)
    name = "'2.bias'" if change == "clamp" else "'0.weight'"
    for who in range(2):
        found = team.run(disturbed, who, change, transports=transports)
        assert [digests for digests, _ in found] == [digests for digests, _ in undisturbed]
        assert [bool(error) for _, error in found] == [rank == who for rank in range(2)]
        assert f"parameter {name} was changed outside step()" in found[who][1]
        assert "inside 'with tw.edit(model):'" in found[who][1]
        assert "copy.deepcopy(model)" in found[who][1]


def test_a_change_by_way_of_data_on_a_network(team: Team) -> None:
    """Workers of one host that share a view: of its owner, and of the other."""
    undisturbed = team.run(disturbed, -1, "swap", network=True)
    for who in range(2):
        found = team.run(disturbed, who, "swap", network=True)
        assert [digests for digests, _ in found] == [digests for digests, _ in undisturbed]
        assert [bool(error) for _, error in found] == [rank == who for rank in range(2)]


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_by_way_of_data_alone(team: Team, change: str) -> None:
    undisturbed, _ = team.alone(disturbed, -1, change)
    digests, error = team.alone(disturbed, 0, change)
    assert digests == undisturbed
    assert "was changed outside step()" in error


def untold(job: tw.Job) -> int:
    """The kernel does not tell which pages were written: in which step a change is found."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(private, "told_by_kernel", lambda: False)
        with pytest.warns(RuntimeWarning, match="found by comparing, within 32 steps"):
            model, opt = ready(job)
    before = digest(model)
    model[0].weight.data[WIDTH // 2] += 1.0
    for step in range(100):
        try:
            opt.step()
        except RuntimeError as error:
            if "'0.weight' was changed outside step()" not in str(error):
                raise
            assert digest(model) == before
            return step
    raise AssertionError("it is never found")


def test_a_change_that_the_kernel_does_not_tell(team: Team) -> None:
    assert team.alone(untold) < 32
    assert max(team.run(untold)) < 32


# ---- gradients


def gradient_data_changed(job: tw.Job, first: int, placement: str = "plan") -> int:
    """In which step it is found that a script halves gradients by way of `.grad.data`."""
    model = nn.Linear(1000, 1000)  # looked at in several turns
    sgd = torch.optim.SGD(model.parameters(), lr=0.0)
    opt = tw.DistributedOptimizer(sgd, model, placement=placement)
    for step in range(first + TURNS + 1):
        opt.zero_grad()
        model(torch.ones(1, 1000)).sum().backward()
        if step >= first:
            for p in model.parameters():
                p.grad.data.mul_(0.5)
        try:
            opt.step()
        except RuntimeError as error:
            if "was changed after it had left" not in str(error):
                raise
            return step
    raise AssertionError("it is never found")


@pytest.mark.parametrize("transports", ["shm", "tcp"], indirect=True)
def test_a_gradient_changed_by_way_of_data(team: Team, transports: list[str] | None) -> None:
    """On every path, produced in place or pushed, in the first step and later."""
    for first in 0, 3:
        assert team.run(gradient_data_changed, first, transports=transports) == [first] * 2
    assert team.run(gradient_data_changed, 0, "copy", transports=transports) == [0, 0]
    assert team.alone(gradient_data_changed, 2) == 2


def halved(job: tw.Job, interrupts: bool, placement: str) -> str:
    """Gradients leave in `step()`; they are halved before it, or after an interrupt in it."""
    model, opt = ready(job, placement=placement)

    def interrupt() -> None:
        raise KeyboardInterrupt

    for step in range(4):
        with opt.accumulate():
            backward(model, step, job.rank)
        if interrupts:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(opt._tensorwire, "_hold", interrupt)
                with pytest.raises(KeyboardInterrupt):
                    opt.step()
        for p in model.parameters():
            p.grad.data.mul_(0.5)
        opt.step()
        opt.zero_grad()
    return digest(model)


@pytest.mark.parametrize("placement", ["plan", "copy"])
def test_what_left_in_a_step_that_was_interrupted_leaves_again(team: Team, placement: str) -> None:
    assert team.run(halved, True, placement) == team.run(halved, False, placement)
    assert team.alone(halved, True, placement) == team.alone(halved, False, placement)


def test_every_byte_of_a_gradient_is_looked_at() -> None:
    sizes = {3: 5_000_000, 4: 12, 7: 0, 9: 40_000_001, 10: 300_000}
    looks = GradientChecks(sizes)
    assert {i: part.stop - part.start for i, part in looks.at(0).items()} == sizes
    seen: dict[int, list[slice]] = {i: [] for i in sizes}
    for step in range(1, TURNS + 1):
        turn = looks.at(step)
        assert sum(part.stop - part.start for part in turn.values()) < sum(sizes.values()) / 25
        for i, part in turn.items():
            seen[i].append(part)
    for i, size in sizes.items():
        edges = sorted((part.start, part.stop) for part in seen[i])
        assert [0, *(stop for _, stop in edges)] == [*(start for start, _ in edges), size]


# ---- inside of edit


def allowed(job: tw.Job) -> str:
    """All changes that a script may make."""
    model, opt = ready(job)
    with torch.no_grad():
        average = [p.data.clone() for p in model.parameters()]  # reading is free
    before = digest(model)
    model.state_dict()
    twin = copy.deepcopy(model)
    swap(twin)  # an average in a copy of the model
    assert digest(model) == before
    with tw.edit(model), torch.no_grad():
        kept = model[0].weight.data
        model[0].weight.add_(1.0)
    model[2].bias.sum().item()
    with tw.edit(model), torch.no_grad():
        # What a script kept of another edit stays as it was there.
        assert torch.equal(kept, model[0].weight)
        model[0].weight.sub_(1.0)
        assert not torch.equal(kept, model[0].weight)
    with tw.edit(model):
        model.load_state_dict(twin.state_dict())
    assert digest(model) == digest(twin)
    with tw.edit(model):
        model[0].weight.data.mul_(2.0)
        model[0].bias.data = average[1]
    assert model[0].weight[0, 0] == 1.0
    assert torch.equal(model[0].bias, average[1])
    with pytest.raises(ZeroDivisionError), tw.edit(model):
        model[0].weight.data.mul_(3.0).div_(1 // 0)
    for step in range(3):
        with tw.edit(model):  # an average in and out, on all workers
            swap_and_back(model)
        backward(model, step, job.rank)
        opt.step()
        opt.zero_grad()
    return digest(model)


def test_what_is_allowed(team: Team, transports: list[str] | None) -> None:
    assert len(set(team.run(allowed, transports=transports))) == 1
    assert len(set(team.run(allowed, network=True))) == 1
    team.alone(allowed)


def edited(job: tw.Job) -> dict[str, tuple[int, int, int]]:
    """Returns of edits: versions, bytes pushed, and bytes of no gradient that the core wrote."""
    model, opt = ready(job)
    core = opt._tensorwire
    for step in range(10):  # all is produced in place now
        backward(model, step, job.rank)
        opt.step()
        opt.zero_grad()

    def measured(change: Any) -> tuple[int, int, int]:
        store, node = core.store, job.session.member.node
        before = core.store.version, store.bytes_pushed, node.stats()["bytes_written"]
        with tw.edit(model), torch.no_grad():
            change()
        after = core.store.version, store.bytes_pushed, node.stats()["bytes_written"]
        versions, pushed, written = (now - then for now, then in zip(after, before, strict=True))
        return versions, pushed, written

    def everything() -> None:
        torch._foreach_mul_(list(model.parameters()), 0.5)

    def nothing() -> None:
        for p in model.parameters():
            p.clamp_(-1e3, 1e3)

    return {
        "nothing": measured(nothing),
        "row": measured(lambda: model[0].weight[3].zero_()),
        "everything": measured(everything),
        "again": measured(everything),
        "of all": (0, sum(p.nbytes for p in model.parameters()), 0),
    }


def test_an_edit_costs_one_publication_of_what_it_changed(
    team: Team, transports: list[str] | None
) -> None:
    first, second = team.run(edited, transports=transports)
    everything, weight = first.pop("of all")[1], 4 * WIDTH * WIDTH
    wanted = {"nothing": 0, "row": weight, "everything": everything, "again": everything}
    message = first["nothing"][2]  # a commit to the server
    assert message < 512
    assert {name: pushed for name, (_, pushed, _) in first.items()} == wanted
    for name, (versions, pushed, written) in first.items():
        assert versions == 1
        assert written == pushed + message, name
    # Worker 0's values win: the other one sends none.
    assert all(second[name] == (1, 0, message) for name in wanted)


def saving(job: tw.Job, path: str) -> None:
    model, opt = ready(job)
    job.track(model=model, optimizer=opt)
    backward(model, 0, job.rank)
    opt.step()
    opt.zero_grad()
    before = digest(model)
    for change in CHANGES.values():
        change(model)
        with pytest.raises(RuntimeError, match="was changed outside step"):
            job.save(path)
        assert digest(model) == before
    with tw.edit(model):
        swap(model)
        job.save(path)
    job.save(path)


def test_a_change_is_not_saved(team: Team, transports: list[str] | None, tmp_path: Path) -> None:
    """Named for a bug: a change after the last step was in the checkpoint, and nowhere else."""
    team.run(saving, f"{tmp_path}/one", workers=1, transports=transports)
    team.alone(saving, f"{tmp_path}/two")


def training_locked(job: tw.Job) -> list[str]:
    """All memory that is mapped from now on is locked, so each page is there from the start."""
    assert ctypes.CDLL(None).mlockall(MCL_FUTURE) == 0
    try:
        return training(job)
    finally:
        ctypes.CDLL(None).munlockall()


def training(job: tw.Job) -> list[str]:
    model, opt = ready(job)
    digests = []
    for step in range(3):
        backward(model, step, job.rank)
        opt.step()
        opt.zero_grad()
        digests.append(digest(model))
    return digests


@pytest.mark.parametrize("transports", ["shm", "tcp"], indirect=True)
@pytest.mark.skipif(os.getuid() != 0, reason="may not lock memory: needs root")
def test_memory_that_is_locked(team: Team, transports: list[str] | None) -> None:
    """Named for a bug: parameters never changed, since each page was a copy from the start."""
    bits = team.run(training, transports=transports)
    assert team.run(training_locked, transports=transports) == bits
