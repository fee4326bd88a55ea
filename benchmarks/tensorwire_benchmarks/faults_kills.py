"""The jobs of `bench faults`, whose processes are killed at random.

Victims and moments are drawn. Nothing here reads the results of a job.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from tensorwire_benchmarks.jobs import LaunchedJob, run_command, script

SERVERS = {
    "batchnorm": 1, "tables": 2, "two optimizers": 1, "whole": 2, "large": 2, "pipeline": 1,
    "launcher": 2,
}  # fmt: skip
"""The number of servers of each scenario."""
SCENARIOS = tuple(SERVERS)
WORKERS = {"pipeline": 4}
"""The number of workers, if not 2; a pipeline has two replicas of two processes."""
WORKERS_STAY = {"pipeline": "workers are not killed: those of a split model cannot be replaced"}
"""Scenarios in which only servers and standbys are killed, with the reason."""
LAUNCHER = "launcher"
"""The scenario whose launcher is killed, which ends the job; it is started again."""
STEPS_AFTER = 2
"""Steps of worker 0 from one kill to the next."""
_HANG_S = 60.0
_WARM_WAIT_S = 12.0
_TWO, _AGAIN = 1 / 8, 1 / 8
_SUCCESSOR_WAIT_S = 5.0
_LATER_S, _GONE_WITHIN_S = 2.0, 10.0


@dataclass(slots=True)
class Kill:
    """One kill.

    Attributes:
        at: time of the monotonic clock, in seconds.
        who: "server", "worker", "standby" or "launcher".
        warm: whether a standby was ready.
        opening: whether no step had been made.
        double: whether it was the second at that moment, or killed the process that replaced the
            first victim.
        timed: whether the time until the next kill has only the repair of this one.
    """

    at: float
    who: str
    warm: bool = False
    opening: bool = False
    double: bool = False
    timed: bool = True


class DisturbedJob(LaunchedJob):
    """A job of a scenario; methods raise PairError when it makes no step for a minute."""

    def __init__(self, name: str, folder: Path, pace_s: float, epochs: int) -> None:
        folder.mkdir(exist_ok=True)
        self._workers, self._stay = WORKERS.get(name, 2), name in WORKERS_STAY
        numbers = f"--workers={self._workers}", f"--servers={SERVERS[name]}"
        words = script("faults_job.py", name, folder, pace_s, epochs)
        super().__init__([*run_command("--on-death=restart", *numbers), *words], folder)
        self._moved, self._last = time.monotonic(), 0

    def steps(self) -> int:
        """Returns the number of steps that worker 0 has made.

        Raises:
            PairError: worker 0 has made no step for a minute.
        """
        with contextlib.suppress(OSError, ValueError):
            now = int((self.folder / "progress").read_text())
            if now > self._last:
                self._last, self._moved = now, time.monotonic()
        if time.monotonic() - self._moved > _HANG_S:
            raise self.failed(f"no step for {_HANG_S:g} s, after step {self._last}")
        return self._last

    def await_steps(self, count: int) -> bool:
        """Waits until worker 0 has made `count` more steps; False if the job ends before."""
        mark = self.steps()
        while self.steps() < mark + count:
            if not self.runs:
                return False
            time.sleep(0.002)
        return True

    def finish(self, wait_s: float = float("inf")) -> None:
        """Waits until the job has ended; raises PairError if it failed."""
        while self.runs:
            self.steps()
            time.sleep(0.02)
        super().finish()

    def kill_early(self, chance: random.Random) -> list[Kill]:
        """Kills a process soon after all workers have joined, usually before the first step."""
        joined = [self.folder / f"joined-{rank}" for rank in range(self._workers)]
        self.until(lambda: all(path.exists() for path in joined), "workers did not join")
        time.sleep(chance.random() * 0.05)
        who = "server" if self._stay or chance.random() < 1 / 2 else "worker"
        kills = self._end(chance.choice(self._members()[who]), who, timed=False)
        self.await_steps(STEPS_AFTER)
        return kills

    def kill(self, chance: random.Random) -> list[Kill]:
        """Kills a process at a random moment; every other time after waiting for a standby.

        Sometimes also kills another one at the same moment, or the process in the victim's place.
        Returns no kill if the job has ended.
        """
        if not self.await_steps(1):
            return []
        wait_warm, delay_s = chance.random() < 0.5, chance.random() * 0.5
        until = time.monotonic() + _WARM_WAIT_S
        while wait_warm and time.monotonic() < until and not self.has_warm_standby():
            self.steps()
            if not self.runs:
                return []
        time.sleep(delay_s)
        found, draw = self._members(), chance.random()
        # A standby one time in six: no worker waits for its repair.
        who = "standby" if found["standby"] and draw < 1 / 6 else "server"
        if draw > 1 / 2 and not self._stay:
            who = "worker"
        if not found[who] or not self.runs:
            return []
        victim, more = chance.choice(found[who]), chance.random()
        others = [
            (pid, kind)
            for kind, pids in found.items()
            for pid in pids
            if pid != victim and not (kind == "worker" and self._stay)
        ]
        warm = self.has_warm_standby()
        self.steps()
        # Only workers that still train show the time of a repair.
        if self._has_ended() or not self.runs:
            return []
        two, again = more < _TWO and bool(others), _TWO <= more < _TWO + _AGAIN
        replaced = len(self.replaced())
        kills = self._end(victim, who, warm=warm, timed=not (two or again))
        if two:
            kills += self._end(*chance.choice(others), double=True, timed=False)
        elif again and who != "standby" and (after := self._successor(replaced, chance)):
            kills += self._end(after, who, double=True, timed=False)
        return kills

    def kill_launcher(self, chance: random.Random) -> bool:
        """Kills the launcher between two steps; returns False if the job ends before.

        Raises:
            PairError: a process of the job still lives some seconds later.
        """
        if not self.await_steps(STEPS_AFTER):
            return False
        time.sleep(chance.random() * _LATER_S)
        members = [pid for pids in self._members().values() for pid in pids]
        if self._has_ended() or not self.runs:
            return False
        self.process.kill()
        self.process.wait()
        until = time.monotonic() + _GONE_WITHIN_S
        while left := [pid for pid in members if Path(f"/proc/{pid}/exe").exists()]:
            if time.monotonic() > until:
                raise self.failed(f"processes {left} live without a launcher")
            time.sleep(0.01)
        return True

    def _end(self, pid: int, who: str, **what: bool) -> list[Kill]:
        kill = Kill(time.monotonic(), who, opening=self.steps() == 0, **what)
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            return []
        return [kill]

    def _successor(self, before: int, chance: random.Random) -> int | None:
        """Waits until one more than `before` processes were replaced; returns the new process id.

        Returns None if that takes too long, or the job has ended.
        """
        until = time.monotonic() + _SUCCESSOR_WAIT_S
        while len(found := self.replaced()) == before:
            if time.monotonic() > until or not self.runs:
                return None
            time.sleep(0.005)
        time.sleep(chance.random() * 0.5)
        return None if self._has_ended() else found[-1]

    def _has_ended(self) -> bool:
        return any((self.folder / f"final-{rank}").exists() for rank in range(self._workers))

    def _members(self) -> dict[str, list[int]]:
        """Returns process ids of servers, workers, and standbys that still wait."""
        workers = self.children("faults_job.py")
        return {"server": self.servers(), "worker": workers, "standby": self.standbys()}
