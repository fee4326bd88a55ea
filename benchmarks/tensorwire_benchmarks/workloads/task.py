"""The base of every workload's module, batches and loss; an instance is one size of a workload."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

_TOKENS = 32  # of a sequence


class Task(ABC):
    """A task, made in the process that trains.

    Attributes:
        tiny: whether layers are narrow; the structure is the same.
        shape: the shape of a sample.
        classes: the number of different labels.
    """

    shape: tuple[int, ...] = ()
    classes = 10

    def __init__(self, tiny: bool) -> None:
        self.tiny = tiny

    @abstractmethod
    def build(self) -> nn.Module:
        """Makes the module on torch's default device, with values from torch's generator.

        Its forward takes the inputs of `batch` as one argument.
        """

    def batch(self, size: int, random: torch.Generator) -> tuple[Any, Any]:
        """Returns inputs and labels of `size` samples: random numbers, and one label for each."""
        return (
            torch.rand((size, *self.shape), generator=random),
            torch.randint(self.classes, (size,), generator=random),
        )

    def rows(self, inputs: Any) -> dict[str, torch.Tensor]:
        """Returns, by names of parameters with sparse gradients, the rows that a batch looks up.

        A row may occur several times.
        """
        del inputs
        return {}

    def loss(self, output: Any, labels: Any) -> torch.Tensor:
        """Returns a scalar loss that depends on every parameter."""
        return F.cross_entropy(output, labels)


class NextWord(Task):
    """A task that predicts the next word at all positions, from a vocabulary of `words`."""

    words: int

    def batch(self, size: int, random: torch.Generator) -> tuple[Any, Any]:
        words = torch.randint(self.words, (size, _TOKENS + 1), generator=random)
        return words[:, :-1], words[:, 1:]

    def loss(self, output: Any, labels: Any) -> torch.Tensor:
        """Returns the cross-entropy over all positions."""
        return F.cross_entropy(output.flatten(0, 1), labels.flatten())


def perceptron(*widths: int) -> nn.Sequential:
    """Makes linear layers of these widths, the inputs' first, with ReLU between."""
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise(widths):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*layers[:-1])
