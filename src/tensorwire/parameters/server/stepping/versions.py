"""Makes the versions of an open store at a server: gathers commits, applies them, tells workers."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from tensorwire.errors import TensorwireError, UnavailableError
from tensorwire.failpoints import failpoint
from tensorwire.memory import wait_all

from ...device import ShareDevice
from ...journal import Journal
from ...kernel import Kernel
from ...messages import APPLY, PUBLISH, PUSHED, REDUCED, RELEASE, WANT_NORM, WRITTEN, Commit, Result
from ...reading import ReadPlace, lent_name
from ...regions import AVERAGE, RegionKind
from ...shard import Shard
from ...shard_memory import ShardMemory
from ...snapshot import VALUES, state
from ...step import Exchange
from ..lending.lending import Lending
from ..opening import Opening
from .arrivals import ArrivingUnits
from .gather import Calls, Gathered, Gatherer
from .hold import Hold
from .publish import Chunks, Norms, Publication, Results
from .snapshots import Snapshots, arrays_on_host

_KEPT_STEPS = 8  # in which nothing is pushed into a slot, before it gives its pages back


class Timed:
    """An exchange with other servers that measures how long it takes."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange, self.spent_s = exchange, 0.0

    def __call__(self, mine: NDArray[np.float64]) -> Sequence[float]:
        """See `Exchange`."""
        started = time.perf_counter()
        try:
            return self._exchange(mine)
        finally:
            self.spent_s += time.perf_counter() - started


