"""Workers whose gradients come from files: the bits of a Python worker, and what is refused."""

import contextlib
import errno
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from files.file_workers import STEPS, Client, FileJob, reference, same

from tensorwire.files import FileWorker
from tensorwire.files.npy import npy_header
from tensorwire.jobs.job_file import running_file_workers

pytestmark = pytest.mark.timeout(240)


@contextlib.contextmanager
def running(folder: Path, *arguments: str, **script: str) -> Iterator[FileJob]:
    job = FileJob(folder, *arguments, **script)
    try:
        yield job
    finally:
        job.end()


@contextlib.contextmanager
def refused_with(*codes: int) -> Iterator[None]:
    """The block is refused with one of these errors."""
    with pytest.raises(OSError, match="Errno") as caught:
        yield
    assert caught.value.errno in codes, caught.value


def train(job: FileJob, client: Client, first: int = 0, version: int = 1) -> None:
    for step in range(first, STEPS):
        version = client.step(step, version)


@pytest.mark.slow
def test_several_with_sums_servers_and_clipping(folder: Path) -> None:
    script = {
        "options": "max_norm=0.5, ema=0.9",
        "after": "assert job.mean(float(step)) == step; job.barrier()",
    }
    with running(
        folder,
        "--workers",
        "1",
        "--file-workers",
        "2",
        "--servers",
        "2",
        "--on-death=end",
        **script,
    ) as job:
        clients = [Client(job, 1), Client(job, 2)]
        versions = [1, 1]
        for step in range(STEPS):
            versions = [c.step(step, v) for c, v in zip(clients, versions, strict=True)]
        for client in clients:
            client.close()
        found = job.model()
    assert same(found, reference(folder, 3, **script))


