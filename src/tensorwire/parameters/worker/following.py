"""Runs a worker without a script: it follows worker 0 and gives gradients where wanted.

It joins calls of all workers, and opens the stores that worker 0 opens. For its slice it commits
what worker 0 commits for slice 0, with the same hyper-parameters. All that it has to know lies in
memory of the servers, where a process that replaces it finds it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from tensorwire.errors import PeerLostError, UnavailableError
from tensorwire.membership.collective import FollowingCollective
from tensorwire.membership.identity import CONTROL, CONTROL_BYTES, GOODBYE, lost
from tensorwire.membership.worker import WorkerMember
from tensorwire.memory import Peer, Region

from ..kernel import AVERAGE_ONLY
from ..layout import Layout, Spec
from ..messages import (
    APPLY,
    PUSHED,
    REDUCE,
    REDUCED,
    RELEASE,
    Commit,
    follower_text,
)
from ..reading import FIRST_VERSION
from ..regions import RegionKind, ServerRegions, allocate_at_worker, region_name, result_block
from .link import Answers, Link


class FollowedStore:
    """A store that worker 0 has opened too. One thread.

    Attributes:
        number: of the store.
        layout: where its tensors lie.
        version: the one in place.

    Args:
        member: this worker.
        number: as above.
        find_spec: what the workers have declared, once the store is open.

    Raises:
        ValueError: gradients of this store cannot come from files; the message says why.
        RuntimeError, PeerLostError: the job is over.
    """

    def __init__(self, member: WorkerMember, number: int, find_spec: Callable[[int], Spec]) -> None:
        self.number, self._member = number, member
        servers, rank = member.servers, member.place.rank
        result = allocate_at_worker(
            member, number, RegionKind.RESULT, result_block(len(servers)).start
        )
        text = follower_text(0, rank)
        told = allocate_at_worker(member, number, RegionKind.SPEC, len(text))
        told.array()[:] = np.frombuffer(text, np.uint8)
        self._regions: list[Region] = [result, told]
        self._answers = Answers(member, result)
        member.tell(number + 1)
        self._answers.wait_opened()
        spec = find_spec(number)
        _check(spec, member.place.workers)
        self.layout = Layout(spec)
        shares = self.layout.deal(len(servers))
        self._slice = rank
        self._links = [
            self._answers.attempt(
                peer,
                Link,
                peer,
                ServerRegions(number, shares, server),
                {rank: rank},
                range(len(spec.tensors)),
                self._answers,
            )
            for server, peer in enumerate(servers)
        ]
        self.version = self._answers.last

    def check(self) -> None:
        """Raises RuntimeError if the job is over, PeerLostError if a lost server stays lost."""
        if self._answers.is_over:
            self._answers.wait_reached(self.version + 1)
        for peer in self._member.servers:
            self._answers.attempt(peer, _check_there, peer)

    @property
    def is_committed(self) -> bool:
        """True if this worker has committed the next version at all servers."""
        return all(link.committed(self._slice) > self.version for link in self._links)

    @property
    def is_settled(self) -> bool:
        """True if the next step begins with the parameters of the version in place.

        After a reduction they are as before, and the step that follows uses its gradients.
        """
        if self.version < FIRST_VERSION or self.is_committed:
            return False
        return self._links[0].read_commit(self._slice).operation != REDUCE

    def asked(self) -> Commit | None:
        """Returns worker 0's commit for the next version; None: nothing yet."""
        if self._links[0].committed(0) <= self.version:
            return None
        return self._links[0].read_commit(0)

    def wants(self, commit: Commit) -> bool:
        """Tells whether a commit of worker 0 needs gradients of this one."""
        return commit.operation in (APPLY, REDUCE) and not commit.flags & REDUCED

    def answer(
        self,
        asked: Commit,
        gradients: Mapping[int, Any] | None = None,
        samples: float | None = None,
    ) -> None:
        """Commits the same as worker 0.

        Args:
            asked: by worker 0.
            gradients: bytes of tensors, by their indices, if they are wanted.
            samples: for how many they stand; None: for as many as those of worker 0.
        """
        weight, present = asked.weight, bytearray(len(self.layout.places))
        for tensor, data in (gradients or {}).items():
            if self.layout.spec.tensors[tensor].size_bytes:
                for link in self._links:
                    link.push(self._slice, tensor, data)
            present[tensor] = PUSHED
        if gradients is not None:
            weight = asked.weight if samples is None else samples
        elif asked.flags & REDUCED:
            mine = self._links[0].read_commit(self._slice)  # by which they were reduced
            present, weight = bytearray(mine.present), mine.weight
        made = replace(asked, weight=weight, present=bytes(present), blocks=())
        for link in self._links:
            link.send_rest(self._slice, {})
        data = made.to_bytes()
        for link in self._links:
            if link.committed(self._slice) < made.version:
                link.commit(self._slice, made, data)

    def advance(self) -> bool:
        """Takes the next version, if it is in place at all servers; tells whether it is."""
        if not self._answers.is_reached(self.version + 1, 0.0):
            return False
        self._answers.wait(self.version + 1)
        self.version += 1
        if (history := self._member.history) is not None:
            history.mark({"version": self.version}, passing=False)  # that it gets further is seen
        return True

    def close(self) -> None:
        """Frees the regions, after the servers have freed the store."""
        for region in self._regions:
            self._member.memory.free(region)