class Versions:
    """The versions of an open store at this server, as they are made.

    Attributes:
        over: the last one was made.
    """

    def __init__(
        self,
        opening: Opening,
        make_kernel: Callable[[str], Kernel],
        threads: int,
        calls: Calls,
        results: Results,
        fail: Callable[[BaseException], None],
    ) -> None:
        self._results, self._opening = results, opening
        spec, size = opening.spec, opening.regions.share.size_bytes
        kernel = make_kernel(spec.optimizer)
        if kernel.hyper != spec.hyper:
            raise ValueError(
                f"{spec.optimizer} has the hyper-parameters {kernel.hyper} on the servers and "
                f"{spec.hyper} on the workers: install the same version of it for both"
            )
        if kernel.scalars != spec.scalars:
            raise ValueError(
                f"{spec.optimizer} has the scalars {kernel.scalars} on the servers and "
                f"{spec.scalars} on the workers: install the same version of it for both"
            )
        opening.device = device = _device_of(opening, kernel)
        slots = [opening.allocate(RegionKind.SLOT, i) for i in range(spec.slices)]
        contributions = [opening.contribution(i, slot) for i, slot in enumerate(slots)]
        states = {name: opening.worked_on(RegionKind.STATE, name) for name in kernel.states}
        counts = opening.allocate(RegionKind.COUNTS).array("int64")[: len(spec.tensors)]
        self._publication = Publication(opening)
        self._norms = Norms(opening)
        shape = len(spec.tensors), len(spec.scalars)
        scalars = opening.allocate(RegionKind.SCALARS).array("float64")[: shape[0] * shape[1]]
        average, averaged = None, np.zeros(0, np.int64)
        if spec.ema:
            average = opening.worked_on(RegionKind.STATE, AVERAGE)
            averaged = opening.allocate(RegionKind.AVERAGED).array("int64")[: len(spec.tensors)]
        # Else in slot 0, which a successor needs as it was, or slice 0 fills meanwhile.
        apart = opening.durable or not opening.mode.is_sync
        kept = opening.allocate(RegionKind.KEPT).array()[:size] if apart else None
        self._written = None
        if opening.mode.is_sync:  # pages that nobody writes need no memory
            self._written = opening.allocate(RegionKind.WRITTEN)
        written = None if self._written is None else self._written.array()[:size]
        on_device = None
        if device is not None:
            on_device = opening.worked_on(RegionKind.ON_DEVICE)
            device.lock([self._publication.master])
        memory = ShardMemory(
            self._publication.master, contributions, states, counts, scalars.reshape(shape),
            average, averaged, kept, written, device, on_device,
        )  # fmt: skip
        self._journal = None
        if opening.durable:
            self._journal = _open_journal(opening, kernel, memory, threads)
        self.over = False
        self._shard = Shard(opening.regions.share, kernel, memory, threads, self._journal)
        self._gatherer = self._make_gatherer(opening, calls)
        self._snapshots = Snapshots(opening, memory, fail)
        self._lending = _lend(opening, self._publication, memory, threads)
        self._hold = None
        if opening.pause is not None and opening.mode.is_sync:
            self._hold = Hold(opening, opening.pause, self._lending)
        # Where a NIC has slots registered, it would go on with the old pages.
        here = len(opening.mapped) == opening.member.count
        self._slots = slots if here else []
        if device is not None and not here:  # to what is given back the device would not get
            device.lock([each.slot for each in contributions])
        self._unused = [0] * len(slots)  # steps in a row that pushed nothing into it
        self._kept_steps = [1] * len(slots)  # the first step may push what others do not
        self._stepped = self._was_written = False

    def _make_gatherer(self, opening: Opening, calls: Calls) -> Gatherer:
        return Gatherer(opening, self._shard, calls)

    def described(self) -> Mapping[str, object]:
        """Returns more facts for `tensorwire status`."""
        return {}

    @property
    def is_new(self) -> bool:
        """True if a journal is written, and has no version yet."""
        return self._journal is not None and not self._journal.published

    def lend(self) -> None:
        """Begins to make snapshots of the present values."""
        version = self._journal.published if self._journal else 1
        self._snapshots.present = version
        self._snapshots.start()
        if self._lending is not None:
            # A predecessor may have been in the middle of the next version.
            still = self._hold is not None and self._hold.is_at(version)
            self._lending.open(version, settled=still or version == 1)

    def note_opened(self) -> None:
        """Notes the version that a store begins with."""
        assert self._journal
        self._journal.publish(1, Result(1).to_bytes())

    @property
    def present(self) -> int:
        """The version that is in place when the store is open."""
        return 1 if self._journal is None else self._journal.published

    def tell_opened(self) -> None:
        """Tells the workers that the store is open, or repeats the last message to them."""
        if self._journal is None:
            self._results.tell_opened()
            return
        data = self._journal.result
        if self._hold is not None and self._hold.stand_again(self.present):
            data = replace(Result.from_bytes(data), edited=True).to_bytes()
        self._results.tell_again(self.present, data)

    def advance(self, version: int) -> None:
        """Makes a version, when all slices have committed it, and tells the workers."""
        gathered = self._gatherer.gather(version)
        failpoint("version.gathered")
        commits, head = gathered.commits, gathered.commits[0]
        chunks = self._publication.begin(version)
        exchange = partial(self._norms.exchange, version)
        finite, norm = self._change(version, commits, exchange, chunks, gathered.arriving)
        if chunks:
            wait_all(chunks.finish())
        result = Result(version, finite, norm, *self._times(gathered))
        failpoint("version.applied")
        is_last = head.operation == RELEASE  # no version follows
        if self._journal is not None:
            self._journal.publish(version, result.to_bytes(), is_last)
            failpoint("version.published")
        self._snapshots.present = version
        self._discard_unused(commits)
        if head.operation == APPLY and self._hold is not None and self._hold.stand(version):
            result = replace(result, edited=True)
        self._results.tell(result)
        self.over = is_last
        failpoint("version.told")

    def _times(self, gathered: Gathered) -> tuple[float, float, float, int]:
        """Returns how long a version waited and worked, what its notes took, and their bytes."""
        _, arriving, started, complete = gathered
        waited = arriving.waited_s / self._shard.threads
        wait_s, work_s = complete - started + waited, time.perf_counter() - complete - waited
        notes = (0.0, 0) if self._journal is None else self._journal.cost(self._shard.threads)
        return wait_s, work_s, *notes

    def _change(
        self,
        version: int,
        commits: Sequence[Commit],
        exchange: Exchange,
        chunks: Chunks | None,
        arriving: ArrivingUnits,
    ) -> tuple[bool, float]:
        """Makes the values a version's; readers see whether it is under way."""
        if self._lending is not None:
            self._lending.begin(version)
        timed = Timed(exchange)
        started = time.perf_counter()
        told = self._shard.advance(commits, timed, chunks, arriving)
        if self._journal is not None:
            self._journal.worked(time.perf_counter() - started - timed.spent_s)
        if self._lending is not None:
            self._lending.done(version)
        return told

    def close(self) -> None:
        """Ends the threads, frees the snapshots, and lets go of the commits."""
        if self._lending is not None:
            if self._opening.door is not None:
                self._opening.door.remove(self._lending)
            self._lending.close()
        self._snapshots.close()
        self._shard.close()
        self._gatherer.close()
        if self._opening.device is not None:
            self._opening.device.close()

    def _discard_unused(self, commits: Sequence[Commit]) -> None:
        """Discards the memory of slots that later steps do not need."""
        self._stepped = self._stepped or commits[0].operation == APPLY
        if self._was_written and self._written is not None and self._slots:
            self._written.discard()
        self._was_written = bool(commits[0].flags & WRITTEN)
        if commits[0].operation == PUBLISH and not self._stepped:
            for slot in self._slots:
                slot.discard()
            return
        # Not at once: edits between steps may write to it, and new pages take longer.
        for index, slot in enumerate(self._slots):
            commit = commits[index]
            # With WANT_NORM the average is kept, and may be read.
            steps = commit.operation == APPLY and not commit.flags & (REDUCED | WANT_NORM)
            pushes = not steps or PUSHED in commit.present
            self._unused[index] = 0 if pushes else self._unused[index] + 1
            if self._unused[index] == self._kept_steps[index]:
                slot.discard()
                self._kept_steps[index] = _KEPT_STEPS


