"""Jobs whose workers come, go and are killed at random, with the results of undisturbed ones.

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
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tensorwire.errors import TimeoutError
from tensorwire.membership import LoggedJob, ScaleError, ask_launcher, logged_jobs, running_servers

PLACES = 4

SCRIPT = """
import hashlib, os, sys, time, torch, torch.nn.functional as F, tensorwire.torch as tw
from torch import nn

job = tw.init(seed=3)
model = nn.Sequential(nn.Linear(20, 100), nn.BatchNorm1d(100), nn.Dropout(0.2), nn.Linear(100, 5))
opt = tw.DistributedOptimizer(
    torch.optim.NAdam(model.parameters()), model, ema=0.9, buffers="average"
)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 100)
job.keep(model=model, opt=opt, scheduler=scheduler)
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
        options: str = f"--workers 3 --slices {PLACES} --elastic",
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
        """What it has printed."""
        return Path(self._output.name).read_text()

    def log(self) -> LoggedJob:
        """What its launcher has written down."""
        found = [job for job in logged_jobs() if job.launcher == self.process.pid]
        assert found, self.text
        return found[0]

    def pids(self) -> dict[int, int]:
        """The workers whose processes are there, by rank."""
        members = [each for each in self.log().members if each.kind == "worker"]
        return {m.index: m.pid for m in members if os.path.exists(f"/proc/{m.pid}")}

    def wait_for(self, text: str, limit_s: float = 60.0) -> None:
        """Returns when it has printed something."""
        deadline = time.monotonic() + limit_s
        while text not in self.text:
            assert time.monotonic() < deadline, self.text
            assert self.process.poll() is None, self.text
            time.sleep(0.05)

    def scale(self, workers: int, drain: Sequence[int] = (), timeout_s: float = 120.0) -> Any:
        """As `tensorwire scale`; what has become of the workers."""
        log = self.log()
        deadline = time.monotonic() + timeout_s
        while not (found := [s for s in running_servers() if s.address in log.addresses]):
            assert time.monotonic() < deadline, self.text  # no server has begun
            time.sleep(0.005)
        secret = found[0].secret
        asked = {"workers": {"count": workers, "drain": list(drain)}}
        told = ask_launcher(log.control, secret.encode(), asked, timeout_s, self.said.append)
        return told["workers"]

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
        """Nothing more is read."""
        self._output.close()


@contextlib.contextmanager
def running(folder: Path, *arguments: Any, **options: Any) -> Iterator[ElasticJob]:
    """A job in a folder of its own, which is made; it is killed behind the block if it runs."""
    folder.mkdir()
    job = ElasticJob(folder, *arguments, **options)
    try:
        yield job
    finally:
        if job.process.poll() is None:
            job.process.send_signal(signal.SIGTERM)
            job.process.wait(20)
        job.close()


def undisturbed(folder: Path, epochs: int, script: str = SCRIPT) -> dict[str, str]:
    """The digests of a job in which nobody comes or goes."""
    options = f"--workers 2 --slices {PLACES} --elastic"
    with running(folder, options, script, pause_s=0.0, epochs=epochs) as job:
        job.process.wait(120 + epochs)
        return job.end()


class Disturber:
    """Sends random commands to a job, and kills some of its workers.

    Args:
        job: that runs.
        seed: of what is random.
    """

    def __init__(self, job: ElasticJob, seed: int) -> None:
        self._job, self._random = job, random.Random(seed)
        self.outcomes: Counter[str] = Counter()
        self.late = ""

    def one(self) -> None:
        """A command, perhaps with a kill."""
        kind = self._random.choices(["scale", "cancel", "kill", "both"], [70, 10, 8, 12])[0]
        present = self._job.pids()
        count = self._random.randint(1, PLACES)
        leave = max(len(present) - count, 0)
        drain = self._random.sample(sorted(present), self._random.randint(0, leave))
        if kind == "cancel":
            self._ask("cancelled", count, drain, self._random.uniform(0.1, 3.0))
            return
        victim = None
        if kind in ("kill", "both") and len(present) > 1:
            victim = self._random.choice(sorted(present))
            count = max(count, 2)  # one stays, whoever is killed
        if kind == "kill":
            self._kill(victim)
            return
        thread = threading.Thread(target=self._ask, args=("scaled", count, drain, 90.0))
        if count < len(present):
            drain[len(present) - count :] = []
        thread.start()
        if kind == "both":
            time.sleep(self._random.uniform(0.0, 4.0))
            self._kill(victim)
        thread.join(120)
        assert not thread.is_alive(), "a command hangs"
        assert not self.late, f"{self.late}\n{self._job.text}"

    def _ask(self, what: str, count: int, drain: Sequence[int], timeout_s: float) -> None:
        try:
            self._job.scale(count, drain, timeout_s)
            self.outcomes["done"] += 1
        except (ScaleError, TimeoutError) as error:
            text = re.sub(r"\d+", "N", str(error))
            self.outcomes[f"{what}: {text}"] += 1
            if isinstance(error, TimeoutError) and what == "scaled":
                self.late = str(error)

    def _kill(self, victim: int | None) -> None:
        present = self._job.pids()
        if victim in present and len(present) > 1:
            with contextlib.suppress(ProcessLookupError):
                os.kill(present[victim], signal.SIGKILL)
            self.outcomes["killed"] += 1


def disturb(folder: Path, commands: int, seed: int) -> tuple[Counter[str], int]:
    """Runs a job with so many commands, and one without; what was done, in how many epochs."""
    with running(folder / "disturbed") as job:
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
    whole = undisturbed(folder / "undisturbed", max(map(int, digests)) + 1)
    differ = {e: d for e, d in digests.items() if d != whole[e]}
    assert not differ, f"epochs {sorted(map(int, differ))} of {len(whole)} differ:\n{job.text}"
    # Who is killed before it prints does not, and nobody does it again.
    assert len(whole) - len(digests) <= disturber.outcomes["killed"]
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
