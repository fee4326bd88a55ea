"""Lists all tensors of a split model, also of other processes, for its optimizer.

Processes share a model here; only the owners of a tensor and the servers know its values. Moves
nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True)
class ModelIndex:
    """A model over several processes.

    Attributes:
        kind: the name of its class.
        parameters: by their first name, in the order of the model; on meta.
        buffers: by their first name, in the order of the model; on meta.
        ranks: the processes that have a tensor, ascending. The first of them speaks for it.
        keys: of the model's `state_dict()`, each with the first name of its tensor.
    """

    kind: str
    parameters: Mapping[str, torch.Tensor]
    buffers: Mapping[str, torch.Tensor]
    ranks: Mapping[str, list[int]]
    keys: Mapping[str, str]

    @staticmethod
    def of(model: nn.Module, parts: Iterable[Iterable[str]], homes: Sequence[int]) -> ModelIndex:
        """Makes the index of a model whose stages have these parts.

        Args:
            model: all of it; only shapes and names count.
            parts: for each stage the first names of its tensors.
            homes: the process of each stage.
        """
        parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
        ranks: dict[str, set[int]] = {}
        for home, names in zip(homes, parts, strict=True):
            for name in names:
                ranks.setdefault(name, set()).add(home)
        first = {id(tensor): name for name, tensor in (*parameters.items(), *buffers.items())}
        state = model.state_dict(keep_vars=True)
        keys = {key: first[id(value)] for key, value in state.items() if id(value) in first}
        for name in (*parameters, *buffers):
            ranks.setdefault(name, {0})  # what no stage uses
        return ModelIndex(
            type(model).__name__,
            {name: _like(tensor) for name, tensor in parameters.items()},
            {name: _like(tensor) for name, tensor in buffers.items()},
            {name: sorted(found) for name, found in ranks.items()},
            keys,
        )

    def had_by(self, rank: int) -> list[str]:
        """Returns names of the tensors of a process, also of constants of the trace."""
        return sorted(name for name, ranks in self.ranks.items() if rank in ranks)

    def tied(self) -> dict[str, list[int]]:
        """Returns trained parameters that several processes have, by name, and these processes."""
        return {
            name: ranks
            for name, ranks in sorted(self.ranks.items())
            if len(ranks) > 1 and name in self.parameters and self.parameters[name].requires_grad
        }

    def speaks_for(self, rank: int, name: str) -> bool:
        """Tells whether the process is the first that has the tensor."""
        return self.ranks[name][0] == rank

    def take(self, own: nn.Module, state: Mapping[str, Any]) -> None:
        """Copies a process's part of the model's `state_dict()` into its tensors.

        Raises:
            ValueError: the keys are not the model's, or a shape differs; nothing was changed then.
        """
        if missing := sorted({*self.keys} - {*state}):
            raise ValueError(f"the state has no {missing[0]!r}: it is not the whole model's")
        if extra := sorted({*state} - {*self.keys}):
            raise ValueError(f"the model has no {extra[0]!r}, which is in the state")
        mine = {**dict(own.named_parameters()), **dict(own.named_buffers())}
        pairs = [(key, mine[n], state[key]) for key, n in self.keys.items() if n in mine]
        for key, target, value in pairs:
            if target.shape != value.shape:
                raise ValueError(
                    f"{key!r} has shape {tuple(target.shape)} in the model, and "
                    f"{tuple(value.shape)} in the state"
                )
        with torch.no_grad():
            for _, target, value in pairs:
                target.copy_(value)


def model_index_of(thing: Any) -> ModelIndex | None:
    """Returns the index of a `Split`; None for anything else."""
    found = getattr(thing, "whole", None)
    return found if isinstance(found, ModelIndex) else None


def _like(tensor: torch.Tensor) -> torch.Tensor:
    """Returns shape, strides and dtype of a tensor, without memory."""
    like = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")
    return like.requires_grad_(tensor.requires_grad)
