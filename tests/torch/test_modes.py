"""Each worker at its own pace: every commit counts once, and a version is one for all servers.

Gradients are powers of ten with a learning rate of 1, so that sums are exact and each number tells
of how many steps of which slice it is made. Parameters lie at several servers where there are.
"""

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from team import Team
from torch import nn
from twins import make_step

import tensorwire.torch as tw
from tensorwire.membership.world import World
from tensorwire.parameters import checked_mode
from tensorwire.torch.modes import place_in

SIZES = 300_000, 7, 280_000  # of the first, part lies at each of two servers


class Numbers(nn.Module):
    def __init__(self, sizes: tuple[int, ...] = SIZES) -> None:
        super().__init__()
        self.all = nn.ParameterList([nn.Parameter(torch.zeros(size)) for size in sizes])

    def value(self) -> int:
        """Returns the common value; an error if workers have different versions."""
        first = self.all[0][0].item()
        assert all(bool((each == first).all()) for each in self.all), "of several versions"
        return int(first)

    def backward(self, gradient: float) -> None:
        sum((each * -gradient).sum() for each in self.all).backward()


def made(model: nn.Module, lr: float = 1.0, **options: Any) -> Any:
    return tw.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=lr), model, **options)


def count(job: tw.Job, steps: int, slow_s: float, rounds: int = 1) -> tuple[list[int], int, Any]:
    """The values after each step, in the end, and what the report says; worker 1 is slow."""
    model = Numbers()
    opt, seen = made(model), []
    for _ in range(rounds):
        for _ in range(steps):
            for index in job.my_slices:
                before = model.value()
                time.sleep(slow_s * job.rank)
                model.backward(100.0**index)
                assert model.value() == before  # nothing moves but in step()
                opt.step()
                opt.zero_grad()
            seen.append(model.value())
        job.barrier()
    with tw.edit(model):
        pass
    return seen, model.value(), job.report()


def digits(value: int, slices: int) -> list[int]:
    return [value // 100**index % 100 for index in range(slices)]


@pytest.mark.parametrize(("servers", "slices"), [(1, 2), (2, 2), (2, 4)])
@pytest.mark.slow
def test_each_commit_counts_once(
    team: Team, servers: int, slices: int, transports: list[str] | None
) -> None:
    if slices == 4:
        steps = 9  # what float32 can count of four slices
        found = team.run(
            count_small, steps, slices=4, servers=servers, mode="async", transports=transports
        )
        assert all(value == steps * 4 for _, value, _ in found)
        return
    found = team.run(
        count, 20, 0.002, servers=servers, mode="async", transports=transports, slices=slices
    )
    for rank, (seen, value, report) in enumerate(found):
        assert digits(value, 2) == [20, 20]
        own = [digits(each, 2)[rank] for each in seen]
        assert own == list(range(1, 21))  # a worker's own steps are in what it adopts
        others = [digits(each, 2)[1 - rank] for each in seen]
        assert others == sorted(others)
        behind = [max(0, a - b) for a, b in zip(own, others, strict=True)]
        assert report["staleness_max"] == max(behind)
        assert sum(report["staleness"].values()) == 20
        assert (report["mode"], report["clock"], report["bound"]) == ("async", 20, None)


def count_small(job: tw.Job, steps: int) -> tuple[list[int], int, Any]:
    model = Numbers()
    opt = made(model)
    for _ in range(steps * len(job.my_slices)):
        model.backward(1.0)
        opt.step()
        opt.zero_grad()
    model.value()
    job.barrier()
    with tw.edit(model):
        pass
    return [], model.value(), job.report()


@pytest.mark.parametrize("staleness", [0, 2])
@pytest.mark.slow
def test_nobody_is_further_ahead_than_allowed(
    team: Team, staleness: int, transports: list[str] | None
) -> None:
    found = team.run(
        count, 12, 0.05, servers=2, mode="bounded", staleness=staleness, transports=transports
    )
    for rank, (seen, value, report) in enumerate(found):
        assert digits(value, 2) == [12, 12]
        ahead = [digits(each, 2)[rank] - digits(each, 2)[1 - rank] for each in seen]
        assert max(ahead) <= staleness
        assert report["staleness_max"] <= staleness
        assert report["bound"] == staleness
    assert found[0][2]["staleness_max"] == staleness  # and it is used


def uneven(job: tw.Job, last: bool) -> int:
    """Worker 1 makes few steps, waits for all others in a sum, and then all go on."""
    model = Numbers()
    opt = made(model)
    for steps in (3 if job.rank else 12), 5:
        for _ in range(steps):
            model.backward(100.0**job.rank)
            opt.step()
            opt.zero_grad()
        if last and job.rank:
            return 0
        if not last:
            assert job.mean(1.0) == 1.0
    return model.value()


def test_who_waits_for_all_holds_nobody_back(team: Team) -> None:
    for value in team.run(uneven, False, mode="bounded", staleness=1):
        assert digits(value, 2)[0] >= 15  # worker 1 came back where worker 0 was, at 12
    assert digits(team.run(uneven, True, mode="bounded", staleness=1)[0], 2) == [17, 3]


def rate(job: tw.Job, steps: int, seconds: float) -> float:
    """Steps per second of all, where the last worker is four times slower than the others."""
    model = nn.Linear(4, 4)
    opt, count, pause_s = made(model), 0, 0.02 * (4 if job.rank == job.size - 1 else 1)
    job.barrier()
    begun = time.monotonic()
    while count < steps or time.monotonic() < begun + seconds:
        time.sleep(pause_s)
        make_step(opt, model(torch.ones(1, 4)).sum())
        count += 1
    (total,) = job.sum([count / (time.monotonic() - begun)])
    return total


@pytest.mark.slow
def test_a_slow_worker_does_not_hold_up_others(team: Team) -> None:
    """Three times the steps can be made; the bar is two."""
    together = team.run(rate, 12, 0.0, workers=3)[0]
    alone = team.run(rate, 0, 1.0, workers=3, mode="async")[0]
    assert alone >= 2 * together


# ---- arithmetic

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01),
}


