"""Mounts of jobs, and what tests do with them."""

import contextlib
import errno
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

MARKS = [
    pytest.mark.timeout(240),
    pytest.mark.fuse,
    pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount what /dev/fuse answers"),
]


class Mounted:
    """A mount process; what it prints goes to `output`, a descriptor, if there is one."""

    def __init__(self, folder: Path, address: str, output: int | None = None) -> None:
        self.path = folder / "mnt"
        self.path.mkdir(exist_ok=True)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tensorwire", "mount", str(self.path), address],
            cwd=folder,
            stdout=output,
            stderr=output,
        )
        deadline = time.monotonic() + 60
        while not os.path.ismount(self.path):
            assert self.process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            self.process.wait(30)
        while os.path.ismount(self.path) or _is_stale(self.path):
            subprocess.run(["umount", "-l", str(self.path)], check=False)


def _is_stale(path: Path) -> bool:
    try:
        os.stat(path)
    except OSError as error:
        return error.errno == errno.ENOTCONN
    return False


@contextlib.contextmanager
def mounted(folder: Path, address: str, output: int | None = None) -> Iterator[Mounted]:
    made = Mounted(folder, address, output)
    try:
        yield made
    finally:
        made.end()


def run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout
