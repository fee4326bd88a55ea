"""Notices that the step of a class reads shapes: it may then treat some sizes otherwise.

A trial has a few small tensors; what a class does from a size on that they do not have, it cannot
see. Knows only torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.overrides import TorchFunctionMode

_TELL_SHAPES = frozenset({
    "shape", "ndim", "size", "dim", "numel", "nelement", "ndimension", "nbytes", "__len__",
})  # fmt: skip


class ShapeWatch(TorchFunctionMode):
    """A mode of torch that notes whether a shape is read while the mode is entered.

    Attributes:
        seen: a shape was read.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen = False

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Notes the name of a torch function, and calls it."""
        name = getattr(func, "__name__", "")
        if name == "__get__":  # of a property
            name = getattr(getattr(func, "__self__", None), "__name__", "")
        self.seen |= name in _TELL_SHAPES
        return func(*args, **(kwargs or {}))
