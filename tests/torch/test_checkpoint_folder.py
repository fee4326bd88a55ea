"""A folder of checkpoints: each complete or absent, undamaged or an error; the latest are kept."""

import contextlib
import io
import json
import multiprocessing
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from team import Team
from test_checkpoint import Kept, small_disk, small_files
from torch import nn
from twins import make_step

import tensorwire.torch as tw
from tensorwire.errors import UnavailableError
from tensorwire.torch import checkpoint, checkpoint_folder

safetensors = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")


def model(value: float = 0.5, size: int = 300) -> nn.Module:
    made = nn.Sequential(nn.Linear(size, 2), nn.BatchNorm1d(2))
    for parameter in made.parameters():
        parameter.data.fill_(value)
    return made


def save(path: Path, value: float = 0.5, keep: int = 3, size: int = 300) -> Path:
    kept = {"model": model(value, size), "opt": Kept({"state": [torch.ones(3), value]}), "best": {}}
    kept["best"]["value"] = torch.tensor(value)  # type: ignore[index]
    return checkpoint.save(path, kept, [], 2, 7, keep=keep)


def load(path: Path, size: int = 300) -> float:
    """The value that was saved; all of it has it."""
    into, opt, best = model(0.0, size), Kept(), {}  # type: ignore[var-annotated]
    kept = {"model": into, "opt": opt, "best": best}
    loaded = checkpoint.load(path, kept, [], contextlib.nullcontext, 7)
    assert loaded is not None
    assert loaded.epochs == 2
    value = float(best["value"])
    assert all(bool((p == value).all()) for p in into.parameters())
    assert opt.state["state"][1] == value
    return value


def test_other_tools_read_it(tmp_path: Path) -> None:
    made = save(tmp_path / "checkpoints", 0.25)
    assert made == tmp_path / "checkpoints/checkpoint-000001"
    assert sorted(each.name for each in made.iterdir()) == [
        "checkpoint.json", "model.safetensors", "state.pt",
    ]  # fmt: skip
    twin = model(0.0)
    twin.load_state_dict(safetensors.load_file(made / "model.safetensors"))
    assert bool((next(twin.parameters()) == 0.25).all())
    assert torch.load(made / "state.pt", weights_only=True)["best"] == {"value": torch.tensor(0.25)}
    files = json.loads((made / "checkpoint.json").read_text())["files"]
    assert files.keys() == {"model.safetensors", "state.pt"}
    for name, each in files.items():
        said = subprocess.run(
            ["sha256sum", made / name], capture_output=True, text=True, check=True
        )
        assert said.stdout.split()[0] == each["sha256"]
    assert load(made) == load(made.parent) == 0.25


def test_what_safetensors_has_no_form_for(tmp_path: Path) -> None:
    """The other file has it: a model with something else than tensors, complex numbers, nothing."""

    class Odd(nn.Linear):
        def get_extra_state(self) -> Any:
            return {"steps": 3}

        def set_extra_state(self, state: Any) -> None:
            self.extra = state

    odd, numbers, empty = Odd(2, 2), nn.Linear(2, 2, dtype=torch.complex128), nn.Identity()
    kept: dict[str, Any] = {"odd": odd, "numbers": numbers, "empty": empty, "a/b": nn.Linear(2, 2)}
    made = checkpoint.save(tmp_path / "all", kept, [], 0, 7, keep=1)
    assert sorted(each.name for each in made.iterdir()) == ["checkpoint.json", "state.pt"]
    weight = numbers.weight.detach().clone()
    for thing in kept.values():
        for parameter in thing.parameters():
            parameter.data.zero_()
    checkpoint.load(made, kept, [], contextlib.nullcontext, 7)
    assert odd.extra == {"steps": 3}
    assert torch.equal(numbers.weight, weight)


