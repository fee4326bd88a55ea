"""The model of a durable job: it holds, finds what is wrong, and has the places of the real one."""

import runpy
from pathlib import Path
from typing import Any

import pytest

from tensorwire.failpoints import FAILPOINTS

MODEL: dict[str, Any] = runpy.run_path(str(Path(__file__).parents[2] / "models/takeover.py"))
MUTANTS = {what: rest for what, *rest in MODEL["mutants"]()}


def test_every_interleaving_holds() -> None:
    assert MODEL["explore"](kills=2) > 20_000


def test_without_kills_too() -> None:
    assert MODEL["explore"](kills=0) > 1000


@pytest.mark.parametrize("what", MUTANTS)
def test_every_change_of_a_row_is_found(what: str) -> None:
    table, restoring = MUTANTS[what]
    if what in MODEL["EQUIVALENT"]:
        MODEL["explore"](table, restoring, 1)
        return
    with pytest.raises(MODEL["Violation"]):
        MODEL["explore"](table, restoring, 1)


def test_the_rows_are_the_places_of_the_server() -> None:
    """Where a row has the name of a failpoint, they come in the same order."""
    names = [name for name in MODEL["NAMES"] if name in FAILPOINTS]
    assert len(names) >= 12
    order = [name for name in FAILPOINTS if name in names]
    # The model takes the first pass behind what is noted of a step, which commutes.
    movable = {"version.begun"}
    assert [n for n in names if n not in movable] == [n for n in order if n not in movable]
