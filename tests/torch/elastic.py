"""Jobs whose workers and servers come, go and are killed, with the results of undisturbed ones.

As a program: `python tests/torch/elastic.py --commands 100 --seed 1`.
"""

import argparse
import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tensorwire.errors import TimeoutError
from tensorwire.jobs.asking import ScaleError, ask_launcher
from tensorwire.jobs.job_file import running_servers
from tensorwire.jobs.job_log import LoggedJob, logged_jobs

PLACES = 4

SCRIPT = """
import hashlib, os, sys, time, torch, torch.nn.functional as F, tensorwire.torch as tw
from torch import nn

job = tw.init(seed=3)
width = 100
model = nn.Sequential(
    nn.Linear(20, width), nn.BatchNorm1d(width), nn.Dropout(0.2), nn.Linear(width, 5)
)
opt = tw.DistributedOptimizer(
    torch.optim.NAdam(model.parameters()), model, ema=0.9, buffers="average"
)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 100)
job.track(model=model, opt=opt, scheduler=scheduler)
x = torch.randn(200, 20, generator=torch.Generator().manual_seed(1))
data = torch.utils.data.TensorDataset(x, x[:, :5].argmax(1))
loader = job.loader(data, 3, shuffle=True, accumulate=2)
pause_s, stop, epochs = float(sys.argv[1]), sys.argv[2], int(sys.argv[3])
for epoch in job.epochs(epochs):
    for number, (a, b) in enumerate(loader):
        with opt.accumulate():
            F.cross_entropy(model(a), b).backward()
        if number % 2:
            if epoch % 2:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            opt.step(), opt.zero_grad()
            time.sleep(pause_s)
            if job.step_complete:
                scheduler.step()
    with tw.edit(model), torch.no_grad():
        # Not by torch's own generator: whoever acts for worker 0 may not have computed its slice.
        model[3].bias += torch.rand(5, generator=job.generator(epoch, 0)) * 0.01
    state = [*model.state_dict().values(), *opt.ema_state_dict().values()]
    state += [each["exp_avg"] for each in opt.state_dict()["state"].values()]
    content = b"".join(each.numpy().tobytes() for each in state)
    content += repr(opt.param_groups[0]["lr"]).encode()
    if job.rank == 0:
        print("epoch", epoch, "digest", hashlib.sha256(content).hexdigest(), flush=True)
    if job.sum([os.path.exists(stop)])[0]:
        break
if job.rank == 0:
    print("changes", len(job.report()["worker_changes"]))
"""
DIGEST = re.compile(r"epoch (\d+) digest (\w+)")
WIDE_SCRIPT = SCRIPT.replace("width = 100", "width = 9000")  # so that each share has a part of it
SHARES = 6
MOVING = (
    f"--workers 3:{PLACES} --servers 2:{SHARES} --rebalance "
    # A server that is slowed is found stopped again and again; it is not to be replaced for that.
    "--silence 0 --on-death takeover:1000"
)
IN_EDIT = "worker 0 was killed inside edit()"  # and nobody else has its values: the job ends


