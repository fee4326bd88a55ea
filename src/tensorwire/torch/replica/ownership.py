"""What a Replica does otherwise where processes share its model: what they agree on, whole state.

A process has the parameters of its stages; the optimizer of each is of these alone. What is saved
and loaded is that of the whole model and of a plain optimizer of all its parameters.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from tensorwire.parameters import Store

from ..model_index import ModelIndex
from ..session import Session
from ..views import tensor_at


class Declared(NamedTuple):
    """One parameter of the whole model; `like` is on meta."""

    name: str
    like: torch.Tensor
    kind: str
    group: int


class Ownership:
    """Of one optimizer.

    Args:
        session: has the pipelines.
        whole: the model.
        own: this process's part of it.
        optimizer: of that.
    """

    def __init__(
        self, session: Session, whole: ModelIndex, own: nn.Module, optimizer: torch.optim.Optimizer
    ) -> None:
        self.whole = whole
        self._session = session
        self._module = own
        self._optimizer = optimizer
        self._groups: list[list[int]] = []  # parameters of each group, as the store counts them

    @property
    def own(self) -> dict[str, nn.Parameter]:
        """This process's parameters."""
        return dict(self._module.named_parameters())

    def speaks_for(self, name: str) -> bool:
        """Of the processes of a replica, this one says what becomes of a tensor."""
        return self.whole.speaks_for(self._session.stage, name)

    def agree(self) -> list[Declared]:
        """All parameters, in the model's order; all workers call it.

        In which group one is, and whether it is trained, the process says that speaks for it.

        Raises:
            ValueError: in all processes, if one that has it says something else.
        """
        # 0: in no group; else 1 + 2 x group, one more if it is trained.
        own = {
            id(parameter): 1 + 2 * group + parameter.requires_grad
            for group, each in enumerate(self._optimizer.param_groups)
            for parameter in each["params"]
        }
        mine = {name: own.get(id(parameter), 0) for name, parameter in self.own.items()}
        groups = len(self._optimizer.param_groups)
        # Everybody learns what everybody says, also who has it as it is said: the number of groups,
        # and of each parameter -1 where it is another process's.
        told = [groups, *(mine.get(name, -1) for name in self.whole.parameters)]
        heard = [
            np.frombuffer(each, np.int64).tolist()
            for each in self._session.gather(np.array(told, np.int64).tobytes())
        ]
        found = []
        self._groups = [[] for _ in self._optimizer.param_groups]
        codes = {
            name: heard[self.whole.ranks[name][0]][number]
            for number, name in enumerate(self.whole.parameters, 1)
        }
        fewest = min(each[0] for each in heard)
        for number, (name, code) in enumerate(codes.items(), 1):
            said = {each[number] for each in heard} - {-1}
            if said - {code} or max(code - 1, 0) // 2 >= fewest:
                raise ValueError(
                    f"parameter {name!r} is in another group, frozen, or not in the optimizer in "
                    "another process of the pipeline: all name the same groups, empty ones too"
                )
        for index, (name, code) in enumerate(codes.items()):
            group = max(code - 1, 0) // 2
            if code:
                self._groups[group].append(index)
            kind = "trained" if code and code % 2 == 0 else "constant"
            found.append(Declared(name, self.whole.parameters[name], kind, group))
        return found

    # ---- the optimizer's state

    def state_dict(self, plain: dict[str, Any], entries: Mapping[int, Any]) -> dict[str, Any]:
        """That of all parameters.

        Args:
            plain: of this process's optimizer.
            entries: state by index in the store.
        """
        numbers = {i: n for n, i in enumerate(i for members in self._groups for i in members)}
        groups = [
            {**group, "params": [numbers[i] for i in members]}
            for group, members in zip(plain["param_groups"], self._groups, strict=True)
        ]
        state = {numbers[i]: entry for i, entry in entries.items()}
        return {**plain, "state": state, "param_groups": groups}

    def own_state_dict(self, given: dict[str, Any]) -> dict[str, Any]:
        """What this process's optimizer can load of that of all parameters: no state.

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
        """Its state by index in the store."""
        order = [i for members in self._groups for i in members]
        return {order[number]: entry for number, entry in given["state"].items()}

    # ---- the model's

    def model_state(self, store: Store, buffers: Mapping[str, int]) -> dict[str, torch.Tensor]:
        """The `state_dict()` of the whole model, one version of it; no other worker takes part.

        Args:
            store: has it.
            buffers: their indices in the store.
        """
        data = np.empty(store.layout.size_bytes, np.uint8)
        store.read_values(data)
        whole, found = self.whole, {}
        own = dict(self._module.named_buffers())
        indices = {**{name: i for i, name in enumerate(whole.parameters)}, **buffers}
        for key, name in whole.keys.items():
            if name in whole.parameters:
                like = whole.parameters[name]
            else:  # in the order of its indices, whatever it is in memory
                like = torch.empty_like(whole.buffers[name], memory_format=torch.contiguous_format)
            if name in indices:
                place = store.layout.places[indices[name]]
                found[key] = tensor_at(data[place.start : place.end], like)
            elif name in own:  # a buffer that nobody else has
                found[key] = own[name].detach()
            else:  # without elements
                found[key] = torch.empty_like(like, device="cpu")
        return found
