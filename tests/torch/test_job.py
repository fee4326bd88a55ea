"""The features of the job itself: means, epochs, checkpoints, the end."""

import contextlib
import io
import pickle
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from programs import output_of
from scripts import digest
from team import Team
from torch import nn
from twins import batch, loss, make_step, net, sgd

import tensorwire.torch as tw
from tensorwire.torch.console import ProgressLine
from tensorwire.torch.statistics import Statistics


def together(job: tw.Job) -> None:
    assert job.mean(float(job.rank)) == 0.5
    assert job.mean(float(job.rank), weight=3.0 - 2 * job.rank) == 0.25
    assert job.mean({"a": job.rank, "b": torch.full((2, 2), 2.0)})["b"].tolist() == [[2, 2]] * 2
    assert job.mean(torch.ones(10_000) * job.rank).mean() == 0.5
    shard = job.shard(range(7))  # type: ignore[arg-type]
    assert list(shard) == list(range(job.rank, 7, 2))
    assert job.mean(sum(shard) / len(shard), weight=len(shard)) == 3.0
    job.barrier()


@pytest.mark.parametrize("transports", ["shm", "tcp"], indirect=True)
def test_mean_barrier_shard(team: Team, transports: list[str] | None) -> None:
    team.run(together, transports=transports)


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


def leaves_with(job: tw.Job, steps: int) -> str:
    model = net()
    opt = tw.DistributedOptimizer(sgd(model), model)
    loss(model, batch(0, job.rank)).backward()
    for _ in range(steps):
        opt.step()
    opt.zero_grad()
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        job.close()
    return said.getvalue()


def test_a_forgotten_step_is_told(team: Team) -> None:
    """Named for a bug: the job ended well, and the model was as it was."""
    first, second = team.run(leaves_with, 0)
    assert "Sequential got gradients, and its step() was never called" in first
    assert second == ""
    assert team.alone(leaves_with, 1) == ""


def test_an_epoch_without_figures(capsys: pytest.CaptureFixture[str]) -> None:
    line = ProgressLine(2)
    line.end(0, {}, 0.5)
    line.end(1, {"loss": 0.5}, 61.0)
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("epoch 1/2 (0.5 s)")
    assert second.startswith("epoch 2/2: loss 0.5 (61.0 s)")


def test_figures_go_on_in_another_process() -> None:
    """An epoch counts its seconds from where it began, and each return of a worker is one more."""
    first, second, third = Statistics(), Statistics(), Statistics()
    first.versions = 7
    first._epoch_at -= 100
    noted = pickle.loads(pickle.dumps(first.noted()))
    noted["_noted_at"] -= 5
    second.begin_epoch()
    second.go_on(noted)
    assert second.versions == 7
    assert 100 <= second.epoch_s < 160
    third.go_on(second.noted())
    assert third.returns_s == [second.returns_s[0], pytest.approx(0, abs=60)]
    assert 5 <= third.returns_s[0] < 65
    assert 100 <= third.epoch_s < 160
    assert first.returns_s == []


def saving(job: tw.Job, path: str, resume: bool) -> tuple[str, list[int]]:
    torch.manual_seed(job.rank)  # initial weights differ; worker 0's or the file's win
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Dropout(0.3), nn.Linear(4, 1))
    opt = torch.optim.AdamW(model.parameters(), lr=0.01)
    sched = torch.optim.lr_scheduler.StepLR(opt, 2, 0.5)
    opt = tw.DistributedOptimizer(opt, model)
    scaler = tw.GradScaler(init_scale=4.0, growth_interval=3)
    job.track(model=model, optimizer=opt, scheduler=sched, scaler=scaler)
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


def two_stages(job: tw.Job) -> tuple[int, dict[str, Any]]:
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)).double()
    opt = tw.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.1), model)
    made = 0
    for stage in range(2):
        for _ in job.epochs(3):
            make_step(opt, model(torch.ones(2, 4, dtype=torch.float64)).sum())
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


def save_before_the_first_epoch(job: tw.Job, path: str) -> tuple[list[int], ...]:
    model = net()
    job.track(model=model, optimizer=tw.DistributedOptimizer(sgd(model), model))
    if job.rank == 0:
        job.save(path)
    job.barrier()
    job.load(path)
    job.barrier()  # before another file takes its place
    first = list(job.epochs(2))
    if job.rank == 0:
        job.save(path)
    job.barrier()
    job.load(path)
    return first, list(job.epochs(2)), list(job.epochs(3))


