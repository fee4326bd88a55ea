"""GPT-2 small: 148 tensors, 124 million parameters; the output layer is the token embedding."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from .task import Task

_TOKENS = 32  # of a sequence; the table of positions has 1024


class _Attention(nn.Module):
    def __init__(self, wide: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.inputs = nn.Linear(wide, 3 * wide)
        self.output = nn.Linear(wide, wide)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, wide = x.shape
        q, k, v = (
            part.view(batch, tokens, self.heads, -1).transpose(1, 2)
            for part in self.inputs(x).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.output(mixed.transpose(1, 2).reshape(batch, tokens, wide))


class _Layer(nn.Module):
    def __init__(self, wide: int, heads: int) -> None:
        super().__init__()
        self.before_attention = nn.LayerNorm(wide)
        self.attention = _Attention(wide, heads)
        self.before_perceptron = nn.LayerNorm(wide)
        self.perceptron = nn.Sequential(
            nn.Linear(wide, 4 * wide), nn.GELU(approximate="tanh"), nn.Linear(4 * wide, wide)
        )

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
        positions = torch.arange(tokens.shape[1])
        x = self.layers(self.tokens(tokens) + self.positions(positions))
        return F.linear(self.last(x), self.tokens.weight)


class Gpt2Small(Task):
    """Predicts the next token. The token embedding's gradient is dense: it is the output layer."""

    def __init__(self, tiny: bool) -> None:
        super().__init__(tiny)
        self.words = 96 if tiny else 50_257

    def build(self) -> nn.Module:
        if self.tiny:
            return _Gpt(self.words, 64, wide=16, layers=2, heads=2)
        return _Gpt(self.words, 1024, wide=768, layers=12, heads=12)

    def batch(self, size: int, random: torch.Generator) -> tuple[Any, Any]:
        tokens = torch.randint(self.words, (size, _TOKENS + 1), generator=random)
        return tokens[:, :-1], tokens[:, 1:]

    def loss(self, output: Any, labels: Any) -> torch.Tensor:
        """Over all positions."""
        return F.cross_entropy(output.flatten(0, 1), labels.flatten())
