"""The rule for docstrings finds what a reader stumbles over, and nothing else."""

import ast
import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SPEC = importlib.util.spec_from_file_location("check", ROOT / "tools" / "check_docstrings.py")
assert SPEC is not None
assert SPEC.loader is not None
check = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(check)


@pytest.mark.parametrize(
    "text",
    [
        "Returns the rows, those of inner phases in their places.",
        "Waits until all workers have said goodbye; tells whether they did.",
        "See `Base.read`.",
        "Makes a folder, and leaves nothing behind.",
        "Counts versions.\n\nIt is called once per version. They never fall.",
    ],
)
def test_good_docstrings_of_functions(text: str) -> None:
    assert list(check.problems(text, is_function=True)) == []


@pytest.mark.parametrize(
    "text",
    [
        "A lease of a reader.",
        "True if it is open.",
        "The words of a worker.\n\nAttributes:\n    behind: steps that the slowest lacks.",
        "A cell.\n\nArgs:\n    reader: What follows a name is no sentence of the prose.",
    ],
)
def test_good_docstrings_of_things(text: str) -> None:
    assert list(check.problems(text)) == []


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("What a worker has.", "begins with 'What'"),
        ("Whether it is open.", "begins with 'Whether'"),
        ("Those of one store.", "begins with 'Those'"),
        ("As `read`, of a slice.", "begins with 'As'"),
        ("It is not used any more.", "begins with 'It'"),
        ("Where a tensor lies.", "begins with 'Where'"),
        ("Likewise for tables.", "begins with 'Likewise'"),
        ("Of a store. Its size.", "begins with 'Of'"),
    ],
)
def test_forbidden_first_words(text: str, why: str) -> None:
    assert why in list(check.problems(text))
    assert why in list(check.problems(text, is_function=True))


@pytest.mark.parametrize(
    "text",
    ["The rows of a table.", "A reader is gone.", "Bytes of a row.", "rows of a table", "Read it.",
     "Has a copy.", "Counts of rows.", "Notes whose version is old.", "Ranges to copy.",
     "Access to a region.", ""],
)  # fmt: skip
def test_functions_need_a_verb(text: str) -> None:
    (why,) = check.problems(text, is_function=True)
    assert "not with a verb" in why


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("Keeps notes.\n\nWho reads them waits.", "has a sentence that begins with 'Who'"),
        ("Keeps notes. What is old goes.", "has a sentence that begins with 'What'"),
        ("Keeps a size: that of a cell.", "has 'that of'"),
        ("Stops behind step 3.", "has 'behind'"),
        ("Keeps notes.\n\nArgs:\n    size: likewise.", "has 'likewise'"),
        ("Wakes whoever waits.", "has 'whoever'"),
    ],
)
def test_sentences_and_phrases(text: str, why: str) -> None:
    assert list(check.problems(text, is_function=True)) == [why]


SOURCE = '''
"""Module."""

LIMIT = 3
"""Of a store."""

class Store:
    """What there is."""

    @property
    def size(self) -> int:
        """The size."""

    @functools.cached_property
    def rows(self) -> int:
        """The rows."""

    @main.command("run")
    def run(self) -> None:
        """Run a job."""

    def read(self) -> None:
        """The bytes."""
        "no docstring"
'''


def test_what_is_looked_at() -> None:
    found = {text: verb for _, text, verb in check.docstrings(ast.parse(SOURCE))}
    assert found == {
        "Module.": False, "Of a store.": False, "What there is.": False, "The size.": False,
        "The rows.": False, "Run a job.": False, "The bytes.": True,
    }  # fmt: skip


def test_a_tree_with_faults(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "src" / "tensorwire"
    folder.mkdir(parents=True)
    (folder / "store.py").write_text(SOURCE)
    assert check.main(tmp_path) == 1
    *lines, last = capsys.readouterr().out.splitlines()
    assert [line.partition(": ")[0] for line in lines] == [
        f"src/tensorwire/store.py:{line}" for line in (5, 8, 23)
    ]
    assert last == "7 docstrings, 3 rules broken"
    (folder / "store.py").write_text('"""Module."""\n')
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_store.py").write_text('def test_it():\n    """A verb."""\n')
    assert check.main(tmp_path) == 0
