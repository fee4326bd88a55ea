"""Checks that all slices of a step in one worker have the same hyper-parameters."""

from __future__ import annotations

from tensorwire.parameters import Hyper

from .arithmetic import Arithmetic


class SameHyper:
    """Compares the hyper-parameters of one optimizer.

    Args:
        looks: there is something to be compared: the worker computes several slices, or may.
    """

    def __init__(self, looks: bool) -> None:
        self._looks = looks
        self._first: tuple[Hyper, ...] = ()

    def check(self, turn: int, arithmetic: Arithmetic) -> None:
        """Raises RuntimeError if they differ from turn 0, or do not fit tables."""
        arithmetic.check_tables()
        hyper = arithmetic.hyper() if self._looks else ()
        if turn == 0:
            self._first = hyper
        elif hyper != self._first:
            raise RuntimeError(
                "the learning rate or another hyper-parameter was changed after slice "
                f"{turn} of those that this worker computes in turn. Step a scheduler once per "
                "epoch, or after the last slice of a step: 'if job.step_complete:'"
            )
