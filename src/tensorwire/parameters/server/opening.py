"""Opens a store at a server: from the workers' descriptions to regions with names."""

from __future__ import annotations

import contextlib
import json
import threading
import zlib
from collections.abc import Mapping

import numpy as np

from tensorwire.errors import ClosedError, TimeoutError, UnavailableError
from tensorwire.membership.server import ServerMember
from tensorwire.memory import Peer, Region, RemoteRegion, Word

from ..contributions import Contribution
from ..device import DeviceBytes, ShareDevice, suits_device
from ..layout import Layout, Spec
from ..messages import Bytes, Description, DisagreementError, told_description
from ..regions import RegionKind, ServerRegions, region_name
from .lending.door import ReaderDoor

_OPENING_BYTES = 16 << 20  # for what all workers describe, compressed


class Opening:
    """A store as all workers want it, and the regions of it that this server has allocated.

    Attributes:
        number: of the store.
        descriptions: of the workers, by rank.
        committers: the worker that makes each commit of a version: slice 0's pipeline, then 1's.
        mapped: the workers that have this server's memory mapped, and can produce gradients there.
        homes: the servers whose views are used.
        durable: a successor of this server could go on with it.
        mode: how the steps of workers follow each other.
        closing: set when no worker waits for the store any more.
        door: where readers come; None: there is none.
        pause: the word by which the job is paused; None: this is not server 0.
        workers_device: a device of the kind on which all workers have their models; "": none.
        device: of this server's share; None: it is in memory of the host.
    """

    device: ShareDevice | None = None

    def __init__(
        self,
        member: ServerMember,
        number: int,
        closing: threading.Event,
        door: ReaderDoor | None = None,
        pause: Word | None = None,
    ) -> None:
        self.member, self.closing, self.door = member, closing, door
        self.pause = pause
        self.number = number
        self._allocated: list[Region] = []
        workers = member.workers.items()
        self.mapped = {rank for rank, peer in workers if peer.path.transport == "shm"}
        # A worker that comes later comes by shm, or not at all.
        self.mapped |= {r for r in range(member.count) if r not in member.workers}
        self.descriptions = self._find_descriptions(number)
        self.spec = spec = agreed(self.descriptions)
        self.committers = committers_of(spec, member.count)
        shares = Layout(spec).deal(len(member.servers) + 1)
        self.regions = ServerRegions(number, shares, member.index)
        self.homes = {each.home for each in self.descriptions.values()} - {-1}
        self.mode = self.descriptions[0].mode
        devices = [each.device for _, each in sorted(self.descriptions.items())]
        alike = len({each.rpartition(" ")[0] for each in devices}) == 1
        together = alike and all(devices) and suits_device(spec)
        self.workers_device = devices[0] if together else ""
        self.durable = member.durable and self.descriptions[0].durable
        if member.durable and not self.durable:
            member.decline_successor()
        everywhere = -1 not in {each.home for each in self.descriptions.values()}
        if not self.mode.is_sync:  # where each worker has memory of its own
            everywhere = len(self.mapped) == member.count
        if self.durable and not everywhere:
            raise ValueError(
                "a worker reaches no server over shared memory, so that the memory of servers "
                "cannot outlive them: start the job with --on-death end"
            )

    def produces(self, slice_index: int) -> bool:
        """Tells whether a worker of a slice can produce its gradients in this server's memory."""
        first, pipeline = slice_index * self.spec.pipeline, self.spec.pipeline
        return not self.mapped.isdisjoint(self.committers[first : first + pipeline])

    def _is_beside(self, device: ShareDevice, slice_index: int) -> bool:
        """Tells whether a slice's worker has its model on this device and can copy to it."""
        first, pipeline = slice_index * self.spec.pipeline, self.spec.pipeline
        ranks = self.mapped.intersection(self.committers[first : first + pipeline])
        told = [self.descriptions.get(rank, self.descriptions[0]) for rank in ranks]
        return any(each.device == device.name for each in told)

    def _find_descriptions(self, number: int) -> dict[int, Description]:
        """Returns the workers' descriptions.

        A worker may be gone if a predecessor of this server has opened the store.

        Raises:
            ValueError: a worker described nothing that makes sense.
        """
        member, servers = self.member, len(self.member.servers) + 1
        if not member.durable:
            return _parsed(_read_descriptions(member, number), servers)
        name = region_name(number, RegionKind.OPENING)
        region = member.allocate(_OPENING_BYTES, name=name, access="none")
        self._allocated.append(region)
        memory = region.array()
        size = memory[:8].view(np.int64)
        if size[0] == 0:
            found = _read_descriptions(member, number)
            texts = {str(rank): text.decode() for rank, text in found.items()}
            told = zlib.compress(
                json.dumps({"texts": texts, "mapped": sorted(self.mapped)}).encode(), 1
            )
            if len(told) > _OPENING_BYTES - 8:
                raise ValueError(
                    f"the workers' descriptions of a model have {len(told)} bytes, and "
                    f"{_OPENING_BYTES - 8} fit: use fewer tensors, or start with --on-death end"
                )
            memory[8 : 8 + len(told)] = np.frombuffer(told, np.uint8)
            size[0] = len(told)
        kept = json.loads(zlib.decompress(memory[8 : 8 + int(size[0])].data))
        self.mapped = set(kept["mapped"])
        described = {int(rank): text.encode() for rank, text in kept["texts"].items()}
        return _parsed(described, servers)

    def allocate(
        self, kind: RegionKind, which: int | str | None = None, size_bytes: int | None = None
    ) -> Region:
        """Allocates a region."""
        self._allocated.append(self.regions.allocate(self.member, kind, which, size_bytes))
        return self._allocated[-1]

    def worked_on(
        self, kind: RegionKind, which: int | str | None = None, size_bytes: int | None = None
    ) -> Bytes | DeviceBytes:
        """Allocates a region that steps change, on the share's device where it has one.

        Raises:
            MemoryError: the device has not enough memory.
            UnavailableError: a predecessor left the region on another device.
        """
        size = self.regions.share.size_bytes if size_bytes is None else size_bytes
        if self.device is None:
            return self.allocate(kind, which, size_bytes).array()[:size]
        where, regions = self.device.where, self.regions
        try:
            region = regions.allocate(self.member, kind, which, size_bytes, where)
        except MemoryError as error:
            advice = (
                'DistributedOptimizer(…, parameters_on="host") keeps them in memory of the host'
            )
            raise MemoryError(
                f"no memory for parameters and optimizer state: {error}; {advice}"
            ) from error
        self._allocated.append(region)
        if region.device != (where or "cpu"):  # it is of a predecessor
            raise UnavailableError(
                f"server {regions.server}'s share of store {self.number} is on {region.device}, "
                f"where another process left it, and not on {where or 'cpu'}: start the job anew"
            )
        return self.device.over(region, size)

    def contribution(self, slice_index: int, slot: Region) -> Contribution:
        """Returns the memory for a slice's gradients; its slot is there already."""
        size, produced, pool = self.regions.share.size_bytes, None, None
        heads = np.empty(0, np.uint8)
        if self.device is not None:  # to which gradients are copied, each to its place
            if self._is_beside(self.device, slice_index):
                produced = self.worked_on(RegionKind.PRODUCED, slice_index)
        elif self.produces(slice_index):
            produced = self.worked_on(RegionKind.PRODUCED, slice_index)
            pool = self.allocate(RegionKind.POOL, slice_index).array()[:size]
        if self.regions.tables:
            heads = self.allocate(RegionKind.ROWS, slice_index).array()
        return Contribution(slot.array()[:size], produced, pool, heads)

    def region(self, kind: RegionKind) -> Region:
        """Returns a region that is allocated, here or by a predecessor."""
        name = self.regions.name(kind)
        found = [each for each in self._allocated if each.name == name]
        return found[0] if found else self.allocate(kind)

    def allocated(self, kind: RegionKind) -> dict[str, Region]:
        """Returns the regions of a kind that are allocated here, by the ends of their names."""
        name = self.regions.name(kind)
        found = [each for each in self._allocated if each.name.startswith(name)]
        return {each.name.removeprefix(name).removeprefix("/"): each for each in found}

    def look_up(self, peer: Peer, kind: RegionKind) -> RemoteRegion:
        """Waits for a region that another server is about to allocate; ClosedError at the end."""
        while not self.closing.is_set():
            with contextlib.suppress(TimeoutError):
                return self.member.persist(peer, peer.wait_region, self.regions.name(kind), 0.25)
        raise ClosedError("the job is over")

    def free(self) -> None:
        """Frees all regions; memory is given back when the last array over it is gone."""
        for region in self._allocated:
            self.member.free(region)
        self._allocated.clear()