def in_turn(job: tw.Job, name: str, alone: bool) -> list[torch.Tensor]:
    """Workers step one after the other; or one process does, with a copy for each."""
    torch.manual_seed(3)
    model = nn.Linear(7, 3)
    opt = OPTIMIZERS[name](model.parameters())
    copies = [[p.detach().clone() for p in model.parameters()] for _ in range(2)]
    if not alone:
        opt = tw.DistributedOptimizer(opt, model, max_norm=2.0)
    scheduler = torch.optim.lr_scheduler.StepLR(opt, 1, 0.5)
    first_lr = opt.param_groups[0]["lr"]
    for step in range(8):
        rank = step % 2
        if alone:
            with torch.no_grad():
                new = [p.detach().clone() for p in model.parameters()]
                for p, old in zip(model.parameters(), copies[rank], strict=True):
                    p.copy_(old)
        if alone or rank == job.rank:
            with opt.accumulate() if not alone else torch.enable_grad():
                model(torch.full((2, 7), float(step))).square().sum().backward()
            model(torch.ones(2, 7)).square().sum().backward()
            if alone:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 2.0)
                with torch.no_grad():
                    for p, value in zip(model.parameters(), new, strict=True):
                        p.copy_(value)
                opt.param_groups[0]["lr"] = first_lr * 0.5 ** (step // 2)
            opt.step()
            opt.zero_grad()
            if alone:
                copies[rank] = [p.detach().clone() for p in model.parameters()]
            else:
                scheduler.step()
        if not alone:
            job.barrier()
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_commits_are_applied_one_by_one_as_torch_would(team: Team, name: str) -> None:
    """Gradients of old parameters, each with its worker's learning rate and its own norm."""
    expected = in_turn(None, name, True)  # type: ignore[arg-type]
    found = team.run(in_turn, name, False, mode="async")[1]  # who steps last
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


def normed(job: tw.Job) -> float:
    """All servers tell each other their part of the norm, in every step, as fast as they can."""
    model = Numbers()
    opt = made(model, max_norm=1e9)
    for step in range(30):
        model.backward(1.0 + step % 3 + job.rank)
        opt.step()
        expected = (1.0 + step % 3 + job.rank) * sum(SIZES) ** 0.5
        assert opt.last_norm == pytest.approx(expected, rel=1e-5)
        opt.zero_grad()
    return opt.last_norm


def test_each_commit_has_its_own_norm(team: Team) -> None:
    team.run(normed, servers=2, mode="async")


def scaled(job: tw.Job) -> tuple[float, float]:
    """Worker 1's gradient is infinite once."""
    model = nn.Linear(2, 1, bias=False)
    nn.init.zeros_(model.weight)
    opt, scaler = made(model), tw.GradScaler(init_scale=4.0, growth_interval=1000)
    for step in range(4):
        factor = float("inf") if job.rank and step == 1 else -1.0
        scaler.scale((model(torch.ones(1, 2)) * factor).sum()).backward()
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
    job.barrier()
    with tw.edit(model):
        pass
    return model.weight[0, 0].item(), scaler.get_scale()


def test_a_gradient_that_is_not_finite_is_left_out(team: Team) -> None:
    assert team.run(scaled, mode="async") == [(7.0, 4.0), (7.0, 2.0)]


def buffers(job: tw.Job) -> list[float]:
    model = nn.BatchNorm1d(2)
    opt = made(model, lr=0.0)
    for _ in range(3):
        for rank in range(2):
            if rank == job.rank:
                make_step(opt, model(torch.arange(8.0).view(4, 2) + 100 * rank).sum())
            job.barrier()
    assert model.running_mean is not None
    return model.running_mean.tolist()


def test_buffers_are_those_of_slice_0(team: Team) -> None:
    found = team.run(buffers, mode="async")
    assert found[0] == found[1]
    assert max(found[0]) < 10


# ---- checkpoints


def saved(job: tw.Job, path: str) -> Any:
    """Worker 0 saves while worker 1 trains."""
    model = Numbers()
    opt = tw.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0, momentum=1.0), model)
    job.track(model=model, optimizer=opt)
    for step in range(30):
        model.backward(1.0)
        opt.step()
        opt.zero_grad()
        if job.rank == 0 and step % 4 == 0:
            job.save(path)
            file = torch.load(path, weights_only=True)
            steps = {float(e["momentum_buffer"].min()) for e in file["optimizer"]["state"].values()}
            steps |= {
                float(e["momentum_buffer"].max()) for e in file["optimizer"]["state"].values()
            }
            assert len(steps) == 1  # of one version at all servers
            n = int(-min(steps))
            values = {float(v) for each in file["model"].values() for v in (each.min(), each.max())}
            assert values == {n * (n + 1) / 2}
    job.barrier()
    saved_at = n if job.rank == 0 else 0
    job.load(path)
    (n,) = job.sum([float(saved_at)])
    assert model.value() == n * (n + 1) / 2
    state = opt.state_dict()["state"][0]["momentum_buffer"]
    assert bool((state == -n).all())
    job.barrier()
    model.backward(1.0)
    opt.step()
    job.barrier()
    return n


