"""Jobs with workers that run no script, and programs that compute their gradients."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tensorwire.files import FileWorker, JobReader
from tensorwire.jobs.job_file import running_file_workers, running_servers

STEPS = 6

# A regression whose worker RANK has the samples of seed 1000 STEP + RANK.
SCRIPT = """
import math, os, pathlib, sys
import torch
import tensorwire.torch as tw
torch.set_num_threads(1)
job = tw.init()
torch.manual_seed(0)
model = torch.nn.Linear(5, 3)
opt = tw.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.1), model, OPTIONS)
for step in range(STEPS):
    pathlib.Path(f"step-{step}").touch()
    generator = torch.Generator().manual_seed(1000 * step + job.rank)
    x, y = torch.randn(8, 5, generator=generator), torch.randn(8, 3, generator=generator)
    opt.zero_grad()
    ((model(x) - y) ** 2).mean().backward()
    BEFORE
    opt.step()
    AFTER
if job.rank == 0:
    torch.save({name: value.clone() for name, value in model.state_dict().items()}, "model.pt")
"""


class FileJob:
    """A job of `tensorwire run` in a folder, which is also the user's runtime folder.

    Args:
        folder: of it.
        arguments: of the command, before the script.
        options, before, after: put into the script.
    """

    def __init__(
        self, folder: Path, *arguments: str, options: str = "", before: str = "", after: str = ""
    ) -> None:
        self.folder = folder
        script = SCRIPT.replace("OPTIONS", options).replace("STEPS", str(STEPS))
        script = script.replace("BEFORE", before).replace("AFTER", after)
        (folder / "script.py").write_text(script)
        self._errors = folder / "errors"
        with self._errors.open("wb") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tensorwire", "run", *arguments, "script.py"],
                cwd=folder,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                stderr=errors,
            )

    @property
    def errors(self) -> str:
        return self._errors.read_text()

    def address(self) -> str:
        return self.address_of(self.process)

    @staticmethod
    def address_of(process: subprocess.Popen[Any]) -> str:
        """Waits until there is a file worker; returns the address of server 0."""
        deadline = time.monotonic() + 90
        while not (running_file_workers() and running_servers()):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)
        return running_servers()[0].address

    def worker(self, rank: int) -> FileWorker:
        """Waits until the job has its optimizer; returns a file worker."""
        return self.worker_of(self.process, self.address(), rank)

    @staticmethod
    def worker_of(process: subprocess.Popen[Any], address: str, rank: int) -> FileWorker:
        """The file worker of a job that another program has started."""
        deadline = time.monotonic() + 90
        while True:
            try:
                return FileWorker(address, rank)
            except OSError:
                assert process.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.02)

    def model(self) -> dict[str, Any]:
        """The model that it has trained."""
        assert self.process.wait(90) == 0, self.errors
        found: dict[str, Any] = torch.load(self.folder / "model.pt")
        return found

    def kill_host(self) -> None:
        """Kills the process that takes the gradients."""
        os.kill(running_file_workers()[0].pid, signal.SIGKILL)

    def end(self) -> None:
        self.process.terminate()
        self.process.wait(30)


class Client:
    """Computes what a Python worker of this rank would."""

    def __init__(self, job: FileJob, rank: int) -> None:
        self.worker, self.reader = job.worker(rank), JobReader(job.address())
        self.rank = rank
        self.model = torch.nn.Linear(5, 3)

    def gradients(self, step: int) -> dict[str, np.ndarray[Any, Any]]:
        """From the parameters as they are."""
        for name, parameter in self.model.named_parameters():
            data = self.reader.read(self.reader.store(0).tensor(name)).data
            values = np.frombuffer(data, np.float32).reshape(parameter.shape)
            parameter.data = torch.from_numpy(values.copy())
        generator = torch.Generator().manual_seed(1000 * step + self.rank)
        x, y = torch.randn(8, 5, generator=generator), torch.randn(8, 3, generator=generator)
        self.model.zero_grad()
        ((self.model(x) - y) ** 2).mean().backward()
        return {name: p.grad.numpy() for name, p in self.model.named_parameters()}

    def step(self, step: int, version: int) -> int:
        """Computes and commits a step; returns the version that it was for."""
        version = self.worker.wait(version, 60)
        for name, gradient in self.gradients(step).items():
            self.worker.write(name, gradient)
        self.worker.commit(version)
        return version

    def close(self) -> None:
        self.worker.close()
        self.reader.close()


_references: dict[object, dict[str, Any]] = {}


def reference(folder: Path, workers: int, **script: str) -> dict[str, Any]:
    """The result of this many Python workers; computed once."""
    key = workers, *sorted(script.items())
    if key not in _references:
        inner = folder / "reference"
        inner.mkdir()
        _references[key] = FileJob(inner, "--workers", str(workers), **script).model()
    return _references[key]


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)
