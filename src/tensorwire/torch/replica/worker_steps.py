"""Steps that worker 0 makes with the averaged gradients, where servers cannot make them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from tensorwire.parameters import Store

from ..views import tensor_at
from .arithmetic import Arithmetic


class WorkerSteps:
    """Of one optimizer, in worker 0's process.

    Args:
        store: has the averages after each version.
        parameters: of the store.
        trained: indices of those that the optimizer trains.
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
        """Each gradient is the average meanwhile, and None where no worker has one."""
        data = np.empty(self._store.own.size_bytes, np.uint8)
        self._store.read_reduced(data)
        counts = self._store.counts()
        present, self._counts = counts > self._counts, counts
        gradients = {i: self._parameters[i].grad for i in self._trained}
        try:
            for i, parameter in ((i, self._parameters[i]) for i in self._trained):
                average = data[self._store.own.place(i)]
                parameter.grad = tensor_at(average, parameter) if present[i] else None
            self._arithmetic.step()
        finally:
            for i, gradient in gradients.items():
                self._parameters[i].grad = gradient
