"""The faults of `make mutants`: the same for a seed, single lines, and no texts for people."""

import ast
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "mutants"))

from faults import ROOMS, Drawing, Fault, faults_of

# Nothing in it offers a fault.
OFFERS_NOTHING = '''"""A docstring says 1 < 2 and x."""
from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import tensorwire as tw

GIVEN_S = 3


class Text:
    """Here 1 + 1 are 2, not 3."""

    size: Literal[1, 2] = "none"

    @property(1)
    def said(self, other: Literal[3]) -> Literal[4]:
        """This returns True."""
        print(f"{other + 1}")
        assert self.size == other
        raise ValueError("not " + other if other == 1 else "and")

    def __repr__(self) -> str:
        return "<" + self.size if not self.hidden else "-"


def wait(times: int = 5) -> None:
    limit_s = 1
    held = range  # 1 + 1
    skipped == held  # pragma: no cover
    take(within_s=1)[held]
'''

OFFERS = [
    ("a < b", {"a <= b", "a >= b"}),
    ("a is not b", {"a is b"}),
    ("a not in b", {"a in b"}),
    ("a = b == (c)", {"a = b != (c)"}),
    ("a = b + c", {"a = b - c"}),
    ("a -= b", {"a += b"}),
    ("a = b and c and d", {"a = b or c and d", "a = b and c or d"}),
    ("a = not b", {"a = b"}),
    ("a = b[1]", {"a = b[0]", "a = b[2]"}),
    ("a = 4096", set()),
    ("a()", {"pass"}),
    ("a = min(b, c)", {"a = max(b, c)"}),
    ("a = 'é' if b else c", {"a = 'é' if not b else c"}),
    ("a = b + 'text'", set()),
]


def faults(folder: Path, name: str, source: str) -> list[Fault]:
    (folder / name).write_text(source)
    return faults_of(folder, name)


@pytest.fixture(scope="module")
def drawn(repository: Path) -> Drawing:
    return Drawing(repository, "suite", 24)


@pytest.mark.slow
def test_a_seed_draws_the_same_faults_again(repository: Path, drawn: Drawing) -> None:
    again = Drawing(repository, "suite", 24)
    assert again.faults == drawn.faults
    assert again.again(3) == Drawing(repository, "suite", 24).again(3)
    assert Drawing(repository, "another", 24).faults != drawn.faults


def test_every_room_and_the_core_have_faults(drawn: Drawing) -> None:
    assert len(drawn.faults) == 24
    assert len({(fault.path, fault.line) for fault in drawn.faults}) == 24
    assert sum(fault.path.startswith("cpp/") for fault in drawn.faults) == 4
    rooms = [tuple(fault.tests) for fault in drawn.faults if fault.path.startswith("src/")]
    assert set(rooms) == {tuple(tests) for tests in ROOMS.values()}


def test_the_tests_of_every_room_exist(repository: Path) -> None:
    assert not [
        path for tests in ROOMS.values() for path in tests if not (repository / path).exists()
    ]


@pytest.mark.slow
def test_every_fault_changes_one_line_that_is_code(repository: Path) -> None:
    for path in sorted((repository / "src/tensorwire").rglob("*.py")):
        name, source = str(path.relative_to(repository)), path.read_text()
        tree = ast.parse(source)
        texts = {
            line
            for node in ast.walk(tree)
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            for line in range(node.lineno, (node.end_lineno or 0) + 1)
        }
        for fault in faults_of(repository, name):
            assert fault.before == source.split("\n")[fault.line - 1] != fault.after
            assert "\n" not in fault.after
            assert fault.line not in texts, fault


def test_a_fault_is_made_in_its_file_alone(tmp_path: Path) -> None:
    found = faults(tmp_path, "a.py", "a = b == c\nd = e\n")
    found[0].apply(tmp_path)
    assert (tmp_path / "a.py").read_text() == "a = b != c\nd = e\n"
    with pytest.raises(AssertionError, match="another file"):
        found[0].apply(tmp_path)


def test_texts_annotations_and_durations_offer_nothing(tmp_path: Path) -> None:
    assert [str(fault) for fault in faults(tmp_path, "a.py", OFFERS_NOTHING)] == []


@pytest.mark.parametrize(("line", "after"), OFFERS, ids=[line for line, _ in OFFERS])
def test_what_a_line_of_python_offers(tmp_path: Path, line: str, after: set[str]) -> None:
    assert {fault.after for fault in faults(tmp_path, "a.py", line)} == after


def test_faults_of_python_can_be_compiled(tmp_path: Path) -> None:
    source = "for a in b:\n    if a:\n        continue\n    c(a)\ndef d():\n    return True\n"
    found = faults(tmp_path, "a.py", source)
    assert {fault.kind for fault in found} == {
        "not", "break/continue", "dropped statement", "returned bool",
    }  # fmt: skip
    for fault in found:
        lines = source.split("\n")
        lines[fault.line - 1] = fault.after
        compile("\n".join(lines), "a.py", "exec")


@pytest.mark.parametrize(
    ("line", "after"),
    [
        ("  if (a == b) {", {"  if (a != b) {"}),
        ("  return a && !b;", {"  return a || !b;", "  return a && b;"}),
        ("  a = vector<int>(n + 1);", {"  a = vector<int>(n - 1);", "  a = vector<int>(n);"}),
        ("  return true;", {"  return false;"}),
        ("  a->b.close(c);", {";"}),
        ('  say(a, "a == b") || b;  // a == b', {'  say(a, "a == b") && b;  // a == b'}),
        ("  Foo&& moved = std::move(a);", set()),
        ("  std::lock_guard lock(mutex_);", set()),
        ("#if a == b", set()),
    ],
)
def test_what_a_line_of_cpp_offers(tmp_path: Path, line: str, after: set[str]) -> None:
    found = faults(tmp_path, "a.cc", f"void f() {{\n{line}\n}}\n")
    assert {fault.after for fault in found} == after
    assert {fault.line for fault in found} <= {2}
