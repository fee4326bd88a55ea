"""Inception-v3 as in TF-slim, with its auxiliary head and ten outputs: 196 tensors, 92.90 MiB.

94 convolutions, each with the offset of its BatchNorm and no scale; in the auxiliary head two more,
and a linear layer at the end of both heads. The auxiliary head needs 17 × 17 positions: 299 × 299.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from .task import Task, images

_CLASSES = 10
_AUXILIARY_WEIGHT = 0.4

Kernel = int | tuple[int, int]


class _Convolution(nn.Module):
    """Convolution, BatchNorm with an offset only, ReLU."""

    def __init__(
        self, a: int, b: int, kernel: Kernel = 1, stride: int = 1, padded: bool = True
    ) -> None:
        super().__init__()
        high, wide = (kernel, kernel) if isinstance(kernel, int) else kernel
        padding = (high // 2, wide // 2) if padded else 0
        self.convolution = nn.Conv2d(a, b, (high, wide), stride, padding, bias=False)
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
    """Its branches' outputs, one behind the other in the channels."""

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([branch(x) for branch in self.branches], 1)


def _row(a: int, *layers: tuple[int, Kernel]) -> nn.Sequential:
    found = []
    for b, kernel in layers:
        found.append(_Convolution(a, b, kernel))
        a = b
    return nn.Sequential(*found)


def _pooled(a: int, b: int) -> nn.Sequential:
    return nn.Sequential(nn.AvgPool2d(3, 1, padding=1, count_include_pad=False), _Convolution(a, b))


class _Inception(nn.Module):
    """Both heads' outputs. `divisor` makes all layers narrower."""

    def __init__(self, divisor: int) -> None:
        super().__init__()

        def n(channels: int) -> int:
            return channels // divisor

        def a_block(channels: int, pooled: int) -> nn.Module:  # 35 × 35
            return _Branches(
                _row(n(channels), (n(64), 1)),
                _row(n(channels), (n(48), 1), (n(64), 5)),
                _row(n(channels), (n(64), 1), (n(96), 3), (n(96), 3)),
                _pooled(n(channels), n(pooled)),
            )

        def b_block(c: int) -> nn.Module:  # 17 × 17
            across, down = (1, 7), (7, 1)
            return _Branches(
                _row(n(768), (n(192), 1)),
                _row(n(768), (n(c), 1), (n(c), across), (n(192), down)),
                _row(
                    n(768), (n(c), 1), (n(c), down), (n(c), across), (n(c), down), (n(192), across)
                ),
                _pooled(n(768), n(192)),
            )

        def c_block(channels: int) -> nn.Module:  # 8 × 8
            def split() -> nn.Module:
                return _Branches(
                    _Convolution(n(384), n(384), (1, 3)), _Convolution(n(384), n(384), (3, 1))
                )

            return _Branches(
                _row(n(channels), (n(320), 1)),
                nn.Sequential(_Convolution(n(channels), n(384)), split()),
                nn.Sequential(*_row(n(channels), (n(448), 1), (n(384), 3)), split()),
                _pooled(n(channels), n(192)),
            )

        self.stem = nn.Sequential(
            _Convolution(3, n(32), 3, 2, padded=False),
            _Convolution(n(32), n(32), 3, padded=False),
            _Convolution(n(32), n(64), 3),
            nn.MaxPool2d(3, 2),
            _Convolution(n(64), n(80), padded=False),
            _Convolution(n(80), n(192), 3, padded=False),
            nn.MaxPool2d(3, 2),
        )
        self.middle = nn.Sequential(
            a_block(192, 32), a_block(256, 64), a_block(288, 64),
            _Branches(
                _Convolution(n(288), n(384), 3, 2, padded=False),
                nn.Sequential(
                    *_row(n(288), (n(64), 1), (n(96), 3)),
                    _Convolution(n(96), n(96), 3, 2, padded=False),
                ),
                nn.MaxPool2d(3, 2),
            ),
            b_block(128), b_block(160), b_block(160), b_block(192),
        )  # fmt: skip
        self.top = nn.Sequential(
            _Branches(
                nn.Sequential(
                    _Convolution(n(768), n(192)),
                    _Convolution(n(192), n(320), 3, 2, padded=False),
                ),
                nn.Sequential(
                    *_row(n(768), (n(192), 1), (n(192), (1, 7)), (n(192), (7, 1))),
                    _Convolution(n(192), n(192), 3, 2, padded=False),
                ),
                nn.MaxPool2d(3, 2),
            ),
            c_block(1280), c_block(2048),
            nn.AdaptiveAvgPool2d(1), nn.Conv2d(n(2048), _CLASSES, 1), nn.Flatten(),
        )  # fmt: skip
        self.auxiliary = nn.Sequential(
            nn.AvgPool2d(5, 3),
            _Convolution(n(768), n(128)),
            _Convolution(n(128), n(768), 5, padded=False),
            nn.Conv2d(n(768), _CLASSES, 1), nn.Flatten(),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        middle = self.middle(self.stem(x))
        return self.top(middle), self.auxiliary(middle)


class InceptionV3(Task):
    """BatchNorm over the one position of the auxiliary head needs two images at least."""

    def build(self) -> nn.Module:
        return _Inception(16 if self.tiny else 1)

    def batch(self, size: int, random: torch.Generator) -> tuple[Any, Any]:
        return images(size, 299, _CLASSES, random)

    def loss(self, output: Any, labels: Any) -> torch.Tensor:
        """Of both heads, weighted as in TF-slim."""
        logits, auxiliary = output
        return F.cross_entropy(logits, labels) + _AUXILIARY_WEIGHT * F.cross_entropy(
            auxiliary, labels
        )
