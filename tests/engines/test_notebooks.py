"""Kernels of Jupyter as workers: cells that fail, are interrupted and run again; restarts.

tests/torch/test_notebook.py has what needs no Jupyter.
"""

import os
import re
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from conftest import clean

jupyter_client = pytest.importorskip(
    "jupyter_client", reason="ipykernel is not installed: make test-engines"
)
pytest.importorskip("ipykernel", reason="ipykernel is not installed: make test-engines")

BEGIN = """
import os, sys
import torch
import tensorwire.torch as tw
torch.set_num_threads(1)

def step(rank=0):
    opt.zero_grad()
    model(torch.full((3, 4), rank + 1.0)).square().mean().backward()
    opt.step()
"""
MAKE = """
model = torch.nn.Linear(4, 2)
opt = tw.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model)
"""


class Kernel:
    """The process of a notebook."""

    def __init__(self, folder: Path, **environment: str) -> None:
        self.folder = folder
        # Sockets of the folder's own; their names must be short.
        self._manager = jupyter_client.KernelManager(
            transport="ipc", ip=str(folder / "k"), connection_file=str(folder / "k.json")
        )
        environ = {**clean(os.environ), "OMP_NUM_THREADS": "1", **environment}
        self._manager.start_kernel(env=environ, cwd=str(folder))
        self._connect()

    def _connect(self) -> None:
        self._client = self._manager.client()
        self._client.start_channels()
        self._client.wait_for_ready(timeout=60)

    def send(self, cell: str) -> str:
        """Begins with a cell."""
        return str(self._client.execute(cell))

    def result(self, sent: str, interrupt_at: str = "") -> str:
        """Returns what the cell prints, and the error that ends it, in a line: "Kind: text".

        With `interrupt_at` the cell is interrupted when it has printed that.
        """
        text = ""
        while True:
            message = self._client.get_iopub_msg(timeout=60)
            if message["parent_header"].get("msg_id") != sent:
                continue
            content = message["content"]
            if message["msg_type"] == "stream":
                text += content["text"]
                if interrupt_at and interrupt_at in text:
                    self._manager.interrupt_kernel()
                    interrupt_at = ""
            elif message["msg_type"] == "error":
                text += f"{content['ename']}: {content['evalue']}\n"
            elif content.get("execution_state") == "idle":
                return text

    def run(self, cell: str, interrupt_at: str = "") -> str:
        """Runs a cell, like `result`."""
        return self.result(self.send(cell), interrupt_at)

    def restart(self) -> None:
        """Kills the process; another one takes its place."""
        self._client.stop_channels()
        self._manager.restart_kernel(now=True)
        self._connect()

    def end(self, now: bool = False) -> None:
        """Ends it, by a message, or killing it."""
        self._client.stop_channels()
        self._manager.shutdown_kernel(now=now)


@pytest.fixture
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Kernel]]:
    made: list[Kernel] = []

    def start(**environment: str) -> Kernel:
        made.append(Kernel(tmp_path_factory.mktemp("n"), **environment))
        return made[-1]

    yield start
    for kernel in made:
        kernel.end(now=True)


