"""Launcher side of takeovers: decides which worker has which places of an elastic job.

A place is what one worker begins with; there are as many as workers can be. When a worker is
killed, the living ones get its places, evenly. They tell the servers, and report when these know: a
worker that ends before that has not taken anything.

While a wanted change is under way, there are two tables: the owners of places up to the step of the
change, and the owners after it. The launcher does not know which workers have come to that step, so
a death concerns both tables, and a new owner is told its places in each.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tensorwire.launch.keeper import Keeper, KeeperError
from tensorwire.membership.takeovers import deal_places


@dataclass
class _Owner:
    """A worker that lives.

    Attributes:
        keeper: of its process.
        mine: the places that it has.
        next: the places that it has after the change under way; None: there is no change.
        told: the numbers of the takeovers that it was told of, with the places of each.
    """

    keeper: Keeper
    mine: list[int] = field(default_factory=list)
    next: list[int] | None = None
    told: dict[int, list[int]] = field(default_factory=dict)


class PassedSlices:
    """The places of one job, and their owners.

    Args:
        places: how many there are.
        present: in how many of them, the first ones, workers begin.

    Attributes:
        number: of the last takeover or change; the next one is greater.
    """

    def __init__(self, places: int, present: int) -> None:
        self._owners: dict[int, _Owner] = {}
        self.number = 0
        self._places = places
        self._first = deal_places(places, range(present))

    def add(self, rank: int, keeper: Keeper) -> None:
        """Adds a worker that is about to start, at the beginning of the job."""
        self._owners[rank] = _Owner(keeper, self._first[rank])

    @staticmethod
    def reason_against(keeper: Keeper) -> str:
        """Returns why no worker could take over the slices of an ended worker; "" if one could."""
        if keeper.offer is None:
            return (
                "it had not come to job.epochs, or nobody is to be replaced, as worker 0 has said"
            )
        return keeper.offer

    def pass_on(self, rank: int, living: Sequence[int]) -> tuple[list[int], int] | None:
        """Passes the places of a killed worker on to others.

        Args:
            rank: of the dead one.
            living: the ranks of workers that run.

        Returns:
            The ranks that take them over, and the number of the last takeover; None: none is left.
        """
        dead = self._owners.pop(rank, None)
        mine = [rank] if dead is None else dead.mine
        return self._give(rank, mine, None if dead is None else dead.next, living)

    def note_end(self, rank: int, living: Sequence[int]) -> list[int]:
        """Notes that a worker has left; returns places of dead workers that have no worker now.

        Other workers get the places that it had not yet taken over, if there are any.
        """
        gone = self._owners.pop(rank, None)
        if gone is None:
            return []
        left = [r for n, each in gone.told.items() if n > gone.keeper.took for r in each]
        return left if left and self._give(rank, left, None, living) is None else []

    def _give(
        self, dead: int, mine: list[int], after: list[int] | None, living: Sequence[int]
    ) -> tuple[list[int], int] | None:
        """Deals out a dead worker's places, and the places that it would have after a change."""
        able = self._able(living)
        changes = any(owner.next is not None for owner in self._owners.values())
        gets = _deal(mine, {rank: len(self._owners[rank].mine) for rank in able})
        nexts = _deal(after or (), {rank: len(self._owners[rank].next or ()) for rank in able})
        if gets is None or nexts is None:
            return None
        joining = self._joining()
        first = sorted({*gets, *nexts})
        for rank in first:
            self.number += 1
            owner = self._owners[rank]
            mine_now, mine_next = gets.get(rank, []), nexts.get(rank, [])
            message: dict[str, Any] = {"lost": mine_now, "number": self.number}
            if changes:
                # The change sets the words of workers that join; the dead one's word is set here.
                words = [each for each in mine_now if each not in joining]
                if dead in mine_next and dead not in words:
                    words.append(dead)
                message |= {"next": mine_next, "words": words}
                owner.next = [*(owner.next or ()), *mine_next]
            try:
                owner.keeper.tell(message)
            except KeeperError:
                continue  # it ends, and what it was told goes on
            owner.mine = [*owner.mine, *mine_now]
            owner.told[self.number] = sorted({*mine_now, *mine_next})
        return (first, self.number) if first else None

    def _able(self, living: Sequence[int]) -> list[int]:
        """Returns the workers that can take something over: present and not leaving."""
        return [
            rank
            for rank in sorted(living)
            if (owner := self._owners.get(rank)) is not None
            and owner.keeper.left is None
            and owner.mine
            and owner.next != []
        ]

    def _joining(self) -> set[int]:
        """Returns the workers that join by the change under way."""
        return {rank for rank, owner in self._owners.items() if not owner.mine}

    # ---- changes that are wanted

    def present(self) -> list[int]:
        """Returns the places in which there are workers, in the job."""
        return sorted(self._owners)

    def owner_of(self, place: int) -> int:
        """Returns the owner of a place."""
        return next(r for r, owner in self._owners.items() if place in owner.mine)

    def plan(self, living: Iterable[int], joining: Mapping[int, Keeper]) -> dict[int, list[int]]:
        """Plans a change after which workers are in these places; returns each one's new places.

        Args:
            living: their ranks, also of workers that join.
            joining: the keepers of the workers that join, by rank.
        """
        table = deal_places(self._places, living)
        self.number += 1
        for rank, keeper in joining.items():
            self._owners[rank] = _Owner(keeper)
        for rank, owner in self._owners.items():
            owner.next = list(table.get(rank, ()))
        return table

    def finish(self) -> None:
        """Completes the change; all workers have made its step."""
        for rank, owner in list(self._owners.items()):
            owner.mine, owner.next = owner.next or [], None
            if not owner.mine:
                del self._owners[rank]


def _deal(places: Iterable[int], sizes: dict[int, int]) -> dict[int, list[int]] | None:
    """Deals places out to the ranks that have the fewest; None: there is no rank."""
    gets: dict[int, list[int]] = {}
    for place in sorted(places):
        if not sizes:
            return None
        to = min(sizes, key=lambda rank: (sizes[rank], rank))
        gets.setdefault(to, []).append(place)
        sizes[to] += 1
    return gets
