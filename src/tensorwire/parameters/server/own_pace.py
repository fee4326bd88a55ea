"""The versions of a store whose workers go at their own pace: each commit of a slice makes one.

There is one copy of parameters and state, and each worker has parameters of its own, in memory
where servers write while it is in `step()`. So nothing that a worker reads is ever overwritten, and
nobody waits for a reader: when all servers have applied a worker's commit, each copies its share of
that very version, before it makes the next one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

from tensorwire.errors import PeerLostError
from tensorwire.memory import RemoteRegion, Transfer, wait_all

from ..kernel import Kernel
from ..messages import APPLY, GO_ON, PUBLISH, RELEASE, Bytes, Commit, DisagreementError, Result
from ..regions import RegionKind
from .arrivals import ArrivingUnits
from .gather import Calls, Gatherer
from .inbox import SliceInbox
from .opening import Opening
from .order import EventKind, Follower, Leader, Sequencer, check_open
from .publish import Results
from .versions import Versions


class Deliveries:
    """Brings what is in place to workers, each into its own memory.

    Args:
        opening: of the store.
        master: the parameters of the share; they change again when a call has returned.
    """

    def __init__(self, opening: Opening, master: Bytes) -> None:
        self._opening, share = opening, opening.regions.share
        self._master, self._start = master[: share.size_bytes], share.start
        self._views: dict[int, RemoteRegion] = {}
        self._copies: dict[int, Bytes] = {}  # what is under way to workers over a network

    def bring(self, rank: int) -> list[Transfer]:
        """Starts to write the share; the worker has been told of the last one."""
        master, start = self._master, self._start
        if not master.size:
            return []
        if rank not in self._views:
            name = self._opening.regions.name(RegionKind.VIEW)
            view = self._opening.member.workers[rank].region(name)
            self._views[rank] = view[start : start + master.size]
        if rank in self._opening.mapped:
            self._views[rank].write(master).wait()
            return []
        copy = self._copies.setdefault(rank, np.empty_like(master))
        copy[:] = master
        return [self._views[rank].write(copy)]


class Round:
    """What a worker's commits have come to, since it was answered."""

    def __init__(self) -> None:
        self.finite, self.norm, self.work_s = True, float("nan"), 0.0
        self.since = 0.0  # when the last of them was applied


