"""Plans from a data-flow graph where every tensor that crosses machines lives.

Pure: no memory, no processes, no torch. docs/internals/placement.md is the guide.
"""

from .graph import DTYPES, Crossing, Graph, Operator, Size, Tensor, UpTo
from .plan import ALIGN_BYTES, BLOCK_BYTES, PROTOCOLS, Bucket, Plan, Slot, plan

__all__ = [
    "ALIGN_BYTES",
    "BLOCK_BYTES",
    "DTYPES",
    "PROTOCOLS",
    "Bucket",
    "Crossing",
    "Graph",
    "Operator",
    "Plan",
    "Size",
    "Slot",
    "Tensor",
    "UpTo",
    "plan",
]
