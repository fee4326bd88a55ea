"""Which worker computes the slices of workers that were killed and are not started again.

The lowest worker that lives takes them over, with all that the dead one had taken over before. It
tells the servers, and says when they know: one that ends before that has not taken anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tensorwire.launch.keeper import Keeper, KeeperError


@dataclass
class _Owner:
    """A worker that lives: what it was told to take over, by the number of the takeover."""

    keeper: Keeper
    lost: dict[int, list[int]] = field(default_factory=dict)


class PassedSlices:
    """Those of one job."""

    def __init__(self) -> None:
        self._owners: dict[int, _Owner] = {}
        self._number = 0

    def add(self, rank: int, keeper: Keeper) -> None:
        """A worker is about to start."""
        self._owners[rank] = _Owner(keeper)

    @staticmethod
    def reason_against(keeper: Keeper) -> str:
        """Why nobody could take over the slices of a worker that has ended; "" if one could."""
        if keeper.offer is None:
            return (
                "it had not come to job.epochs, or nobody is to be replaced, as worker 0 has said"
            )
        return keeper.offer

    def pass_on(self, rank: int, living: Sequence[int]) -> tuple[int, int] | None:
        """A worker was killed: another one takes over its slices, and those that it had.

        Args:
            rank: of the dead one.
            living: the ranks of those that run.

        Returns:
            Who takes them over, and the number of the takeover; None: nobody is left.
        """
        dead = self._owners.pop(rank, None)
        lost = [rank] if dead is None else [rank, *(r for each in dead.lost.values() for r in each)]
        return self._give(lost, living)

    def note_end(self, rank: int, living: Sequence[int]) -> list[int]:
        """A worker has left; those dead ones whose slices are nobody's now, as it took none over.

        Others get what it had not taken, if there are any.
        """
        gone = self._owners.pop(rank, None)
        if gone is None:
            return []
        left = [r for n, each in gone.lost.items() if n > gone.keeper.took for r in each]
        return left if left and self._give(left, living) is None else []

    def _give(self, lost: list[int], living: Sequence[int]) -> tuple[int, int] | None:
        able = [r for r in sorted(living) if r in self._owners]
        for rank in able:
            owner = self._owners[rank]
            if owner.keeper.left is not None:
                continue
            self._number += 1
            try:
                owner.keeper.tell({"lost": lost, "number": self._number})
            except KeeperError:
                continue
            owner.lost[self._number] = lost
            return rank, self._number
        return None
