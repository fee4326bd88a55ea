"""Training on two hosts while the network between them fails, and while processes of it die."""

import os
import re
import secrets
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import hosts
import pytest
from hosts import Host, Hosts

WHY_NOT = hosts.missing()
pytestmark = [
    pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT)),
    pytest.mark.timeout(300),
]

SCRIPT = """
import ctypes, hashlib, os, sys, time
ctypes.CDLL(None).prctl(1, 9)  # ends with torchrun, whatever ends that
import torch
from torch.utils.data import TensorDataset
import tensorwire.torch as tw


def say(*words):  # in one write: another process writes to the same pipe
    os.write(1, (" ".join(map(str, words)) + chr(10)).encode())

torch.set_num_threads(1)
say("ready", os.getpid())
if len(sys.argv) > 2:  # a file that lets it go on
    while not os.path.exists(sys.argv[2]):
        time.sleep(0.01)
    # As on a host that was started anew, where the worker of before holds no claim to its rank.
    tw.job.discovery.hold_claim = lambda *_: None
job = tw.init()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(30, 300), torch.nn.Tanh(), torch.nn.Linear(300, 3))
opt = torch.optim.Adam(model.parameters(), lr=1e-3)
opt = tw.DistributedOptimizer(opt, model)
data = torch.randn(2400, 30, generator=torch.Generator().manual_seed(5))
for epoch in job.epochs(int(sys.argv[1])):
    for number, (x,) in enumerate(job.loader(TensorDataset(data), 4, shuffle=True)):
        model(x).square().mean().backward()
        opt.step()
        opt.zero_grad()
        if epoch == 0 and number == 20:
            say("training", job.rank, os.getpid())
digest = hashlib.sha256()
for parameter in model.parameters():
    digest.update(parameter.detach().numpy().tobytes())
say("done", job.rank, digest.hexdigest())
"""
EPOCHS = 2  # of 300 steps with two slices
SOON_S = 5.0
PATIENCE_S = 120.0  # for a busy machine, which imports torch slowly


