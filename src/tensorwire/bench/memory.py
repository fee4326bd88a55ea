"""`bench memory`: what does it cost to use another process as memory, and how near is the limit?

Measured, on one host, over shm and over loopback tcp: write and read until complete, prepared lists
(whole and by index), signal ping-pong (both processes awake; the other one asleep), fetch_add, the
8 B round trip pinned to one core and to two, and what a waiting process costs. Beside each number:
the limit (memcpy of the same pages, a raw TCP socket in C) in alternation, and the rivals, which
run in turn with both. For each: median, p99, CPU of both processes. On tcp each process gets one
half of the cores, limits and rivals too.

Not measured: several peers at once, a real network, device memory, sources that were not touched
before, and how the rivals do with many threads. Medians of one machine do not carry over to
another; ratios do, mostly.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from tensorwire.bench import machine
from tensorwire.bench.device import PAUSE_S, batch_of
from tensorwire.bench.harness import (
    Block,
    Budget,
    Ratio,
    Series,
    flatten,
    laps_of,
    paired_ratio,
)
from tensorwire.bench.harness import median as median_of
from tensorwire.bench.operations import CPP, LIMITS, PYTHON
from tensorwire.bench.processes import Pair, PairError
from tensorwire.bench.rivals import RIVALS, Rival
from tensorwire.bench.rows import Comparison, Report, Row, format_size
from tensorwire.bench.verdicts import judge

BENCH = "memory"
SIZES = (8, 64, *(n << 10 for n in (1, 4, 64)), *(n << 20 for n in (1, 4, 16, 64, 256)))
QUICK_SIZES = (8, 4 << 10, 1 << 20, 16 << 20)
WIRES = ("shm", "tcp")
BATCHES = ("batch_256x1KiB", "batch_64x64KiB")
CASES = ("write", "read", "batch", "signal", "fetch_add", "round_trip", "waiting")
SYSTEMS = (PYTHON, CPP, *LIMITS.values(), *(rival.name for rival in RIVALS))
_LAPS = 10
_SLOW_LAPS = 7  # the fewest with an interval that is not just the extremes


Pins = tuple[tuple[int, ...], tuple[int, ...]]
"""Cores of the driver and cores of the target."""


def _halves() -> Pins | None:
    """The cores cut in two, one half per process, as two hosts would have it; None with one core.

    Without it the kernel now runs both ends of a TCP connection on one core and now on two, which
    moves any figure by a factor of two and hides the rest.
    """
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        return None
    return tuple(cores[: len(cores) // 2]), tuple(cores[len(cores) // 2 :])


@dataclass(frozen=True, slots=True)
class Case:
    """One thing to measure on one wire with one size.

    `name` is the row's; `action` what the device's driver is asked for; `pins` the cores of driver
    and target, None when the kernel may place them.
    """

    wire: str
    name: str
    action: str
    size_bytes: int
    pins: Pins | None = None

    @property
    def label(self) -> str:
        """For the progress bar."""
        return f"{self.name} {format_size(self.size_bytes)}" if self.size_bytes else self.name

    @property
    def extent(self) -> int:
        """Bytes of memory that the case needs: the pieces of a batch lie apart."""
        return 2 * self.size_bytes if "batch" in self.action else max(8, self.size_bytes)

    @property
    def moves_bytes(self) -> bool:
        """Whether there is a limit to hold it against."""
        return self.action.partition("_")[0] in ("write", "read", "batch", "round")


@dataclass(slots=True)
class Settings:
    """What to run. Defaults are the full bench of about ten minutes."""

    sizes: Sequence[int] = SIZES
    wires: Sequence[str] = WIRES
    systems: Sequence[str] = SYSTEMS
    cases: Sequence[str] = CASES
    budget: Budget = field(default_factory=Budget)
    warm_s: float = 0.2
    waiting_s: float = 4.0

    @classmethod
    def quick(cls) -> Settings:
        """A look of about a minute: few sizes, wide intervals."""
        budget = Budget(case_s=0.3, block_s=1e-3, max_count=500)
        return cls(sizes=QUICK_SIZES, budget=budget, warm_s=0.05, waiting_s=1.5)


def plan(settings: Settings) -> list[Case]:
    """The cases of a run, in order."""
    first, *others = sorted(os.sched_getaffinity(0))
    two: Pins | None = ((first,), (others[0],)) if others else None
    actions = {
        "write": [("write", size) for size in settings.sizes],
        "read": [("read", size) for size in settings.sizes],
        "batch": [
            (f"{batch}{way}", math.prod(batch_of(batch)))
            for batch in BATCHES
            for way in ("", "_by_index")
        ],
        "signal": [("signal_awake", 8), ("signal_asleep", 8)],
        "fetch_add": [("fetch_add", 8)],
        "round_trip": [],
        "waiting": [("waiting", 0)],
    }
    found = []
    for wire in settings.wires:
        pins = _halves() if wire == "tcp" else None
        for case in (case for case in CASES if case in settings.cases):
            for action, size_bytes in actions[case]:
                placed = pins if case != "waiting" else None
                found.append(Case(wire, f"{wire}.{action}", action, size_bytes, placed))
            if case == "round_trip" and wire == "tcp":
                for on, placed in (("one_core", ((first,), (first,))), ("two_cores", two)):
                    found.append(Case(wire, f"{wire}.{case}.{on}", case, 8, placed))
    return found


Progress = Callable[[int, int, str], None]
"""Called before each case with its index, the number of cases and a label."""


def run(settings: Settings, progress: Progress | None = None) -> Report:
    """Runs the bench. Ctrl-C ends it early with the rows so far (`settings["interrupted"]`)."""
    about = machine.describe()
    report = Report(
        BENCH,
        about,
        settings={
            "sizes": list(settings.sizes),
            "wires": list(settings.wires),
            "systems": list(settings.systems),
            "cases": list(settings.cases),
            "seconds_per_case": settings.budget.case_s,
            "interrupted": False,
            "warnings": machine.warnings_about(about),
        },
    )
    cases = plan(settings)
    done = 0
    try:
        for wire in settings.wires:
            with _Wire(wire, settings, cases) as bench:
                for case in (case for case in cases if case.wire == wire):
                    if progress is not None:
                        progress(done, len(cases), case.label)
                    rows, comparisons = bench.measure(case)
                    report.rows += rows
                    report.comparisons += comparisons
                    done += 1
    except KeyboardInterrupt:
        report.settings["interrupted"] = True
    report.settings["load_average_after"] = machine.load_average()
    report.verdicts = judge(report)
    if progress is not None:
        progress(done, len(cases), "done")
    return report


@dataclass(slots=True)
class _Taken:
    """What one case gave: series per system, the limit's beside them, and per-lap medians."""

    series: dict[str, Series] = field(default_factory=dict)
    lap_medians: dict[str, list[float]] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)


