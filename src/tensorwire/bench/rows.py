"""Holds the result of a bench: one row per case, system and size, in a JSON file.

A row is plain data and knows nothing about how it was measured. All figures are None in a row of a
system that could not run; `note` then carries the reason, so that a missing rival is seen and not
silently left out.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from tensorwire.bench.harness import Ratio, median, paired_ratio, percentile

FORMAT = 2
"""Version of the JSON layout; grows when a key changes its meaning."""
DIGITS = 4
"""Significant digits of a figure in a file; more than any machine repeats."""
MOST_POINTS = 50
"""The longest list of numbers that a file has; of a longer one some are kept, evenly apart."""


@dataclass(frozen=True, slots=True)
class Row:
    """One measured figure with everything needed to judge it.

    Attributes:
        bench: the question, for example "memory".
        case: what was done, wire first: "shm.write", "tcp.round_trip.one_core".
        system: who did it: "tensorwire" (from Python), "tensorwire-c++", a limit or a rival.
        bytes: payload of one operation.
        seconds_median, seconds_p99: of one operation, from call to completion.
        gb_per_s: bytes / seconds_median / 1e9; None where a case moves no bytes.
        ratio_to_limit: median of the paired ratios limit time / own time. 1.0 is the speed of the
            limit, 0.5 half of it. None where the case moves no bytes or has no limit.
        ratio_interval: its 95 % interval, None with fewer than six pairs.
        cpu_seconds_local, cpu_seconds_remote: CPU time of the calling process and of its peer per
            operation (all threads), taken over the whole measured interval. Divided by
            seconds_median they give the share of a core.
        operations: how many operations the figures rest on.
        spin_bound_s: how long the measured node spins before it sleeps; None for other systems.
        note: how the system was tuned, or why there is no figure.
    """

    bench: str
    case: str
    system: str
    bytes: int
    seconds_median: float | None = None
    seconds_p99: float | None = None
    gb_per_s: float | None = None
    ratio_to_limit: float | None = None
    ratio_interval: tuple[float, float] | None = None
    cpu_seconds_local: float | None = None
    cpu_seconds_remote: float | None = None
    operations: int = 0
    spin_bound_s: float | None = None
    note: str = ""

    @property
    def measured(self) -> bool:
        """True if the row has figures."""
        return self.seconds_median is not None

    def timed(self, seconds: Sequence[float], *, moves: bool = False, **figures: Any) -> Self:
        """Returns the row with median and p99 of these samples, their number, and further figures.

        Where the operation `moves` its bytes, GB/s follow from the median.
        """
        middle = median(seconds)
        found = {
            "seconds_median": middle,
            "seconds_p99": percentile(seconds, 0.99),
            "gb_per_s": self.bytes / middle / 1e9 if moves else None,
            "operations": len(seconds),
        }
        return dataclasses.replace(self, **(found | figures))

    def beside(self, ratio: Ratio | None) -> Self:
        """Returns the row with the ratio to its limit, if there is one."""
        if ratio is None:
            return self
        return dataclasses.replace(self, ratio_to_limit=ratio.median, ratio_interval=ratio.interval)


@dataclass(frozen=True, slots=True)
class Verdict:
    """One bar and how far the measurement is from it.

    `measured` and `bar` are in `unit`; `direction` is ">=" or "<=". `met` is None when the case was
    not measured (a missing rival, a size left out), which is not the same as met.
    """

    name: str
    bar: float
    direction: str
    unit: str
    measured: float | None = None
    interval: tuple[float, float] | None = None
    met: bool | None = None
    detail: str = ""

    @classmethod
    def of(
        cls, name: str, direction: str, bar: float, unit: str, measured: float | None,
        interval: tuple[float, float] | None = None, detail: str = "",
    ) -> Verdict:  # fmt: skip
        """Makes the verdict on a figure; without a figure `detail` says why there is none."""
        if measured is None:
            return cls(name, bar, direction, unit, detail=detail)
        met = measured >= bar if direction == ">=" else measured <= bar
        return cls(name, bar, direction, unit, measured, interval, met, detail)

    @property
    def distance(self) -> float | None:
        """The distance to the bar in `unit`; 0 when it is met, None when not measured."""
        if self.measured is None or self.met is None:
            return None
        return 0.0 if self.met else abs(self.measured - self.bar)

    def line(self) -> str:
        """Returns the verdict as one line of text."""
        if self.measured is None or self.met is None:
            return f"not measured  {self.name}: {self.detail}"
        word = "met   " if self.met else "MISSED"
        text = f"{word}  {self.name}: {self.measured:.3g} {self.unit}".rstrip()
        text += f" (bar {self.direction} {self.bar:g}"
        if self.interval is not None:
            text += f", 95 % interval {self.interval[0]:.3g} to {self.interval[1]:.3g}"
        text += ")"
        if not self.met:
            text += f", {' '.join(f'{self.distance:.3g} {self.unit}'.split())} away"
        return f"{text}; {self.detail}" if self.detail else text


@dataclass(frozen=True, slots=True)
class Comparison:
    """A paired ratio of speeds, rival time / own time: 1.0 is equal, 2.0 twice as fast as it."""

    case: str
    bytes: int
    system: str
    rival: str
    ratio: float
    interval: tuple[float, float] | None = None
    pairs: int = 0


@dataclass(slots=True)
class Report:
    """All rows of one run, the machine they were taken on, comparisons with rivals, verdicts."""

    bench: str
    machine: Mapping[str, Any]
    rows: list[Row] = field(default_factory=list)
    comparisons: list[Comparison] = field(default_factory=list)
    verdicts: list[Verdict] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)

    def find(self, case: str, system: str, size_bytes: int) -> Row | None:
        """Returns the row of a case, system and size; None when there is none."""
        wanted = (case, system, size_bytes)
        return next((row for row in self.rows if (row.case, row.system, row.bytes) == wanted), None)

    def add(self, other: Report, name: str) -> None:
        """Takes over the results of another run on this machine; `settings[name]` are its own."""
        self.rows += other.rows
        self.comparisons += other.comparisons
        self.verdicts += other.verdicts
        self.settings[name] = other.settings
        self.settings["warnings"] += other.settings["warnings"]
        self.settings["interrupted"] |= other.settings["interrupted"]

    def compare(
        self, case: str, size_bytes: int, system: str, rival: str,
        rivals: Sequence[float], own: Sequence[float],
    ) -> None:  # fmt: skip
        """Adds how many times as fast as the rival the system is, of times that are pairs."""
        ratio = paired_ratio(rivals, own)
        if ratio is not None:
            found = ratio.median, ratio.interval, ratio.pairs
            self.comparisons.append(Comparison(case, size_bytes, system, rival, *found))

    def to_json(self) -> dict[str, Any]:
        """Returns the report as JSON-ready data: summaries, as short as they can be.

        Rows, comparisons and verdicts are tables: a list with the names of the columns, then the
        values of each. Figures have `DIGITS` digits and lists of numbers `MOST_POINTS` entries.
        Columns without a value are left out.
        """
        return {
            "format": FORMAT,
            "bench": self.bench,
            "settings": _short(self.settings),
            "machine": _short(dict(self.machine)),
            "rows": _table([_plain(row, self.bench) for row in self.rows]),
            "comparisons": _table([_plain(comparison) for comparison in self.comparisons]),
            "verdicts": _table([_plain(verdict) for verdict in self.verdicts]),
        }

    def write(self, path: str | os.PathLike[str]) -> None:
        """Writes the JSON file in one step: readers see the old file or the whole new one.

        Tables have a line for each row.
        """
        parts = []
        for key, value in self.to_json().items():
            lines = ",\n  ".join(map(_text, value)) if isinstance(value, list) else ""
            parts.append(f'"{key}": ' + (f"[\n  {lines}\n ]" if lines else _text(value)))
        write_text(path, "{" + ",\n ".join(parts) + "}\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Report:
        """Reads a file that `write` made.

        Raises:
            ValueError: not such a file, or one of another format.
        """
        try:
            return cls._from_json(json.loads(Path(path).read_text()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path}: not a bench report of format {FORMAT}") from error

    @classmethod
    def _from_json(cls, data: Any) -> Report:
        if data["format"] != FORMAT:
            raise ValueError(data["format"])
        return cls(
            bench=data["bench"],
            machine=dict(data["machine"]),
            settings={"interrupted": False, **data["settings"]},
            rows=[_made(Row, {"bench": data["bench"], **row}) for row in _items(data["rows"])],
            comparisons=[_made(Comparison, item) for item in _items(data["comparisons"])],
            verdicts=[_made(Verdict, item) for item in _items(data["verdicts"])],
        )


def write_json(path: str | os.PathLike[str], data: Any) -> None:
    """Writes data in one step: readers see the old file or the whole new one."""
    write_text(path, json.dumps(data, indent=1, allow_nan=False) + "\n")


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Writes a file in one step: readers see the old file or the whole new one."""
    target = Path(path)
    partial = target.with_name(target.name + ".partial")
    partial.write_text(text)
    partial.replace(target)


