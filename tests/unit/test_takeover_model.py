"""The model of a durable job: it holds, finds what is wrong, and has the rows of the real one."""

import runpy
from pathlib import Path
from typing import Any

import pytest

from tensorwire.transitions import PHASES, ROWS

MODEL: dict[str, Any] = runpy.run_path(str(Path(__file__).parents[2] / "models/takeover.py"))
MUTANTS = {str(mutant): mutant for mutant in MODEL["mutants"]()}


@pytest.mark.parametrize(("job", "states"), [("sums", 50_000), ("versions", 300_000)])
def test_every_interleaving_of_two_faults_holds(job: str, states: int) -> None:
    found, ends = MODEL["JOBS"][job](MODEL["RIGHT"]).explore(2)
    assert found > states
    assert len(ends) > 1


@pytest.mark.parametrize("faults", [0, 1])
@pytest.mark.parametrize("job", ["sums", "versions"])
def test_local_steps_need_not_be_interleaved(job: str, faults: int) -> None:
    few, ends = MODEL["JOBS"][job](MODEL["RIGHT"]).explore(faults)
    all_, same = MODEL["JOBS"][job](MODEL["RIGHT"]).explore(faults, reduced=False)
    assert few < all_
    assert ends == same


@pytest.mark.parametrize("what", MUTANTS)
def test_every_change_of_a_row_is_found(what: str) -> None:
    found = MODEL["find"](MUTANTS[what])
    if what in MODEL["EQUIVALENT"]:
        assert not found
    else:
        assert found or MODEL["find"](MUTANTS[what], 2)


def test_what_is_equivalent_is_a_change() -> None:
    assert MODEL["EQUIVALENT"].keys() <= MUTANTS.keys()


def test_every_row_has_a_meaning() -> None:
    """Or it is told why it has none; each is left out once, and each guard and wait is dropped."""
    meaning, outside = MODEL["versions"]().meaning, MODEL["OUTSIDE"]
    assert meaning.keys() | outside.keys() == ROWS.keys()
    assert not meaning.keys() & outside.keys()
    for name, row in ROWS.items():
        if name in outside:
            continue
        assert f"without {name}" in MUTANTS
        assert not row.when or row.when in MODEL["ALWAYS"] or f"{name} always" in MUTANTS
        assert not row.waits or f"{name} without waiting" in MUTANTS
    modelled = {phase.name for order in MODEL["ORDERS"] for phase in order}
    assert modelled == {
        phase.name for phase in PHASES if not {row.name for row in phase.all_rows()} <= {*outside}
    }
