"""All slices of a step that one worker computes in turn have the same hyper-parameters."""

from __future__ import annotations

from tensorwire.parameters import Hyper


class SameHyper:
    """Compares those of one optimizer.

    Args:
        slices: how many slices of a step the worker computes.
    """

    def __init__(self, slices: int) -> None:
        self._slices = slices
        self._first: tuple[Hyper, ...] = ()

    @property
    def looks(self) -> bool:
        """There is something to be compared."""
        return self._slices > 1

    def check(self, turn: int, hyper: tuple[Hyper, ...]) -> None:
        """Raises RuntimeError if they are not those of turn 0."""
        if turn == 0:
            self._first = hyper
        elif hyper != self._first:
            raise RuntimeError(
                "the learning rate or another hyper-parameter was changed after slice "
                f"{turn} of {self._slices} that this worker computes "
                "in turn. Step a scheduler once per epoch, or after the last slice of a step: 'if "
                "(i + 1) % len(job.my_slices) == 0' in a loop that counts batches"
            )
