"""Runs the rows of a phase of the protocol: each row is bound to a function and a failpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Generic, TypeVar

from tensorwire.failpoints import failpoint
from tensorwire.transitions import Phase

Owner = TypeVar("Owner")
T = TypeVar("T")
Action = Callable[[Owner, T], object]
Guard = Callable[[Owner, T], bool]


class Walk(Generic[Owner, T]):
    """A phase whose rows are bound to functions; a call runs them in order. Any thread may call it.

    The functions are plain ones of (owner, item), not bound methods, so a Walk keeps no owner
    alive.

    Args:
        phase: of the protocol.
        actions: what does each row, by its name, and each phase within, which is no row here.
        guards: whether rows with such a `when` are run, by its name; a bool for all times.

    Raises:
        ValueError: a row or guard is not bound, or what is bound is none.
    """

    def __init__(
        self,
        phase: Phase,
        actions: Mapping[str, Action[Owner, T]],
        guards: Mapping[str, Guard[Owner, T] | bool] | None = None,
    ) -> None:
        guards = guards or {}
        names = [row.name for row in phase.rows]
        whens = {row.when for row in phase.rows} - {""}
        if {*names} != actions.keys() or whens != guards.keys():
            raise ValueError(f"{phase.name} has {names} and {sorted(whens)}, and other are bound")
        self._steps: list[tuple[str, Guard[Owner, T] | None, Action[Owner, T]]] = []
        for row in phase.rows:
            guard = guards[row.when] if row.when else True
            if guard is False:
                continue
            failing = "" if isinstance(row, Phase) else row.name
            self._steps.append((failing, None if guard is True else guard, actions[row.name]))

    def __call__(self, owner: Owner, what: T) -> None:
        """Runs the rows that are to be run for this."""
        for name, guard, action in self._steps:
            if guard is None or guard(owner, what):
                action(owner, what)
                if name:
                    failpoint(name)
