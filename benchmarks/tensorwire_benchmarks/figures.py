"""Computes the figures of a step and of an exchange from the times that workers noted.

Pure functions of lists. All times are CLOCK_MONOTONIC seconds, one clock for all processes of a
host, so times of different workers can be subtracted.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tensorwire.bench.harness import Ratio, median, median_interval, paired_ratio


class StepTimes(NamedTuple):
    """One step of one worker.

    Attributes:
        begin: forward begins, right after a barrier of the bench.
        gradients_ready: the last gradient of this worker was produced, and its hooks have not sent
            it yet. In a held step (`worker.Driver.run`): all workers have their gradients.
        readable: this worker may read the updated parameters.
        end: gradients were cleared; the step is over.
        exchange_cpu_s: CPU time of this process between gradients_ready and readable.
    """

    begin: float
    gradients_ready: float
    readable: float
    end: float
    exchange_cpu_s: float


class End(NamedTuple):
    """The state of a worker, or of a whole system, after its last turn.

    Attributes:
        steps: the steps that it trained in all.
        bits: per worker, a digest of the parameters' bits.
        in_place: the share of its gradients' bytes that were produced in place in its last step, of
            the worker with the least; None for a system without placement.
    """

    steps: int
    bits: list[str]
    in_place: float | None = None

    @classmethod
    def of(cls, workers: Sequence[End]) -> End:
        """Combines the ends of a system's workers into the end of the system."""
        return cls(
            workers[0].steps,
            [bits for worker in workers for bits in worker.bits],
            min((w.in_place for w in workers if w.in_place is not None), default=None),
        )


Steps = Sequence[StepTimes]


_OF_A_STEP: dict[str, Callable[[Steps], float]] = {
    # From the first worker's begin to the last worker's end.
    "step": lambda step: max(t.end for t in step) - min(t.begin for t in step),
    # From the last gradient of any worker until the slowest worker may read: without the wait of a
    # worker for another one's computation, and without what a system did during backward.
    "exchange": lambda step: max(t.readable for t in step) - max(t.gradients_ready for t in step),
    # How far apart the workers' last gradients were.
    "skew": lambda step: (
        max(t.gradients_ready for t in step) - min(t.gradients_ready for t in step)
    ),
}
"""Functions from the times of all workers in one step to seconds, by name."""


def seconds_of(what: str, workers: Sequence[Steps]) -> list[float]:
    """Returns the seconds of the quantity `what` of `_OF_A_STEP`, for each step."""
    return [_OF_A_STEP[what](step) for step in zip(*workers, strict=True)]


@dataclass(slots=True)
class Turns:
    """All turns of one system, or of the limit, at one model over one wire.

    Attributes:
        samples: seconds, turn by turn, by the names of `seconds_of`; "isolated" has the exchanges
            of held steps.
        cpu_workers_s, cpu_exchange_s, cpu_server_s: CPU seconds of all steps that were not held, of
            all workers together.
        steps_with_cpu: the number of these steps.
        cpu_isolated_s, cpu_isolated_server_s, steps_isolated: the same for exchanges of held steps.
    """

    samples: dict[str, list[list[float]]] = field(default_factory=lambda: defaultdict(list))
    cpu_workers_s: float = 0.0
    cpu_exchange_s: float = 0.0
    cpu_server_s: float = 0.0
    steps_with_cpu: int = 0
    cpu_isolated_s: float = 0.0
    cpu_isolated_server_s: float = 0.0
    steps_isolated: int = 0

    def add(
        self, workers: Sequence[Steps], cpu_workers_s: float, cpu_server_s: float, warm: int
    ) -> None:
        """Adds a turn whose first `warm` steps count for CPU time only."""
        for what in _OF_A_STEP:
            self.samples[what].append(seconds_of(what, [steps[warm:] for steps in workers]))
        self.cpu_workers_s += cpu_workers_s
        self.cpu_server_s += cpu_server_s
        self.cpu_exchange_s += sum(t.exchange_cpu_s for steps in workers for t in steps)
        self.steps_with_cpu += len(workers[0])

    def add_isolated(self, workers: Sequence[Steps], cpu_server_s: float, warm: int) -> None:
        """Adds a turn of held steps; the first `warm` count for CPU time only."""
        kept = [steps[warm:] for steps in workers]
        self.samples["isolated"].append(seconds_of("exchange", kept))
        self.cpu_isolated_s += sum(t.exchange_cpu_s for steps in workers for t in steps)
        self.cpu_isolated_server_s += cpu_server_s
        self.steps_isolated += len(workers[0])

    def all(self, what: str) -> list[float]:
        """Returns the samples of all turns in one list."""
        return [sample for turn in self.samples[what] for sample in turn]


def turn_ratio(above: Sequence[Sequence[float]], below: Sequence[Sequence[float]]) -> Ratio | None:
    """Returns the paired ratio of two systems: the median of turn i above, divided by below's.

    A system that failed has fewer turns; only turns that both took are pairs.
    """
    pairs = [(median(a), median(b)) for a, b in zip(above, below, strict=False) if a and b]
    return paired_ratio([a for a, _ in pairs], [b for _, b in pairs])


class Extra(NamedTuple):
    """The median of paired differences in seconds, and its 95 % interval (None under six pairs)."""

    seconds: float
    interval: tuple[float, float] | None


def extra_seconds(own: Sequence[float], plain: Sequence[float]) -> Extra:
    """Returns the median of own[i] - plain[i], in seconds, with its interval.

    Raises:
        ValueError: no pairs, or sequences of unequal length.
    """
    differences = [a - b for a, b in zip(own, plain, strict=True)]
    return Extra(median(differences), median_interval(differences))


def limit_over_wire(apply_s: float, into_s: float, out_s: float) -> float:
    """Returns the seconds of the limit of an exchange from its parts; on shm both ways are 0.

    A server may apply one tile while the next arrives, so the larger of applying and transfer
    counts. The two directions add up: one thread copies every byte of both through the kernel.
    """
    return max(apply_s, into_s + out_s)
