"""Decides which worker may go on, where each goes at its own pace. Pure.

A slice's clock counts its steps. In a bounded mode a worker waits while it is more than so many
steps ahead of the slowest slice. A worker that waits for all others, or has left, is excused: it
holds no worker back. When it goes on its clock is set to the slowest of the others, so that they do
not wait for steps that are not needed, and the bound holds from there.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence


class Clocks:
    """The clocks of all slices.

    Args:
        slices: of each worker.
        staleness: how many steps a worker may be ahead; None: any number.

    Attributes:
        now: by slice.
    """

    def __init__(self, slices: Mapping[int, Sequence[int]], staleness: int | None) -> None:
        self._slices, self._staleness = slices, staleness
        self.now = [0] * sum(map(len, slices.values()))
        self._excused: set[int] = set()

    def excuse(self, ranks: Collection[int]) -> bool:
        """Excuses these workers, and no others; tells whether any of them was not excused before.

        A worker that is no longer excused goes on from where the slowest of the others is.
        """
        before, self._excused = self._excused, set(ranks)
        back = before - self._excused
        # Without others that worked meanwhile, all have waited for each other.
        others = self._slices.keys() - before - self._excused
        reached = min(map(self._of, others)) if others else max(map(self._of, back), default=0)
        for rank in back:
            self._set(rank, max(self._of(rank), reached))
        return not before >= self._excused

    def step(self, rank: int) -> None:
        """Notes that a worker has made a step with all its slices."""
        self._set(rank, self._of(rank) + 1)

    def behind(self, rank: int) -> int:
        """Returns how many steps a worker is ahead of the slowest other one that is not excused."""
        others = self._slowest(rank)
        return 0 if others is None else max(0, self._of(rank) - others)

    def may_go(self, rank: int) -> bool:
        """Tells whether a worker may begin its next step."""
        return self._staleness is None or self.behind(rank) <= self._staleness

    def _set(self, rank: int, now: int) -> None:
        for index in self._slices[rank]:
            self.now[index] = now

    def _of(self, rank: int) -> int:
        return self.now[self._slices[rank][0]]

    def _slowest(self, rank: int) -> int | None:
        """Returns the least clock of the other workers that count; None: there are none."""
        ranks = self._slices.keys() - self._excused - {rank}
        return min(map(self._of, ranks), default=None)