def test_a_checkpoint_counts_the_epochs_behind_it(team: Team, tmp_path: Path) -> None:
    """Named for a bug: one that was saved before the first epoch went on with the second."""
    path = str(tmp_path / "checkpoint")
    assert team.run(save_before_the_first_epoch, path) == [([0, 1], [], [0, 1, 2])] * 2
    assert torch.load(path, weights_only=True)["tensorwire"]["epochs"] == 2


def load_what_another_seed_made(rank: int, path: str) -> str:
    for seed in (7, 8):
        job = tw.init(seed=seed)
        try:
            model = net()
            job.track(model=model, optimizer=tw.DistributedOptimizer(sgd(model), model))
            if seed == 7:
                job.save(path)
                job.load(path)
                continue
            before = digest(model)
            try:
                job.load(path)
            except ValueError as error:
                assert digest(model) == before
                return str(error)
        finally:
            job.close()
    return ""


def test_a_checkpoint_of_another_seed(team: Team, tmp_path: Path) -> None:
    """Named for a bug: it was loaded, and samples came in an order that was nobody's."""
    path = str(tmp_path / "checkpoint")
    (text,) = team.without_job(load_what_another_seed_made, path, workers=1)
    assert f"{path} was made by a job with seed 7, this one has 8" in text
    assert "tw.init(seed=7)" in text


def save_in_part(job: tw.Job, path: str) -> list[list[str]]:
    told = []

    def keep(**kept: Any) -> None:
        job.track(**kept)
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            job.save(path)
        told.append([str(each.message).split(":")[0] for each in found])

    one, other = net(), net()
    opt = tw.DistributedOptimizer(sgd(one), one)
    keep(model=one)
    keep(optimizer=opt)
    keep(second=tw.DistributedOptimizer(sgd(other), other))
    keep(other=other)
    return told


def test_what_is_trained_and_not_kept_is_told(team: Team, tmp_path: Path) -> None:
    """Named for a bug: such a file loaded without a word, and training went on from others."""
    assert team.alone(save_in_part, str(tmp_path / "checkpoint")) == [
        ["job.track was not given the optimizer of SGD"],
        [],
        ["job.track was not given the model of SGD"],
        [],
    ]


SEEDS = """
import sys
import tensorwire.torch as tw
import os
seed = int(sys.argv[1]) if os.environ["RANK"] == "0" else 5
job = tw.init(seed=seed)
print("seed", job.seed, flush=True)
"""


@pytest.mark.parametrize("seed", [-7, (1 << 64) - 1])
def test_every_seed_of_torch_is_that_of_all_workers(tmp_path: Path, seed: int) -> None:
    (tmp_path / "script.py").write_text(SEEDS)
    command = [sys.executable, "-m", "tensorwire", "run", "-w", "2", "script.py", str(seed)]
    assert output_of(command, tmp_path).count(f"seed {seed}\n") == 2


@pytest.mark.parametrize(
    ("seed", "kind", "words"),
    [
        (1 << 64, ValueError, "a number of 64 bits"),
        (-(1 << 63) - 1, ValueError, "a number of 64 bits"),
        (0.5, TypeError, "a seed is a whole number, not 0.5"),
        (None, TypeError, "a seed is a whole number, not None"),
    ],
)
def test_a_seed_that_is_none(seed: Any, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        tw.init(seed=seed, rank=0, world_size=1)


def keeping_plain_values(job: tw.Job, path: str) -> tuple[float, list[float], list[str]]:
    """Values that only one worker knows come from the file, to all of them."""
    model = net()
    opt = tw.DistributedOptimizer(sgd(model), model)
    best: dict[str, Any] = {"loss": 9.0, "weights": None}
    history: list[float] = []
    job.track(model=model, optimizer=opt, best=best, history=history)
    for step in range(3):
        make_step(opt, loss(model, batch(step, job.rank)))
        history.append(float(step) + job.rank)
    best.update(loss=0.5 + job.rank, weights=model.state_dict())
    if job.rank == 0:
        job.save(path)
    job.barrier()
    bits = digest(model)
    history.clear()
    best.clear()
    make_step(opt, loss(model, batch(7, job.rank)))
    job.load(path)
    assert digest(model) == bits
    best["weights"]["0.weight"].zero_()  # its own memory
    assert digest(model) == bits
    return best["loss"], history, sorted(best["weights"])


def test_plain_values_are_kept(team: Team, transports: list[str] | None, tmp_path: Path) -> None:
    path = str(tmp_path / "checkpoint")
    keys = ["0.bias", "0.weight", "2.bias", "2.weight"]
    found = team.run(keeping_plain_values, path, transports=transports)
    assert found == [(0.5, [0.0, 1.0, 2.0], keys)] * 2
    assert torch.load(path, weights_only=True)["history"] == [0.0, 1.0, 2.0]
    assert team.alone(keeping_plain_values, path) == found[0]
