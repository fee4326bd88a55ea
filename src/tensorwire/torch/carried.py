"""Finds plain variables that a script carries from epoch to epoch and a successor lacks.

They are found in the text of the script: names of its top level that a loop over `job.epochs`, or
a function that says `global`, reads before it gives them a value, and gives one. What a clock
tells is not among them. Local variables of functions are not looked at, nor what an epoch begins
anew.
"""

from __future__ import annotations

import ast
import sys
import tokenize
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

_PLAIN = int, float, bool, str
_MOST_CHARACTERS = 100  # of a string; longer ones decide nothing
_MOST_NAMES = 4  # that are told
_CLOCKS = {
    f"{name}{unit}"
    for name in ("time", "perf_counter", "monotonic", "process_time", "thread_time")
    for unit in ("", "_ns")
}


class Carried:
    """Those of the script that this process runs, which is read at the first use."""

    def __init__(self) -> None:
        self._names: list[str] | None = None
        self._present: Mapping[str, Any] = {}

    def values(self) -> dict[str, Any]:
        """What they are now."""
        if self._names is None:
            self._names = self._find()
        present = self._present
        return {
            name: value
            for name in self._names
            if type(value := present.get(name)) in _PLAIN and len(repr(value)) < _MOST_CHARACTERS
        }

    def difference(self, former: Mapping[str, Any]) -> str:
        """What is not as it was in the process before, as a phrase; "" if nothing is."""
        found = [
            (name, value, former[name])
            for name, value in self.values().items()
            if name in former and repr(value) != repr(former[name])
        ][:_MOST_NAMES]
        if not found:
            return ""
        here = " and ".join(f"{name} = {value!r}" for name, value, _ in found)
        there = " and ".join(repr(value) for _, _, value in found)
        are, them = ("was", "it") if len(found) == 1 else ("were", "them")
        kept = ", ".join(f'"{name}": …' for name, _, _ in found)
        return (
            f"{here}, which {are} {there} in the process before it; if results depend on {them}, "
            f"have {them} in a dict that is kept: job.keep(state={{{kept}}})"
        )

    def _find(self) -> list[str]:
        script = sys.modules.get("__main__")
        self._present = vars(script) if script is not None else {}
        try:
            with tokenize.open(self._present["__file__"]) as file:
                return sorted(carried_names(file.read()))
        except (KeyError, TypeError, OSError, SyntaxError, ValueError, RecursionError):
            return []  # a notebook, or what is no text


def carried_names(source: str) -> set[str]:
    """The names that a script with this text carries.

    Raises:
        SyntaxError, ValueError, RecursionError: it cannot be parsed.
    """
    loops, functions = _Flow(), _Flow()
    declared: set[str] = set()
    tree = ast.parse(source)
    for node in _outside_of_functions(tree):
        if isinstance(node, ast.For) and _calls(node.iter, {"epochs"}):
            loops.run([node])
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names = {name for each in ast.walk(node) if isinstance(each, ast.Global)
                     for name in each.names}  # fmt: skip
            if names:
                declared |= names
                functions.assigned = set()
                functions.run(node.body)
    read = loops.read | (functions.read & declared)
    written = loops.written | (functions.written & declared)
    timed = loops.timed() | functions.timed()
    return {name for name in (read & written) - timed if not name.startswith("_")}


