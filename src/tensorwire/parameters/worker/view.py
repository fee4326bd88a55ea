"""Shows one worker's script the parameters; what the script writes there stays private to it."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from tensorwire.membership.worker import WorkerMember
from tensorwire.memory import PrivateMapping, Region, RemoteRegion, same_bytes

from ..layout import Layout, Selection
from ..messages import Bytes
from ..regions import RegionKind, ServerRegions, allocate_at_worker, region_name
from ..rows import Table, changed_starts, take_change
from .link import Answers


class ScriptView:
    """See `Store.value`, `Store.differs` and `Store.take_back`.

    Attributes:
        memory, place, compares: as in `Store`.

    Args:
        layout: of all tensors.
        selection: of what lies in the memory.
        shared: the memory, where new values arrive.
        private: a private mapping of the same memory, for the script.
        own: which tensors the script has; None: those of `selection`.
    """

    def __init__(
        self,
        layout: Layout,
        selection: Selection,
        shared: Bytes,
        private: PrivateMapping,
        own: Selection | None = None,
    ) -> None:
        self.memory, self.place = shared, selection.place
        self._selection, self._shared, self._mapping = selection, shared, private
        self._private, self.compares = private.array(), private.compares
        self._layout, self._own = layout, own or selection

    @cached_property
    def _places(self) -> list[tuple[int, int, int]]:
        """The places of the script's tensors in the memory, rising; seldom needed."""
        places = [
            (self._selection.place(tensor), tensor)
            for tensor, place in enumerate(self._layout.places)
            if place.start < place.end and self._own.has(place)
        ]
        return sorted((place.start, place.stop, tensor) for place, tensor in places)

    @cached_property
    def _starts(self) -> list[int]:
        return [start for start, _, _ in self._places]

    def value(self, tensor: int) -> Bytes:
        """See `Store`."""
        return self._private[self._selection.place(tensor)]

    def differs(self, tensor: int, data: Any) -> bool:
        """See `Store`."""
        return not same_bytes(data, self._shared[self._selection.place(tensor)])

    def read(self, target: Bytes) -> None:
        """Fills `target` with the present version of all that lies in the memory."""
        target[:] = self._shared

    def take_back(self, always: bool = False) -> list[int]:
        """See `Store`."""
        ranges = self._mapping.written()
        if not ranges:
            if always:
                self._mapping.revert()
            return []
        found = [tensor for start, stop in ranges for tensor in self._within(start, stop)]
        found = list(dict.fromkeys(found))
        differ = [tensor for tensor in found if self.differs(tensor, self.value(tensor))]
        self._mapping.revert()
        return sorted(differ or found)

    def _within(self, start: int, stop: int) -> list[int]:
        """Returns tensors that have bytes in [start, stop) of the memory."""
        first = max(bisect_right(self._starts, start) - 1, 0)
        places = self._places[first : bisect_left(self._starts, stop)]
        return [tensor for _, end, tensor in places if end > start]


class ViewSource:
    """The memory in which a worker on servers sees the parameters: chosen first, then opened.

    It is at the first server of the worker's host, or at a neighbour, or the worker's own.

    Attributes:
        home: that server; -1: there is none.
        owner: the rank of the worker whose view is used where there is no home.
        allocated: regions of this worker.

    Args:
        private: no other worker sees the memory.
    """

    def __init__(
        self, member: WorkerMember, store: int, layout: Layout, own: Selection, private: bool
    ) -> None:
        self._member, self._store, self._layout, self._own = member, store, layout, own
        paths = [peer.path.transport for peer in member.servers]
        self.home = paths.index("shm") if "shm" in paths and not private else -1
        alone = private or self.home >= 0
        self._neighbour = None if alone else member.colocation.neighbour()
        self.owner = member.place.rank if self._neighbour is None else self._neighbour[0]
        self._starts = changed_starts(layout.deal(len(paths)))
        sizes = {RegionKind.VIEW: own.size_bytes, RegionKind.CHANGED: self._starts[-1]}
        self.allocated = {
            kind: allocate_at_worker(member, store, kind, size)
            for kind, size in sizes.items()
            if size and self.home < 0 and self._neighbour is None
        }
        self._changes: list[tuple[Table, Bytes, Bytes]] = []

    def open(self, answers: Answers, servers: Sequence[ServerRegions]) -> ScriptView:
        """Opens the script's view, when the servers have opened the store."""
        selection = Selection(self._layout) if self.home >= 0 else self._own
        memory = self._find(answers, RegionKind.VIEW)
        view = memory.array()
        if isinstance(memory, Region):
            private = memory.private()
        else:
            private = answers.attempt(memory.peer, memory.private)
        if self.home < 0 and self._starts[-1]:
            changed = self._find(answers, RegionKind.CHANGED).array()
            for start, server in zip(self._starts, servers, strict=False):
                base = server.share.start
                for table in server.tables:
                    for begin, end, at in selection.of(base + table.start, base + table.stop):
                        assert end - begin == table.stop - table.start, "a part of a table"
                        part = view[at : at + end - begin]
                        self._changes.append((table, changed[start:], part))
        return ScriptView(self._layout, selection, view, private, self._own)

    def _find(self, answers: Answers, kind: RegionKind) -> Region | RemoteRegion:
        name = region_name(self._store, kind)
        if self.home >= 0:
            server = self._member.servers[self.home]
            return answers.attempt(server, server.region, name)
        if self._neighbour is None:
            return self.allocated[kind]
        return answers.attempt(self._neighbour[1], self._neighbour[1].region, name)

    def take_changes(self, version: int) -> None:
        """Puts a version's changes of tables into the view, where servers do not do it."""
        for table, changed, part in self._changes:
            take_change(table, version, changed, part)
