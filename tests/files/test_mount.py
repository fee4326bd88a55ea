"""A running job as a mounted folder, with the programs that people use on folders."""

import errno
import fcntl
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from files.file_workers import STEPS, Client, FileJob, reference, same
from files.jobs import JobAtWork
from files.mounts import MARKS, Mounted, mounted, run
from files.outcomes import code_of, wait_until

pytestmark = MARKS
JOB = {"momentum": 0.5}


@pytest.mark.slow
def test_tools_read_it(job: JobAtWork, made: Mounted, tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors")
    job.stop()
    at = made.path
    assert {each.name for each in at.iterdir()} == {
        "checkpoints", "control", "model.safetensors", "optimizer", "params", "snapshots",
        "status",
    }  # fmt: skip
    version = int((at / "status/version").read_text())
    weight = np.load(at / "params/a.npy", mmap_mode="r")
    assert weight.shape == (300, 1000)
    value = float(weight[0, 0])
    assert (weight == value).all()
    with safetensors.safe_open(at / "model.safetensors", framework="np") as file:
        assert (file.get_tensor("a") == value).all()
    run("cp", "-r", str(at), str(tmp_path / "copy"))
    assert (np.load(tmp_path / "copy/params/a.npy") == value).all()
    run("tar", "-cf", str(tmp_path / "all.tar"), "-C", str(at), "params", "status")
    assert len(run("find", str(at), "-type", "f").splitlines()) == 20
    read = run("sh", "-c", f"dd if={at}/params/a.npy bs=4099 2>/dev/null | sha256sum")
    assert read == run("sh", "-c", f"cat {tmp_path}/copy/params/a.npy | sha256sum")
    found = os.stat(at / "params/b.npy")
    assert (found.st_mode & 0o7777, found.st_uid) == (0o444, os.geteuid())
    names = {name.rpartition(".")[2] for name in os.listxattr(at / "params/b.npy")}
    assert names == {"dtype", "shape", "version"}
    assert int(os.getxattr(at / "params/b.npy", "user.tensorwire.version")) == version
    refused = {
        errno.EROFS: (
            lambda: open(at / "params/a.npy", "r+b"),
            lambda: open(at / "new", "w"),
            lambda: os.mkdir(at / "params/x"),
            lambda: os.unlink(at / "status/version"),
            lambda: os.rename(at / "status", at / "other"),
            lambda: os.symlink("x", at / "link"),
            lambda: os.chmod(at / "params/a.npy", 0o777),
            lambda: os.truncate(at / "params/a.npy", 0),
            lambda: os.setxattr(at / "params/a.npy", "user.x", b"1"),
        ),
        errno.ENOENT: (lambda: open(at / "params/c.npy"), lambda: os.listdir(at / "no")),
        errno.ENOTDIR: (lambda: open(at / "params/a.npy/x"),),
        errno.EISDIR: (lambda: open(at / "params", "w"),),
        errno.ENODATA: (lambda: os.getxattr(at / "params/a.npy", "user.x"),),
        errno.ENAMETOOLONG: (lambda: open(at / ("n" * 5000)),),
    }
    for code, actions in refused.items():
        for number, action in enumerate(actions):
            assert (number, code_of(action)) == (number, code)
    # What is open keeps its version, and who opens anew has another one.
    before = found.st_mtime
    job.go_on()
    deadline = time.monotonic() + 30
    while np.load(at / "params/a.npy")[0, 0] < value + 3:
        assert time.monotonic() < deadline
    assert (weight == value).all()
    assert os.stat(at / "params/b.npy").st_mtime > before
    for _ in range(30):
        now = np.load(at / "params/a.npy", mmap_mode="r")
        assert (now == now[0, 0]).all()


@pytest.mark.slow
def test_ends_of_mount_and_job(folder: Path) -> None:
    job = JobAtWork(folder, "--workers", "1", PAUSE="0.01")
    try:
        with mounted(folder, job.address) as made:
            version = int((made.path / "status/version").read_text())
            held = os.open(made.path / "params/a.npy", os.O_RDONLY)
            made.process.send_signal(signal.SIGKILL)
            made.process.wait(30)
            assert code_of(lambda: os.read(held, 1)) == errno.ENOTCONN
            assert code_of(lambda: os.close(held)) == errno.ENOTCONN
            assert code_of(lambda: os.listdir(made.path)) == errno.ENOTCONN
            made.end()
        for _ in range(5):
            with mounted(folder, job.address) as made:
                assert int((made.path / "status/version").read_text()) > version
                assert len(os.listdir(made.path / "params")) == 3
        made = Mounted(folder, job.address)
        job.end()
        assert code_of(lambda: (made.path / "status/version").read_text()) == errno.ENOTCONN
        assert code_of(lambda: os.listdir(made.path)) == errno.ENOTCONN
        run("umount", str(made.path))
        assert made.process.wait(30) == 0
    finally:
        job.end()


def mounts_at(path: Path) -> int:
    with open("/proc/self/mountinfo") as told:
        return sum(line.split()[4] == str(path) for line in told)


# Each refusal is another one than that before it, and printed by the mount.
REFUSED = """
import errno, sys
for number in range(300):
    try:
        with open(sys.argv[1], "w") as file:
            file.write(f"wrong {number}")
    except OSError as error:
        assert error.errno == errno.EINVAL, error
    else:
        sys.exit("it was taken")
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["pipe", "terminal"])
def test_a_mount_answers_while_nobody_reads_what_it_prints(
    job: JobAtWork, tmp_path: Path, kind: str
) -> None:
    ours, theirs = os.pipe() if kind == "pipe" else pty.openpty()
    try:
        if kind == "pipe":
            fcntl.fcntl(theirs, fcntl.F_SETPIPE_SZ, 4096)
        with mounted(tmp_path, job.address, theirs) as made:
            at = made.path
            command = [sys.executable, "-c", REFUSED, str(at / "control/pause")]
            subprocess.run(command, timeout=60, check=True)
            assert int(run("cat", str(at / "status/version"))) >= 0
            made.process.terminate()
            assert made.process.wait(30) == 0
            assert not os.path.ismount(at)
    finally:
        os.close(ours)
        os.close(theirs)


@pytest.mark.slow
def test_a_mount_that_ends_leaves_those_of_others(job: JobAtWork, tmp_path: Path) -> None:
    path = tmp_path / "mnt"
    path.mkdir()
    run("mount", "-t", "tmpfs", "own", str(path))
    (path / "mine").touch()
    with mounted(tmp_path, job.address) as covered:
        wait_until(lambda: mounts_at(path) == 2)
        run("mount", "-t", "tmpfs", "cover", str(path))
        covered.process.terminate()  # it stays until somebody unmounts it
        assert covered.process.wait(30) == 0
        assert mounts_at(path) == 3
        run("umount", str(path))
        assert mounts_at(path) == 2
        # What nobody answers any more is named, and not taken for a folder that is not there.
        command = [sys.executable, "-m", "tensorwire", "mount", str(path), job.address]
        again = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert again.returncode == 1
        assert "already: umount" in again.stderr
        run("umount", str(path))
        another = Mounted(tmp_path, job.address)
        wait_until(lambda: mounts_at(path) == 2)
        run("umount", str(path))
        assert another.process.wait(30) == 0
        assert mounts_at(path) == 1
        assert os.listdir(path) == ["mine"]
    assert mounts_at(path) == 0


@pytest.mark.slow
def test_poll_wakes_with_a_version(job: JobAtWork, made: Mounted) -> None:
    job.stop()
    file = os.open(made.path / "status/version", os.O_RDONLY)
    poll = select.poll()
    poll.register(file, select.POLLIN)
    before = int(os.pread(file, 20, 0))
    assert poll.poll(300) == []  # nothing follows
    job.go_on()
    assert poll.poll(60_000) == [(file, select.POLLIN)]
    assert int(os.pread(file, 20, 0)) > before
    assert poll.poll(60_000) == [(file, select.POLLIN)]
    os.close(file)


@pytest.mark.slow
def test_gradients_are_written(folder: Path) -> None:
    job = FileJob(folder, "--workers", "1", "--file-workers", "1")
    try:
        client = Client(job, 1)
        with mounted(folder, job.address()) as made:
            at, version = made.path / "grads/1", 1
            for step in range(STEPS):
                version = client.worker.wait(version, 60)
                assert int((at / "version").read_text()) == version
                for name, gradient in client.gradients(step).items():
                    np.save(at / f"{name}.npy", gradient)
                if step == 0:
                    _is_refused(at, version)
                    for name, gradient in client.gradients(step).items():
                        np.save(at / f"{name}.npy", gradient)
                with open(at / "commit", "w") as file:
                    file.write(f"version {version}\n")
                    file.flush()
                    os.fsync(file.fileno())
            client.close()
            found = job.model()
        assert same(found, reference(folder, 2))
    finally:
        job.end()


def _is_refused(at: Path, version: int) -> None:
    """Faults in gradients are reported by fsync of `commit`, and too many bytes by write."""

    def commit(text: str) -> int | None:
        with open(at / "commit", "w") as file:
            file.write(text)
            file.flush()
            return code_of(lambda: os.fsync(file.fileno()))

    weight = (at / "weight.npy").read_bytes()
    assert commit("") == errno.EINVAL
    assert commit(f"version {version + 1}") == errno.ESTALE
    (at / "weight.npy").write_bytes(weight[:-1])
    assert commit(f"version {version}") == errno.ENODATA
    (at / "weight.npy").write_bytes(weight + b"x")
    assert commit(f"version {version}") == errno.EFBIG
    assert code_of(lambda: (at / "weight.npy").write_bytes(weight + bytes(1 << 20))) == errno.EFBIG
    (at / "weight.npy").write_bytes(weight[:-4] + b"\xff\xff\xff\x7f")
    assert commit(f"version {version}") == errno.EDOM
    assert code_of(lambda: (at / "other.npy").write_bytes(weight)) == errno.EROFS


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["c", "sh"])
def test_examples_train_beside_python(repository: Path, folder: Path, kind: str) -> None:
    examples = repository / "examples"
    command = ["sh", str(examples / "linear_by_files.sh")]
    if kind == "c":
        compiler = shutil.which("cc")
        if compiler is None:
            pytest.skip("no C compiler")
        program = folder / "linear"
        run(compiler, "-Wall", "-Werror", "-o", str(program), f"{examples}/linear_by_files.c")
        command = [str(program)]
    errors = folder / "errors"
    with errors.open("w") as file:
        job = subprocess.Popen(
            [
                sys.executable, "-m", "tensorwire", "run", "--workers", "1", "--file-workers", "1",
                str(examples / "linear_by_files.py"),
            ],
            cwd=folder, stdout=subprocess.PIPE, stderr=file, text=True,
        )  # fmt: skip
    try:
        address = FileJob.address_of(job)
        FileJob.worker_of(job, address, 1).close()
        with mounted(folder, address) as made:
            printed = run(*command, str(made.path), "1")
            out, _ = job.communicate(timeout=90)
            assert job.returncode == 0, errors.read_text()
        numbers = [float(each) for each in re.findall(r"-?\d+\.\d+", out)]
        assert numbers[:3] == pytest.approx([2, -3, 1], abs=0.01), out
        assert printed in ("100 steps\n", "101 steps\n")  # the last one may be of no use
    finally:
        job.terminate()
        job.wait(30)
