"""The list of workloads, for the command line and the bench before torch is imported.

The first six of `WORKLOADS` are the models of "RPC Considered Harmful" (arXiv 1805.08430), with its
numbers of tensors and its bytes. The others are larger or more diverse. Every parameter is real;
images and sequences are as short as the architecture allows, so that a step runs on one core.
Dropout is left out.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

from tensorwire.errors import UnavailableError
from tensorwire_benchmarks.traffic import FLOAT_BYTES, TableLookups, Traffic

_PACKAGE = "tensorwire_benchmarks.workloads"
_BATCHES = 4  # batches that a worker uses in turn
SMALL_BYTES, LARGE_BYTES = 1 << 10, 1 << 20


class ModelTensor(NamedTuple):
    """A parameter of a workload.

    Attributes:
        sparse: whether its gradient is a sparse tensor of the rows that a batch looks up.
    """

    name: str
    shape: tuple[int, ...]
    size_bytes: int
    sparse: bool


@dataclass(frozen=True, slots=True)
class Workload:
    """A model with its batches and its loss, made by its `Task`; all is float32.

    Picklable; all values are the same in every process. Inputs are random and fixed by a seed: a
    bench of communication needs only their shape, and every system computes the same steps. The
    caller imports torch.

    Attributes:
        name: the name in cases and on the command line.
        task: its Task, "module:class".
        about: architecture and inputs, for people.
        batch: samples per worker and step.
        steps: steps that are measured by default.
        optimizer: the optimizer that it needs, as in `make_optimizer`; None: any.
        tiny: whether layers are narrow, for tests.
        arguments: further arguments of its Task.
    """

    name: str
    task: str
    about: str
    batch: int
    steps: int
    optimizer: str | None = None
    tiny: bool = False
    arguments: tuple[Any, ...] = ()

    def _make_task(self) -> Any:
        module, _, name = self.task.partition(":")
        task = getattr(importlib.import_module(f"{_PACKAGE}.{module}"), name)
        return task(self.tiny, *self.arguments)

    def reduced(self) -> Workload:
        """Returns the tiny workload of the same structure."""
        return replace(self, tiny=True)

    @property
    def size_bytes(self) -> int:
        """Bytes of the parameters; every step gives each of them a gradient."""
        return sum(tensor.size_bytes for tensor in self.tensors())

    def tensors(self) -> tuple[ModelTensor, ...]:
        """Returns all parameters in the order of `module.parameters()`, without their memory.

        Raises:
            UnavailableError: torch is not installed.
        """
        return _tensors(self)

    def traffic(self, workers: int) -> Traffic:
        """Returns the bytes and elements that a step must move and apply.

        Raises:
            UnavailableError: torch is not installed.
        """
        return _traffic(self, workers)

    def build(self, torch: Any) -> Any:
        """Makes the module, with the same values in every process."""
        torch.manual_seed(1)
        return self._make_task().build()

    def sample(self, random: Any) -> tuple[Any, Any]:
        """Returns inputs and labels of one batch, drawn from this generator."""
        found: tuple[Any, Any] = self._make_task().batch(self.batch, random)
        return found

    def batches(self, torch: Any, rank: int) -> list[tuple[Any, Any]]:
        """Returns the batches that a worker uses in turn; workers have different ones."""
        random = torch.Generator().manual_seed(1000 + rank)
        return [self.sample(random) for _ in range(_BATCHES)]

    def loss(self, torch: Any) -> Callable[[Any, Any], Any]:
        """Returns a function from the module's output and the labels to a scalar loss."""
        del torch
        loss: Callable[[Any, Any], Any] = self._make_task().loss
        return loss

    def describe(self) -> dict[str, Any]:
        """Returns the description of the workload for the settings of a report."""
        return {
            "name": self.name,
            "about": self.about,
            "tiny": self.tiny,
            "batch": self.batch,
            "steps": self.steps,
            "optimizer": self.optimizer,
            "bytes_of_gradients": self.traffic(1).up_bytes,
            **summary(self.tensors())._asdict(),
        }


def _torch() -> Any:
    try:
        return importlib.import_module("torch")
    except ModuleNotFoundError as error:
        raise UnavailableError(
            "the workloads need torch: pip install 'tensorwire[bench]'"
        ) from error


@cache
def _tensors(workload: Workload) -> tuple[ModelTensor, ...]:
    torch = _torch()
    task = workload._make_task()
    with torch.device("meta"):
        module = task.build()
    sparse = {
        f"{name}.weight"
        for name, part in module.named_modules()
        if isinstance(part, torch.nn.Embedding) and part.sparse
    }
    return tuple(
        ModelTensor(
            name,
            tuple(p.shape),
            p.numel() * p.element_size(),
            name in sparse,
        )
        for name, p in module.named_parameters()
    )


