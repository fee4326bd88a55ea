"""The model of a change of a job's workers: it holds, and finds what is wrong."""

import runpy
from pathlib import Path
from typing import Any

import pytest

from tensorwire.phases_of_launcher import CHANGE
from tensorwire.transitions import CHANGING

FILE = Path(__file__).parents[2] / "models/changes.py"
MODEL: dict[str, Any] = runpy.run_path(str(FILE))


@pytest.mark.parametrize("name", MODEL["SCENARIOS"])
@pytest.mark.slow
def test_every_interleaving_with_a_death_holds(name: str) -> None:
    assert MODEL["Change"](MODEL["SCENARIOS"][name]).explore() > 10_000


@pytest.mark.parametrize("change", MODEL["CHANGES"])
def test_every_change_is_found(change: str) -> None:
    assert MODEL["find"](change)


def test_it_has_the_rows() -> None:
    text = FILE.read_text()
    names = [row.name for phase in (CHANGING, CHANGE) for row in phase.all_rows()]
    assert all(name in text for name in names if name != "join.ready")