def _text(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def _table(items: Sequence[Mapping[str, Any]]) -> list[list[Any]]:
    """Returns the names of all columns, then the values of each item; null is for none."""
    names = list(dict.fromkeys(name for item in items for name in item))
    return [names, *([item.get(name) for name in names] for item in items)] if items else []


def _items(table: Sequence[Sequence[Any]]) -> list[dict[str, Any]]:
    """Returns the items of a table."""
    pairs = (zip(table[0], values, strict=True) for values in table[1:])
    return [{name: value for name, value in each if value is not None} for each in pairs]


def _plain(item: Row | Comparison | Verdict, bench: str = "") -> dict[str, Any]:
    """Returns the fields that are neither None nor the default; a row without its own bench."""
    usual = {field.name: field.default for field in dataclasses.fields(item)} | {"bench": bench}
    fields = ((key, _short(value)) for key, value in dataclasses.asdict(item).items())
    return {key: value for key, value in fields if value is not None and value != usual.get(key)}


def _short(value: Any) -> Any:
    """Returns the value without what nobody reads: digits, and points of a curve."""
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _short(each) for key, each in value.items()}
    if not isinstance(value, list | tuple):
        return value
    last = len(value) - 1
    if last >= MOST_POINTS and all(isinstance(each, int | float) for each in value):
        value = [value[round(at * last / (MOST_POINTS - 1))] for at in range(MOST_POINTS)]
    return [_short(each) for each in value]


