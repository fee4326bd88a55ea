"""Jobs whose parameters tell their step, so that a mixture of versions is seen."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from tensorwire.jobs.job_file import RunningServer, running_servers

# Every element of every parameter is the number of steps so far: SGD adds 1 with each.
SCRIPT = """
import os, pathlib, time
import torch
import tensorwire.torch as tw
torch.set_num_threads(1)
rows, pause = int(os.environ.get("ROWS", "300")), float(os.environ.get("PAUSE", "0"))
mode = os.environ.get("MODE", "sync")
job = tw.init(mode=mode)
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a = torch.nn.Parameter(torch.zeros(rows, 1000))
        self.b = torch.nn.Parameter(torch.zeros(7))
        self.h = torch.nn.Parameter(torch.zeros(5, 4, dtype=torch.bfloat16))
    def forward(self):
        return -(self.a.sum() + self.b.sum() + self.h.sum().float())
model = Model()
opt = tw.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0, momentum=MOMENTUM), model)
pathlib.Path(f"ready-{job.rank}").touch()
while True:
    opt.zero_grad()
    model().backward()
    opt.step()
    if pause:
        time.sleep(pause)
    while pathlib.Path("pause").exists() and not pathlib.Path("go").exists():
        pathlib.Path("waits").touch()
        time.sleep(0.01)
    over = pathlib.Path("go").exists()
    if over if mode == "async" else job.mean(float(over)) > 0:
        break
opt.close()
job.close()
"""

ON_ONE_CORE = """
import os, sys
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
os.execv(sys.argv[1], sys.argv[1:])
"""


class JobAtWork:
    """A job of `tensorwire run` in a folder of its own.

    Attributes:
        servers: what they tell readers of this host.

    Args:
        paused: it waits after its first step until `go_on`.
        one_core: each server computes with one thread, so that nothing goes on when that stops.
    """

    def __init__(
        self,
        folder: Path,
        *arguments: str,
        momentum: float = 0.0,
        paused: bool = False,
        one_core: bool = False,
        **environ: str,
    ) -> None:
        self.folder = folder
        if paused:
            self.pause()
        (folder / "script.py").write_text(SCRIPT.replace("MOMENTUM", str(momentum)))
        command = [sys.executable, "-m", "tensorwire", "run", *arguments, "script.py"]
        if one_core:
            command = [sys.executable, "-c", ON_ONE_CORE, *command]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **environ}
        self.process = subprocess.Popen(command, cwd=folder, env=environment)
        self.await_file("ready-0")
        self.servers: list[RunningServer] = running_servers()

    @property
    def address(self) -> str:
        return self.servers[0].address

    def await_file(self, name: str) -> None:
        deadline = time.monotonic() + 90
        while not (self.folder / name).exists():
            assert self.process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def pause(self) -> None:
        (self.folder / "pause").touch()

    def stop(self) -> None:
        """Returns when it waits after a step, until `go_on`."""
        (self.folder / "waits").unlink(missing_ok=True)
        self.pause()
        self.await_file("waits")

    def go_on(self) -> None:
        (self.folder / "pause").unlink()

    def end(self) -> int:
        (self.folder / "go").touch()
        return self.process.wait(90)


@contextlib.contextmanager
def training(folder: Path, *arguments: str, **options: object) -> Iterator[JobAtWork]:
    job = JobAtWork(folder, *arguments, **options)  # type: ignore[arg-type]
    try:
        yield job
        assert job.end() == 0
    finally:
        if job.process.poll() is None:
            job.process.send_signal(signal.SIGTERM)
            job.process.wait(60)
