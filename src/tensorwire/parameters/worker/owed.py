"""Decides which slices a worker owes to a version of a store: its own, or those of dead workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tensorwire.failpoints import failpoint
from tensorwire.membership.takeovers import Takeovers

from .link import Answers, Link, commit_again

_LOOK_S = 0.1  # whether a worker was killed whose slices are this one's now


class OwnSlices:
    """The slices of a worker that is replaced if it is killed.

    Attributes:
        joins: the worker goes through versions that others have made.
        are_noted: its commits are noted for a process in its place.
    """

    joins = False
    are_noted = True

    def __init__(self, slices: Sequence[int]) -> None:
        self._slices = slices

    def missing(self, links: Sequence[Link], version: int) -> Sequence[int]:
        """See `Store`."""
        return self._slices

    def due(
        self, links: Sequence[Link], version: int, answers: Answers,
        again: Callable[[int], None] | None,
    ) -> Sequence[int]:  # fmt: skip
        """See `Store`."""
        return ()


class OwedSlices(OwnSlices):
    """The slices of a worker, to which those of dead workers are added at any time."""

    are_noted = False

    def __init__(self, takeovers: Takeovers) -> None:
        self._takeovers = takeovers

    @property
    def joins(self) -> bool:  # type: ignore[override]
        """See `OwnSlices`."""
        return self._takeovers.joins

    def missing(self, links: Sequence[Link], version: int) -> Sequence[int]:
        """See `Store`. A slice may be a version ahead, or two servers at two of its versions."""
        if self.joins:  # others have made the versions that it goes through
            return ()
        self._takeovers.adopt()
        found = []
        for index in self._takeovers.slices:
            have = [link.committed(index) >= version for link in links]
            if not any(have):
                found.append(index)
            elif not all(have):
                commit_again(links, index, links[have.index(True)].read_commit(index))
                failpoint("commit.forwarded")
        return found

    def due(
        self, links: Sequence[Link], version: int, answers: Answers,
        again: Callable[[int], None] | None,
    ) -> Sequence[int]:  # fmt: skip
        """See `Store`."""
        if self.joins:
            return ()
        while True:
            missing = self.missing(links, version)
            if missing and again is None:
                return missing
            if again is not None:
                for index in missing:
                    again(index)
            if answers.is_reached(version, _LOOK_S):
                return ()
