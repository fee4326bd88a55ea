"""Starts the jobs of `bench files`, and measures steps with a file worker in C.

Two jobs with the same model live at the same time and take turns: the second worker of one is the
program in C, the second worker of the other is in Python.
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
from tensorwire.files import FileWorker
from tensorwire.jobs.job_file import running_servers
from tensorwire_benchmarks.jobs import LinkedJob, run_command, script

from .files_mount import OURS, PYTHON, compile_c, mounted

_SOURCE = Path(__file__).with_name("files_step.c")
_STEP_S = 30.0  # the longest wait for the file worker


@contextlib.contextmanager
def running_job(
    folder: Path, run: Sequence[str], workers: int, size_bytes: int, count: int = 1
) -> Iterator[tuple[LinkedJob, str]]:
    """Runs a job of `job_worker.py`; yields it with the address of its server.

    Args:
        folder: of the job.
        run: the arguments of `tensorwire run`.
        workers: the number of Python workers.
        size_bytes: the size of a parameter.
        count: the number of parameters.

    Raises:
        PairError: it has not started.
    """
    words = script("job_worker.py", LinkedJob.ADDRESS, "sgd", count, size_bytes)
    before = {each.address for each in running_servers()}
    with LinkedJob([*run_command(*run), *words], folder, workers) as job:
        (address,) = {
            each.address
            for each in running_servers()
            if each.address not in before and str(folder) in each.command
        }
        yield job, address


def step_s(job: LinkedJob, window_s: float) -> float:
    """Returns seconds per step over about `window_s`, after two steps that are not counted."""

    def turn(steps: int) -> float:
        answers = job.turn(steps=steps, compute_s=0.0, backward=True)
        return max(float(answer["seconds"]) for answer in answers) / steps

    return turn(max(1, int(window_s / turn(2))))


@contextlib.contextmanager
def _job(folder: Path, size_bytes: int, by_files: bool) -> Iterator[LinkedJob]:
    folder.mkdir()
    run = ["--workers", "1", "--file-workers", "1"] if by_files else ["--workers", "2"]
    with contextlib.ExitStack() as stack:
        job, address = stack.enter_context(
            running_job(folder, run, 1 if by_files else 2, size_bytes)
        )
        if by_files:
            _await_worker(address)
            program = folder / "files_step"
            compile_c(_SOURCE, program)
            stack.enter_context(mounted(folder / "mount", address))
            command = [str(program), str(folder / "mount"), "1"]
            process = stack.enter_context(subprocess.Popen(command))
            stack.callback(process.terminate)
        yield job


def _await_worker(address: str) -> None:
    """Waits until the files of the worker of rank 1 exist."""
    deadline = time.monotonic() + _STEP_S
    while True:
        try:
            return FileWorker(address, 1).close()
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)


def measure_steps(report: Report, case: str, size_bytes: int, pairs: int, window_s: float) -> None:
    """Measures the time per step with each kind of worker, in turns.

    Args:
        report: gets the rows.
        case: the name of the case.
        size_bytes: the size of the model.
        pairs: the number of turns of each kind.
        window_s: seconds of a turn.
    """
    with tempfile.TemporaryDirectory(dir="/dev/shm") as made, contextlib.ExitStack() as stack:
        jobs = {
            system: stack.enter_context(_job(Path(made) / system, size_bytes, system == OURS))
            for system in (OURS, PYTHON)
        }
        steps = take_turns(
            {name: partial(step_s, job, window_s) for name, job in jobs.items()}, pairs
        )
    notes = {OURS: "a file worker in C by a mount", PYTHON: "a worker of Python"}
    told = {system: f"the second worker is {note}" for system, note in notes.items()}
    add_rows(report, case, size_bytes, steps, told)
