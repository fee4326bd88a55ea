"""Where the gradients of one optimizer's parameters are produced.

Every parameter may have a slot: memory where its gradient is wanted, at a server or in a registered
region. After the first step it is known which allocation of backward each gradient was, and from
the second on that allocation is the slot (`placer.cc`). Where the gradient really lies is looked up
when it has arrived, so a gradient elsewhere is noticed, told with a reason, and copied.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence
from typing import NamedTuple

import torch

from tensorwire.errors import UnavailableError
from tensorwire.parameters import Bytes

from .placer import Placer, load

NOT_YET = "no gradient has arrived yet"
NO_PLACE = "it gets no gradient"
LEARNING = "its allocation is learned from the step before"


class PlacementWarning(UserWarning):
    """Gradients are copied where they could be produced in place; the text says why and the remedy.

    Silent with `DistributedOptimizer(placement="copy")`.
    """


class Placed(NamedTuple):
    """Of one parameter: what its last gradient did.

    Attributes:
        in_place: it was produced in its slot.
        reason: why not; "" if it was.
    """

    in_place: bool
    reason: str


class Placing:
    """Slots for gradients. One thread at a time, but backward may be another.

    Attributes:
        reasons: for each parameter why its last gradient was not in its slot; "" if it was.
        learning_s: spent on finding out which allocations gradients were.

    Args:
        parameters: those that get gradients.
        slots: for each a piece of memory of exactly its bytes, or the reason why it has none.

    Raises:
        UnavailableError: the allocator cannot be had here.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], slots: Sequence[Bytes | str]) -> None:
        self._placer = load()
        self.learning_s = 0.0
        self._start = self._placer.add_context()
        self._enter = self._placer.enter
        self._slots: list[int] = []
        self._held_memory: list[Bytes] = []
        self._addresses: list[int] = []
        self._strides = [parameter.stride() for parameter in parameters]
        self._contexts = [self._placer.add_context() for _ in parameters]
        self._misses = [0] * len(parameters)
        self.reasons = [NOT_YET] * len(parameters)
        for index, slot in enumerate(slots):
            if isinstance(slot, str) or slot.nbytes == 0:
                self.reasons[index] = slot if isinstance(slot, str) else "it has no elements"
                self._addresses.append(0)
                self._slots.append(-1)
                continue
            address = slot.__array_interface__["data"][0]
            self._addresses.append(address)
            self._slots.append(self._placer.add_slot(address, slot.nbytes))
            self._held_memory.append(slot)
        _sweep(self._placer)
        _in_use.append(self._held_memory)
        self.begin()

    def begin(self) -> None:
        """A step begins in the calling thread: what it allocates until the first gradient."""
        self._enter(self._start)

    def arrived(self, index: int, gradient: torch.Tensor) -> bool:
        """The gradient of a parameter has arrived, in the thread that runs backward.

        Returns:
            It is complete in the parameter's slot.
        """
        in_place = self.in_place(index, gradient)
        if in_place:
            if self.reasons[index]:
                self.reasons[index], self._misses[index] = "", 0
        elif self._slots[index] >= 0:
            started = time.perf_counter()
            self._missed(index, gradient)
            self.learning_s += time.perf_counter() - started
        self._enter(self._contexts[index])
        return in_place

    def in_place(self, index: int, gradient: torch.Tensor) -> bool:
        """It lies in the parameter's slot, in the order of the parameter."""
        return bool(
            gradient.data_ptr() == self._addresses[index]
            and gradient.stride() == self._strides[index]
        )

    def placed(self, index: int) -> Placed:
        """What the last gradient of a parameter did."""
        return Placed(not self.reasons[index], self.reasons[index])

    def _missed(self, index: int, gradient: torch.Tensor) -> None:
        self._misses[index] += 1
        count = self._misses[index]
        if count & (count - 1):
            return  # looking through the log takes long where nothing can be found
        slot, address = self._slots[index], gradient.data_ptr()
        if address == self._addresses[index]:
            self.reasons[index] = "its elements are in another order than the parameter's"
            return
        held = self._placer.held(slot)
        if held and count > 1:
            self._placer.forget(slot)  # something else is allocated at the predicted site
        learned = self._placer.learn(slot, address)
        if not self._placer.installed():
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
        """No gradient is placed any more; the memory of those that still exist stays."""
        self._placer.leave()
        for slot in self._slots:
            if slot >= 0:
                self._placer.retire(slot)
        _in_use[:] = [memory for memory in _in_use if memory is not self._held_memory]
        _leave_behind(self._placer, self._slots, self._held_memory)
        self._slots = [-1] * len(self._slots)
        self._addresses = [0] * len(self._addresses)


# Slots can be handed out until they are retired: their memory must not go before, whatever becomes
# of whoever made them.
_in_use: list[list[Bytes]] = []

_left: list[tuple[list[int], list[Bytes]]] = []


def _leave_behind(placer: Placer, slots: Sequence[int], memory: list[Bytes]) -> None:
    """Keeps memory mapped as long as a tensor lies in it; looks again whenever more comes."""
    _left.append(([slot for slot in slots if slot >= 0], memory))
    _sweep(placer)


def _sweep(placer: Placer) -> None:
    """Forgets memory in which no tensor lies any more."""
    still = []
    for slots, memory in _left:
        if any(placer.held(slot) for slot in slots):
            still.append((slots, memory))
            continue
        for slot in slots:
            placer.remove(slot)
    _left[:] = still


def try_placing(parameters: Sequence[torch.Tensor], slots: Sequence[Bytes | str]) -> Placing | str:
    """A `Placing`, or why there is none here, which is also said once as a PlacementWarning."""
    try:
        return Placing(parameters, slots)
    except UnavailableError as error:
        text = f"gradients are copied to their place instead of being produced there: {error}"
        warnings.warn(text, PlacementWarning, stacklevel=6)  # the script
        return str(error)
