"""The protocol as data: where it is printed, and that the code has its rows in its order."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tensorwire.transitions import PHASES, ROWS, Phase, page

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src/tensorwire"

# The function that runs the rows of a phase.
SPINE = {
    "opening": "parameters/server/server.py:StoreServer._open",
    "norms": "parameters/server/stepping/publish.py:Norms.exchange",
    "cell": "parameters/shard.py:Shard._make_cell",
    "table": "parameters/shard.py:Shard._make_table",
    "step": "parameters/shard.py:Shard.advance",
    "version": "parameters/server/stepping/versions.py:Versions.advance",
    "event": "parameters/server/paced/own_pace.py:OwnPace._do_next",
    "pause": "parameters/server/paced/own_pace.py:OwnPace._stand_still",
    "lending": "parameters/server/stepping/snapshots.py:Snapshots._serve",
    "end": "parameters/server/server.py:StoreServer._end",
    "sum": "membership/collective.py:CollectiveServer._make",
    "ask": "membership/collective.py:Collective._ask",
    "position": "torch/rejoin.py:Rejoin._mark",
    "holding": "torch/replica/held.py:Held._note_gradients",
    "commit": "parameters/worker/store.py:RemoteStore.commit",
    "result": "parameters/worker/store.py:RemoteStore.wait",
    "rejoin": "parameters/worker/store.py:RemoteStore.go_on",
    "grant": "launch/restarts.py:Restarts._grant",
}
# What these functions call on the way, by the name in the call.
CALLS = {
    "_change": "parameters/server/stepping/versions.py:Versions._change",
    "advance": SPINE["step"],
    "take_norm": "parameters/step.py:Step.take_norm",
    "_exchange": SPINE["norms"],
    "_make_cells": "parameters/shard.py:Shard._make_cells",
    "_make_cell": SPINE["cell"],
    "_make_table": SPINE["table"],
    "_made": "parameters/server/stepping/snapshots.py:Snapshots._made",
    "_send_part": "membership/collective.py:Collective._send_part",
}
# Their rows are run by several threads or calls, so that no function has their order.
SCATTERED = {"borrowing", "standing", "taking", "changing", "change", "move", "death"}


def test_the_command_of_the_documentation_prints_every_row() -> None:
    command = "python -m tensorwire.transitions"
    assert f"    {command}\n" in (ROOT / "docs/internals/fault-tolerance.md").read_text()
    done = subprocess.run(
        [sys.executable, *command.split()[1:]], capture_output=True, text=True, timeout=60
    )
    assert done.stdout == page(), done.stderr
    assert re.findall(r"^\| `([a-z]+\.[a-z]+)` \|", done.stdout, re.MULTILINE) == list(ROWS)


def test_names_are_names_of_one_row() -> None:
    names = [row.name for phase in PHASES for row in phase.all_rows()]
    assert len(names) == len(set(names)) == len(ROWS)
    assert all(re.fullmatch(r"[a-z]+\.[a-z]+", name) for name in names)


def test_every_row_is_run_in_one_place() -> None:
    text = "".join(file.read_text() for file in SOURCE.rglob("*.py"))
    found = re.findall(r'failpoint\("([^"]+)"\)', text)
    assert sorted(found) == sorted(ROWS)


def function(place: str) -> ast.AST:
    """The function at "file:Class.name"."""
    file, _, name = place.partition(":")
    found: ast.AST = ast.parse((SOURCE / file).read_text())
    for part in name.split("."):
        found = next(each for each in ast.iter_child_nodes(found) if vars(each).get("name") == part)
    return found


def passed(node: ast.AST, if_: bool = False) -> Iterator[tuple[str, bool]]:
    """The failpoints of a piece of code from its first to its last, and whether an if has each."""
    for each in ast.iter_child_nodes(node):
        yield from passed(each, if_ or isinstance(node, ast.If))
    if not isinstance(node, ast.Call):
        return
    called = node.func.attr if isinstance(node.func, ast.Attribute) else vars(node.func).get("id")
    if called == "failpoint":
        yield ast.literal_eval(node.args[0]), if_
    elif called in CALLS:
        yield from passed(function(CALLS[called]), if_)


def listed(phase: Phase, if_: bool = False) -> Iterator[tuple[str, bool]]:
    """The rows of a phase in their order, and whether each is left out at times."""
    for row in phase.rows:
        guarded = if_ or row.when != ""
        yield from listed(row, guarded) if isinstance(row, Phase) else [(row.name, guarded)]


def phases(within: tuple[object, ...]) -> Iterator[Phase]:
    for each in within:
        if isinstance(each, Phase):
            yield each
            yield from phases(each.rows)


ALL = {phase.name: phase for phase in phases(PHASES)}


@pytest.mark.parametrize("name", SPINE)
def test_code_passes_the_rows_of_a_phase_in_their_order(name: str) -> None:
    """The models explore these rows: neither they nor the code can change alone."""
    assert [*passed(function(SPINE[name]))] == [*listed(ALL[name])]


def test_every_phase_has_its_function_or_is_known_to_have_none() -> None:
    inside = {inner.name for phase in PHASES for inner in phases(phase.rows)}
    assert {phase.name for phase in PHASES} - SPINE.keys() == SCATTERED
    assert SPINE.keys() <= ALL.keys()
    assert not SCATTERED & inside
