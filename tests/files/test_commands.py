"""`tensorwire ls`, `cat`, `cp`, `stat` beside a job that trains, and files that can be mapped."""

import contextlib
import fcntl
import json
import mmap
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import safetensors
from click.testing import CliRunner
from jobs import training

from tensorwire.cli import main
from tensorwire.files import JobReader


def run(*arguments: str, code: int = 0, **environ: str) -> tuple[bytes, str]:
    """Returns the output of a command, and its errors."""
    done = CliRunner().invoke(main, arguments, env=environ)
    assert done.exit_code == code, (done.stderr, done.exception)
    return done.stdout_bytes, done.stderr


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_job_in_a_shell(folder: Path) -> None:
    with training(folder, "--workers", "1", momentum=0.9, PAUSE="0.01") as job:
        root = f"tw://{job.address}"
        check_lists(root, job.servers[0].door, folder)
        check_copies(root, folder / "copies")
        check_refusals(root, folder)
        check_maps(job.address, root)


def check_lists(root: str, door: str, folder: Path) -> None:
    (listed,) = json.loads(run("ls", "--json")[0])
    assert (f"tw://{listed['address']}", listed["door"]) == (root, door)
    names = run("ls", root)[0].decode().split()
    assert names == [
        "checkpoints",
        "control",
        "model.safetensors",
        "optimizer",
        "params",
        "snapshots",
        "status",
    ]
    table = run("ls", "-l", f"{root}/params")[0].decode()
    for word in ("a.npy", "1200128", "float32", "[300, 1000]", "bfloat16"):
        assert word in table
    shown = run("stat", f"{root}/params/b.npy")[0].decode()
    assert "shape: [7]" in shown
    (told,) = json.loads(run("stat", "--json", f"{root}/params/b.npy")[0])
    assert told["version"] >= 2
    # A job of another host or user: its door, and the secret in a file.
    secret = folder / "secret"
    run("ls", "--save-secret", str(secret), root)
    assert secret.stat().st_mode & 0o777 == 0o600
    (folder / "other").mkdir(mode=0o700)
    elsewhere = {"XDG_RUNTIME_DIR": str(folder / "other")}
    found = run("cat", "--secret-file", str(secret), f"tw://{door}/status/version", **elsewhere)
    assert int(found[0]) >= told["version"]
    _, error = run("cat", f"tw://{door}/status/version", code=1, **elsewhere)
    assert "Permission denied" in error
    _, error = run("ls", root, code=2, **elsewhere)
    assert "Permission denied" in error


def check_copies(root: str, copies: Path) -> None:
    copies.mkdir()
    data, _ = run("cat", f"{root}/params/b.npy", f"{root}/status/version")
    assert data.startswith(b"\x93NUMPY")
    run("cp", f"{root}/params/b.npy", f"{root}/model.safetensors", str(copies))
    assert np.load(copies / "b.npy").shape == (7,)
    with safetensors.safe_open(copies / "model.safetensors", "np") as file:
        assert sorted(file.keys()) == ["a", "b", "h"]
    # All of one version.
    run("cp", "-r", f"{root}/params", str(copies / "params"))
    arrays = [np.load(copies / "params" / f"{name}.npy").ravel() for name in "ab"]
    assert len(set(np.concatenate(arrays).tolist())) == 1
    run("cp", "-r", root, str(copies / "whole"))
    found = sorted(str(each.relative_to(copies)) for each in (copies / "whole").rglob("*.npy"))
    assert found == [
        *(f"whole/optimizer/{name}/momentum_buffer.npy" for name in "abh"),
        *(f"whole/params/{name}.npy" for name in "abh"),
    ]
    assert int((copies / "whole/status/version").read_text()) > 2


