"""Describes a process of a job that may be replaced, started by the launcher or not."""

from __future__ import annotations

from typing import Protocol


class Replaceable(Protocol):
    """A server, a worker or a standby; `Process` and `Visitor` are two."""

    kind: str
    index: int
    name: str
    pid: int
    died_for_memory: bool

    @property
    def killed(self) -> bool:
        """True if it has ended in a way that allows a successor: without a reason of its own."""

    def ending(self) -> str:
        """Returns how it ended, as a phrase that follows its name."""

    def fence(self, why: str) -> None:
        """Ends it as if it had died; `ending` then gives `why` as the reason."""
