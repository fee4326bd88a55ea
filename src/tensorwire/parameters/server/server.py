"""A server: the shards of a job's stores, served to workers that only ever write and read memory.

One thread per store waits for the slices' commits and makes the next version; the main thread opens
stores, watches the members and, when something fails, tells every worker why. docs/parameters.md
has the regions and words.
"""

from __future__ import annotations

import dataclasses
import json
import os
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tensorwire.errors import ClosedError, PeerLostError, TensorwireError, TimeoutError
from tensorwire.membership import GOODBYE, CollectiveServer, ServerMember, why_lost
from tensorwire.memory import Peer, Region, RemoteRegion, Transfer, Word, wait_all

from ..kernel import Kernel, Rows
from ..layout import MALFORMED, Layout, Selection, Share, Spec, checked_wants
from ..messages import (
    APPLY,
    BLOCK_BYTES,
    OPERATION_NAMES,
    POISON,
    POOLED,
    PRODUCED,
    PUSHED,
    REDUCED,
    RELEASE,
    RESULT_BYTES,
    WORD_BYTES,
    Bytes,
    Commit,
    Result,
    merged,
)
from ..rows import Table, change, changed_starts, heads_bytes, tables_of
from ..shard import Memory, Shard
from ..units import STAMP_BYTES, units_of
from .arrivals import Announced, Incoming

# New values leave for workers that do not see them mapped in pieces of about this size.
_CHUNK_BYTES = 1 << 20
_JOIN_S = 10.0
# A slot that nothing was pushed into for so many steps gives its pages back.
_KEPT_STEPS = 8


def most_threads() -> int:
    """How many threads a server uses for its arithmetic unless it is told otherwise."""
    return min(4, len(os.sched_getaffinity(0)))


class DisagreementError(ValueError):
    """The workers do not want the same."""


class Server:
    """Serves stores until all workers have left.

    Args:
        member: this server, gathered.
        make_apply: makes the arithmetic for a Spec's optimizer; ValueError if it cannot.
        threads: for each store's arithmetic.
        collective: on server 0, to tell who waits there.
    """

    def __init__(
        self,
        member: ServerMember,
        make_apply: Callable[[str], Kernel],
        threads: int = 1,
        collective: CollectiveServer | None = None,
    ) -> None:
        self.member = member
        self.make_apply = make_apply
        self.threads = threads
        self.collective = collective
        self.stores: list[StoreServer] = []
        self._made = 0  # stores, those that are gone included
        self._threads: list[threading.Thread] = []
        self._failure: BaseException | None = None

    def run(self) -> None:
        """Returns when every worker said goodbye.

        Raises:
            TensorwireError, ValueError: the job failed; every worker was told why.
        """
        try:
            for number in count():
                if not self._wait_for(number + 1):
                    return
                store = StoreServer(self, number)
                self._made = number + 1
                self.stores.append(store)
                alive = [thread for thread in self._threads if thread.is_alive()]
                self._threads = [*alive, store.start()]
        except BaseException as error:
            failure = self._failure or error
            self.member.await_ends(2.0)
            self._tell(failure)
            raise failure from None
        finally:
            for store in list(self.stores):
                store.close()

    def join(self) -> None:
        """Waits until its threads have ended, which they do when the Node is closed.

        A thread that computes while the interpreter ends can abort the process.
        """
        deadline = time.monotonic() + _JOIN_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if self.collective:
            self.collective.join(max(0.0, deadline - time.monotonic()))

    def fail(self, error: BaseException) -> None:
        """Called by a store's or the collective's thread: the job is over."""
        if isinstance(error, PeerLostError):
            # A transfer or a word knows less of a member than the member's own record.
            try:
                self.member.check()
            except PeerLostError as named:
                error = named
        self._failure = self._failure or error

    def _check_returned(self) -> None:
        if returned := self.member.returned():
            before, after = returned
            self._failure = self._failure or PeerLostError(
                f"{self.member.name_of(before)} was lost: it came back as another process, "
                f"{self.member.name_of(after)}, and nobody can join a job that runs"
            )
            before.close()  # nothing waits for it any more
            raise self._failure

    def _wait_for(self, value: int) -> bool:
        """Until all workers want store number `value`; False when all have left instead."""
        while True:
            if self._failure:
                raise self._failure
            self.member.check()
            self._check_returned()
            words = [word.value for word in self.member.words]
            if all(word >= GOODBYE for word in words):
                return False
            if all(value <= word < GOODBYE for word in words):
                return True
            if any(value <= word < GOODBYE for word in words) and any(w >= GOODBYE for w in words):
                rank = next(rank for rank, word in enumerate(words) if word >= GOODBYE)
                raise DisagreementError(f"worker {rank} has left while others make an optimizer")
            rank = next(rank for rank, word in enumerate(words) if word < value)
            late = self.member.words[rank]
            try:
                late.wait_until(value, 0.25)
            except TimeoutError:
                wants = next((r for r, w in enumerate(words) if value <= w < GOODBYE), None)
                waiting = self.collective is not None and self.collective.is_waiting(rank)
                if wants is not None and waiting and late.value < value:
                    raise DisagreementError(
                        f"worker {rank} calls mean() or barrier() while worker {wants} makes an "
                        "optimizer or changes its parameter groups"
                    ) from None

    def _tell(self, error: BaseException) -> None:
        text = str(error) or type(error).__name__
        if isinstance(error, SystemExit):
            text = "the server was told to end (SIGTERM)"
        name = f"server {self.member.index}"
        if self.collective:
            self.collective.tell(f"{text} (told by {name})")
        # Workers may wait for a store that not all of them wanted yet.
        for store in [*self.stores, StoreServer(self, self._made)]:
            store.poison(f"{text} (told by {name})")


