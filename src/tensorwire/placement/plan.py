"""Decides before the first step where every tensor that crosses machines will live.

Between two machines the tensors lie one after the other in ready order, cut into buckets: each
moves with one transfer and one signal. A Plan is a pure function of the tensors that cross, so all
processes of a program can make it for themselves, and `digest` tells whether they made the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from .graph import MAX_BYTES, Crossing, Graph, Tensor

ALIGN_BYTES = 64
"""Slots and buckets start and end on multiples of it."""

BLOCK_BYTES = 192
"""A block that describes one run: the sizes, and where the bytes are if they do not follow it."""

PROTOCOLS = ("static", "bounded", "unbounded")
"""static: the bytes. bounded: a block, followed by room for the most bytes there can be.
unbounded: a block alone; the receiver allocates and reads."""


@dataclass(frozen=True, slots=True)
class Slot:
    """A tensor's place in its bucket.

    Attributes:
        tensor: whose place it is.
        protocol: one of PROTOCOLS.
        offset: from the start of the bucket.
        size_bytes: a multiple of ALIGN_BYTES.
    """

    tensor: Tensor
    protocol: str
    offset: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Bucket:
    """A range of the receiver's memory that moves with one transfer.

    Attributes:
        source: the machine that writes.
        target: the machine whose memory it is.
        index: 0, 1, … between these two machines, in ready order.
        offset: from the start of what `target` keeps for `source`.
        slots: in ready order, one after the other.
    """

    source: str
    target: str
    index: int
    offset: int
    slots: tuple[Slot, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes of all slots, a multiple of ALIGN_BYTES."""
        last = self.slots[-1]
        return last.offset + last.size_bytes