def _outside_of_functions(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield child
            yield from _outside_of_functions(child)


def _calls(node: ast.AST, names: set[str]) -> bool:
    for each in ast.walk(node):
        if isinstance(each, ast.Call):
            called = each.func
            if (called.attr if isinstance(called, ast.Attribute) else
                called.id if isinstance(called, ast.Name) else "") in names:  # fmt: skip
                return True
    return False


class _Flow(ast.NodeVisitor):
    """Follows statements in the order in which they run; a loop runs at least once.

    Attributes:
        assigned: names that have a value here that was given in these statements.
        read: those that were read before that.
        written: those that were given a value anywhere.
    """

    def __init__(self) -> None:
        self.assigned: set[str] = set()
        self.read: set[str] = set()
        self.written: set[str] = set()
        self._given: list[tuple[set[str], ast.AST]] = []  # names, and from what

    def run(self, statements: Iterable[ast.stmt]) -> None:
        for each in statements:
            self.visit(each)

    def timed(self) -> set[str]:
        """Names whose values come from a clock."""
        found: set[str] = set()
        while True:
            more = {
                name
                for names, value in self._given
                if _calls(value, _CLOCKS)
                or any(isinstance(each, ast.Name) and each.id in found for each in ast.walk(value))
                for name in names
            }
            if more <= found:
                return found
            found |= more

    # ---- names

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Store):
            self.assigned.add(node.id)
            self.written.add(node.id)
        elif node.id not in self.assigned:
            self.read.add(node.id)

    def _assign(self, targets: Iterable[ast.expr], value: ast.expr) -> None:
        self.visit(value)
        for target in targets:
            names = {each.id for each in ast.walk(target) if isinstance(each, ast.Name)}
            self._given.append((names, value))
            self.visit(target)

    def visit_Assign(self, node: ast.Assign) -> None:
        self._assign(node.targets, node.value)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self._assign([node.target], node.value)

    def visit_NamedExpr(self, node: ast.NamedExpr) -> None:
        self._assign([node.target], node.value)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        if isinstance(node.target, ast.Name) and node.target.id not in self.assigned:
            self.read.add(node.target.id)
        self._assign([node.target], node.value)

    # ---- what runs in another order than it is written, later, or perhaps

    def visit_For(self, node: ast.For | ast.AsyncFor) -> None:
        self.visit(node.iter)
        self.visit(node.target)
        self.run([*node.body, *node.orelse])

    visit_AsyncFor = visit_For

    def visit_If(self, node: ast.If) -> None:
        self.visit(node.test)
        self._branch([node.body, node.orelse])

    def visit_Try(self, node: ast.Try) -> None:
        before = set(self.assigned)
        self.run([*node.body, *node.orelse])
        self._branch([each.body for each in node.handlers], [(before, self.assigned)])
        self.run(node.finalbody)

    def visit_Match(self, node: ast.Match) -> None:
        self.visit(node.subject)
        self._branch([*(each.body for each in node.cases), []])

    def _branch(
        self,
        ways: Iterable[list[ast.stmt]],
        taken: Iterable[tuple[set[str], set[str]]] = (),
    ) -> None:
        """One of several; behind them names have values that all that go on have given."""
        ends = [set(after) for _, after in taken]
        start = next((before for before, _ in taken), self.assigned)
        for way in ways:
            self.assigned = set(start)
            self.run(way)
            if not way or not isinstance(
                way[-1], ast.Continue | ast.Break | ast.Return | ast.Raise
            ):
                ends.append(self.assigned)
        self.assigned = set.intersection(*ends) if ends else set(start)

    def _skip(self, node: ast.AST) -> None:
        """Runs later, if at all."""

    visit_Lambda = _skip

    def visit_FunctionDef(
        self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    ) -> None:
        self.assigned.add(node.name)

    visit_AsyncFunctionDef = visit_ClassDef = visit_FunctionDef

    @contextmanager
    def _inside(self) -> Iterator[None]:
        assigned, written = set(self.assigned), set(self.written)
        yield
        self.assigned, self.written = assigned, written

    def _comprehend(self, node: Any) -> None:
        with self._inside():
            for each in node.generators:
                self.visit(each.iter)
                self.visit(each.target)
                for condition in each.ifs:
                    self.visit(condition)
            for part in ("elt", "key", "value"):
                if (found := getattr(node, part, None)) is not None:
                    self.visit(found)

    visit_ListComp = visit_SetComp = visit_DictComp = visit_GeneratorExp = _comprehend
