"""A job that is paused, and whose parameters are written, by the programs of a shell."""

import errno
import os
import select
import signal
import subprocess
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from files.file_workers import STEPS, Client, FileJob, reference, same
from files.jobs import JobAtWork
from files.mounts import MARKS, Mounted, mounted, run
from files.outcomes import code_of, wait_until

from tensorwire.jobs.job_file import running_servers

pytestmark = [*MARKS, pytest.mark.slow]


def version_of(at: Path) -> int:
    return int((at / "status/version").read_text())


def test_a_shell_pauses_and_writes(made: Mounted, tmp_path: Path) -> None:
    at = made.path
    state = os.open(at / "control/state", os.O_RDONLY)
    assert os.read(state, 100).startswith(b"running ")
    poll = select.poll()
    poll.register(state, select.POLLIN)
    run("sh", "-c", f"echo 1 > {at}/control/pause")
    while poll.poll(60_000) and not os.pread(state, 100, 0).startswith(b"paused "):
        pass
    version = int(os.pread(state, 100, 0).split()[1])
    assert version_of(at) == version
    before = np.load(at / "params/a.npy")
    np.save(tmp_path / "new.npy", np.full((300, 1000), 5000, np.float32))
    run("cp", str(tmp_path / "new.npy"), str(at / "params/a.npy"))
    with open(at / "params/b.npy", "r+b") as file:  # one element of it
        file.seek(-4, os.SEEK_END)
        file.write(np.float32(9000).tobytes())
        file.flush()
        file.seek(-8, os.SEEK_END)
        assert file.read() == np.array([before[0, 0], 9000], np.float32).tobytes()
    assert (np.load(at / "params/a.npy") == before).all()
    wrong = subprocess.run(
        ["sh", "-c", f"/bin/echo 2 > {at}/control/pause"], check=False, capture_output=True
    )
    assert b"Invalid argument" in wrong.stderr
    late = f"/bin/echo version {version + 1} > {at}/control/commit"
    refused = subprocess.run(["sh", "-c", late], check=False, capture_output=True)
    assert b"Stale file handle" in refused.stderr
    assert (at / "control/commit").read_text() == "a.npy\nb.npy\n"
    run("sh", "-c", f"echo version {version} > {at}/control/commit")
    run("sh", "-c", f"echo 0 > {at}/control/pause")
    wait_until(lambda: version_of(at) > version + 3)
    a, b = np.load(at / "params/a.npy"), np.load(at / "params/b.npy")
    assert (a >= 5000).all()
    assert b[-1] >= 9000 > b[0]
    assert code_of(lambda: open(at / "params/a.npy", "r+b")) == errno.EROFS
    os.close(state)


def test_who_is_interrupted_does_not_pause(job: JobAtWork, made: Mounted) -> None:
    job.stop()
    began = time.monotonic()
    process = subprocess.Popen(
        ["sh", "-c", f"echo 1 100 > {made.path}/control/pause"], stderr=subprocess.DEVNULL
    )
    time.sleep(1)
    process.send_signal(signal.SIGINT)
    assert process.wait(20) != 0
    assert time.monotonic() - began < 20
    before = version_of(made.path)
    job.go_on()
    wait_until(lambda: version_of(made.path) > before + 2)


def test_who_waits_for_a_stopped_server_holds_nobody_up(folder: Path) -> None:
    """Eight readers wait, and gradients are committed meanwhile."""
    job = FileJob(folder, "--workers", "1", "--file-workers", "1")
    server = None
    try:
        client = Client(job, 1)
        with mounted(folder, job.address()) as made:
            at, version = made.path / "grads/1", 1
            for step in range(STEPS):
                version = client.worker.wait(version, 60)
                gradients = client.gradients(step)
                readers = []
                if step == 2:
                    server = running_servers()[0].pid
                    os.kill(server, signal.SIGSTOP)
                    files = [made.path / f"status/{name}" for name in ("workers", "job.json")] * 4
                    readers = [threading.Thread(target=each.read_text) for each in files]
                    for each in readers:
                        each.start()
                    time.sleep(0.5)
                began = time.monotonic()
                for name, gradient in gradients.items():
                    np.save(at / f"{name}.npy", gradient)
                with open(at / "commit", "w") as file:
                    file.write(f"version {version}\n")
                    file.flush()
                    os.fsync(file.fileno())
                assert time.monotonic() - began < 4
                if server is not None:
                    os.kill(server, signal.SIGCONT)
                    server = None
                for each in readers:
                    each.join(30)
                    assert not each.is_alive()
            client.close()
            found = job.model()
        assert same(found, reference(folder, 2))
    finally:
        if server is not None:
            os.kill(server, signal.SIGCONT)
        job.end()