def _read_descriptions(member: ServerMember, number: int) -> dict[int, bytes]:
    name = region_name(number, RegionKind.SPEC)
    return {
        rank: member.persist(peer, _read_all, peer, name)
        for rank, peer in sorted(member.workers.items())
    }


def _read_all(peer: Peer, name: str) -> bytes:
    region = peer.region(name)
    data = np.empty(region.size_bytes, np.uint8)
    region.read(data).wait()
    return data.tobytes()


def _parsed(texts: Mapping[int, bytes], servers: int) -> dict[int, Description]:
    """Returns each worker's description of a store; ValueError names a worker without one."""
    found: dict[int, Description] = {}
    known: dict[str, Spec] = {}
    for rank, text in texts.items():
        try:
            found[rank] = told_description(text, servers, found.get(0), known)
        except ValueError as error:
            raise ValueError(
                f"the model and optimizer that worker {rank} describes cannot be used: {error}"
            ) from None
    return found


def agreed(descriptions: Mapping[int, Description]) -> Spec:
    """Returns the Spec that all workers describe.

    Raises:
        DisagreementError: two workers describe different stores.
        ValueError: a worker cannot share the view that it names.
    """
    spec = descriptions[0].spec
    for rank, mine in descriptions.items():
        names = {"here": "in worker 0", "there": f"in worker {rank}"}
        if different := spec.difference(mine.spec, **names):
            raise DisagreementError(
                f"worker {rank}'s model or optimizer is not worker 0's: {different}"
            )
    for rank, mine in descriptions.items():
        if mine.durable != descriptions[0].durable:
            raise DisagreementError(
                f"worker {rank} and worker 0 call tw.init() with different durable=: give all "
                "workers the same"
            )
        if mine.mode != descriptions[0].mode:
            raise DisagreementError(
                f"worker {rank} calls tw.init({mine.mode}), and worker 0 tw.init("
                f"{descriptions[0].mode}): give all workers the same mode"
            )
        owner = descriptions.get(mine.view)
        if mine.view != rank and (
            owner is None
            or (mine.home, owner.home, owner.view) != (-1, -1, mine.view)
            or mine.wants != owner.wants
        ):
            raise ValueError(
                f"worker {rank} cannot share the memory of worker {mine.view}: that has none for "
                "others, or has other tensors in it"
            )
    return spec


def committers_of(spec: Spec, workers: int) -> list[int]:
    """Returns which worker makes each commit of a version; ValueError if they do not divide."""
    pipeline = spec.pipeline
    if workers % pipeline or spec.slices % (workers // pipeline):
        raise ValueError(
            f"{spec.slices} slices cannot be dealt equally to {workers} workers in pipelines of "
            f"{pipeline}: choose a multiple"
        )
    each = spec.slices * pipeline // workers
    return [i // each * pipeline + stage for i in range(spec.slices) for stage in range(pipeline)]