class ElasticJob:
    """A job that runs until it is told to stop.

    Args:
        folder: for it.
        options: of tensorwire run.
        script: that it runs.
        pause_s: which the script makes after each step.
        epochs: the most.
        fail: TENSORWIRE_FAIL.
    """

    def __init__(
        self,
        folder: Path,
        options: str = f"--workers 3:{PLACES}",
        script: str = SCRIPT,
        *,
        pause_s: float = 0.01,
        epochs: int = 100_000,
        fail: str = "",
    ) -> None:
        self.said: list[str] = []  # of changes that are under way
        (folder / "script.py").write_text(script)
        self._stop = folder / "stop"
        self._output = (folder / "output").open("w+")
        command = [sys.executable, "-m", "tensorwire", "run", *options.split(), "script.py"]
        self.process = subprocess.Popen(
            [*command, str(pause_s), str(self._stop), str(epochs)],
            cwd=folder,
            env={**os.environ, "OMP_NUM_THREADS": "1", "TENSORWIRE_FAIL": fail},
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
        )

    @property
    def text(self) -> str:
        """Returns the output so far."""
        return Path(self._output.name).read_text()

    def log(self) -> LoggedJob:
        """Returns the log of its launcher."""
        found = [job for job in logged_jobs() if job.launcher == self.process.pid]
        assert found, self.text
        return found[0]

    def pids(self) -> dict[int, int]:
        """The workers whose processes are there, by rank."""
        members = [each for each in self.log().members if each.kind == "worker"]
        return {m.index: m.pid for m in members if os.path.exists(f"/proc/{m.pid}")}

    def servers(self) -> dict[int, list[int]]:
        """The shares of each process that has some."""
        found: dict[int, list[int]] = {}
        for each in self.log().members:
            if each.kind == "share":
                found.setdefault(each.pid, []).append(each.index)
        return found

    def wait_for(self, text: str, limit_s: float = 60.0) -> None:
        """Returns when it has printed something."""
        deadline = time.monotonic() + limit_s
        while text not in self.text:
            assert time.monotonic() < deadline, self.text
            assert self.process.poll() is None, self.text
            time.sleep(0.05)

    def scale(self, workers: int, drain: Sequence[int] = (), timeout_s: float = 120.0) -> Any:
        """Scales like `tensorwire scale`; returns the new state of the workers."""
        return self.ask({"workers": {"count": workers, "drain": list(drain)}}, timeout_s)["workers"]

    def ask(self, asked: dict[str, Any], timeout_s: float = 120.0) -> Any:
        """Asks its launcher for something, as `tensorwire scale` does; the outcome."""
        log = self.log()
        deadline = time.monotonic() + timeout_s
        while not (found := [s for s in running_servers() if s.address in log.addresses]):
            assert time.monotonic() < deadline, self.text  # no server has begun
            time.sleep(0.005)
        secret = found[0].secret
        return ask_launcher(log.control, secret.encode(), asked, timeout_s, self.said.append)

    def end(self, code: int = 0, limit_s: float = 60.0) -> dict[str, str]:
        """Lets it stop after the present epoch; the digests by epoch."""
        self._stop.touch()
        try:
            self.process.wait(limit_s)
        finally:
            self.process.kill()
            self.process.wait()
        assert self.process.returncode == code, self.text
        return dict(DIGEST.findall(self.text))

    def close(self) -> None:
        """Stops reading."""
        self._output.close()


@contextlib.contextmanager
def running(folder: Path, *arguments: Any, **options: Any) -> Iterator[ElasticJob]:
    """A job in a folder of its own, which is made; it is killed after the block if it runs."""
    folder.mkdir()
    job = ElasticJob(folder, *arguments, **options)
    try:
        yield job
    finally:
        if job.process.poll() is None:
            job.process.send_signal(signal.SIGTERM)
            job.process.wait(20)
        job.close()


_undisturbed: dict[str, dict[str, str]] = {}


def undisturbed(folder: Path, epochs: int, script: str = SCRIPT, spare: int = 0) -> dict[str, str]:
    """Returns the digests of a job in which no worker comes or goes.

    They are computed once, with some to spare for jobs that run longer than this one.
    """
    if len(_undisturbed.get(script, {})) < epochs:
        enough = epochs + spare
        with running(folder, f"--workers 2:{PLACES}", script, pause_s=0.0, epochs=enough) as job:
            job.process.wait(120 + enough)
            _undisturbed[script] = job.end()
    return {epoch: found for epoch, found in _undisturbed[script].items() if int(epoch) < epochs}


