"""Collects the commits of a store's slices, at a server, where each is applied alone."""

from __future__ import annotations

from functools import partial

from ...messages import Commit
from ...shard import Shard
from ..opening import Opening
from ..stepping.arrivals import Announced, ArrivingUnits
from ..stepping.gather import Calls, Gatherer


class SliceInbox(Gatherer):
    """A `Gatherer` that reads each commit when it is there, without an order of slices.

    The number of a commit is its worker's own count.

    Attributes:
        taken: by slice, the number of the last commit that was taken.
    """

    def __init__(self, opening: Opening, shard: Shard, calls: Calls) -> None:
        super().__init__(opening, shard, calls)
        self.taken = [1] * len(self._contributors)

    def wait(self, index: int, number: int, timeout_s: float) -> int:
        """Returns the number of a slice's commit when one from `number` on is there.

        Raises:
            TimeoutError, PeerLostError, ClosedError, StaleHandleError: see `Mailbox.wait`.
        """
        contributor = self._contributors[index]
        wait = partial(contributor.mailbox.wait, number, timeout_s, peer=contributor.peer)
        if contributor.peer is None:
            wait()
        else:  # the successor of a killed worker is waited for
            self._member.persist(contributor.peer, wait)
        return contributor.mailbox.count

    def await_gradients(self, index: int, timeout_s: float) -> None:
        """Returns when all gradients of a slice's commit, which is there, are there too.

        Raises:
            TimeoutError, PeerLostError, ClosedError, StaleHandleError: see `Word.wait_until`.
        """
        each = self._contributors[index]
        if each.units:
            stamps = self._opening.regions.stamps(each.mailbox.message(each.mailbox.count))
            for word, stamp in zip(each.units, stamps.tolist(), strict=True):
                word.wait_until(stamp, timeout_s, peer=each.peer)

    def read(self, index: int) -> Commit:
        """Returns a slice's commit, which is there."""
        return self._contributors[index].read(self._spec)

    def take(self, index: int) -> tuple[Commit, ArrivingUnits]:
        """Returns a slice's commit, which is there and was checked, and its arriving gradients."""
        each, regions = self._contributors[index], self._opening.regions
        commit, number = each.read(self._spec), each.mailbox.count
        if not self.taken[index] < commit.version == number:
            raise ValueError(
                f"worker {each.rank} sent commit {commit.version} with number {number}, after "
                f"commit {self.taken[index]}"
            )
        self.taken[index] = number
        self._check_places(commit, each)
        announced = []
        if each.units:
            stamps = regions.stamps(each.mailbox.message(number))
            announced = [Announced(each.units, stamps, partial(self._wait_unit, each.peer))]
        return commit, ArrivingUnits(regions.units, announced)

    def rank(self, index: int) -> int:
        """Returns the worker of a slice."""
        return self._contributors[index].rank

    def waits_in(self, rank: int, other: int) -> str:
        """Returns "", see `Gatherer`: a worker that steps here waits for no other."""
        return ""