def test_tensors_in_other_orders(tmp_path: Path) -> None:
    """Tied and channels-last tensors, of every usual dtype, come back with their values."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)
            self.b = nn.Linear(4, 4)
            self.c = nn.Linear(4, 4)
            self.c.weight = self.b.weight
            self.d = nn.Parameter(torch.randn(4, 6).t())
            self.e = nn.Parameter(torch.randn(3).bfloat16())
            self.register_buffer("f", torch.arange(3) > 1)
            self.register_buffer("g", torch.tensor(3))
            self.register_buffer("h", torch.empty(0, 2))

    first, second = Tied(), Tied()
    made = checkpoint.save(tmp_path / "all", {"model": first}, [], 0, 7, keep=1)
    checkpoint.load(made, {"model": second}, [], contextlib.nullcontext, 7)
    torch.testing.assert_close(second.state_dict(), first.state_dict(), rtol=0, atol=0)


def test_so_many_are_kept(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    (folder / "checkpoint-000000").mkdir()  # of somebody else: there is no checkpoint in it
    (folder / "checkpoint-best").mkdir()
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(save(tmp_path / "other"), elsewhere)
    (folder / "checkpoint-000001").symlink_to(elsewhere)
    for step in range(5):
        save(folder, step / 8, keep=2)
    assert sorted(each.name for each in folder.iterdir()) == [
        "checkpoint-000000", "checkpoint-000001", "checkpoint-000005", "checkpoint-000006",
        "checkpoint-best", "notes.txt",
    ]  # fmt: skip
    assert (elsewhere / "state.pt").exists()
    assert load(folder) == 0.5
    assert load(folder / "checkpoint-000005") == 0.375


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize("harm", [flip, cut, pipe, Path.unlink])
@pytest.mark.parametrize("name", ["checkpoint.json", "model.safetensors", "state.pt"])
def test_what_is_damaged_is_named(tmp_path: Path, name: str, harm: Any) -> None:
    save(tmp_path, 0.25)
    made = save(tmp_path)
    harm(made / name)
    kept = {"model": model(), "opt": Kept("as it was"), "best": {"as": "it was"}}
    with pytest.raises(ValueError, match="checkpoint-000002 is") as caught:
        checkpoint.load(made, kept, [], contextlib.nullcontext, 7)
    assert "load an earlier checkpoint, as" in str(caught.value) or "no checkpoint of" in str(
        caught.value
    )
    assert kept["best"] == {"as": "it was"}
    assert load(tmp_path / "checkpoint-000001") == 0.25


@pytest.mark.parametrize(
    "index",
    [
        "[]",
        "{",
        '{"format": 1, "files": []}',
        '{"format": 1, "files": {}}',
        '{"format": 1, "files": {"state.pt": 3}}',
        '{"format": 1, "files": {"state.pt": {"bytes": 1, "sha256": ""}, "../x": {}}}',
        '{"format": 1, "files": {"state.pt": {}, "/etc/passwd": {}}}',
    ],
)
def test_an_index_that_makes_no_sense(tmp_path: Path, index: str) -> None:
    made = save(tmp_path)
    (made / "checkpoint.json").write_text(index)
    with pytest.raises(ValueError, match="checkpoint-000001 is"):
        load(made)


@pytest.mark.parametrize("index", ['{"format": 2, "files": {}}', '{"files": {}}'])
def test_a_folder_of_an_unknown_format_is_an_error_that_says_so(tmp_path: Path, index: str) -> None:
    made = save(tmp_path)
    (made / "checkpoint.json").write_text(index)
    number = json.loads(index).get("format")
    with pytest.raises(ValueError, match=f"it has the format {number}, this version reads 1$"):
        load(made)


def test_a_file_that_is_no_model(tmp_path: Path) -> None:
    """With checksums that fit: another program has written it."""
    made = save(tmp_path)
    (made / "model.safetensors").write_bytes(b"\xff" * 64)
    (made / "checkpoint.json").unlink()
    checkpoint_folder._write_index(made)
    with pytest.raises(ValueError, match=r"is damaged: model.safetensors is no safetensors file"):
        load(made)


def test_a_model_in_two_files(tmp_path: Path) -> None:
    made = save(tmp_path)
    state = torch.load(made / "state.pt", weights_only=True)
    torch.save({**state, "model": {}}, made / "state.pt")
    (made / "checkpoint.json").unlink()
    checkpoint_folder._write_index(made)
    with pytest.raises(ValueError, match=r"model.safetensors and state.pt both have 'model'"):
        load(made)


def test_an_older_one_that_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The new one is complete, and the error says so."""
    save(tmp_path, 0.25, keep=1)

    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(checkpoint_folder, "_remove", refuse)
    with pytest.raises(
        PermissionError, match=r"remove an older.*checkpoint-000002 is complete"
    ) as caught:
        save(tmp_path, keep=1)
    assert caught.value.filename == str(tmp_path)
    assert load(tmp_path) == 0.5


