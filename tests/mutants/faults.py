"""Single-line faults: all that a file offers, and those that a seed draws.

A fault is what a tired programmer writes: another comparison, a condition the wrong way round, a
call that is missing. Texts for people, signatures and assertions get none, and of the numbers only
small ones that are no durations: nobody tests by how much a limit could differ.
"""

from __future__ import annotations

import ast
import random
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Each room with the folders or files of the tests that run first for a fault in it. What a room
# has below itself belongs to it, but what is a room of its own.
ROOMS = {
    "torch": ["tests/torch"],
    "torch/replica": ["tests/torch"],
    "torch/pipeline": [
        f"tests/torch/test_{name}.py"
        for name in ("split", "split_backward", "schedules", "two_ways", "two_hosts", "misuse")
    ],
    "torch/allocator": [
        f"tests/torch/test_{name}.py"
        for name in ("allocator", "gradient_slots", "gradient_slots_hostile", "pool", "gradients")
    ],
    "parameters": ["tests/unit", "tests/torch"],
    "parameters/worker": ["tests/unit", "tests/torch"],
    "parameters/server": ["tests/unit", "tests/torch"],
    "jobs": ["tests/unit", "tests/launch"],
    "durability": ["tests/unit", "tests/launch", "tests/torch"],
    "membership": ["tests/unit", "tests/launch", "tests/torch"],
    "memory": ["tests/unit", "tests/peers"],
    "placement": ["tests/unit"],
    "edges": ["tests/unit", "tests/peers/test_edges.py", "tests/peers/test_edges_machines.py"],
    "files": ["tests/unit", "tests/files"],
    "launch": ["tests/launch"],
    "cli": [
        "tests/unit",
        "tests/launch",
        "tests/peers/test_doctor.py",
        "tests/torch/test_explain.py",
    ],
    "doctor": ["tests/unit", "tests/peers/test_doctor.py"],
    "rpc": ["tests/unit", "tests/rpc"],
    "rpctrace": ["tests/unit", "tests/rpc/test_rpc_trace.py"],
}
# Of these files of cpp most lines run on a device only, which emulated machines have.
RDMA = re.compile(r"cpp/transports/rdma")
CPP_TESTS = ["tests/unit", "tests/peers"]
RDMA_TESTS = ["tests/rdma", *CPP_TESTS]

COMPARISONS = {
    ast.Eq: ["!="], ast.NotEq: ["=="], ast.Is: ["is not"], ast.IsNot: ["is"],
    ast.In: ["not in"], ast.NotIn: ["in"], ast.Lt: ["<=", ">="], ast.LtE: ["<", ">"],
    ast.Gt: [">=", "<="], ast.GtE: [">", "<"],
}  # fmt: skip
SMALL = 8  # the largest constant that changes
SILENT = re.compile(r"__(repr|str|format)__")  # functions whose results are texts
TEXTS = re.compile(r"(Error|Warning|warn|log\.\w+|print|echo)$")  # calls that say something


@dataclass(frozen=True)
class Fault:
    """One changed line of one file."""

    path: str  # from the root of the repository
    line: int  # counted from 1
    kind: str
    before: str
    after: str

    def apply(self, root: Path) -> None:
        lines = (root / self.path).read_text().split("\n")
        assert lines[self.line - 1] == self.before, "another file than the one it was drawn from"
        lines[self.line - 1] = self.after
        (root / self.path).write_text("\n".join(lines))

    @property
    def tests(self) -> list[str]:
        """The folders and files of the tests of its room."""
        if self.path.startswith("cpp/"):
            return RDMA_TESTS if RDMA.match(self.path) else CPP_TESTS
        return ROOMS[_room_of(self.path)]


def _room_of(path: str) -> str:
    """The innermost room that has this file of the package."""
    folder = Path(path).parent.relative_to("src/tensorwire")
    return next(str(room) for room in (folder, *folder.parents) if str(room) in ROOMS)


