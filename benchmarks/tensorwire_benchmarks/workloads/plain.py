"""Sequential networks: AlexNet, VGGNet-16 and FCN-5 with ten outputs as in the paper, and others.

AlexNet is TF-slim's alexnet_v2: no groups, and the first dense layer is a 5 × 5 convolution.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from .task import Task, perceptron


class AlexNet(Task):
    """AlexNet: 16 tensors, 176.42 MiB; the first dense layer needs images of 224 × 224."""

    shape = (3, 224, 224)

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
            nn.Conv2d(wide, self.classes, 1), nn.Flatten(),
        )  # fmt: skip


class Vgg16(Task):
    """VGGNet-16: 32 tensors, 512.32 MiB; the last pooling allows images of any size."""

    shape = (3, 64, 64)

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
        dense = perceptron(channels * 7 * 7, wide, wide, self.classes)
        return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(7), nn.Flatten(), *dense)


class Perceptron(Task):
    """Linear layers of these widths, the inputs' first."""

    def __init__(self, tiny: bool, inputs: int, *widths: int) -> None:
        super().__init__(tiny)
        self.shape, self.widths, self.classes = (inputs,), widths, widths[-1]

    def build(self) -> nn.Module:
        return perceptron(*self.shape, *self.widths)


class Fcn5(Perceptron):
    """FCN-5: 10 tensors, 204.47 MiB."""

    def __init__(self, tiny: bool) -> None:
        wide = 64 if tiny else 4096
        super().__init__(tiny, 784, wide, wide, wide, wide, 10)


class Convolutions(Task):
    """3 × 3 convolutions with ReLU and these channels, a pooling, then linear layers."""

    def __init__(
        self, tiny: bool, shape: tuple[int, ...], channels: tuple[int, ...], widths: tuple[int, ...]
    ) -> None:
        super().__init__(tiny)
        self.shape, self.channels, self.widths, self.classes = shape, channels, widths, widths[-1]

    def build(self) -> nn.Module:
        a, high, wide = self.shape
        layers: list[nn.Module] = []
        for b in self.channels:
            layers += [nn.Conv2d(a, b, 3, padding=1), nn.ReLU()]
            a = b
        features = a * (high // 2) * (wide // 2)
        dense = perceptron(features, *self.widths)
        return nn.Sequential(*layers, nn.MaxPool2d(2), nn.Flatten(), *dense)


def _convolution(a: int, b: int, kernel: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(a, b, kernel, stride, kernel // 2, bias=False), nn.BatchNorm2d(b)
    )


class _Residual(nn.Module):
    """A residual block: adds x, projected if the shape changes, to the layers' output."""

    def __init__(self, a: int, b: int, stride: int, layers: nn.Module) -> None:
        super().__init__()
        self.layers = layers
        changes = a != b or stride != 1
        self.shortcut = _convolution(a, b, 1, stride) if changes else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.layers(x) + self.shortcut(x))


class ResNet18(Task):
    """ResNet-18: 62 tensors, 44.59 MiB, four groups of 2 blocks; images of any size."""

    shape = (3, 64, 64)
    blocks = 2, 2, 2, 2
    wider = 1  # a block's outputs, per inner channel

    def __init__(self, tiny: bool) -> None:
        super().__init__(tiny)
        self.classes = 10 if tiny else 1000

    def layers(self, a: int, inner: int, stride: int) -> nn.Module:
        """Returns the layers of a block with `a` input channels."""
        return nn.Sequential(
            _convolution(a, inner, 3, stride), nn.ReLU(), _convolution(inner, inner, 3)
        )

    def build(self) -> nn.Module:
        channels = inner = 4 if self.tiny else 64
        layers: list[nn.Module] = [
            _convolution(3, channels, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, padding=1)
        ]  # fmt: skip
        for group, blocks in enumerate(self.blocks):
            for block in range(blocks):
                stride = 2 if group and not block else 1
                a, channels = channels, self.wider * inner
                layers.append(_Residual(a, channels, stride, self.layers(a, inner, stride)))
            inner *= 2
        return nn.Sequential(
            *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, self.classes)
        )


class ResNet50(ResNet18):
    """ResNet-50: 161 tensors, 97.49 MiB, four groups of 3, 4, 6 and 3 blocks."""

    blocks = 3, 4, 6, 3
    wider = 4

    def layers(self, a: int, inner: int, stride: int) -> nn.Module:
        return nn.Sequential(
            _convolution(a, inner, 1), nn.ReLU(),
            _convolution(inner, inner, 3, stride), nn.ReLU(),
            _convolution(inner, self.wider * inner, 1),
        )  # fmt: skip
