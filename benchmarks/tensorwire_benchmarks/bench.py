"""A bench whose cases are training steps, as data, and what may be chosen of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from tensorwire.bench.rows import Report, Row, Verdict
from tensorwire.parameters import most_threads
from tensorwire_benchmarks.figures import End
from tensorwire_benchmarks.systems import OWN, System
from tensorwire_benchmarks.workloads.catalog import Workload

ALONE = "alone"
"""The wire that is none: one process."""


@dataclass(slots=True)
class Settings:
    """What to run.

    Attributes:
        optimizer: of models that need none of their own.
        steps: per system and model, None for the model's own number.
        turns: into how many turns they are cut; six give a first interval.
        server_threads: that tensorwire's server may use; the limit gets as many as it then uses.
    """

    models: Sequence[Workload]
    wires: Sequence[str]
    systems: Sequence[str]
    optimizer: str = "sgd"
    workers: int = 2
    steps: int | None = None
    turns: int = 10
    server_threads: int = field(default_factory=most_threads)


@dataclass(frozen=True, slots=True)
class Bench:
    """What a bench measures, by which names, and how it is judged.

    Attributes:
        name: as in rows.
        called: what its models are called in the settings of a report.
        models, quick: all, and those of a quick look.
        wires, usual: all, and those that are measured unless others are named.
        systems: those that train.
        names: of systems and limit in the order of turns, the limit beside what is held against it.
        own: the system that limit and rivals are compared with.
        stem, joint, whole: how cases are called: by model and wire, then what was measured, but for
            what is the `whole`.
        alone: gives rows and verdicts of one small model in one process.
        parts: whether there are rows for what a step is made of.
        judge: the verdicts that rows and comparisons tell on models of these names.
        judge_ends: those that the ends of the systems tell, by the name of the case.
        links: wires that lead from one host to another, with their speed in Mbit/s.
    """

    name: str
    models: Sequence[Workload]
    quick: Sequence[Workload]
    wires: Sequence[str]
    usual: Sequence[str]
    systems: Sequence[System]
    names: Sequence[str]
    judge: Callable[[Report, Sequence[str]], list[Verdict]]
    judge_ends: Callable[[str, Mapping[str, End]], list[Verdict]] = lambda case, ends: []
    alone: Callable[[Bench, Workload, Settings], tuple[list[Row], list[Verdict]]] | None = None
    parts: bool = False
    called: str = "models"
    own: str = OWN
    stem: str = "{wire}.{model}"
    joint: str = "."
    whole: str = ""
    links: Mapping[str, int] = field(default_factory=dict)

    def settings(self, quick: bool = False) -> Settings:
        """The full bench, or a look of some minutes: few models and steps, wide intervals."""
        if quick:
            return Settings(self.quick, self.usual, self.names, steps=12, turns=6)
        return Settings(self.models, self.usual, self.names)

    def label(self, wire: str, model: str) -> str:
        """A model over a wire."""
        return self.stem.format(wire=wire, model=model)

    def case(self, wire: str, model: str, what: str) -> str:
        """The name of a case; `what` is "exchange", "isolated", "step" or a part of it."""
        label = self.label(wire, model)
        return label if what == self.whole else f"{label}{self.joint}{what}"