def _check(spec: Spec, workers: int) -> None:
    """Raises ValueError if a worker without a script cannot be part of it."""
    if spec.pipeline != 1:
        raise ValueError("a file worker has a whole model, and this one is split: leave out split")
    if spec.optimizer == AVERAGE_ONLY:
        raise ValueError(
            "worker 0 applies this optimizer, and beside file workers the servers have to: "
            'DistributedOptimizer(apply="servers") tells why they do not'
        )
    if spec.slices != workers:
        raise ValueError(
            f"a file worker computes one slice of a step, and {spec.slices} slices are dealt to "
            f"{workers} workers: leave out tw.init(slices=…)"
        )
    for tensor in spec.tensors:
        if tensor.kind == "rows":
            raise ValueError(
                f"{tensor} is a table with sparse gradients, which no file has: use sparse=False "
                "in jobs with file workers"
            )
        if tensor.kind == "average" and "float" in tensor.dtype:
            raise ValueError(
                f"{tensor} is a buffer that is averaged over all workers, and a file worker has "
                'none: use DistributedOptimizer(buffers="broadcast") or "local"'
            )


def _check_there(peer: Peer) -> None:
    if peer.lost:
        raise PeerLostError(peer.lost_reason)


class ScriptlessWorker:
    """A worker without a script, which follows worker 0 through a job. One thread.

    Attributes:
        stores: those that are open, by number.

    Args:
        member: this worker, which has joined the job.
        find_spec: what the workers have declared for a store that is open.

    Raises:
        UnavailableError: a server's memory is not mapped here.
    """

    def __init__(self, member: WorkerMember, find_spec: Callable[[int], Spec]) -> None:
        for peer in member.servers:
            if peer.path.transport != "shm":
                raise UnavailableError(
                    f"worker {member.place.rank} takes gradients from files and reaches "
                    f"{peer.name!r} at {peer.address} by {peer.path.transport}: the servers have "
                    "to be on its host, with shm among the transports"
                )
        self._member, self._find_spec = member, find_spec
        self._collective = FollowingCollective(member)
        first = member.servers[0]
        self._words = member.persist(first, first.region, CONTROL).array()
        self._opened = self._control(member.place.rank)  # by a predecessor of this process
        self.stores: dict[int, FollowedStore] = {}
        for number in range(self._opened):
            if member.memory.is_left(region_name(number, RegionKind.RESULT)):
                self.stores[number] = FollowedStore(member, number, find_spec)

    def _control(self, rank: int) -> int:
        at = CONTROL_BYTES * rank
        return int(self._words[at : at + 8].view(np.uint64)[0])

    @property
    def is_over(self) -> bool:
        """True if worker 0 has left."""
        return self._control(0) >= GOODBYE

    def turn(self) -> bool:
        """Does the work that needs no gradients; tells whether there was any.

        Raises:
            RuntimeError: the job is over; the message says why and names the failed process.
            PeerLostError: a server is gone.
            ValueError: the job does what cannot be done with gradients from files.
        """
        done = self._collective.follow()
        if self._opened < self._control(0) < GOODBYE:
            store = FollowedStore(self._member, self._opened, self._find_spec)
            self.stores[store.number] = store
            self._opened += 1
            done = True
        for store in list(self.stores.values()):
            done = self._follow(store) or done
        if not done and not self.stores:
            for peer in self._member.servers:
                if peer.lost and not self._member.recover(peer) and not self.is_over:
                    raise lost(peer)
        return done

    def _follow(self, store: FollowedStore) -> bool:
        if store.is_committed:
            asked = store.asked()
            if not store.advance():
                return False
            if asked is not None and asked.operation == RELEASE:
                store.close()
                del self.stores[store.number]
            return True
        asked = store.asked()
        if asked is None:
            if not self.is_over:
                store.check()
            return False
        if store.wants(asked):
            return False
        store.answer(asked)
        return True
