"""`control/…`: a job is paused, its parameters are written, and only by its own user."""

import concurrent.futures
import contextlib
import errno
import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from files.jobs import JobAtWork, training
from files.outcomes import code_of, wait_until

from tensorwire.errors import TensorwireError
from tensorwire.files import JobReader
from tensorwire.files.filesystem import TensorwireFileSystem
from tensorwire.jobs.job_file import RunningServer, running_servers
from tensorwire.parameters.hold import PAUSE

pytestmark = pytest.mark.timeout(240)

# It trains so many steps, edits parameters behind one of them if EDIT says which, and may wait.
SCRIPT = """
import os, pathlib, time
import torch
import tensorwire.torch as tw
torch.set_num_threads(1)
job = tw.init()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 3))
model.frozen = torch.nn.Parameter(torch.ones(3), requires_grad=False)
opt = tw.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.1), model, max_norm=1.0)
job.track(model=model, optimizer=opt)
data = torch.utils.data.TensorDataset(torch.randn(160, 5), torch.randn(160, 3))
edit, step = int(os.environ.get("EDIT", "0")), 0
for epoch in job.epochs(40):
    for x, y in job.loader(data, batch_size=8, shuffle=True):
        pathlib.Path(f"ready-{job.rank}").touch()
        ((model(x) - y) ** 2).mean().backward()
        opt.step()
        opt.zero_grad()
        if not pathlib.Path("hurry").exists():
            time.sleep(0.02)
        step += 1
        if step == edit:
            with tw.edit(model), torch.no_grad():
                model[0].weight.mul_(0.5)
                model[2].bias.fill_(7.0)
if job.rank == 0:
    torch.save({name: value.clone() for name, value in model.state_dict().items()}, "model.pt")
opt.close()
job.close()
"""


class Job:
    """A job of SCRIPT.

    Attributes:
        files: of it.
    """

    def __init__(self, folder: Path, *arguments: str, edit: int = 0) -> None:
        self.folder = folder
        (folder / "script.py").write_text(SCRIPT)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tensorwire", "run", *arguments, "script.py"],
            cwd=folder,
            env={**os.environ, "OMP_NUM_THREADS": "1", "EDIT": str(edit)},
        )
        while not (folder / "ready-0").exists():
            assert self.process.poll() is None
            time.sleep(0.01)
        self.servers: list[RunningServer] = running_servers()
        self.files = TensorwireFileSystem(self.servers[0].address, use_listings_cache=False)

    def pause(self) -> int:
        self.files.pipe("control/pause", b"1\n")
        state, version = self.files.cat("control/state").split()
        assert state == b"paused"
        return int(version)

    def go_on(self) -> None:
        self.files.pipe("control/pause", b"0\n")

    def model(self) -> dict[str, Any]:
        (self.folder / "hurry").touch()
        assert self.process.wait(120) == 0
        self.files.close()
        found: dict[str, Any] = torch.load(self.folder / "model.pt")
        return found


@contextlib.contextmanager
def running(folder: Path, *arguments: str, edit: int = 0) -> Iterator[Job]:
    job = Job(folder, *arguments, edit=edit)
    try:
        yield job
    finally:
        job.process.terminate()
        job.process.wait(30)


def array(files: TensorwireFileSystem, path: str) -> Any:
    return np.load(io.BytesIO(files.cat(path)))


def npy(values: Any) -> bytes:
    data = io.BytesIO()
    np.save(data, values)
    return data.getvalue()


def write_edit(files: TensorwireFileSystem) -> None:
    """Writes the same values as SCRIPT's own edit."""
    weight = array(files, "params/0.weight.npy")
    files.pipe("params/0.weight.npy", npy(weight * np.float32(0.5)))
    files.pipe("params/2.bias.npy", npy(np.full(3, 7, np.float32)))


