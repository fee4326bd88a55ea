"""Transformers that predict the next word: GPT-2 small, and a mixture of experts.

GPT-2 small has 148 tensors and 124 million parameters; its output layer is the token embedding.
The other is a layer whose perceptron is a mixture of 8 experts, the best two for each token. The
number of an expert's tokens depends on the data and differs from step to step. The gradient of an
expert without tokens is zeros.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from .task import NextWord

_EXPERTS = 8
_CHOSEN = 2
_BALANCE = 0.01  # weight of the loss that keeps the experts equally busy


class _Attention(nn.Module):
    def __init__(self, wide: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.inputs = nn.Linear(wide, 3 * wide)
        self.output = nn.Linear(wide, wide)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.inputs(x).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.output(mixed.transpose(1, 2).flatten(2))


def _perceptron(wide: int, gelu: str) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(wide, 4 * wide), nn.GELU(approximate=gelu), nn.Linear(4 * wide, wide)
    )


class _Layer(nn.Module):
    def __init__(self, wide: int, heads: int) -> None:
        super().__init__()
        self.before_attention = nn.LayerNorm(wide)
        self.attention = _Attention(wide, heads)
        self.before_perceptron = nn.LayerNorm(wide)
        self.perceptron = _perceptron(wide, "tanh")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.before_attention(x))
        return x + self.perceptron(self.before_perceptron(x))


class _Gpt(nn.Module):
    def __init__(self, words: int, positions: int, wide: int, layers: int, heads: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(words, wide)
        self.positions = nn.Embedding(positions, wide)
        for table in (self.tokens, self.positions):
            nn.init.normal_(table.weight, std=0.02)
        self.layers = nn.Sequential(*(_Layer(wide, heads) for _ in range(layers)))
        self.last = nn.LayerNorm(wide)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.layers(self.tokens(tokens) + self.positions(positions))
        return F.linear(self.last(x), self.tokens.weight)


class Gpt2Small(NextWord):
    """GPT-2 small; the token embedding's gradient is dense, as it is also the output layer."""

    def __init__(self, tiny: bool) -> None:
        super().__init__(tiny)
        self.words = 96 if tiny else 50_257

    def build(self) -> nn.Module:
        if self.tiny:
            return _Gpt(self.words, 64, wide=16, layers=2, heads=2)
        return _Gpt(self.words, 1024, wide=768, layers=12, heads=12)


class _Experts(nn.Module):
    """A module that returns the weighted sum of the chosen experts' outputs, and the imbalance."""

    def __init__(self, wide: int) -> None:
        super().__init__()
        self.router = nn.Linear(wide, _EXPERTS, bias=False)
        self.experts = nn.ModuleList(_perceptron(wide, "none") for _ in range(_EXPERTS))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        flat = x.flatten(0, 1)
        shares = self.router(flat).softmax(-1)
        weights, choice = shares.topk(_CHOSEN, -1)
        weights = weights / weights.sum(-1, keepdim=True)
        output = torch.zeros_like(flat)
        for index, expert in enumerate(self.experts):
            tokens, place = torch.where(choice == index)
            part = expert(flat[tokens]) * weights[tokens, place, None]
            output = output.index_add(0, tokens, part)
        used = F.one_hot(choice, _EXPERTS).float().mean((0, 1))
        return output.view_as(x), _EXPERTS * (used * shares.mean(0)).sum()


class _Mixture(nn.Module):
    def __init__(self, words: int, wide: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, wide)
        self.before_attention = nn.LayerNorm(wide)
        self.attention = _Attention(wide, 4)
        self.before_experts = nn.LayerNorm(wide)
        self.experts = _Experts(wide)
        self.words = nn.Linear(wide, words)

    def forward(self, words: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.embedding(words)
        x = x + self.attention(self.before_attention(x))
        output, unequal = self.experts(self.before_experts(x))
        return self.words(x + output), unequal


class MixtureOfExperts(NextWord):
    """A transformer layer with a mixture of experts."""

    def __init__(self, tiny: bool) -> None:
        super().__init__(tiny)
        self.words, self.wide = (64, 16) if tiny else (4096, 512)

    def build(self) -> nn.Module:
        return _Mixture(self.words, self.wide)

    def loss(self, output: Any, labels: Any) -> torch.Tensor:
        """Returns the loss of the words, and a little for experts that are chosen too often."""
        words, unequal = output
        return super().loss(words, labels) + _BALANCE * unequal
