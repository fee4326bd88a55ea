"""Gives a worker a store that servers keep; a `Link` has the part of one server."""
# ruff: noqa: D102 - the methods are described in Store

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tensorwire.durability.history import NoteKind
from tensorwire.failpoints import failpoint
from tensorwire.membership.worker import WorkerMember
from tensorwire.memory import Region, RemoteRegion

from ..device import DeviceBytes, ModelDevice
from ..hold import WRITTEN_AT
from ..kernel import Rows
from ..layout import Extent, Layout, Selection, Spec
from ..messages import POOLED, PUSHED, RELEASE, Bytes, Commit, Description, Result
from ..modes import SYNC, Mode
from ..regions import RegionKind, ServerRegions, allocate_at_worker, result_block
from ..rows import Gradient, take_meant
from .interface import Part, Place
from .link import Answers, Link, commit_again
from .owed import OwedSlices, OwnSlices
from .snapshot import Asker, Snapshot
from .view import ViewSource


class RemoteStore:
    """See `Store`. Opened by all workers in the same order.

    Raises:
        RuntimeError: the servers refuse; the message names the worker that differs.
        PeerLostError: a server is gone.
    """

    def __init__(
        self,
        member: WorkerMember,
        number: int,
        spec: Spec,
        part: Part | None = None,
        mode: Mode = SYNC,
        device: ModelDevice | None = None,
    ) -> None:
        self._device = device
        self._member, self._number = member, number
        self._history = member.history
        self.layout = layout = Layout(spec)
        self.own = Selection(layout, None if part is None else part.wants)
        self._sends = range(len(spec.tensors)) if part is None else frozenset(part.sends)
        self._sent = Selection(layout, None if part is None else part.sends)
        servers, place = member.servers, member.place
        self.path = "+".join(sorted({peer.path.transport for peer in servers}))
        self.asynchronous, self.version, self.notes_bytes = self.path != "shm", 1, 0
        self._source = source = ViewSource(member, number, layout, self.own, not mode.is_sync)
        self._regions = list(source.allocated.values())
        result = self._allocate(RegionKind.RESULT, result_block(len(servers)).start)
        wants = None if part is None else part.wants
        name = "" if device is None else device.name
        text = Description(
            source.home, source.owner, wants, spec, place.durable, mode, name
        ).to_json()
        self._allocate(RegionKind.SPEC, len(text)).array()[:] = np.frombuffer(text, np.uint8)
        self._answers = Answers(member, result)
        member.tell(number + 1)
        takeovers, own = member.takeovers, tuple(place.my_slices)
        self._owed = OwnSlices(own) if takeovers is None else OwedSlices(takeovers)
        if not self._owed.joins:  # else it was, long since
            self._answers.wait_opened()

        shares = layout.deal(len(servers))
        regions = [ServerRegions(number, shares, server) for server in range(len(servers))]
        commits = {i: i * place.pipeline + place.stage for i in place.my_slices}
        self._links = [
            self._answers.attempt(peer, Link, peer, there, commits, self._sends, self._answers)
            for peer, there in zip(servers, regions, strict=True)
        ]
        self._asker = Asker(member, number, layout, self._links, self._answers)
        if self._history is not None and self._history.succeeds:
            self._asker.free_all()
        self._slices = tuple(commits)
        self._gradients: dict[int, dict[int, Gradient]] = {}
        seen = source.open(self._answers, regions)
        self.value, self.differs, self.take_back = seen.value, seen.differs, seen.take_back
        self.memory, self.place = seen.memory, seen.place
        self.reason, self.compares, self._seen = self._answers.reason, seen.compares, seen

    def _allocate(self, kind: RegionKind, size_bytes: int, which: int | None = None) -> Region:
        region = allocate_at_worker(self._member, self._number, kind, size_bytes, which)
        self._regions.append(region)
        return region

    @property
    def bytes_pushed(self) -> int:
        return sum(link.bytes_sent for link in self._links)

    def places(self, slice_index: int) -> Sequence[Place | str]:
        own, nothing = np.empty(0, np.uint8), np.empty(0, np.uint8)
        produced: dict[Link, tuple[Bytes, Bytes]] = {}
        on_device: dict[Link, DeviceBytes] = {}
        for link in self._links:
            if not link.mapped:
                continue
            region, pool = (
                link.find(kind, slice_index) for kind in (RegionKind.PRODUCED, RegionKind.POOL)
            )
            if region is not None and pool is not None:
                produced[link] = region.array(), pool.array()
            elif region is not None and self._is_here(region):
                on_device[link] = region.tensor()
        if len(produced) + len(on_device) < len(self._links):
            # Registered once, and the same pages in every step.
            own = self._allocate(RegionKind.SENT, self._sent.size_bytes, slice_index).array()

        def place_of(tensor: int, place: Extent) -> Place | str:
            owners = [link for link in self._links if link.has(place)]
            if tensor not in self._sends:
                return "another process sends it"
            if not owners:
                return "it has no elements"
            if on_device.keys() >= set(owners):
                pieces = [on_device[link][link.part(place)] for link in owners]
                return Place(nothing, True, None, owners[0].regions.server, pieces)
            if produced.keys().isdisjoint(owners):
                return Place(own[self._sent.place(tensor)], False)
            if len(owners) > 1:
                return "it is cut between servers"
            part, server = owners[0].part(place), owners[0].regions.server
            slot, pool = produced[owners[0]]
            return Place(slot[part], True, pool[part], server)

        return [place_of(tensor, place) for tensor, place in enumerate(self.layout.places)]

    def _is_here(self, region: RemoteRegion) -> bool:
        """Tells whether a server's memory is on the device of this worker's model."""
        return region.mapped and self._device is not None and region.device == self._device.here

    def on_device(self) -> Sequence[tuple[range, DeviceBytes]]:
        if self._device is None or self._source.home < 0:
            return ()
        shares = [(link.share, link.find(RegionKind.ON_DEVICE)) for link in self._links]
        return [
            (range(share.start, share.stop), region.tensor())
            for share, region in shares
            if region is not None and self._is_here(region)
        ]

    def is_committed(self, slice_index: int) -> bool:
        return self._committed(slice_index) is not None

    def _committed(self, slice_index: int) -> bytes | None:
        """Returns a predecessor's note of the next commit of a slice, if this process has one."""
        if self._history is None or not self._history.succeeds:
            return None
        return self._history.was_committed(self._number, self.version + 1, slice_index)

    def take_or_note(
        self, kind: NoteKind, slice_index: int, data: bytes
    ) -> tuple[bool, bytes | None]:
        assert self._history is not None
        self.settle()
        return self._history.take_or_note(kind, data, self._number, self.version + 1, slice_index)

    def lies_ahead(self, kind: NoteKind, slice_index: int | None = None) -> bool:
        if self._history is None or not self._history.succeeds:
            return False
        version = None if slice_index is None else self.version + 1
        return self._history.lies_ahead(kind, self._number, version, slice_index)

    def read_gradient(self, slice_index: int, tensor: int, how: int, block: int) -> Bytes:
        places, place = self.layout.places, self.layout.places[tensor]
        kind, at = RegionKind.SLOT if how == PUSHED else RegionKind.PRODUCED, place.start
        if how == POOLED:
            at = places[block // 2].start
            kind = RegionKind.PRODUCED if block % 2 else RegionKind.POOL
        data = np.empty(place.end - place.start, np.uint8)
        for link in self._links:
            start = max(place.start, link.share.start)
            stop = min(place.end, link.share.stop)
            if start < stop:
                begin = start + at - place.start - link.share.start
                there = link.region(kind, slice_index)[begin : begin + stop - start]
                link.read(there, data[start - place.start : stop - place.start])
        return data

    def _is_elsewhere(self, slice_index: int) -> bool:
        """Tells whether a predecessor has brought the slice's gradients to the servers."""
        if self._history is None or not self._history.succeeds:
            return False
        return self.lies_ahead(NoteKind.GRADIENTS, slice_index) or self.is_committed(slice_index)

    def push(self, slice_index: int, tensor: int, data: Any) -> int:
        if self._is_elsewhere(slice_index):
            return 0
        copied = 0
        for link in self._links:
            copied += link.push(slice_index, tensor, data)
        return copied

    def push_rows(self, slice_index: int, tensor: int, rows: Rows, values: Bytes) -> int:
        if self._is_elsewhere(slice_index):
            return 0
        self._gradients.setdefault(slice_index, {})[tensor] = rows, values
        return sum(link.rows_copied(tensor, rows) for link in self._links)

    def settle(self) -> None:
        for link in self._links:
            link.flush()
        for link in self._links:
            link.settle()

    def commit(self, slice_index: int, commit: Commit) -> None:
        """See `Store`. Over a network the commit overtakes gradients that are under way."""
        history, number = self._history, self._number
        if (noted := self._committed(slice_index)) is not None:
            assert history is not None
            history.take(NoteKind.COMMIT, number, commit.version, slice_index)
            former = self._noted_commit(noted)
            asks = [(each.operation, each.flags, each.weight) for each in (commit, former)]
            if asks[0] != asks[1]:
                raise history.different()
            commit_again(self._links, slice_index, former)
            return
        data = commit.to_bytes()
        own = self._gradients.setdefault(slice_index, {})
        gradients = take_meant(own, commit)
        for link in self._links:
            link.send_rest(slice_index, gradients)
        failpoint("gradients.sent")
        if history is not None and self._owed.are_noted:
            text = data.tobytes() + np.array(commit.blocks, np.uint32).tobytes()
            history.note(NoteKind.COMMIT, text, number, commit.version, slice_index)
            failpoint("commit.noted")
        self._links[0].commit(slice_index, commit, data)
        failpoint("commit.begun")
        for link in self._links[1:]:
            link.commit(slice_index, commit, data)
        failpoint("commit.sent")

    def _noted_commit(self, noted: bytes) -> Commit:
        spec = self.layout.spec
        shape = spec.groups, len(spec.hyper), len(spec.tensors)
        data = np.frombuffer(noted, np.uint8)
        commit = Commit.from_bytes(data, *shape)
        blocks = data[Commit.size_bytes(*shape) :].view(np.uint32).tolist()
        return replace(commit, blocks=blocks)

    def missing(self) -> Sequence[int]:
        return self._owed.missing(self._links, self.version + 1)

    def due(self, again: Callable[[int], None] | None = None) -> Sequence[int]:
        return self._owed.due(self._links, self.version + 1, self._answers, again)

    def written(self) -> Bytes:
        found = np.empty(len(self.layout.spec.tensors), np.uint8)
        link = self._links[0]
        link.read(link.region(RegionKind.HOLD)[WRITTEN_AT : WRITTEN_AT + len(found)], found)
        return found

    def last_commit(self, slice_index: int) -> Commit:
        return self._links[0].read_commit(slice_index)

    def go_on(self, version: int) -> None:
        self.version = version
        noted = {index: self._committed(index) for index in self._slices}
        if committed := {index: each for index, each in noted.items() if each is not None}:
            for index, each in committed.items():
                commit_again(self._links, index, self._noted_commit(each))
            failpoint("commit.repeated")
            if len(committed) == len(self._slices):
                self._answers.wait_reached(self.version + 1)
            failpoint("version.reached")

    def wait(self) -> Result:
        self.version += 1
        history, key = self._history, (NoteKind.VERSION, self._number, self.version)
        if history is not None and (noted := history.take(*key)) is not None:
            return Result.from_bytes(np.frombuffer(noted, np.uint8))
        result = self._answers.wait(self.version)
        self.notes_bytes = result.notes_bytes
        self.settle()
        self._source.take_changes(self.version)
        failpoint("result.come")
        if history is not None:
            history.note(NoteKind.VERSION, result.to_bytes().tobytes(), *key[1:])
            failpoint("result.noted")
        return result

    def read_reduced(self, target: Bytes) -> None:
        for link in self._links:
            durable = self._member.place.durable
            slot = link.region(RegionKind.KEPT) if durable else link.region(RegionKind.SLOT, 0)
            base = link.share.start
            for start, stop, at in self.own.of(base, link.share.stop):
                link.read(slot[start - base : stop - base], target[at : at + stop - start])

    def push_reduced(self, tensor: int, data: Any) -> int:
        """See `Store`. Servers whose memory outlives them read it in KEPT, others in slot 0."""
        if not self._member.place.durable:
            return self.push(0, tensor, data)
        if self.is_committed(0):
            return 0
        place = self.layout.places[tensor]
        for link in self._links:
            if link.has(place):
                start, stop = link.share.clip(place.start, place.end)
                base, part = link.share.start, data[start - place.start : stop - place.start]
                link.write(link.region(RegionKind.KEPT)[start - base : stop - base], part)
        return len(data)

    def read_values(self, target: Bytes) -> None:
        """See `Store`. A view at a server has all values; without one each server has its share."""
        if self._source.home >= 0:
            self._seen.read(target)
            return
        for link in self._links:
            if (region := link.find(RegionKind.VIEW)) is not None:
                link.read(region[: target.nbytes], target)
                return
        self._move(RegionKind.MASTER, None, target)

    def read_state(self, name: str, target: Bytes) -> None:
        self._move(RegionKind.STATE, name, target)

    def write_state(self, name: str, source: Bytes) -> None:
        self._move(RegionKind.STATE, name, source, write=True)

    def _move(self, kind: RegionKind, which: str | None, whole: Bytes, write: bool = False) -> None:
        """Reads a region of every server into its part of the whole store, or writes it there."""
        if write and self._is_behind:
            return
        for link in self._links:
            if size := link.share.size_bytes:
                part = whole[link.share.start : link.share.stop]
                (link.write if write else link.read)(link.region(kind, which)[:size], part)

    def snapshot(self) -> Snapshot:
        return self._asker.make(self.version)

    def still(self) -> AbstractContextManager[None]:
        return nullcontext()

    def counts(self, averaged: bool = False) -> NDArray[np.int64]:
        total = np.zeros(len(self.layout.places), np.int64)
        kind = RegionKind.AVERAGED if averaged else RegionKind.COUNTS
        for link in self._links:
            part = np.zeros_like(total)
            link.read(link.region(kind)[: part.nbytes], part)
            np.maximum(total, part, out=total)
        return total

    def set_counts(self, counts: NDArray[np.int64], averaged: bool = False) -> None:
        kind = RegionKind.AVERAGED if averaged else RegionKind.COUNTS
        for link in self._links if not self._is_behind else ():
            link.write(link.region(kind)[: counts.nbytes], counts)

    def scalars(self) -> NDArray[np.float64]:
        spec, places = self.layout.spec, self.layout.places
        total = np.zeros((len(spec.tensors), len(spec.scalars)))
        part = np.zeros_like(total)
        for link in self._links if total.size else ():
            link.read(link.region(RegionKind.SCALARS)[: part.nbytes], part)
            # All servers of a cut tensor know the same.
            here = [tensor for tensor, place in enumerate(places) if link.has(place)]
            total[here] = part[here]
        return total

    def set_scalars(self, scalars: NDArray[np.float64]) -> None:
        for link in self._links if scalars.size and not self._is_behind else ():
            link.write(link.region(RegionKind.SCALARS)[: scalars.nbytes], scalars)

    def release(self) -> None:
        def commit(index: int) -> None:
            self.commit(index, Commit.empty(self.version + 1, RELEASE, self.layout.spec))

        for index in self.missing():
            commit(index)
        self.due(commit)
        self.wait()
        self.close()

    @property
    def _is_behind(self) -> bool:
        return self._history is not None and self._history.is_behind

    def close(self) -> None:
        for region in self._regions:
            self._member.memory.free(region)
