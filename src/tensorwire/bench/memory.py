"""`bench memory`: what does it cost to use another process as memory, and how near is the limit?

Measured, on one host, over shm and over loopback tcp: write and read until complete, prepared lists
(whole and by index), signal ping-pong (both processes awake; the other one asleep), fetch_add, the
8 B round trip pinned to one core and to two, and what a waiting process costs. Beside each number:
the limit (memcpy of the same pages, a raw TCP socket in C) in alternation, and the rivals, which
run in turn with both. For each: median, p99, CPU of both processes. On tcp each process gets one
half of the cores, limits and rivals too.

On the wire "gpu", which is asked for by its name, both processes use one GPU over shared memory,
and the limit is cuMemcpyAsync; `gpu_device.py` has the kinds of memory.

Not measured: several peers at once, a real network, memory of a GPU over it, sources that were not
touched before, and how the rivals do with many threads. Medians of one machine do not carry over to
another; ratios do, mostly.
"""

from __future__ import annotations

import itertools
import math
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tensorwire.bench.device import PAUSE_S, batch_of
from tensorwire.bench.harness import (
    Block,
    Budget,
    Ratio,
    Series,
    flatten,
    laps_of,
    median,
    paired_ratio,
)
from tensorwire.bench.measuring import measuring
from tensorwire.bench.operations import CPP, LIMITS, PYTHON, TORCH_COPY
from tensorwire.bench.processes import PairError, ProcessPair
from tensorwire.bench.rivals import RIVALS
from tensorwire.bench.rows import Comparison, Report, Row, format_size
from tensorwire.bench.verdicts import judge

BENCH = "memory"
SIZES = (8, 64, *(n << 10 for n in (1, 4, 64)), *(n << 20 for n in (1, 4, 16, 64, 256)))
QUICK_SIZES = (8, 4 << 10, 1 << 20, 16 << 20)
WIRES = ("shm", "tcp", "gpu")
_USUAL_WIRES = WIRES[:2]
GPU_PAIRS = ("gpu_to_gpu", "pinned_to_gpu", "gpu_to_pinned", "host_to_gpu")
BATCHES = ("batch_256x1KiB", "batch_64x64KiB")
CASES = ("write", "read", "batch", "signal", "fetch_add", "round_trip", "waiting")
SYSTEMS = (PYTHON, CPP, TORCH_COPY, *LIMITS.values(), *(rival.name for rival in RIVALS))
_DEVICE = "device"
_LAPS = 10
_SLOW_LAPS = 7  # the fewest with an interval that is not just the extremes


Pins = tuple[tuple[int, ...], tuple[int, ...]]
"""Cores of the driver and cores of the target."""


