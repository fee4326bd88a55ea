"""What a model is to the bench, and the networks of `bench training`.

Knows no system. Inputs are random and fixed by a seed: a bench of communication needs their shape
only, and every system then computes the very same steps. torch is imported by whoever calls.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from tensorwire_benchmarks.traffic import FLOAT_BYTES, Traffic

_BATCHES = 4  # that a worker uses in turn


class Model(ABC):
    """What a team trains; picklable. Every process makes the same of it; all is float32.

    Attributes:
        name: as in the name of a case.
        batch: samples per worker and step.
        steps: measured by default.
        optimizer: the one that it needs, as in `make_optimizer`; None: whichever is asked for.
    """

    __slots__ = ()
    name: str
    batch: int
    steps: int
    optimizer: str | None

    @property
    @abstractmethod
    def size_bytes(self) -> int:
        """Bytes of the parameters; every step gives each of them a gradient."""

    @property
    def elements(self) -> int:
        """Number of parameters."""
        return self.size_bytes // FLOAT_BYTES

    def traffic(self, workers: int) -> Traffic:
        """What a step of so many workers must move and apply; here whole gradients."""
        return Traffic.dense(self.elements, workers)

    @abstractmethod
    def build(self, torch: Any) -> Any:
        """The module, with the same values in every process."""

    @abstractmethod
    def sample(self, torch: Any, random: Any) -> tuple[Any, Any]:
        """Inputs and labels of one batch, by this generator."""

    def batches(self, torch: Any, rank: int) -> list[tuple[Any, Any]]:
        """Inputs and labels that the worker uses in turn; workers have different ones."""
        random = torch.Generator().manual_seed(1000 + rank)
        return [self.sample(torch, random) for _ in range(_BATCHES)]

    def loss(self, torch: Any) -> Callable[[Any, Any], Any]:
        """Of the module's output and the labels; a scalar. Here cross entropy."""
        loss: Callable[[Any, Any], Any] = torch.nn.CrossEntropyLoss()
        return loss

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """For the settings of a report."""


M = TypeVar("M", bound=Model)


def named(name: str, models: Sequence[M], called: str = "model") -> M:
    """The one of that name.

    Raises:
        LookupError: there is none.
    """
    for candidate in models:
        if candidate.name == name:
            return candidate
    known = ", ".join(each.name for each in models)
    raise LookupError(f"no {called} {name!r}; known: {known}")


@dataclass(frozen=True, slots=True)
class Network(Model):
    """A float32 network: 3 × 3 convolutions with one pooling, then linear layers, ReLU between.

    Attributes:
        name: as in the name of a case.
        inputs: shape of one sample; channels, height, width where there are convolutions.
        channels: outputs of each convolution; empty for a network of linear layers.
        widths: outputs of each linear layer; the last is the number of classes.
        batch: samples per worker and step.
        steps: measured by default.
    """

    name: str
    inputs: tuple[int, ...]
    channels: tuple[int, ...]
    widths: tuple[int, ...]
    batch: int
    steps: int
    optimizer: str | None = None

    @property
    def features(self) -> int:
        """What the first linear layer takes."""
        if not self.channels:
            return math.prod(self.inputs)
        _, height, width = self.inputs
        return self.channels[-1] * (height // 2) * (width // 2)

    @property
    def size_bytes(self) -> int:
        """Bytes of the parameters, and of the gradients of one worker."""
        kernels = itertools.pairwise((self.inputs[0], *self.channels) if self.channels else ())
        layers = itertools.pairwise((self.features, *self.widths))
        elements = sum(9 * a * b + b for a, b in kernels) + sum(a * b + b for a, b in layers)
        return FLOAT_BYTES * elements

    def build(self, torch: Any) -> Any:
        """The module, with the same values in every process."""
        torch.manual_seed(1)
        layers: list[Any] = []
        for a, b in itertools.pairwise((self.inputs[0], *self.channels) if self.channels else ()):
            layers += [torch.nn.Conv2d(a, b, 3, padding=1), torch.nn.ReLU()]
        if self.channels:
            layers.append(torch.nn.MaxPool2d(2))
        layers.append(torch.nn.Flatten())
        for a, b in itertools.pairwise((self.features, *self.widths)):
            layers += [torch.nn.Linear(a, b), torch.nn.ReLU()]
        return torch.nn.Sequential(*layers[:-1])

    def sample(self, torch: Any, random: Any) -> tuple[Any, Any]:
        """Random samples, random labels."""
        return (
            torch.rand((self.batch, *self.inputs), generator=random),
            torch.randint(self.widths[-1], (self.batch,), generator=random),
        )

    def describe(self) -> dict[str, Any]:
        """For the settings of a report."""
        return dataclasses.asdict(self) | {"bytes": self.size_bytes}


MODELS = (
    Network("digits", (1, 8, 8), (16, 32), (64, 10), batch=32, steps=300),
    Network("mlp50", (784,), (), (2048, 2048, 2048, 1024, 1000), batch=32, steps=60),
    Network("mlp200", (784,), (), (4096, 4096, 4096, 3072, 1000), batch=32, steps=30),
)
"""The small net for scikit-learn's digits (150 KiB), and MLPs of 50 and 200 MiB."""
