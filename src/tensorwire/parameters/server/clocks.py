"""Which worker may go on, where each goes at its own pace; pure.

A slice's clock counts its steps. In a bounded mode a worker waits while it is more than so many
steps ahead of the slowest slice. A worker that waits for all others, or has left, is excused: it
holds nobody back. When it comes again it is where the slowest of the others is, so that they do not
have to wait for steps that nobody misses.
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
        self._back: set[int] = set()  # workers that were excused since their last step

    def excuse(self, ranks: Collection[int]) -> bool:
        """These workers, and no others, hold nobody back now; whether one of them is new."""
        self._excused = set(ranks)
        is_new = not self._back >= self._excused
        self._back |= self._excused
        return is_new

    def step(self, rank: int) -> None:
        """A worker has made a step with all its slices."""
        now = self._of(rank) + 1
        if rank in self._back:
            others = self._slowest(rank)
            now = now if others is None else max(now, others)
        self._back.discard(rank)
        for index in self._slices[rank]:
            self.now[index] = now

    def behind(self, rank: int) -> int:
        """How many steps of a worker the slowest slice has not made."""
        others = self._slowest(rank)
        return 0 if others is None else max(0, self._of(rank) - others)

    def may_go(self, rank: int) -> bool:
        """A worker may begin its next step."""
        return self._staleness is None or self.behind(rank) <= self._staleness

    def _of(self, rank: int) -> int:
        return self.now[self._slices[rank][0]]

    def _slowest(self, rank: int) -> int | None:
        """The least clock of the other workers that count; None: there are none."""
        ranks = self._slices.keys() - self._excused - {rank}
        return min(map(self._of, ranks), default=None)