def test_cells_of_one_kernel(kernels: Callable[..., Kernel]) -> None:
    kernel = kernels()
    assert kernel.run(BEGIN) == ""
    for _ in range(2):  # all cells are run again
        assert kernel.run("job = tw.init()") == ""
        assert kernel.run(MAKE) == ""
        for _ in range(2):
            made = "opt = tw.DistributedOptimizer(torch.optim.SGD(model.parameters()), model)"
            assert kernel.run(made) == ""
        text = kernel.run("for i in range(3):\n  step()\n  if i == 1: model(None)")
        assert "TypeError" in text
        # One statement: IPython compiles each by itself, and fails if it is interrupted there.
        text = kernel.run("if True:\n  print('begun', flush=True)\n  while True: step()", "begun")
        assert text.endswith("KeyboardInterrupt: \n"), text
        bias = kernel.run("step(); print(model.bias.tolist())")
        assert kernel.run("print(model.bias.tolist())") == bias
        assert kernel.run("step(); print(model.bias.tolist())") != bias
    assert "close() that job first" in kernel.run("tw.init(seed=3)")
    assert kernel.run("job.close(); job = tw.init(seed=3); print(job.seed)") == "3\n"
    assert kernel.run("step()").startswith("RuntimeError: this optimizer or its job was closed")
    kernel.restart()
    assert kernel.run(BEGIN + "job = tw.init()" + MAKE + "step(); print(job.rank)") == "0\n"
    started = time.monotonic()
    kernel.end()
    assert time.monotonic() - started < 10


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def servers_of(meeting: str) -> list[int]:
    """Servers whose environment has this."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            environ, command = (path / "environ").read_bytes(), (path / "cmdline").read_bytes()
        except OSError:
            continue
        if meeting.encode() in environ.split(b"\0") and b"tensorwire.torch.server" in command:
            found.append(int(path.name))
    return found


def test_two_kernels_of_one_job(kernels: Callable[..., Kernel]) -> None:
    """One is restarted in the middle of a step: the other one's cell ends, and they meet again."""
    meeting = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    meeting["TENSORWIRE_TEST_MARK"] = meeting["MASTER_PORT"]
    mark = f"TENSORWIRE_TEST_MARK={meeting['MASTER_PORT']}"
    both = [kernels(RANK=str(rank), **meeting) for rank in range(2)]

    def run(cell: str) -> list[str]:
        sent = [kernel.send(cell) for kernel in both]
        return [kernel.result(each) for kernel, each in zip(both, sent, strict=True)]

    assert run(BEGIN + "job = tw.init()" + MAKE) == ["", ""]
    assert run("tw.init()\nstep(job.rank)") == ["", ""]
    waiting, failed = (kernel.send("if job.rank: 1 / 0\nstep()") for kernel in both)
    assert both[1].result(failed).startswith("ZeroDivisionError")
    (server,) = servers_of(mark)
    both[1].restart()
    text = both[0].result(waiting)
    assert re.match(r"RuntimeError: worker 1 \(pid \d+\) was lost", text), text
    assert both[0].run("job.close()") == ""
    assert server not in servers_of(mark)
    both[0].restart()
    assert run(BEGIN + "job = tw.init()" + MAKE) == ["", ""]
    bias = run("step(job.rank); print(model.bias.tolist())")
    assert bias[0] == bias[1] != ""
    for kernel in both:
        kernel.end(now=True)
    deadline = time.monotonic() + 20
    while servers_of(mark):
        assert time.monotonic() < deadline, "a server outlives the kernels"
        time.sleep(0.05)


LAUNCH = """
from accelerate import notebook_launcher

def train():
    torch.set_num_threads(1)
    job = tw.init()
    rank = torch.full((1, 2), float(job.rank))
    model = torch.nn.Linear(2, 1)
    opt = tw.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model)
    model(rank).sum().backward()
    opt.step()
    with open(f"trained-{job.rank}-{job.size}", "w"):
        pass

def launch():
    notebook_launcher(train, num_processes=2, use_port=os.environ["PORT"])
"""


def test_workers_that_a_notebook_starts(kernels: Callable[..., Kernel]) -> None:
    """The workers are forks of the kernel, which has no job then, and may have had an error."""
    pytest.importorskip("accelerate", reason="Accelerate is not installed: make test-engines")
    kernel = kernels(PORT=free_port())
    kernel.run(BEGIN + LAUNCH + "1 / 0")
    for _ in range(2):
        text = kernel.run("job = tw.init(); launch()")
        assert "this process is a fork of process" in text
        assert "close() the job there before the fork" in text
        assert "Error" not in kernel.run("job.close(); launch()")
        for rank in range(2):
            (kernel.folder / f"trained-{rank}-2").unlink()