def reference(folder: Path, version: int, workers: int) -> dict[str, Any]:
    """The result if the script itself edits its parameters when a version is in place."""
    inner = folder / "reference"
    inner.mkdir()
    with running(inner, "--workers", str(workers), edit=version - 2) as job:
        return job.model()


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(("--transports", "tcp"), id="tcp"),
        pytest.param(("--servers", "2", "--on-death=end"), id="not-durable"),
    ],
)
def test_written_parameters_are_an_edit(folder: Path, arguments: tuple[str, ...]) -> None:
    with running(folder, "--workers", "2", *arguments) as job:
        version = job.pause()
        time.sleep(0.2)
        assert int(job.files.cat("status/version")) == version
        assert job.files.cat("control/pause") == b"1\n"
        before = array(job.files, "params/0.weight.npy")
        write_edit(job.files)
        assert job.files.cat("control/commit") == b"0.weight.npy\n2.bias.npy\n"
        assert (array(job.files, "params/0.weight.npy") == before).all()  # not before it goes on
        job.files.pipe("control/commit", f"version {version}\n".encode())
        job.go_on()
        wait_until(lambda: int(job.files.cat("status/version")) > version)
        assert job.files.cat("control/state").startswith(b"running")
        found = job.model()
    assert same(found, reference(folder, version, 2))


@pytest.mark.slow
def test_what_is_refused(folder: Path) -> None:
    with running(folder, "--workers", "1") as job:
        files = job.files
        bias = npy(np.zeros(3, np.float32))
        assert code_of(lambda: files.pipe("params/2.bias.npy", bias)) == errno.EROFS
        assert code_of(lambda: files.pipe("control/commit", b"version 2")) == errno.EROFS
        assert not files.info("params/2.bias.npy")["mode"] & 0o222
        version = job.pause()
        assert files.info("params/2.bias.npy")["mode"] & 0o222 == 0o200
        assert not files.info("params/frozen.npy")["mode"] & 0o222
        good, wrong = f"version {version}".encode(), f"version {version + 1}".encode()
        for code, path, data in (
            (errno.EINVAL, "control/pause", b"2"),
            (errno.EINVAL, "control/pause", b" "),
            (errno.EINVAL, "control/pause", b"1 -5"),
            (errno.EINVAL, "control/pause", b"1 nan"),
            (errno.EINVAL, "control/pause", b"\xff"),
            (errno.EFBIG, "control/pause", b"1" * 5000),
            (errno.EINVAL, "control/commit", b"now"),
            (errno.EINVAL, "control/commit", b"nan"),
            (errno.EINVAL, "control/commit", b"version -1"),
            (errno.ENODATA, "control/commit", good),
            (errno.EINVAL, "control/snapshot", b"keep"),
            (errno.ENOENT, "control/snapshot", b"release 7"),
            (errno.EINVAL, "control/scale", b" "),
            (errno.EINVAL, "control/scale", b"workers many"),
            (errno.EINVAL, "control/scale", b"drain 0"),
            (errno.EPERM, "control/scale", b"servers 2"),
            (errno.EROFS, "control/state", b"running"),
            (errno.EROFS, "control/other", b"1"),
            (errno.EROFS, "params/other.npy", bias),
            (errno.EROFS, "params/frozen.npy", bias),
            (errno.EROFS, "optimizer/2.bias/exp_avg.npy", bias),
            (errno.EROFS, "model.safetensors", bias),
            (errno.EFBIG, "params/2.bias.npy", bytes(1 << 16)),
        ):
            assert (path, data[:20], code_of(lambda p=path, d=data: files.pipe(p, d))) == (
                path, data[:20], code,
            )  # fmt: skip

        def commit(text: bytes, data: bytes) -> int | None:
            files.pipe("control/commit", b"discard")
            files.pipe("params/2.bias.npy", data)
            return code_of(lambda: files.pipe("control/commit", text))

        assert commit(wrong, bias) == errno.ESTALE
        assert commit(good, bias[:-1]) == errno.ENODATA
        assert commit(good, bias[:60]) == errno.ENODATA
        assert commit(good, bias + b"x") == errno.EFBIG
        assert commit(good, npy(np.zeros(3))) == errno.EINVAL
        assert commit(good, npy(np.zeros(4, np.float32))) == errno.EINVAL
        assert commit(good, b"x" * len(bias)) == errno.EINVAL
        assert commit(good, npy(np.full(3, np.inf, np.float32))) == errno.EDOM
        assert commit(good + b"\nnan\n", npy(np.full(3, np.nan, np.float32))) is None
        assert commit(good, bias) == errno.EBUSY  # once in a pause
        assert code_of(job.go_on) == errno.EBUSY  # what is written would be gone
        files.pipe("control/commit", b"discard")
        job.go_on()
        wait_until(lambda: np.isnan(array(files, "params/2.bias.npy")).all())


