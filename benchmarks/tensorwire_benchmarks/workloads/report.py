"""Writes the tensor sizes of all workloads as a table and as JSON."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from tensorwire.bench.report import new_table
from tensorwire_benchmarks.workloads.catalog import Summary, Workload, summary

MIB = 1 << 20


def print_sizes(workloads: Sequence[Workload], console: Console) -> None:
    """Prints a line per workload with the number and the sizes of its tensors."""
    table = new_table(
        "tensors of the workloads", "workload", ">tensors", ">MiB", ">average", ">median", ">min",
        ">max", ">small", ">medium", ">large", ">in large", ">looked up",
        caption="small is below 1 KiB, large 1 MiB or more. looked up: gradients whose rows are "
        "zeros but for those that a batch looks up; sparse, where torch makes only these",
        caption_justify="left",
    )  # fmt: skip
    for model in workloads:
        found = summary(model.tensors())
        sizes = (found.bytes_average, found.bytes_median, found.bytes_min, found.bytes_max)
        table.add_row(
            model.name,
            str(found.tensors),
            f"{found.bytes / MIB:.2f}",
            *map(size_text, sizes),
            *map(str, (found.small, found.medium, found.large)),
            f"{100 * found.bytes_in_large / found.bytes:.2f} %",
            _looked_up(found),
        )
    console.print(table)
    for model in workloads:
        console.print(f"{model.name:13} {model.about}; batch {model.batch}", highlight=False)


def _looked_up(found: Summary) -> str:
    if not found.bytes_looked_up:
        return "–"
    sparse = ", sparse" if found.bytes_sparse else ""
    return f"{100 * found.bytes_looked_up / found.bytes:.0f} %{sparse}"


def size_text(size_bytes: float) -> str:
    """Formats bytes with three digits in B, KiB or MiB."""
    for unit, factor in (("MiB", MIB), ("KiB", 1 << 10)):
        if size_bytes >= factor:
            return f"{size_bytes / factor:.3g} {unit}"
    return f"{size_bytes:.3g} B"


def write_sizes(workloads: Sequence[Workload], path: str | os.PathLike[str]) -> None:
    """Writes every workload with every tensor as JSON."""
    data = [
        {**model.describe(), "rows": [tensor._asdict() for tensor in model.tensors()]}
        for model in workloads
    ]
    Path(path).write_text(json.dumps(data, indent=1) + "\n")