def _device_of(opening: Opening, kernel: Kernel) -> ShareDevice | None:
    """Returns the device of the share: the workers' models' device, if this process can use it."""
    if not opening.workers_device or kernel.changes_kept or not opening.regions.share.size_bytes:
        return None
    try:
        return kernel.device(opening.workers_device)
    except UnavailableError as error:
        here = opening.regions.server
        sys.stderr.write(f"server {here} keeps its share in the host's memory: {error}\n")
        return None


def _lend(
    opening: Opening, publication: Publication, memory: ShardMemory, threads: int
) -> Lending | None:
    """Lends the store to readers, if there is a door for them."""
    if opening.door is None:
        return None
    home, kind, at = publication.place
    here = opening.regions.server
    own = RegionKind.VIEW, RegionKind.MASTER
    lent = {str(each): region for each in own for region in opening.allocated(each).values()}
    # What is on a device is read from snapshots alone.
    states = opening.allocated(RegionKind.STATE) if memory.device is None else {}
    lent |= {state(name): region for name, region in states.items()}
    store = opening.number
    places = {VALUES: ReadPlace(home, lent_name(store, kind), at)}
    places |= {state(name): ReadPlace(here, lent_name(store, state(name)), 0) for name in states}
    arrays = partial(arrays_on_host, memory, opening.regions.share.size_bytes)
    door = opening.door
    try:
        lending = Lending(
            door.node, store, opening.regions, memory, arrays, lent, places, door.ring,
            door.budget, threads,
        )  # fmt: skip
    except (TensorwireError, ValueError, OSError, MemoryError) as error:
        # What happens at the door, where readers have names of their own, must not end the job.
        sys.stderr.write(f"server {here}: nobody can read store {store} as files: {error}\n")
        return None
    door.add(lending)
    return lending


def _open_journal(opening: Opening, kernel: Kernel, memory: ShardMemory, threads: int) -> Journal:
    """Opens the journal of a store at this server, perhaps a predecessor's."""
    share, scalars = opening.regions.share, len(opening.spec.scalars)
    cells, tables = memory.changed_by_cell(share, kernel), memory.changed_by_table(share)
    sizes = {
        RegionKind.UNDO: Journal.undo_bytes(cells, threads if memory.device is None else 1),
        RegionKind.TABLE_UNDO: Journal.table_undo_bytes(share, len(kernel.states)),
    }
    words = opening.region(RegionKind.JOURNAL).array()
    undo = opening.worked_on(RegionKind.UNDO, None, sizes[RegionKind.UNDO])
    rows = opening.allocate(RegionKind.TABLE_UNDO, None, sizes[RegionKind.TABLE_UNDO]).array()
    settle = {} if memory.device is None else {"settle": memory.device.synchronize}
    return Journal(share, scalars, words, undo, rows, cells, tables, **settle)
