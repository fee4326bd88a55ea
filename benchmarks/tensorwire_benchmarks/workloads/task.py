"""What every workload has: a module, batches, a loss. One instance is one size of one workload."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F


class Task(ABC):
    """Made in the process that trains.

    Attributes:
        tiny: narrow layers, the same structure.
        looked_up: what the names of parameters begin with that are looked up by row.
    """

    looked_up: tuple[str, ...] = ()

    def __init__(self, tiny: bool) -> None:
        self.tiny = tiny

    @abstractmethod
    def build(self) -> nn.Module:
        """The module on torch's default device, random from torch's generator.

        Its forward takes the inputs of `batch` as one argument.
        """

    @abstractmethod
    def batch(self, size: int, random: torch.Generator) -> tuple[Any, Any]:
        """Inputs and labels of `size` samples."""

    def rows(self, inputs: Any) -> dict[str, torch.Tensor]:
        """Which rows of the parameters with sparse gradients a batch looks up, by their names.

        A row may be there several times.
        """
        del inputs
        return {}

    def loss(self, output: Any, labels: Any) -> torch.Tensor:
        """A scalar; every parameter has a part in it."""
        return F.cross_entropy(output, labels)


def images(
    size: int, pixels: int, classes: int, random: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Random images in three colours, and labels."""
    return (
        torch.rand((size, 3, pixels, pixels), generator=random),
        torch.randint(classes, (size,), generator=random),
    )
