"""The jobs that `bench files` starts; and steps of one whose second worker is a program in C.

That worker has files, beside it is one of Python. Two jobs with the same model live at the same
time, one with each, and take turns.
"""

from __future__ import annotations

import contextlib
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from tensorwire.bench.measuring import add_rows, take_turns
from tensorwire.bench.rows import Report
from tensorwire.errors import UnavailableError
from tensorwire.files import FileWorker, JobReader
from tensorwire.jobs.job_file import running_servers
from tensorwire_benchmarks.jobs import LaunchedJob, run_command, script

from .files_mount import OURS, PYTHON, compile_c, mounted

_SOURCE = Path(__file__).with_name("files_step.c")
_STEP_S = 30.0  # for one that does not come
_LOOK_S = 5e-4


@contextlib.contextmanager
def running_job(
    folder: Path, run: Sequence[str], size_bytes: int, count: int = 1, end_s: float = 60.0
) -> Iterator[str]:
    """A job of `files_worker.py`; the address of its server.

    Args:
        folder: of the job.
        run: the arguments of `tensorwire run`.
        size_bytes: of a parameter.
        count: of parameters.
        end_s: how long it may take to end itself, before it is terminated.

    Raises:
        PairError: it has not started.
    """
    words = script("files_worker.py", folder, size_bytes, count)
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


class SteppedJob:
    """A job that trains when it may."""

    def __init__(self, folder: Path, reader: JobReader) -> None:
        self._train, self._reader = folder / "train", reader

    def step_s(self, window_s: float) -> float:
        """Seconds per step of a window."""
        self._train.touch()
        try:
            self._next_version()  # those that began before are not counted
            first, started = self._next_version(), time.perf_counter()
            while time.perf_counter() - started < window_s:
                time.sleep(_LOOK_S)
            last = self._next_version()
            return (time.perf_counter() - started) / (last - first)
        finally:
            self._train.unlink()

    def _next_version(self) -> int:
        """Waits until a step is made."""
        store = self._reader.store()
        before, deadline = store.version(), time.monotonic() + _STEP_S
        while (now := store.version()) == before:
            if time.monotonic() > deadline:
                raise UnavailableError("the job of the bench makes no steps")
            time.sleep(_LOOK_S)
        return now


@contextlib.contextmanager
def _job(folder: Path, size_bytes: int, by_files: bool) -> Iterator[SteppedJob]:
    folder.mkdir()
    workers = ["--workers", "1", "--file-workers", "1"] if by_files else ["--workers", "2"]
    with contextlib.ExitStack() as stack:
        address = stack.enter_context(running_job(folder, workers, size_bytes, end_s=0.0))
        reader = stack.enter_context(JobReader(address))
        if by_files:
            _await_worker(address)
            program = folder / "files_step"
            compile_c(_SOURCE, program)
            stack.enter_context(mounted(folder / "mount", address))
            command = [str(program), str(folder / "mount"), "1"]
            process = stack.enter_context(subprocess.Popen(command))
            stack.callback(process.terminate)
        yield SteppedJob(folder, reader)


def _await_worker(address: str) -> None:
    """Until there are the files of the worker of rank 1."""
    deadline = time.monotonic() + _STEP_S
    while True:
        try:
            return FileWorker(address, 1).close()
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)


def measure_steps(report: Report, case: str, size_bytes: int, pairs: int, window_s: float) -> None:
    """Time per step with each worker, window by window.

    Args:
        report: gets the rows.
        case: their name.
        size_bytes: of the model.
        pairs: of windows.
        window_s: of each.
    """
    with tempfile.TemporaryDirectory(dir="/dev/shm") as made, contextlib.ExitStack() as stack:
        jobs = {
            system: stack.enter_context(_job(Path(made) / system, size_bytes, system == OURS))
            for system in (OURS, PYTHON)
        }
        steps = take_turns(
            {name: partial(job.step_s, window_s) for name, job in jobs.items()}, pairs
        )
    notes = {OURS: "a file worker in C by a mount", PYTHON: "a worker of Python"}
    told = {system: f"the second worker is {note}" for system, note in notes.items()}
    add_rows(report, case, size_bytes, steps, told)
