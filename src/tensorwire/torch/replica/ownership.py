"""Tells which process has which part of a model: all of it, or stages of a pipeline.

In a pipeline the optimizer of each process has its own parameters alone. Saved and loaded state
belongs to the whole model and a plain optimizer of all its parameters.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from tensorwire.parameters import Layout, Readable

from ..model_index import ModelIndex, model_index_of
from ..session import Session
from ..views import tensor_at
from .declaration import Declaration, Declared, Holder, declare_all, declare_whole


class Replicated:
    """The ownership of a model that each worker has as a whole.

    Args:
        model: of the optimizer; this process's part of a split one.
        optimizer: of parameters of the model.

    Attributes:
        split: false.
        index: None, as there is no other process that has a tensor of this replica.
    """

    split = False
    index: ModelIndex | None = None

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._model = model
        self._optimizer = optimizer

    @property
    def model_name(self) -> str:
        """The class of the user's model."""
        return type(self._model).__name__

    def shares(self, model: Any) -> bool:
        """Tells whether a model is a split one of which this process has a part."""
        return False

    def speaks_for(self, name: str) -> bool:
        """Tells whether this process of a replica decides about a tensor."""
        return True

    def declare(self, others: Sequence[Holder]) -> Declaration:
        """See `declare_all`."""
        return declare_all(self._model, self._optimizer, others)

    def check_movable(self, what: str) -> None:
        """Raises RuntimeError if the tensors of the store cannot be dealt out anew."""

    def state_dict(
        self,
        plain: Callable[[], dict[str, Any]],
        state: Mapping[torch.Tensor, Any],
        entries: Mapping[int, Any],
    ) -> dict[str, Any]:
        """Returns the state dict of all parameters.

        Args:
            plain: the optimizer's own state_dict().
            state: of its parameters.
            entries: state by index in the store.
        """
        own = vars(self._optimizer)
        at_servers, own["state"] = own["state"], defaultdict(dict, state)
        try:
            return plain()
        finally:
            own["state"] = at_servers

    def own_state_dict(self, given: dict[str, Any]) -> dict[str, Any]:
        """Returns the part of a whole state dict that this process's optimizer can load."""
        return given


