"""The jobs that `bench files` starts and reads."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from tensorwire.errors import UnavailableError
from tensorwire.membership import running_servers

_START_S = 120.0


@contextlib.contextmanager
def running_job(
    folder: Path, run: Sequence[str], script: str, *arguments: object, end_s: float = 60.0
) -> Iterator[str]:
    """A job of one of the scripts beside this file; the address of its server.

    It is there when it has made `folder/ready`, and should end when `folder/end` is made.

    Args:
        folder: the script's first argument.
        run: the arguments of `tensorwire run`.
        script: its name.
        arguments: the script's others.
        end_s: how long it may take to end itself, before it is terminated.

    Raises:
        UnavailableError: it has not started.
    """
    path = Path(__file__).with_name(script)
    command = [sys.executable, "-m", "tensorwire", "run", *run, str(path), str(folder)]
    command += [str(each) for each in arguments]
    before = {each.address for each in running_servers()}
    errors = folder / "errors"
    with errors.open("w") as file, subprocess.Popen(command, stderr=file) as process:
        try:
            deadline = time.monotonic() + _START_S
            while not (folder / "ready").exists():
                if process.poll() is not None or time.monotonic() > deadline:
                    told = errors.read_text()[-1000:]
                    raise UnavailableError(f"a job of the bench has not started: {told}")
                time.sleep(0.05)
            mine = [
                each
                for each in running_servers()
                if each.address not in before and str(folder) in each.command
            ]
            yield mine[0].address
        finally:
            (folder / "end").touch()
            try:
                process.wait(end_s)
            except subprocess.TimeoutExpired:
                process.terminate()
