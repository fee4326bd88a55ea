"""Parameter server: serves the shards of a job's stores to workers that read and write memory.

The main thread opens stores, watches the members and, when something fails, tells every worker why;
a thread per store makes its versions. docs/internals/parameters.md has the regions and words.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

from tensorwire.errors import PeerLostError, TensorwireError, TimeoutError
from tensorwire.failpoints import failpoint
from tensorwire.membership.collective import CollectiveServer
from tensorwire.membership.identity import FAREWELL, GOODBYE, called, was_never_there
from tensorwire.membership.server import ServerMember
from tensorwire.memory import Word, cores

from ..collector import uncollected
from ..hold import PAUSE, PAUSE_BYTES
from ..journal import Journal
from ..kernel import Kernel
from ..layout import Share
from ..messages import (
    Bytes,
    DisagreementError,
)
from ..regions import RegionKind, region_name
from .lending.door import ReaderDoor
from .opening import Opening
from .paced.own_pace import OwnPace
from .stepping.gather import Calls
from .stepping.publish import Results, await_others, say_through
from .stepping.versions import Versions

_JOIN_S = 10.0
_MOST_STORES = 1 << 20  # of a job whose servers may be replaced; a byte each


def most_threads() -> int:
    """Returns how many threads a server uses for its arithmetic unless it is told otherwise."""
    return max(1, min(4, int(cores())))


class Server:
    """A server of a job, which serves stores until all workers have left.

    Args:
        member: this server, gathered.
        make_kernel: makes the arithmetic for a Spec's optimizer; ValueError if it cannot.
        threads: for each store's arithmetic.
        collective: on server 0, to know which workers wait there.
        door: where readers come; None: there is none.

    Attributes:
        pause: the word by which the job is paused, at server 0; else None.
    """

    def __init__(
        self,
        member: ServerMember,
        make_kernel: Callable[[str], Kernel],
        threads: int = 1,
        collective: CollectiveServer | None = None,
        door: ReaderDoor | None = None,
    ) -> None:
        self.door = door
        self.member, self.make_kernel, self.threads = member, make_kernel, threads
        self.calls = Calls(member, collective)
        self.pause: Word | None = None
        if member.index == 0:
            self.pause = member.allocate(PAUSE_BYTES, name=PAUSE, access="rw").word(0)
        self._collective = collective
        self._stores: list[StoreServer] = []
        self._made = 0  # stores, those that are gone included
        self._failure: BaseException | None = None
        self._released: Bytes | None = None  # of each store, whether it is; outlives this process
        if member.durable:
            region = member.allocate(_MOST_STORES, name="released stores", access="none")
            self._released = region.array()

    def run(self) -> None:
        """Returns when every worker said goodbye; raises if the job failed, and told them why."""
        try:
            for number in count():
                if self.was_released(number):
                    self.member.forget(f"{number}/")
                    self._made = number + 1
                    continue
                if not self._wait_for(number + 1):
                    return
                store = StoreServer(self, number)
                self._made = number + 1
                self._stores = [*(each for each in self._stores if not each.gone), store]
                store.thread.start()
        except BaseException as error:
            failure = self._failure or error
            self.member.give_up()
            self.member.await_ends(2.0)
            self._tell(failure)
            raise failure from None
        finally:
            for store in self._stores:
                store.closing.set()

    def join(self) -> None:
        """Waits until its threads have ended, which they do when the Node is closed."""
        # A thread that computes while the interpreter ends can abort the process.
        deadline = time.monotonic() + _JOIN_S
        for store in self._stores:
            if store.thread.ident is not None:
                store.thread.join(max(0.0, deadline - time.monotonic()))
        if self._collective:
            self._collective.join(max(0.0, deadline - time.monotonic()))

    def fail(self, error: BaseException) -> None:
        """Notes an error that ends the job, from a store's or the collective's thread."""
        if isinstance(error, PeerLostError):
            # A transfer or a word knows less of a member than the member's own record.
            try:
                self.member.check()
            except PeerLostError as named:
                error = named
        self._failure = self._failure or error

    def was_released(self, number: int) -> bool:
        """Tells whether this server or its predecessor has announced that a store is freed."""
        return self._released is not None and bool(self._released[number])

    def _was_opened(self, number: int) -> bool:
        return self.member.is_left(region_name(number, RegionKind.OPENING))

    def released(self, number: int) -> None:
        """Notes that a store is released, before its thread frees its memory."""
        if self._released is not None:
            self._released[number] = 1

    def _watch(self) -> None:
        """Raises an error of a thread, or PeerLostError for a lost member: the job is over."""
        if self._failure:
            raise self._failure
        self.member.check()
        self._check_returned()

    def _check_returned(self) -> None:
        if returned := self.member.returned():
            before, after = returned
            self._failure = self._failure or PeerLostError(
                f"{called(before)} was lost: it came back as another process, "
                f"{called(after)}, and nobody can join a job that runs"
            )
            before.close()  # nothing waits for it any more
            raise self._failure

    def _wait_for(self, value: int) -> bool:
        """Waits until all workers want `value` stores; False when all have left instead."""
        while True:
            self._watch()
            if not self._was_opened(value - 1):  # else there are stores that it has to restore yet
                self.member.tell_readers(list(self._described()))
                if self.door is not None:
                    self.door.tell(lambda: list(self._described()))
            if self.member.all_left():
                return False
            # A place that was without a worker from the beginning wants no store.
            found = {rank: word.value for rank, word in enumerate(self.member.words)}
            words = {rank: word for rank, word in found.items() if not was_never_there(word)}
            if all(value <= word < GOODBYE for word in words.values()):
                return True
            # Opened by a predecessor of this server, when no worker had left or was killed.
            if self._was_opened(value - 1) and all(value <= word for word in words.values()):
                return True
            wants = next((r for r, w in words.items() if value <= w < GOODBYE), None)
            left = next((rank for rank, word in words.items() if word >= GOODBYE), None)
            if wants is not None and left is not None and found[left] not in (GOODBYE, FAREWELL):
                raise DisagreementError(
                    f"worker {left} was killed, drained or added since the job began, so that no "
                    "optimizer can be made or get other groups any more: make all of them before "
                    "job.epochs, or run the job without --on-death takeover"
                )
            if wants is not None and left is not None:
                raise DisagreementError(f"worker {left} has left while others make an optimizer")
            rank = next((rank for rank, word in words.items() if word < value), -1)
            if rank < 0:  # all have come or go, and some are there
                time.sleep(0.1)
                continue
            late = self.member.words[rank]
            try:
                late.wait_until(value, 0.25)
            except TimeoutError:
                waiting = self.calls.is_summing(rank)
                if wants is not None and waiting and late.value < value:
                    raise DisagreementError(
                        f"worker {rank} calls mean(), sum(), barrier() or load() while worker "
                        f"{wants} makes an optimizer or changes its parameter groups"
                    ) from None

    def _described(self) -> Iterator[dict[str, Any]]:
        """Yields the open stores, as `tensorwire status` shows them."""
        for store in self._stores:
            if store.share is not None and not store.closing.is_set():
                spec, share, versions = store.share.layout.spec, store.share, store.versions
                yield {
                    "number": store.number,
                    "optimizer": spec.optimizer,
                    "tensors": len(spec.tensors),
                    "bytes": share.size_bytes,
                    "version": store.version,
                    **({} if versions is None else versions.described()),
                }

    def _tell(self, error: BaseException) -> None:
        text = str(error) or type(error).__name__
        if isinstance(error, SystemExit):
            text = "the server was told to end (SIGTERM)"
        text = f"{text} (told by server {self.member.index})"
        if self._collective:
            self._collective.tell(text)
        for store in self._stores:
            store.results.poison(text)
        # Workers may wait for a store that not all of them wanted yet.
        Results(self.member, self._made).poison(text)


class StoreServer:
    """One store at this server, from before it is open until it is freed, and its thread.

    Attributes:
        number: of the store, from 0.
        share: of this server; None until the store is open.
        version: the last that was made.
        results: sends messages to the workers.
        closing: set when no worker waits for the store any more.
        versions: as they are made; None before it is open, and when no more are.
    """

    def __init__(self, server: Server, number: int) -> None:
        self.number = number
        self.share: Share | None = None  # until it is open
        self.version = 1
        self._server = server
        self.results = Results(server.member, number)
        self.closing = threading.Event()
        name = f"tensorwire-store-{number}"
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.versions: Versions | None = None

    @property
    def gone(self) -> bool:
        """True when the store's thread has ended, after its workers have released or left it."""
        return self.closing.is_set() and not self.thread.is_alive()

    def _run(self) -> None:
        server = self._server
        try:
            try:
                opening = self._open()
                while self.versions is not None and not self.versions.over:
                    self.versions.advance(self.version + 1)
                    self.version += 1
            finally:
                if self.versions is not None:
                    self.versions.close()
                self.versions = None  # what it has is given back when the regions are freed
            self._end(opening)
        except BaseException as error:
            if self.closing.is_set() or server.member.all_left():
                return
            if not isinstance(error, TensorwireError | ValueError):
                traceback.print_exc()
            server.fail(error)

    def _open(self) -> Opening:
        """Opens the store, which its workers have described."""
        server = self._server
        with uncollected():
            opening = Opening(server.member, self.number, self.closing, server.door, server.pause)
        last = _last_published(opening)
        failpoint("opening.described")
        if last is None:
            make = Versions if opening.mode.is_sync else OwnPace
            with uncollected():
                self.versions = make(
                    opening, server.make_kernel, server.threads, server.calls, self.results,
                    server.fail,
                )  # fmt: skip
            failpoint("opening.ready")
        if self.versions is not None and self.versions.is_new:
            self.versions.note_opened()
            failpoint("opening.noted")
        if self.versions is not None:
            self.versions.lend()
            self.version = self.versions.present
            self.share = opening.regions.share
            self.versions.tell_opened()
        elif last is not None:  # the last version was made by a predecessor
            self.version = last[0]
            if opening.mode.is_sync:  # else all were told before it was noted
                self.results.tell_again(*last)
        failpoint("opening.told")
        return opening

    def _end(self, opening: Opening) -> None:
        """Frees the store, whose last version was made."""
        member = self._server.member
        if opening.durable:
            say_through(opening, self.version)
            failpoint("store.through")
            await_others(opening, self.version)
            failpoint("store.awaited")
        self.results.close()
        self._server.released(self.number)
        failpoint("store.released")
        self.closing.set()
        opening.free()
        member.forget(f"{self.number}/")  # what only a predecessor has used
        failpoint("store.freed")


def _last_published(opening: Opening) -> tuple[int, Bytes] | None:
    """Returns the last version of a store that a predecessor has made, and its result."""
    if not opening.durable:
        return None
    share, scalars = opening.regions.share, len(opening.spec.scalars)
    size = Journal.size_bytes(share, scalars)
    memory = opening.allocate(RegionKind.JOURNAL, None, size).array()
    return Journal.last(share, scalars, memory)
