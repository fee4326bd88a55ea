"""Tracks each parameter's gradient between backward and the step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import nn

from ..devices import is_on_host
from ..statistics import Statistics


class Left(NamedTuple):
    """A gradient that has left, or lies where it is read: it must stay as it was."""

    gradient: torch.Tensor
    version: int
    address: int
    checksum: int | torch.Tensor | None  # of the bytes that are looked at
    late: bool  # it left in the step that commits it


@dataclass(slots=True, eq=False)
class GradientState:
    """The state of one parameter's gradient.

    Attributes:
        index: of the parameter in the store.
        parameter: the parameter.
        name: of the parameter, quoted for messages.
        dtype: the parameter's when the store was opened.
        on_host: the CPU computed with the parameter where it was then.
        is_table: the gradient is sparse by rows.
        shared: the gradient's place is a server's memory.
        left: the gradient, since it has left; None before, and after it was withdrawn.
        block: where it was produced: in SLOT, in a block of the pool, or None if it is sent.
        was_in_place: the last one that left lay where it was to be produced, or, from a device, it
            was copied to where its server reads it.
        bytes_copied: of the last one, by this process; None if none has left.
        size_bytes: of the last one, where it is sparse.
        slow: why its copy from a device is slow; "" if it is not.
        within: it is copied to where its server has its share, on the same device.
    """

    index: int
    parameter: nn.Parameter
    name: str
    is_table: bool
    dtype: torch.dtype = field(init=False)
    on_host: bool = field(init=False)
    shared: bool = False
    left: Left | None = None
    block: int | None = None
    was_in_place: bool = True
    bytes_copied: int | None = None
    size_bytes: int | None = None
    slow: str = ""
    within: bool = False

    def __post_init__(self) -> None:
        self.dtype, self.on_host = self.parameter.dtype, is_on_host(self.parameter)

    def forget(self) -> bool:
        """Forgets a gradient that does not count; tells whether there was one."""
        did = self.left is not None
        self.left, self.block = None, None
        return did


def count_copied(statistics: Statistics, state: GradientState, copied: int) -> None:
    """Notes how many bytes of a gradient this process has copied."""
    state.bytes_copied = (state.bytes_copied or 0) + copied
    statistics.bytes_copied += copied


class Found(NamedTuple):
    """The place of a parameter and of its last gradient, for `explain`.

    Attributes:
        name, parameter: as in the model.
        offset: in the store.
        gradient: the state of its gradient; None if it gets none here.
        inside: the parameter lies in the store's memory, or in its copy on a device.
        held: it belongs there; else another optimizer has it.
        slow: why copies to a device are slow; "" if they are not.
    """

    name: str
    parameter: torch.Tensor
    offset: int
    gradient: GradientState | None
    inside: bool
    held: bool
    slow: str
