"""A small model in float64, its plain twin, and the gradients of all workers in one process.

A case trains the model on samples that depend on the rank, and compares with plain torch on the
samples of both workers.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

EXACT: dict[str, float] = {"rtol": 1e-12, "atol": 1e-14}
STEPS = 4
Model = nn.Module


def net(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).to(dtype)


def sgd(model: Model, **options: Any) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), **{"lr": 0.1, "momentum": 0.9, **options})


def adamw(model: Model, **options: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), **{"lr": 0.01, **options})


def batch(step: int, rank: int, count: int = 4) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(count, 5, generator=generator, dtype=torch.float64)


def loss(model: Model, x: torch.Tensor) -> torch.Tensor:
    return (model(x) ** 2).mean() + model(x).sin().mean()


def mean_gradients(model: Model, step: int, of: Callable[..., torch.Tensor] = loss) -> None:
    """Plain torch's gradients: the mean of those of both workers."""
    for rank in range(2):
        (of(model, batch(step, rank)) / 2).backward()


def make_step(opt: Any, loss: torch.Tensor) -> None:
    """Makes a step by the gradients of a loss, and leaves none."""
    loss.backward()
    opt.step()
    opt.zero_grad()


def same(model: Model, twin: Model, **tolerance: float) -> None:
    ours, theirs = list(model.parameters()), list(twin.parameters())
    torch.testing.assert_close(ours, theirs, **(tolerance or EXACT))