class Process:
    """A command on a host, and its lines as they come."""

    def __init__(self, host: Host, command: Sequence[str], **environment: str) -> None:
        self.process = subprocess.Popen(
            ["ip", "netns", "exec", host.name, *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        )
        self.lines: list[str] = []
        self._more = threading.Condition()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                with self._more:
                    self.lines.append(line)
                    self._more.notify_all()

    def text(self) -> str:
        return "".join(self.lines)

    def line(self, pattern: str, within_s: float = PATIENCE_S) -> re.Match[str]:
        """The first line that has the pattern, when it is there."""

        def find() -> re.Match[str] | None:
            return next(filter(None, (re.search(pattern, line) for line in self.lines)), None)

        with self._more:
            self._more.wait_for(find, within_s)
            found = find()
            assert found, f"no {pattern!r} within {within_s:g} s:\n{self.text()}"
            return found

    def end(self, within_s: float = PATIENCE_S) -> int:
        """The exit code."""
        code = self.process.wait(within_s)
        self._reader.join(within_s)
        return code

    def kill(self) -> None:
        self.process.kill()
        self.end()


class Job:
    """Processes that end with the test."""

    def __init__(self, pair: Hosts, folder: Path) -> None:
        self.pair = pair
        self.processes: list[Process] = []
        self.script = folder / "script.py"
        self.script.write_text(SCRIPT)

    def start(self, host: Host, command: Sequence[str], **environment: str) -> Process:
        process = Process(host, command, TENSORWIRE_TRANSPORTS="tcp", **environment)
        self.processes.append(process)
        return process

    def torchrun(self, epochs: int, workers: int = 1, **environment: str) -> list[Process]:
        """One agent per host."""
        port = 20000 + secrets.randbelow(20000)
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2"]
        command += [f"--nproc-per-node={workers}", f"--master-addr={self.pair[0].address}"]
        command += [f"--master-port={port}"]
        return [
            self.start(
                host, [*command, f"--node-rank={i}", str(self.script), str(epochs)], **environment
            )
            for i, host in enumerate(self.pair)
        ]

    def server(self, host: Host, secret: str) -> str:
        """Starts the only server of two workers; its address."""
        path = self.script.with_name("address")
        command = [sys.executable, "-m", "tensorwire.torch.server", "--index=0", "--workers=2"]
        command += [f"--listen={host.address}:0", "--address-fd=3"]
        shell = f"exec {shlex.join(command)} 3>{shlex.quote(str(path))}"
        process = self.start(host, ["sh", "-c", shell], TENSORWIRE_SECRET=secret)
        deadline = time.monotonic() + 60
        while not (path.exists() and path.read_text().endswith("\n")):
            assert process.process.poll() is None, process.text()
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return path.read_text().strip()

    def alone(self, epochs: int, slices: int) -> str:
        """The digest of one process that computes all slices."""
        command = [sys.executable, str(self.script), str(epochs)]
        process = self.start(self.pair[0], command, TENSORWIRE_SLICES=str(slices))
        assert process.end() == 0, process.text()
        return process.line("^done 0 (.*)", 0).group(1)


@pytest.fixture(scope="module")
def pair() -> Iterator[Hosts]:
    with hosts.two_hosts() as made:
        yield made


@pytest.fixture
def job(pair: Hosts, tmp_path: Path) -> Iterator[Job]:
    made = Job(pair, tmp_path)
    yield made
    for process in made.processes:
        process.kill()
    hosts.restore(pair)


@pytest.fixture(scope="module")
def expected(pair: Hosts, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The result of EPOCHS epochs of two slices on one host."""
    return Job(pair, tmp_path_factory.mktemp("alone")).alone(EPOCHS, 2)


@pytest.mark.slow
def test_a_short_partition_changes_no_bit(pair: Hosts, job: Job, expected: str) -> None:
    agents = job.torchrun(EPOCHS)
    for agent in agents:
        agent.line("^training")
    hosts.cut(pair)
    time.sleep(3)
    assert all("done" not in agent.text() for agent in agents)
    hosts.restore(pair)
    for agent in agents:
        assert agent.end() == 0, agent.text()
        assert agent.line(r"^done \d (.*)", 0).group(1) == expected


@pytest.mark.slow
def test_two_workers_per_host(pair: Hosts, job: Job) -> None:
    expected = job.alone(1, 4)
    for agent in job.torchrun(1, workers=2):
        assert agent.end() == 0, agent.text()
        told = re.findall(r"^done \d (.*)", agent.text(), re.MULTILINE)
        assert told == [expected] * 2, agent.text()


@pytest.mark.slow
def test_a_long_partition_ends_it_on_both_hosts(pair: Hosts, job: Job) -> None:
    agents = job.torchrun(1000, TENSORWIRE_PEER_TIMEOUT="3")
    for agent in agents:
        agent.line("^training")
    since = time.monotonic()
    hosts.cut(pair)
    for here, agent in enumerate(agents):
        lost = agent.line(r"Error: (worker|server) (\d) \(pid \d+ at (.*)\) was lost: .*silent")
        assert int(lost.group(2)) == 1 - here
        assert lost.group(3) == pair[1 - here].address
        assert time.monotonic() - since < 3 + SOON_S
    for agent in agents:
        assert agent.end() == 1, agent.text()


@pytest.mark.slow
def test_a_worker_comes_back_at_another_address(pair: Hosts, job: Job, tmp_path: Path) -> None:
    """Its host vanished without a word: the job ends before the silence is long enough."""
    secret = secrets.token_hex(32)
    environment = {
        "TENSORWIRE_SERVERS": job.server(pair[0], secret),
        "TENSORWIRE_WORKERS": "2",
        "TENSORWIRE_SECRET": secret,
    }
    gate = tmp_path / "gate"
    command = [sys.executable, str(job.script), "1000"]
    stays, goes, returns = (
        job.start(host, [*command, *more], TENSORWIRE_RANK=rank, **environment)
        for host, more, rank in ((pair[0], [], "0"), (pair[1], [], "1"), (pair[1], [gate], "1"))
    )
    before, after = (process.line(r"^ready (\d+)").group(1) for process in (goes, returns))
    for process in (stays, goes):
        process.line("^training")
    moved = hosts.move(pair[1], "10.213.87.3")
    try:
        since = time.monotonic()
        gate.touch()
        error = stays.line("^RuntimeError: (.*)").group(1)
        assert error.startswith(
            f"worker 1 (pid {before} at 10.213.87.2) was lost: it came back as another process, "
            f"worker 1 (pid {after} at 10.213.87.3)"
        )
        returns.line(r"Error: .*server.0")
        assert time.monotonic() - since < SOON_S
    finally:
        hosts.move(moved, pair[1].address)
    for process in (stays, returns):
        assert process.end() == 1
