"""Replaces the Replica of a closed optimizer: every use is an error."""

from __future__ import annotations

from typing import NoReturn

JOB_CLOSED = (
    "this optimizer or its job was closed, and the model keeps its last values: to go on, call "
    "tw.init() and make the optimizer anew"
)


class ClosedReplica:
    """A stand-in for the Replica of a closed optimizer; it keeps none of its memory."""

    def __init__(self, text: str = JOB_CLOSED) -> None:
        self._text = text

    def withdraw(self) -> None:
        """Does nothing: `zero_grad()` clears gradients as in torch."""

    def __getattr__(self, name: str) -> NoReturn:
        raise RuntimeError(self._text)