class _Python(ast.NodeVisitor):
    """Collects the faults of one module."""

    def __init__(self, path: str, source: str) -> None:
        self.path, self.lines = path, source.split("\n")
        self.found: list[Fault] = []
        self.visit(ast.parse(source))

    def _add(self, kind: str, line: int, start: int, end: int, text: str) -> None:
        """Puts a text in place of these bytes of a line."""
        before = self.lines[line - 1]
        coded = before.encode()
        after = (coded[:start] + text.encode() + coded[end:]).decode()
        if "# pragma" not in before and after != before:
            self.found.append(Fault(self.path, line, kind, before, after))

    def _between(
        self, kind: str, left: ast.expr, right: ast.expr, sign: str, others: Iterable[str]
    ) -> None:
        """Exchanges the operator between two operands, if it stands on the line of both."""
        line, start = left.end_lineno, left.end_col_offset
        if line is None or start is None or line != right.lineno:
            return
        between = self.lines[line - 1].encode()[start : right.col_offset].decode()
        at = re.search(rf"(?<![\w<>=!]){sign}(?![\w<>=])", between)
        assert at is not None, f"{self.path}:{line}: no {sign} in {between!r}"
        for other in others:
            self._add(kind, line, start + at.start(), start + at.end(), other)

    def _replace(self, kind: str, node: Any, text: str) -> None:
        if node.lineno == node.end_lineno:
            self._add(kind, node.lineno, node.col_offset, node.end_col_offset, text)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        for statement in [] if SILENT.match(node.name) else node.body:
            self.visit(statement)

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for statement in node.body:
            self.visit(statement)

    def visit_Raise(self, node: ast.Raise) -> None:
        """Its text is no subject, and without it the line above is a fault already."""

    visit_Assert = visit_JoinedStr = visit_Raise  # type: ignore[assignment]

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value and not ast.unparse(node.target).endswith("_s"):
            self.visit(node.value)

    def visit_Assign(self, node: ast.Assign) -> None:
        if not ast.unparse(node.targets[0]).lower().endswith("_s"):
            self.generic_visit(node)

    def visit_keyword(self, node: ast.keyword) -> None:
        if not (node.arg or "").endswith("_s"):
            self.visit(node.value)

    def visit_If(self, node: ast.If | ast.While | ast.IfExp) -> None:
        asked = ast.unparse(node.test)
        if "TYPE_CHECKING" in asked or "__name__" in asked:
            return
        if isinstance(node.test, ast.Name | ast.Attribute | ast.Call):
            start = node.test.lineno, node.test.col_offset
            self._add("not", start[0], start[1], start[1], "not ")
        self.generic_visit(node)

    visit_While = visit_IfExp = visit_If

    def visit_Compare(self, node: ast.Compare) -> None:
        operands = [node.left, *node.comparators]
        for left, operator, right in zip(operands, node.ops, operands[1:], strict=False):
            sign = {
                ast.Is: "is", ast.IsNot: r"is\s+not", ast.In: "in", ast.NotIn: r"not\s+in",
                ast.Eq: "==", ast.NotEq: "!=", ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">",
                ast.GtE: ">=",
            }[type(operator)]  # fmt: skip
            self._between("comparison", left, right, sign, COMPARISONS[type(operator)])
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        sign, other = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        for left, right in zip(node.values, node.values[1:], strict=False):
            self._between("and/or", left, right, sign, [other])
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not) and node.operand.lineno == node.lineno:
            self._add("not", node.lineno, node.col_offset, node.operand.col_offset, "")
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        other = {ast.Add: (r"\+", "-"), ast.Sub: ("-", "+")}.get(type(node.op))
        if other and not (_is_sequence(node.left) or _is_sequence(node.right)):
            self._between("+/-", node.left, node.right, other[0], [other[1]])
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        other = {ast.Add: (r"\+=", "-="), ast.Sub: ("-=", "+=")}.get(type(node.op))
        if other and not _is_sequence(node.value):
            self._between("+/-", node.target, node.value, other[0], [other[1]])
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if type(node.value) is int and abs(node.value) <= SMALL:
            for other in (node.value - 1, node.value + 1):
                self._replace("constant", node, str(other))

    def visit_Expr(self, node: ast.Expr) -> None:
        call = node.value.value if isinstance(node.value, ast.Await) else node.value
        if isinstance(call, ast.Call) and not TEXTS.search(ast.unparse(call.func)):
            self._replace("dropped statement", node, "pass")
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        name = ast.unparse(node.func)
        if name in ("min", "max"):
            self._replace("min/max", node.func, {"min": "max", "max": "min"}[name])
        if not TEXTS.search(name):
            self.generic_visit(node)

    def visit_Return(self, node: ast.Return) -> None:
        if isinstance(node.value, ast.Constant) and isinstance(node.value.value, bool):
            self._replace("returned bool", node.value, str(not node.value.value))
        self.generic_visit(node)

    def visit_Break(self, node: ast.Break) -> None:
        self._replace("break/continue", node, "continue")

    def visit_Continue(self, node: ast.Continue) -> None:
        self._replace("break/continue", node, "break")


def _is_sequence(node: ast.expr) -> bool:
    """Tells whether it is plainly a text or a list, which cannot be subtracted."""
    if isinstance(node, ast.BinOp):
        return _is_sequence(node.left) or _is_sequence(node.right)
    return isinstance(node, ast.JoinedStr | ast.List | ast.Tuple | ast.ListComp) or (
        isinstance(node, ast.Constant) and isinstance(node.value, str | bytes)
    )


