"""A checkpoint that was saved inside an epoch: the job goes on with the very next step."""

import io
from collections.abc import Iterator
from contextlib import redirect_stderr, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from scripts import digest
from team import Team
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import tensorwire.torch as tw

EPOCHS = 3
COUNT = 44  # samples: the last step of an epoch has fewer


class Stop(Exception):
    pass


class Training:
    """Dropout, BatchNorm, momentum, a scheduler per batch, and two optimizers."""

    def __init__(self, job: tw.Job) -> None:
        torch.manual_seed(0)
        self.job = job
        self.model = nn.Sequential(
            nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.ReLU(), nn.Linear(8, 3)
        )
        self.other = nn.Linear(5, 3)
        options = {"lr": 0.1, "momentum": 0.9}
        self.opt = tw.DistributedOptimizer(
            torch.optim.SGD(self.model.parameters(), **options), self.model
        )
        self.second = tw.DistributedOptimizer(torch.optim.Adam(self.other.parameters()), self.other)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.opt, 40)
        self.seen: list[Any] = []
        job.track(
            model=self.model, other=self.other, opt=self.opt, second=self.second,
            scheduler=self.scheduler, seen=self.seen,
        )  # fmt: skip
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(COUNT, 5, generator=generator)
        self.data = TensorDataset(x, torch.arange(COUNT) % 3, torch.arange(COUNT))

    def step(self, batch: Any, sync: bool = True) -> None:
        x, y, index = batch
        for model in (self.model, self.other):
            F.cross_entropy(model(x), y).backward()
        if sync:
            for opt in (self.opt, self.second):
                opt.step()
                opt.zero_grad()
        if sync and self.job.local_replicas[0].reducer.turn == 0:
            self.scheduler.step()
        self.seen += index.tolist()

    def end(self) -> list[Any]:
        result = [digest(self.model), digest(self.other), self.seen, self.scheduler.last_epoch]
        return result


def plain(job: tw.Job, of: Training) -> Iterator[int]:
    loader = job.loader(of.data, 4, shuffle=True)
    for epoch in job.epochs(EPOCHS):
        for number, batch in enumerate(loader, loader.first_batch):
            of.step(batch)
            yield epoch * 100 + (number + 1) // len(job.my_slices)


def made_anew(job: tw.Job, of: Training) -> Iterator[int]:
    """A loader per epoch, and one that evaluates."""
    for epoch in job.epochs(EPOCHS):
        loader = job.loader(of.data, 4, shuffle=True)
        for number, batch in enumerate(loader, loader.first_batch):
            of.step(batch)
            yield epoch * 100 + (number + 1) // len(job.my_slices)
        of.model.eval()
        with torch.no_grad():
            for x, *_ in job.loader(of.data, 8):
                of.model(x)
        of.model.train()


def twice(job: tw.Job, of: Training) -> Iterator[int]:
    """Two passes in an epoch, and before them one of another loader."""
    loader, first = job.loader(of.data, 4, shuffle=True), job.loader(of.data, 6)
    for epoch in job.epochs(EPOCHS):
        for batch in first:
            of.step(batch)
            yield -1
        for part in range(2):
            for number, batch in enumerate(loader, loader.first_batch):
                of.step(batch)
                yield epoch * 100 + part * 50 + (number + 1) // len(job.my_slices)


def accumulated(job: tw.Job, of: Training) -> Iterator[int]:
    loader = job.loader(of.data, 2, shuffle=True, accumulate=2)
    for epoch in job.epochs(EPOCHS):
        for number, batch in enumerate(loader, loader.first_batch):
            if number % 2 == 0:
                with of.opt.accumulate(), of.second.accumulate():
                    of.step(batch, sync=False)
            else:
                of.step(batch)
                yield epoch * 100 + (number + 1) // 2 // len(job.my_slices)


LOOPS = {each.__name__: each for each in (plain, made_anew, twice, accumulated)}


def run(job: tw.Job, loop: str, path: Path | None, stop: int, load: bool) -> list[Any]:
    of = Training(job)
    if load:
        job.load(path)  # type: ignore[arg-type]
    with suppress(Stop):
        for at in LOOPS[loop](job, of):
            if at == stop:
                if job.rank == 0:
                    job.save(path)  # type: ignore[arg-type]
                raise Stop
    job.barrier()
    return of.end()


AT = [(loop, stop) for loop in LOOPS for stop in (103, 105, 201)]


@pytest.mark.parametrize(("loop", "stop"), [*AT, ("plain", 106)])
def test_a_job_goes_on_with_the_next_step(team: Team, tmp_path: Path, loop: str, stop: int) -> None:
    """With two workers, then with one that computes both slices. 106: the last step of an epoch."""
    path = tmp_path / "checkpoint"
    whole = team.run(run, loop, None, -2, False)
    team.run(run, loop, path, stop, False)
    assert team.run(run, loop, path, -2, True)[0] == whole[0]
    alone = team.alone(run, loop, path, -2, True, slices=2)
    assert alone[:2] == whole[0][:2]
    assert alone[3] == whole[0][3]