def _made(kind: Any, data: dict[str, Any]) -> Any:
    """Makes a dataclass from the dictionary of `_plain`; an interval becomes a pair.

    Keys that are no fields were computed from the fields, and are ignored.
    """
    names = {field.name for field in dataclasses.fields(kind)} & data.keys()
    found = {name: data[name] for name in names}
    return kind(**{k: tuple(v) if isinstance(v, list) else v for k, v in found.items()})


_UNITS = {"": 1, "B": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}


def parse_size(text: str) -> int:
    """Returns the bytes that "8", "64KiB" or "1 MiB" means (binary units, any case).

    Raises:
        ValueError: not a positive size.
    """
    stripped = text.strip()
    digits = stripped.rstrip("KkMmGgIiBb ")
    unit = stripped[len(digits) :].strip().upper()
    if unit not in _UNITS or not digits.isdigit() or int(digits) == 0:
        raise ValueError(f"{text!r} is no size; write for example 8, 64KiB or 1MiB")
    return int(digits) * _UNITS[unit]


def format_size(size_bytes: int) -> str:
    """Returns the shortest exact text for a size: "8 B", "64 KiB", "1 MiB"."""
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size_bytes >= factor and size_bytes % factor == 0:
            return f"{size_bytes // factor} {unit}"
    return f"{size_bytes} B"


def format_seconds(seconds: float | None) -> str:
    """Returns three significant figures in the unit that suits: "1.85 µs"."""
    if seconds is None:
        return "–"
    for unit, factor in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if abs(seconds) >= 0.9995 * factor:  # what rounds to 1000 of a unit is 1 of the next
            return f"{seconds / factor:.3g} {unit}"
    return f"{seconds / 1e-9:.3g} ns"