@pytest.mark.slow
def test_only_the_owner_controls(
    job: JobAtWork, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process with the secret for reading sees the files, and takes snapshots."""
    door, secret = job.servers[0].door, job.servers[0].reading_secret
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(elsewhere))
    files = TensorwireFileSystem(door, secret=secret)
    assert files.cat("control/state").startswith(b"running ")
    assert files.cat("control/scale") == b"workers 1\nservers 1\n"
    assert code_of(lambda: files.pipe("control/pause", b"1")) == errno.EACCES
    assert code_of(lambda: files.pipe("control/pause", b"0")) == errno.EACCES
    assert code_of(lambda: files.pipe("control/scale", b"workers 2")) == errno.EACCES
    files.pipe("control/snapshot", b"take")
    files.pipe("control/snapshot", b"take values")
    held = [line.split()[1] for line in files.cat("control/snapshot").splitlines()]
    assert 1 <= len(held) <= 2
    assert files.exists(f"snapshots/{held[0].decode()}/params/a.npy")
    for _ in range(2):  # as often as it was taken: both may be of one version
        version = files.cat("control/snapshot").split()[1]
        files.pipe("control/snapshot", b"release " + version)
    assert files.cat("control/snapshot") == b""
    files.close()


@pytest.mark.slow
def test_other_modes_are_not_paused(folder: Path) -> None:
    with training(folder, "--workers", "1", MODE="async", PAUSE="0.01") as job:
        files = TensorwireFileSystem(job.address)
        assert code_of(lambda: files.pipe("control/pause", b"1")) == errno.EOPNOTSUPP
        assert files.cat("control/state").startswith(b"running ")
        files.close()


@pytest.mark.slow
def test_a_job_that_makes_no_step_is_not_paused(job: JobAtWork) -> None:
    job.stop()
    files = TensorwireFileSystem(job.address)
    assert code_of(lambda: files.pipe("control/pause", b"1 0.3")) == errno.ETIMEDOUT
    assert files.cat("control/state").startswith(b"running ")
    job.go_on()
    before = int(files.cat("status/version"))
    wait_until(lambda: int(files.cat("status/version")) > before)
    files.close()


@pytest.mark.slow
def test_servers_that_leave_take_nothing_that_is_written(folder: Path) -> None:
    """Afterwards all of it is there, or nothing; a share's new owner knows the next version."""
    with running(folder, "--workers", "1", "--servers", "2:2") as job:
        files, version = job.files, job.pause()
        files.pipe("params/2.bias.npy", npy(np.full(3, 7, np.float32)))
        assert files.cat("control/scale") == b"workers 1\nservers 2\n"
        files.pipe("control/scale", b"servers 1")
        assert files.cat("control/scale") == b"workers 1\nservers 1\n"  # of two shares
        assert files.cat("control/commit") == b"2.bias.npy\n"
        files.pipe("params/0.bias.npy", npy(np.full(4, 9, np.float32)))
        assert files.cat("control/commit") == b"0.bias.npy\n2.bias.npy\n"
        commit = f"version {version}".encode()
        assert code_of(lambda: files.pipe("control/commit", commit)) == errno.ETIMEDOUT
        files.pipe("control/commit", b"discard")
        job.go_on()
        version = job.pause()
        assert files.cat("control/commit") == b""
        write_edit(files)
        files.pipe("control/commit", f"version {version}".encode())
        job.go_on()
        job.pause()
        assert abs(array(files, "params/2.bias.npy") - 7).max() < 2  # a few steps later
        job.go_on()


@pytest.mark.slow
def test_several_wait_for_a_pause(job: JobAtWork) -> None:
    """A process that stops waiting takes nothing from others; ending the pause waits for none."""
    job.stop()
    files = [TensorwireFileSystem(job.address, skip_instance_cache=True) for _ in range(2)]
    threads = concurrent.futures.ThreadPoolExecutor(2)

    def asked(text: bytes) -> concurrent.futures.Future[int | None]:
        found = threads.submit(code_of, lambda: files[0].pipe("control/pause", text))
        wait_until(lambda: int(_pause_word(files[1])) % 2 == 1)
        return found

    try:
        waiting = asked(b"1 100")
        assert code_of(lambda: files[1].pipe("control/pause", b"1 0.2")) == errno.ETIMEDOUT
        assert not waiting.done()
        job.go_on()
        assert waiting.result(60) is None
        assert files[0].cat("control/state").startswith(b"paused ")
        job.pause()
        files[1].pipe("control/pause", b"0")
        for each in files:  # of the same process, and of another one
            waiting = asked(b"1 100")
            files[0].pipe("checkpoints/meanwhile", b"1")
            each.pipe("control/pause", b"0")
            assert waiting.result(20) == errno.EBUSY
        job.go_on()
    finally:
        threads.shutdown()
        for each in files:
            each.close()


def _pause_word(files: TensorwireFileSystem) -> int:
    found = np.zeros(1, np.uint64)
    peer, _ = files.tree.owner.first()
    peer.region(PAUSE)[:8].read(found).wait(10)
    return int(found[0])


DYING = """
import os, signal, sys
import numpy as np
from tensorwire.files import owner
from tensorwire.files.filesystem import TensorwireFileSystem

def die(self, store, servers, values):
    half = {index: data[: len(data) // 2] for index, data in values.items()}
    move(self, store, servers, half)
    os.kill(os.getpid(), signal.SIGKILL)

move, owner.JobOwner._move = owner.JobOwner._move, die
files = TensorwireFileSystem(sys.argv[1])
with files.open("params/0.weight.npy", "wb") as file:
    np.save(file, np.full((4, 5), 9, np.float32))
files.pipe("control/commit", b"version " + sys.argv[2].encode())
"""


@pytest.mark.slow
def test_a_dying_writer_changes_nothing(folder: Path) -> None:
    with running(folder, "--workers", "2") as job:
        version = job.pause()
        process = subprocess.run(
            [sys.executable, "-c", DYING, job.servers[0].address, str(version)], check=False
        )
        assert process.returncode == -signal.SIGKILL
        write_edit(job.files)  # of this process, in the same pause
        job.files.pipe("control/commit", f"version {version}\n".encode())
        job.go_on()
        found = job.model()
    assert same(found, reference(folder, version, 2))


@pytest.mark.slow
@pytest.mark.parametrize("who", ["server-0", "server-1", "worker"])
def test_killed_while_paused(folder: Path, who: str) -> None:
    """A replaced process finds the pause, and the written values."""
    with running(folder, "--workers", "2", "--servers", "2", "--on-death=restart") as job:
        version = job.pause()
        write_edit(job.files)
        job.files.pipe("control/commit", f"version {version}\n".encode())
        status = job.files.tree.reader.status()
        pids = {"worker": status["workers"][1]["pid"]}
        pids |= {f"server-{each.index}": each.pid for each in job.servers}
        os.kill(pids[who], signal.SIGKILL)
        wait_until(lambda: not os.path.exists(f"/proc/{pids[who]}"))

        def is_paused() -> bool:
            try:
                with JobReader(job.servers[0].address) as reader:
                    return reader.store().held_version() == version
            except (OSError, LookupError, TensorwireError):  # it is about to be replaced
                return False

        wait_until(is_paused)
        time.sleep(0.5)
        assert is_paused()
        wait_until(lambda: code_of(job.go_on) is None)
        found = job.model()
    assert same(found, reference(folder, version, 2))


@pytest.mark.slow
def test_workers_come_and_go_by_a_file(folder: Path) -> None:
    with running(folder, "--workers", "2:2") as job:
        files = job.files
        assert code_of(lambda: files.pipe("control/scale", b"workers 0")) == errno.EPERM
        wait_until(lambda: code_of(lambda: files.pipe("control/scale", b"workers 1")) is None)
        assert files.cat("control/scale") == b"workers 1\nservers 1\n"
        version = job.pause()  # now one worker computes both slices
        write_edit(files)
        files.pipe("control/commit", f"version {version}\n".encode())
        job.go_on()
        found = job.model()
    assert same(found, reference(folder, version, 2))