def test_the_second_pass_of_an_epoch(team: Team, tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    whole = team.run(run, "twice", None, -2, False)
    team.run(run, "twice", path, 152, False)
    assert team.run(run, "twice", path, -2, True)[0] == whole[0]


def other_data(job: tw.Job, path: Path, batch_size: int, before: bool) -> str:
    of = Training(job)
    loader = job.loader(of.data, batch_size, shuffle=True) if before else None
    job.load(path)
    try:
        for _ in job.epochs(EPOCHS):
            for batch in loader or job.loader(of.data, batch_size, shuffle=True):
                of.step(batch)
    except ValueError as error:
        return str(error)
    return ""


def test_another_program_is_told(team: Team, tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    team.run(run, "plain", path, 103, False)
    assert "in 2 slices of 5, shuffle=True" in team.run(other_data, path, 5, True)[0]
    assert "Make loaders in the same order" in team.run(other_data, path, 4, False)[0]


def looked(job: tw.Job, path: Path) -> list[Any]:
    """Saved after the inner loop, and after a loop that was left: the epoch is behind it."""
    of = Training(job)
    loader = job.loader(of.data, 4)
    seen = []
    for epoch in job.epochs(2):
        for batch in loader:
            of.step(batch)
            if epoch == 1:
                break
        job.save(path)
        job.load(path)
        seen.append(job.epoch)
    return seen


def test_behind_a_pass_the_epoch_counts(team: Team, tmp_path: Path) -> None:
    assert team.alone(looked, tmp_path / "checkpoint") == [1, 2]


def saved_before_a_step(job: tw.Job, path: Path, moment: str) -> None:
    """Loads, and saves again at a moment at which this job has made no step."""
    of = Training(job)
    loader = job.loader(of.data, 4, shuffle=True)
    job.load(path)
    if moment == "loaded":
        job.save(path)
    for _ in job.epochs(EPOCHS):
        if moment == "begun":
            job.save(path)
        for batch in loader:
            if moment == "given":
                job.save(path)
                break
            of.step(batch)
        break


@pytest.mark.parametrize("moment", ["loaded", "begun", "given"])
def test_a_save_before_the_first_step_keeps_the_place(
    team: Team, tmp_path: Path, moment: str
) -> None:
    path = tmp_path / "checkpoint"
    whole = team.alone(run, "plain", None, -2, False)
    team.alone(run, "plain", path, 103, False)
    team.alone(saved_before_a_step, path, moment)
    assert team.alone(run, "plain", path, -2, True) == whole


def before_any_step(job: tw.Job, path: Path) -> list[int]:
    of = Training(job)
    loader = job.loader(of.data, 4)
    for _ in job.epochs(2):
        job.save(path)
        for batch in loader:
            of.step(batch)
        break
    job.load(path)
    return [job.epoch]


def test_an_epoch_that_made_no_step_is_not_done(team: Team, tmp_path: Path) -> None:
    assert team.alone(before_any_step, tmp_path / "checkpoint") == [0]


def different(job: tw.Job, folder: Path) -> None:
    of = Training(job)
    assert of.job is job
    job.save(folder, keep=3)  # the second worker makes one of its own
    job.barrier()
    job.load(folder / f"checkpoint-{job.rank + 1:06}")


def test_workers_that_load_different_checkpoints_are_told(team: Team, tmp_path: Path) -> None:
    trace = team.failures(different, tmp_path)[0].trace
    assert "worker 1 has loaded another checkpoint than worker 0" in trace


def loaded_by_others(job: tw.Job, path: Path) -> tuple[str, str]:
    """Returns worker 0's message, and the error of the first step."""
    of, error = Training(job), ""
    with redirect_stderr(io.StringIO()) as said:
        job.load(path)
        try:
            next(plain(job, of), None)
        except ValueError as raised:
            error = str(raised)
    return said.getvalue(), error


def test_other_slices_are_told(team: Team, tmp_path: Path) -> None:
    """Named for a bug: a job went on with another number of slices without a word."""
    path = tmp_path / "checkpoint"
    team.alone(run, "plain", path, 103, False, slices=2)
    said, error = team.alone(loaded_by_others, path, slices=3)
    assert "the checkpoint is of a job with 2 slices in each step, and this one has 3" in said
    assert "44 samples in 2 slices of 4, shuffle=True" in error, "it was saved inside a pass"
    assert team.alone(loaded_by_others, path, slices=2) == (
        "tensorwire: goes on in epoch 2, after step 3 of 6\n",
        "",
    )


def epochs_from(job: tw.Job, path: Path) -> list[Any]:
    found: list[Any] = [list(job.epochs(4, first=2)), list(job.epochs(4, first=4))]
    of = Training(job)
    for _ in job.epochs(3):
        for batch in job.loader(of.data, 4):
            of.step(batch)
        job.save(path)
        break
    for first in (0, 1, 2, -1, "1", None, 1.0, True):
        job.load(path)
        try:
            found.append(list(job.epochs(3, first=first)))
        except (TypeError, ValueError) as error:
            found.append(str(error))
    return found


def test_epochs_begin_with_the_script_s_own_first(team: Team, tmp_path: Path) -> None:
    """Named for a bug: a script with a checkpoint of its own made its first epochs again."""
    found = team.alone(epochs_from, tmp_path / "checkpoint")
    assert found[:4] == [[2, 3], [], [1, 2], [1, 2]]
    assert "job.load goes on with epoch 1, and job.epochs(first=2)" in found[4]
    assert "first is an epoch from 0 up" in found[5]
    assert all("job.epochs: first is a number of epochs, not " in each for each in found[6:])
