"""Defines rows and phases, the form in which the protocol of a durable job is written down."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple


class Transition(NamedTuple):
    """A row of the protocol: one transition of one process.

    Attributes:
        name: of the row, and of the failpoint that follows it.
        what: the state after the row: a sentence about "it", the process that runs the phase.
        then: what a successor does if the process ends right after the row.
        waits: for what the row waits; "" if for nothing.
        when: the name of a guard without which the row is left out; "" if there is none.
    """

    name: str
    what: str
    then: str
    waits: str = ""
    when: str = ""


class Phase(NamedTuple):
    """Rows that a process runs from the first to the last.

    Attributes:
        name: of the phase, also as a part of another one.
        who: "server", "worker" or "launcher".
        what: what the rows make, for people.
        rows: rows and phases.
        when: as of a row.
    """

    name: str
    who: str
    what: str
    rows: tuple[Transition | Phase, ...]
    when: str = ""

    def all_rows(self) -> Iterator[Transition]:
        """Yields the rows, with the rows of inner phases in their places."""
        for each in self.rows:
            if isinstance(each, Phase):
                yield from each.all_rows()
            else:
                yield each
