"""Checks that docstrings are sentences that a student understands alone, on first reading.

A docstring of a function begins with a verb in the third person ("Returns …", "Waits until …"); the
docstring of a class, module, property or attribute says what the thing is ("A lease of …"). No
docstring begins with one of `FIRST_WORDS`, no sentence of one with `SENTENCE_STARTS`, and
none has one of `PHRASES`: they make a reader guess the noun. The help of a command (click) is free
in its first word.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = {"src/tensorwire": True, "tests": False}
"""Folders, each with whether its functions need a verb; a test's docstring states a fact."""

FIRST_WORDS = frozenset(
    "What Whether Who Whoever Whose Of That Those As It They Where Such Behind Likewise None "
    "Nobody Nothing Somebody Something".split()
)
SENTENCE_STARTS = ("What", "Who", "Whoever", "Whose", "That of", "Those", "Of")
PHRASES = ("behind", "whoever", "that of", "likewise", "so much")

VERBS_WITHOUT_S = frozenset({"See"})
NOUNS_WITH_S = frozenset(
    "Actions Additions Afterwards Always Arguments Arrays Batches Buffers Bytes Cells Columns "
    "Cores Counters Descriptors Devices Dimensions Edges Elements Errors Events Files Folders "
    "Frames Functions Gradients Has Indices Is Its Keys Lines Losses Machines Members Messages "
    "Modules Names Nodes Offsets Operations Optimizers Options Others Outputs Packets "
    "Parameters Parts Paths Peers Permissions Pieces Positions Ranges Readers Regions Replicas "
    "Rows Samples Seconds Segments Servers Shapes Shares Sizes Slots Snapshots Tables Targets "
    "Tensors Texts This Thousands Threads Transports Tuples Units Values Versions Weights Words "
    "Workers Yes".split()
)

_SECTION = re.compile(
    r"^\s*(Args|Attributes|Raises|Returns|Yields|Example|Examples):", re.MULTILINE
)
_START = re.compile(
    r"(?:^|[.!?:]\s+|\n\s*\n\s*)(" + "|".join(map(re.escape, SENTENCE_STARTS)) + r")\b"
)
_NOUN_OF = re.compile(r"\w+s (?:of|whose|are)\b")  # "Counts of rows", where "Counts rows" is a verb
_NAMES = re.compile(r"^ +\w+(?:, \w+)*:", re.MULTILINE)  # of arguments and attributes
_LEAVES = re.compile(r"\b(leave|leaves|leaving|left)\b[^.]{0,30}\bbehind$", re.IGNORECASE)
_PHRASE = re.compile(r"\b(" + "|".join(PHRASES) + r")\b", re.IGNORECASE)

Function = ast.FunctionDef | ast.AsyncFunctionDef


def problems(docstring: str, *, is_function: bool = False) -> Iterator[str]:
    """Yields a sentence for each rule that a docstring breaks.

    Args:
        docstring: the text, without quotes.
        is_function: whether it belongs to a function or method, not to a property or command.
    """
    text = docstring.strip()
    match = re.match(r"[`\"'(\[*]*([\w'-]*)", text)
    word = match[1] if match else ""
    if word in FIRST_WORDS:
        yield f"begins with {word!r}"
    elif is_function and word not in VERBS_WITHOUT_S:
        is_noun = word in NOUNS_WITH_S or word.endswith("ss") or _NOUN_OF.match(text)
        if not word.endswith("s") or is_noun or not word[0].isupper():
            yield f"begins with {word!r}, not with a verb as in 'Returns'"
    prose = _SECTION.split(text)[0]
    for start in _START.finditer(prose, len(word)):
        yield f"has a sentence that begins with {start[1]!r}"
    unnamed = _NAMES.sub("", text)
    for phrase in _PHRASE.finditer(unnamed):
        if not _LEAVES.search(unnamed[: phrase.end()]):
            yield f"has {phrase[1]!r}"


def _name(node: ast.expr) -> str:
    called = node.func if isinstance(node, ast.Call) else node
    return called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")


def _needs_verb(node: ast.AST) -> bool:
    """Returns whether a docstring of this node must begin with a verb."""
    if not isinstance(node, Function):
        return False
    other = {"property", "cached_property", "command", "group", "setter"}
    return other.isdisjoint(map(_name, node.decorator_list))


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str, bool]]:
    """Yields (line, text, whether it must begin with a verb) of docstrings, also of attributes."""
    for node in ast.walk(tree):
        if not isinstance(node, Function | ast.ClassDef | ast.Module):
            continue
        before: ast.stmt | None = None
        for each in node.body:
            if isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant):
                if isinstance(text := each.value.value, str):
                    if each is node.body[0]:
                        yield each.lineno, text, _needs_verb(node)
                    elif isinstance(before, ast.Assign | ast.AnnAssign):
                        yield each.lineno, text, False
            before = each


def main(root: Path = ROOT) -> int:
    """Prints every broken rule; returns whether there is one."""
    count, found = 0, []
    for folder, needs_verb in FOLDERS.items():
        for path in sorted((root / folder).rglob("*.py")):
            name = path.relative_to(root).as_posix()
            for line, text, verb in docstrings(ast.parse(path.read_text())):
                count += 1
                whys = problems(text, is_function=verb and needs_verb)
                found += [f"{name}:{line}: {why}" for why in whys]
    print(*found, f"{count} docstrings, {len(found)} rules broken", sep="\n")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
