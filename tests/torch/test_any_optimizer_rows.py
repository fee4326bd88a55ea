"""Tables with sparse gradients under Adagrad and SparseAdam: to the bit as torch's own classes."""

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from odd import bits, check_same_state
from team import Team
from torch import nn, optim

import tensorwire.torch as tw

WORDS, PLACES = 3000, 90
STEPS = 6


class Tables(nn.Module):
    """Tables of different lengths of rows; two of them are one for the servers."""

    def __init__(self, dense: bool, width: int = 33) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.words = nn.EmbeddingBag(WORDS, width, mode="sum", sparse=True)
        self.places = nn.Embedding(PLACES, 16, sparse=True)
        self.more = nn.Embedding(40, 16, sparse=True)
        self.last = nn.Parameter(torch.randn(300, 1000)) if dense else None


@pytest.mark.slow
def test_servers_do_not_warn_of_sparse_gradients() -> None:
    text = """
import torch
from tensorwire.torch import server
server.serve = lambda *given: 0
server.main()
table = torch.nn.Parameter(torch.zeros(4, 2))
table.grad = torch.sparse_coo_tensor([[1]], [[1.0, 2.0]], (4, 2))
torch.optim.Adagrad([table]).step()
"""
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def set_gradients(model: Tables, step: int, rank: int) -> None:
    """Sets gradients of rows that workers share in part, and of a dense tensor; sometimes none."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    for number, table in enumerate((model.words, model.places, model.more)):
        height, width = table.weight.shape
        if step == 3 or (step == 1 and number != rank):
            table.weight.grad = None
            continue
        count = 0 if step == 4 and number == 1 else 9
        rows = torch.randperm(height, generator=generator)[:count].sort()[0]
        values = torch.randn(count, width, generator=generator)
        table.weight.grad = torch.sparse_coo_tensor(
            rows[None], values, table.weight.shape, is_coalesced=True, check_invariants=True
        )
    if model.last is not None:
        model.last.grad = torch.randn(model.last.shape, generator=generator)


def set_mean(twin: Tables, step: int, slices: int) -> None:
    """The mean of all slices."""
    total: dict[int, torch.Tensor] = {}
    for rank in range(slices):
        set_gradients(twin, step, rank)
        for index, p in enumerate(twin.parameters()):
            if p.grad is not None:
                total[index] = p.grad if index not in total else total[index] + p.grad
    for index, p in enumerate(twin.parameters()):
        p.grad = None
        if index in total:
            mean = total[index].coalesce() if total[index].is_sparse else total[index]
            p.grad = mean / slices


def adagrad(model: nn.Module) -> optim.Optimizer:
    return optim.Adagrad(model.parameters(), lr=0.1, lr_decay=0.1)


def adagrad_from(model: nn.Module) -> optim.Optimizer:
    return optim.Adagrad(model.parameters(), lr=0.1, initial_accumulator_value=0.5)


def sparse_adam(model: nn.Module) -> optim.Optimizer:
    return optim.SparseAdam(list(model.parameters()), lr=0.1)


def in_groups(model: Tables) -> optim.Optimizer:
    groups = [{"params": model.words.parameters()}, {"params": model.places.parameters()}]
    groups.append({"params": model.more.parameters(), "lr": 0.5})
    return optim.SparseAdam(groups, lr=0.1, betas=(0.5, 0.6), maximize=True)


Make = Callable[[Any], optim.Optimizer]
CASES: list[tuple[Make, bool]] = [
    (adagrad, True),
    (adagrad_from, True),
    (adagrad, False),
    (sparse_adam, False),
    (in_groups, False),
]


def trained(job: tw.Job, make: Make, dense: bool, width: int = 33) -> list[bytes]:
    model, twin = Tables(dense, width), Tables(dense, width)
    opt, plain = make(model), make(twin)
    opt = tw.DistributedOptimizer(opt, model)
    schedules = [optim.lr_scheduler.ExponentialLR(each, 0.8) for each in (opt, plain)]
    for step in range(STEPS):
        for rank in job.my_slices:
            set_gradients(model, step, rank)
            opt.step()
            opt.zero_grad()
        set_mean(twin, step, job.slices)
        plain.step()
        for each in schedules:
            each.step()
        assert bits(model) == bits(twin), (make.__name__, step)
    state, its = opt.state_dict(), plain.state_dict()
    check_same_state(state, its)
    # Torch's own state is loaded, and both go on.
    opt.load_state_dict(its)
    for rank in job.my_slices:
        set_gradients(model, STEPS, rank)
        opt.step()
        opt.zero_grad()
    set_mean(twin, STEPS, job.slices)
    plain.step()
    assert bits(model) == bits(twin)
    opt.close()
    return bits(model)


def all_trained(job: tw.Job) -> None:
    for make, dense in CASES:
        trained(job, make, dense)
    trained(job, adagrad, False, 32)  # one table for the servers, of rows of whole lines


@pytest.mark.parametrize(
    "place",
    [
        {"servers": 2},
        {"workers": 0, "slices": 2},
        {"servers": 3, "transports": ["tcp"]},
        {"slices": 4},
        {"workers": 0},
    ],
    ids=str,
)
def test_as_torchs_own(team: Team, place: dict[str, Any]) -> None:
    team.run(all_trained, **place)


def saved(job: tw.Job, make: Make, path: str, load: bool) -> list[bytes]:
    model = Tables(False)
    opt = tw.DistributedOptimizer(make(model), model)
    job.track(model=model, optimizer=opt)
    if load:
        job.load(path)
    for step in range(3 if load else 0, STEPS):
        for rank in job.my_slices:
            set_gradients(model, step, rank)
            opt.step()
            opt.zero_grad()
        if step == 2 and job.rank == 0:
            job.save(path)
        job.barrier()
    return bits(model)


@pytest.mark.parametrize("make", [adagrad_from, sparse_adam])
@pytest.mark.slow
def test_a_checkpoint_goes_on_with_other_servers(team: Team, make: Make, tmp_path: Any) -> None:
    path = str(tmp_path / "saved")
    wanted = team.run(saved, make, path, False, servers=2)
    for options in {"servers": 3}, {"transports": ["tcp"]}, {"workers": 0, "slices": 2}:
        assert set(map(tuple, team.run(saved, make, path, True, **options))) == {tuple(wanted[0])}


def refused(job: tw.Job, make: Make, apply: str) -> None:
    model = Tables(False)
    tw.DistributedOptimizer(make(model), model, apply=apply)


def rmsprop(model: nn.Module) -> optim.Optimizer:
    return optim.RMSprop(model.parameters())


def decaying(model: nn.Module) -> optim.Optimizer:
    return optim.Adagrad(model.parameters(), weight_decay=0.1)


@pytest.mark.parametrize(
    ("make", "apply", "says"),
    [
        (adagrad, "worker", "the sparse gradients of 'words.weight', only servers"),
        (rmsprop, "auto", "RMSprop does not support sparse gradients"),
        (decaying, "auto", "weight_decay option is not compatible with sparse gradients"),
    ],
)
def test_what_changes_all_rows_is_refused(team: Team, make: Make, apply: str, says: str) -> None:
    for failure in team.failures(refused, make, apply):
        assert failure.kind == "UnavailableError"
        assert "worker 0 cannot apply" in failure.text
        assert says in failure.text
