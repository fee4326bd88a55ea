"""Draws the figure of `scaling.py`: the rate of a job by the number of its workers."""

from __future__ import annotations

import os
from typing import Any

from tensorwire.bench.report import figure
from tensorwire.bench.rows import Report
from tensorwire_benchmarks.scaling import RAW, Point, ScalingSettings
from tensorwire_benchmarks.systems import LIMIT, OWN

_LOOKS = ("#0072B2", "o"), ("#D55E00", "s"), ("#009E73", "^"), ("#CC79A7", "D")  # Okabe-Ito


def draw_scaling(report: Report, path: str | os.PathLike[str]) -> None:
    """Draws the rate of all workers together, divided by the rate of one: a panel per mode.

    Dotted lines are calculated limits, dashed lines are raw sockets, the grey line is linear.


    Raises:
        UnavailableError: matplotlib is not installed.
        ValueError: the report has no measured scaling.
    """
    told = report.settings.get("scaling")
    seconds = {(row.case, row.system): row.seconds_median for row in report.rows}
    if not told or not any(case.startswith("scaling.") and s for (case, _), s in seconds.items()):
        raise ValueError("the report has no measured scaling to draw")
    settings = ScalingSettings(**{name: told[name] for name in ScalingSettings.__slots__})
    modes = list(settings.modes)
    about = f"; {told.get('model', '')}, links of {settings.megabits} Mbit/s"
    with figure(report, path, 1, len(modes), (4.0 * len(modes) + 0.4, 3.6), about, 4) as grid:
        for axes, mode in zip(grid[0], modes, strict=True):
            _draw_mode(axes, mode, settings, seconds)


def _draw_mode(
    axes: Any, mode: str, settings: ScalingSettings, seconds: dict[tuple[str, str], float | None]
) -> None:
    counts = list(settings.workers)
    axes.plot(counts, counts, color="0.6", linewidth=1, label="linear")
    for (color, marker), servers in zip(_LOOKS, settings.servers, strict=False):
        one = seconds.get((Point(mode, 1, servers).case, OWN))
        if one is None:
            continue
        for system, style in ((OWN, "-"), (LIMIT, ":"), (RAW, "--")):
            known = [
                (count, count * one / found)
                for count in counts
                if (found := seconds.get((Point(mode, count, servers).case, system)))
            ]
            if not known:
                continue
            label = f"{servers} server{'s' if servers > 1 else ''}"
            axes.plot(
                *zip(*known, strict=True), style, color=color,
                linewidth=0.9 if system == RAW else 1.4,
                marker=marker if system == OWN else "", markersize=5,
                label=label if system == OWN else "",
            )  # fmt: skip
    axes.plot([], [], ":", color="black", linewidth=1.4, label="what links let through")
    axes.plot([], [], "--", color="black", linewidth=0.9, label="raw sockets")
    axes.set_title(mode, loc="left")
    axes.set_xlabel("workers")
    axes.set_ylabel("steps per second, by those of one worker")
    axes.set_xticks(counts)
    axes.spines[["top", "right"]].set_visible(False)
