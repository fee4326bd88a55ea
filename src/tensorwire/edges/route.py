"""Computes where things lie in the regions of two machines that have an edge. Pure.

At the target: a head, one word per bucket and turn in flight, the arena of each turn in flight.
At the source: one word per bucket and turn in flight, raised when the target has released it.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import cached_property

from tensorwire.placement import ALIGN_BYTES, Bucket, Plan, Slot

MAGIC = int.from_bytes(b"TWEDGE01", "little")
_HEAD = struct.Struct("<QQ32s")


@dataclass(frozen=True)
class Route:
    """The way from one machine to another.

    Turns count from 1; turn n of a bucket uses the memory of turn n - flights.

    Attributes:
        plan: of all machines.
        source: the machine that writes.
        target: the machine that has the memory.
        flights: turns that can be on the way or in use at a time.
        label: tells apart several plans that run at the same time.
    """

    plan: Plan
    source: str
    target: str
    flights: int
    label: str

    @cached_property
    def buckets(self) -> tuple[Bucket, ...]:
        """The buckets of this route, by index."""
        return self.plan.between(self.source, self.target)

    @cached_property
    def places(self) -> dict[str, tuple[Bucket, int, Slot]]:
        """The bucket of each tensor, and the index and slot that it has in the bucket."""
        return {
            slot.tensor.name: (bucket, at, slot)
            for bucket in self.buckets
            for at, slot in enumerate(bucket.slots)
        }

    @cached_property
    def arena_bytes(self) -> int:
        """The bytes of the memory of one turn."""
        return self.plan.arena_bytes(self.source, self.target)

    @cached_property
    def name(self) -> str:
        """The name of the target's region; it has numbers, as names of machines may be long."""
        machines = sorted({machine for pair in self.plan.pairs for machine in pair})
        numbers = f"{machines.index(self.source)}-{machines.index(self.target)}"
        return f"edges/{self.label}/{numbers}"

    @property
    def opened_name(self) -> str:
        """The name of a region that the target allocates once the region `name` has its head."""
        return f"{self.name}/opened"

    @property
    def taken_name(self) -> str:
        """The name of the source's region."""
        return f"{self.name}/taken"

    def memory_name(self, bucket: Bucket, at: int, turn: int, number: int) -> str:
        """Returns the name of memory at the source that the target reads."""
        return f"{self.name}/{bucket.index}.{at}.{self.flight(turn)}.{number}"

    def flight(self, turn: int) -> int:
        """Returns the number of the memory that a turn uses, from 0 to flights - 1."""
        return (turn - 1) % self.flights

    @property
    def words_bytes(self) -> int:
        """The size of all words, each on a cache line of its own."""
        return ALIGN_BYTES * len(self.buckets) * self.flights

    @property
    def size_bytes(self) -> int:
        """The size of the target's region."""
        return ALIGN_BYTES + self.words_bytes + self.arena_bytes * self.flights

    def taken(self, bucket: Bucket, turn: int) -> int:
        """Returns the offset of the word at the source that says that a turn was released."""
        return ALIGN_BYTES * (bucket.index * self.flights + self.flight(turn))

    def filled(self, bucket: Bucket, turn: int) -> int:
        """Returns the offset of the word at the target that says that a turn has come."""
        return ALIGN_BYTES + self.taken(bucket, turn)

    def start(self, bucket: Bucket, turn: int) -> int:
        """Returns the offset of a bucket at the target in the memory of a turn."""
        arena = ALIGN_BYTES + self.words_bytes + self.arena_bytes * self.flight(turn)
        return arena + bucket.offset

    @cached_property
    def head(self) -> bytes:
        """The first bytes at the target."""
        return _HEAD.pack(MAGIC, self.flights, self.plan.digest)

    def difference(self, head: bytes) -> str:
        """Returns how a target's head differs from this side's; "" if it does not."""
        magic, flights, digest = _HEAD.unpack_from(head)
        if magic != MAGIC:
            return "no region of edges"
        if digest != self.plan.digest:
            return "another plan"
        return "" if flights == self.flights else f"flights={flights}, here {self.flights}"