def check_refusals(root: str, folder: Path) -> None:
    for command, action in (("ls", "access"), ("cat", "read"), ("stat", "stat")):
        code = 2 if command == "ls" else 1
        _, error = run(command, f"{root}/params/none.npy", code=code)
        assert error == (
            f"tensorwire {command}: cannot {action} '{root}/params/none.npy': "
            "No such file or directory\n"
        )
    _, error = run("cat", f"{root}/params", code=1)
    assert "Is a directory" in error
    _, error = run("cp", f"{root}/params", str(folder / "x"), code=1)
    assert "Is a directory: -r copies folders" in error
    _, error = run("cp", __file__, f"{root}/params/a.npy", code=1)
    assert "Read-only file system: this command copies from a job" in error
    _, error = run("cp", f"{root}/params/a.npy", f"{root}/params/b.npy", str(folder / "x"), code=1)
    assert "Not a directory" in error
    _, error = run("cat", "tw://user@127.0.0.1:1/x", code=2)
    assert "no user and no secret" in error
    _, error = run("stat", "--hold", f"{root}/params/a.npy", code=1)
    assert "can be mapped" in error
    # What a full disk, or a folder that cannot be written, leaves: what was there.
    full = folder / "full"
    full.write_text("kept")
    script = f"ulimit -f 1; exec {sys.executable} -m tensorwire cp {root}/params/a.npy {full}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, timeout=60, check=False)
    assert done.returncode != 0
    assert full.read_text() == "kept"
    for path in ("params/a.npy", "status/version"):
        command = f"{sys.executable} -m tensorwire cat {root}/{path} > /dev/full"
        done = subprocess.run(["bash", "-c", command], capture_output=True, timeout=60, check=False)
        assert done.returncode == 1
        assert done.stderr == b"tensorwire cat: cannot write: No space left on device\n"
    # What is no file is written to, and stays what it is; so does a link.
    pipe, link = folder / "pipe", folder / "link"
    os.mkfifo(pipe)
    with subprocess.Popen(["cat", pipe], stdout=subprocess.PIPE) as reading:
        run("cp", f"{root}/params/b.npy", str(pipe))
        assert reading.communicate(timeout=60)[0].startswith(b"\x93NUMPY")
    assert pipe.is_fifo()
    link.symlink_to(full)
    run("cp", f"{root}/params/b.npy", str(link))
    assert link.is_symlink()
    assert np.load(full).shape == (7,)


def check_maps(address: str, root: str) -> None:
    with JobReader(address) as reader, reader.sealed_model() as model:
        assert not model.is_copy  # the server's own memory
        check_sealed(model.path)
        with safetensors.safe_open(model.path, "pt") as file:
            tensor = file.get_tensor("a")
            assert file.metadata()["tensorwire.version"] == str(model.version)
        values = tensor.clone()
        assert (values == values[0, 0]).all()
        path = model.path
    assert (tensor == values).all()  # what is mapped stays
    assert not os.path.exists(path)
    # In another PID namespace the server's number may be that of any process.
    with JobReader(address) as reader, open(os.devnull, "rb") as other:
        snapshot = reader.snapshot()
        (mine,) = snapshot._copies
        snapshot._copies = [mine._replace(pid=os.getpid(), descriptor=other.fileno())]
        with snapshot.sealed() as model:
            assert model.is_copy
    with JobReader(address, transports=("tcp",)) as reader, reader.sealed_model() as model:
        assert model.is_copy
        check_sealed(model.path)
        with safetensors.safe_open(model.path, "np") as file:
            assert (file.get_tensor("a") == file.get_tensor("a")[0, 0]).all()
    command = [sys.executable, "-m", "tensorwire", "stat", "--json", "--hold"]
    command += [f"{root}/model.safetensors"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        text = ""
        while not text.rstrip().endswith("]"):
            text += process.stdout.readline()
        (told,) = json.loads(text)
        with safetensors.safe_open(told["path"], "np") as file:
            assert file.metadata()["tensorwire.version"] == str(told["version"])
        listed = run("ls", "-l", f"{root}/snapshots/{told['version']}")[0].decode()
        assert told["path"] in listed
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0


def check_sealed(path: str) -> None:
    """Checks that it cannot be written, in any way of opening it."""
    for flags in (os.O_RDONLY, os.O_RDWR):
        with contextlib.closing(os.fdopen(os.open(path, flags), "rb")) as file:
            seals = fcntl.fcntl(file, fcntl.F_GET_SEALS)
            assert seals & fcntl.F_SEAL_SHRINK
            assert seals & fcntl.F_SEAL_GROW
            with pytest.raises(PermissionError):
                mmap.mmap(file.fileno(), 4096, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    with open(path, "rb") as file:
        assert len(file.read(16)) == 16
    descriptor = os.open(path, os.O_RDWR)
    with contextlib.closing(os.fdopen(descriptor, "rb")), pytest.raises(PermissionError):
        os.pwrite(descriptor, b"x", 0)
