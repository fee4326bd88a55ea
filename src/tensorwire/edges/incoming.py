"""Receiver side of a route: its memory, the tensors that arrived, and when it may be reused."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from functools import cache

import numpy as np

from tensorwire.errors import BusyError, PeerLostError, StaleHandleError, TimeoutError
from tensorwire.memory import Node, Peer, RemoteRegion, RemoteWord
from tensorwire.placement import BLOCK_BYTES, Bucket, Slot

from .route import Route
from .values import Value, read_block, size_bytes, values_in


class Arrival:
    """One turn of a tensor, until it is released.

    Attributes:
        value: a numpy array. It lies in memory that the sender uses again after
            `release`, or, where the receiver had to read it, in memory of its own.
    """

    __slots__ = ("_release", "value")

    def __init__(self, value: Value, release: Callable[[], None]) -> None:
        self.value = value
        self._release: Callable[[], None] | None = release

    def release(self) -> None:
        """Gives the memory back; nothing may use the value or a view of it now. Idempotent."""
        if self._release is not None:
            release, self._release = self._release, None
            release()

    def __enter__(self) -> Value:
        return self.value

    def __exit__(self, *_: object) -> None:
        self.release()


class Incoming:
    """The side of a route that receives tensors from one machine.

    Attributes:
        bytes_received: of values.
        bytes_read: of those, read by this side into memory that it allocated.
    """

    def __init__(
        self, node: Node, route: Route, peer: Peer, timeout_s: float | None, most_bytes: int
    ) -> None:
        self.route = route
        self.peer = peer
        self.bytes_received = self.bytes_read = 0
        self._timeout_s = timeout_s
        self._most_bytes = most_bytes
        self._region = node.allocate(route.size_bytes, name=route.name, access="rw")
        head = np.frombuffer(route.head, np.uint8)
        self._region.array()[: len(head)] = head
        self._opened = node.allocate(1, name=route.opened_name, access="r")
        self._filled_word = cache(self._region.word)
        self._taken_word: Callable[[int], RemoteWord]  # by `attach`
        self._turns = dict.fromkeys(route.places, 0)
        self._released: dict[tuple[int, int], int] = {}
        self._memories: dict[tuple[int, int, int], tuple[int, RemoteRegion]] = {}

    def attach(self, taken: RemoteRegion) -> None:
        """Takes the source's region of words, once it is there."""
        self._taken_word = cache(taken.word)

    def get(self, name: str) -> Arrival:
        """Waits for the next turn of a tensor."""
        bucket, at, slot = self.route.places[name]
        turn = self._turns[name] + 1
        self._wait_filled(bucket, turn, name)
        value = self._value(bucket, at, slot, turn)
        self._turns[name] = turn
        return Arrival(value, lambda: self._release(bucket, turn))

    def _value(self, bucket: Bucket, at: int, slot: Slot, turn: int) -> Value:
        start = self.route.start(bucket, turn) + slot.offset
        place = self._region[start : start + slot.size_bytes]
        tensor = slot.tensor
        if slot.protocol == "static":
            shape = tuple(size for size in tensor.shape if isinstance(size, int))
            self.bytes_received += size_bytes(tensor, shape)
            return values_in(tensor, shape, place.memoryview())
        try:
            shape, number = read_block(slot, bytes(place.memoryview()[:BLOCK_BYTES]))
        except ValueError as error:
            raise self._nonsense(error) from None
        size = size_bytes(tensor, shape)
        if slot.protocol == "bounded":
            value = values_in(tensor, shape, place[BLOCK_BYTES:].memoryview())
        else:
            value = self._read(bucket, at, slot, turn, shape, number)
        self.bytes_received += size
        return value

    def _read(
        self, bucket: Bucket, at: int, slot: Slot, turn: int, shape: tuple[int, ...], number: int
    ) -> Value:
        tensor, size = slot.tensor, size_bytes(slot.tensor, shape)
        key = bucket.index, at, self.route.flight(turn)
        known = self._memories.get(key)
        if known is None or known[0] != number:
            name = self.route.memory_name(bucket, at, turn, number)
            try:
                known = number, self.peer.region(name, self._timeout_s)
            except LookupError as error:
                raise self._nonsense(error) from None
            self._memories[key] = known
        region = known[1]
        if size > region.size_bytes:
            raise self._nonsense(f"{tensor.name!r} has {size} bytes, more than {region!r}")
        if region.mapped:
            return values_in(tensor, shape, region.memoryview())
        if size > self._most_bytes:
            raise BusyError(
                f"{tensor.name!r} of turn {turn} has {size} bytes, above most_bytes="
                f"{self._most_bytes}; raise it where Edges is made"
            )
        memory = np.empty(size, np.uint8)
        if size:
            region.read(memory).wait(self._timeout_s)
        self.bytes_read += size
        return values_in(tensor, shape, memory)

    def _nonsense(self, what: object) -> ValueError:
        return ValueError(
            f"machine {self.route.source!r} sent what does not fit the plan: {what}. All machines "
            "need the same plan and the same version of tensorwire"
        )

    def _wait_filled(self, bucket: Bucket, turn: int, name: str) -> None:
        word, source = self._filled_word(self.route.filled(bucket, turn)), self.route.source
        try:
            word.wait_until(turn, self._timeout_s, peer=self.peer)
        except TimeoutError:
            raise TimeoutError(
                f"turn {turn} of {name!r} did not come from machine {source!r} ({self.peer.name}) "
                f"within {self._timeout_s:g} s"
            ) from None
        except PeerLostError as error:
            raise PeerLostError(
                f"machine {source!r} was lost before turn {turn} of {name!r} came: {error}"
            ) from error

    def _release(self, bucket: Bucket, turn: int) -> None:
        key = bucket.index, turn
        released = self._released.get(key, 0) + 1
        if released < len(bucket.slots):
            self._released[key] = released
            return
        self._released.pop(key, None)
        # A source that is gone, or has closed its edges, waits for nothing.
        with contextlib.suppress(PeerLostError, StaleHandleError):
            self._taken_word(self.route.taken(bucket, turn)).set(turn)

    def close(self) -> None:
        """Takes the memory away from the source; arrays of it stay valid here."""
        self._opened.free()
        self._region.free()
        self._memories.clear()


def wait_opened(peer: Peer, name: str, deadline: float | None, what: str) -> RemoteRegion:
    """Returns a region that the peer allocates when it gets there.

    Raises:
        TimeoutError: it did not.
        PeerLostError: the peer is gone.
    """
    left = None if deadline is None else max(deadline - time.monotonic(), 0.0)
    try:
        return peer.wait_region(name, left)
    except TimeoutError:
        raise TimeoutError(
            f"{what} has not opened its edges in time: look for an error there, or raise timeout_s"
        ) from None