def _halves() -> Pins | None:
    """Returns the cores in two halves, one per process, as on two hosts; None with one core.

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
        """The text for the progress bar."""
        return f"{self.name} {format_size(self.size_bytes)}" if self.size_bytes else self.name

    @property
    def extent(self) -> int:
        """The bytes of memory that the case needs: the pieces of a batch lie apart."""
        return 2 * self.size_bytes if "batch" in self.action else max(8, self.size_bytes)

    @property
    def kind(self) -> str:
        """The first word of the action."""
        return self.action.partition("_")[0]

    @property
    def moves_bytes(self) -> bool:
        """True if it moves payload: its rows then have GB/s and a ratio to the limit."""
        return self.kind in ("write", "read", "batch", "round")


@dataclass(slots=True)
class MemorySettings:
    """The selection of runs; the defaults are the full bench of about ten minutes."""

    sizes: Sequence[int] = SIZES
    wires: Sequence[str] = _USUAL_WIRES
    systems: Sequence[str] = SYSTEMS
    cases: Sequence[str] = CASES
    budget: Budget = field(default_factory=Budget)
    warm_s: float = 0.2
    waiting_s: float = 4.0

    @classmethod
    def quick(cls) -> MemorySettings:
        """Returns settings for a quick run of about a minute: few sizes, wide intervals."""
        budget = Budget(case_s=0.3, block_s=1e-3, max_count=500)
        return cls(sizes=QUICK_SIZES, budget=budget, warm_s=0.05, waiting_s=1.5)


def wires_of(system: str) -> tuple[str, ...]:
    """Returns the wires on which a system of `SYSTEMS` is measured."""
    if system in (PYTHON, CPP):
        return WIRES
    if system == TORCH_COPY:
        return ("gpu",)
    options = next((rival.options for rival in RIVALS if rival.name == system), None)
    return tuple(wire for wire in WIRES if (wire in options if options else LIMITS[wire] == system))


def plan(settings: MemorySettings) -> list[Case]:
    """Returns the cases of a run, in order."""
    first, *others = sorted(os.sched_getaffinity(0))
    two: Pins | None = ((first,), (others[0],)) if others else None
    batches = [f"{batch}{way}" for batch in BATCHES for way in ("", "_by_index")]
    actions = {
        "write": [("write", size) for size in settings.sizes],
        "read": [("read", size) for size in settings.sizes],
        "batch": [(batch, math.prod(batch_of(batch))) for batch in batches],
        "signal": [("signal_awake", 8), ("signal_asleep", 8)],
        "fetch_add": [("fetch_add", 8)],
        "waiting": [("waiting", 0)],
    }
    found = []
    for wire in settings.wires:
        if wire == "gpu":
            sizes = settings.sizes if settings.sizes is not SIZES else (*SIZES, 1 << 30)
            actions_of_gpu = [f"write_{pair}" for pair in GPU_PAIRS if "write" in settings.cases]
            found += [
                Case(wire, f"gpu.{action}", action, size)
                for action in actions_of_gpu
                for size in sizes
            ]
            continue
        pins = _halves() if wire == "tcp" else None
        for case in (case for case in CASES if case in settings.cases):
            for action, size_bytes in actions.get(case, []):
                placed = pins if case != "waiting" else None
                found.append(Case(wire, f"{wire}.{action}", action, size_bytes, placed))
            if case == "round_trip" and wire == "tcp":
                for on, placed in (("one_core", ((first,), (first,))), ("two_cores", two)):
                    found.append(Case(wire, f"{wire}.{case}.{on}", case, 8, placed))
    return found


Progress = Callable[[int, int, str], None]
"""Called before each case with its index, the number of cases and a label."""


def run(settings: MemorySettings, progress: Progress | None = None) -> Report:
    """Runs the bench. Ctrl-C ends it early with the rows so far (`settings["interrupted"]`)."""
    described: dict[str, Any] = {
        key: list(getattr(settings, key)) for key in ("sizes", "wires", "systems", "cases")
    }
    cases = plan(settings)
    done = 0
    with measuring(BENCH, described | {"seconds_per_case": settings.budget.case_s}) as report:
        for wire in settings.wires:
            with _Wire(wire, settings, cases) as bench:
                for case in (case for case in cases if case.wire == wire):
                    if progress is not None:
                        progress(done, len(cases), case.label)
                    rows, comparisons = bench.measure(case)
                    report.rows += rows
                    report.comparisons += comparisons
                    done += 1
    report.verdicts = judge(report)
    if progress is not None:
        progress(done, len(cases), "done")
    return report


class _Taken:
    """The figures of one case.

    Attributes:
        laps: by system, the series of every lap; the limit beside system s is under "s|limit".
        notes: on how a rival is tuned.
        failed: why a system has no figures.
    """

    def __init__(self) -> None:
        self.laps: defaultdict[str, list[Series]] = defaultdict(list)
        self.notes: dict[str, str] = {}
        self.failed: dict[str, str] = {}

    def ratio(self, above: str, below: str) -> Ratio | None:
        """Returns the paired ratio of two systems, lap by lap."""
        found = [[median(lap.seconds) for lap in self.laps[name]] for name in (above, below)]
        pairs = min(map(len, found))
        return paired_ratio(found[0][:pairs], found[1][:pairs])

    def ratio_to_limit(self, name: str) -> Ratio | None:
        """Returns the paired ratio of a system and the limit beside it, block by block."""
        beside = flatten(self.laps[f"{name}|limit"])
        return (
            paired_ratio(beside.medians, flatten(self.laps[name]).medians)
            if beside.blocks
            else None
        )


class _Wire:
    """All processes of one wire: the device's pair and one pair per rival, kept over the cases."""

    def __init__(self, wire: str, settings: MemorySettings, cases: Sequence[Case]) -> None:
        self._wire = wire
        self._settings = settings
        self._largest = max((case.extent for case in cases if case.wire == wire), default=8)
        named = (PYTHON, CPP, TORCH_COPY) if wire == "gpu" else (PYTHON, CPP)
        self._ours = [name for name in named if name in settings.systems]
        self._rivals = [r for r in RIVALS if r.name in settings.systems and wire in r.options]
        self._pairs: dict[str, ProcessPair] = {}
        self._missing: dict[str, str] = {}
        self._pins: dict[str, Pins | None] = {}

    def __enter__(self) -> _Wire:
        module = "gpu_device" if self._wire == "gpu" else "device"
        self._start(_DEVICE, f"tensorwire.bench.{module}", {"size_bytes": self._largest})
        if {"write", "read", "batch"} & set(self._settings.cases):
            for rival in self._rivals:
                if reason := rival.missing():
                    self._missing[rival.name] = reason
                else:
                    self._start(rival.name, rival.module, rival.options[self._wire], rival.polls)
        return self

    def __exit__(self, *_: object) -> None:
        for pair in self._pairs.values():
            pair.close()

    def _start(
        self, name: str, module: str, options: dict[str, object], polls: bool = False
    ) -> None:
        try:
            self._pairs[name] = ProcessPair(module, {"wire": self._wire, **options}, polls=polls)
        except PairError as error:
            self._missing[name] = str(error)

    def _call(
        self, pair: str, names: Iterable[str], taken: _Taken, method: str, *args: Any,
        timeout_s: float = 120.0,
    ) -> Any:  # fmt: skip
        """Asks a pair; if it fails, the result is None and the first reason stays."""
        try:
            if pair not in self._pairs:
                raise PairError(self._missing[pair])
            return self._pairs[pair].call(method, *args, timeout_s=timeout_s)
        except PairError as error:
            taken.failed = dict.fromkeys(names, str(error)) | taken.failed
            if pair in self._pairs and self._pairs[pair].closed:
                self._missing[pair] = f"its processes ended: {error}"
                del self._pairs[pair]
            return None

    def _pin(self, pair: str, names: Iterable[str], taken: _Taken, case: Case) -> None:
        """Puts a pair on the cores of the case, or back on all of them."""
        if self._pins.get(pair) != case.pins:
            everywhere = tuple(sorted(os.sched_getaffinity(0)))
            self._call(pair, names, taken, "pin", *(case.pins or (everywhere, everywhere)))
            self._pins[pair] = case.pins

    # --- one case -------------------------------------------------------------------------------

    def measure(self, case: Case) -> tuple[list[Row], list[Comparison]]:
        """Returns the rows of a case and the paired comparisons with the rivals that ran in it."""
        if case.action == "waiting":
            return [self._waiting(case)], []
        if case.name.endswith("two_cores") and not case.pins:
            reason = "this process may use one core only"
            empty = Row(BENCH, case.name, "", case.size_bytes, note=reason)
            return [replace(empty, system=name) for name in self._ours], []
        taken = _Taken()
        able = self._prepare(_DEVICE, self._ours or [PYTHON], taken, case) or []
        ours = [name for name in self._ours if name in able]
        limit = LIMITS[self._wire]
        if limit not in able or not (self._ours or limit in self._settings.systems):
            limit = ""
        rivals = [rival.name for rival in self._rivals if case.kind in rival.cases]
        for name in rivals:
            taken.notes[name] = self._prepare(name, [name], taken, case) or ""
        self._take(case, taken, ours, limit, [name for name in rivals if name not in taken.failed])
        rows = self._rows(case, taken, ours, limit, rivals)
        return rows, list(self._compare(case, taken, ours, rivals))

    def _prepare(self, pair: str, names: Sequence[str], taken: _Taken, case: Case) -> Any:
        self._pin(pair, names, taken, case)
        return self._call(pair, names, taken, "prepare", case.action, case.size_bytes)

    def _take(
        self, case: Case, taken: _Taken, ours: list[str], limit: str, rivals: list[str]
    ) -> None:
        """Alternates own systems and the limit in one process; rivals take a turn once per lap."""
        budget = self._settings.budget
        pause_s = PAUSE_S if case.action == "signal_asleep" else 0.0
        each: dict[str, float] = {}
        for name in [*ours, *filter(None, [limit]), *rivals]:
            pair = name if name in rivals else _DEVICE
            seconds = self._call(pair, [name], taken, "warm", name, self._settings.warm_s)
            if seconds is not None:
                each[name] = seconds
        counts = {name: 10 if pause_s else budget.count(seconds) for name, seconds in each.items()}
        cost = {name: (seconds + pause_s) * counts[name] for name, seconds in each.items()}
        systems = [name for name in ours if name in each]
        beside = limit if limit in each else None
        if not systems:  # a limit alone, beside rivals, is a system like another
            systems, beside = [limit] if limit in each else [], None
        round_s = sum(cost[name] + (cost[beside] if beside else 0.0) for name in systems)
        slow = sum(cost[name] for name in rivals if name in cost) > 0.2
        for rounds in laps_of(budget.rounds(round_s), _SLOW_LAPS if slow else _LAPS):
            if systems:
                timeout_s = 30 + 20 * round_s * rounds
                self._device_lap(taken, systems, beside, counts, rounds, timeout_s)
            for name in rivals:
                if name in each and name not in taken.failed:
                    timeout_s = 30 + 20 * cost[name]
                    block: Block | None = self._call(
                        name, [name], taken, "block", name, counts[name], timeout_s=timeout_s
                    )
                    if block is not None:
                        taken.laps[name].append(Series([block]))

    def _device_lap(
        self, taken: _Taken, systems: list[str], limit: str | None, counts: dict[str, int],
        rounds: int, timeout_s: float,
    ) -> None:  # fmt: skip
        lap: dict[str, Series] | None = self._call(
            _DEVICE, systems, taken, "lap", systems, limit, counts, rounds, timeout_s=timeout_s
        )
        if lap is not None:
            for name, series in lap.items():
                taken.laps[name].append(series)
            if limit is not None:
                taken.laps[limit].append(flatten(lap[f"{name}|limit"] for name in systems))

    def _waiting(self, case: Case) -> Row:
        row, taken, seconds = Row(BENCH, case.name, PYTHON, 0), _Taken(), self._settings.waiting_s
        self._pin(_DEVICE, [PYTHON], taken, case)
        spin_bound_s = self._call(_DEVICE, [PYTHON], taken, "spin_bound_s")
        found = self._call(_DEVICE, [PYTHON], taken, "waiting", seconds, timeout_s=30 + seconds)
        if found is None:
            return replace(row, note=taken.failed[PYTHON])
        wall, cpu = found
        return replace(
            row,
            seconds_median=wall,
            cpu_seconds_remote=cpu,
            operations=1,
            spin_bound_s=spin_bound_s,
            note=f"waits for a word for {wall:.1f} s: {100 * cpu / wall:.2f} % of a core",
        )

    # --- rows -----------------------------------------------------------------------------------

    def _rows(
        self, case: Case, taken: _Taken, ours: list[str], limit: str, rivals: list[str]
    ) -> list[Row]:
        rows = []
        spin_bound_s = self._call(_DEVICE, [], taken, "spin_bound_s") if ours else None
        for name in self._ours:
            if name in ours or name in taken.failed:
                ratio = taken.ratio_to_limit(name) if case.moves_bytes else None
                rows.append(_row(case, taken, name, ratio, "", spin_bound_s))
        if limit:
            rows.append(_row(case, taken, limit, None, "the limit"))
        for name in rivals:
            ratio = taken.ratio(limit, name) if limit else None
            rows.append(_row(case, taken, name, ratio, taken.notes[name]))
        return rows

    def _compare(
        self, case: Case, taken: _Taken, ours: list[str], rivals: list[str]
    ) -> Iterator[Comparison]:
        pairs = [pair for pair in itertools.product(rivals, ours) if TORCH_COPY not in pair]
        if {PYTHON, TORCH_COPY} <= set(ours):
            pairs.append((TORCH_COPY, PYTHON))
        for rival, name in pairs:
            ratio = taken.ratio(rival, name)
            if ratio is not None and not {name, rival} & taken.failed.keys():
                yield Comparison(
                    case.name, case.size_bytes, name, rival, ratio.median, ratio.interval,
                    ratio.pairs,
                )  # fmt: skip


def _row(
    case: Case, taken: _Taken, name: str, ratio: Ratio | None, note: str,
    spin_bound_s: float | None = None,
) -> Row:  # fmt: skip
    row = Row(BENCH, case.name, name, case.size_bytes)
    series = flatten(taken.laps[name])
    if name in taken.failed or not series.blocks:
        return replace(row, note=taken.failed.get(name, "it took no sample"))
    local, remote = series.cpu_per_operation()
    if case.pins is not None:
        driver, target = ("-".join(map(str, dict.fromkeys((c[0], c[-1])))) for c in case.pins)
        placed = f"driver on cores {driver}, target on {target}"
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
