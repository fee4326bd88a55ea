"""Gathers the commits of a version at a server, and finds calls that wait for each other."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tensorwire.errors import ClosedError, PeerLostError, TimeoutError
from tensorwire.membership.collective import CollectiveServer
from tensorwire.membership.identity import GOODBYE, called, lost
from tensorwire.membership.server import ServerMember
from tensorwire.memory import Mailbox, Peer, Word

from ...layout import Spec
from ...messages import OPERATION_NAMES, POOLED, PRODUCED, Commit, DisagreementError, merged
from ...regions import RegionKind
from ...shard import Shard
from ..opening import Opening
from .arrivals import Announced, ArrivingUnits


@dataclass(frozen=True, slots=True)
class Contributor:
    """A worker of a slice's pipeline: it makes one commit of every version.

    Its `peer` dates from the opening of the store; None: it had left, or never came. The `units`
    are words for the units that follow a commit over a network. The `blocks` tell where pooled
    gradients are; None where there can be none.
    """

    rank: int
    peer: Peer | None
    mailbox: Mailbox
    units: Sequence[Word]
    blocks: NDArray[np.uint32] | None

    def has_committed(self, version: int) -> bool:
        """Tells whether the commit of a version, or a later one, is there."""
        return self.mailbox.count >= version

    def read(self, spec: Spec) -> Commit:
        """Returns the commit that is there; ValueError if it is none."""
        shape = spec.groups, len(spec.hyper), len(spec.tensors)
        commit = Commit.from_bytes(self.mailbox.message(self.mailbox.count), *shape)
        if POOLED in commit.present and self.blocks is not None:
            return replace(commit, blocks=self.blocks.tolist())
        return commit


class Gathered(NamedTuple):
    """The commits of all slices for a version.

    Attributes:
        commits: one per slice, agreed.
        arriving: gradients on their way.
        started, complete: the times of the first and the last commit.
    """

    commits: list[Commit]
    arriving: ArrivingUnits
    started: float
    complete: float


class Gatherer:
    """The receiver of the commits of a store's versions, which the store's shard checks."""

    def __init__(self, opening: Opening, shard: Shard, calls: Calls) -> None:
        self._opening, self._member, self._spec = opening, opening.member, opening.spec
        self._shard, self._calls = shard, calls
        self._version = 0  # that workers are to commit
        self._looking = threading.Lock()  # at the contributors of a store that may be closed
        self._contributors = list(self._make_contributors())
        calls.gatherers.append(self)

    def _make_contributors(self) -> Iterator[Contributor]:
        opening, blocks = self._opening, None
        for index, rank in enumerate(opening.committers):
            slice_index, stage = divmod(index, self._spec.pipeline)
            if stage == 0:
                blocks = None
                if opening.produces(slice_index):
                    blocks = opening.allocate(RegionKind.BLOCKS, slice_index).array("uint32")
                    blocks = blocks[: len(self._spec.tensors)]
            mailbox = Mailbox(opening.allocate(RegionKind.COMMIT, index))
            units: list[Word] = []
            if rank not in opening.mapped:  # what others copy is there before their commit
                arrived = opening.allocate(RegionKind.ARRIVED, index)
                units = [arrived.word(offset) for offset in opening.regions.unit_words]
            yield Contributor(rank, self._member.workers.get(rank), mailbox, units, blocks)

    def close(self) -> None:
        """Lets go of the store's memory; another store's thread may look meanwhile."""
        self._calls.gatherers.remove(self)
        with self._looking:
            self._contributors = []

    def gather(self, version: int) -> Gathered:
        """Waits until all slices have committed a version; returns their commits.

        Raises:
            DisagreementError: two commits differ, or workers wait for each other in other calls.
            PeerLostError: a worker is gone, or has left while others go on.
            ClosedError: all workers have left.
        """
        self._version, started = version, 0.0
        commits: list[Commit] = []
        gathered: list[Contributor] = []
        for each in self._contributors:
            self._wait(each, version)
            started = started or time.perf_counter()
            commit = each.read(self._spec)
            self._check_places(commit, each)
            commits.append(commit)
            gathered.append(each)
            ranks = gathered[0].rank, each.rank
            if different := commits[0].difference(commit, *(f"in worker {rank}" for rank in ranks)):
                raise DisagreementError(
                    f"worker {ranks[0]} and worker {ranks[1]} disagree: {different}"
                )
        if commits[0].version != version:
            raise DisagreementError(
                f"the workers make version {commits[0].version}, and version {version} is next: "
                "make the same calls on all workers"
            )
        complete = time.perf_counter()
        regions = self._opening.regions
        announced = [
            Announced(
                each.units,
                regions.stamps(each.mailbox.message(version)),
                partial(self._wait_unit, each.peer),
            )
            for each in gathered
            if each.units
        ]
        arriving = ArrivingUnits(regions.units, announced)
        return Gathered(merged(commits, self._spec.pipeline), arriving, started, complete)

    def has_committed(self, rank: int, version: int) -> bool:
        """Tells whether all of a worker's slices have asked for a version."""
        own = [each for each in self._contributors if self._member.owner(each.rank) == rank]
        return all(each.has_committed(version) for each in own)

    def waits_in(self, rank: int, other: int) -> str:
        """Returns the call that one worker has made and another one has not; else ""."""
        with self._looking:
            version = self._version
            if not (version and self._contributors) or not self.has_committed(rank, version):
                return ""
            return "" if self.has_committed(other, version) else self._called(rank)

    def _called(self, rank: int) -> str:
        """Returns the name of the call by which a worker has committed."""
        first = next(each for each in self._contributors if each.rank == rank)
        return OPERATION_NAMES[first.read(self._spec).operation]

    def _check_places(self, commit: Commit, contributor: Contributor) -> None:
        if {PRODUCED, POOLED}.isdisjoint(commit.present):
            return
        try:
            self._shard.check(commit, contributor.rank in self._opening.mapped)
        except ValueError as error:
            raise ValueError(f"worker {contributor.rank}: {error}") from None

    def _wait(self, contributor: Contributor, version: int) -> None:
        while True:
            rank = self._member.owner(contributor.rank)
            try:
                self._wait_for(contributor, rank, version)
                return
            except PeerLostError:
                if self._member.owner(rank) == rank:
                    raise  # else it was killed, and another one goes on for it

    def _wait_for(self, contributor: Contributor, rank: int, version: int) -> None:
        """Waits for a commit, which this worker makes."""
        peer = self._member.workers.get(rank)
        try:
            while True:
                try:
                    wait = partial(contributor.mailbox.wait, version, 1.0, peer=peer)
                    wait() if peer is None else self._member.persist(peer, wait)
                    return
                except TimeoutError:
                    if peer is None:
                        raise PeerLostError(f"worker {rank} has left") from None
                    self._check_deadlock(version, rank)
        except PeerLostError as error:
            if self._member.is_taken(rank):
                raise
            if self._member.has_left(rank):
                self._await_goodbyes(version)
                who = f"worker {rank}" if peer is None else called(peer)
                raise PeerLostError(
                    f"{who} has left the job, others have not: every "
                    "worker makes the same number of steps"
                ) from error
            raise error if peer is None else lost(peer) from error

    @staticmethod
    def _wait_unit(peer: Peer | None, word: Word, stamp: int) -> None:
        try:
            word.wait_until(stamp, peer=peer)
        except PeerLostError as error:
            raise error if peer is None else lost(peer) from error

    def _check_deadlock(self, version: int, rank: int) -> None:
        """Raises DisagreementError if some wait here for a worker that waits for them elsewhere."""
        workers = dict.fromkeys(self._member.owner(each.rank) for each in self._contributors)
        other = next((each for each in workers if self.has_committed(each, version)), None)
        if other is None:
            return  # a worker with more slices to compute may call anything between them
        where = self._calls.elsewhere(self, rank, other)
        # Words only grow: if it is still late, all of this held at one time.
        if where and not self.has_committed(rank, version):
            name = self._called(other)
            raise DisagreementError(f"worker {rank} {where} while worker {other} calls {name}")

    def _await_goodbyes(self, version: int) -> None:
        """Waits after a worker has left until another wants a version, which can never be made."""
        while not any(each.has_committed(version) for each in self._contributors):
            if self._member.all_left() or self._opening.closing.is_set():
                raise ClosedError("all workers have left")
            time.sleep(0.02)


class Calls:
    """The calls in which the workers of a job wait: for a version, for a sum, for a new store.

    Workers whose programs differ would wait for each other for ever, in different calls.

    Attributes:
        gatherers: of the stores that are open.
    """

    def __init__(self, member: ServerMember, collective: CollectiveServer | None) -> None:
        self._words, self._collective = member.words, collective
        self.gatherers: list[Gatherer] = []

    def is_summing(self, rank: int) -> bool:
        """Tells whether a worker waits for a sum, as far as this server knows."""
        return self._collective is not None and self._collective.is_waiting(rank)

    def elsewhere(self, here: Gatherer, rank: int, other: int) -> str:
        """Returns the call in which a worker waits for another one, which waits at `here`."""
        where = ""
        words = [word.value for word in self._words]
        if words[other] < words[rank] < GOODBYE:
            where = "makes another optimizer or changes its parameter groups"
        if self.is_summing(rank):
            where = "has no more data, or calls mean(), sum(), barrier() or load(),"
        for gatherer in list(self.gatherers):
            if gatherer is not here and (name := gatherer.waits_in(rank, other)):
                where = f"calls {name} of another optimizer"
        return where
