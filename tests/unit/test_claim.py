"""A worker is one process: a second one that claims its rank is refused, the first goes on."""

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tensorwire.errors import UnavailableError
from tensorwire.jobs.claim import drop_claim, hold_claim

CLAIM = """
from tensorwire.jobs.claim import hold_claim
hold_claim("a job", 1, "RANK")
print("held", flush=True)
input()
"""


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """The folder of the claims."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    yield tmp_path / "tensorwire"
    drop_claim()


def descriptors() -> set[str]:
    names = set()
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # of the listing itself
            names.add(os.readlink(f"/proc/self/fd/{descriptor}"))
    return names


def test_a_rank_is_one_process() -> None:
    command = [sys.executable, "-c", CLAIM]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == b"held\n"
        for _ in range(2):  # the first is not disturbed
            with pytest.raises(RuntimeError, match=f"worker 1 of this job is process {first.pid} "):
                hold_claim("a job", 1, "RANK")
        hold_claim("a job", 2, "RANK")
        hold_claim("another job", 1, "RANK")
        first.communicate(b"\n", timeout=30)
    hold_claim("a job", 1, "RANK")
    hold_claim("a job", 1, "RANK")  # again, in the same process


def test_a_forked_child_keeps_no_claim() -> None:
    """Else data workers that outlive a worker would keep its rank."""
    hold_claim("a job", 1, "RANK")
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        os.read(reader, 1)
        os._exit(0)
    try:
        drop_claim()
        command = [sys.executable, "-c", CLAIM]
        done = subprocess.run(command, input=b"\n", capture_output=True, timeout=30)
        assert done.stdout == b"held\n", done.stderr
    finally:
        os.write(writer, b"x")
        os.waitpid(child, 0)
        os.close(reader)
        os.close(writer)


def test_a_claim_is_nothing_that_strangers_can_reach(folder: Path) -> None:
    """Any user could connect to a socket, and leave data there that blocks its close."""
    before = descriptors()
    hold_claim("a job", 1, "RANK")
    (made,) = descriptors() - before
    assert Path(made).parent == folder
    assert folder.stat().st_mode & 0o777 == 0o700
    assert Path(made).read_text() == str(os.getpid())
    drop_claim()
    assert os.listdir(folder) == []


def test_what_killed_processes_left_is_removed(folder: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", CLAIM], stdout=subprocess.PIPE, stdin=-1
    ) as killed:
        assert killed.stdout is not None
        assert killed.stdout.readline() == b"held\n"
        killed.kill()
    assert len(os.listdir(folder)) == 1
    command = [sys.executable, "-c", CLAIM.replace("1, ", "2, ")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"held\n"
        (held,) = os.listdir(folder)
        hold_claim("a job", 1, "RANK")  # that of the killed one
        assert held in os.listdir(folder)
        assert len(os.listdir(folder)) == 2
        other.send_signal(signal.SIGKILL)


def test_who_removes_what_was_left_is_no_holder(folder: Path) -> None:
    """The cleaner has the lock for a moment. A worker that starts just then must not be refused."""
    hold_claim("a job", 1, "RANK")
    (name,) = os.listdir(folder)
    drop_claim()
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    with (folder / name).open("w") as file:
        file.write(str(ended.pid))
        file.flush()
        fcntl.flock(file, fcntl.LOCK_EX)

        def remove() -> None:
            (folder / name).unlink()
            fcntl.flock(file, fcntl.LOCK_UN)

        timer = threading.Timer(0.2, remove)
        timer.start()
        hold_claim("a job", 1, "RANK")
        timer.join()
    assert (folder / name).read_text() == str(os.getpid())


def test_a_folder_without_locks_is_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(
        UnavailableError, match=f"{folder}/claim-.*Operation not supported.*set XDG"
    ):
        hold_claim("a job", 1, "RANK")
