"""`make test-hostile`: seeded random trials of hostile programs against honest ones.

Each trial draws one to three attacks from its seed, lets them run for a moment, and judges whether
honest parties were harmed: see judge.py for the limits. Ends with 1 if anybody was.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import secrets
import signal
import sys
import time
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[1:1] = [str(ROOT), str(ROOT / "peers")]
# The processes of a group are started afresh and import the same modules.
os.environ["PYTHONPATH"] = os.pathsep.join(sys.path[:3])

from stage import Ground, Job, Stage  # noqa: E402
from trial import ALL, Verdict, draw, is_on_job, run  # noqa: E402

JOBS = 0.15  # of the trials attack a training job
REBUILD_AFTER = 25  # trials, so that stages begin afresh also when nobody is harmed


class Run:
    """The trials of one seed, on as few stages as possible."""

    def __init__(self, seed: str, jobs: float, only: list[str] | None) -> None:
        self.seed, self.jobs, self.only = seed, jobs, only
        self.verdicts: list[Verdict] = []
        # What else repeats a trial.
        options = [f"--jobs {jobs:g}"] if jobs != JOBS else []
        options += [f"--only {' '.join(only)}"] if only else []
        self.narrowed = f" ARGS='{' '.join(options)}'" if options else ""

    def trials(self, numbers: list[int]) -> None:
        """Runs them, a line each and more lines where a process was harmed."""
        with contextlib.ExitStack() as stack:
            ground = stack.enter_context(Ground())
            if ground.why:
                print(f"no attacks from another network: {ground.why}", flush=True)
            on_stage = stack.enter_context(contextlib.ExitStack())
            stage: Stage | None = None
            job: Job | None = None
            used = 0
            for number in numbers:
                if stage is None:
                    stage, job, used = on_stage.enter_context(Stage(ground)), None, 0
                on_job = is_on_job(self.seed, number, self.jobs)
                if on_job and job is None:
                    job = on_stage.enter_context(Job())
                stage.job = job if on_job else None
                verdict = run(stage, draw(self.seed, number, stage, self.jobs, self.only))
                self.verdicts.append(verdict)
                self._say(verdict)
                used += 1
                if verdict.harm or used == REBUILD_AFTER:
                    on_stage.close()
                    stage = None

    def _say(self, verdict: Verdict) -> None:
        plan = verdict.plan
        attacks = " & ".join(map(str, plan.attacks))
        again = f"SEED={self.seed} TRIAL={plan.number}{self.narrowed}"
        place = " on a job" if plan.on_job else ""
        print(f"{again}{place}: {attacks}: {verdict}", flush=True)
        for line in verdict.harm + verdict.broken:
            print(f"    {line}", flush=True)

    def summary(self) -> str:
        """A table: a line per kind of attack."""
        rows: dict[str, list[Verdict]] = defaultdict(list)
        for verdict in self.verdicts:
            for drawn in verdict.plan.attacks:
                rows[drawn.kind].append(verdict)
        lines = [f"{'attack':20} {'trials':>6} {'harmed':>6} {'alone':>6} {'acts':>8} {'worst':>8}"]
        for kind in sorted(rows):
            of = rows[kind]
            harmed = [verdict for verdict in of if verdict.harm]
            alone = sum(len(verdict.plan.attacks) == 1 for verdict in harmed)
            acts = sum(verdict.acts.get(kind, 0) for verdict in of)
            worst_s = max(verdict.evidence.worst()[0] for verdict in of)
            lines.append(
                f"{kind:20} {len(of):6} {len(harmed):6} {alone:6} {acts:8} {worst_s:6.2f} s"
            )
        harmed = sum(bool(verdict.harm) for verdict in self.verdicts)
        broken = sum(bool(verdict.broken) for verdict in self.verdicts)
        lines.append(f"{len(self.verdicts)} trials, {harmed} harmed somebody, {broken} broken")
        return "\n".join(lines)

    @property
    def failed(self) -> bool:
        return any(verdict.harm or verdict.broken for verdict in self.verdicts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", default="", help="a number or word; default: a random one")
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--trial", default="", help="run this one alone")
    parser.add_argument("--jobs", type=float, default=JOBS, help="share of trials on a job")
    parser.add_argument("--only", nargs="+", choices=sorted(ALL), help="draw from these kinds")
    options = parser.parse_args()
    seed = options.seed or str(secrets.randbelow(1_000_000))
    numbers = [int(options.trial)] if options.trial else list(range(1, options.trials + 1))
    print(f"SEED={seed}, {len(numbers)} trials", flush=True)
    start = time.monotonic()
    # Also then the networks go away and the processes end.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    trials = Run(seed, options.jobs, options.only)
    try:
        trials.trials(numbers)
    finally:
        print(f"\n{trials.summary()}, {time.monotonic() - start:.0f} s", flush=True)
    return int(trials.failed)


if __name__ == "__main__":
    sys.exit(main())