class OwnPace(Versions):
    """See `Versions`; a version that `advance` makes is that of one commit, or of all together."""

    _inbox: SliceInbox  # made by what is above

    def __init__(
        self,
        opening: Opening,
        make_kernel: Callable[[str], Kernel],
        threads: int,
        calls: Calls,
        results: Results,
        fail: Callable[[BaseException], None],
    ) -> None:
        first = opening.regions.server == 0
        follower = None if first else Follower(opening)  # others look for its memory
        super().__init__(opening, make_kernel, threads, calls, results, fail)
        self._opening = opening
        self._order: Sequencer = follower or Leader(opening, opening.mode, self._inbox, calls)
        self._deliveries = Deliveries(opening, self._publication.master)
        self._rounds = {rank: Round() for rank in opening.committers}
        self._sent: dict[int, list[Transfer]] = {}
        self._norms_made = 1
        self._idle = replace(Commit.empty(0, APPLY, opening.spec), weight=0.0)

    def _make_gatherer(self, opening: Opening, calls: Calls) -> Gatherer:
        self._inbox = SliceInbox(opening, self._shard, calls)
        return self._inbox

    def described(self) -> Mapping[str, object]:
        """See `Versions`."""
        return self._order.described()

    def close(self) -> None:
        """See `Versions`."""
        self._order.close()
        super().close()

    def advance(self, version: int) -> None:
        """See `Versions`. Workers are answered before the next version is made."""
        while True:
            kind, index = self._order.next(version - 1)
            if kind == EventKind.ANSWERED:
                self._answer(index, version - 1)
            elif kind == EventKind.PAUSED:
                self._pause(index)
            elif kind == EventKind.APPLIED:
                self._apply(index, version)
                return
            else:
                self._make_together(version)
                return

    def _apply(self, index: int, version: int) -> None:
        commit, arriving = self._take(index)
        if commit.operation != APPLY:
            raise ValueError(f"a commit to be applied asks for {commit.operation}")
        started = time.perf_counter()
        # The mean is over one slice; `scale * weight / weight` would be rounded.
        mine = replace(commit, version=version, weight=1.0)
        idle = replace(self._idle, version=version, flags=commit.flags, scale=commit.scale)
        idle = replace(idle, max_norm=commit.max_norm, hyper=commit.hyper)
        commits = [mine if i == index else idle for i in range(len(self._inbox.taken))]
        finite, norm = self._change(version, commits, self._exchange, None, arriving)
        now = time.perf_counter()
        made = self._rounds[self._inbox.rank(index)]
        made.finite, made.norm, made.since = made.finite and finite, norm, now
        made.work_s += now - started - arriving.waited_s / self._shard.threads
        self._stepped = True

    def _exchange(self, mine: np.ndarray[tuple[int], np.dtype[np.float64]]) -> list[float]:
        """Those of all servers; numbered one by one, as two places are for two in a row."""
        self._norms_made += 1
        return self._norms.exchange(self._norms_made, mine)

    def _take(self, index: int) -> tuple[Commit, ArrivingUnits]:
        """A slice's next commit, which server 0 has seen."""
        self._await(index)
        return self._inbox.take(index)

    def _await(self, index: int) -> None:
        opening, rank = self._opening, self._inbox.rank(index)
        while True:
            try:
                self._inbox.wait(index, self._inbox.taken[index] + 1, 0.25)
                return
            except TimeoutError:
                check_open(opening)
            except PeerLostError:
                check_open(opening)
                raise PeerLostError(f"worker {rank} was lost") from None

    def _answer(self, rank: int, version: int) -> None:
        """A worker gets the version in place, and goes on."""
        made, self._rounds[rank] = self._rounds[rank], Round()
        number = max(self._taken_of(rank))
        pace = self._order.pace(rank)
        text = "" if pace is None else pace.to_text()
        wait_s = time.perf_counter() - made.since
        result = Result(number, made.finite, made.norm, wait_s, made.work_s, message=text)
        self._tell_worker(rank, result, self._deliveries.bring(rank))

    def _tell_worker(self, rank: int, result: Result, after: list[Transfer]) -> None:
        self._results.answer(rank, result, after)
        self._sent[rank] = after  # until it asks again, when all has come

    def _taken_of(self, rank: int) -> list[int]:
        taken = self._inbox.taken
        return [taken[i] for i in range(len(taken)) if self._inbox.rank(i) == rank]

    def _pause(self, index: int) -> None:
        """No version is made until a worker says that it has read what it wants."""
        rank = self._inbox.rank(index)
        commit, _ = self._take(index)
        self._snapshots.present = commit.version
        self._tell_worker(rank, Result(commit.version), [])
        commit, _ = self._take(index)
        self._snapshots.present = 0
        if commit.operation != GO_ON:
            raise ValueError(f"worker {rank} has not said that it goes on")
        self._tell_worker(rank, Result(commit.version), [])

    def _make_together(self, version: int) -> None:
        """What all slices ask for, each at its own number."""
        taken = [self._take(index) for index in range(len(self._inbox.taken))]
        commits = [replace(commit, version=version) for commit, _ in taken]
        ranks = [self._inbox.rank(index) for index in range(len(commits))]
        for rank, commit in zip(ranks, commits, strict=True):
            if different := commits[0].difference(commit, f"in worker {ranks[0]}", f"in {rank}"):
                raise DisagreementError(f"workers {ranks[0]} and {rank} disagree: {different}")
        operation = commits[0].operation
        if operation not in (PUBLISH, RELEASE):
            raise ValueError(
                f"operation {operation} has no meaning where each worker goes at its own pace"
            )
        announced = [each for _, arriving in taken for each in arriving.announced]
        arriving = ArrivingUnits(self._opening.regions.units, announced)
        # Before the first step all views are alike, and get what is new alone.
        chunks = None if self._stepped else self._publication.begin(version)
        self._change(version, commits, self._exchange, chunks, arriving)
        if chunks:
            wait_all(chunks.finish())
        for rank in dict.fromkeys(ranks):
            after = [] if chunks or operation == RELEASE else self._deliveries.bring(rank)
            self._tell_worker(rank, Result(max(self._taken_of(rank))), after)
        self.over = operation == RELEASE
