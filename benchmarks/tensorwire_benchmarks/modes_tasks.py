"""The tasks of `bench modes`: digits, characters and lines of text, each with test data.

All data is on the machine: the data of the examples, and the sources of Python's own library. It
depends only on the installed versions, so all systems and workers have the same.
"""

from __future__ import annotations

import importlib
import random
import re
import sys
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

_EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
_PACKAGES = (
    "asyncio", "email", "http", "importlib", "logging", "multiprocessing", "unittest", "xml"
)  # fmt: skip
_LINES, _UNUSED = 2400, 300  # of each package; so many lines before them are not used
_TOKENS, _BUCKETS, _WIDTH = 16, 4096, 32

Data = tuple[Any, Any]
"""Inputs and labels."""


@dataclass(frozen=True, slots=True)
class Exercise:
    """A model and its data.

    Attributes:
        build: makes the module, from torch's seed.
        train: the training data.
        part: the number of first samples of `train` on which the loss is measured.
        batch: samples per worker and step.
    """

    build: Callable[[], nn.Module]
    train: Data
    part: int
    batch: int

    def loss(self, module: Any, inputs: Any, labels: Any) -> Any:
        """Returns the mean cross-entropy; the last dimension of the outputs has the classes."""
        return F.cross_entropy(module(inputs).flatten(0, -2), labels.flatten())

    def batches(self, seed: int, rank: int, workers: int) -> Iterator[Data]:
        """Yields the batches of one worker without end; each epoch is shuffled anew."""
        inputs, labels = self.train
        shuffled = torch.Generator().manual_seed(seed)
        while True:
            order = torch.randperm(len(inputs), generator=shuffled)[rank::workers]
            for rows in order[: len(order) // self.batch * self.batch].split(self.batch):
                yield inputs[rows], labels[rows]

    def judge(self, module: nn.Module) -> float:
        """Returns the loss on a fixed part of the training data."""
        module.eval()
        with torch.no_grad():
            inputs, labels = self.train
            return float(self.loss(module, inputs[: self.part], labels[: self.part]))


def _example(name: str) -> Any:
    """Imports a module of the folder `examples`."""
    if str(_EXAMPLES) not in sys.path:
        sys.path.append(str(_EXAMPLES))
    return importlib.import_module(name)


def _digits() -> Exercise:
    example = _example("digits")
    return Exercise(example.Net, example.load()[0].tensors, part=512, batch=16)


def _characters() -> Exercise:
    example = _example("characters")
    data, alphabet = example.load(150_000)
    inputs, labels = data.tensors
    train = inputs[64:], labels[64:]
    return Exercise(lambda: example.Net(len(alphabet)), train, part=64, batch=8)


def _text() -> Exercise:
    found = {package: _lines(package) for package in _PACKAGES}
    train: list[tuple[list[int], int]] = []
    for label, package in enumerate(_PACKAGES):
        others: set[str] = set().union(*(found[each] for each in _PACKAGES if each != package))
        own = sorted(found[package] - others)
        random.Random(0).shuffle(own)
        train += [(_hashed(line), label) for line in own[_UNUSED : _UNUSED + _LINES]]
    random.Random(0).shuffle(train)  # so that a part has all labels
    data = torch.tensor([words for words, _ in train]), torch.tensor([label for _, label in train])

    def build() -> nn.Module:
        table = nn.EmbeddingBag(_BUCKETS, _WIDTH, mode="mean", padding_idx=0)
        return nn.Sequential(table, nn.Linear(_WIDTH, len(_PACKAGES)))

    return Exercise(build, data, part=2048, batch=32)


def _lines(package: str) -> set[str]:
    """Returns the lines of a package's sources that have three words or more."""
    folder = Path(str(importlib.import_module(package).__file__)).parent
    text = (path.read_text(errors="replace") for path in sorted(folder.rglob("*.py")))
    lines = {line.strip() for each in text for line in each.splitlines()}
    return {line for line in lines if len(re.findall(r"\w+", line)) >= 3}


def _hashed(line: str) -> list[int]:
    words = re.findall(r"\w+", line)[:_TOKENS]
    places = [1 + zlib.crc32(word.encode()) % (_BUCKETS - 1) for word in words]
    return places + [0] * (_TOKENS - len(places))


@cache
def task(name: str) -> Exercise:
    """Returns the exercise of a task, made once per process."""
    made: Callable[[], Exercise] = {"digits": _digits, "characters": _characters, "text": _text}[
        name
    ]
    return made()
