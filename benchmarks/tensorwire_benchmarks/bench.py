"""Describes, as data, a bench whose cases are training steps, and the settings of its user."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from tensorwire.bench.rows import Report, Row, Verdict
from tensorwire.parameters import most_threads
from tensorwire_benchmarks.figures import End
from tensorwire_benchmarks.systems import OWN, System
from tensorwire_benchmarks.workloads.catalog import Workload

ALONE = "alone"
"""The name that stands for a wire where one process trains alone."""
OPTIMIZER = "sgd"
"""The optimizer of models that do not need a particular one; it has momentum."""


@dataclass(slots=True)
class Settings:
    """What to run.

    Attributes:
        steps: per system and model; None for the model's own number.
        turns: the number of turns that share the steps; six are the fewest with an interval.
        server_threads: the most that tensorwire's server may use; the limit uses as many threads
            as the server does.
    """

    models: Sequence[Workload]
    wires: Sequence[str]
    systems: Sequence[str]
    workers: int = 2
    steps: int | None = None
    turns: int = 10
    server_threads: int = field(default_factory=most_threads)


@dataclass(frozen=True, slots=True)
class Bench:
    """A bench: its models, wires and systems, the names of its cases, and its verdicts.

    Attributes:
        name: the bench's name in rows.
        models, quick: all models, and the models of a quick look.
        wires, usual: all wires, and the wires that are measured unless the user names others.
        systems: the systems that train.
        names: systems and the limit in the order of their turns; the limit stands next to the
            system that is compared with it.
        judge: returns the verdicts on rows and comparisons of the models of these names.
        judge_ends: returns the verdicts on the ends of the systems, given the case's name.
        alone: returns rows and verdicts of one small model in one process.
        called: the key of the models in the settings of a report.
        own: the system that is compared with the limit and the rivals.
        stem, joint, whole: a case's name is the stem; the joint and the measured quantity follow,
            unless that quantity is `whole`.
        links: wires between two hosts, with their speed in Mbit/s.
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
    called: str = "models"
    own: str = OWN
    stem: str = "{wire}.{model}"
    joint: str = "."
    whole: str = ""
    links: Mapping[str, int] = field(default_factory=dict)

    def settings(self, quick: bool = False) -> Settings:
        """Returns the settings of the full bench, or of a quick look of some minutes."""
        if quick:
            return Settings(self.quick, self.usual, self.names, steps=12, turns=6)
        return Settings(self.models, self.usual, self.names)

    def label(self, wire: str, model: str) -> str:
        """Returns the label of a model over a wire."""
        return self.stem.format(wire=wire, model=model)

    def case(self, wire: str, model: str, what: str) -> str:
        """Returns a case's name; `what` is "exchange", "isolated", "step" or "exposed"."""
        label = self.label(wire, model)
        return label if what == self.whole else f"{label}{self.joint}{what}"
