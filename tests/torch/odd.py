"""A model of parameters of all shapes; its gradients are the same bits wherever they are computed.

Its gradients come of multiplying and adding element by element, so that nothing depends on where a
tensor lies; and the mean over two or four slices is exact.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

SHAPES: tuple[tuple[int, ...], ...] = ((300, 1000), (7,), (2, 3, 2, 2), (), (300, 1001), (0, 3))
MATRICES: tuple[tuple[int, ...], ...] = ((70, 30), (5, 40), (9000, 30))
"""The last is larger than a cell, and still Muon makes small products of it."""
EVEN: tuple[tuple[int, ...], ...] = ((300, 1000), (48,), (2, 4, 2, 2), (600, 500))
"""Torch's fused kernels compute the rest after the last whole vector otherwise, servers do not."""
TURNED = 40, 30
Make = Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]


class Odd(nn.Module):
    """Has parameters, and no idea what for."""

    def __init__(
        self, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, turned: bool = False
    ) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        start = [torch.randn(shape, generator=generator) for shape in shapes]
        if turned:
            start.append(torch.randn(TURNED, generator=generator).t())
        self.all = nn.ParameterList([nn.Parameter(each.to(dtype)) for each in start])

    def forward(self, step: int, rank: int, without: Sequence[int] = ()) -> torch.Tensor:
        """A loss of all parameters but some."""
        generator = torch.Generator().manual_seed(1000 * step + rank)
        total = torch.zeros(())
        for index, p in enumerate(self.all):
            noise = torch.randn(p.shape, generator=generator).to(p.dtype)
            if index not in without:
                total = total + (p * (p * 0.125 - noise)).sum()
        return total


def bits(model: nn.Module) -> list[bytes]:
    """Returns the bits of each parameter."""
    flat = [each.detach().contiguous().view(-1) for each in model.parameters()]
    return [each.view(torch.uint8).numpy().tobytes() for each in flat]


def plain_gradients(
    twin: Odd, step: int, slices: int, without: Callable[[int], Sequence[int]] = lambda rank: ()
) -> None:
    """The mean of all slices."""
    for rank in range(slices):
        loss = twin(step, rank, without(rank)) / slices
        if loss.requires_grad:
            loss.backward()


def check_same_state(ours: Any, theirs: Any, where: str = "") -> None:
    """Equal types, keys and bits, all the way down."""
    assert type(ours) is type(theirs), (where, ours, theirs)
    if isinstance(ours, dict):
        assert ours.keys() == theirs.keys(), (where, list(ours), list(theirs))
        for key in ours:
            check_same_state(ours[key], theirs[key], f"{where}/{key}")
    elif isinstance(ours, list | tuple):
        assert len(ours) == len(theirs), where
        for index, pair in enumerate(zip(ours, theirs, strict=True)):
            check_same_state(*pair, f"{where}/{index}")
    elif isinstance(ours, torch.Tensor):
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape), (where, ours, theirs)
        assert torch.equal(ours.nan_to_num(), theirs.nan_to_num()), where
    else:
        assert ours == theirs or ours != ours, (where, ours, theirs)


def check_same_optimizers(ours: Any, theirs: Any) -> None:
    """Equal states; a parameter without elements has no state on servers."""
    mine, its = ours.state_dict(), theirs.state_dict()
    sizes = [p.numel() for group in theirs.param_groups for p in group["params"]]
    its["state"] = {i: entry for i, entry in its["state"].items() if sizes[i]}
    mine["state"] = {i: entry for i, entry in mine["state"].items() if sizes[i]}
    check_same_state(mine, its)