@pytest.mark.slow
def test_steps_of_two_versions(folder: Path) -> None:
    script = {
        "before": "opt.synchronize()",
        "after": "\n    with tw.edit(model): model.weight.data.mul_(0.5)",
    }
    with running(folder, "--workers", "1", "--file-workers", "1", **script) as job:
        client, version = Client(job, 1), 1
        while version < 3 * STEPS - 1:
            version = client.worker.wait(version, 60)
            # Of each step three versions: its gradients, its values, the edit. What is committed
            # before the edit is not used, and is made anew.
            with contextlib.suppress(OSError):
                for name, gradient in client.gradients((version - 1) // 3).items():
                    client.worker.write(name, gradient)
                client.worker.commit(version)
        client.close()
        found = job.model()
    assert same(found, reference(folder, 2, **script))


@pytest.mark.slow
def test_what_is_refused_and_goes_on(folder: Path) -> None:
    """Whatever was refused, the bits are those of a Python worker."""
    with running(folder, "--workers", "1", "--file-workers", "1") as job:
        client = Client(job, 1)
        worker = client.worker
        version = worker.wait(1, 60)
        check_late_answers(worker, version)
        check_more_programs(job)
        check_refusals(worker, version, client.gradients(0))
        train(job, client, 1, version)
        client.close()
        found = job.model()
        with refused_with(errno.ENOTCONN):
            worker.commit(version)
    assert same(found, reference(folder, 2))


def check_late_answers(worker: FileWorker, version: int) -> None:
    """Makes an answer come too late, which is none to the next request."""
    process = next(each.pid for each in running_file_workers())
    assert worker._channel is not None
    os.kill(process, signal.SIGSTOP)
    wake = threading.Timer(0.5, os.kill, (process, signal.SIGCONT))
    try:
        worker._channel.settimeout(0.2)
        with refused_with(errno.ETIMEDOUT):
            worker.commit(version - 1)
        wake.start()
        with refused_with(errno.EINVAL):
            worker.commit_text("rubbish")
        with refused_with(errno.EINVAL):
            worker.commit_text("absent " + 30_000 * "é")
    finally:
        wake.cancel()
        os.kill(process, signal.SIGCONT)


def check_more_programs(job: FileJob) -> None:
    """Connects more programs than a worker lets in."""
    with contextlib.ExitStack() as stack:
        others = [stack.enter_context(job.worker(1)) for _ in range(63)]
        for _ in range(70):  # nor is anything left of those that were refused
            with refused_with(errno.EBUSY):
                FileWorker(job.address(), 1)
        others[0].close()
        stack.enter_context(job.worker(1))
        with refused_with(errno.EBUSY):
            FileWorker(job.address(), 1)


def check_refusals(worker: FileWorker, version: int, right: dict[str, Any]) -> None:
    """Commits what is refused, and then the right gradients."""

    def refused(code: int, *, at: int = version, **options: object) -> None:
        with refused_with(code):
            worker.commit(at, **options)  # type: ignore[arg-type]

    def raw(name: str, data: bytes) -> None:
        memory, index = worker.memory, worker.memory.index(name)
        memory.truncate(index, 0, name)
        memory.write(index, 0, data, name)

    header = npy_header("float32", (3, 5))
    refused(errno.ENODATA)  # nothing was written
    worker.write("bias", right["bias"])
    refused(errno.ENODATA)  # half of it
    raw("weight", header + bytes(59))
    refused(errno.ENODATA)
    raw("weight", header + bytes(61))
    refused(errno.EFBIG)
    with refused_with(errno.EFBIG):
        raw("weight", header + bytes(10_000))
    raw("weight", npy_header("float64", (3, 5)) + bytes(60))
    refused(errno.EINVAL)
    raw("weight", npy_header("float32", (5, 3)) + bytes(60))
    refused(errno.EINVAL)
    raw("weight", b"not an array at all" + bytes(100))
    refused(errno.EINVAL)
    raw("weight", b"\x93NUMPY\x01\x00" + b"\x20\x00" + b"[" * 32)
    refused(errno.EINVAL)
    worker.write("weight", np.full((3, 5), np.nan))
    refused(errno.EDOM)
    worker.write("weight", right["weight"])
    refused(errno.ESTALE, at=version - 1)
    refused(errno.ESTALE, at=version + 1)
    refused(errno.EINVAL, absent=("weight",))
    refused(errno.EINVAL, absent=("nobody",))
    for text in ("", "version", "version x", f"version {version}\nsamples 0", "rubbish"):
        with refused_with(errno.EINVAL):
            worker.commit_text(text)
    with pytest.raises(ValueError, match="shape"):
        worker.write("weight", right["weight"].T)
    with pytest.raises(LookupError, match="no tensor 'nobody' gets gradients"):
        worker.write("nobody", right["weight"])
    worker.commit(version)
    with refused_with(errno.EBUSY, errno.ESTALE):
        worker.commit(version)


@pytest.mark.slow
def test_by_fsspec(folder: Path) -> None:
    with running(folder, "--workers", "1", "--file-workers", "1") as job:
        client = Client(job, 1)
        fs = fsspec.filesystem("tw", address=job.address())
        assert fs.ls("grads", detail=False) == ["grads/1"]
        names = {each.rpartition("/")[2] for each in fs.ls("grads/1", detail=False)}
        assert names == {"commit", "version", "weight.npy", "bias.npy"}
        version = 1
        for step in range(STEPS):
            version = client.worker.wait(version, 60)
            assert int(fs.cat_file("grads/1/version")) == version
            for name, gradient in client.gradients(step).items():
                with fs.open(f"grads/1/{name}.npy", "wb") as file:
                    np.save(file, gradient)
            with refused_with(errno.ESTALE):
                fs.pipe_file("grads/1/commit", b"version 1")
            if step == 0:
                for path in ("params/weight.npy", "grads/1/version", "grads/1/other", "grads/2/x"):
                    with refused_with(errno.EROFS):
                        fs.open(path, "wb")
            fs.pipe_file("grads/1/commit", f"version {version}\nsamples 1".encode())
        fs.close()
        client.close()
        found = job.model()
    assert same(found, reference(folder, 2))


@pytest.mark.slow
def test_the_process_is_killed(folder: Path) -> None:
    """Twice each, after it has committed and before."""
    # Worker 0 waits if it is early, so that what was committed lies there at the kill.
    hold = "while pathlib.Path('hold').exists(): pass"
    with running(folder, "--workers", "1", "--file-workers", "1", before=hold) as job:
        client, version = Client(job, 1), 1
        for step in range(STEPS):
            committed = step < 3
            if 0 < step < 5:
                version = client.worker.wait(version, 60)
                (folder / "hold").touch()
                for name, gradient in client.gradients(step).items():
                    client.worker.write(name, gradient)
                if committed:
                    client.worker.commit(version)
                job.kill_host()
                (folder / "hold").unlink()
                client.worker.close()
                client.worker = job.worker(1)
                if not committed:
                    assert client.worker.version == version
                    client.worker.commit(version)
            else:
                version = client.step(step, version)
        client.close()
        found = job.model()
    assert same(found, reference(folder, 2))


@pytest.mark.slow
def test_what_a_job_cannot_have(folder: Path) -> None:
    with running(folder, "--workers", "1", "--file-workers", "1", options='apply="worker"') as job:
        assert job.process.wait(90) != 0
        assert "worker 0 applies this optimizer" in job.errors
