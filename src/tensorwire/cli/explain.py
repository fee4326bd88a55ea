"""`tensorwire explain`: where every tensor of a training step lies, after two real steps."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tensorwire import tracebacks
from tensorwire.bench import checkout
from tensorwire.bench.commands import json_option
from tensorwire.bench.rows import write_json
from tensorwire.command import Command, check_file, terminal

if TYPE_CHECKING:
    from tensorwire.torch import Explanation

_COLOURS = {"in place": "green", "copied": "red", "no gradient": "yellow", "none": "bright_black"}
# Neighbours differ, also in print.
_SHADES = {"in place": "█▓", "copied": "░▒", "no gradient": "·:", "none": " "}


class _Explain(Command):
    """The command, whose options end at a script: later ones are the script's own."""

    shows_errors = True

    def check(self, ctx: click.Context, args: list[str]) -> list[str]:
        """See `Command`."""
        rest = super().check(ctx, args)
        if rest and not _is_script(rest[0]):
            ctx.allow_interspersed_args = True
            rest = super().check(ctx, args)
        return rest


@click.command(
    cls=_Explain,
    short_help="Show where a script's tensors are, and why some are copied.",
    context_settings={"allow_interspersed_args": False},
)
@json_option("Also write the rows there.")
@click.option("--tiny", is_flag=True, help="A workload with narrow layers, the same structure.")
@click.argument("model_or_script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def explain(
    model_or_script: str, arguments: tuple[str, ...], json_path: Path | None, tiny: bool
) -> None:
    """Show where the tensors of a training step are, and why those are copied that are.

    Runs two real steps in this process, without servers: the first shows which allocation each
    gradient is, in the second they are produced there. MODEL_OR_SCRIPT is a script that trains
    with tensorwire.torch, stopped after the second step, or the name of a workload of the bench,
    where that is: in a checkout of the repository.

    \b
    A script, followed by its own options:
        tensorwire explain --json tensors.json train.py --lr 0.1

    \b
    A workload (alexnet, vgg16, inception-v3, lstm, gru, fcn5, resnet50, gpt2-small, ...):
        tensorwire explain alexnet --tiny

    Options after a script are the script's own; --json stands before it. A gradient that never
    came belongs to a parameter that the loss does not depend on.
    """  # noqa: D301 (\b is what click reads)
    check_file(json_path)
    found = _explain(model_or_script, arguments, tiny)
    if json_path is not None:
        content = [each.to_json() for each in found]
        write_json(json_path, content[0] if len(content) == 1 else content)
    console = terminal(120)
    for each in found:
        _show(each, console)
    if json_path is not None:
        click.echo(f"rows written to {json_path}")


def _explain(name: str, arguments: Sequence[str], tiny: bool) -> list[Explanation]:
    if _is_script(name):
        if tiny:
            raise click.UsageError("--tiny is for a workload; a script has the size that it has")
        if not os.path.isfile(name):
            raise click.ClickException(f"there is no script {name}")
        _need_torch()
        from tensorwire.torch.explanation import explain_script

        tracebacks.install("the script")
        found = explain_script(name, arguments)  # what it raises is shown as python would
        if not found:
            raise click.ClickException(
                f"{name} ended before all its DistributedOptimizers had made 2 steps; "
                "explain needs a script that trains with tensorwire.torch"
            )
        return found
    if arguments:
        raise click.UsageError(f"the workload {name} takes no argument {arguments[0]!r}")
    if reason := checkout.missing(f"the workload {name!r}", f"explain {name}"):
        raise click.ClickException(f"{reason}; or give a script, train.py")
    catalog = checkout.load("workloads.catalog")
    try:
        chosen = catalog.workload(name)
    except LookupError as error:
        raise click.ClickException(f"{error.args[0]}; or give a script, train.py") from error
    chosen = chosen.reduced() if tiny else chosen
    _need_torch()
    import torch

    from tensorwire.torch import explain_model

    batches = iter(chosen.batches(torch, 0))
    loss = chosen.loss(torch)

    def step(model: torch.nn.Module) -> torch.Tensor:
        inputs, labels = next(batches)
        result: torch.Tensor = loss(model(inputs), labels)
        return result

    return [explain_model(chosen.build(torch), step, name=name)]


def _is_script(name: str) -> bool:
    return os.path.isfile(name) or name.endswith(".py")


def _need_torch() -> None:
    if importlib.util.find_spec("torch") is None:
        raise click.ClickException("explain needs torch: pip install 'tensorwire[torch]'")


def _show(found: Explanation, console: Console) -> None:
    table = Table(box=box.SIMPLE_HEAD, title=found.model, title_justify="left")
    for column, justify in (("tensor", "left"), ("shape", "left"), ("bytes", "right")):
        table.add_column(column, justify=justify, overflow="fold")  # type: ignore[arg-type]
    table.add_column("route")
    table.add_column("copies", justify="right")
    table.add_column("reason")
    for row in found.gradients:
        style = _COLOURS[row.state]
        shape = " × ".join(map(str, row.shape)) or "scalar"
        table.add_row(
            row.name, shape, f"{row.bytes:,}", Text(row.route, style=style), str(row.copies),
            row.reason,
        )  # fmt: skip
    console.print(table)
    parameters = [row for row in found.rows if row.role == "parameter"]
    inside = sum(row.in_place for row in parameters)
    share = 100 * found.bytes_in_place / found.bytes if found.bytes else 0.0
    came = found.arrived
    missing = sum(row.bytes for row in found.missing)
    never = f"{len(found.missing)} never came ({missing:,} bytes). " if found.missing else ""
    console.print(
        f"{sum(row.in_place for row in came)} of {len(came)} gradients are produced in "
        f"place: {found.bytes_in_place:,} of {found.bytes:,} bytes ({share:.2f} %). {never}"
        f"{inside} of {len(parameters)} parameters are read in place.",
        highlight=False,
    )
    _draw(found, console)


def _draw(found: Explanation, console: Console) -> None:
    """Draws the memory from its first byte to its last; shades alternate between tensors."""
    text = Text("memory of the gradients ")
    tensors: list[int] = []
    for what, index in found.drawing():
        if index not in tensors:
            tensors.append(index)
        shades = _SHADES[what]
        text.append(shades[tensors.index(index) % len(shades)], style=_COLOURS[what])
    console.print(text)
    legend = "█▓ in place  ░▒ copied" + ("  ·: no gradient came" if found.missing else "")
    console.print(legend, style="dim", highlight=False)