def test_wrong_paths(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(ValueError, match=r"is a directory without checkpoints, and has other th"):
        load(tmp_path)
    with pytest.raises(OSError, match="cannot save the checkpoint") as caught:
        save(file)
    assert caught.value.filename == str(file)
    missing = tmp_path / "missing"
    for keep in (None, 3):
        with pytest.raises(FileNotFoundError, match=f"No such file or .*: {missing} is missing; "):
            checkpoint.save(missing / "below" / "x", {"best": {}}, [], 0, 7, keep=keep)
        with pytest.raises(NotADirectoryError, match=f"Not a directory: {file} is no folder; "):
            checkpoint.save(file / "x", {"best": {}}, [], 0, 7, keep=keep)


def load_if_there(job: tw.Job, folder: Path) -> tuple[list[int], str, bool]:
    best = {"value": 1}
    job.track(best=best)
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        if os.path.exists(folder):
            job.load(folder)
    return list(job.epochs(2)), said.getvalue(), best == {"value": 1}


@pytest.mark.parametrize("left", ["", ".checkpoint-000001.0123456789abcdef.part"])
def test_nothing_was_saved_so_far(team: Team, tmp_path: Path, left: str) -> None:
    """A job that died in its first save, or a folder that was made for it: no worker loads."""
    (tmp_path / "checkpoints" / left).mkdir(parents=True)
    said = f"tensorwire: nothing was saved in {tmp_path}/checkpoints so far, and nothing is loaded"
    told = team.run(load_if_there, tmp_path / "checkpoints")
    assert told == [([0, 1], said + "\n", True), ([0, 1], "", True)]


def test_a_kill_in_the_first_save(tmp_path: Path) -> None:
    """The remains are no error of the next load, and the next save removes them."""
    folder, context = tmp_path / "checkpoints", multiprocessing.get_context("fork")

    def save_much() -> None:
        torch.set_num_threads(1)  # a fork has none of the threads of its parent
        save(folder, 0.5, 2, 400_000)

    process = context.Process(target=save_much, daemon=True)
    process.start()
    while not folder.exists() or not os.listdir(folder):
        assert process.is_alive(), "it has ended and saved nothing"
        time.sleep(0.0005)
    process.kill()
    process.join()
    assert not (folder / "checkpoint-000001").exists(), "the kill came too late"
    assert checkpoint.load(folder, {"best": {}}, [], contextlib.nullcontext, 7) is None
    save(folder)
    assert [each.name for each in folder.iterdir()] == ["checkpoint-000001"]
    assert load(folder) == 0.5


@pytest.mark.parametrize("limited", [small_files, small_disk])
def test_a_full_disk(tmp_path: Path, limited: Any, capfd: pytest.CaptureFixture[str]) -> None:
    with limited(tmp_path) as folder:
        path = folder / "checkpoints"
        save(path, 0.25, size=200)
        with pytest.raises(OSError, match="earlier ones stay as they were") as caught:
            save(path, 0.75, size=100_000)
        assert caught.value.filename == str(path)
        assert caught.value.errno
        assert [each.name for each in path.iterdir()] == ["checkpoint-000001"]
        assert load(path, 200) == 0.25
    assert capfd.readouterr().err == ""


def test_without_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    with pytest.raises(UnavailableError, match=r"pip install 'tensorwire\[torch\]'"):
        save(tmp_path)
    assert list(tmp_path.iterdir()) == []


def save_for_ever(folder: Path, value: float) -> None:
    while True:
        save(folder, value, keep=2, size=20_000)


def test_a_kill_at_any_moment_of_a_save(tmp_path: Path) -> None:
    """A checkpoint that can be loaded is whole, and the next save removes the remains."""
    folder = tmp_path / "checkpoints"
    save(folder, 0.5, keep=2, size=20_000)
    context, chance = multiprocessing.get_context("fork"), random.Random(1)
    for _ in range(12):
        process = context.Process(target=save_for_ever, args=(folder, 0.5), daemon=True)
        process.start()
        time.sleep(0.05 + chance.random() * 0.1)
        process.kill()
        process.join()
        assert load(folder, 20_000) == 0.5
    save(folder, 0.75, keep=2, size=20_000)
    names = [each.name for each in folder.iterdir()]
    assert len(names) == 2, names
    assert load(folder, 20_000) == 0.75


def save_often(folder: Path, value: float) -> None:
    for _ in range(15):
        save(folder, value, keep=3)


def test_saves_at_a_time_to_one_folder(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    both = [context.Process(target=save_often, args=(tmp_path, value)) for value in (0.25, 0.75)]
    for process in both:
        process.start()
    while any(process.is_alive() for process in both):
        if any(each.name.startswith("checkpoint-") for each in tmp_path.iterdir()):
            with contextlib.suppress(ValueError, FileNotFoundError):  # removed meanwhile
                assert load(tmp_path) in (0.25, 0.75)
    assert [process.exitcode for process in both] == [0, 0]
    assert len(list(tmp_path.iterdir())) == 3
    assert max(each.name for each in tmp_path.iterdir()) == "checkpoint-000030"


def trained(job: tw.Job, folder: Path, load_first: bool) -> tuple[list[Any], list[str]]:
    torch.manual_seed(0)
    net = nn.Linear(4, 2)
    opt = tw.DistributedOptimizer(torch.optim.Adam(net.parameters(), lr=0.1), net)
    job.track(net=net, opt=opt)
    if load_first:
        job.load(folder)
    made: list[str] = []
    loader = job.loader(torch.randn(24, 4, generator=torch.Generator().manual_seed(1)), 2)  # type: ignore[arg-type]
    for _ in job.epochs(2):
        for x in loader:
            make_step(opt, net(x).square().sum())
            if job.rank == 0 and not load_first:
                path = job.save(folder, keep=2, every=4)
                made += [path.name] if path else []
    job.barrier()
    return [p.tolist() for p in net.parameters()], made


def test_a_job_keeps_its_last(team: Team, tmp_path: Path) -> None:
    """12 steps, 6 to an epoch: saved after 4, 8 and 12, and gone on with from each of two."""
    folder = tmp_path / "checkpoints"
    whole = team.run(trained, folder, False, servers=2)[0]
    assert whole[1] == ["checkpoint-000001", "checkpoint-000002", "checkpoint-000003"]
    assert len(list(folder.iterdir())) == 2
    shutil.rmtree(folder / "checkpoint-000003")
    assert team.run(trained, folder, True)[0][0] == whole[0]
    assert team.alone(trained, folder, True, slices=2)[0] == whole[0]


def wrong(job: tw.Job, options: dict[str, Any]) -> None:
    job.track(best={})
    job.save("nowhere", **options)


@pytest.mark.parametrize("options", [{"keep": 0}, {"keep": True}, {"every": 0}, {"every": 1.5}])
def test_numbers_that_make_no_sense(team: Team, options: dict[str, Any]) -> None:
    failure = team.failure_alone(wrong, options)
    assert "is a whole number from 1 up" in failure.trace
