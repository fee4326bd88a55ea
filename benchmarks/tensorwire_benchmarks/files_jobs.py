"""The jobs that `bench files` starts and reads."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

from tensorwire.jobs.job_file import running_servers
from tensorwire_benchmarks.jobs import LaunchedJob, run_command, script


@contextlib.contextmanager
def running_job(
    folder: Path, run: Sequence[str], name: str, *arguments: object, end_s: float = 60.0
) -> Iterator[str]:
    """A job of one of the scripts beside this file; the address of its server.

    It is there when it has made `folder/ready`, and should end when `folder/end` is made.

    Args:
        folder: the script's first argument.
        run: the arguments of `tensorwire run`.
        name: of the script.
        arguments: the script's others.
        end_s: how long it may take to end itself, before it is terminated.

    Raises:
        PairError: it has not started.
    """
    words = script(name, folder, *arguments)
    before = {each.address for each in running_servers()}
    with LaunchedJob([*run_command(*run), *words], folder) as job:
        job.until((folder / "ready").exists, "a job of the bench has not started")
        try:
            (address,) = {
                each.address
                for each in running_servers()
                if each.address not in before and str(folder) in each.command
            }
            yield address
        finally:
            (folder / "end").touch()
            with contextlib.suppress(subprocess.TimeoutExpired):
                job.process.wait(end_s)