# What stands in place of what on a line of C++; clang-format puts a space on both sides of an
# operator and of no bracket of a template.
CPP = [
    ("comparison", r" == ", [" != "]),
    ("comparison", r" != ", [" == "]),
    ("comparison", r" < ", [" <= ", " >= "]),
    ("comparison", r" <= ", [" < ", " > "]),
    ("comparison", r" > ", [" >= ", " <= "]),
    ("comparison", r" >= ", [" > ", " < "]),
    ("+/-", r" \+ 1\b(?![.'\d])", [" - 1", ""]),
    ("+/-", r" - 1\b(?![.'\d])", [" + 1", ""]),
    ("and/or", r" && ", [" || "]),
    ("and/or", r" \|\| ", [" && "]),
    ("not", r"(?<=[( ])!(?=[\w(])", [""]),
    ("returned bool", r"\breturn true;", ["return false;"]),
    ("returned bool", r"\breturn false;", ["return true;"]),
    ("break/continue", r"\bcontinue;", ["break;"]),
    ("dropped statement", r"^ +(?!return\b|throw\b)[\w.:]+(->[\w.]+)*\([^{}]*\);$", [";"]),
]
# Comments and texts, in that order of what may contain what; their length stays.
UNREAD = re.compile(r'//[^\n]*|/\*.*?\*/|R"\((?:.|\n)*?\)"|"(?:\\.|[^"\\\n])*"', re.DOTALL)


def _cpp(path: str, source: str) -> Iterator[Fault]:
    masked = UNREAD.sub(lambda text: re.sub(r"[^\n]", "_", text.group()), source).split("\n")
    for number, (line, code) in enumerate(zip(source.split("\n"), masked, strict=True), 1):
        begins = re.search(r"[;{}:]_*\s*$", masked[number - 2])  # a statement of its own
        if re.match(r"\s*(#|static_assert|template|using|throw)", line) or "operator" in line:
            continue
        for kind, pattern, others in CPP:
            if kind == "dropped statement" and not begins:
                continue
            for at in re.finditer(pattern, code):
                for other in others:
                    yield Fault(
                        path, number, kind, line, line[: at.start()] + other + line[at.end() :]
                    )


def faults_of(root: Path, path: str) -> list[Fault]:
    """All faults that a file offers."""
    source = (root / path).read_text()
    return list(_cpp(path, source)) if path.endswith(".cc") else _Python(path, source).found


def _core_sources(root: Path) -> list[Path]:
    """Returns the sources of the core, without its tests and fuzzers."""
    found = sorted((root / "cpp").glob("*/*.cc"))
    return [path for path in found if path.parent.name not in ("tests", "fuzz")]


class Drawing:
    """The faults of a seed: an endless row of them for each number, so that one can be replaced."""

    def __init__(self, root: Path, seed: str, count: int) -> None:
        self.seed = seed
        self._offered = {"cpp": _offered(root, _core_sources(root))}
        for room in ROOMS:
            files = (root / "src/tensorwire" / room).rglob("*.py")
            self._offered[room] = _offered(
                root,
                [
                    file
                    for file in sorted(files)
                    if file.name != "__main__.py" and _room_of(str(file.relative_to(root))) == room
                ],
            )
        rooms = list(ROOMS)
        random.Random(seed).shuffle(rooms)
        in_cpp = -(-count // 6)
        self._rooms = [rooms[n % len(rooms)] for n in range(count - in_cpp)] + ["cpp"] * in_cpp
        self._taken: set[tuple[str, int]] = set()
        self._rows = [self._row(number) for number in range(1, count + 1)]
        self.faults = [next(row) for row in self._rows]

    def again(self, number: int) -> Fault:
        """Another fault in place of one that does not count."""
        return next(self._rows[number - 1])

    def _row(self, number: int) -> Iterator[Fault]:
        chance = random.Random(f"{self.seed}/{number}")
        kinds = self._offered[self._rooms[number - 1]]
        while True:
            # The kind first: there are far more comparisons than anything else.
            fault = chance.choice(kinds[chance.choice(sorted(kinds))])
            if (fault.path, fault.line) not in self._taken:
                self._taken.add((fault.path, fault.line))
                yield fault


def _offered(root: Path, files: Iterable[Path]) -> dict[str, list[Fault]]:
    kinds: dict[str, list[Fault]] = {}
    for file in files:
        for fault in faults_of(root, str(file.relative_to(root))):
            kinds.setdefault(fault.kind, []).append(fault)
    return kinds
