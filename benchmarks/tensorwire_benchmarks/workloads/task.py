"""What every workload has: a module, batches, a loss. One instance is one size of one workload."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

_TOKENS = 32  # of a sequence


class Task(ABC):
    """Made in the process that trains.

    Attributes:
        tiny: narrow layers, the same structure.
        shape: of one sample.
        classes: of labels.
        looked_up: what the names of parameters begin with that are looked up by row.
    """

    shape: tuple[int, ...] = ()
    classes = 10
    looked_up: tuple[str, ...] = ()

    def __init__(self, tiny: bool) -> None:
        self.tiny = tiny

    @abstractmethod
    def build(self) -> nn.Module:
        """The module on torch's default device, random from torch's generator.

        Its forward takes the inputs of `batch` as one argument.
        """

    def batch(self, size: int, random: torch.Generator) -> tuple[Any, Any]:
        """Inputs and labels of `size` samples; here random numbers, and one label for each."""
        return (
            torch.rand((size, *self.shape), generator=random),
            torch.randint(self.classes, (size,), generator=random),
        )

    def rows(self, inputs: Any) -> dict[str, torch.Tensor]:
        """Which rows of the parameters with sparse gradients a batch looks up, by their names.

        A row may be there several times.
        """
        del inputs
        return {}

    def loss(self, output: Any, labels: Any) -> torch.Tensor:
        """A scalar; every parameter has a part in it."""
        return F.cross_entropy(output, labels)


class NextWord(Task):
    """Predicts the next of so many `words`, at all positions of a sequence."""

    words: int

    def batch(self, size: int, random: torch.Generator) -> tuple[Any, Any]:
        words = torch.randint(self.words, (size, _TOKENS + 1), generator=random)
        return words[:, :-1], words[:, 1:]

    def loss(self, output: Any, labels: Any) -> torch.Tensor:
        """Over all positions."""
        return F.cross_entropy(output.flatten(0, 1), labels.flatten())


def perceptron(*widths: int) -> nn.Sequential:
    """Linear layers of these widths, the inputs' first, with ReLU between."""
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise(widths):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*layers[:-1])