@dataclass(frozen=True)
class Plan:
    """The buckets of a graph, in ready order. Made by `plan`.

    Two plans are equal if they have the same buckets in the same order.
    """

    buckets: tuple[Bucket, ...]
    _places: dict[tuple[str, str], tuple[Bucket, Slot]] = field(
        init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        places = {}
        for bucket in self.buckets:
            for slot in bucket.slots:
                places[slot.tensor.name, bucket.target] = bucket, slot
        object.__setattr__(self, "_places", places)

    def place(self, tensor: str, target: str) -> tuple[Bucket, Slot]:
        """Returns the place of a tensor at a machine that uses it.

        Raises:
            KeyError: it does not cross to that machine.
        """
        return self._places[tensor, target]

    def between(self, source: str, target: str) -> tuple[Bucket, ...]:
        """Returns the buckets from one machine to another, by index."""
        return tuple(b for b in self.buckets if (b.source, b.target) == (source, target))

    @property
    def pairs(self) -> tuple[tuple[str, str], ...]:
        """(source, target) of all buckets, sorted, each once."""
        return tuple(sorted({(b.source, b.target) for b in self.buckets}))

    def arena_bytes(self, source: str, target: str) -> int:
        """Returns the bytes that `target` keeps for `source`, for one run of the graph."""
        return max((b.offset + b.size_bytes for b in self.between(source, target)), default=0)

    @property
    def digest(self) -> bytes:
        """32 bytes that are equal if the plans are."""
        parts = [
            (b.source, b.target, [(s.tensor, s.protocol) for s in b.slots]) for b in self.buckets
        ]
        return hashlib.sha256(repr(parts).encode()).digest()

    def __str__(self) -> str:
        """Returns a table of all slots."""
        rows = [("bucket", "tensor", "what", "protocol", "offset", "bytes")]
        for bucket in self.buckets:
            for slot in bucket.slots:
                rows.append(
                    (
                        f"{bucket.source} → {bucket.target} {bucket.index}",
                        slot.tensor.name,
                        str(slot.tensor),
                        slot.protocol,
                        str(bucket.offset + slot.offset),
                        str(slot.size_bytes),
                    )
                )
        return _table(rows)


def plan(graph: Graph, *, bucket_bytes: int = 512 << 10, allocate_bytes: int = 64 << 20) -> Plan:
    """Gives every tensor that crosses machines a place in the memory of each machine that uses it.

    The result depends on the tensors that cross and the order in which they are ready and needed,
    on nothing else: not on the order of declaration, nor on operators that nothing crosses to or
    from. The tensors between two machines have places that do not depend on other machines.

    A bucket is sent when its last tensor is ready. No tensor joins a bucket that the target needs
    before that tensor is ready: the order in which one process would run the graph stays possible,
    so that no two machines can wait for each other.

    Args:
        graph: what runs in every step.
        bucket_bytes: the most that a bucket has; a larger tensor has one of its own.
        allocate_bytes: a tensor whose bound is above this is sent as if it had none.

    Raises:
        ValueError: the slots between two machines are more than 2**48 bytes.
    """
    drafts: list[_Draft] = []
    present: dict[tuple[str, str], _Draft] = {}
    for crossing in graph.crossings():
        tensor = crossing.tensor
        large = (tensor.most_bytes or 0) > allocate_bytes
        protocol = _possible(tensor)[-1 if large else 0]
        size = _slot_bytes(tensor, protocol)
        pair = crossing.source, crossing.target
        draft = present.get(pair)
        if (
            draft is None
            or draft.size_bytes + size > bucket_bytes
            or crossing.ready >= draft.needed
        ):
            draft = present[pair] = _Draft(*pair)
            drafts.append(draft)
        draft.add(crossing, protocol, size)
    # Ready when the last tensor is; Python's sort keeps the order of what is ready together.
    drafts.sort(key=lambda draft: (draft.ready, draft.slots[-1][0].name, draft.target))
    return Plan(_lay_out(drafts))


@dataclass
class _Draft:
    """A bucket that is being filled."""

    source: str
    target: str
    slots: list[tuple[Tensor, str]] = field(default_factory=list)
    size_bytes: int = 0
    ready: int = 0
    needed: int = 1 << 62

    def add(self, crossing: Crossing, protocol: str, size_bytes: int) -> None:
        self.slots.append((crossing.tensor, protocol))
        self.size_bytes += size_bytes
        self.ready = crossing.ready
        self.needed = min(self.needed, crossing.needed)


def _slot_bytes(tensor: Tensor, protocol: str) -> int:
    if protocol == "unbounded":
        return BLOCK_BYTES
    most = tensor.most_bytes
    assert most is not None, f"{protocol} {tensor} has no bound"
    return _padded(most) + (BLOCK_BYTES if protocol == "bounded" else 0)


def _padded(size_bytes: int) -> int:
    return size_bytes + -size_bytes % ALIGN_BYTES


def _possible(tensor: Tensor) -> tuple[str, ...]:
    """Returns the protocols that a tensor can be sent by; of two, the second is for a large one."""
    if tensor.is_static:
        return ("static",)
    return ("unbounded",) if tensor.most_bytes is None else ("bounded", "unbounded")


def _lay_out(drafts: Iterable[_Draft]) -> tuple[Bucket, ...]:
    """Puts the buckets of each pair one after the other."""
    ends: dict[tuple[str, str], tuple[int, int]] = {}
    buckets = []
    for draft in drafts:
        pair = draft.source, draft.target
        index, start = ends.get(pair, (0, 0))
        slots, offset = [], 0
        for tensor, protocol in draft.slots:
            size = _slot_bytes(tensor, protocol)
            slots.append(Slot(tensor, protocol, offset, size))
            offset += size
        if start + offset > MAX_BYTES:
            raise ValueError(f"what goes from {pair[0]!r} to {pair[1]!r} is above 2**48 bytes")
        ends[pair] = index + 1, start + offset
        buckets.append(Bucket(*pair, index, start, tuple(slots)))
    return tuple(buckets)


def _table(rows: Sequence[Sequence[str]]) -> str:
    """Returns columns of text; the last two are numbers."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if at >= len(row) - 2 else cell.ljust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
