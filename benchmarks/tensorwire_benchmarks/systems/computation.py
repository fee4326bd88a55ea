"""Workers that only compute: forward and backward as beside any system, and then nothing.

What a step of another system takes longer is its communication.
"""

from __future__ import annotations

from typing import Any

from tensorwire_benchmarks.systems.base import Place, Trainer


class Computation(Trainer):
    """One worker; its parameters stay as they are."""

    def __init__(self, place: Place, module: Any) -> None:
        del place
        self.module = module

    def exchange(self) -> None:
        """There is none."""

    def zero_grad(self) -> None:
        for parameter in self.module.parameters():
            parameter.grad = None


trainer = Computation
