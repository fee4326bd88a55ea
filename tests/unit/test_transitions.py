"""The protocol as data: the process of each row, where it is printed, and how a phase is walked."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tensorwire import walk
from tensorwire.transitions import PHASES, ROWS, Phase, Transition, page

ROOT = Path(__file__).parents[2]


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


def test_every_row_is_run() -> None:
    """Each is bound once to what does it, or has its failpoint where it is done."""
    files = [*(ROOT / "src").rglob("*.py")]
    text = "".join(file.read_text() for file in files if file.name != "transitions.py")
    for name in ROWS:
        bound = re.findall(rf'"{re.escape(name)}":|failpoint\("{re.escape(name)}"\)', text)
        assert len(bound) == 1, f"{name} is run in {len(bound)} places"


def test_a_failpoint_is_a_row() -> None:
    for file in (ROOT / "src").rglob("*.py"):
        for name in re.findall(r'failpoint\("([^"]+)"\)', file.read_text()):
            assert name in ROWS, file


INNER = Phase("inner", "server", "does more", (Transition("c", "", ""),), when="deep")
OUTER = Phase(
    "outer",
    "server",
    "does something",
    (Transition("a", "", ""), INNER, Transition("b", "", "", when="odd")),
)


def test_a_walk(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.setattr(walk, "failpoint", lambda name: seen.append(f"{name} is behind"))
    actions = {
        name: lambda who, n, name=name: seen.append(f"{name} {n}") for name in ("a", "inner", "b")
    }
    run = walk.Walk[str, int](OUTER, actions, {"odd": lambda who, n: n % 2 == 1, "deep": True})
    run("me", 1), run("me", 2)
    assert seen == [
        "a 1", "a is behind", "inner 1", "b 1", "b is behind", "a 2", "a is behind", "inner 2",
    ]  # fmt: skip
    seen.clear()
    walk.Walk[str, int](OUTER, actions, {"odd": False, "deep": False})("me", 1)
    assert seen == ["a 1", "a is behind"]


@pytest.mark.parametrize("missing", ["a", "inner", "b", "odd", "more"])
def test_what_is_not_bound(missing: str) -> None:
    names = {"a", "inner", "b", *(["c"] if missing == "more" else [])} - {missing}
    guards = dict.fromkeys({"odd", "deep"} - {missing}, True)
    with pytest.raises(ValueError, match="outer has"):
        walk.Walk[str, int](OUTER, dict.fromkeys(names, lambda who, n: None), guards)
