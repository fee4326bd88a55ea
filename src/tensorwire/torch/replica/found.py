"""Where a parameter and its last gradient were found; what `explain` tells."""

from __future__ import annotations

from typing import NamedTuple

import torch

from .reducer import GradientState


class Found(NamedTuple):
    """A parameter and its last gradient.

    Attributes:
        name, parameter: as in the model.
        offset: in the store.
        gradient: what became of the gradient; None if there is none.
        inside: the parameter lies in the store's memory.
        held: it belongs there; else another optimizer has it.
    """

    name: str
    parameter: torch.Tensor
    offset: int
    gradient: GradientState | None
    inside: bool
    held: bool
