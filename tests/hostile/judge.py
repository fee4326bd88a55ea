"""Judges harm: from the observations of a trial to a list of complaints. Pure.

The limits are for a machine of two cores that others use as well. The effect of the machine itself
in the meantime is known from `plain`, two processes that compute a little and play ping-pong over
plain sockets, and from how long the victim was ready to run and had no core; that is allowed on
top.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from honest import CONNECT_S, Observed, Timed

TURNS = 20  # of processes, one after the other, that a step of the job takes
LIMIT_S = 1.0  # for the worst of all operations of honest parties, and for a step of the job
MULTIPLE = 30.0  # medians, of the undisturbed ones
ENOUGH = 3  # operations for a median; of fewer each is judged as one that took long
LEAST_S = 0.3e-3  # a median below is never compared
# Memory in use in the victim's process beyond what it had at first. Twenty peers that take no
# answers cost 20 MiB for a while; after that 25 trials leave 3 MiB.
MEMORY_BYTES = 16 << 20
PEAK_BYTES = 96 << 20
IDLE_SHARE = 0.5  # of a core, after the attack, when all rest


@dataclass
class Evidence:
    """The evidence of one trial.

    Attributes:
        parties: what honest parties saw.
        plain: what the plain pair saw.
        waited_s: the longest that a thread of the victim was ready to run and did not.
        seconds: of the attack.
        undisturbed: median seconds of each operation, (party, kind), before any attack.
        job_steps: seconds between two steps of the training job; None without one.
        job_undisturbed_s: median of that before any attack.
        growth: what the victim holds and had not, a line each.
        memory_bytes, peak_bytes: of the victim beyond that at first; the peak with freed memory.
        idle_share: how much of a core the victim used when all rested.
        facts: harm that was seen otherwise, as text.
    """

    parties: dict[str, Observed] = field(default_factory=dict)
    plain: Observed = field(default_factory=Observed)
    waited_s: float = 0.0
    seconds: float = 1.5
    undisturbed: dict[tuple[str, str], float] = field(default_factory=dict)
    job_steps: list[float] | None = None
    job_undisturbed_s: float = 0.0
    growth: list[str] = field(default_factory=list)
    memory_bytes: int = 0
    peak_bytes: int = 0
    idle_share: float = 0.0
    facts: list[str] = field(default_factory=list)

    @property
    def machine(self) -> Timed:
        """The effect of the machine on the plain pair."""
        timed = Timed([s for of in self.plain.operations.values() for s in of.seconds])
        if self.plain.under_way:
            timed.seconds.append(self.plain.under_way[1])
        return timed

    @property
    def machine_s(self) -> float:
        """The time that the machine may have added to one operation."""
        return self.machine.worst_s + self.waited_s

    @property
    def slowdown(self) -> float:
        """How many times longer the victim's work took, because it had no core."""
        return 1 / (1 - min(self.waited_s / self.seconds, 0.98))

    def worst(self) -> tuple[float, str]:
        """The longest operation of an honest party, also one under way, in seconds; and which."""
        found = [(0.0, "nothing")]
        for party, seen in self.parties.items():
            found += [(timed.worst_s, f"{party}: {kind}") for kind, timed in
                      seen.operations.items()]  # fmt: skip
            if seen.under_way:
                found.append((seen.under_way[1], f"{party}: {seen.under_way[0]}, still going on"))
        if self.job_steps:
            found.append((max(self.job_steps), "job: step"))
        return max(found)


def complaints(evidence: Evidence) -> list[str]:
    """How honest parties were harmed; empty if they were not."""
    found = list(evidence.facts)
    machine_s = evidence.machine_s
    for party, seen in evidence.parties.items():
        found += _few(seen.errors)
        found += _too_long(party, seen, machine_s)
        found += _slower(party, seen, evidence)
        if not (seen.operations or seen.under_way or seen.errors):
            found.append(f"{party}: did nothing at all")
    if evidence.job_steps is not None:
        found += _of_job(evidence, machine_s)
    found += [f"left behind: {line}" for line in _few(evidence.growth)]
    if evidence.memory_bytes > MEMORY_BYTES:
        found.append(f"memory: grew by {evidence.memory_bytes >> 20} MiB and stayed")
    if evidence.peak_bytes > PEAK_BYTES:
        found.append(f"memory: grew by {evidence.peak_bytes >> 20} MiB in between")
    if evidence.idle_share > IDLE_SHARE:
        found.append(f"the Node uses {evidence.idle_share:.0%} of a core when all rest")
    return found


def _few(lines: list[str]) -> list[str]:
    return lines if len(lines) <= 3 else [*lines[:3], f"and {len(lines) - 3} more"]


def _too_long(party: str, seen: Observed, machine_s: float) -> list[str]:
    found = []
    for kind, timed in seen.operations.items():
        limit_s = CONNECT_S if kind.startswith("connect") else LIMIT_S
        if timed.worst_s > limit_s + machine_s:
            found.append(f"{party}: {kind} took {timed.worst_s:.2f} s"
                         f" (the machine: {machine_s:.2f} s)")  # fmt: skip
    if seen.under_way and seen.under_way[1] > LIMIT_S + machine_s:
        kind, so_far_s = seen.under_way
        limit_s = CONNECT_S if kind.startswith("connect") else LIMIT_S
        if so_far_s > limit_s + machine_s:
            found.append(f"{party}: {kind} hangs, for {so_far_s:.2f} s so far")
    return found


def _slower(party: str, seen: Observed, evidence: Evidence) -> list[str]:
    found = []
    for kind, timed in seen.operations.items():
        before_s = evidence.undisturbed.get((party, kind))
        if before_s is None or len(timed.seconds) < ENOUGH:
            continue
        plain_s = evidence.machine.median_s
        limit_s = MULTIPLE * evidence.slowdown * max(before_s, plain_s, LEAST_S)
        if timed.median_s > limit_s:
            found.append(f"{party}: {kind} takes {1e3 * timed.median_s:.1f} ms,"
                         f" and {1e3 * before_s:.2f} ms undisturbed")  # fmt: skip
    return found


def _of_job(evidence: Evidence, machine_s: float) -> list[str]:
    steps = Timed(evidence.job_steps or [])
    if not steps.seconds:
        return ["job: no step was done"]
    found = []
    if steps.worst_s > LIMIT_S + TURNS * machine_s:
        found.append(f"job: a step took {steps.worst_s:.2f} s (the machine: {machine_s:.2f} s)")
    limit_s = MULTIPLE * evidence.slowdown * max(evidence.job_undisturbed_s, LEAST_S)
    if steps.median_s > limit_s:
        found.append(f"job: a step takes {1e3 * steps.median_s:.0f} ms,"
                     f" and {1e3 * evidence.job_undisturbed_s:.0f} ms undisturbed")  # fmt: skip
    return found
