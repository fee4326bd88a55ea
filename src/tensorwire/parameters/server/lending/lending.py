"""Lends readers a server's memory of a store as it is, and copies of whole versions.

Readers look at a word before and after they read: it is odd while values are changed. A copy is
made between two versions, by the door's thread while the store waits for commits, or else by the
store's thread before it changes what shall be copied; it lies in memory of the door. Nothing here
waits for a reader. docs/internals/files.md has the tables.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from tensorwire.errors import ClosedError, TensorwireError, UnavailableError
from tensorwire.memory import Node, Region
from tensorwire.memory.lent import LentRegion

from ...messages import Bytes
from ...model_file import held_bytes, model_file
from ...reading import (
    FIRST_VERSION,
    HELD_WORD_AT,
    MOST_LENT,
    Ask,
    Copied,
    ReadPlace,
    StoreFacts,
    facts_name,
    lent_name,
    version_name,
    word_of,
)
from ...regions import AVERAGE, ServerRegions
from ...shard_memory import ShardMemory
from ...snapshot import Parts, Reply, RequestOutcome
from .budget import CopyBudget
from .sealed import SealedMemory
from .spare import KEEP_S, SpareMemory, whole_pages

_MOST_AHEAD = 1 << 16  # versions that somebody may wait for

Arrays = Mapping[str, Bytes]


@dataclass
class Copy:
    """A version that is copied, or is to be, and the readers that want or hold it.

    Attributes:
        version, whole: of it; see `Ask`.
        holders: the readers that have asked for it, as `Lending` was told.
        regions: of the copy, the model's last; empty until it is made.
        told: the answer to them; None until it is made, or where it cannot be.
    """

    version: int
    whole: bool
    holders: set[object] = field(default_factory=set)
    regions: list[SealedMemory] = field(default_factory=list)
    told: Reply | None = None


class Lending:
    """A store at the door of a server. Used by one thread of the store and the door's thread.

    Args:
        node: of the door.
        store: number of the store.
        regions: of the store at this server.
        memory: that is read and copied.
        arrays: the arrays of a whole snapshot besides values, by the names of its parts.
        lent: the regions that can be read as they are, by the names of their contents.
        places: the places in them, or at another server's door; empty: nothing is read as it is.
        ring: wakes the door's thread.
        budget: of the server, for copies.
        threads: that copy.

    Raises:
        ValueError: a name is taken at the door, by a peer of it.
        ClosedError, BusyError, MemoryError: the door was closed, or has no place for it.
    """

    def __init__(
        self,
        node: Node,
        store: int,
        regions: ServerRegions,
        memory: ShardMemory,
        arrays: Callable[[], Arrays],
        lent: Mapping[str, Region],
        places: Mapping[str, ReadPlace],
        ring: Callable[[], None],
        budget: CopyBudget,
        threads: int = 1,
    ) -> None:
        self._threads, self._budget = threads, budget
        self._node, self.store, self._share = node, store, regions.share
        self._first = regions.server == 0
        self._memory, self._make_arrays, self._ring = memory, arrays, ring
        self._lock = threading.Lock()  # either a copy is made, or values begin to change
        self._present, self._changing, self._closed = 0, True, False
        self._copies: list[Copy] = []
        self._numbers = 0
        self._asked_at, self._often = -KEEP_S, False  # the last two requests came soon
        self._spare: SpareMemory | None = None
        states = (*memory.states, *(() if memory.average is None else (AVERAGE,)))
        with contextlib.ExitStack() as stack:  # what fails leaves nothing at the door
            word = node.allocate(64, name=version_name(store), access="r")
            stack.callback(word.free)
            self._word, self._held = word.word(0), word.word(HELD_WORD_AT)
            try:
                for name, region in lent.items():
                    stack.callback(lend_region(node, lent_name(store, name), region).free)
            except UnavailableError:  # memory of a job without shm cannot be seen by another Node
                places = {}
            spec = regions.share.layout.spec.to_json().decode()
            server, servers = regions.server, regions.servers
            facts = StoreFacts(store, server, servers, spec, states, dict(places)).to_json()
            told = node.allocate(8 + len(facts), name=facts_name(store), access="r")
            stack.callback(told.free)
            told.array()[8:] = bytearray(facts)
            told.array()[:8].view("int64")[0] = len(facts)
            self._stack = stack.pop_all()

    # ---- the store's thread

    def open(self, version: int, settled: bool) -> None:
        """Opens a version in place; not `settled`: a predecessor may have overwritten a part."""
        with self._lock:
            self._present, self._changing = version, not settled
            self._show(word_of(version, not settled))
        self._ring()

    def begin(self, version: int) -> None:
        """Makes the pending snapshots before the values change to those of a version."""
        with self._lock:
            for copy in self._due():
                self._make(copy)
            self._changing = True
            self._show(word_of(version - 1, changing=True))

    def done(self, version: int) -> None:
        """Notes that the values are the version's."""
        with self._lock:
            self._present, self._changing = version, False
            self._show(word_of(version))
            waits = any(each.told is None for each in self._copies)
        if waits:
            self._ring()

    def show_held(self, word: int) -> None:
        """Shows readers whether the store stands still; see `held_word`."""
        with contextlib.suppress(ClosedError):
            self._held.set(word)

    def close(self) -> None:
        """Stops reading and copying, and takes back all lent memory."""
        self._closed = True
        with self._lock:
            for copy in self._copies:
                self._discard(copy)
            self._copies.clear()
            self._close_spare()
            self._stack.close()

    # ---- the door's thread

    def ask(self, holder: object, ask: Ask) -> Reply | None:
        """Holds a snapshot for a reader.

        Returns:
            The answer; None if the version is not there yet, or the budget is spent: ask again.
        """
        copy = self._find(ask)
        if copy is None:
            if ask.version > self._present + _MOST_AHEAD:
                text = f"it is more than {_MOST_AHEAD} versions ahead of {self._present}"
                return Reply(RequestOutcome.REFUSED, text)
            if len(self._copies) >= MOST_LENT:
                held = ", ".join(f"version {each.version}" for each in self._copies)
                text = f"the job holds {MOST_LENT} snapshots for readers, the most: {held}"
                return Reply(RequestOutcome.BUSY, text)
            if self._budget.opens_in_s():
                return None
            if ask.version < self._next():
                return Reply(RequestOutcome.PASSED, str(self._next()))
            copy = Copy(ask.version, ask.whole)
            with self._lock:
                if self._closed:
                    return Reply(RequestOutcome.REFUSED, "the job is over")
                self._copies.append(copy)
            now = time.monotonic()
            self._often, self._asked_at = now - self._asked_at < KEEP_S, now
        copy.holders.add(holder)
        with self._lock:
            if copy in self._due():
                self._make(copy)
            if copy.told is None and copy.version < self._next():
                # The store began the next version before it knew of the copy.
                copy.told = Reply(RequestOutcome.PASSED, str(self._next()))
        if copy.told is not None and copy.told.outcome != RequestOutcome.DONE:
            self.release(holder, ask)  # it has no memory
        return copy.told

    def release(self, holder: object, ask: Ask | None = None) -> list[SealedMemory]:
        """Ends a reader's hold on a snapshot; `ask` None: on all of them.

        Returns:
            Memory that no reader holds any more. The caller frees it, which takes long.
        """
        unheld: list[SealedMemory] = []
        for copy in list(self._copies):
            if ask is None or (copy.version, copy.whole) == (ask.version, ask.whole):
                copy.holders.discard(holder)
                if not copy.holders:
                    with self._lock:
                        if copy not in self._copies:
                            continue  # it was closed meanwhile
                        self._copies.remove(copy)
                        if copy.regions and self._often:
                            self._make_spare(copy.regions[-1].size_bytes)
                    unheld += copy.regions
                    copy.regions.clear()
        return unheld

    def idle(self) -> None:
        """Frees the memory kept for the next snapshot, as no reader is connected."""
        with self._lock:
            self._asked_at, self._often = -KEEP_S, False
            self._close_spare()

    def held(self) -> list[tuple[int, bool]]:
        """Returns the version of each snapshot that is made, and whether it has the state too."""
        return sorted((each.version, each.whole) for each in self._copies if each.regions)

    def _next(self) -> int:
        """Returns the first version that can be copied from now on."""
        return max(self._present + self._changing, FIRST_VERSION)

    def _find(self, ask: Ask) -> Copy | None:
        """Returns the snapshot, if another reader has asked for it already."""
        for copy in list(self._copies):
            if (copy.version, copy.whole) == (ask.version, ask.whole):
                return copy
        return None

    # ---- locked

    def _due(self) -> Iterator[Copy]:
        """Returns the copies that can be made now, and not later."""
        if self._changing or self._closed:
            return iter(())
        waiting = [c for c in self._copies if c.told is None and c.version == self._present]
        return iter(waiting)

    def _show(self, word: int) -> None:
        with contextlib.suppress(ClosedError):  # the door was closed, and the job goes on
            self._word.set(word)

    def _make(self, copy: Copy) -> None:
        self._numbers += 1
        name = lent_name(self.store, f"snapshot/{copy.version}.{self._numbers}")
        began = time.monotonic()
        try:
            state = self._copy_state(copy, f"{name}/state") if copy.whole else ""
            self._copy_model(copy, f"{name}/model")
            told = Copied(f"{name}/model", state, os.getpid(), copy.regions[-1].descriptor)
            copy.told = Reply(RequestOutcome.DONE, told.to_text())
        except ClosedError:
            self._discard(copy)
            copy.told = Reply(RequestOutcome.REFUSED, "the job is over")
        except Exception as error:  # a reader's wish must not end the job
            self._discard(copy)
            copy.told = Reply(RequestOutcome.NO_MEMORY, f"a snapshot cannot be made: {error}")
        finally:
            self._budget.spend(time.monotonic() - began)

    def _copy_model(self, copy: Copy, name: str) -> None:
        file = model_file(self._share.layout, self.store, copy.version)
        size = max(held_bytes(file.held(self._share, self._first)), 1)
        pieces = file.pieces(self._memory.master, self._share, self._first)
        spare = self._take_spare(size)
        copy.regions.append(
            SealedMemory(self._node, name, size, pieces, self._threads, self._check, spare)
        )

    def _copy_state(self, copy: Copy, name: str) -> str:
        arrays = self._make_arrays()
        parts = Parts.of(copy.version, arrays)
        head = np.zeros(Parts.head_bytes(), np.uint8)
        parts.write_head(head)
        pieces = [(0, head), *((parts.place(part).start, each) for part, each in arrays.items())]
        size = parts.size_bytes
        copy.regions.append(
            SealedMemory(self._node, name, size, pieces, self._threads, self._check)
        )
        return name

    def _make_spare(self, size_bytes: int) -> None:
        """Makes memory for the next snapshot in a thread, while the job computes."""
        self._close_spare()
        if not self._closed:
            with contextlib.suppress(TensorwireError, MemoryError):  # a snapshot finds out
                self._spare = SpareMemory(size_bytes, self._budget.spend)

    def _take_spare(self, size_bytes: int) -> int | None:
        spare, self._spare = self._spare, None
        if spare is None:
            return None
        if spare.size_bytes == whole_pages(size_bytes):
            return spare.take()
        spare.close()
        return None

    def _close_spare(self) -> None:
        spare, self._spare = self._spare, None
        if spare is not None:
            spare.close()

    def _check(self) -> None:
        if self._closed:
            raise ClosedError("the store is freed")

    def _discard(self, copy: Copy) -> None:
        for region in copy.regions:
            region.free()
        copy.regions.clear()


def lend_region(node: Node, name: str, region: Region) -> LentRegion:
    """Lets the door's peers read a region of the server; raises UnavailableError without shm."""
    descriptor = region.descriptor()
    try:
        # One for reading alone, so that readers cannot map it for writing.
        reading = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.close(descriptor)
    try:
        return node.lend(reading, name=name, size_bytes=region.size_bytes)
    finally:
        os.close(reading)
