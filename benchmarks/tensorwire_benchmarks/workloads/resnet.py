"""ResNet-50 with BatchNorm and 1000 outputs: 161 tensors, 97.49 MiB; images of any size."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from .task import Task, images

_WIDER = 4  # a block's outputs by its inner channels


def _convolution(a: int, b: int, kernel: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(a, b, kernel, stride, kernel // 2, bias=False), nn.BatchNorm2d(b)
    )


class _Bottleneck(nn.Module):
    def __init__(self, a: int, inner: int, stride: int) -> None:
        super().__init__()
        b = _WIDER * inner
        self.layers = nn.Sequential(
            _convolution(a, inner, 1), nn.ReLU(),
            _convolution(inner, inner, 3, stride), nn.ReLU(),
            _convolution(inner, b, 1),
        )  # fmt: skip
        changes = a != b or stride != 1
        self.shortcut = _convolution(a, b, 1, stride) if changes else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.layers(x) + self.shortcut(x))


class ResNet50(Task):
    """Four groups of 3, 4, 6 and 3 blocks."""

    def __init__(self, tiny: bool) -> None:
        super().__init__(tiny)
        self.classes = 10 if tiny else 1000

    def build(self) -> nn.Module:
        inner = 4 if self.tiny else 64
        channels = inner
        layers: list[nn.Module] = [
            _convolution(3, channels, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, padding=1)
        ]  # fmt: skip
        for group, blocks in enumerate((3, 4, 6, 3)):
            for block in range(blocks):
                stride = 2 if group and not block else 1
                layers.append(_Bottleneck(channels, inner, stride))
                channels = _WIDER * inner
            inner *= 2
        return nn.Sequential(
            *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, self.classes)
        )

    def batch(self, size: int, random: torch.Generator) -> tuple[Any, Any]:
        return images(size, 64, self.classes, random)
