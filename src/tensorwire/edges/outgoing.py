"""Sender side of a route: where tensors are made, when memory is free, and how they are sent."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tensorwire.errors import PeerLostError, TimeoutError
from tensorwire.memory import Node, Peer, Region, RemoteRegion, RemoteWord, Transfer
from tensorwire.placement import BLOCK_BYTES, Bucket, Slot

from .route import Route
from .values import Value, check, size_bytes, values_in, write_block

_Piece = tuple[NDArray[Any], int]  # what to write, and its offset in the target's region


class Memory:
    """Memory at the source that the target reads; grows by being replaced."""

    def __init__(self) -> None:
        self.region: Region | None = None
        self.number = 0

    def free(self) -> None:
        """Takes it away from the target."""
        if self.region is not None:
            self.region.free()
            self.region = None


class Outgoing:
    """The side of a route that sends tensors to one machine.

    Attributes:
        bytes_sent: of values.
        bytes_in_place: of those, made where the target uses or reads them.
        bytes_copied: of those, copied in memory by a CPU of this process.
    """

    def __init__(self, node: Node, route: Route, peer: Peer, timeout_s: float | None) -> None:
        self.route = route
        self.peer = peer
        self.bytes_sent = self.bytes_in_place = self.bytes_copied = 0
        self._node = node
        self._timeout_s = timeout_s
        self._taken = node.allocate(max(route.words_bytes, 64), name=route.taken_name, access="w")
        self._taken_word = cache(self._taken.word)
        self._far: RemoteRegion  # by `attach`
        self._filled_word: Callable[[int], RemoteWord]
        self._turns = dict.fromkeys(route.places, 0)  # how often each tensor was put
        self._placed: dict[str, Value] = {}
        self._waiting: dict[tuple[int, int], dict[str, list[_Piece]]] = {}
        self._left = [0] * len(route.buckets)  # the last turn of each bucket that has left
        self._transfers: dict[tuple[int, int], Transfer] = {}
        self._memories: dict[tuple[int, int, int], Memory] = {}

    def attach(self, remote: RemoteRegion) -> None:
        """Takes the target's region, once it is there and fits the plan."""
        self._far, self._filled_word = remote, cache(remote.word)

    def place(self, name: str, shape: tuple[int, ...]) -> Value | None:
        """Returns memory where the target will find the next turn of a tensor; None without one.

        The target's own where this process has it mapped, or what the target will read.
        """
        bucket, at, slot = self.route.places[name]
        turn = self._turns[name] + 1
        if name in self._placed:
            raise ValueError(f"{name!r} was placed before: call put() before the next place()")
        tensor = slot.tensor
        if slot.protocol == "unbounded":
            self._wait_free(bucket, turn, name)
            value = self._memory_for(bucket, at, slot, turn, shape)
        elif self._far.mapped:
            self._wait_free(bucket, turn, name)
            start = self.route.start(bucket, turn) + self._values_offset(slot)
            memory = self._far[start : start + size_bytes(tensor, shape)].memoryview()
            value = values_in(tensor, shape, memory)
        else:
            return None
        self._placed[name] = value
        return value

    def prepare(self, name: str, value: Value | None) -> tuple[int, ...]:
        """Checks a value for `put`, and waits until it can leave; changes nothing.

        Returns:
            The shape, for `put`.
        """
        bucket, _, slot = self.route.places[name]
        turn = self._turns[name] + 1
        placed = self._placed.get(name)
        if placed is None and value is None:
            raise ValueError(f"{name!r} was not placed: put it with a value")
        if placed is not None and value is not None:
            raise ValueError(f"{name!r} was placed: put it without a value")
        shape = check(slot.tensor, placed if value is None else value)
        is_last = len(self._waiting.get((bucket.index, turn), ())) + 1 == len(bucket.slots)
        if is_last or slot.protocol == "unbounded":
            self._wait_free(bucket, turn, name)
        return shape

    def put(self, name: str, value: Value | None, shape: tuple[int, ...]) -> None:
        """Makes the next turn of a tensor, of `value` or its placed memory, after `prepare`."""
        bucket, at, slot = self.route.places[name]
        turn = self._turns[name] + 1
        self._placed.pop(name, None)
        pieces = self._pieces(bucket, at, slot, turn, shape, value)
        self._turns[name] = turn
        self._count(slot, shape, value)
        waiting = self._waiting.setdefault((bucket.index, turn), {})
        waiting[name] = pieces
        if len(waiting) == len(bucket.slots):
            del self._waiting[bucket.index, turn]
            self._leave(bucket, turn, [piece for each in waiting.values() for piece in each])

    def _pieces(
        self,
        bucket: Bucket,
        at: int,
        slot: Slot,
        turn: int,
        shape: tuple[int, ...],
        value: Value | None,
    ) -> list[_Piece]:
        """Returns the pieces to write to the target."""
        start = self.route.start(bucket, turn) + slot.offset
        tensor = slot.tensor
        if slot.protocol == "unbounded":
            if value is not None:
                np.copyto(self._memory_for(bucket, at, slot, turn, shape), value)
            memory = self._memories[bucket.index, at, self.route.flight(turn)]
            return [(write_block(tensor, shape, memory.number), start)]
        pieces: list[_Piece] = []
        if slot.protocol == "bounded":
            pieces.append((write_block(tensor, shape), start))
        if value is not None and size_bytes(tensor, shape):
            offset = self._values_offset(slot) - slot.offset
            pieces.append((value, start + offset))
        return pieces

    @staticmethod
    def _values_offset(slot: Slot) -> int:
        return slot.offset + (BLOCK_BYTES if slot.protocol == "bounded" else 0)

    def _memory_for(
        self, bucket: Bucket, at: int, slot: Slot, turn: int, shape: tuple[int, ...]
    ) -> Value:
        key = bucket.index, at, self.route.flight(turn)
        memory = self._memories.setdefault(key, Memory())
        needed = size_bytes(slot.tensor, shape)
        region = memory.region
        if region is None or region.size_bytes < needed:
            grown = max(needed, 2 * region.size_bytes if region is not None else 4096)
            memory.free()
            memory.number += 1
            # Writable: the target may work in it as in memory of its own.
            memory.region = region = self._node.allocate(
                grown, name=self.route.memory_name(bucket, at, turn, memory.number), access="rw"
            )
        return values_in(slot.tensor, shape, region.memoryview())

    def _leave(self, bucket: Bucket, turn: int, pieces: list[_Piece]) -> None:
        far, word = self._far, self._filled_word(self.route.filled(bucket, turn))
        if pieces:
            locals_ = [array for array, _ in pieces]
            transfer = self.peer.write(
                locals_, [far[start:] for _, start in pieces], signal=(word, turn)
            )
        else:
            transfer = word.set(turn)
        self._transfers[bucket.index, self.route.flight(turn)] = transfer
        self._left[bucket.index] = max(self._left[bucket.index], turn)

    def _count(self, slot: Slot, shape: tuple[int, ...], value: Value | None) -> None:
        size = size_bytes(slot.tensor, shape)
        self.bytes_sent += size
        if value is None:
            self.bytes_in_place += size
        elif slot.protocol == "unbounded" or self._far.mapped:
            self.bytes_copied += size

    def _wait_free(self, bucket: Bucket, turn: int, name: str) -> None:
        """Waits until the target has released the older turn that used this turn's memory."""
        self._wait_taken(bucket, turn - self.route.flights, f"memory for {name!r} of turn {turn}")

    def _wait_taken(self, bucket: Bucket, turn: int, what: str) -> None:
        if turn < 1:
            return
        word, target = self._taken_word(self.route.taken(bucket, turn)), self.route.target
        try:
            word.wait_until(turn, self._timeout_s, peer=self.peer)
        except TimeoutError:
            raise TimeoutError(
                f"waited {self._timeout_s:g} s for {what}: machine {target!r} ({self.peer.name}) "
                f"has not released turn {turn} of bucket {bucket.index}; raise flights or timeout_s"
            ) from None
        except PeerLostError as error:
            raise PeerLostError(
                f"machine {target!r} is lost, waiting for {what}: {error}"
            ) from error
        if done := self._transfers.pop((bucket.index, self.route.flight(turn)), None):
            done.wait(self._timeout_s)

    def settle(self) -> None:
        """Waits until the target has taken all that has left."""
        for bucket in self.route.buckets:
            last = self._left[bucket.index]
            for turn in range(max(last - self.route.flights, 0) + 1, last + 1):
                self._wait_taken(bucket, turn, f"turn {turn} to be taken")

    def close(self) -> None:
        """Takes all memory away from the target."""
        self._taken.free()
        for memory in self._memories.values():
            memory.free()
        self._placed.clear()
        self._waiting.clear()
