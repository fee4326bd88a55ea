"""Records steps of a real model, and the description of its store, for workers of `scaling.py`.

A process of its own, because the bench itself does not import torch; it returns the fields of
`scaling.Recording`. Of many steps the quickest are kept, in order, so that disturbances of the
machine are not replayed.
"""

from __future__ import annotations

import time
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch.nn import functional as F

from tensorwire.torch.kernels import ParameterKind, describe, kernel_of
from tensorwire_benchmarks.modes_tasks import task
from tensorwire_benchmarks.worker import serve

__all__ = ["Driver", "serve"]

_MODEL = "characters"
_WARM = 2
_TRIES = 4  # steps made for each step kept


def _record(batch: int, steps: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    exercise = task(_MODEL)
    network = exercise.build()
    names = [name for name, _ in network.named_parameters()]
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01)
    kinds = {
        ParameterKind(0, each.dtype, each.dim(), False, tuple(each.shape))
        for each in network.parameters()
    }
    text = describe(optimizer, kinds, None, False)
    kernel = kernel_of(text)
    ready: list[tuple[int, float]] = []
    for index, parameter in enumerate(network.parameters()):
        parameter.register_post_accumulate_grad_hook(
            lambda _, index=index: ready.append((index, time.perf_counter()))
        )
    inputs, labels = exercise.train
    found: list[dict[str, Any]] = []
    for step in range(_WARM + _TRIES * steps):
        rows = torch.arange(step * batch, (step + 1) * batch) % len(inputs)
        ready.clear()
        begin = time.perf_counter()
        loss = F.cross_entropy(network(inputs[rows]).flatten(0, -2), labels[rows].flatten())
        middle = time.perf_counter()
        loss.backward()
        end = time.perf_counter()
        optimizer.zero_grad()
        found.append(
            {
                "forward_s": middle - begin,
                "backward_s": end - middle,
                "ready": [(index, at - middle) for index, at in ready],
            }
        )
    made = found[_WARM:]
    quickest = sorted(made, key=lambda each: each["forward_s"] + each["backward_s"])[:steps]
    group = optimizer.param_groups[0]
    return {
        "model": f"{_MODEL}, batches of {batch}",
        "tensors": [
            (name, list(parameter.shape))
            for name, parameter in zip(names, network.parameters(), strict=True)
        ],
        "optimizer": text,
        "hyper_names": list(kernel.hyper),
        "hyper": [float(group[name]) for name in kernel.hyper],
        "scalars": list(kernel.scalars),
        "steps": [each for each in made if each in quickest],
    }


class Driver:
    """The driver of the recording process."""

    def __init__(self, link: Connection, options: dict[str, Any]) -> None:
        self._options = options

    def record(self) -> dict[str, Any]:
        """Makes steps as the options say; returns the fields of `scaling.Recording`."""
        return _record(**self._options)
