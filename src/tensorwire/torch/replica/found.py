"""Where a parameter and its last gradient were found; what `explain` tells."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..allocator.gradient_slots import Outcome


class Found(NamedTuple):
    """A parameter and its last gradient.

    Attributes:
        name, parameter: as in the model.
        offset: in the store.
        outcome: what the gradient did; None if there is none.
        shared: the gradient's place is a server's memory.
        size_bytes: of the gradient; of a sparse one the rows that it has.
        bytes_copied: of the gradient, by this process; None if none has left.
        inside: the parameter lies in the store's memory.
        held: it belongs there; else another optimizer has it.
    """

    name: str
    parameter: torch.Tensor
    offset: int
    outcome: Outcome | None
    shared: bool
    size_bytes: int
    bytes_copied: int | None
    inside: bool
    held: bool