class _Wire:
    """All processes of one wire: the device's pair and one pair per rival, kept over the cases."""

    def __init__(self, wire: str, settings: Settings, cases: Sequence[Case]) -> None:
        self._wire = wire
        self._settings = settings
        self._largest = max((case.extent for case in cases if case.wire == wire), default=8)
        self._pairs: dict[str, Pair] = {}
        self._missing: dict[str, str] = {}
        self._pins: dict[str, Pins | None] = {}

    def __enter__(self) -> _Wire:
        self._start("device", "tensorwire.bench.device", {"size_bytes": self._largest})
        if not {"write", "read", "batch"} & set(self._settings.cases):
            return self
        for rival in self._rivals():
            reason = rival.missing()
            if reason is not None:
                self._missing[rival.name] = reason
                continue
            self._start(rival.name, rival.module, rival.options[self._wire])
        return self

    def __exit__(self, *_: object) -> None:
        for pair in self._pairs.values():
            pair.close()

    def _start(self, name: str, module: str, options: dict[str, object]) -> None:
        try:
            self._pairs[name] = Pair(module, {"wire": self._wire, **options})
        except PairError as error:
            self._missing[name] = str(error)

    def _rivals(self) -> Iterator[Rival]:
        wanted = self._settings.systems
        return (r for r in RIVALS if r.name in wanted and self._wire in r.options)

    def _pin(self, name: str, case: Case) -> None:
        """Puts a pair on the cores of the case, or back on all of them."""
        if self._pins.get(name) == case.pins:
            return
        everywhere = tuple(sorted(os.sched_getaffinity(0)))
        self._pairs[name].call("pin", *(case.pins or (everywhere, everywhere)))
        self._pins[name] = case.pins

    # --- one case -------------------------------------------------------------------------------

    def measure(self, case: Case) -> tuple[list[Row], list[Comparison]]:
        """The rows of a case and the paired comparisons with the rivals that ran in it."""
        if case.action == "waiting":
            return [self._waiting(case)], []
        if case.name.endswith("two_cores") and not case.pins:
            reason = "this process may use one core only"
            return [Row(BENCH, case.name, name, case.size_bytes, note=reason)
                    for name in self._ours()], []  # fmt: skip
        taken = _Taken()
        ours, limit = self._prepare_device(case, taken)
        rivals = self._prepare_rivals(case, taken)
        self._take(case, taken, ours, limit, rivals)
        return self._rows(case, taken, ours, limit), self._compare(case, taken, ours)

    def _ours(self) -> list[str]:
        return [name for name in (PYTHON, CPP) if name in self._settings.systems]

    def _fail(self, taken: _Taken, names: Sequence[str], pair: str, error: PairError) -> None:
        taken.failed |= dict.fromkeys(names, str(error))
        if pair in self._pairs and self._pairs[pair].closed:
            self._missing[pair] = f"its processes ended: {error}"
            del self._pairs[pair]

    def _prepare_device(self, case: Case, taken: _Taken) -> tuple[list[str], str | None]:
        """The own systems that can do the case, and the limit or None."""
        if "device" not in self._pairs:
            taken.failed |= dict.fromkeys(self._ours(), self._missing["device"])
            return [], None
        device = self._pairs["device"]
        try:
            self._pin("device", case)
            able = device.call("prepare", case.action, case.size_bytes)
        except PairError as error:
            self._fail(taken, self._ours() or [PYTHON], "device", error)
            return [], None
        limit = LIMITS[self._wire] if LIMITS[self._wire] in able else None
        if limit is not None and limit not in self._settings.systems and not self._ours():
            limit = None
        return [name for name in self._ours() if name in able], limit

    def _prepare_rivals(self, case: Case, taken: _Taken) -> list[str]:
        ready = []
        kind = case.action.partition("_")[0]
        for rival in self._rivals():
            if kind not in rival.cases:
                continue
            if rival.name in self._missing:
                taken.failed[rival.name] = self._missing[rival.name]
                continue
            try:
                self._pin(rival.name, case)
                taken.notes[rival.name] = self._pairs[rival.name].call(
                    "prepare", case.action, case.size_bytes
                )
                ready.append(rival.name)
            except PairError as error:
                self._fail(taken, [rival.name], rival.name, error)
        return ready

    def _take(
        self, case: Case, taken: _Taken, ours: list[str], limit: str | None, rivals: list[str]
    ) -> None:
        """Alternates own systems and the limit in one process; rivals take a turn once per lap."""
        budget = self._settings.budget
        pause_s = PAUSE_S if case.action == "signal_asleep" else 0.0
        each: dict[str, float] = {}
        for name in [*ours, *([limit] if limit else []), *rivals]:
            pair = name if name in rivals else "device"
            try:
                each[name] = self._pairs[pair].call("warm", name, self._settings.warm_s)
            except (PairError, KeyError) as error:
                reason = error if isinstance(error, PairError) else PairError(self._missing[pair])
                self._fail(taken, [name], pair, reason)
        counts = {name: 10 if pause_s else budget.count(seconds) for name, seconds in each.items()}
        ours = [name for name in ours if name in each]
        limit = limit if limit in each else None
        cost = {name: (seconds + pause_s) * counts[name] for name, seconds in each.items()}
        # A limit alone (rivals without tensorwire) is a system like another.
        systems, beside = (ours, limit) if ours else ([limit] if limit else [], None)
        round_s = sum(cost[name] + (cost[beside] if beside else 0.0) for name in systems)
        slow = sum(cost[name] for name in rivals if name in cost) > 0.2
        rounds = budget.rounds(round_s)
        for lap in laps_of(rounds, _SLOW_LAPS if slow else _LAPS):
            if systems:
                self._device_lap(taken, systems, beside, counts, lap, 30 + 20 * round_s * lap)
            for name in rivals:
                if name in each and name not in taken.failed:
                    self._rival_lap(taken, name, counts[name], 30 + 20 * cost[name])

    def _device_lap(
        self, taken: _Taken, systems: list[str], limit: str | None, counts: dict[str, int],
        rounds: int, timeout_s: float,
    ) -> None:  # fmt: skip
        if "device" not in self._pairs:
            return
        try:
            lap: dict[str, Series] = self._pairs["device"].call(
                "lap", systems, limit, counts, rounds, timeout_s=timeout_s
            )
        except PairError as error:
            self._fail(taken, systems, "device", error)
            return
        for name, series in lap.items():
            taken.series.setdefault(name, Series()).blocks += series.blocks
        for name in systems:
            taken.lap_medians.setdefault(name, []).append(median_of(lap[name].seconds))
        if limit is not None:
            beside = flatten(lap[f"{name}|limit"] for name in systems)
            taken.lap_medians.setdefault(limit, []).append(median_of(beside.seconds))

    def _rival_lap(self, taken: _Taken, name: str, count: int, timeout_s: float) -> None:
        try:
            block: Block = self._pairs[name].call("block", name, count, timeout_s=timeout_s)
        except PairError as error:
            self._fail(taken, [name], name, error)
            return
        taken.series.setdefault(name, Series()).blocks.append(block)
        taken.lap_medians.setdefault(name, []).append(block.median)

    def _waiting(self, case: Case) -> Row:
        row = Row(BENCH, case.name, PYTHON, 0, note="")
        if "device" not in self._pairs:
            return replace(row, note=self._missing["device"])
        seconds = self._settings.waiting_s
        try:
            self._pin("device", case)
            spin_bound_s = self._pairs["device"].call("spin_bound_s")
            wall, cpu = self._pairs["device"].call("waiting", seconds, timeout_s=30 + seconds)
        except PairError as error:
            return replace(row, note=str(error))
        return replace(
            row,
            seconds_median=wall,
            cpu_seconds_remote=cpu,
            operations=1,
            spin_bound_s=spin_bound_s,
            note=f"waits for a word for {wall:.1f} s: {100 * cpu / wall:.2f} % of a core",
        )

    # --- rows -----------------------------------------------------------------------------------

    def _rows(self, case: Case, taken: _Taken, ours: list[str], limit: str | None) -> list[Row]:
        rows = []
        spin_bound_s = None
        if "device" in self._pairs and ours:
            spin_bound_s = self._pairs["device"].call("spin_bound_s")
        for name in self._ours():
            if name in ours or name in taken.failed:
                ratio = None
                if f"{name}|limit" in taken.series and case.moves_bytes:
                    beside = taken.series[f"{name}|limit"].medians
                    ratio = paired_ratio(beside, taken.series[name].medians)
                rows.append(self._row(case, taken, name, ratio, "", spin_bound_s))
        if limit is not None:
            series = flatten(
                found
                for name, found in taken.series.items()
                if name == limit or name.endswith("|limit")
            )
            taken.series[limit] = series
            rows.append(self._row(case, taken, limit, None, "the limit", None))
        for rival in self._rivals():
            if case.action.partition("_")[0] not in rival.cases:
                continue
            ratio = self._lap_ratio(taken, limit, rival.name) if limit is not None else None
            note = taken.notes.get(rival.name, "")
            rows.append(self._row(case, taken, rival.name, ratio, note, None))
        return rows

    def _row(
        self, case: Case, taken: _Taken, name: str, ratio: Ratio | None, note: str,
        spin_bound_s: float | None,
    ) -> Row:  # fmt: skip
        row = Row(BENCH, case.name, name, case.size_bytes)
        series = taken.series.get(name)
        if name in taken.failed or series is None or not series.blocks:
            return replace(row, note=taken.failed.get(name, "it took no sample"))
        local, remote = series.cpu_per_operation()
        if case.pins is not None:
            placed = f"driver on cores {_cores(case.pins[0])}, target on {_cores(case.pins[1])}"
            note = f"{note}; {placed}" if note else placed
        return row.timed(
            series.seconds,
            moves=case.moves_bytes,
            cpu_seconds_local=local,
            cpu_seconds_remote=remote,
            operations=series.operations,
            spin_bound_s=spin_bound_s,
            note=note,
        ).beside(ratio)

    @staticmethod
    def _lap_ratio(taken: _Taken, above: str, below: str) -> Ratio | None:
        first, second = taken.lap_medians.get(above, []), taken.lap_medians.get(below, [])
        pairs = min(len(first), len(second))
        return paired_ratio(first[:pairs], second[:pairs])

    def _compare(self, case: Case, taken: _Taken, ours: list[str]) -> list[Comparison]:
        found = []
        for rival in self._rivals():
            for name in ours:
                if name in taken.failed or rival.name in taken.failed:
                    continue
                ratio = self._lap_ratio(taken, rival.name, name)
                if ratio is not None:
                    found.append(
                        Comparison(
                            case.name, case.size_bytes, name, rival.name, ratio.median,
                            ratio.interval, ratio.pairs,
                        )
                    )  # fmt: skip
        return found


def _cores(cores: tuple[int, ...]) -> str:
    return str(cores[0]) if len(cores) == 1 else f"{cores[0]}-{cores[-1]}"
