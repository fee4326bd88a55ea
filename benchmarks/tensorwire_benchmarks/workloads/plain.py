"""Layers in a row: AlexNet, VGGNet-16 and FCN-5, with ten outputs as in the paper.

AlexNet is TF-slim's alexnet_v2: no groups, and the first dense layer is a 5 × 5 convolution.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import nn

from .task import Task, images

_CLASSES = 10


class AlexNet(Task):
    """16 tensors, 176.42 MiB. Its first dense layer has 5 × 5 inputs per channel: 224 × 224."""

    def build(self) -> nn.Module:
        divisor = 32 if self.tiny else 1
        a, b, c, d = (n // divisor for n in (64, 192, 384, 256))
        wide = 4096 // divisor
        return nn.Sequential(
            nn.Conv2d(3, a, 11, stride=4), nn.ReLU(), nn.MaxPool2d(3, 2),
            nn.Conv2d(a, b, 5, padding=2), nn.ReLU(), nn.MaxPool2d(3, 2),
            nn.Conv2d(b, c, 3, padding=1), nn.ReLU(),
            nn.Conv2d(c, c, 3, padding=1), nn.ReLU(),
            nn.Conv2d(c, d, 3, padding=1), nn.ReLU(), nn.MaxPool2d(3, 2),
            nn.Conv2d(d, wide, 5), nn.ReLU(),
            nn.Conv2d(wide, wide, 1), nn.ReLU(),
            nn.Conv2d(wide, _CLASSES, 1), nn.Flatten(),
        )  # fmt: skip

    def batch(self, size: int, random: torch.Generator) -> tuple[Any, Any]:
        return images(size, 224, _CLASSES, random)


class Vgg16(Task):
    """32 tensors, 512.32 MiB. A pooling in front of the dense layers takes images of any size."""

    def build(self) -> nn.Module:
        divisor = 32 if self.tiny else 1
        layers: list[nn.Module] = []
        channels = 3
        for width, count in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
            for _ in range(count):
                layers += [nn.Conv2d(channels, width // divisor, 3, padding=1), nn.ReLU()]
                channels = width // divisor
            layers.append(nn.MaxPool2d(2))
        wide = 4096 // divisor
        return nn.Sequential(
            *layers, nn.AdaptiveAvgPool2d(7), nn.Flatten(),
            nn.Linear(channels * 7 * 7, wide), nn.ReLU(),
            nn.Linear(wide, wide), nn.ReLU(),
            nn.Linear(wide, _CLASSES),
        )  # fmt: skip

    def batch(self, size: int, random: torch.Generator) -> tuple[Any, Any]:
        return images(size, 64, _CLASSES, random)


class Fcn5(Task):
    """10 tensors, 204.47 MiB."""

    def build(self) -> nn.Module:
        wide = 64 if self.tiny else 4096
        layers: list[nn.Module] = []
        for a, b in itertools.pairwise((784, wide, wide, wide, wide, _CLASSES)):
            layers += [nn.Linear(a, b), nn.ReLU()]
        return nn.Sequential(*layers[:-1])

    def batch(self, size: int, random: torch.Generator) -> tuple[Any, Any]:
        return (
            torch.rand((size, 784), generator=random),
            torch.randint(_CLASSES, (size,), generator=random),
        )