class Disturber:
    """Sends random commands to a job, and kills some of its workers and servers.

    A command changes the workers, the servers or both, or it slows a server until that has given a
    share away by itself.

    Args:
        job: that runs, with `MOVING`.
        seed: of what is random.
    """

    def __init__(self, job: ElasticJob, seed: int) -> None:
        self._job, self._random = job, random.Random(seed)
        self.outcomes: Counter[str] = Counter()
        self.late = ""

    def one(self) -> None:
        """A command, perhaps with a kill."""
        kinds = {"change": 56, "cancel": 9, "kill": 10, "change and kill": 21, "slow": 4}
        (kind,) = self._random.choices([*kinds], [*kinds.values()])
        if kind == "slow":
            self.rebalance()
            return
        present = self._job.pids()
        victim = self._random.choice(["worker", "server"]) if "kill" in kind else ""
        rank = self._random.choice(sorted(present)) if victim == "worker" else None
        kill = self._kill_server if rank is None else lambda: self._kill_worker(rank)
        if kind == "kill":
            kill()
            return
        # One worker stays, whoever is killed.
        asked = self._drawn(present, 1 if rank is None else 2)
        if kind == "cancel":
            self._ask("cancelled", asked, self._random.uniform(0.1, 3.0))
            return
        self._together(lambda: self._ask("scaled", asked, 90.0), kill if victim else None)
        assert not self.late, f"{self.late}\n{self._job.text}"

    def _drawn(self, present: dict[int, int], least: int) -> dict[str, Any]:
        """Returns the drawn request."""
        asked: dict[str, Any] = {}
        what = self._random.choices(["workers", "servers", "both"], [45, 35, 20])[0]
        if what != "workers":
            asked["servers"] = {"count": self._random.randint(1, SHARES)}
        if what != "servers":
            count = max(self._random.randint(1, PLACES), least)
            most = max(len(present) - count, 0)
            drain = self._random.sample(sorted(present), self._random.randint(0, most))
            asked["workers"] = {"count": count, "drain": drain}
        return asked

    def _together(self, act: Callable[[], None], kill: Callable[[], None] | None) -> None:
        """Does one thing, and in the middle of it another."""
        thread = threading.Thread(target=act)
        thread.start()
        if kill is not None:
            time.sleep(self._random.uniform(0.0, 4.0))
            kill()
        thread.join(120)
        assert not thread.is_alive(), f"a command hangs\n{self._job.text}"

    def rebalance(self, limit_s: float = 60.0) -> None:
        """Slows a server of two, until the launcher has moved one of its shares."""
        self._ask("scaled", {"servers": {"count": 2}}, 90.0)
        before, deadline = self._moves(), time.monotonic() + limit_s
        pid = max(self._job.servers().items(), key=lambda each: len(each[1]))[0]
        while self._moves() == before and time.monotonic() < deadline:
            for _ in range(20):
                # It may have been replaced, or have given away all.
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGSTOP)
                    time.sleep(0.06)
                    os.kill(pid, signal.SIGCONT)
                time.sleep(0.01)
        moved = self._moves() > before
        self.outcomes["rebalanced" if moved else f"no share has moved in {limit_s:g} s"] += 1

    def _moves(self) -> int:
        return len(re.findall(r": server \d took \d+\.\d times as long", self._job.text))

    def _ask(self, what: str, asked: dict[str, Any], timeout_s: float) -> None:
        try:
            self._job.ask(asked, timeout_s)
            self.outcomes[f"done: {' and '.join(sorted(asked))}"] += 1
        except (ScaleError, TimeoutError) as error:
            text = re.sub(r"\d+", "N", str(error))
            self.outcomes[f"{what}: {text}"] += 1
            if isinstance(error, TimeoutError) and what == "scaled":
                self.late = str(error)

    def _kill_worker(self, rank: int) -> None:
        present = self._job.pids()
        if rank in present and len(present) > 1:
            self._kill(present[rank], "a worker")

    def _kill_server(self) -> None:
        self._kill(self._random.choice(sorted(self._job.servers())), "a server")

    def _kill(self, pid: int, what: str) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            self.outcomes[f"killed: {what}"] += 1


def disturb(folder: Path, commands: int, seed: int) -> tuple[Counter[str], int]:
    """Runs a job with `commands` commands, and one without; returns the commands, and epochs."""
    with running(folder / "disturbed", MOVING, WIDE_SCRIPT) as job:
        job.wait_for("epoch 0 digest")
        disturber = Disturber(job, seed)
        for _ in range(commands):
            disturber.one()
            if job.process.poll() is not None:
                break
        ended = job.process.poll() is not None
        digests = job.end(1 if ended else 0)
        if ended:
            assert IN_EDIT in job.text, job.text
            disturber.outcomes["the job ended: " + IN_EDIT] += 1
    assert len(digests) > 1
    whole = undisturbed(folder / "undisturbed", max(map(int, digests)) + 1, WIDE_SCRIPT)
    differ = {e: d for e, d in digests.items() if d != whole[e]}
    assert not differ, f"epochs {sorted(map(int, differ))} of {len(whole)} differ:\n{job.text}"
    # Who is killed before it prints does not, and nobody does it again.
    assert len(whole) - len(digests) <= disturber.outcomes["killed: a worker"]
    return disturber.outcomes, len(whole)


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--commands", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_RUNTIME_DIR"] = folder
        outcomes, epochs = disturb(Path(folder), options.commands, options.seed)
    print(f"{options.commands} commands, {epochs} epochs, {time.monotonic() - started:.0f} s")
    print("all digests are those of an undisturbed job")
    for outcome, count in outcomes.most_common():
        print(f"{count:5} {outcome}")


if __name__ == "__main__":
    main()
