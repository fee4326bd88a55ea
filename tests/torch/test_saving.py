"""Checkpoints are copies of one version, and can be written while training goes on."""

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from team import Team
from test_checkpoint import small_files
from torch import nn
from twins import make_step

import tensorwire.torch as tw
from tensorwire.errors import BusyError
from tensorwire.torch import checkpoint


@contextlib.contextmanager
def held_back() -> Iterator[threading.Event]:
    """Writes wait for an event."""
    go, write = threading.Event(), checkpoint._write

    def late(content: dict[str, Any], file: Any) -> None:
        assert go.wait(60)
        write(content, file)

    checkpoint._write = late
    try:
        yield go
    finally:
        go.set()
        checkpoint._write = write


def ready(job: tw.Job, size: int = 600) -> tuple[nn.Module, Any]:
    """Large enough that a tensor is cut between two servers, and with all kinds of state."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, size), nn.BatchNorm1d(size), nn.Linear(size, size))
    model[2].bias.requires_grad_(False)  # type: ignore[operator, union-attr]
    opt = tw.DistributedOptimizer(torch.optim.Adam(model.parameters()), model, ema=0.9)
    job.track(model=model, opt=opt)
    return model, opt


def train(job: tw.Job, model: nn.Module, opt: Any, first: int, count: int = 2) -> None:
    for step in range(first, first + count):
        for rank in job.my_slices:
            generator = torch.Generator().manual_seed(9 * step + rank)
            make_step(opt, model(torch.randn(6, 4, generator=generator)).square().mean())


def same(found: Any, expected: Any) -> bool:
    """To the bit, in all that a state_dict() has."""
    if isinstance(expected, torch.Tensor):
        return torch.equal(found, expected) and found.stride() == expected.stride()
    if isinstance(expected, dict):
        return found.keys() == expected.keys() and all(same(found[k], expected[k]) for k in found)
    if isinstance(expected, list | tuple):
        return len(found) == len(expected) and all(map(same, found, expected))
    return bool(found == expected)


def copied(state: Any) -> Any:
    return checkpoint._copied(state)


def goes_on(job: tw.Job, folder: Path) -> None:
    model, opt = ready(job)
    train(job, model, opt, 0)
    wanted = {"model": copied(model.state_dict()), "opt": copied(opt.state_dict())}
    writes = job.rank == 0
    if writes:
        assert job.save(folder / "now") == folder / "now"
    with held_back() as go:
        if writes:
            assert job.save(folder / "later", wait=False) is None
            assert job.save(folder / "several", keep=2, wait=False) is None
        train(job, model, opt, 2)  # all workers, while nothing is written
        if writes:
            with pytest.raises(
                BusyError,
                match=r"holds 2 snapshots of one .*: version.*one worker alone calls job.save",
            ):
                job.save(folder / "third")
            assert sorted(each.name for each in folder.iterdir() if each.is_file()) == [
                next(each.name for each in folder.glob(".later.*.part")), "now",
            ]  # fmt: skip
            go.set()
            # The next one to the same path waits for it.
            whole = (folder / "now").read_bytes()
            job._saving.writes.wait(str(folder / "later"))
            assert (folder / "later").read_bytes() == whole
    job.load(folder / "several")  # on no worker before it is written
    assert same(model.state_dict(), wanted["model"])
    state = opt.state_dict()
    # An average that is loaded is one of all; that of what was frozen is its value.
    assert same(state["ema"].pop(5), model[2].bias.detach())  # type: ignore[index, union-attr]
    assert same(state, wanted["opt"])
    if not writes:
        return
    content = torch.load(folder / "now", weights_only=True)
    assert same(content["model"], wanted["model"])
    assert same(content["opt"], wanted["opt"])
    assert (
        job.session.member is None
        or [
            (peer.name, name)
            for peer in job.session.member.servers
            for name in ("0/snapshot/0.1", "0/snapshot/0.2", "0/snapshot/0.3")
            if has(peer, name)
        ]
        == []
    )
    job.save(folder / "later", wait=False)
    job.save(folder / "third", wait=False)  # there is room again


def all_save(job: tw.Job, folder: Path) -> None:
    model, opt = ready(job, 60)
    train(job, model, opt, 0)
    job.save(folder / f"now {job.rank}")
    job.save(folder / f"later {job.rank}", wait=False)
    train(job, model, opt, 2)
    job.barrier()


def has(peer: Any, name: str) -> bool:
    try:
        peer.region(name, None)
    except LookupError:
        return False
    return True


def test_all_workers_save(team: Team, tmp_path: Path) -> None:
    """Named for a bug: of three workers that call job.save the third got a BusyError."""
    team.run(all_save, tmp_path, workers=4, servers=2)
    names = [f"{when} {rank}" for when in ("now", "later") for rank in range(4)]
    assert {(tmp_path / name).read_bytes() for name in names} == {(tmp_path / "now 0").read_bytes()}


@pytest.mark.parametrize(
    "place",
    [{"servers": 2}, {"servers": 2, "transports": ["tcp"]}, {"workers": 0, "slices": 2}],
    ids=str,
)
def test_training_goes_on_while_it_is_written(
    team: Team, tmp_path: Path, place: dict[str, Any]
) -> None:
    team.run(goes_on, tmp_path, **place)


def fails(job: tw.Job, folder: Path) -> None:
    model, opt = ready(job, 9)
    train(job, model, opt, 0)
    path, bad = folder / "checkpoint", folder / "missing/checkpoint"
    job.save(path)
    before = path.read_bytes()
    train(job, model, opt, 1)
    job.save(bad, wait=False)
    with pytest.raises(FileNotFoundError, match="cannot save the checkpoint") as caught:
        job.save(bad)
    assert caught.value.filename == str(bad)
    with small_files(folder):
        model[0].register_buffer("large", torch.zeros(100_000))  # type: ignore[union-attr, operator]
        job.save(path, wait=False)
        with pytest.raises(OSError, match=r"File too large; an older file stays"):
            job.save(path)
    assert path.read_bytes() == before
    assert list(folder.iterdir()) == [path]
    job.save(path, wait=False)  # the errors were told
    job.save(folder / "other")
    job.save(bad, wait=False)
    with pytest.raises(FileNotFoundError, match="cannot save"):
        job.close()
    assert job.closed
    assert path.read_bytes() != before


def test_what_cannot_be_written_is_told_and_leaves_the_last_one(team: Team, tmp_path: Path) -> None:
    team.alone(fails, tmp_path)


def closes(job: tw.Job, path: Path) -> int:
    model, opt = ready(job)
    train(job, model, opt, 0)
    with held_back() as go:
        if job.rank == 0:
            job.save(path, wait=False)
            threading.Timer(0.3, go.set).start()
        opt.close()  # servers free the store, from whose snapshot it is written
    return path.exists() or job.rank


@pytest.mark.parametrize("transports", [["tcp"], ["shm"]])
def test_an_optimizer_is_closed_meanwhile(
    team: Team, tmp_path: Path, transports: list[str]
) -> None:
    assert team.run(closes, tmp_path / "checkpoint", transports=transports) == [True, 1]


ENDS = """
import torch, tensorwire.torch as tw
from torch import nn

job = tw.init()
model = nn.Linear(3, 2)
opt = tw.DistributedOptimizer(torch.optim.Adam(model.parameters()), model)
job.track(model=model)
model(torch.ones(2, 3)).sum().backward()
opt.step()
job.save("{path}", wait=False)
{rest}
"""


@pytest.mark.parametrize(
    ("path", "rest", "code", "words"),
    [
        ("missing/it", "", 1, "tensorwire: a checkpoint was not written: FileNotFoundError: "),
        ("there", "", 0, ""),
        pytest.param(
            "missing/it", "with job: pass", 1, "\nFileNotFoundError: ", marks=pytest.mark.slow
        ),
        pytest.param(
            "missing/it", "with job: 1 / 0", 1, "a checkpoint was not written: File.*Division",
            marks=pytest.mark.slow,
        ),
    ],
)  # fmt: skip
def test_the_end_of_a_process(tmp_path: Path, path: str, rest: str, code: int, words: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", ENDS.format(path=path, rest=rest)],
        cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    for word in words.split(".*"):
        assert word in done.stderr
    assert os.listdir(tmp_path) == ([] if code else [path])