def test_a_checkpoint_is_of_one_version(
    team: Team, tmp_path: Path, transports: list[str] | None
) -> None:
    path = str(tmp_path / "file")
    (first, second) = team.run(saved, path, servers=2, mode="async", transports=transports)
    assert first == second


def grown(job: tw.Job) -> int:
    model = Numbers()
    opt = tw.DistributedOptimizer(torch.optim.SGD([model.all[0], model.all[1]], lr=1.0), model)
    for _ in range(5 + 5 * job.rank):
        model.backward(1.0)
        opt.step()
        opt.zero_grad()
    with torch.no_grad():
        assert model.all[2].sum() == 0
    opt.add_param_group({"params": [model.all[2]]})
    with tw.edit(model), torch.no_grad():
        for each in model.all:
            each.fill_(0.0)
    job.barrier()
    model.backward(1.0)
    opt.step()
    job.barrier()
    opt.close()
    return 0


def test_groups_are_added_and_values_edited_by_all_together(team: Team) -> None:
    team.run(grown, mode="bounded", staleness=2)


def unseen(job: tw.Job, path: str) -> list[int]:
    """Worker 0 changes values, loads and gets a group when worker 1 has stepped since it has."""
    model = Numbers()
    opt = tw.DistributedOptimizer(torch.optim.SGD([model.all[0], model.all[1]], lr=1.0), model)
    job.track(model=model, optimizer=opt)
    seen: list[int] = []

    def step_apart(*counts: int) -> None:
        for rank, steps in enumerate(counts):
            for _ in range(steps if rank == job.rank else 0):
                model.backward(100.0**job.rank)
                opt.step()
                opt.zero_grad()
            job.barrier()

    def see() -> None:
        assert torch.equal(model.all[0][:7], model.all[1])
        seen.append(int(model.all[1][0]))

    step_apart(1, 3)
    with tw.edit(model), torch.no_grad():
        for each in model.all[:2]:
            each.add_(10_000)
    see()
    if job.rank == 0:
        job.save(path)
    job.barrier()
    step_apart(0, 3)  # worker 0 has what is in the file
    job.load(path)
    see()
    step_apart(1, 3)
    opt.add_param_group({"params": [model.all[2]]})
    see()
    with tw.edit(model):
        pass
    see()
    return seen


