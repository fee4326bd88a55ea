"""What a worker computes for others that were killed, where nobody is started in their place.

The launcher tells the lowest worker that lives. A thread passes it on to the servers at once, in
the control words of the dead ones: they wait for this worker instead. The worker itself takes it to
heart where it asks (`adopt`), between other things.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Sequence

from tensorwire.errors import TensorwireError
from tensorwire.failpoints import failpoint

from .descriptor_store import DescriptorStore
from .identity import taken_by
from .world import World


class Takeovers:
    """Those of one worker. One thread uses it, beside its own.

    Args:
        place: of the worker.
        store: to the launcher.

    Attributes:
        ranks: whose slices this worker computes: its own rank, and those of dead ones, in turn.
        slices: these, its own first.
    """

    def __init__(self, place: World, store: DescriptorStore) -> None:
        self._place, self._store = place, store
        self._told: deque[Sequence[int]] = deque()
        self._offered: str | None = None
        self._passing = threading.Lock()
        self.ranks: tuple[int, ...] = (place.rank,)
        self.slices: tuple[int, ...] = tuple(place.my_slices)

    @property
    def rank(self) -> int:
        """The lowest of `ranks`: what worker 0 does, its successor does."""
        return min(self.ranks)

    @property
    def acting_slices(self) -> Sequence[int]:
        """Those of the worker for which this one acts, by its `rank`."""
        return self._place.slices_of(self.rank)

    def start(self, tell: Callable[[int, int], None]) -> None:
        """Begins to listen; `tell` raises the control word of a worker at all servers."""
        name, run = "tensorwire-takeovers", self._run
        threading.Thread(target=run, args=(tell,), name=name, daemon=True).start()

    def _run(self, tell: Callable[[int, int], None]) -> None:
        # Whoever waits for a server that is gone gets the error.
        with contextlib.suppress(TensorwireError, OSError):
            while (told := self._store.hear()) is not None:
                lost, number = [int(rank) for rank in told["lost"]], int(told["number"])
                self._told.append(lost)
                for rank in lost:
                    tell(rank, taken_by(self._place.rank, number))
                failpoint("owner.told")
                self._store.tell({"took": number})

    def adopt(self) -> bool:
        """From now on `ranks` and `slices` have those of all workers that were told to be dead."""
        came = False
        while self._told:
            for rank in self._told.popleft():
                if rank not in self.ranks:
                    self.ranks, came = (*self.ranks, rank), True
                    self.slices = (*self.slices, *self._place.slices_of(rank))
        if came:
            failpoint("slices.adopted")
        return came

    def offer(self, against: str) -> None:
        """Others could take over this worker's slices, or could not, for a reason."""
        if against != self._offered:
            self._offered = against
            self._store.tell({"offer": against})

    def saves(self, path: str) -> None:
        """A checkpoint is about to be written there; "": it is written."""
        self._store.tell({"saving": path})
