"""`tensorwire explain`: where every tensor of a training step lies, after two real steps."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from tensorwire.torch import Explanation

_COLOURS = {"in place": "green", "copied": "red", "none": "bright_black"}
_SHADES = {"in place": "█▓", "copied": "░▒", "none": " "}  # neighbours differ, also in print


# Options end at the script: what follows is the script's own.
@click.command(context_settings={"allow_interspersed_args": False})
@click.option(
    "--json",
    "json_path",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Also write the rows there.",
)
@click.option("--tiny", is_flag=True, help="A workload with narrow layers, the same structure.")
@click.argument("model_or_script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def explain(
    model_or_script: str, arguments: tuple[str, ...], json_path: Path | None, tiny: bool
) -> None:
    """Show where the tensors of a training step are, and why those are copied that are.

    Runs two real steps in this process, without servers: the first shows which allocation each
    gradient is, in the second they are produced there. MODEL_OR_SCRIPT is a script that trains
    with tensorwire.torch, stopped after the second step, or the name of a workload of the bench.

    \b
    A script, with its own options behind it:
        tensorwire explain --json tensors.json train.py --lr 0.1

    \b
    A workload (alexnet, vgg16, inception-v3, lstm, gru, fcn5, resnet50, gpt2-small, ...):
        tensorwire explain alexnet
    """  # noqa: D301 (\b is what click reads)
    found = _explain(model_or_script, arguments, tiny)
    if json_path is not None:
        content = [each.to_json() for each in found]
        partial = json_path.with_name(json_path.name + ".partial")
        partial.write_text(json.dumps(content[0] if len(content) == 1 else content, indent=1))
        partial.replace(json_path)
    console = Console() if sys.stdout.isatty() else Console(width=120)
    for each in found:
        _show(each, console)
    if json_path is not None:
        click.echo(f"rows written to {json_path}")


def _explain(name: str, arguments: Sequence[str], tiny: bool) -> list[Explanation]:
    if os.path.exists(name) or name.endswith(".py"):
        from tensorwire.torch.explanation import explain_script

        if not os.path.isfile(name):
            raise click.ClickException(f"there is no script {name}")
        found = explain_script(name, arguments)  # what it raises is shown as python would
        if not found:
            raise click.ClickException(
                f"{name} ended before all its DistributedOptimizers had made 2 steps"
            )
        return found
    from tensorwire.bench.workloads.catalog import workload

    try:
        chosen = workload(name)
    except LookupError as error:
        raise click.ClickException(f"{error.args[0]}; or give a script, train.py") from error
    chosen = chosen.reduced() if tiny else chosen
    import torch

    from tensorwire.torch import explain_model

    batches = iter(chosen.batches(torch, 0))
    loss = chosen.loss(torch)

    def step(model: torch.nn.Module) -> torch.Tensor:
        inputs, labels = next(batches)
        result: torch.Tensor = loss(model(inputs), labels)
        return result

    return [explain_model(chosen.build(torch), step, name=name)]


def _show(found: Explanation, console: Console) -> None:
    table = Table(box=box.SIMPLE_HEAD, title=found.model, title_justify="left")
    for column, justify in (("tensor", "left"), ("shape", "left"), ("bytes", "right")):
        table.add_column(column, justify=justify, overflow="fold")  # type: ignore[arg-type]
    table.add_column("route")
    table.add_column("copies", justify="right")
    table.add_column("reason")
    for row in found.gradients:
        style = _COLOURS["in place" if row.in_place else "copied"]
        shape = " × ".join(map(str, row.shape)) or "scalar"
        table.add_row(
            row.name, shape, f"{row.bytes:,}", Text(row.route, style=style), str(row.copies),
            row.reason,
        )  # fmt: skip
    console.print(table)
    parameters = [row for row in found.rows if row.role == "parameter"]
    inside = sum(row.in_place for row in parameters)
    share = 100 * found.bytes_in_place / found.bytes if found.bytes else 0.0
    gradients = found.gradients
    console.print(
        f"{sum(row.in_place for row in gradients)} of {len(gradients)} gradients are produced in "
        f"place: {found.bytes_in_place:,} of {found.bytes:,} bytes ({share:.2f} %). "
        f"{inside} of {len(parameters)} parameters are read in place.",
        highlight=False,
    )
    _draw(found, console)


def _draw(found: Explanation, console: Console) -> None:
    """The memory from its first byte to its last; shades alternate between tensors."""
    text = Text("memory of the gradients ")
    tensors: list[int] = []
    for what, index in found.drawing():
        if index not in tensors:
            tensors.append(index)
        shades = _SHADES[what]
        text.append(shades[tensors.index(index) % len(shades)], style=_COLOURS[what])
    console.print(text)
    console.print("█▓ in place  ░▒ copied", style="dim", highlight=False)
