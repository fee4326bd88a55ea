"""The model of a job whose workers go at their own pace: it holds, and finds what is wrong."""

import sys
from pathlib import Path
from typing import Any

import pytest

from tensorwire.phases_of_modes import EVENT, PAUSE, STANDING

sys.path.insert(0, str(Path(__file__).parents[2] / "models"))

import own_pace

MUTANTS: dict[str, Any] = {str(mutant): mutant for mutant in own_pace.mutants()}


@pytest.mark.slow
def test_every_interleaving_of_a_fault_holds() -> None:
    assert own_pace.Model().explore(1) > 100_000


@pytest.mark.slow
@pytest.mark.parametrize("what", MUTANTS)
def test_every_change_of_a_row_is_found(what: str) -> None:
    assert bool(own_pace.find(MUTANTS[what])) != (what in own_pace.EQUIVALENT)


def test_every_row_is_changed() -> None:
    for phase in EVENT, PAUSE, STANDING:
        for row in phase.all_rows():
            assert f"without {row.name}" in MUTANTS
    assert own_pace.EQUIVALENT.keys() <= MUTANTS.keys()
    assert own_pace.Model().explore(0) > 4000
