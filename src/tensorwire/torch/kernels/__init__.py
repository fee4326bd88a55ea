"""Computes on servers by torch's own arithmetic on cells: reduction and optimizer.

Knows no processes. `describe` turns an optimizer into the text by which it travels, and `kernel_of`
turns a text into the arithmetic.
"""

from __future__ import annotations

from collections.abc import Collection

from .description import (
    Options,
    alike,
    describe,
    has_other_attributes,
    ignored_options,
    options_of,
    plain_class_of,
)
from .fused import FusedKernel
from .optimizer_spec import OptimizerSpec, class_of, import_all, permitted_imports
from .own_step import OwnStepKernel, scalar_of
from .reduction import AVERAGE_ONLY, ReductionKernel
from .trial import NotOnServersError, ParameterKind

__all__ = [
    "AVERAGE_ONLY",
    "FusedKernel",
    "NotOnServersError",
    "OptimizerSpec",
    "Options",
    "OwnStepKernel",
    "ParameterKind",
    "ReductionKernel",
    "TorchKernel",
    "alike",
    "describe",
    "has_other_attributes",
    "ignored_options",
    "import_all",
    "kernel_of",
    "options_of",
    "permitted_imports",
    "plain_class_of",
    "scalar_of",
]

TorchKernel = FusedKernel | OwnStepKernel | ReductionKernel


def kernel_of(text: str, permitted: Collection[str] = ()) -> TorchKernel:
    """Returns the arithmetic of an optimizer that a text describes, maybe of another process.

    Args:
        text: of `describe`.
        permitted: modules that may be imported for it, besides torch.optim.

    Raises:
        ValueError: the text names nothing that is known or permitted.
    """
    if text == AVERAGE_ONLY:
        return ReductionKernel()
    if text.startswith("{"):
        spec = OptimizerSpec.from_text(text)
        return OwnStepKernel(class_of(spec.optimizer, permitted), spec)
    return FusedKernel(text)
