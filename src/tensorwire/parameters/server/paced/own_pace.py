"""Makes a version of a store of each commit of a slice, where workers go at their own pace.

There is one copy of parameters and state, and each worker has parameters of its own, in memory
where servers write while it is in `step()`. So nothing that a worker reads is ever overwritten, and
no server waits for a reader: when all have applied a worker's commit, each copies its share of
that very version, before it makes the next one.

The next action is an event, the same at all servers. Where memory outlives servers, an event is
noted when it is done, before anybody is told: a successor repeats actions that were not noted, with
the same commit and the same bytes, and repeats the answers of noted ones.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

from tensorwire.errors import PeerLostError, TimeoutError
from tensorwire.failpoints import failpoint
from tensorwire.memory import wait_all

from ...kernel import Kernel
from ...messages import (
    APPLY,
    OPERATION_NAMES,
    PUBLISH,
    RELEASE,
    Commit,
    DisagreementError,
    Result,
)
from ..opening import Opening
from ..stepping.arrivals import ArrivingUnits
from ..stepping.gather import Calls, Gatherer
from ..stepping.publish import Results
from ..stepping.versions import Versions
from .deliveries import Deliveries
from .events import Event, EventKind
from .inbox import SliceInbox
from .ledger import Ledger, Round
from .order import Follower, Leader, check_open

_LOOK_S = 0.25  # whether all are still there


class OwnPace(Versions):
    """The versions of a store at own pace; `advance` makes one per commit, or one for all."""

    _inbox: SliceInbox  # made by `_make_gatherer`

    def __init__(
        self,
        opening: Opening,
        make_kernel: Callable[[str], Kernel],
        threads: int,
        calls: Calls,
        results: Results,
        fail: Callable[[BaseException], None],
    ) -> None:
        # First: server 0 looks for its memory.
        self._follower = None if opening.regions.server == 0 else Follower(opening)
        super().__init__(opening, make_kernel, threads, calls, results, fail)
        self._opening, self._ledger = opening, Ledger(opening)
        self._account = account = self._ledger.account
        self._inbox.taken, self.over = account.taken, account.over
        self._leader: Leader | None = None
        if self._follower is None:
            self._leader = Leader(opening, self._ledger, self._inbox, calls)
            self._snapshots.ask_pause = self._leader.ask_pause
        self._deliveries = Deliveries(opening, self._publication.master, results.answer, fail)
        self._notes_bytes = 0  # of the journal
        self._idle = replace(Commit.empty(0, APPLY, opening.spec), weight=0.0)

    def _make_gatherer(self, opening: Opening, calls: Calls) -> Gatherer:
        self._inbox = SliceInbox(opening, self._shard, calls)
        return self._inbox

    def described(self) -> Mapping[str, object]:
        """See `Versions`."""
        return {} if self._leader is None else self._leader.described()

    def close(self) -> None:
        """See `Versions`."""
        if self._leader is not None:
            self._leader.close()
        self._deliveries.close()
        super().close()

    def lend(self) -> None:
        """See `Versions`; snapshots are made in a pause, which a predecessor may have begun."""
        self._snapshots.present = self._snapshots.pauses.version
        self._snapshots.start()
        if self._lending is not None:
            # A predecessor may have been in the middle of the next version.
            self._lending.open(self._account.version, settled=self._account.version == 1)

    @property
    def present(self) -> int:
        """See `Versions`."""
        return 1 if self._journal is None else self._account.version

    def tell_opened(self) -> None:
        """See `Versions`. Each worker gets the last message of its own."""
        if self._journal is None:
            super().tell_opened()
            return
        for rank in dict.fromkeys(self._opening.committers):
            told = self._account.answers.get(rank, (1, Result(1).to_bytes().tobytes()))
            self._results.answer_again(rank, *told)
        if self.over:
            self._note_last()

    def advance(self, version: int) -> None:
        """See `Versions`. Workers are answered before the next version is made."""
        while self._account.version < version:
            self._do_next()

    def _do_next(self) -> None:
        """Does the next event."""
        account = self._account
        if (leader := self._leader) is not None:
            if not leader.is_decided:
                leader.decide(account.version)
                failpoint("event.decided")
            event = leader.send()
            failpoint("event.sent")
        if (follower := self._follower) is not None:
            event = follower.await_event(account.events + 1)
            failpoint("event.come")
        # By rank, the workers that are told, and whether the version is still to be sent to them.
        tells: dict[int, bool] = {}
        if event.kind == EventKind.ANSWERED:
            tells[event.which] = self._answer(event.which)
        elif event.kind == EventKind.PAUSED:
            self._stand_still(event)
        elif event.kind == EventKind.APPLIED:
            self._apply(event.which)
        else:
            tells = self._make_together()
        account.events += 1
        failpoint("event.made")
        self._ledger.note()
        if self._journal is not None and self._journal.published < account.version:
            # Also what a launcher looks at, to know whether there is progress.
            self._journal.publish(account.version, Result(account.version).to_bytes())
        failpoint("event.noted")
        for rank, is_sent in tells.items():
            number, data = account.answers[rank]
            if self._journal is not None:
                self._results.answer_surely(rank, number, data)
            elif is_sent:
                self._deliveries.send(rank, number, data)
            else:
                self._results.answer(rank, number, data, [])
        self.over = account.over
        if self.over:
            self._note_last()
        failpoint("event.told")

    def _note_last(self) -> None:
        """Notes the last version after its answers, so that a successor does not repeat them."""
        if self._journal is not None:
            version = self._account.version
            self._journal.publish(version, Result(version).to_bytes(), last=True)

    # ---- what is done

    def _apply(self, index: int) -> None:
        commit, arriving = self._take(index)
        if commit.operation != APPLY:
            called = OPERATION_NAMES[commit.operation]
            raise ValueError(
                f"worker {self._inbox.rank(index)} calls {called} where its step() is due: make "
                "the same calls on all workers"
            )
        started, version = time.perf_counter(), self._account.version + 1
        # The mean is over one slice; `scale * weight / weight` would be rounded.
        mine = replace(commit, version=version, weight=float(commit.weight > 0))
        idle = replace(self._idle, version=version, flags=commit.flags, scale=commit.scale)
        idle = replace(idle, max_norm=commit.max_norm, hyper=commit.hyper)
        commits = [mine if i == index else idle for i in range(len(self._inbox.taken))]
        # Exchanges are counted without gaps: the mailbox has two places, for two in a row.
        self._account.norms += commit.looks
        finite, norm = self._change(version, commits, self._exchange, None, arriving)
        now = time.perf_counter()
        made = self._account.rounds[self._inbox.rank(index)]
        made.finite, made.norm, made.since = made.finite and finite, norm, now
        made.work_s += now - started - arriving.waited_s / self._shard.threads
        if self._journal is not None:
            notes_s, self._notes_bytes = self._journal.cost(self._shard.threads)
            made.notes_s += notes_s
        self._account.version, self._stepped = version, True

    def _exchange(self, mine: np.ndarray[tuple[int], np.dtype[np.float64]]) -> list[float]:
        """Returns the sums of all servers."""
        return self._norms.exchange(self._account.norms, mine)

    def _take(self, index: int) -> tuple[Commit, ArrivingUnits]:
        """Returns a slice's next commit, which server 0 has seen."""
        self._await(index)
        return self._inbox.take(index)

    def _await(self, index: int) -> None:
        opening, rank = self._opening, self._inbox.rank(index)
        while True:
            try:
                self._inbox.wait(index, self._inbox.taken[index] + 1, _LOOK_S)
                return
            except TimeoutError:
                check_open(opening)
            except PeerLostError:
                check_open(opening)
                raise PeerLostError(f"worker {rank} was lost; its own messages tell why") from None

    def _answer(self, rank: int) -> bool:
        """Makes the answer to a worker; tells whether the version is still to be sent to it."""
        rounds = self._account.rounds
        made, rounds[rank] = rounds[rank], Round()
        pace = None if self._leader is None else self._leader.pace
        text = "" if pace is None else pace.to_text()
        wait_s = time.perf_counter() - made.since
        self._say(
            rank,
            Result(
                max(self._taken_of(rank)), made.finite, made.norm, wait_s, made.work_s,
                made.notes_s, self._notes_bytes, message=text,
            ),
        )  # fmt: skip
        return self._deliveries.bring(rank)

    def _say(self, rank: int, result: Result) -> None:
        self._account.answers[rank] = result.version, result.to_bytes().tobytes()

    def _taken_of(self, rank: int) -> list[int]:
        taken = self._inbox.taken
        return [taken[i] for i in range(len(taken)) if self._inbox.rank(i) == rank]

    def _stand_still(self, event: Event) -> None:
        """Makes no version until the worker that has asked for the pause ends it."""
        version = self._account.version
        self._snapshots.present = version  # first: an answered worker may ask for a copy
        self._snapshots.pauses.begin(event.which, event.number, version)
        self._snapshots.look()  # it answers the worker that has asked
        failpoint("pause.begun")
        while not self._snapshots.pauses.wait(event.which, event.number, _LOOK_S):
            check_open(self._opening)
        self._snapshots.present = 0
        failpoint("pause.over")

    def _make_together(self) -> dict[int, bool]:
        """Makes a version of the commits of all slices, each with its own number.

        Returns:
            By rank, whether the version is still to be sent to a worker.
        """
        version = self._account.version + 1
        taken = [self._take(index) for index in range(len(self._inbox.taken))]
        commits = [replace(commit, version=version) for commit, _ in taken]
        ranks = [self._inbox.rank(index) for index in range(len(commits))]
        for rank, commit in zip(ranks, commits, strict=True):
            # Hyper-parameters differ where workers have made other numbers of steps. They do not
            # matter, because no gradient is applied here.
            alike = replace(commit, hyper=commits[0].hyper)
            if different := commits[0].difference(alike, f"in worker {ranks[0]}", f"in {rank}"):
                raise DisagreementError(f"workers {ranks[0]} and {rank} disagree: {different}")
        operation = commits[0].operation
        if operation not in (PUBLISH, RELEASE):
            raise ValueError(
                f'{OPERATION_NAMES[operation]} needs tw.init(mode="sync"); in other modes each '
                "worker steps at its own pace"
            )
        announced = [each for _, arriving in taken for each in arriving.announced]
        arriving = ArrivingUnits(self._opening.regions.units, announced)
        # Before the first step all views are alike, and get only the new values.
        chunks = None if self._stepped else self._publication.begin(version)
        self._change(version, commits, self._exchange, chunks, arriving)
        if chunks:
            wait_all(chunks.finish())
        tells: dict[int, bool] = {}
        for rank in dict.fromkeys(ranks):
            tells[rank] = not chunks and operation != RELEASE and self._deliveries.bring(rank)
            self._say(rank, Result(max(self._taken_of(rank))))
        self._account.version, self._account.over = version, operation == RELEASE
        return tells
