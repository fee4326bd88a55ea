"""Manages the slots in which the gradients of one optimizer's parameters are produced.

Every parameter may have a slot: memory where its gradient is wanted, at a server or in a registered
region. After the first step it is known which allocation of backward each gradient was, and from
the second on that allocation is the slot (`allocator.cc`). Until then autograd's graph tells; where
it does not, and whenever the prediction misses, gradients are produced in blocks of a pool, which
the server can read too. Where a gradient really lies is looked up when it has arrived, so one that
is elsewhere is noticed, told with a reason, and copied.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence
from typing import NamedTuple

import torch

from tensorwire.errors import UnavailableError
from tensorwire.parameters import Bytes, Place

from ..script_line import script_stacklevel
from .library import Allocator, load

NOT_YET = "no gradient has arrived yet"
NO_PLACE = "it gets no gradient"
SPARSE = "it is sparse: its rows are sent"
COPIED = "it is on a device, and its server reads the host's memory"
LEARNING = "its allocation is learned from the step before"

SLOT = -1
"""The place of a gradient in its slot. Other numbers are blocks, as in `Commit.blocks`."""

# Smaller ones are not pooled: to copy them costs less than to look after them one by one.
LEAST_POOLED_BYTES = 64 << 10

# The pool stays open for a gradient until so many in a row were in their slot: 1, and 4 times as
# many after each time that this was too early.
_MOST_HITS = 1 << 16

# A parameter without a gradient for so many steps is not expected to get one.
_PATIENCE = 2


class PlacementWarning(UserWarning):
    """A warning that gradients are copied instead of produced in place; it says why and the remedy.

    Silent with `DistributedOptimizer(placement="copy")`.
    """


class Outcome(NamedTuple):
    """The outcome of the last gradient of a parameter.

    Attributes:
        in_place: it was produced in its slot, or in the pool.
        reason: why not in its slot; "" if it was.
    """

    in_place: bool
    reason: str


class GradientSlots:
    """Slots for gradients. One thread at a time, but backward may be another.

    Attributes:
        reasons: for each parameter why its last gradient was not in its slot; "" if it was.
        learning_s: spent on finding out which allocations gradients were.

    Args:
        parameters: those that get gradients.
        places: for each memory of exactly its bytes, or the reason why it has none.

    Raises:
        UnavailableError: the allocator cannot be had here.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], places: Sequence[Place | str]) -> None:
        self._allocator = load()
        self.learning_s = 0.0
        self._pool = pool = _Pool(self._allocator)
        self._start = self._allocator.add_context(pool.number)
        self._enter = self._allocator.enter
        self._slots = [-1] * len(parameters)
        self._held_memory: list[Bytes] = []
        self._addresses = [0] * len(parameters)
        self._strides = [parameter.stride() for parameter in parameters]
        self._dtypes = [parameter.dtype for parameter in parameters]
        self._contexts = [self._allocator.add_context(pool.number) for _ in parameters]
        self._misses = [0] * len(parameters)
        self.reasons = [NOT_YET] * len(parameters)
        self._seen = [0] * len(parameters)  # the step of the last gradient
        self._pooled = [False] * len(parameters)
        self._blocks: dict[int, int] = {}  # as in `Commit.blocks`, by address
        self._closed = False
        self._owners = [-1 if isinstance(place, str) else place.server for place in places]
        for index, place in enumerate(places):
            if isinstance(place, str) or place.memory.nbytes == 0:
                self.reasons[index] = place if isinstance(place, str) else "it has no elements"
                continue
            address = self._addresses[index] = _address(place.memory)
            identity = parameters[index]._cdata
            size = place.memory.nbytes
            slot = self._allocator.add_slot(pool.number, address, size, identity)
            self._slots[index] = slot
            self._held_memory.append(place.memory)
            if place.block is not None and place.block.nbytes >= LEAST_POOLED_BYTES:
                self._blocks[address] = 2 * index + 1
                self._blocks[_address(place.block)] = 2 * index
                pool.add(index, slot, place.block)
        _sweep(self._allocator)
        _in_use.add(self)
        self.begin()

    def begin(self) -> None:
        """Begins a step in the calling thread: its allocations until the first gradient."""
        if not self._closed:
            self._allocator.begin(self._start)

    def stepped(self) -> None:
        """Ends a step, and begins the next one."""
        self._pool.stepped()
        self.begin()

    def arrived(self, index: int, gradient: torch.Tensor) -> int | None:
        """Notes the arrival of a parameter's gradient, in the thread that runs backward.

        Returns:
            As `find`.
        """
        where = self.find(index, gradient)
        self._seen[index] = self._pool.steps
        if where == SLOT:
            self.reasons[index] = ""
            if self._pool.awaits(index) and not self._allocator.predicted(self._slots[index]):
                started = time.perf_counter()
                self._learn_again(index, gradient)
                self.learning_s += time.perf_counter() - started
            else:
                self._misses[index] = 0
                self._pool.hit(index)
        elif self._slots[index] >= 0:
            started = time.perf_counter()
            self._pooled[index] = where is not None
            self._pool.seen(index)
            if where is not None:
                self._leave_slot(where)
            self._miss(index, gradient)
            self.learning_s += time.perf_counter() - started
        self._enter(self._contexts[index])
        return where

    def find(self, index: int, gradient: torch.Tensor) -> int | None:
        """Returns where a gradient lies, in the order of its parameter.

        Returns:
            SLOT; a number of `Commit.blocks`; None: elsewhere.
        """
        if gradient.dtype != self._dtypes[index]:
            return None
        strides = self._strides[index]
        if gradient.stride() != strides and not _in_order(gradient, strides):
            return None
        address = gradient.data_ptr()
        if address == self._addresses[index]:
            return SLOT
        block = self._blocks.get(address)
        if block is None or self._owners[block // 2] != self._owners[index]:
            return None
        return block if gradient.untyped_storage().nbytes() == gradient.nbytes else None

    def outcome(self, index: int) -> Outcome:
        """Returns the outcome of the last gradient of a parameter."""
        reason = self.reasons[index]
        return Outcome(not reason or self._pooled[index], reason)

    def _leave_slot(self, where: int) -> None:
        """Forgets the site of another parameter's slot in which a gradient was, if it is unused."""
        owner, is_slot = divmod(where, 2)
        if is_slot and self._pool.steps - self._seen[owner] > _PATIENCE:
            self._allocator.forget(self._slots[owner])

    def _learn_again(self, index: int, gradient: torch.Tensor) -> None:
        """Learns the site of a gradient that the graph put into its slot, which is slower."""
        if self._has_patience(index):
            self._allocator.learn(self._slots[index], gradient.data_ptr())
        self._pool.seen(index)
        self._pool.miss(index, True)

    def _has_patience(self, index: int) -> bool:
        """Tells whether to search the log, which takes long where nothing can be found."""
        self._misses[index] += 1
        count = self._misses[index]
        return not count & (count - 1)

    def _miss(self, index: int, gradient: torch.Tensor) -> None:
        if not self._has_patience(index):
            return
        count = self._misses[index]
        slot, address = self._slots[index], gradient.data_ptr()
        if address == self._addresses[index]:
            self.reasons[index] = "its elements are in another order than the parameter's"
            self._pool.miss(index, False)
            return
        held = self._allocator.held(slot)
        if held and count > 1:
            self._allocator.forget(slot)  # something else is allocated at the predicted site
        learned = self._allocator.learn(slot, address)
        self._pool.miss(index, learned == 0)
        if not self._allocator.installed():
            self.reasons[index] = "another CPU allocator was installed after tensorwire's"
        elif learned == 1:
            self.reasons[index] = (
                "it was not allocated in a thread that runs backward, or it is part of a larger "
                "tensor"
            )
        elif learned == 2:
            self.reasons[index] = "it is the beginning of a larger tensor"
        elif held:
            self.reasons[index] = (
                "its slot is in use: the gradient of an earlier step was kept, or another tensor "
                "of this size is there"
            )
        else:
            self.reasons[index] = LEARNING

    def close(self) -> None:
        """Stops placing gradients; the memory of existing ones stays."""
        self._closed = True
        self._allocator.leave()
        slots = [slot for slot in self._slots if slot >= 0]
        for slot in slots:
            self._allocator.retire(slot)
        blocks = self._pool.close()
        _in_use.discard(self)
        _left.extend([(slots, self._held_memory), (blocks, self._pool.memory)])
        _sweep(self._allocator)
        self._slots = [-1] * len(self._slots)
        self._addresses = [0] * len(self._addresses)
        self._blocks.clear()


class _Pool:
    """The pool of one optimizer's gradients: its blocks, and for which gradients it is open.

    Attributes:
        number: at the allocator.
        memory: of the blocks.
        steps: that are over.
    """

    def __init__(self, allocator: Allocator) -> None:
        self.number = allocator.add_pool()
        self.memory: list[Bytes] = []
        self._allocator = allocator
        self._blocks: list[int] = []
        self._slots: dict[int, int] = {}  # of parameters that have a block
        self._missed: dict[int, int] = {}  # the step of their last gradient
        self._hits: dict[int, int] = {}
        self._hits_needed: dict[int, int] = {}
        self.steps = 0

    def add(self, index: int, slot: int, block: Bytes) -> None:
        """Adds a parameter's slot, and the block that it contributes."""
        self._blocks.append(self._allocator.add_block(self.number, _address(block), block.nbytes))
        self.memory.append(block)
        self._slots[index] = slot
        self._hits_needed[index] = 1
        self._open(index)

    def _open(self, index: int) -> None:
        self._missed[index] = self.steps
        self._hits[index] = 0
        self._allocator.miss(self._slots[index], True)

    def _close(self, index: int) -> None:
        del self._missed[index]
        self._allocator.miss(self._slots[index], False)

    def awaits(self, index: int) -> bool:
        """Tells whether the pool is open for a gradient."""
        return index in self._missed

    def hit(self, index: int) -> None:
        """Counts a gradient that was in its slot, as predicted."""
        if index in self._missed:
            self._missed[index] = self.steps
            self._hits[index] += 1
            if self._hits[index] >= self._hits_needed[index]:
                self._close(index)

    def seen(self, index: int) -> None:
        """Counts a gradient that came, and not as predicted."""
        if index in self._missed:
            self._missed[index] = self.steps

    def miss(self, index: int, helps: bool) -> None:
        """Counts a gradient that was not in its slot; `helps`: it could be in the pool."""
        if helps and index in self._slots and index not in self._missed:
            self._hits_needed[index] = min(4 * self._hits_needed[index], _MOST_HITS)
            self._open(index)
        elif helps and index in self._missed:
            self._hits[index] = 0
        elif index in self._missed:
            self._close(index)

    def stepped(self) -> None:
        """Counts a step; closes the pool for gradients that have not come for a while."""
        self.steps += 1
        if self._missed:
            late = [i for i, step in self._missed.items() if self.steps - step > _PATIENCE]
            for index in late:
                self._close(index)

    def close(self) -> list[int]:
        """Stops handing out memory; returns the blocks."""
        for index in list(self._missed):
            self._close(index)
        self._allocator.trim(self.number)
        for block in self._blocks:
            self._allocator.retire(block)
        self._slots.clear()
        return self._blocks


# Slots can be handed out until they are retired: their memory must not go before, whatever becomes
# of the object that made them.
_in_use: set[GradientSlots] = set()

# Retired slots and their memory, which stays mapped as long as a tensor lies in it.
_left: list[tuple[list[int], list[Bytes]]] = []


def _sweep(allocator: Allocator) -> None:
    """Forgets memory in which no tensor lies any more."""
    still = []
    for slots, memory in _left:
        if any(allocator.held(slot) for slot in slots):
            still.append((slots, memory))
            continue
        for slot in slots:
            allocator.remove(slot)
    _left[:] = still


def _in_order(tensor: torch.Tensor, strides: Sequence[int]) -> bool:
    """Tells whether the strides are the tensor's in every dimension with more than one element."""
    sizes = zip(tensor.shape, tensor.stride(), strides, strict=True)
    return all(size == 1 or mine == other for size, mine, other in sizes)


def _address(memory: Bytes) -> int:
    return int(memory.__array_interface__["data"][0])


def try_slots(
    parameters: Sequence[torch.Tensor], places: Sequence[Place | str]
) -> GradientSlots | str:
    """Returns the slots, or why there are none; the latter also warns once (PlacementWarning)."""
    try:
        return GradientSlots(parameters, places)
    except UnavailableError as error:
        text = f"gradients are copied to their place instead of being produced there: {error}"
        warnings.warn(text, PlacementWarning, stacklevel=script_stacklevel())
        return str(error)