@cache
def _traffic(workload: Workload, workers: int) -> Traffic:
    dense = sum(t.size_bytes for t in workload.tensors() if not t.sparse) // FLOAT_BYTES
    tables = [t for t in workload.tensors() if t.sparse]
    if not tables:
        return Traffic.dense(dense, workers)
    torch = _torch()
    task = workload._make_task()
    batches = [workload.batches(torch, rank) for rank in range(workers)]
    lookups = []
    for step in zip(*batches, strict=True):  # all workers use their n-th batch in the same step
        rows = [task.rows(inputs) for inputs, _ in step]
        for table in tables:
            unique = [mine[table.name].unique() for mine in rows]
            counts = torch.cat(unique).unique(return_counts=True)[1]
            by_workers = counts.bincount(minlength=workers + 1)[1:].tolist()
            lookups.append(TableLookups(table.shape[1], by_workers))
    return Traffic.of_rows(dense, workers, lookups, len(batches[0]))


class Summary(NamedTuple):
    """The sizes of tensors; small is below 1 KiB, large 1 MiB or more, as in TF-gRPC-Bench."""

    tensors: int
    bytes: int
    small: int
    medium: int
    large: int


def summary(tensors: Sequence[ModelTensor]) -> Summary:
    """Returns the summary of a workload's tensors."""
    sizes = [tensor.size_bytes for tensor in tensors]
    large = sum(size >= LARGE_BYTES for size in sizes)
    small = sum(size < SMALL_BYTES for size in sizes)
    return Summary(len(sizes), sum(sizes), small, len(sizes) - small - large, large)


WORKLOADS = (
    Workload("alexnet", "plain:AlexNet", "5 convolutions, 3 dense layers; 224 × 224", 2, 20),
    Workload("inception-v3", "inception:InceptionV3", "94 convolutions; 299 × 299", 2, 20),
    Workload("vgg16", "plain:Vgg16", "13 convolutions, 3 dense layers; 64 × 64", 2, 12),
    Workload("lstm", "recurrent:Lstm", "a layer of 1024 cells, a tensor per gate; 10 steps", 4, 30),
    Workload("gru", "recurrent:Gru", "a layer of 1024 cells, a tensor per gate; 10 steps", 4, 30),
    Workload("fcn5", "plain:Fcn5", "5 dense layers; 784 inputs", 4, 30),
    Workload("resnet50", "plain:ResNet50", "53 convolutions with BatchNorm; 64 × 64", 4, 20),
    Workload("gpt2-small", "transformer:Gpt2Small", "12 transformer layers; 32 tokens", 1, 12),
    Workload(
        "dlrm",
        "dlrm:Dlrm",
        "26 embedding tables with sparse gradients, 2 perceptrons; SGD without momentum",
        128,
        30,
        "plain-sgd",
    ),
    Workload("dlrm-dense", "dlrm:DlrmDense", "the same with dense gradients", 128, 30),
    Workload("moe", "transformer:MixtureOfExperts", "8 experts, 2 for each of 32 tokens", 4, 30),
    Workload("bilstm", "recurrent:BiLstm", "2 layers, both ways; 5 to 24 words", 4, 20),
)
"""All workloads, the paper's models first and in its order."""

DLRM_ADAGRAD = replace(
    next(each for each in WORKLOADS if each.name == "dlrm"),
    name="dlrm-adagrad",
    about="26 embedding tables with sparse gradients, 2 perceptrons; Adagrad",
    optimizer="adagrad",
)


MODELS = (
    Workload(
        "digits", "plain:Convolutions", "2 convolutions, 2 dense layers; 8 × 8", 32, 300,
        arguments=((1, 8, 8), (16, 32), (64, 10)),
    ),
    Workload(
        "mlp50", "plain:Perceptron", "5 dense layers; 784 inputs", 32, 60,
        arguments=(784, 2048, 2048, 2048, 1024, 1000),
    ),
    Workload(
        "mlp200", "plain:Perceptron", "5 dense layers; 784 inputs", 32, 30,
        arguments=(784, 4096, 4096, 4096, 3072, 1000),
    ),
)  # fmt: skip
"""The models of `bench training`: a net for scikit-learn's digits (150 KiB), 50 and 200 MiB."""

LIBRARY_MODELS = (
    replace(MODELS[0], steps=960),
    Workload("resnet18", "plain:ResNet18", "20 convolutions with BatchNorm; 64 × 64", 4, 72),
    replace(
        next(each for each in WORKLOADS if each.name == "gpt2-small"), steps=24, optimizer="adamw"
    ),
)
"""The models that other libraries' loops train in `bench parameters`."""


def named(name: str, models: Sequence[Workload], called: str = "model") -> Workload:
    """Returns the model of that name.

    Raises:
        LookupError: there is none.
    """
    for candidate in models:
        if candidate.name == name:
            return candidate
    known = ", ".join(each.name for each in models)
    raise LookupError(f"no {called} {name!r}; known: {known}")


def workload(name: str) -> Workload:
    """Returns the workload of that name.

    Raises:
        LookupError: there is none.
    """
    return named(name, WORKLOADS, "workload")