def test_what_worker_0_changes_has_all_steps_of_others(
    team: Team, tmp_path: Path, transports: list[str] | None
) -> None:
    path = str(tmp_path / "file")
    for seen in team.run(unseen, path, servers=2, mode="async", transports=transports):
        assert seen == [10_301, 10_301, 10_602, 10_602]


# ---- errors

ERRORS: dict[str, tuple[Callable[[tw.Job], Any], str]] = {
    "average": (lambda job: made(nn.BatchNorm1d(2), buffers="average"), 'buffers="average"'),
    "worker": (lambda job: made(nn.Linear(2, 2), apply="worker"), "worker 0 would apply"),
    "sparse": (lambda job: made(nn.EmbeddingBag(9, 2, sparse=True)), "use sparse=False"),
    "synchronize": (lambda job: made(nn.Linear(2, 2)).synchronize(), "max_norm="),
    "clip": (lambda job: tw.clip_grad_norm_(made(nn.Linear(2, 2)), 1.0), "max_norm="),
}


def raises(job: tw.Job, name: str) -> None:
    ERRORS[name][0](job)


@pytest.mark.parametrize("name", ERRORS)
def test_what_has_no_meaning_is_an_error(team: Team, name: str) -> None:
    for each in team.failures(raises, name, mode="async"):
        assert ERRORS[name][1] in each.text


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"mode": "fast"}, "mode is 'sync', 'async', 'bounded'"),
        ({"mode": "bounded"}, "needs staleness="),
        ({"mode": "async", "staleness": 3}, "is for mode"),
        ({"mode": "async", "durable": True}, "are killed: start it by"),
        ({"mode": "async", "pipeline": 2}, "share a model"),
        ({"mode": "async", "slices": 2}, "alone"),
    ],
)
def test_modes_that_cannot_be(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        tw.init(**arguments)


def test_slices_are_not_taken_over_at_own_pace() -> None:
    """A commit for a worker that was killed would not be applied."""
    place = World(0, 2, ("127.0.0.1:1",), 2, durable=True, asked=True, takeover=True)
    with pytest.raises(ValueError, match="under --workers W:MAX or --on-death takeover"):
        place_in(place, checked_mode("async", None), None, 1)
    with pytest.raises(ValueError, match=r"killed processes must be replaced.*durable=False"):
        place_in(place, checked_mode("async", None), False, 1)
    assert place_in(place, checked_mode("sync", None), None, 1).takeover


def disagrees(job: tw.Job) -> None:
    """Worker 1 sums while worker 0 closes: neither will ever do what the other one waits for."""
    opt = made(Numbers())
    if job.rank:
        job.barrier()
    else:
        opt.close()


def test_workers_that_wait_for_each_other_are_told(team: Team) -> None:
    for each in team.failures(disagrees, mode="async"):
        assert (
            "worker 1 calls mean(), sum(), barrier() or load() while worker 0 calls close()"
            in each.text
        )


def left(job: tw.Job) -> None:
    model = Numbers()
    opt = made(model)
    if job.rank == 0:
        opt.close()


def test_who_waits_for_one_that_has_left_is_told(team: Team) -> None:
    with pytest.raises(AssertionError, match="worker 1 has left the job, and worker 0 calls close"):
        team.run(left, mode="async")


SCRIPT = """
import os, signal, sys, time
import torch
import tensorwire.torch as tw
job = tw.init(mode="bounded", staleness=2)
model = torch.nn.Linear(50, 50)
opt = tw.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
for step in range(10**6):
    model(torch.randn(8, 50)).sum().backward()
    opt.step()
    opt.zero_grad()
    if step == 20 and job.rank == 1:
        print("kills", flush=True)
        server = job.session.member.servers[-1].pid
        os.kill(os.getpid() if sys.argv[1] == "worker" else server, signal.SIGKILL)
"""


@pytest.mark.slow
@pytest.mark.parametrize("who", ["worker", "server"])
def test_a_death_ends_a_job_that_is_not_durable(who: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    servers = "1" if who == "worker" else "2"
    command = [sys.executable, "-m", "tensorwire", "run", "--on-death=end"]
    command += ["--workers", "2", "--servers", servers]
    done = subprocess.run(
        [*command, str(tmp_path / "script.py"), who],
        capture_output=True, text=True, timeout=50, check=False,
    )  # fmt: skip
    assert done.returncode not in (0, -signal.SIGKILL)
    assert "kills" in done.stdout
    assert "worker 1" in done.stderr if who == "worker" else "server 1" in done.stderr
