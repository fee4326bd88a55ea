"""The model of workers that compute the slices of dead ones: it holds, and finds what is wrong."""

import runpy
from pathlib import Path
from typing import Any

import pytest

from tensorwire.transitions import COMMIT, TAKING

FILE = Path(__file__).parents[2] / "models/slices.py"
MODEL: dict[str, Any] = runpy.run_path(str(FILE))


@pytest.mark.slow
def test_every_interleaving_of_two_deaths_holds() -> None:
    assert MODEL["Slices"]().explore() > 600_000


@pytest.mark.parametrize("change", MODEL["CHANGES"])
def test_every_change_is_found(change: str) -> None:
    assert MODEL["find"](change)


def test_it_has_the_rows() -> None:
    names = [row.name for phase in (COMMIT, TAKING) for row in phase.all_rows()]
    text = FILE.read_text()
    assert all(name in text for name in names if name != "commit.noted")