class Pipelined(Replicated):
    """The ownership of a model that several processes share: each has the parameters of its stages.

    Args:
        model, optimizer: as of `Replicated`.
        session: has the pipelines.
        index: of the whole model.
    """

    split = True

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        session: Session,
        index: ModelIndex,
    ) -> None:
        super().__init__(model, optimizer)
        self.index = self._index = index
        self._session = session
        self._groups: list[list[int]] = []  # parameters of each group, as the store counts them

    @property
    def model_name(self) -> str:
        """See `Replicated`."""
        return self._index.kind

    def shares(self, model: Any) -> bool:
        """See `Replicated`."""
        return model_index_of(model) is self._index

    def speaks_for(self, name: str) -> bool:
        """See `Replicated`."""
        return self._index.speaks_for(self._session.stage, name)

    def declare(self, others: Sequence[Holder]) -> Declaration:
        """See `declare_whole`."""
        own = dict(self._model.named_parameters())
        return declare_whole(own, self._agree(own), self._optimizer)

    def check_movable(self, what: str) -> None:
        """Raises RuntimeError: the processes would have to agree anew."""
        raise RuntimeError(
            f"{what} is not possible for a split model; close the optimizer and make another"
        )

    def _agree(self, mine_here: Mapping[str, nn.Parameter]) -> list[Declared]:
        """Returns all parameters, in the model's order; all workers call it.

        The process that speaks for a parameter says its group, and whether it is trained.

        Raises:
            ValueError: in all processes, if one that has it says something else.
        """
        # 0: in no group; else 1 + 2 x group, one more if it is trained.
        own = {
            id(parameter): 1 + 2 * group + parameter.requires_grad
            for group, each in enumerate(self._optimizer.param_groups)
            for parameter in each["params"]
        }
        mine = {name: own.get(id(parameter), 0) for name, parameter in mine_here.items()}
        groups = len(self._optimizer.param_groups)
        # All processes learn from each the number of its groups, and the code of each parameter:
        # -1 where it does not have it.
        told = [groups, *(mine.get(name, -1) for name in self._index.parameters)]
        heard = [
            np.frombuffer(each, np.int64).tolist()
            for each in self._session.gather(np.array(told, np.int64).tobytes())
        ]
        found = []
        self._groups = [[] for _ in self._optimizer.param_groups]
        fewest = min(each[0] for each in heard)
        for index, (name, like) in enumerate(self._index.parameters.items()):
            said = [each[1 + index] for each in heard]
            code = said[self._index.ranks[name][0]]
            group = max(code - 1, 0) // 2
            if {*said} - {-1, code} or group >= fewest:
                raise ValueError(
                    f"parameter {name!r} is in another group, frozen, or not in the optimizer in "
                    "another process of the pipeline: all name the same groups, empty ones too"
                )
            if code:
                self._groups[group].append(index)
            kind = "trained" if code and code % 2 == 0 else "constant"
            found.append(Declared(name, like, kind, group))
        return found

    # ---- the optimizer's state

    def state_dict(
        self,
        plain: Callable[[], dict[str, Any]],
        state: Mapping[torch.Tensor, Any],
        entries: Mapping[int, Any],
    ) -> dict[str, Any]:
        """See `Replicated`."""
        own = plain()
        numbers = {i: n for n, i in enumerate(i for members in self._groups for i in members)}
        groups = [
            {**group, "params": [numbers[i] for i in members]}
            for group, members in zip(own["param_groups"], self._groups, strict=True)
        ]
        numbered = {numbers[i]: entry for i, entry in entries.items()}
        return {**own, "state": numbered, "param_groups": groups}

    def own_state_dict(self, given: dict[str, Any]) -> dict[str, Any]:
        """Returns the part of a whole state dict that this process's optimizer can load: no state.

        Raises:
            ValueError: it is not of all parameters.
        """
        sizes = [len(group["params"]) for group in given["param_groups"]]
        if sizes != list(map(len, self._groups)):
            raise ValueError(
                "the state is of other groups of parameters than the whole model's: of "
                f"{sizes} parameters, and not {list(map(len, self._groups))}"
            )
        plain = torch.optim.Optimizer.state_dict(self._optimizer)
        groups = [
            {**group, "params": mine["params"]}
            for group, mine in zip(given["param_groups"], plain["param_groups"], strict=True)
        ]
        return {**given, "state": {}, "param_groups": groups}

    def entries(self, given: dict[str, Any]) -> dict[int, Any]:
        """Returns the state of a given dictionary, by index in the store."""
        order = [i for members in self._groups for i in members]
        return {order[number]: entry for number, entry in given["state"].items()}

    # ---- the model's

    def model_state(
        self, version: Readable, layout: Layout, buffers: Mapping[str, int]
    ) -> dict[str, torch.Tensor]:
        """Returns the `state_dict()` of the whole model, in one version, without other workers.

        Args:
            version: of the store that has it.
            layout: of the store.
            buffers: their indices in the store.
        """
        index, found = self._index, {}
        own = dict(self._model.named_buffers())
        indices = {**{name: i for i, name in enumerate(index.parameters)}, **buffers}
        for key, name in index.keys.items():
            if name in index.parameters:
                like = index.parameters[name]
            else:  # in the order of its indices, whatever it is in memory
                like = torch.empty_like(index.buffers[name], memory_format=torch.contiguous_format)
            if name in indices:
                found[key] = tensor_at(version.value(layout.places[indices[name]]), like)
            elif name in own:  # a buffer that no other process has
                found[key] = own[name].detach()
            else:  # without elements
                found[key] = torch.empty_like(like, device="cpu")
        return found
