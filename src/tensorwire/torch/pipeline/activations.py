"""Moves values between the stages of a split model, and their gradients back.

Values go directly between stages of one process, and over edges (tensorwire.edges) to others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from tensorwire.edges import Arrival, Edges
from tensorwire.placement import Graph, Operator, Plan, Tensor

from ..group import Machines
from .capture import Capture, Value
from .split_backward import own, storages
from .stage import Stage

# Elements that numpy does not know move as their bits.
_BITS = {
    torch.bfloat16: torch.uint16,
    torch.float8_e4m3fn: torch.uint8,
    torch.float8_e5m2: torch.uint8,
}


class Activations:
    """The values of micro-batches on their way: by edges, or directly between stages here.

    Args:
        values: all that cross, by name.
        stages: those of this process.
        edges: to the other processes, open; closed by their owner.
    """

    def __init__(self, values: Mapping[str, Value], stages: Sequence[int], edges: Edges) -> None:
        self._values = values
        self._stages = stages
        self._here: dict[tuple[str, int], Any] = {}
        self._left: dict[tuple[str, int], int] = {}  # stages here that still use it
        self._arrived: dict[tuple[str, int], Arrival] = {}
        self._gradients: dict[tuple[int, int], list[Arrival]] = {}  # of a stage and micro-batch
        self.edges = edges

    def _users_here(self, name: str) -> list[int]:
        return [user for user in self._values[name].users if user in self._stages]

    def put(self, name: str, value: Any, at: int) -> None:
        """Passes on a value that a stage here has made."""
        crossing = self._values[name]
        if self._users_here(name):
            # Its graph is the business of the stage that made it.
            self._here[name, at] = value if crossing.is_size else value.detach()
            self._left[name, at] = len(self._users_here(name))
        if len(self._users_here(name)) < len(crossing.users):
            if crossing.is_size:
                self.edges.put(name, np.array(int(value), np.int64))
            else:
                self.edges.put(name, array_of(self._own(value.detach())))

    def get(self, name: str, at: int) -> Any:
        """Returns a value for the stages here; tensors lie where they came."""
        key = name, at
        if key not in self._here:
            arrival = self.edges.get(name)
            crossing = self._values[name]
            self._arrived[key] = arrival
            self._left[key] = len(self._users_here(name))
            array = arrival.value
            if crossing.is_size:
                assert isinstance(array, np.ndarray)
                self._here[key] = int(array)
            else:
                self._here[key] = tensor_of(array, getattr(torch, crossing.tensor.dtype))
        return self._here[key]

    def release(self, stage: int, at: int) -> None:
        """Releases the values of a micro-batch, with which a stage here is done."""
        for name, value in self._values.items():
            key = name, at
            if stage in value.users and key in self._left:
                self._left[key] -= 1
                if not self._left[key]:
                    del self._left[key], self._here[key]
                    if (arrival := self._arrived.pop(key, None)) is not None:
                        arrival.release()
        for arrival in self._gradients.pop((stage, at), ()):
            arrival.release()

    def put_gradient(self, name: str, stage: int, gradient: torch.Tensor, at: int) -> None:
        """Passes on the gradient of a value that a stage here has used."""
        if self._values[name].maker in self._stages:
            self._here[_gradient(name, stage), at] = gradient
        else:
            self.edges.put(_gradient(name, stage), array_of(gradient))

    def gradients(self, stage: Stage, at: int) -> dict[str, torch.Tensor]:
        """Returns the gradients of all values that a stage here made for others; see `release`."""
        found: dict[str, torch.Tensor] = {}
        arrivals = self._gradients.setdefault((stage.index, at), [])
        for name in stage.outputs:
            value = self._values[name]
            if not value.needs_grad:
                continue
            parts = []
            for user in reversed(value.users):  # as they are made
                key = _gradient(name, user)
                if user in self._stages:
                    parts.append(self._here.pop((key, at)))
                    continue
                arrivals.append(self.edges.get(key))
                parts.append(tensor_of(arrivals[-1].value, getattr(torch, value.tensor.dtype)))
            found[name] = parts[0]
            for part in parts[1:]:
                found[name] = found[name] + part
        return found

    def _own(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a tensor in memory of its own, not in an arrival's."""
        arrived = [self._here[key] for key in self._arrived]
        return own(tensor, storages(each for each in arrived if isinstance(each, torch.Tensor)))

    def kept(self, output: Any) -> Any:
        """Returns outputs of the model as its user may keep them."""
        return pytree.tree_map_only(torch.Tensor, self._own, output)


def _gradient(name: str, user: int) -> str:
    return f"gradient {user} {name}"


def graph_of(taken: Capture, homes: Sequence[int]) -> Graph:
    """Returns the graph of a micro-batch: forwards in order of the stages, then backwards.

    Args:
        taken: the model.
        homes: the machine of each stage.
    """
    count = len(taken.parts)
    tensors = [value.tensor for value in taken.values.values()]
    operators = []
    for stage in range(count):
        uses = {n: v for n, v in taken.values.items() if stage in v.users}
        makes = {n: v for n, v in taken.values.items() if v.maker == stage}
        needs = [_gradient(n, user) for n, v in makes.items() if v.needs_grad for user in v.users]
        gradients = [
            Tensor(_gradient(n, stage), v.tensor.dtype, v.tensor.shape)
            for n, v in uses.items()
            if v.needs_grad
        ]
        grads = tuple(each.name for each in gradients)
        machine = str(homes[stage])
        operators += [
            Operator(f"forward {stage}", machine, tuple(uses), tuple(makes), stage),
            Operator(f"backward {stage}", machine, tuple(needs), grads, 2 * count - 1 - stage),
        ]
        tensors += gradients
    return Graph(tuple(tensors), tuple(operators))


def open_edges(
    machines: Machines, made: Plan, label: str, turns: int, timeout_s: float | None
) -> Edges:
    """Returns the edges of this process; none if nothing crosses to or from it."""
    rank = str(machines.rank)
    if not any(rank in pair for pair in made.pairs):
        made = Plan(())
    peers = {str(other): peer for other, peer in (machines.peers or {}).items()}
    node: Any = machines.node  # None without peers, and then nothing crosses
    edges = Edges(node, made, rank, peers, flights=turns, label=label, timeout_s=timeout_s)
    try:
        return edges.open()
    except BaseException:
        edges.close()
        raise


def array_of(tensor: torch.Tensor) -> Any:
    """Returns a tensor's elements for an edge; copied only if they are not contiguous."""
    tensor = tensor.detach().contiguous()
    return tensor.view(_BITS[tensor.dtype]).numpy() if tensor.dtype in _BITS else tensor.numpy()


def tensor_of(value: Any, dtype: torch.dtype) -> torch.Tensor:
    """Returns an edge's value as a tensor over the same memory."""
    tensor = torch.from_numpy(value)
    return tensor.view(dtype) if dtype in _BITS else tensor
