"""A transformer layer whose perceptron is a mixture of experts, for each token the best two of 8.

How many tokens an expert gets follows from the data and differs from step to step. One without
tokens computes on none, and its gradient is zeros.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from .task import Task

_EXPERTS = 8
_CHOSEN = 2
_TOKENS = 32  # of a sequence
_HEADS = 4
_BALANCE = 0.01  # weight of what keeps the experts equally busy


class _Experts(nn.Module):
    """The weighted sum of the chosen experts' outputs, and how unequally they were chosen."""

    def __init__(self, wide: int) -> None:
        super().__init__()
        self.router = nn.Linear(wide, _EXPERTS, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(wide, 4 * wide), nn.GELU(), nn.Linear(4 * wide, wide))
            for _ in range(_EXPERTS)
        )

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        shares = self.router(x).softmax(-1)
        weights, choice = shares.topk(_CHOSEN, -1)
        weights = weights / weights.sum(-1, keepdim=True)
        output = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            tokens, place = torch.where(choice == index)
            part = expert(x[tokens]) * weights[tokens, place, None]
            output = output.index_add(0, tokens, part)
        used = F.one_hot(choice, _EXPERTS).float().mean((0, 1))
        return output, _EXPERTS * (used * shares.mean(0)).sum()


class _Block(nn.Module):
    def __init__(self, words: int, wide: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, wide)
        self.before_attention = nn.LayerNorm(wide)
        self.attention = nn.Linear(wide, 3 * wide)
        self.mixed = nn.Linear(wide, wide)
        self.before_experts = nn.LayerNorm(wide)
        self.experts = _Experts(wide)
        self.words = nn.Linear(wide, words)

    def forward(self, words: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.embedding(words)
        q, k, v = (
            part.unflatten(-1, (_HEADS, -1)).transpose(1, 2)
            for part in self.attention(self.before_attention(x)).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.mixed(mixed.transpose(1, 2).flatten(2))
        output, unequal = self.experts(self.before_experts(x).flatten(0, 1))
        return self.words(x + output.view_as(x)), unequal


class MixtureOfExperts(Task):
    """Predicts the next word."""

    looked_up = ("embedding.",)

    def __init__(self, tiny: bool) -> None:
        super().__init__(tiny)
        self.words, self.wide = (64, 16) if tiny else (4096, 512)

    def build(self) -> nn.Module:
        return _Block(self.words, self.wide)

    def batch(self, size: int, random: torch.Generator) -> tuple[Any, Any]:
        words = torch.randint(self.words, (size, _TOKENS + 1), generator=random)
        return words[:, :-1], words[:, 1:]

    def loss(self, output: Any, labels: Any) -> torch.Tensor:
        """Of the words, and a little for experts that are chosen too often."""
        words, unequal = output
        return F.cross_entropy(words.flatten(0, 1), labels.flatten()) + _BALANCE * unequal
