"""However a job ends, it ends within 5 s, names the failed process, and leaves nothing behind."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

SCRIPT = """
import os, signal, sys, time
import torch
import tensorwire.torch as tw
how, who = sys.argv[1], int(sys.argv[2])
job = tw.init()
model = torch.nn.Linear(50, 50 if how != "announced" else 200_000)
opt = tw.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
class Users(Exception): pass
for step in range(10**6):
    if how == "announced" and step == 5 and job.rank == who:
        # The server knows of gradients that it will never get.
        opt._tensorwire.store.settle = lambda: os.kill(os.getpid(), signal.SIGKILL)
    model(torch.randn(8, 50)).sum().backward()
    opt.step()
    opt.zero_grad()
    if step == (50 if how != "announced" else 2):
        print("training", job.rank, os.getpid(), flush=True)
        if job.rank != who:
            continue
        if how == "kill": os.kill(os.getpid(), signal.SIGKILL)
        if how == "exit": sys.exit(3)
        if how == "raise": raise Users("from the user's code")
        if how == "return": break
"""

REPLICAS = """
import os, signal, sys, time
import torch
from torch.distributed.pipelining import SplitPoint
import tensorwire.torch as tw
how, who = sys.argv[1], int(sys.argv[2])
job = tw.init(pipeline=2)
model = torch.nn.Sequential(torch.nn.Linear(50, 50), torch.nn.Linear(50, 50))
x = torch.randn(8, 50)
split = tw.split(model, {"1": SplitPoint.BEGINNING}, example=[x[:2]],
                 loss=torch.nn.functional.mse_loss, microbatches=4)
opt = tw.DistributedOptimizer(torch.optim.SGD(split.parameters(), lr=0.1), split)
for step in range(10**6):
    if step == 50:
        print("training", job.rank, os.getpid(), flush=True)
        if job.rank == who:
            if how == "kill": os.kill(os.getpid(), signal.SIGKILL)
            if how == "stuck": time.sleep(1000)
    split.step(*([x] if split.has_first else []), target=x if split.has_last else None)
    opt.step()
    opt.zero_grad()
"""


class Run:
    """A job whose processes can be found again by a mark in their environment."""

    def __init__(
        self,
        folder: Path,
        *arguments: str,
        servers: int = 1,
        transports: str = "",
        text: str = SCRIPT,
        workers: int = 2,
    ) -> None:
        script = folder / "script.py"
        script.write_text(text)
        self.workers = workers
        self.mark = f"TENSORWIRE_TEST_MARK={os.getpid()}-{time.monotonic_ns()}"
        name, _, value = self.mark.partition("=")
        command = [sys.executable, "-m", "tensorwire", "run", "--on-death=end"]
        command += ["--workers", str(workers)]
        command += ["--servers", str(servers)]
        command += ["--transports", transports] if transports else []
        self.process = subprocess.Popen(
            [*command, str(script), *arguments],
            env={**os.environ, name: value},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.lines: list[str] = []

    def until_training(self) -> None:
        """All workers have made their first steps."""
        assert self.process.stdout is not None
        while sum("training" in line for line in self.lines) < self.workers:
            line = self.process.stdout.readline()
            assert line, "".join(self.lines)
            self.lines.append(line)

    def end(self) -> tuple[int, str, float]:
        """Exit code, output, seconds since now."""
        started = time.monotonic()
        assert self.process.stdout is not None
        self.lines.append(self.process.stdout.read())
        code = self.process.wait(30)
        return code, "".join(self.lines), time.monotonic() - started

    def processes(self) -> list[int]:
        """Returns the processes that are alive."""
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            try:
                if self.mark.encode() in path.read_bytes().split(b"\0"):
                    found.append(int(path.parent.name))
            except OSError:
                continue
        return found

    def command_of(self, pid: int) -> str:
        """For finding the servers."""
        try:
            return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            return ""


@pytest.fixture
def runs() -> Iterator[list[Run]]:
    made: list[Run] = []
    yield made
    for run in made:
        for pid in run.processes():
            os.kill(pid, signal.SIGKILL)
        run.process.wait(10)
        assert run.process.stdout is not None
        run.process.stdout.close()


def finish(run: Run, limit_s: float = 5) -> tuple[int, str]:
    code, text, seconds = run.end()
    assert seconds < limit_s, text
    assert run.processes() == []
    return code, text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "code", "words", "transports"),
    [
        ("kill", 137, "killed by SIGKILL", ""),
        ("kill", 137, "killed by SIGKILL", "tcp"),
        ("announced", 137, "killed by SIGKILL", "tcp"),
        ("exit", 3, "exited with code 3", ""),
        ("raise", 1, "Users: from the user's code", ""),
    ],
)
def test_a_worker_fails(
    runs: list[Run], tmp_path: Path, how: str, code: int, words: str, transports: str
) -> None:
    run = Run(tmp_path, how, "1", transports=transports)
    runs.append(run)
    run.until_training()
    # A process that ends by itself takes its time, which is not the job's.
    found, text = finish(run, 5 if how in ("kill", "announced") else 20)
    assert found == code, text
    assert words in text
    summary = text[text.index("tensorwire run: ") :]
    assert "worker 1" in summary.splitlines()[0]
    # The other worker learned it from the servers, and its own traceback names the culprit.
    assert "[worker 0] RuntimeError: worker 1 (pid " in text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("victim", "transports"),
    [(1, ""), (2, "tcp")],
)
def test_a_stage_is_killed(runs: list[Run], tmp_path: Path, victim: int, transports: str) -> None:
    """Its pipeline waits for a value of it, the other replica for its gradients."""
    run = Run(tmp_path, "kill", str(victim), transports=transports, text=REPLICAS, workers=4)
    runs.append(run)
    run.until_training()
    code, text = finish(run)
    assert code == 137, text
    summary = text[text.index("tensorwire run: ") :]
    assert f"worker {victim}" in summary.splitlines()[0]
    for other in {0, 1, 2, 3} - {victim}:
        assert f"[worker {other}] RuntimeError: worker {victim} (pid " in text


@pytest.mark.slow
def test_workers_that_wait_are_interrupted(runs: list[Run], tmp_path: Path) -> None:
    """One sleeps in the user's code; some wait for its values, and some for its gradients."""
    run = Run(tmp_path, "stuck", "1", text=REPLICAS, workers=4)
    runs.append(run)
    run.until_training()
    run.process.send_signal(signal.SIGINT)
    code, text = finish(run)
    assert code == 130, text


