"""Jobs of `bench faults`, and how their processes are killed.

What is killed, and when, is drawn. Nothing here looks at what a job computes.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

SERVERS = {
    "batchnorm": 1, "tables": 2, "two optimizers": 1, "whole": 2, "large": 2, "pipeline": 1,
    "launcher": 2,
}  # fmt: skip
"""Of each scenario."""
SCENARIOS = tuple(SERVERS)
WORKERS = {"pipeline": 4}
"""Of each scenario, where it is not 2; a pipeline has two replicas of two processes."""
WORKERS_STAY = {"pipeline": "workers are not killed: those of a split model cannot be replaced"}
"""Scenarios that lose only servers and standbys, and why."""
LAUNCHER = "launcher"
"""The scenario that loses the launcher, which ends the job; it is started again."""
_HERE = Path(__file__).parent
_HANG_S = 60.0
_WARM_WAIT_S = 12.0
STEPS_AFTER = 2
"""Of worker 0, from one kill to the next."""
_TWO, _AGAIN = 1 / 8, 1 / 8
_SUCCESSOR_WAIT_S = 5.0
_LATER_S, _GONE_WITHIN_S = 2.0, 10.0
_REPLACED = re.compile(r"(?:\d \(pid (?=\d+\) takes its place)|is started again as pid )(\d+)")


@dataclass(slots=True)
class Kill:
    """One kill.

    Attributes:
        at: when, of the monotonic clock.
        who: "server", "worker", "standby" or "launcher".
        warm: whether a standby was ready.
        opening: no step had been made.
        double: it was not the first at that moment, or the process in the place of the first.
        timed: what follows until the next one is its repair alone.
    """

    at: float
    who: str
    warm: bool = False
    opening: bool = False
    double: bool = False
    timed: bool = True


class JobFailed(Exception):
    """A job has failed or hangs; the text has its output."""


class DisturbedJob:
    """One job as a context; leaving it ends the job, should it still run."""

    def __init__(self, name: str, folder: Path, pace_s: float, epochs: int) -> None:
        folder.mkdir(exist_ok=True)
        self._name, self._folder = name, folder
        self._output = folder / "output"
        script = [str(_HERE / "faults_job.py"), name, str(folder), str(pace_s), str(epochs)]
        command = [sys.executable, "-m", "tensorwire", "run", "--on-death=restart"]
        self._workers = WORKERS.get(name, 2)
        command += ["--workers", str(self._workers), "--servers", str(SERVERS[name]), *script]
        with self._output.open("wb") as output:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                start_new_session=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
            )  # fmt: skip
        self._moved = time.monotonic()
        self._last = 0

    def __enter__(self) -> DisturbedJob:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(15)
            self._process.kill()
            self._process.wait()

    def steps(self) -> int:
        """That worker 0 has made. Raises JobFailed if there was none for a long time."""
        with contextlib.suppress(OSError, ValueError):
            now = int((self._folder / "progress").read_text())
            if now > self._last:
                self._last, self._moved = now, time.monotonic()
        if time.monotonic() - self._moved > _HANG_S:
            raise JobFailed(f"no step for {_HANG_S:g} s, after step {self._last}:\n{self._tail()}")
        return self._last

    def await_steps(self, count: int) -> bool:
        """Waits until worker 0 has made so many more steps; False if the job ends before."""
        mark = self.steps()
        while self.steps() < mark + count:
            if self._process.poll() is not None:
                return False
            time.sleep(0.002)
        return True

    def kill_early(self, chance: random.Random) -> Kill | None:
        """Kills a process when all workers have joined, before the first step if it can."""
        joined = [self._folder / f"joined-{rank}" for rank in range(self._workers)]
        while not all(path.exists() for path in joined):
            self.steps()
            if self._process.poll() is not None:
                return None
            time.sleep(0.002)
        time.sleep(chance.random() * 0.05)
        who = "server" if self._name in WORKERS_STAY or chance.random() < 1 / 2 else "worker"
        victim = chance.choice(self._processes()[who])
        opening = self.steps() == 0
        kill = self._end(victim, Kill(time.monotonic(), who, opening=opening, timed=False))
        self.await_steps(STEPS_AFTER)
        return kill

    def kill(self, chance: random.Random) -> list[Kill]:
        """Kills a process at some moment; every other time it waits for a standby before.

        Sometimes another one at the same moment, or the one that takes its place.
        """
        if not self.await_steps(1):
            return []
        wait_warm, delay_s = chance.random() < 0.5, chance.random() * 0.5
        until = time.monotonic() + _WARM_WAIT_S
        while (
            wait_warm and time.monotonic() < until and not self._ready(self._processes()["standby"])
        ):
            self.steps()
            if self._process.poll() is not None:
                return []
        time.sleep(delay_s)
        found, draw = self._processes(), chance.random()
        # A standby one time in six: its death is no repair that somebody waits for.
        who = "standby" if found["standby"] and draw < 1 / 6 else "server"
        if draw > 1 / 2 and self._name not in WORKERS_STAY:
            who = "worker"
        if not found[who] or self._process.poll() is not None:
            return []
        victim, more = chance.choice(found[who]), chance.random()
        others = [
            (pid, kind)
            for kind, pids in found.items()
            for pid in pids
            if pid != victim and not (kind == "worker" and self._name in WORKERS_STAY)
        ]
        warm = self._ready(found["standby"])
        self.steps()
        # Only workers that still train can show what a repair takes.
        if self._ended() or self._process.poll() is not None:
            return []
        two, again = more < _TWO and bool(others), _TWO <= more < _TWO + _AGAIN
        replaced = len(self._replaced())
        first = Kill(time.monotonic(), who, warm, timed=not (two or again))
        kills = [self._end(victim, first)]
        if two:
            second, kind = chance.choice(others)
            kills.append(self._end(second, Kill(first.at, kind, double=True, timed=False)))
        elif again and who != "standby" and (after := self._successor(replaced, chance)):
            then = Kill(time.monotonic(), who, double=True, timed=False)
            kills.append(self._end(after, then))
        return [kill for kill in kills if kill is not None]

    def kill_launcher(self, chance: random.Random) -> bool:
        """Kills the launcher between two steps; False if the job ends before.

        Raises JobFailed if a process of the job is left.
        """
        if not self.await_steps(STEPS_AFTER):
            return False
        time.sleep(chance.random() * _LATER_S)
        members = [pid for pids in self._processes().values() for pid in pids]
        if self._ended() or self._process.poll() is not None:
            return False
        self._process.kill()
        self._process.wait()
        until = time.monotonic() + _GONE_WITHIN_S
        while left := [pid for pid in members if Path(f"/proc/{pid}/exe").exists()]:
            if time.monotonic() > until:
                raise JobFailed(f"processes {left} live without a launcher:\n{self._tail()}")
            time.sleep(0.01)
        return True

    def _end(self, pid: int, kill: Kill) -> Kill | None:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            return None
        return kill

    def _successor(self, before: int, chance: random.Random) -> int | None:
        """Waits for the next process that takes another one's place, after so many; its number."""
        until = time.monotonic() + _SUCCESSOR_WAIT_S
        while len(found := self._replaced()) == before:
            if time.monotonic() > until or self._process.poll() is not None:
                return None
            time.sleep(0.005)
        time.sleep(chance.random() * 0.5)
        return None if self._ended() else found[-1]

    def _replaced(self) -> list[int]:
        """The processes that have got another one's place."""
        return [int(pid) for pid in _REPLACED.findall(self._output.read_text(errors="replace"))]

    def finish(self) -> None:
        """Waits for the end. Raises JobFailed if it is not a good one."""
        while self._process.poll() is None:
            self.steps()
            time.sleep(0.02)
        if self._process.returncode:
            raise JobFailed(f"exit code {self._process.returncode}:\n{self._tail()}")

    def _ended(self) -> bool:
        return any((self._folder / f"final-{rank}").exists() for rank in range(self._workers))

    def _processes(self) -> dict[str, list[int]]:
        """The servers, the workers, and standbys that nobody has told to take a place."""
        replaced = self._replaced()
        found: dict[str, list[int]] = {"server": [], "worker": [], "standby": []}
        pid = self._process.pid
        try:
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        except OSError:
            return found
        for child in map(int, children):
            try:
                words = Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if b"tensorwire.torch.server" in words:
                waits = b"--standby" in words and child not in replaced
                found["standby" if waits else "server"].append(child)
            elif any(word.endswith(b"faults_job.py") for word in words):
                found["worker"].append(child)
        return found

    def _ready(self, standbys: list[int]) -> bool:
        """Whether a standby has imported everything: it sleeps and takes no processor time."""
        before = [_used(pid) for pid in standbys]
        time.sleep(0.3)
        return any(
            used is not None and used == _used(pid) and used > 50
            for pid, used in zip(standbys, before, strict=True)
        )

    def _tail(self) -> str:
        return self._output.read_text(errors="replace")[-4000:]


def _used(pid: int) -> int | None:
    """Ticks of processor time of a process that sleeps; None of others."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return int(fields[11]) + int(fields[12]) if fields[0] == "S" else None
