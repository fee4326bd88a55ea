"""DLRM (Naumov et al., 2019): embedding tables and perceptrons that predict a click.

The 26 tables have as many rows as in Criteo's Kaggle data set, at most 40,000, of 64 elements. A
batch of 128 looks up at most 128 rows of each. Gradients of the tables are sparse: these rows and
their indices. The dense twin has the same tables, and gradients whose other rows are zeros.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from .task import Task, perceptron

_ROWS = (
    1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194, 27, 14992,
    5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572,
)  # fmt: skip
_NUMBERS = 13  # inputs that are not categories


class _Model(nn.Module):
    def __init__(self, rows: list[int], wide: int, inner: int, sparse: bool) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(n, wide, sparse=sparse) for n in rows)
        for table in self.tables:
            nn.init.uniform_(table.weight, -0.05, 0.05)
        self.bottom = perceptron(_NUMBERS, 2 * inner, inner, wide)
        vectors = len(rows) + 1
        self.top = perceptron(wide + vectors * (vectors - 1) // 2, 2 * inner, inner, 1)
        self.pairs = torch.triu_indices(vectors, vectors, offset=1, device="cpu")

    def forward(self, inputs: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        numbers, categories = inputs
        first = F.relu(self.bottom(numbers))
        found = [table(rows) for table, rows in zip(self.tables, categories.unbind(1), strict=True)]
        vectors = torch.stack([first, *found], 1)
        products = vectors @ vectors.transpose(1, 2)
        a, b = self.pairs
        return self.top(torch.cat([first, products[:, a, b]], 1)).squeeze(1)


class Dlrm(Task):
    """The task of DLRM: one category per table and sample, uniform over the table's rows."""

    sparse = True  # gradients of the tables

    def __init__(self, tiny: bool) -> None:
        super().__init__(tiny)
        self.sizes = [min(n, 50 if tiny else 40_000) for n in _ROWS]

    def build(self) -> nn.Module:
        wide, inner = (4, 8) if self.tiny else (64, 256)
        return _Model(self.sizes, wide, inner, self.sparse)

    def batch(self, size: int, random: torch.Generator) -> tuple[Any, Any]:
        categories = [torch.randint(n, (size,), generator=random) for n in self.sizes]
        return (
            (torch.rand((size, _NUMBERS), generator=random), torch.stack(categories, 1)),
            torch.randint(2, (size,), generator=random).float(),
        )

    def rows(self, inputs: Any) -> dict[str, torch.Tensor]:
        columns = inputs[1].unbind(1) if self.sparse else ()
        return {f"tables.{index}.weight": column for index, column in enumerate(columns)}

    def loss(self, output: Any, labels: Any) -> torch.Tensor:
        """Returns the binary cross-entropy of clicks."""
        return F.binary_cross_entropy_with_logits(output, labels)


class DlrmDense(Dlrm):
    """The task of DLRM with dense gradients of the tables."""

    sparse = False
