"""Moves tensors of a graph between machines under a plan, one-sidedly, without torch.

Start with `Edges`. docs/internals/placement.md is the guide.
"""

from .edges import Edges
from .incoming import Arrival, wait_opened

__all__ = ["Arrival", "Edges", "wait_opened"]
