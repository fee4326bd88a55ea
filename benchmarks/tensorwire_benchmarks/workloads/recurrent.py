"""LSTM and GRU with a tensor per gate, as in the paper, and a bidirectional LSTM on torch's layer.

The paper's networks have W, U and b of every gate as tensors of their own: 14 tensors with 35.93
MiB and 11 with 27.92. torch's own layer joins the gates and has twice the offsets. The
bidirectional LSTM tags the words of sentences, whose lengths vary from batch to batch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import rnn

from .task import Task


class _Gate(nn.Module):
    """A gate, x W + h U + b; `begin` computes x W + b for all steps at once."""

    def __init__(self, inputs: int, cells: int) -> None:
        super().__init__()
        scale = cells**-0.5
        self.W = nn.Parameter((torch.rand(inputs, cells) * 2 - 1) * scale)
        self.U = nn.Parameter((torch.rand(cells, cells) * 2 - 1) * scale)
        self.b = nn.Parameter(torch.zeros(cells))

    def begin(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.W + self.b

    def forward(self, begun: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        return begun + h @ self.U


class _Recurrent(nn.Module):
    """A layer over all steps, and a linear layer over its last output."""

    def __init__(self, kind: str, cells: int, classes: int) -> None:
        super().__init__()
        self.kind = kind
        self.cells = cells
        gates = ("input", "forget", "cell", "output") if kind == "lstm" else ("r", "z", "n")
        self.gates = nn.ModuleDict({name: _Gate(cells, cells) for name in gates})
        self.last = nn.Linear(cells, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        begun = {name: gate.begin(x).unbind(1) for name, gate in self.gates.items()}
        h = c = x.new_zeros(x.shape[0], self.cells)
        for step in range(x.shape[1]):
            now = {name: parts[step] for name, parts in begun.items()}
            h, c = self._lstm(now, h, c) if self.kind == "lstm" else (self._gru(now, h), c)
        return self.last(h)

    def _lstm(
        self, now: dict[str, torch.Tensor], h: torch.Tensor, c: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        i, f, g, o = (gate(now[name], h) for name, gate in self.gates.items())
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        return torch.sigmoid(o) * torch.tanh(c), c

    def _gru(self, now: dict[str, torch.Tensor], h: torch.Tensor) -> torch.Tensor:
        r = torch.sigmoid(self.gates["r"](now["r"], h))
        z = torch.sigmoid(self.gates["z"](now["z"], h))
        n = torch.tanh(self.gates["n"](now["n"], r * h))
        return (1 - z) * n + z * h


class Lstm(Task):
    """The LSTM: sequences of 10 vectors with an element per cell, and one of 1000 labels each."""

    kind = "lstm"

    def __init__(self, tiny: bool) -> None:
        super().__init__(tiny)
        self.cells, self.classes = (16, 10) if tiny else (1024, 1000)
        self.shape = (10, self.cells)

    def build(self) -> nn.Module:
        return _Recurrent(self.kind, self.cells, self.classes)


class Gru(Lstm):
    """The GRU: three gates; the reset gate multiplies h before U does."""

    kind = "gru"


_NO_LABEL = -100  # cross_entropy ignores it


class _Tagger(nn.Module):
    def __init__(self, words: int, wide: int, cells: int, tags: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, wide)
        self.layers = nn.LSTM(wide, cells, num_layers=2, bidirectional=True, batch_first=True)
        self.tags = nn.Linear(2 * cells, tags)

    def forward(self, inputs: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        words, lengths = inputs
        packed = rnn.pack_padded_sequence(
            self.embedding(words), lengths, batch_first=True, enforce_sorted=False
        )
        output, _ = rnn.pad_packed_sequence(self.layers(packed)[0], batch_first=True)
        return self.tags(output)


class BiLstm(Task):
    """The bidirectional LSTM: sentences of 5 to 24 words, padded to the longest of the batch."""

    def __init__(self, tiny: bool) -> None:
        super().__init__(tiny)
        sizes = (100, 12, 8, 5) if tiny else (20_000, 300, 512, 45)
        self.words, self.wide, self.cells, self.tags = sizes

    def build(self) -> nn.Module:
        return _Tagger(self.words, self.wide, self.cells, self.tags)

    def batch(self, size: int, random: torch.Generator) -> tuple[Any, Any]:
        lengths = torch.randint(5, 25, (size,), generator=random)
        longest = int(lengths.max())
        words = torch.randint(self.words, (size, longest), generator=random)
        labels = torch.randint(self.tags, (size, longest), generator=random)
        labels[torch.arange(longest) >= lengths[:, None]] = _NO_LABEL
        return (words, lengths), labels

    def loss(self, output: Any, labels: Any) -> torch.Tensor:
        """Returns the cross-entropy over all words."""
        return F.cross_entropy(output.flatten(0, 1), labels.flatten(), ignore_index=_NO_LABEL)
