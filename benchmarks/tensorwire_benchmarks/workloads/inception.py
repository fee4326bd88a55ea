"""Inception-v3 as in TF-slim, with its auxiliary head and ten outputs: 196 tensors, 92.90 MiB.

94 convolutions, each with a BatchNorm that has an offset and no scale; two more in the auxiliary
head, and a linear layer at the end of both heads. The auxiliary head needs 17 × 17 positions, so
images have 299 × 299 pixels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from .task import Task

_AUXILIARY_WEIGHT = 0.4

Row = Sequence[Any]
"""Layers: each a pooling module, a tuple (channels, kernel, stride), or a list of branches."""

_MAX, _AVERAGE = nn.MaxPool2d(3, 2), nn.AvgPool2d(3, 1, padding=1, count_include_pad=False)
_ACROSS, _DOWN = (1, 7), (7, 1)


def _a(pooled: int) -> list[Row]:  # 35 × 35
    return [[(64,)], [(48,), (64, 5)], [(64,), (96, 3), (96, 3)], [_AVERAGE, (pooled,)]]


def _b(c: int) -> list[Row]:  # 17 × 17
    return [
        [(192,)],
        [(c,), (c, _ACROSS), (192, _DOWN)],
        [(c,), (c, _DOWN), (c, _ACROSS), (c, _DOWN), (192, _ACROSS)],
        [_AVERAGE, (192,)],
    ]


_SPLIT: list[Row] = [[(384, (1, 3))], [(384, (3, 1))]]
_C: list[Row] = [
    [(320,)],
    [(384,), _SPLIT],
    [(448,), (384, 3), _SPLIT],
    [_AVERAGE, (192,)],
]  # 8 × 8

_STEM: Row = ((32, 3, 2), (32, 3, 1), (64, 3), _MAX, (80,), (192, 3, 1), _MAX)
_MIDDLE: Row = (
    _a(32), _a(64), _a(64),
    [[(384, 3, 2)], [(64,), (96, 3), (96, 3, 2)], [_MAX]],
    _b(128), _b(160), _b(160), _b(192),
)  # fmt: skip
_TOP: Row = (
    [[(192,), (320, 3, 2)], [(192,), (192, _ACROSS), (192, _DOWN), (192, 3, 2)], [_MAX]],
    _C, _C, nn.AdaptiveAvgPool2d(1),
)  # fmt: skip
_AUXILIARY: Row = (nn.AvgPool2d(5, 3), (128,), (768, 5, 1))


class _Convolution(nn.Module):
    """A convolution, BatchNorm with an offset only, ReLU; padded if no stride is given."""

    def __init__(
        self, a: int, b: int, kernel: int | tuple[int, int] = 1, stride: int | None = None
    ) -> None:
        super().__init__()
        high, wide = (kernel, kernel) if isinstance(kernel, int) else kernel
        padding = (high // 2, wide // 2) if stride is None else 0
        self.convolution = nn.Conv2d(a, b, (high, wide), stride or 1, padding, bias=False)
        self.beta = nn.Parameter(torch.zeros(b))
        self.register_buffer("mean", torch.zeros(b))
        self.register_buffer("variance", torch.ones(b))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.batch_norm(
            self.convolution(x), self.mean, self.variance, None, self.beta, self.training,
            momentum=0.003, eps=0.001,
        )  # fmt: skip
        return F.relu(x)


class _Branches(nn.Module):
    """Branches whose outputs are concatenated along the channels."""

    def __init__(self, branches: Sequence[nn.Module]) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([branch(x) for branch in self.branches], 1)


def _row(a: int, layers: Row, divisor: int) -> tuple[nn.Sequential, int]:
    """Returns layers on `a` channels, narrower by `divisor`, and the number of output channels."""
    found: list[nn.Module] = []
    for layer in layers:
        if isinstance(layer, nn.Module):
            found.append(layer)
        elif isinstance(layer, list):
            rows = [_row(a, row, divisor) for row in layer]
            found.append(_Branches([row for row, _ in rows]))
            a = sum(b for _, b in rows)
        else:
            b, *how = layer
            found.append(_Convolution(a, b // divisor, *how))
            a = b // divisor
    return nn.Sequential(*found), a


class _Inception(nn.Module):
    """A module that returns the outputs of both heads."""

    def __init__(self, divisor: int, classes: int) -> None:
        super().__init__()
        self.stem, stem = _row(3, _STEM, divisor)
        self.middle, middle = _row(stem, _MIDDLE, divisor)
        top, wide = _row(middle, _TOP, divisor)
        self.top = nn.Sequential(top, nn.Conv2d(wide, classes, 1), nn.Flatten())
        auxiliary, wide = _row(middle, _AUXILIARY, divisor)
        self.auxiliary = nn.Sequential(auxiliary, nn.Conv2d(wide, classes, 1), nn.Flatten())

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        middle = self.middle(self.stem(x))
        return self.top(middle), self.auxiliary(middle)


class InceptionV3(Task):
    """The task of Inception-v3; the auxiliary head's BatchNorm needs a batch of two or more."""

    shape = (3, 299, 299)

    def build(self) -> nn.Module:
        return _Inception(16 if self.tiny else 1, self.classes)

    def loss(self, output: Any, labels: Any) -> torch.Tensor:
        """Returns the cross-entropy of both heads, weighted as in TF-slim."""
        logits, auxiliary = (F.cross_entropy(each, labels) for each in output)
        return logits + _AUXILIARY_WEIGHT * auxiliary