@pytest.mark.slow
def test_a_worker_stops_early(runs: list[Run], tmp_path: Path) -> None:
    run = Run(tmp_path, "return", "0")
    runs.append(run)
    run.until_training()
    code, text = finish(run, 20)
    assert code == 1
    assert "every worker makes the same number of steps" in text


@pytest.mark.slow
def test_a_server_is_killed(runs: list[Run], tmp_path: Path) -> None:
    run = Run(tmp_path, "nothing", "0", servers=2)
    runs.append(run)
    run.until_training()
    servers = [pid for pid in run.processes() if "tensorwire.torch.server --index 1" in
               run.command_of(pid)]  # fmt: skip
    os.kill(servers[0], signal.SIGKILL)
    code, text = finish(run)
    assert code == 137, text
    assert "server 1 (pid " in text
    assert "[worker 0]" in text


SLOW_SERVER = """
import sys, time
import torch
from tensorwire.parameters.server.server import StoreServer
from tensorwire.torch.server import main

run = StoreServer._run

def slow(self):
    run(self)
    deadline = time.monotonic() + 1.0
    data = torch.zeros(100_000)
    while time.monotonic() < deadline:
        torch.add(data, data, out=data)
    print("ended", flush=True)

StoreServer._run = slow
sys.exit(main())
"""


@pytest.mark.slow
def test_a_server_ends_after_its_threads(tmp_path: Path) -> None:
    """A thread in torch when the interpreter ends would abort the process."""
    (tmp_path / "server.py").write_text(SLOW_SERVER)
    (tmp_path / "script.py").write_text(SCRIPT)
    call = (
        "import sys; from tensorwire import launch; sys.exit(launch.run(launch.JobSpec("
        "['script.py', 'return', '0'], workers=1, server_command=[sys.executable, 'server.py'])))"
    )
    done = subprocess.run(
        [sys.executable, "-c", call], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "[server 0] ended\n" in done.stdout


def run_two(script: Path, text: str) -> str:
    """Returns the launcher's output for a job of two workers that fails."""
    script.write_text(text)
    command = [sys.executable, "-m", "tensorwire", "run", "--workers", "2", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    return done.stderr


@pytest.mark.slow
def test_a_worker_that_never_joins(tmp_path: Path) -> None:
    """The worker has ended well, and the others would wait in tw.init() for ever."""
    said = run_two(
        tmp_path / "script.py",
        "import os\n"
        "if os.environ['TENSORWIRE_RANK'] == '1': raise SystemExit\n"
        "import tensorwire.torch as tw\n"
        "tw.init()\n",
    )
    assert "ended without joining the job, and worker 0 (pid" in said
    assert "every worker has to call tw.init()" in said


@pytest.mark.slow
def test_a_worker_that_leaves_without_a_word_has_joined(tmp_path: Path) -> None:
    """The worker is reported as lost, not as one that never came."""
    said = run_two(
        tmp_path / "script.py",
        "import os, torch\n"
        "import tensorwire.torch as tw\n"
        "job = tw.init()\n"
        "model = torch.nn.Linear(1, 1)\n"
        "opt = tw.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)\n"
        "for step in range(5):\n"
        "    if step == 2 and job.rank == 1: os._exit(0)\n"
        "    model(torch.ones(1, 1)).sum().backward()\n"
        "    opt.step()\n",
    )
    assert "without joining" not in said
    assert "worker 1 (pid" in said
    assert "was lost" in said


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.slow
def test_a_job_that_is_told_to_end_says_so_in_one_line(tmp_path: Path, sent: int) -> None:
    """Named for a bug: each server printed that it had lost a worker."""
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "tensorwire", "run", "-w", "2", "-s", "2", "--no-prefix"]
    with subprocess.Popen(
        [*command, str(tmp_path / "script.py"), "none", "-1"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as job:  # fmt: skip
        assert job.stdout is not None
        assert job.stderr is not None
        while "training" not in job.stdout.readline():
            assert job.poll() is None
        job.send_signal(sent)
        said = job.stderr.read()
    assert "PeerLostError" not in said
    assert f"ended by {signal.Signals(sent).name}" in said
    assert job.returncode == 128 + sent


LEFT = """
import torch
import tensorwire.torch as tw
job = tw.init()
data = torch.utils.data.TensorDataset(torch.ones(8, 1))
model = torch.nn.Linear(1, 1)
opt = tw.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
torch.left = iter(job.loader(data, batch_size=2))  # ends after torch has
model(next(torch.left)[0]).sum().backward()
opt.step()
"""


@pytest.mark.slow
def test_a_pass_that_outlives_torch_ends_without_a_word() -> None:
    """Named for a bug: it drew random numbers of a torch that was gone, and printed a traceback."""
    done = subprocess.run([sys.executable, "-c", LEFT], capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stderr) == (0, "")
