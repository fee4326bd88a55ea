"""`bench training`: what does a synchronous step cost, and how near is its exchange to the limit?

Measured, on one host, per model and wire, with two workers in lockstep: a *step*, the whole
iteration (forward, backward, exchange, zero_grad), and its *exchange*, from the last gradient that
any worker produced until the slowest worker may read the updated parameters, reduction and
optimizer included. All systems are resident and take turns in blocks of steps, so that whatever
disturbs the machine disturbs all; ratios are paired turn by turn. The limit takes its turn too.
Besides, for small models, what a script costs more that runs alone (`training.alone`).

Not measured: real networks, accelerators, more workers than cores allow, accuracy. That the systems
compute the same is checked once, after their first steps.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from tensorwire.bench import machine
from tensorwire.bench.harness import laps_of, median, percentile
from tensorwire.bench.processes import Pair, PairError
from tensorwire.bench.rows import Comparison, Report, Row, Verdict, format_seconds
from tensorwire.bench.training import alone
from tensorwire.bench.training.figures import Turns, limit_over_wire, turn_ratio
from tensorwire.bench.training.models import MODELS, Model
from tensorwire.bench.training.systems import LIMIT, OWN, SYSTEMS, System
from tensorwire.bench.training.team import Team
from tensorwire.bench.training.verdicts import judge, judge_alone
from tensorwire.parameters import CELL_BYTES, most_threads, threads_for

BENCH = "training"
WIRES = ("shm", "tcp", alone.ALONE)
"""Alone there is no wire, and one process."""
OPTIMIZERS = ("sgd", "adamw")
NAMES = (OWN, LIMIT, *(system.name for system in SYSTEMS if system.name != OWN))
"""In the order of their turns: the limit beside what is held against it."""
_CHECK_STEPS = 3
_SAME = 1e-4  # relative; a wrong learning rate or a sum for a mean is far above it
_WARM = 1  # steps of each turn that wake its processes up and are not counted


@dataclass(slots=True)
class Settings:
    """What to run. Defaults are the full bench of about fifteen minutes.

    Attributes:
        steps: per system and model, None for the model's own number.
        turns: into how many turns they are cut; six give a first interval.
        server_threads: that tensorwire's server may use; the limit gets as many as it then uses.
    """

    models: Sequence[Model] = MODELS
    wires: Sequence[str] = WIRES
    systems: Sequence[str] = NAMES
    optimizer: str = "sgd"
    workers: int = 2
    steps: int | None = None
    turns: int = 10
    server_threads: int = field(default_factory=most_threads)

    @classmethod
    def quick(cls) -> Settings:
        """A look of a minute or two: the smaller models, few steps, wide intervals."""
        return cls(models=MODELS[:2], steps=12, turns=6)


Progress = Callable[[int, int, str], None]
"""Called with the stages done, their number and a label, never while a turn runs."""


def run(settings: Settings, progress: Progress | None = None) -> Report:
    """Runs the bench. Ctrl-C ends it early with the rows so far (`settings["interrupted"]`)."""
    about = machine.describe()
    report = Report(BENCH, about, settings=_describe(settings, about))
    stages = [(model, wire) for model in settings.models for wire in settings.wires]
    small = [model for model in settings.models if model.size_bytes <= alone.MAX_BYTES]
    stages = [(model, wire) for model, wire in stages if wire != alone.ALONE or model in small]
    total = len(stages)
    found: dict[str, Verdict] = {}
    try:
        for done, (model, wire) in enumerate(stages):
            if wire == alone.ALONE:
                if progress is not None:
                    progress(done, total, f"{alone.ALONE}.{model.name}")
                if OWN in settings.systems:
                    rows, found[model.name] = alone.run(
                        BENCH, model, settings.optimizer, settings.turns
                    )
                    report.rows += rows
                continue
            stage = _Stage(settings, model, wire)
            if progress is not None:
                stage.tell = partial(_tell, progress, done, total, f"{wire}.{model.name}")
            try:
                stage.measure()
            finally:
                stage.close()
                report.rows += stage.rows()
                report.comparisons += stage.comparisons()
                report.settings["warnings"] += stage.warnings
    except KeyboardInterrupt:
        report.settings["interrupted"] = True
    report.settings["load_average_after"] = machine.load_average()
    report.verdicts = judge(report, [model.name for model in settings.models])
    for model in small:
        missing = judge_alone(alone.case_of(model), None, "it did not run")
        report.verdicts.append(found.get(model.name, missing))
    if progress is not None:
        progress(total, total, "done")
    return report


def _tell(progress: Progress, done: int, total: int, label: str, what: str) -> None:
    progress(done, total, f"{label} {what}")


def _describe(settings: Settings, about: dict[str, object]) -> dict[str, object]:
    return {
        "models": [dataclasses.asdict(m) | {"bytes": m.size_bytes} for m in settings.models],
        "wires": list(settings.wires),
        "systems": list(settings.systems),
        "optimizer": settings.optimizer,
        "workers": settings.workers,
        "steps": settings.steps,
        "turns": settings.turns,
        "interrupted": False,
        "warnings": machine.warnings_about(about),
    }


@dataclass(slots=True)
class _LimitTurns:
    """What the limit gave: its samples per turn, their parts, and the CPU time for all of them."""

    samples: list[list[float]] = field(default_factory=list)
    parts: list[tuple[float, float, float]] = field(default_factory=list)
    cpu_local_s: float = 0.0
    cpu_remote_s: float = 0.0


class _Stage:
    """One model over one wire: its teams, side by side, and what they gave."""

    def __init__(self, settings: Settings, model: Model, wire: str) -> None:
        self._settings = settings
        self._model = model
        self._wire = wire
        self._teams: dict[str, Team] = {}
        self._pair: Pair | None = None
        self._turns: dict[str, Turns] = {}
        self._limit = _LimitTurns()
        self._failed: dict[str, str] = {}
        self._each_s: dict[str, float] = {}
        self._notes: dict[str, str] = {}
        self._sums: dict[str, float] = {}
        self.warnings: list[str] = []
        self.tell: Callable[[str], None] = lambda _: None

    def close(self) -> None:
        """Ends all processes of the stage."""
        for team in self._teams.values():
            team.close()
        if self._pair is not None:
            self._pair.close()

    def _systems(self) -> list[System]:
        return [system for system in SYSTEMS if system.name in self._settings.systems]

    # --- measuring ------------------------------------------------------------------------------

    def measure(self) -> None:
        """Starts everything, then lets all take turns."""
        for system in self._systems():
            self.tell(f"starts {system.name}")
            self._start(system)
        if LIMIT in self._settings.systems:
            self.tell("starts the limit")
            self._start_limit()
        self._check()
        steps = self._settings.steps or self._model.steps
        turns = laps_of(steps, self._settings.turns)
        for index, count in enumerate(turns):
            self.tell(f"turn {index + 1} of {len(turns)}")
            order = [name for name in NAMES if name in self._teams or name == LIMIT]
            for name in order if index % 2 == 0 else reversed(order):
                if name == LIMIT:
                    self._limit_turn(count)
                else:
                    self._turn(name, count)

    def _start(self, system: System) -> None:
        reason = system.missing()
        if reason is not None:
            self._failed[system.name] = reason
            return
        settings = self._settings
        try:
            team = Team(
                system,
                self._wire,
                self._model,
                settings.workers,
                settings.optimizer,
                settings.server_threads,
            )
            self._teams[system.name] = team
            times, _, _ = team.run(_CHECK_STEPS)
            self._digest(system.name, team.digest())
            team.prepare()
            times, _, _ = team.run(2)
        except PairError as error:
            self._fail(system.name, error)
            return
        self._each_s[system.name] = max(t.end - t.begin for t in times[0])
        self._notes[system.name] = f"{team.note}; over {system.carries[self._wire]}"
        self._turns[system.name] = Turns()

    def _digest(self, name: str, digests: list[float]) -> None:
        if max(digests) - min(digests) > _SAME * max(digests):
            raise PairError(f"after {_CHECK_STEPS} steps the workers' parameters differ: {digests}")
        self._sums[name] = digests[0]

    def _check(self) -> None:
        """All systems began with the same values and inputs: they must be at the same place now."""
        sums = {name: value for name, value in self._sums.items() if name in self._teams}
        if sums and max(sums.values()) - min(sums.values()) > _SAME * max(sums.values()):
            self.warnings.append(
                f"{self._wire}.{self._model.name}: after {_CHECK_STEPS} steps the systems have "
                f"different parameters, sums of magnitudes {sums}"
            )

    def _limit_threads(self) -> int:
        """Those that the server uses for so many bytes."""
        cells = -(-self._model.size_bytes // CELL_BYTES)
        return threads_for(cells, self._settings.server_threads)

    def _start_limit(self) -> None:
        options = {
            "wire": self._wire,
            "elements": self._model.elements,
            "workers": self._settings.workers,
            "threads": self._limit_threads(),
            "optimizer": self._settings.optimizer,
        }
        try:
            self._pair = Pair("tensorwire.bench.training.limit", options)
        except PairError as error:
            self._fail(LIMIT, error)

    def _fail(self, name: str, error: PairError) -> None:
        self._failed[name] = str(error)
        team = self._teams.pop(name, None)
        if team is not None:
            team.close()

    def _turn(self, name: str, count: int) -> None:
        timeout_s = 60 + 20 * self._each_s[name] * (count + _WARM)
        try:
            workers, cpu_workers, cpu_server = self._teams[name].run(count + _WARM, timeout_s)
        except PairError as error:
            self._fail(name, error)
            return
        self._turns[name].add(workers, cpu_workers, cpu_server, _WARM)

    def _limit_turn(self, count: int) -> None:
        if self._pair is None or self._pair.closed:
            return
        try:
            samples, local, remote = self._pair.call("block", count, timeout_s=60 + 10 * count)
        except PairError as error:
            self._fail(LIMIT, error)
            return
        self._limit.samples.append([limit_over_wire(*sample) for sample in samples])
        self._limit.parts += samples
        self._limit.cpu_local_s += local
        self._limit.cpu_remote_s += remote

    # --- rows -----------------------------------------------------------------------------------

    def _case(self, what: str) -> str:
        return f"{self._wire}.{self._model.name}.{what}"

    def rows(self) -> list[Row]:
        """A row per system for the step and the exchange, failed ones with the reason."""
        found = []
        for what in ("step", "exchange"):
            for name in NAMES:
                if name in self._settings.systems and name != LIMIT:
                    found.append(self._row(what, name))
            if what == "exchange" and LIMIT in self._settings.systems:
                found.append(self._limit_row())
        return found

    def _row(self, what: str, name: str) -> Row:
        row = Row(BENCH, self._case(what), name, self._model.size_bytes)
        turns = self._turns.get(name)
        if name in self._failed or turns is None or not turns.step:
            return dataclasses.replace(row, note=self._failed.get(name, "it took no turn"))
        exchanges = what == "exchange"
        samples = [s for turn in (turns.exchange if exchanges else turns.step) for s in turn]
        middle = median(samples)
        ratio = turn_ratio(self._limit.samples, turns.exchange) if exchanges else None
        steps = max(1, turns.steps_with_cpu)
        apart = f"last gradients {format_seconds(median(turns.skew))} apart"
        return dataclasses.replace(
            row,
            seconds_median=middle,
            seconds_p99=percentile(samples, 0.99),
            gb_per_s=self._model.size_bytes / middle / 1e9 if exchanges else None,
            ratio_to_limit=ratio.median if ratio else None,
            ratio_interval=ratio.interval if ratio else None,
            cpu_seconds_local=(turns.cpu_exchange_s if exchanges else turns.cpu_workers_s) / steps,
            cpu_seconds_remote=turns.cpu_server_s / steps,
            operations=len(samples),
            note=f"{self._notes[name]}; {apart}",
        )

    def _limit_row(self) -> Row:
        row = Row(BENCH, self._case("exchange"), LIMIT, self._model.size_bytes)
        samples = [sample for turn in self._limit.samples for sample in turn]
        if LIMIT in self._failed or not samples:
            return dataclasses.replace(row, note=self._failed.get(LIMIT, "it took no turn"))
        apply_s, into_s, out_s = (median(part) for part in zip(*self._limit.parts, strict=True))
        threads = self._limit_threads()
        on = "1 thread" if threads == 1 else f"{threads} threads"
        note = f"a C loop on {on}: {format_seconds(apply_s)}"
        if self._wire == "tcp":
            note = (
                f"the larger of {note}, and raw socket: gradients in {format_seconds(into_s)} plus "
                f"parameters out {format_seconds(out_s)}"
            )
        middle = median(samples)
        return dataclasses.replace(
            row,
            seconds_median=middle,
            seconds_p99=percentile(samples, 0.99),
            gb_per_s=self._model.size_bytes / middle / 1e9,
            cpu_seconds_local=self._limit.cpu_local_s / len(samples),
            cpu_seconds_remote=self._limit.cpu_remote_s / len(samples),
            operations=len(samples),
            note=note,
        )

    def comparisons(self) -> list[Comparison]:
        """Paired ratios of tensorwire to each rival, for the step and the exchange."""
        own = self._turns.get(OWN)
        if own is None or OWN in self._failed:
            return []
        found = []
        for name, turns in self._turns.items():
            if name == OWN or name in self._failed:
                continue
            for what, above, below in (
                ("step", turns.step, own.step),
                ("exchange", turns.exchange, own.exchange),
            ):
                ratio = turn_ratio(above, below)
                if ratio is not None:
                    found.append(
                        Comparison(
                            self._case(what), self._model.size_bytes, OWN, name, ratio.median,
                            ratio.interval, ratio.pairs,
                        )
                    )  # fmt: skip
        return found
