"""A worker's side of a store: push gradients, commit, wait for the next version.

`RemoteStore` writes into servers' memory; `LocalStore` has the shard in this process, for a worker
that is alone. Both have the same methods and the same bits.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from tensorwire.errors import PeerLostError, TensorwireError, consequence
from tensorwire.membership import WorkerMember, called, why_lost
from tensorwire.memory import (
    Peer,
    Region,
    RemoteRegion,
    Transfer,
    local_memory,
    wait_all,
)

from ..kernel import Kernel, Rows
from ..layout import Layout, Selection, Spec
from ..messages import (
    APPLY,
    POISON,
    POOLED,
    REDUCE,
    RELEASE,
    RESULT_BYTES,
    WORD_BYTES,
    Bytes,
    Commit,
    Result,
)
from ..rows import (
    Gradient,
    Table,
    changed_starts,
    heads_bytes,
    part_of,
    rows_here,
    tables_of,
    take_change,
)
from ..shard import Memory, Shard
from .outbox import Outbox, remote_part
from .view import View

_BUCKET_BYTES = 512 << 10

T = TypeVar("T")


class Place(NamedTuple):
    """Memory for one gradient, of exactly its bytes.

    Attributes:
        memory: writable.
        shared: it is the server's: a gradient there is not pushed, its commit says PRODUCED. Else
            it is registered memory of this process, from which pushes leave without a copy.
        block: the same place in the pool, where memory is shared. In both any gradient of the same
            size and server may lie: its commit says POOLED, and where.
        server: whose it is.
    """

    memory: Bytes
    shared: bool
    block: Bytes | None = None
    server: int = -1


class Part(NamedTuple):
    """What a worker of a pipeline has of the tensors of a store, by their indices.

    Attributes:
        wants: it has these, and gets their values.
        sends: it says what becomes of these: their gradients and first values come from it. Every
            tensor belongs to one worker of each pipeline.
    """

    wants: Sequence[int]
    sends: Sequence[int]


class Store(Protocol):
    """What a worker uses. One thread at a time, but `push` may be called by another.

    Attributes:
        layout: where tensors lie.
        own: the tensors that this worker has, as `read_reduced` gives them.
        path: how the servers are reached ("shm", "tcp", "shm+tcp", "local").
        compares: the kernel does not tell what was written by way of `value`; see `take_back`.
        asynchronous: pushes go on while the caller computes; where memory is shared, the caller
            copies itself.
    """

    layout: Layout
    own: Selection
    path: str
    compares: bool
    asynchronous: bool

    @property
    def bytes_pushed(self) -> int:
        """Bytes of gradients and buffers that were written, since the start.

        What was produced in place is not among them.
        """

    def value(self, tensor: int) -> Bytes:
        """A tensor that this worker has, in place; only PUBLISH and APPLY change it.

        What the caller writes there is seen by nobody else, and found by `take_back`.
        """

    def differs(self, tensor: int, data: Any) -> bool:
        """Bytes are not those of the tensor in the present version."""

    def take_back(self, always: bool = False) -> list[int]:
        """Takes back what was written by way of `value`, and tells to which tensors.

        It looks at pages. A tensor that shares a page with one that was written to is told only if
        its bytes differ, or if nobody's do. Where the kernel does not tell what was written
        (`PrivateMapping.compares`), a call looks at a 32nd, and only what differs is found.

        Args:
            always: take everything back also if nothing is found.
        """

    def places(self, slice_index: int) -> Sequence[Place | str]:
        """Where each tensor's gradient is best produced, or the reason why there is no such place.

        For this process to write between two versions.
        """

    def push(self, slice_index: int, tensor: int, data: Any) -> int:
        """Starts to send one tensor's bytes (without padding) into a slice's slot.

        `data` is one contiguous piece of memory; it is kept alive and must not change before
        `settle`.

        Returns:
            How many of the bytes this process copies in memory itself.
        """

    def push_rows(self, slice_index: int, tensor: int, rows: Rows, values: Bytes) -> int:
        """Starts to send a gradient of a tensor of kind "rows"; a commit that names it means this.

        Args:
            slice_index: of the slice.
            tensor: its index.
            rows: rising, each once.
            values: of these rows, one behind the other. Both as `data` of `push`.

        Returns:
            As `push`.
        """

    def settle(self) -> None:
        """Waits until every push is in place: sources may change."""

    def commit(self, slice_index: int, commit: Commit) -> None:
        """All that was pushed for a slice is valid; every slice commits every version once."""

    def wait(self) -> Result:
        """The version that the commits asked for."""

    def read_reduced(self, target: Bytes) -> None:
        """After REDUCE: fills `target` with the reduced gradient of `own`."""

    def read_values(self, target: Bytes) -> None:
        """Fills `target` (whole store) with all parameters; between versions."""

    def read_state(self, name: str, target: Bytes) -> None:
        """Fills `target` (whole store) with a state; between versions."""

    def write_state(self, name: str, source: Bytes) -> None:
        """Overwrites a state; between versions, by one worker."""

    def counts(self) -> NDArray[np.int64]:
        """Steps that were applied to each tensor."""

    def set_counts(self, counts: NDArray[np.int64]) -> None:
        """Overwrites them; between versions, by one worker."""

    def reason(self) -> str:
        """Why the job has failed, as a server told it; "" if none did."""

    def release(self) -> None:
        """The servers free it too; all workers call it."""

    def close(self) -> None:
        """Lets go; idempotent."""


class LocalStore:
    """See `Store`. Its memory is private to this process."""

    path = "local"
    asynchronous = False

    def __init__(self, spec: Spec, apply: Kernel) -> None:
        self.layout = Layout(spec)
        self.own = Selection(self.layout)
        size = self.layout.size_bytes
        self._view, private = local_memory(size)
        self._seen = View(self.layout, self.own, self._view, private)
        self.compares = private.compares
        self._slots = [_zeros(size) for _ in range(spec.slices)]
        self._produced = [_zeros(size) for _ in range(spec.slices)]
        self._pools = [_zeros(size) for _ in range(spec.slices)]
        self._states = {name: _zeros(size) for name in apply.states}
        self._counts = np.zeros(len(spec.tensors), np.int64)
        (share,) = self.layout.deal(1)
        self._tables = tables_of(share)
        self._gradients: list[dict[int, Gradient]] = [{} for _ in range(spec.slices)]
        self._heads = [_zeros(heads_bytes(share)) for _ in range(spec.slices)]
        end = share.stop
        memory = Memory(
            self._view[:end],
            [slot[:end] for slot in self._slots],
            [slot[:end] for slot in self._produced],
            [pool[:end] for pool in self._pools],
            {name: state[:end] for name, state in self._states.items()},
            self._counts,
            self._heads,
        )
        self._shard = Shard(share, apply, memory)
        self._commits: dict[int, Commit] = {}
        self._version = 1
        self.bytes_pushed = 0

    def value(self, tensor: int) -> Bytes:
        """See `Store`."""
        return self._seen.value(tensor)

    def differs(self, tensor: int, data: Any) -> bool:
        """See `Store`."""
        return self._seen.differs(tensor, data)

    def take_back(self, always: bool = False) -> list[int]:
        """See `Store`."""
        return self._seen.take_back(always)

    def places(self, slice_index: int) -> Sequence[Place | str]:
        """See `Store`."""
        slot, pool = self._produced[slice_index], self._pools[slice_index]
        parts = [slice(place.start, place.end) for place in self.layout.places]
        return [Place(slot[part], True, pool[part], 0) for part in parts]

    def slot(self, slice_index: int) -> Bytes:
        """A slice's gradients in place: writing here is a push."""
        return self._slots[slice_index]

    def push(self, slice_index: int, tensor: int, data: Any) -> int:
        """See `Store`."""
        place = self.layout.places[tensor]
        self._slots[slice_index][place.start : place.end] = data
        return place.end - place.start

    def push_rows(self, slice_index: int, tensor: int, rows: Rows, values: Bytes) -> int:
        """See `Store`."""
        self._gradients[slice_index][tensor] = rows, values
        return rows.nbytes + values.nbytes

    def settle(self) -> None:
        """See `Store`."""

    def commit(self, slice_index: int, commit: Commit) -> None:
        """See `Store`."""
        gradients = _present(self._gradients[slice_index], commit)
        heads, slot = self._heads[slice_index], self._slots[slice_index]
        for table in self._tables:
            if gradients.keys().isdisjoint(table.tensors):
                continue
            head, values = part_of(table, gradients)
            heads[table.head : table.head + head.nbytes].view(np.int64)[:] = head
            at = table.start
            for each in values:
                slot[at : at + each.nbytes] = each
                at += each.nbytes
        self._commits[slice_index] = commit

    def wait(self) -> Result:
        """See `Store`."""
        commits = [self._commits[i] for i in range(len(self._slots))]
        self._commits.clear()
        for each in commits[1:]:
            if different := commits[0].difference(each):
                raise ValueError(f"the slices of one step disagree: {different}")
        self._version += 1
        finite, norm = self._shard.advance(commits, lambda sums: sums.tolist())
        return Result(self._version, finite, norm)

    def read_reduced(self, target: Bytes) -> None:
        """See `Store`."""
        target[:] = self._slots[0]

    def read_values(self, target: Bytes) -> None:
        """See `Store`."""
        target[:] = self._view

    def read_state(self, name: str, target: Bytes) -> None:
        """See `Store`."""
        target[:] = self._states[name]

    def write_state(self, name: str, source: Bytes) -> None:
        """See `Store`."""
        self._states[name][:] = source

    def counts(self) -> NDArray[np.int64]:
        """See `Store`."""
        return self._counts.copy()

    def set_counts(self, counts: NDArray[np.int64]) -> None:
        """See `Store`."""
        self._counts[:] = counts

    def reason(self) -> str:
        """See `Store`."""
        return ""

    def release(self) -> None:
        """See `Store`."""
        self.close()

    def close(self) -> None:
        """See `Store`."""
        self._shard.close()


