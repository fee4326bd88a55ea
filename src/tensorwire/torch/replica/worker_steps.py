"""Makes steps in worker 0 with averaged gradients, where servers cannot make them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from tensorwire.parameters import Store

from ..random_numbers import kept_random_state, seed_all, seed_of
from ..session import present_session
from ..views import tensor_at
from .arithmetic import Arithmetic


class WorkerSteps:
    """The steps of one optimizer, in worker 0's process.

    Args:
        store: has the averages after each version.
        parameters: of the store.
        trained: indices of the parameters that the optimizer trains.
        arithmetic: makes a step.
    """

    def __init__(
        self,
        store: Store,
        parameters: Sequence[torch.Tensor],
        trained: Sequence[int],
        arithmetic: Arithmetic,
    ) -> None:
        self._store, self._parameters, self._trained = store, parameters, trained
        self._arithmetic = arithmetic
        self._counts = np.zeros(len(store.layout.places), np.int64)

    def step(self) -> None:
        """Makes a step; each gradient is the average meanwhile, and None where no worker has one.

        Parameters keep their order in memory, and the script's random numbers stay the same as in
        the other workers.

        Raises:
            RuntimeError: the step has changed a parameter's shape or dtype.
        """
        data = np.empty(self._store.own.size_bytes, np.uint8)
        self._store.read_reduced(data)
        counts = self._store.counts()
        present, self._counts = counts > self._counts, counts
        gradients = {i: self._parameters[i].grad for i in self._trained}
        before = {i: self._parameters[i].detach() for i in self._trained}
        try:
            for i, parameter in ((i, self._parameters[i]) for i in self._trained):
                average = data[self._store.own.place(i)]
                value = tensor_at(average, parameter).to(parameter.device) if present[i] else None
                parameter.grad = value
            with kept_random_state():
                session = present_session()
                drawn = None if session is None else session.step_seed
                if drawn is None:  # no step of a loader
                    drawn = int(torch.randint(1 << 62, (), device="cpu"))
                seed_all(seed_of(drawn, self._store.version))
                self._arithmetic.step()
            for i, old in before.items():
                _take_order(self._parameters[i], old)
        finally:
            for i, gradient in gradients.items():
                self._parameters[i].grad = gradient


def _take_order(parameter: torch.Tensor, old: torch.Tensor) -> None:
    """Lets a parameter have its values in the order in memory that it had before."""
    now = parameter.detach()
    if now.shape != old.shape or now.dtype != old.dtype:
        parameter.grad, parameter.data = None, old
        raise RuntimeError(
            f"step() of the optimizer has made a parameter of the shape {tuple(old.shape)} and "
            f"{old.dtype} one of {tuple(now.shape)} and {now.dtype}; other workers cannot follow"
        )
    if now.stride() != old.stride():
        kept = torch.empty_strided(old.size(), old.stride(), dtype=old.dtype, device=old.device)
        parameter.data = kept.copy_(now)
