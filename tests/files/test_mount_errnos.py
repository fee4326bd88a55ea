"""Every errno of the table in docs/files.md, from a real mount."""

import errno
import os
import re
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from files.jobs import JobAtWork
from files.mounts import MARKS, mounted
from files.outcomes import code_of, wait_until

pytestmark = [*MARKS, pytest.mark.slow]
LENT = 40 << 20

# What write(2) says to a program that a signal interrupts; Python would call it again.
INTERRUPTED = """
import ctypes, os, signal, sys
signal.signal(signal.SIGALRM, lambda *_: None)
file = os.open(sys.argv[1], os.O_WRONLY)
signal.setitimer(signal.ITIMER_REAL, 0.5)
libc = ctypes.CDLL(None, use_errno=True)
assert libc.write(file, b"1 100", 5) == -1
sys.exit(ctypes.get_errno())
"""


def in_the_table(repository: Path) -> set[int]:
    text = (repository / "docs/files.md").read_text()
    rows = re.findall(r"^\| (`E[^|]*) \|", text, re.MULTILINE)
    return {getattr(errno, name) for row in rows for name in re.findall(r"`(E[A-Z]+)`", row)}


def as_nobody(action: Callable[[], object]) -> int | None:
    """The error that another user gets."""
    os.seteuid(65534)
    try:
        return code_of(action)
    finally:
        os.seteuid(0)


def write(path: Path, data: bytes) -> int | None:
    """The error of a write into an open file, or else of its close."""
    descriptor = os.open(path, os.O_WRONLY | os.O_TRUNC | os.O_CREAT, 0o644)
    failed = code_of(lambda: os.write(descriptor, data))
    return failed or code_of(lambda: os.close(descriptor))


def without_memory(pid: int, action: Callable[[], int | None]) -> int | None:
    """The errors while a process can map next to nothing."""
    used = int(re.findall(r"VmSize:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())[0]) << 10
    before = resource.prlimit(pid, resource.RLIMIT_AS)
    resource.prlimit(pid, resource.RLIMIT_AS, (used + (1 << 20), before[1]))
    try:
        return action()
    finally:
        resource.prlimit(pid, resource.RLIMIT_AS, before)


def test_every_errno(repository: Path, folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    job = JobAtWork(folder, "--workers", "1", paused=True, TENSORWIRE_CHECKPOINT_MEMORY=str(LENT))
    found: dict[int, int | None] = {}
    try:
        with mounted(folder, job.address) as made:
            at = made.path
            control, saved, weight = at / "control", at / "checkpoints", at / "params/a.npy"
            # It makes no steps.
            found[errno.ETIMEDOUT] = write(control / "pause", b"1 0.2")
            program = [sys.executable, "-c", INTERRUPTED, str(control / "pause")]
            found[errno.EINTR] = subprocess.run(program, check=False, timeout=60).returncode
            found[errno.EROFS] = code_of(lambda: open(weight, "r+b"))
            command = [sys.executable, "-m", "tensorwire", "mount", str(at), job.address]
            again = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
            assert again.returncode == 1
            assert f"a job is mounted at {at} already: umount {at} first" in again.stderr
            job.go_on()
            assert write(control / "pause", b"1") is None
            version = int((control / "state").read_text().split()[1])
            # The table's order.
            found[errno.ENOENT] = code_of(lambda: open(at / "params/c.npy"))
            found[errno.ENOTDIR] = code_of(lambda: os.listdir(weight))
            found[errno.EISDIR] = code_of(lambda: open(at / "params", "w"))
            found[errno.EINVAL] = write(control / "pause", b"2")
            (saved / "two").mkdir()
            found[errno.EPERM] = code_of(lambda: os.mkdir(saved / "two/deeper"))
            found[errno.EEXIST] = code_of(lambda: os.mkdir(saved / "two"))
            (saved / "two/a").write_bytes(b"a")
            found[errno.EXDEV] = code_of(lambda: os.rename(saved / "two/a", saved / "b"))
            found[errno.EOPNOTSUPP] = code_of(
                lambda: os.rename(saved / "two/a", saved / "two/0.metadata")
            )
            found[errno.ESPIPE] = code_of(lambda: open(saved / "two/a", "ab"))
            found[errno.ENAMETOOLONG] = code_of(lambda: open(saved / ("n" * 256), "w"))
            found[errno.ENOSPC] = write(saved / "large", bytes(LENT + 1))
            found[errno.ENODATA] = code_of(lambda: os.getxattr(weight, "user.other"))
            found[errno.EFBIG] = write(control / "commit", b"x" * 4097)
            data = weight.read_bytes()
            not_finite = data[:-4] + np.float32(np.inf).tobytes()
            weight.write_bytes(not_finite)
            commit = f"version {version}".encode()
            found[errno.EDOM] = write(control / "commit", commit)
            found[errno.ESTALE] = write(control / "commit", f"version {version + 1}".encode())
            weight.write_bytes(data)
            assert write(control / "commit", commit) is None
            weight.write_bytes(data)
            found[errno.EBUSY] = write(control / "commit", commit)  # once in a pause
            top = os.open(at, os.O_RDONLY)  # whose path another user cannot go
            found[errno.EACCES] = as_nobody(
                lambda: os.open("control/pause", os.O_WRONLY, dir_fd=top)
            )
            assert as_nobody(lambda: os.close(os.open("control/pause", 0, dir_fd=top))) is None
            os.close(top)
            server = job.servers[0].pid
            found[errno.ENOMEM] = without_memory(
                server, lambda: write(saved / "one", bytes(16 << 20))
            )
            with open(at / "status/version") as file:
                found[errno.EBADF] = code_of(lambda: os.write(file.fileno(), b"1"))
            assert write(saved / "one", b"one") is None
            assert (saved / "one").read_bytes() == b"one"
            assert write(control / "commit", b"discard") is None
            assert write(control / "pause", b"0") is None
            wait_until(lambda: int((at / "status/version").read_text()) > version + 1)
            assert job.end() == 0
            found[errno.ENOTCONN] = code_of((at / "status/version").read_text)
        printed = capfd.readouterr().err
        for line in ("control/pause: Invalid argument: '2'", "control/commit: Stale file handle: "):
            assert f"tensorwire mount: {line}" in printed
        assert "params/c" not in printed  # that something is missing, programs ask all the time
        wrong = {errno.errorcode[code]: got for code, got in found.items() if got != code}
        assert not wrong
        assert found.keys() == in_the_table(repository)
    finally:
        job.process.terminate()  # where it is still paused
        job.process.wait(60)
