"""One trial: what is drawn from its seed, how it goes, and the verdict."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Any

import members
import strangers
from attack import Attack, Order
from attacker import FOR_TESTS, KINDS
from judge import Evidence, complaints
from stage import HERE, Stage

SECONDS = 1.5  # of an attack
START_S = 15.0
ALL = KINDS | FOR_TESTS
JOB_KINDS = [kind.__name__ for kind in strangers.KINDS] + [
    members.ProvesAndIdles.__name__, members.MemberDescriptors.__name__, members.Greedy.__name__,
]  # fmt: skip


@dataclass(frozen=True)
class Drawn:
    """One attack of a trial: an order for each process, and signals for them."""

    kind: str
    orders: tuple[Order, ...]
    signals: tuple[tuple[float, int], ...]  # seconds after the start, signal

    def __str__(self) -> str:
        order = self.orders[0]
        values = [f"{key}={_short(value)}" for key, value in order.values.items()]
        if order.uid:
            values.append(f"uid={order.uid}")
        if order.space != "here":
            values.append(f"from={order.space.partition(':')[0]}")
        values += [signal.Signals(number).name for _, number in self.signals]
        return f"{self.kind}({', '.join(values)})"


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.2g}"
    return "+".join(value) if isinstance(value, list) else str(value)


@dataclass
class Plan:
    """The plan of a trial; drawn from the seed alone, so that it can be repeated."""

    number: int
    on_job: bool
    attacks: list[Drawn]


@dataclass
class Verdict:
    """How a trial ended."""

    plan: Plan
    evidence: Evidence
    harm: list[str]
    broken: list[str] = field(default_factory=list)  # attacks that did nothing: the harness's fault
    acts: dict[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        worst_s, what = self.evidence.worst()
        word = "HARMED" if self.harm else "BROKEN" if self.broken else "unharmed"
        return f"{word}, worst {worst_s:.3f} s ({what})"


def is_on_job(seed: str, number: int, jobs: float) -> bool:
    """True if a trial attacks the training job; `draw` needs one then."""
    return Random(f"{seed}/{number}").random() < jobs


def draw(seed: str, number: int, stage: Stage, jobs: float, only: list[str] | None = None) -> Plan:
    """The plan of a trial.

    Args:
        seed: of the whole run.
        number: of the trial.
        stage: what it will run on; without a second network nothing comes from there.
        jobs: probability that the job is attacked.
        only: kinds to choose from.
    """
    random = Random(f"{seed}/{number}")
    on_job = random.random() < jobs
    kinds = only or (JOB_KINDS if on_job else sorted(KINDS))
    names = random.sample(kinds, min(random.choice((1, 1, 2, 3)), len(kinds)))
    attacks = [_draw_one(random, name, f"{seed}/{number}/{name}", stage, on_job) for name in names]
    return Plan(number, on_job, attacks)


def _draw_one(random: Random, name: str, seed: str, stage: Stage, on_job: bool) -> Drawn:
    kind: type[Attack] = ALL[name]
    values = kind.draw(random)
    spaces = [space for space in kind.spaces if space != "network" or stage.ground.away]
    space, uid = random.choice(spaces), random.choice(kind.uids)
    aim = stage.job.aim if stage.job else stage.aim
    if space == "network" and on_job:
        space = "here"  # the job listens on loopback
    if space == "network":
        space = f"network:{stage.ground.away}"
        aim = dataclasses.replace(aim, address=f"{stage.ground.host}:{stage.port}")
    orders = tuple(
        Order(name, f"{seed}/{index}", values, aim, uid, space, SECONDS)
        for index in range(kind.processes)
    )
    signals: tuple[tuple[float, int], ...] = ()
    timing = random.random()
    start = random.uniform(0.1, 1.2)
    if timing < 0.15:
        signals = ((start, signal.SIGSTOP), (start + random.uniform(0.05, 0.5), signal.SIGCONT))
    elif timing < 0.3:
        signals = ((start, signal.SIGKILL),)
    return Drawn(name, orders, signals)


class Attacker:
    """The process of one order."""

    def __init__(self, order: Order) -> None:
        self.order = order
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "attacker.py"), order.to_json()],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            start_new_session=True,
        )  # fmt: skip
        self._text, self._errors = b"", ""

    def line(self, within_s: float) -> dict[str, Any] | None:
        """The next line that it says; None if none comes in time or it has ended."""
        assert self._process.stdout is not None
        deadline = time.monotonic() + within_s
        while b"\n" not in self._text:
            left_s = deadline - time.monotonic()
            if left_s < 0 or not select.select([self._process.stdout], [], [], left_s)[0]:
                return None
            more = os.read(self._process.stdout.fileno(), 65536)
            if not more:
                return None
            self._text += more
        line, _, self._text = self._text.partition(b"\n")
        return dict(json.loads(line))

    def go(self) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(b"\n")
            self._process.stdin.flush()

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def end(self) -> str:
        """Kills it with all that it started; gives what it had to complain of."""
        if self._process.returncode is None:
            self.signal(signal.SIGKILL)
            self._errors = self._process.communicate()[1].decode(errors="replace")
        return self._errors[-1500:]


@contextlib.contextmanager
def attackers(plan: Plan) -> Iterator[list[tuple[Drawn, Attacker]]]:
    """The processes of a trial, not yet prepared; gone afterwards."""
    started: list[tuple[Drawn, Attacker]] = []
    try:
        for drawn in plan.attacks:
            started += [(drawn, Attacker(order)) for order in drawn.orders]
        yield started
    finally:
        for _, attacker in started:
            attacker.end()


def run(stage: Stage, plan: Plan) -> Verdict:
    """Runs a trial. A caller that finds the stage harmed builds a new one."""
    aim_second = any(ALL[drawn.kind].second for drawn in plan.attacks)
    if aim_second:
        plan = _aim_at_second(plan, stage.ask("close_under_fire"))
    broken: list[str] = []
    acts: dict[str, int] = {}
    with attackers(plan) as started:
        started = _prepared(stage, started, broken)
        stage.begin()
        for _, attacker in started:
            attacker.go()
        closing_s = _let_them(stage, started, aim_second)
        evidence = stage.end()
        for drawn, attacker in started:
            said = attacker.line(1.0)
            done = int(said["acts"]) if said and "acts" in said else 0
            acts[drawn.kind] = acts.get(drawn.kind, 0) + done
            killed = any(number == signal.SIGKILL for _, number in drawn.signals)
            errors = attacker.end()
            if errors or (said is not None and done == 0 and not killed):
                broken.append(f"{drawn.kind} did nothing: {errors.strip() or 'no act'}")
    if closing_s > 2.0:
        evidence.facts.append(f"close of a Node took {closing_s:.1f} s")
    _stop_asking(stage, evidence)
    stage.settle(evidence)
    return Verdict(plan, evidence, complaints(evidence), broken, acts)


def _aim_at_second(plan: Plan, address: str) -> Plan:
    attacks = []
    for drawn in plan.attacks:
        orders = drawn.orders
        if ALL[drawn.kind].second:
            orders = tuple(
                dataclasses.replace(order, aim=dataclasses.replace(order.aim, address=address))
                for order in orders
            )
        attacks.append(dataclasses.replace(drawn, orders=orders))
    return dataclasses.replace(plan, attacks=attacks)


def _prepared(
    stage: Stage, started: list[tuple[Drawn, Attacker]], broken: list[str]
) -> list[tuple[Drawn, Attacker]]:
    """Waits for them, and lets the victim ask the first that listens; gives those that are."""
    prepared, asked = [], False
    for drawn, attacker in started:
        said = attacker.line(START_S)
        if said is None:
            broken.append(f"{drawn.kind} was not prepared: {attacker.end().strip()}")
            continue
        prepared.append((drawn, attacker))
        ready = said["ready"]
        if ALL[drawn.kind].owner and not asked:
            asked = True  # one liar at a time is asked
            stage.ask("start_asking", ready["address"], ready["transport"])
    return prepared


def _let_them(stage: Stage, started: list[tuple[Drawn, Attacker]], aim_second: bool) -> float:
    """The time of the attack; returns how long it took to close the second Node, if there is."""
    start = time.monotonic()
    events = [(when, attacker, number) for drawn, attacker in started
              for when, number in drawn.signals]  # fmt: skip
    events.sort(key=lambda event: event[0])
    closing_s = 0.0
    for when, attacker, number in events:
        time.sleep(max(start + when - time.monotonic(), 0.0))
        attacker.signal(number)
    if aim_second:
        time.sleep(max(start + SECONDS / 2 - time.monotonic(), 0.0))
        begun = time.monotonic()
        try:
            stage.ask("close_under_fire", True)
        finally:
            closing_s = time.monotonic() - begun
    time.sleep(max(start + SECONDS - time.monotonic(), 0.0))
    return closing_s


def _stop_asking(stage: Stage, evidence: Evidence) -> None:
    try:
        wrong, hangs = stage.ask("stop_asking")
    except Exception as error:
        evidence.facts.append(f"victim: does not answer: {str(error).splitlines()[0]}")
        return
    evidence.facts += wrong[:3]
    if hangs:
        evidence.facts.append("a call on a liar does not end although the liar is dead")