class StoreServer:
    """One store's cells on this server, and the thread that advances them."""

    def __init__(self, server: Server, number: int) -> None:
        self._server = server
        self._member = server.member
        self._number = number
        self._results: dict[int, RemoteRegion] = {}
        self._regions: list[Region] = []
        self._commits: list[Region] = []
        self._slots: list[Region] = []
        self._blocks: list[NDArray[np.uint32] | None] = []  # of each slice, where it has a pool
        self._arrivals: list[list[Word]] = []  # of each commit, where it comes over a network
        self._workers: list[int] = []  # of each commit: of slice 0's pipeline, then of slice 1's
        self._gathering = 0  # the version that workers are to commit
        self._looking = threading.Lock()  # at the commits of a store that may be freed
        self._shard: Shard | None = None
        self._poisoned = False
        self._closing = False
        self._sending = threading.Lock()  # a result must not follow the message that all is over
        self._thread = threading.Thread(
            target=self._run, name=f"tensorwire-store-{number}", daemon=True
        )

    def start(self) -> threading.Thread:
        """Opens the store and begins to serve it."""
        self._thread.start()
        return self._thread

    def _free(self) -> None:
        """All workers have released the store."""
        self._poisoned = True  # nobody waits for it
        self.close()
        self._shard = None
        self._views.clear()
        self._results.clear()
        with self._looking:
            for region in self._regions:
                region.free()
            # Memory is given back when the last that refers to it is gone.
            self._regions.clear()
            self._slots.clear()
            self._commits.clear()
            self._blocks.clear()
            self._arrivals.clear()
            self._workers.clear()
        self._their_norms.clear()
        self._master = np.empty(0, np.uint8)
        del self._counts, self._norms
        self._server.stores.remove(self)

    def close(self) -> None:
        """Frees everything; after the workers have left or were told of the failure."""
        self._closing = True
        if self._shard:
            self._shard.close()

    def poison(self, text: str) -> None:
        """Tells every worker that no version will follow. Called once, by the main thread."""
        if self._poisoned:
            return
        with self._sending:
            self._poisoned = True
        result = Result(0, failed=True, message=text).to_bytes()
        for region in list(self._result_regions().values()):
            try:
                self._send(region, result, POISON).wait(2.0)
            except TensorwireError:
                continue  # it is the one that is lost, or is leaving too

    # ---- opening

    def _result_regions(self) -> dict[int, RemoteRegion]:
        offset = RESULT_BYTES * self._member.index
        for rank, peer in self._member.workers.items():
            if rank in self._results or peer.lost:
                continue
            try:
                region = peer.region(self._name("result"), 5.0)
            except (LookupError, TensorwireError):
                continue
            self._results[rank] = region[offset : offset + RESULT_BYTES]
        return self._results

    def _name(self, what: str) -> str:
        return f"{self._number}/{what}"

    def _allocate(self, what: str, size: int, access: str) -> Region:
        region = self._member.node.allocate(max(size, 64), name=self._name(what), access=access)
        self._regions.append(region)
        return region

    def _open(self) -> None:
        member = self._member
        specs: dict[int, Spec] = {}
        homes: dict[int, int] = {}
        wants: dict[int, list[int] | None] = {}
        views: dict[int, int] = {}
        for rank, peer in sorted(member.workers.items()):
            region = peer.region(self._name("spec"))
            data = np.empty(region.size_bytes, np.uint8)
            region.read(data).wait()
            try:
                raw = json.loads(data.tobytes())
                homes[rank] = int(raw["home"])
                if not -1 <= homes[rank] <= len(member.servers):
                    raise ValueError(f"there is no server {homes[rank]}")
                specs[rank] = spec = Spec.from_json(raw["spec"].encode())
                wants[rank] = checked_wants(raw["wants"], spec)
                views[rank] = int(raw["view"])
            except MALFORMED as error:
                raise ValueError(f"worker {rank} sent no description of a store: {error}") from None
        for rank, spec in specs.items():
            if different := specs[0].difference(spec):
                raise DisagreementError(
                    f"worker {rank}'s model or optimizer is not worker 0's: {different} "
                    "(here: worker 0, there: the other)"
                )
        _check_views(homes, wants, views)
        self._spec = spec = specs[0]
        pipeline = spec.pipeline
        if member.count % pipeline or spec.slices % (member.count // pipeline):
            raise ValueError(
                f"{spec.slices} slices and {member.count} workers in pipelines of {pipeline}"
            )
        each = spec.slices * pipeline // member.count
        self._workers = [
            i // each * pipeline + stage for i in range(spec.slices) for stage in range(pipeline)
        ]
        layout = Layout(spec)
        servers = len(member.servers) + 1
        shares = layout.deal(servers)
        self._share = share = shares[member.index]
        self._others = sorted(member.servers)
        apply = self._server.make_apply(spec.optimizer)
        if apply.hyper != spec.hyper:
            raise ValueError(f"{spec.optimizer} has the hyper-parameters {apply.hyper}")

        size = share.size_bytes
        slots = [self._allocate(f"slot/{i}", size, "rw") for i in range(spec.slices)]
        self._slots = slots
        self._unused = [0] * spec.slices  # steps in a row that pushed nothing into it
        # A NIC may have the slots registered.
        self._remote = not all(self._is_here(rank) for rank in range(member.count))
        produced = [
            self._allocate(f"produced/{i}", size, "rw") if self._any_is_here(i) else None
            for i in range(spec.slices)
        ]
        pools = [
            self._allocate(f"pool/{i}", size, "rw") if slot else None
            for i, slot in enumerate(produced)
        ]
        blocks = [
            self._allocate(f"blocks/{i}", BLOCK_BYTES * len(spec.tensors), "rw") if pool else None
            for i, pool in enumerate(pools)
        ]
        count = len(spec.tensors)
        self._blocks = [b.array("uint32")[:count] if b else None for b in blocks]
        tables, heads = tables_of(share), heads_bytes(share)
        rows = [self._allocate(f"rows/{i}", heads, "rw") for i in range(spec.slices) if tables]
        states = {name: self._allocate(f"state/{name}", size, "rw") for name in apply.states}
        self._counts = self._allocate("counts", 8 * len(spec.tensors), "rw")
        self._units = units = units_of(share)
        self._commit_bytes = Commit.size_bytes(spec.groups, len(spec.hyper), len(spec.tensors))
        commit_bytes = WORD_BYTES + self._commit_bytes + STAMP_BYTES * len(units)
        commits = range(len(self._workers))
        self._commits = [self._allocate(f"commit/{i}", commit_bytes, "w") for i in commits]
        self._arrivals = [self._make_arrivals(i) for i in commits]
        norms_bytes = WORD_BYTES + 8 * max(len(s.cells) for s in shares)
        self._norms_stride = norms_bytes = -(-norms_bytes // 64) * 64
        self._norms = self._allocate("norms", norms_bytes * servers, "w")
        self._cells = [len(s.cells) for s in shares]
        master = self._make_master(layout, share, set(homes.values()))
        self._tell_servers_opened()
        self._find_views(master, homes, wants, views)
        memory = Memory(
            self._master,
            [slot.array()[:size] for slot in slots],
            [slot.array()[:size] if slot else None for slot in produced],
            [pool.array()[:size] if pool else None for pool in pools],
            {name: region.array()[:size] for name, region in states.items()},
            self._counts.array("int64")[: len(spec.tensors)],
            [region.array()[:heads] for region in rows],
        )
        self._shard = Shard(share, apply, memory, self._server.threads)
        results = self._result_regions()
        if len(results) < member.count:
            raise PeerLostError("a worker left while a store was opened")
        for region in results.values():
            self._send(region, Result(1).to_bytes(), 1).wait(30.0)

    def _is_here(self, rank: int) -> bool:
        """The worker has our memory mapped and can produce its gradients there."""
        return bool(self._member.workers[rank].path.transport == "shm")

    def _any_is_here(self, slice_index: int) -> bool:
        pipeline = self._spec.pipeline
        first = slice_index * pipeline
        return any(self._is_here(rank) for rank in self._workers[first : first + pipeline])

    def _make_arrivals(self, commit: int) -> list[Word]:
        if self._is_here(self._workers[commit]):
            return []  # what it copies is there before its commit
        size = STAMP_BYTES * len(self._units)
        region = self._allocate(f"arrived/{commit}", size, "w")
        return [region.word(offset) for offset in range(0, size, STAMP_BYTES)]

    def _make_master(self, layout: Layout, share: Share, homes: set[int]) -> Region | None:
        if self._member.index not in homes:
            return None
        return self._allocate("view", layout.size_bytes, "rw")

    def _tell_servers_opened(self) -> None:
        """All servers have their regions before anyone looks for another's."""
        index = self._member.index
        self._their_norms: dict[int, RemoteRegion] = {}
        for other in self._others:
            region = self._lookup(self._member.servers[other], "norms")
            start = self._norms_stride * index
            self._their_norms[other] = region[start : start + self._norms_stride]
            self._their_norms[other].word(0).set(1).wait(30.0)
        for other in self._others:
            word = self._norms.word(self._norms_stride * other)
            word.wait_until(1, peer=self._member.servers[other])

    def _lookup(self, peer: object, what: str) -> RemoteRegion:
        while not self._closing:
            try:
                region: RemoteRegion = peer.region(self._name(what), None)  # type: ignore[attr-defined]
                return region
            except LookupError:
                time.sleep(0.01)  # the other server is about to allocate it
        raise ClosedError("the job is over")

    def _find_views(
        self,
        view: Region | None,
        homes: dict[int, int],
        wants: dict[int, list[int] | None],
        views: dict[int, int],
    ) -> None:
        """Chooses where the parameters lie, and whom to write them to besides."""
        share, member = self._share, self._member
        self._master = np.empty(0, np.uint8)
        self._views: list[_View] = []
        starts = changed_starts(share.layout.deal(len(member.servers) + 1))
        whole = Selection(share.layout)
        if view is not None:
            self._master = view.array()[share.start : share.stop]
        for home in sorted(set(homes.values()) - {-1, member.index}):
            region = self._lookup(member.servers[home], "view")
            if region.mapped and not self._master.size:
                self._master = region.array()[share.start : share.stop]
            elif share.size_bytes:
                self._views.append(_View(region, whole, None))
        for rank, home in sorted(homes.items()):
            if home == -1 and views[rank] == rank and share.size_bytes:
                worker, changes = member.workers[rank], None
                region = worker.region(self._name("view"))
                if tables_of(share):
                    changes = worker.region(self._name("changed"))[starts[member.index] :]
                self._views.append(_View(region, Selection(share.layout, wants[rank]), changes))
        if not self._master.size:
            # Who has a part of the model reads the rest here.
            access = "none" if self._spec.pipeline == 1 else "r"
            private = self._allocate("master", share.size_bytes, access)
            self._master = private.array()[: share.size_bytes]

    # ---- serving

    def _run(self) -> None:
        try:
            self._open()
            for version in count(2):
                if not self._advance(version):
                    self._free()
                    return
        except BaseException as error:
            if self._closing or self._all_left():
                return
            if not isinstance(error, TensorwireError | ValueError):
                traceback.print_exc()
            self._server.fail(error)

    def _all_left(self) -> bool:
        return all(self._member.has_left(rank) for rank in range(self._member.count))

    def _advance(self, version: int) -> bool:
        """Makes a version; False when it was the last."""
        self._gathering, started = version, 0.0
        commits: list[Commit] = []
        for index, region in enumerate(self._commits):
            rank = self._workers[index]
            self._wait_commit(region, version, rank)
            started = started or time.perf_counter()
            commit = self._read(region)
            blocks = self._blocks[index // self._spec.pipeline]
            if POOLED in commit.present and blocks is not None:
                commit = dataclasses.replace(commit, blocks=blocks.tolist())
            self._check(commit, index)
            commits.append(commit)
            if different := commits[0].difference(commit):
                raise DisagreementError(
                    f"worker {self._workers[0]} and worker {rank} disagree: {different}"
                )
        if commits[0].version != version:
            raise DisagreementError(f"version {commits[0].version} was committed, not {version}")
        complete = time.perf_counter()
        commits = merged(commits, self._spec.pipeline)
        incoming = self._announced(self._commits)
        finite, norm = self._work(version, commits, incoming)
        self._discard_unused(commits)
        waited = incoming.waited_s / self._shard.threads if self._shard else 0.0
        wait_s, work_s = complete - started + waited, time.perf_counter() - complete - waited
        result = Result(version, finite, norm, wait_s, work_s).to_bytes()
        with self._sending:
            if self._poisoned:
                raise ClosedError("the job is over")
            sent = [self._send(region, result, version) for region in self._results.values()]
        wait_all(sent)
        return commits[0].operation != RELEASE

    def _check(self, commit: Commit, index: int) -> None:
        rank = self._workers[index]
        if {PRODUCED, POOLED}.isdisjoint(commit.present):
            return
        assert self._shard is not None
        try:
            self._shard.check(commit, self._is_here(rank))
        except ValueError as error:
            raise ValueError(f"worker {rank}: {error}") from None

    def _discard_unused(self, commits: list[Commit]) -> None:
        """Once all gradients of a slice are produced in place, its other slot needs no memory.

        Not at once: who edits parameters between steps writes to the slot again, and new pages take
        longer than the copy.
        """
        for index, commit in enumerate(commits):
            steps = commit.operation == APPLY and not commit.flags & REDUCED
            pushes = not steps or PUSHED in commit.present
            self._unused[index] = 0 if pushes else self._unused[index] + 1
            if self._unused[index] == _KEPT_STEPS and not self._remote:
                self._slots[index].discard()

    def _wait_commit(self, region: Region, version: int, rank: int) -> None:
        peer = self._member.workers[rank]
        try:
            while True:
                try:
                    region.word(0).wait_until(version, 1.0, peer=peer)
                    return
                except TimeoutError:
                    self._check_deadlock(version, rank)
        except PeerLostError as error:
            if self._member.has_left(rank):
                self._await_goodbyes(version)
                raise PeerLostError(
                    f"{self._member.name_of(peer)} has left the job, others have not: every "
                    "worker makes the same number of steps"
                ) from error
            raise self._lost(peer) from error

    def _lost(self, peer: Peer) -> PeerLostError:
        return PeerLostError(f"{self._member.name_of(peer)} was lost: {why_lost(peer)}")

    def _announced(self, commits: Sequence[Region]) -> Incoming:
        """What the slices' commits say is on its way."""
        found = []
        for index, region in enumerate(commits):
            if words := self._arrivals[index]:
                data = region.array()[WORD_BYTES + self._commit_bytes :]
                stamps = np.frombuffer(data[: STAMP_BYTES * len(words)].tobytes(), np.uint64)
                wait = partial(self._wait_arrival, self._member.workers[self._workers[index]])
                found.append(Announced(words, stamps, wait))
        return Incoming(self._units, found)

    def _wait_arrival(self, peer: Peer, word: Word, stamp: int) -> None:
        try:
            word.wait_until(stamp, peer=peer)
        except PeerLostError as error:
            raise self._lost(peer) from error

    def _check_deadlock(self, version: int, rank: int) -> None:
        """Some wait here for a worker that waits for them in another call."""
        others = [w for w in dict.fromkeys(self._workers) if self.has_committed(w, version)]
        if not others:
            return  # who has more slices to compute may call anything between them
        other = others[0]
        words = [word.value for word in self._member.words]
        where = None
        if words[other] < words[rank] < GOODBYE:
            where = "makes another optimizer or changes its parameter groups"
        collective = self._server.collective
        if collective and collective.is_waiting(rank):
            where = "calls mean() or barrier()"
        for store in list(self._server.stores):
            if store is not self and (name := store.waits_in(rank, other)):
                where = f"calls {name} of another optimizer"
        # Words only grow: if it is still late, all of this held at one time.
        if where and not self.has_committed(rank, version):
            mine = self._read(self._commits[self._workers.index(other)])
            name = OPERATION_NAMES[mine.operation]
            raise DisagreementError(f"worker {rank} {where} while worker {other} calls {name}")

    def has_committed(self, rank: int, version: int) -> bool:
        """All of a worker's slices have asked for a version."""
        pairs = zip(self._workers, self._commits, strict=True)
        return all(region.word(0).value >= version for worker, region in pairs if worker == rank)

    def waits_in(self, rank: int, other: int) -> str:
        """What one worker has asked for and another one has not; "" if nothing."""
        with self._looking:
            version = self._gathering
            if not (version and self._commits) or not self.has_committed(rank, version):
                return ""
            if self.has_committed(other, version):
                return ""
            return OPERATION_NAMES[self._read(self._commits[self._workers.index(rank)]).operation]

    def _read(self, region: Region) -> Commit:
        spec, data = self._spec, region.array()[WORD_BYTES:]
        return Commit.from_bytes(data, spec.groups, len(spec.hyper), len(spec.tensors))

    def _await_goodbyes(self, version: int) -> None:
        """One worker has left: returns when another wants a version that can never be made."""
        while not any(region.word(0).value >= version for region in self._commits):
            if self._all_left() or self._closing:
                raise ClosedError("all workers have left")
            time.sleep(0.02)

    def _work(self, version: int, commits: list[Commit], incoming: Incoming) -> tuple[bool, float]:
        assert self._shard is not None
        chunks = None
        if self._views:
            chunks = _Chunks(self._share, self._master, self._views, version)
        result = self._shard.advance(
            commits, lambda sums: self._exchange(version, sums), chunks, incoming
        )
        if chunks:
            wait_all(chunks.finish())
        return result

    def _exchange(self, version: int, mine: NDArray[np.float64]) -> list[float]:
        """All servers' sums, in the order of the cells."""
        padded = np.zeros((self._norms_stride - WORD_BYTES) // 8)
        padded[: len(mine)] = mine
        for other in self._others:
            region = self._their_norms[other]
            region[WORD_BYTES:].write(padded, signal=(region.word(0), version)).wait()
        sums: list[float] = []
        for index in range(len(self._cells)):
            if index == self._member.index:
                sums += mine.tolist()
                continue
            start = self._norms_stride * index
            peer = self._member.servers[index]
            self._norms.word(start).wait_until(version, peer=peer)
            theirs = self._norms[start + WORD_BYTES : start + self._norms_stride].array("float64")
            sums += theirs.tolist()
        return sums

    def _send(self, region: RemoteRegion, result: Bytes, version: int) -> Transfer:
        return region[WORD_BYTES:].write(result, signal=(region.word(0), version))


def _check_views(
    homes: dict[int, int], wants: dict[int, list[int] | None], views: dict[int, int]
) -> None:
    """Raises ValueError unless every view that is shared is there and has what is wanted."""
    for rank, other in views.items():
        if other == rank:
            continue
        shared = homes.get(other) == -1 == homes[rank] and views[other] == other
        if not shared or wants[rank] != wants[other]:
            raise ValueError(f"worker {rank} cannot share a view with worker {other}")


class _View(NamedTuple):
    """Where a worker, or several, see the parameters.

    Attributes:
        memory: theirs.
        selection: of what lies there.
        changes: where what a step changed of tables is put for whoever reads it there; None: it is
            written into `memory`.
    """

    memory: RemoteRegion
    selection: Selection
    changes: RemoteRegion | None


class _Chunks:
    """Sends new values to the views while the rest of the share is still being worked on."""

    def __init__(self, share: Share, master: Bytes, views: Sequence[_View], version: int) -> None:
        self._share, self._master, self._views = share, master, views
        self._version = version
        self._lock = threading.Lock()
        self._ready: list[tuple[int, int]] = []
        self._bytes = 0
        self._sent: list[Transfer] = []

    def __call__(self, start: int, stop: int) -> None:
        """See `Placed`."""
        with self._lock:
            self._ready.append((start, stop))
            self._bytes += stop - start
            if self._bytes < _CHUNK_BYTES:
                return
            ready = self._take()
        self._write(ready, self._views)

    def rows(self, table: Table, rows: Rows) -> None:
        """See `Placed`."""
        if not len(rows):
            return
        base = self._share.start
        few = len(rows) <= table.capacity
        whole = [view for view in self._views if not few or view.changes is None]
        self._write([(base + table.start, base + table.stop)], whole)
        if not few:
            return
        kind = np.dtype((np.void, table.row_bytes))
        values = self._master[table.start : table.stop].view(kind)[rows].view(np.uint8)
        head = change(self._version, rows)
        for view in self._views:
            if view.changes is None:
                continue
            head_at = view.changes[table.changed : table.changed + head.nbytes]
            values_at = view.changes[table.values_at : table.values_at + values.nbytes]
            self._sent += [head_at.write(head), values_at.write(values)]

    def finish(self) -> list[Transfer]:
        """Sends the rest; all transfers."""
        self._write(self._take(), self._views)
        return self._sent

    def _take(self) -> list[tuple[int, int]]:
        ready, self._ready, self._bytes = sorted(self._ready), [], 0
        merged: list[tuple[int, int]] = []
        for start, stop in ready:
            if merged and merged[-1][1] == start:
                merged[-1] = (merged[-1][0], stop)
            else:
                merged.append((start, stop))
        return merged

    def _write(self, ranges: Sequence[tuple[int, int]], views: Sequence[_View]) -> None:
        base = self._share.start
        for view in views:
            for first, last in ranges:
                for start, stop, at in view.selection.of(first, last):
                    piece = self._master[start - base : stop - base]
                    self._sent.append(view.memory[at : at + stop - start].write(piece))