class _Target(NamedTuple):
    """Mapped memory of one server that holds a tensor, or a piece of its bytes."""

    server: int
    region: RemoteRegion
    piece: slice | None


class RemoteStore:
    """See `Store`. Opened by all workers in the same order.

    Raises:
        RuntimeError: the servers refused; the message says which worker differs.
        PeerLostError: a server is gone.
    """

    def __init__(
        self, member: WorkerMember, number: int, spec: Spec, part: Part | None = None
    ) -> None:
        self._member = member
        self._number = number
        self.layout = layout = Layout(spec)
        self.own = Selection(layout, None if part is None else part.wants)
        self._sends = range(len(spec.tensors)) if part is None else frozenset(part.sends)
        self._sent = Selection(layout, None if part is None else part.sends)
        servers = member.servers
        self._shares = layout.deal(len(servers))
        self._bytes_copied = 0
        self.path = "+".join(sorted({peer.path.transport for peer in servers}))
        self.asynchronous = self.path != "shm"
        node = member.node
        home = next((i for i, peer in enumerate(servers) if peer.path.transport == "shm"), -1)
        self._result = node.allocate(
            RESULT_BYTES * len(servers), name=self._name("result"), access="w"
        )
        # Without a view at a server there is one on this host, the neighbour's or our own.
        neighbour = member.neighbour() if home < 0 else None
        own_view = None
        if home < 0 and neighbour is None:
            own_view = node.allocate(
                self.own.size_bytes, name=self._name("view"), access="rw", mappable=True
            )
        self._tables = [tables_of(share) for share in self._shares]
        self._changed: NDArray[np.uint8] | None = None
        self._changed_at = starts = changed_starts(self._shares)
        changes = None
        if own_view is not None and starts[-1]:
            changes = node.allocate(starts[-1], name=self._name("changed"), access="rw")
            self._changed = changes.array()
        wants = None if part is None else list(part.wants)
        view = member.place.rank if neighbour is None else neighbour[0]
        about = {"home": home, "view": view, "wants": wants, "spec": spec.to_json().decode()}
        text = json.dumps(about).encode()
        self._spec = node.allocate(len(text), name=self._name("spec"), access="r")
        self._spec.array()[:] = np.frombuffer(text, np.uint8)
        self._regions = [self._result, self._spec, *filter(None, [own_view, changes])]
        blocks = [
            self._result[RESULT_BYTES * i : RESULT_BYTES * (i + 1)] for i in range(len(servers))
        ]
        self._words = [block.word(0) for block in blocks]
        self._texts = [block.array()[WORD_BYTES:] for block in blocks]
        self._version = 1
        member.tell(number + 1)
        self._wait_results(1)

        self._outboxes = {
            i: [self._make_outbox(i, s) for s in range(len(servers))] for i in self._mine()
        }
        self._row_memory = {
            (i, s): (self._heads(i, s), servers[s].region(self._name(f"slot/{i}")))
            for i in self._mine()
            for s in range(len(servers))
            if self._tables[s]
        }
        self._targets = {i: self._find_targets(i) for i in self._mine()}
        commits = {
            i: [peer.region(self._name(f"commit/{self._commit_of(i)}")) for peer in servers]
            for i in self._mine()
        }
        self._commits = {
            i: [(region.word(0), region[WORD_BYTES:]) for region in regions]
            for i, regions in commits.items()
        }
        count = len(spec.tensors)
        self._blocks = {
            i: [
                peer.region(self._name(f"blocks/{i}")).array("uint32")[:count]
                for peer in servers
                if _mapped(peer)
            ]
            for i in self._mine()
        }
        viewed: Region | RemoteRegion
        self._viewed = Selection(layout) if home >= 0 else self.own
        if home >= 0:
            viewed = servers[home].region(self._name("view"))
        elif neighbour is None:
            assert own_view is not None
            viewed = own_view
        else:
            viewed = self._of(neighbour[1], "view")
            if starts[-1]:
                self._changed = self._of(neighbour[1], "changed").array()
        # What arrives from servers; the script's tensors are in a private mapping of it.
        self._view = viewed.array()
        if isinstance(viewed, Region):
            private = viewed.private()
        else:
            private = self._do(viewed.peer, viewed.private)
        self._seen = View(layout, self._viewed, self._view, private, self.own)
        self.compares = private.compares
        self._at_server = home >= 0
        self._viewed_tables = [
            list(self._view_tables(server)) for server in range(len(servers)) if starts[-1]
        ]
        self._gradients: dict[int, dict[int, Gradient]] = {i: {} for i in self._mine()}
        self._pending: list[tuple[int, int, Any]] = []
        self._pending_bytes = 0
        self._transfers: list[list[Transfer]] = [[] for _ in servers]
        self._sources: list[Any] = []

    def _name(self, what: str) -> str:
        return f"{self._number}/{what}"

    def _of(self, neighbour: Peer, what: str) -> RemoteRegion:
        return self._do(neighbour, neighbour.region, self._name(what))

    def _mine(self) -> range:
        return self._member.place.my_slices

    def _commit_of(self, slice_index: int) -> int:
        """Which of all commits is this worker's for a slice."""
        place = self._member.place
        return slice_index * place.pipeline + place.stage

    @property
    def bytes_pushed(self) -> int:
        """See `Store`."""
        return self._bytes_copied + sum(each.bytes_sent for each in self._all_outboxes())

    def _all_outboxes(self) -> Iterator[Outbox]:
        for outboxes in self._outboxes.values():
            yield from filter(None, outboxes)

    def _make_outbox(self, slice_index: int, server: int) -> Outbox | None:
        """None where the server's memory is mapped: a copy is there at once."""
        peer = self._member.servers[server]
        if _mapped(peer):
            return None
        slot = peer.region(self._name(f"slot/{slice_index}"))
        words = peer.region(self._name(f"arrived/{self._commit_of(slice_index)}"))
        heads = self._heads(slice_index, server)
        return Outbox(peer, self._shares[server], slot, words, heads, self._sends)

    def _heads(self, slice_index: int, server: int) -> RemoteRegion | None:
        """Where this slice's row numbers go; None where the server has no rows of tables."""
        if not self._tables[server]:
            return None
        return self._member.servers[server].region(self._name(f"rows/{slice_index}"))

    def _view_tables(self, server: int) -> Iterator[tuple[Table, Bytes]]:
        """A server's tables that are wanted here, and where they are seen."""
        base = self._shares[server].start
        for table in self._tables[server]:
            for start, stop, at in self._viewed.of(base + table.start, base + table.stop):
                assert stop - start == table.stop - table.start, "a part of a table is wanted"
                yield table, self._view[at : at + stop - start]

    def _find_targets(self, slice_index: int) -> list[list[_Target]]:
        """For every tensor: where its bytes are copied to."""
        slots = [peer.region(self._name(f"slot/{slice_index}")) for peer in self._member.servers]
        found = []
        for place in self.layout.places:
            targets = []
            for server, share in enumerate(self._shares):
                start, stop = share.clip(place.start, place.end)
                if start < stop and self._outboxes[slice_index][server] is None:
                    region = slots[server][start - share.start : stop - share.start]
                    part = (start, stop) != (place.start, place.end)
                    piece = slice(start - place.start, stop - place.start) if part else None
                    targets.append(_Target(server, region, piece))
            found.append(targets)
        return found

    def value(self, tensor: int) -> Bytes:
        """See `Store`."""
        return self._seen.value(tensor)

    def differs(self, tensor: int, data: Any) -> bool:
        """See `Store`."""
        return self._seen.differs(tensor, data)

    def take_back(self, always: bool = False) -> list[int]:
        """See `Store`."""
        return self._seen.take_back(always)

    def places(self, slice_index: int) -> Sequence[Place | str]:
        """See `Store`."""
        slots: list[Bytes | None] = []
        pools: list[Bytes | None] = []
        for peer in self._member.servers:
            for kind, found in ("produced", slots), ("pool", pools):
                region = peer.region(self._name(f"{kind}/{slice_index}")) if _mapped(peer) else None
                found.append(None if region is None else region.array())
        own: Bytes | None = None
        if any(slot is None for slot in slots):
            # Registered once, and the same pages in every step.
            sent = self._member.node.allocate(
                self._sent.size_bytes, name=self._name(f"sent/{slice_index}"), access="none"
            )
            self._regions.append(sent)
            own = sent.array()
        result: list[Place | str] = []
        for tensor, place in enumerate(self.layout.places):
            owners = [
                server
                for server, share in enumerate(self._shares)
                if max(share.start, place.start) < min(share.stop, place.end)
            ]
            if tensor not in self._sends:
                result.append("another process sends it")
            elif not owners:
                result.append("it has no elements")
            elif all(slots[server] is None for server in owners):
                assert own is not None
                result.append(Place(own[self._sent.place(tensor)], False))
            elif len(owners) > 1:
                result.append("it is cut between servers")
            else:
                owner = owners[0]
                slot, pool, start = slots[owner], pools[owner], self._shares[owner].start
                assert slot is not None
                assert pool is not None
                part = slice(place.start - start, place.end - start)
                result.append(Place(slot[part], True, pool[part], owner))
        return result

    def push(self, slice_index: int, tensor: int, data: Any) -> int:
        """See `Store`."""
        for server, outbox in enumerate(self._outboxes[slice_index]):
            if outbox is not None:
                self._do(self._member.servers[server], outbox.push, tensor, data)
        targets = self._targets[slice_index][tensor]
        if not targets:
            return 0
        self._pending.append((slice_index, tensor, data))
        place = self.layout.places[tensor]
        self._pending_bytes += place.end - place.start
        if self._pending_bytes >= _BUCKET_BYTES:
            self._copy()
        return sum(region.size_bytes for _, region, _ in targets)

    def push_rows(self, slice_index: int, tensor: int, rows: Rows, values: Bytes) -> int:
        """See `Store`."""
        self._gradients[slice_index][tensor] = rows, values
        copied = 0
        for server, tables in enumerate(self._tables):
            if self._outboxes[slice_index][server] is None:
                for table in tables:
                    for member in table.members:
                        if member.tensor == tensor:
                            begin, end = rows_here(member, rows)
                            copied += (end - begin) * (rows.itemsize + table.row_bytes)
        return copied

    def _send_rows(self, slice_index: int, commit: Commit) -> None:
        """The gradients of tables that this commit means, to all servers."""
        gradients = _present(self._gradients[slice_index], commit)
        for server, tables in enumerate(self._tables):
            peer, outbox = self._member.servers[server], self._outboxes[slice_index][server]
            pieces: list[tuple[Any, RemoteRegion]] = []
            for table in tables:
                if gradients.keys().isdisjoint(table.tensors):
                    continue
                if outbox is not None:
                    self._do(peer, outbox.push_rows, table, gradients)
                    continue
                heads, slot = self._row_memory[slice_index, server]
                pieces += remote_part(table, gradients, heads, slot)
            if pieces:
                locals_, regions = zip(*pieces, strict=True)
                self._transfers[server].append(self._do(peer, peer.write, locals_, regions))
                self._bytes_copied += sum(each.nbytes for each in locals_)

    def _copy(self) -> None:
        """Into servers' mapped memory what is pending."""
        pending, self._pending = self._pending, []
        self._pending_bytes = 0
        batches: list[tuple[list[Any], list[RemoteRegion]]] = [([], []) for _ in self._shares]
        for slice_index, tensor, data in pending:
            for server, region, piece in self._targets[slice_index][tensor]:
                locals_, remotes = batches[server]
                locals_.append(data if piece is None else memoryview(data).cast("B")[piece])
                remotes.append(region)
                self._bytes_copied += region.size_bytes
        for server, (locals_, remotes) in enumerate(batches):
            if locals_:
                peer = self._member.servers[server]
                self._transfers[server].append(self._do(peer, peer.write, locals_, remotes))

    def _flush(self, slice_index: int) -> None:
        for server, outbox in enumerate(self._outboxes[slice_index]):
            if outbox is not None:
                self._do(self._member.servers[server], outbox.flush)

    def settle(self) -> None:
        """See `Store`."""
        if self._pending:
            self._copy()
        for slice_index, outboxes in self._outboxes.items():
            self._flush(slice_index)
            for server, outbox in enumerate(outboxes):
                if outbox is not None:
                    self._transfers[server] += outbox.transfers
                    outbox.transfers.clear()
        for server, transfers in enumerate(self._transfers):
            self._finish(server, transfers)
        self._transfers = [[] for _ in self._shares]

    def _finish(self, server: int, transfers: Sequence[Transfer]) -> None:
        try:
            wait_all(transfers)
        except TensorwireError as error:
            raise self._explain(self._member.servers[server], error) from error

    def commit(self, slice_index: int, commit: Commit) -> None:
        """See `Store`. Over a network it goes ahead of what is still under way."""
        self._send_rows(slice_index, commit)
        if self._pending:
            self._copy()
        self._flush(slice_index)
        if commit.blocks:
            for blocks in self._blocks[slice_index]:
                pooled = np.flatnonzero(np.frombuffer(commit.present, np.uint8) == POOLED)
                blocks[pooled] = np.array(commit.blocks, np.uint32)[pooled]
        data = commit.to_bytes()
        for server, peer in enumerate(self._member.servers):
            word, region = self._commits[slice_index][server]
            transfers = self._transfers[server]
            outbox = self._outboxes[slice_index][server]
            if outbox is not None:
                announced = np.concatenate([data, outbox.stamps()])
                signal = word, commit.version
                write = partial(region.write, signal=signal)
                transfers.append(self._do(peer, write, announced))
                continue
            transfers.append(self._do(peer, region.write, data))
            done = self._do(peer, peer.signal, word, commit.version, transfers)
            self._transfers[server] = [*transfers, done]

    def _do(self, peer: Peer, action: Callable[..., T], *arguments: Any) -> T:
        try:
            return action(*arguments)
        except TensorwireError as error:
            raise self._explain(peer, error) from error

    def wait(self) -> Result:
        """See `Store`.

        Raises:
            RuntimeError: the job is over; the message says why and names who failed.
            PeerLostError: a server is gone.
        """
        self._version += 1
        result = self._wait_results(self._version)
        self.settle()
        self._take_changes(result.version)
        return result

    def _take_changes(self, version: int) -> None:
        """Where parameters are not seen mapped, what the servers changed of tables."""
        if self._changed is None:
            return
        for tables, start in zip(self._viewed_tables, self._changed_at, strict=False):
            for table, view in tables:
                take_change(table, version, self._changed[start:], view)

    def _wait_results(self, version: int) -> Result:
        results = []
        for index, peer in enumerate(self._member.servers):
            try:
                self._words[index].wait_until(version, peer=peer)
            except TensorwireError as error:
                raise self._explain(peer, error) from error
            result = Result.from_bytes(self._texts[index])
            if result.failed or result.version != version:
                raise consequence(result.message or "the job is over; its servers have ended")
            results.append(result)
        slowest = max(results, key=lambda each: each.work_s)
        return Result(
            version,
            all(each.finite for each in results),
            results[0].norm,
            results[0].wait_s,
            slowest.work_s,
        )

    def _explain(self, peer: Peer, error: TensorwireError) -> Exception:
        """What a server said before it was lost is worth more than that it was lost."""
        if reason := self.reason():
            return consequence(reason)
        if isinstance(error, PeerLostError):
            return PeerLostError(f"{called(peer)} was lost: {why_lost(peer) or error}")
        return error

    def reason(self) -> str:
        """See `Store`."""
        for word, text in zip(self._words, self._texts, strict=True):
            if word.value >= POISON:
                return Result.from_bytes(text).message
        return ""

    def read_reduced(self, target: Bytes) -> None:
        """See `Store`."""
        for peer, share in zip(self._member.servers, self._shares, strict=True):
            region = peer.region(self._name("slot/0"))
            for start, stop, at in self.own.of(share.start, share.stop):
                piece = region[start - share.start : stop - share.start]
                self._do(peer, piece.read, target[at : at + stop - start]).wait()

    def read_values(self, target: Bytes) -> None:
        """See `Store`. A view at a server has all values; without one each server has its share."""
        if self._at_server:
            target[:] = self._view
            return
        for peer in self._member.servers:
            if (region := self._find(peer, "view")) is not None:
                self._do(peer, region[: target.nbytes].read, target).wait()
                return
        self._move("master", target, False)

    def read_state(self, name: str, target: Bytes) -> None:
        """See `Store`."""
        self._move(f"state/{name}", target, False)

    def write_state(self, name: str, source: Bytes) -> None:
        """See `Store`."""
        self._move(f"state/{name}", source, True)

    def _find(self, peer: Peer, what: str) -> RemoteRegion | None:
        try:
            return self._do(peer, peer.region, self._name(what), None)
        except LookupError:
            return None

    def _move(self, what: str, local: Bytes, write: bool) -> None:
        for peer, share in zip(self._member.servers, self._shares, strict=True):
            if share.size_bytes == 0:
                continue
            region: RemoteRegion = peer.region(self._name(what))
            piece, remote = local[share.start : share.stop], region[: share.size_bytes]
            self._do(peer, remote.write if write else remote.read, piece).wait()

    def counts(self) -> NDArray[np.int64]:
        """See `Store`."""
        total = np.zeros(len(self.layout.spec.tensors), np.int64)
        for peer in self._member.servers:
            part = np.zeros_like(total)
            self._do(peer, peer.region(self._name("counts"))[: total.nbytes].read, part).wait()
            np.maximum(total, part, out=total)
        return total

    def set_counts(self, counts: NDArray[np.int64]) -> None:
        """See `Store`."""
        for peer in self._member.servers:
            region = peer.region(self._name("counts"))
            self._do(peer, region[: counts.nbytes].write, counts).wait()

    def release(self) -> None:
        """See `Store`."""
        spec = self.layout.spec
        hyper = ((0.0,) * len(spec.hyper),) * spec.groups
        present = bytes(len(spec.tensors))
        version = self._version + 1
        for index in self._mine():
            self.commit(index, Commit(version, RELEASE, 0, 1.0, math.inf, 1.0, hyper, present))
        self.wait()
        self.close()

    def close(self) -> None:
        """See `Store`."""
        for region in self._regions:
            region.free()


def _present(gradients: dict[int, Gradient], commit: Commit) -> dict[int, Gradient]:
    """Takes the gradients of tables that a commit means; the others were withdrawn."""
    found = {}
    if commit.operation in (APPLY, REDUCE):
        found = {tensor: each for tensor, each in gradients.items() if commit.present[tensor]}
    gradients.clear()
    return found


def _zeros(size: int) -> Bytes:
    """Zeroed bytes that start on 64: kernels see the same alignment as in a region."""
    raw = np.zeros(size + 64, np.uint8)
    offset = -raw.ctypes.data % 64
    return raw[offset : offset + size]


def _mapped(peer: Peer) -> bool:
    """What this peer allows to be written is mapped here."""
    return bool(peer.path.transport == "shm")
