"""An optimizer's state, between torch's own form and a store's arrays."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from tensorwire.parameters import AVERAGE, Bytes, Store

from ..kernels import OwnStepKernel, scalar_of
from ..session import Session
from ..views import tensor_at
from .arithmetic import Arithmetic
from .ownership import Pipelined, Replicated

Entry = dict[str, Any]


class OptimizerState:
    """The state of one optimizer, which the servers keep, or worker 0.

    Args:
        session: of this worker.
        store: has the state.
        optimizer: the user's, whose own `state` stays empty where the store has it.
        arithmetic: of the optimizer.
        ownership: who has the model.
        parameters: of the store.
    """

    def __init__(
        self,
        session: Session,
        store: Store,
        optimizer: torch.optim.Optimizer,
        arithmetic: Arithmetic,
        ownership: Replicated,
        parameters: Sequence[torch.Tensor],
    ) -> None:
        self._session, self._store, self._optimizer = session, store, optimizer
        self._arithmetic, self._ownership = arithmetic, ownership
        self._trained = {i: parameters[i] for i in store.layout.trained}
        self._frozen: dict[Any, Entry] = {}

    # ---- as torch has it

    def state_dict(self, plain: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The optimizer's own dictionary, filled with the store's state.

        An average of weights is beside it, where torch's own `load_state_dict` ignores it.
        """
        if self._arithmetic.by_worker:
            if self._session.rank != 0:
                raise RuntimeError(
                    "worker 0 makes this optimizer's steps and has its state: call state_dict() "
                    "and job.save() there"
                )
            return plain()
        found = self._read()
        entries = {self._trained[i]: entry for i, entry in found.items()}
        state = self._ownership.state_dict(plain, {**entries, **self._frozen}, found)
        if self._arithmetic.ema:
            averages = {id(self._trained[i]): each for i, each in self.averages().items()}
            order = [p for group in self._optimizer.param_groups for p in group["params"]]
            numbered = ((n, averages.get(id(p))) for n, p in enumerate(order))
            state["ema"] = {n: each for n, each in numbered if each is not None}
        return state

    def saved(self) -> dict[str, Any]:
        """The state that goes to a new store; what worker 0 keeps stays with it."""
        return {"state": {}} if self._arithmetic.by_worker else self._optimizer.state_dict()

    def load(self, ema: Mapping[int, torch.Tensor] | None = None) -> None:
        """What `optimizer.state` holds now becomes everybody's, from worker 0.

        Args:
            ema: averages of weights, as in `state_dict`; where there is none, the average begins
                anew with the next step.
        """
        if self._arithmetic.by_worker:
            if self._session.rank != 0:
                self._optimizer.state = defaultdict(dict)
            return  # it stays where it is
        entries, self._optimizer.state = self._optimizer.state, defaultdict(dict)
        if self._ownership.split and entries:
            raise ValueError("of a split model, load the optimizer's state when it is distributed")
        ids = {id(parameter) for parameter in self._trained.values()}
        # Kept for when they are trained again.
        self._frozen = {p: entry for p, entry in entries.items() if id(p) not in ids}
        if self._session.rank == 0:
            if entries or self._store.counts().any():
                self._write({i: entries[p] for i, p in self._trained.items() if p in entries})
            if self._arithmetic.ema and (ema or self._store.counts(averaged=True).any()):
                order = [p for group in self._optimizer.param_groups for p in group["params"]]
                given = {id(order[n]): each for n, each in (ema or {}).items() if n < len(order)}
                self._write_averages(
                    {i: given[id(p)] for i, p in self._trained.items() if id(p) in given}
                )
        self._session.barrier()

    def load_whole(self, given: dict[str, Any]) -> None:
        """A shared model's state becomes everybody's, from worker 0."""
        assert isinstance(self._ownership, Pipelined)
        if self._session.rank == 0:
            self._write(self._ownership.entries(given))
        self._session.barrier()

    # ---- as the store has it

    def _read(self) -> dict[int, Entry]:
        """What torch would have in `optimizer.state`, of parameters that have a state already.

        By index in the store; of a parameter only the format counts.
        """
        store, kernel = self._store, self._arithmetic.kernel
        arrays = {}
        for name in kernel.states:
            arrays[name] = np.empty(store.layout.size_bytes, np.uint8)
            store.read_state(name, arrays[name])
        scalars, counts = store.scalars().tolist(), store.counts().tolist()
        found = {}
        for index, parameter in self._trained.items():
            if not (counts[index] or self._is_made_at_once):
                continue
            place = store.layout.places[index]
            entry: Entry = {}
            if isinstance(kernel, OwnStepKernel):
                numbers = zip(kernel.spec.scalars.items(), scalars[index], strict=True)
                entry = {name: scalar_of(kind, value) for (name, kind), value in numbers}
            elif kernel.keeps_count:
                entry["step"] = torch.tensor(float(counts[index]))
            for name, size in self._shapes_of(index).items():
                entry[name] = _array_at(arrays[name][place.start : place.end], size, parameter)
            if entry:
                found[index] = entry
        return found

    def _write(self, entries: Mapping[int, Entry]) -> None:
        """Overwrites the store's state; what has no entry begins anew.

        Raises:
            ValueError: the optimizer makes its state when it is made, and some parameter has none;
                or a parameter has other state than this optimizer keeps.
        """
        store, kernel = self._store, self._arithmetic.kernel
        for index in self._trained:
            self._check(index, entries.get(index, {}))
        for index in self._trained if self._is_made_at_once else ():
            if not entries.get(index):
                raise ValueError(
                    f"parameter {store.layout.spec.tensors[index].name!r} has no state, which this "
                    "optimizer makes when it is made, as where a group was added later: make the "
                    "optimizer with all parameters"
                )
        for name in kernel.states:
            array = np.zeros(store.layout.size_bytes, np.uint8)
            for index, parameter in self._trained.items():
                value = entries.get(index, {}).get(name)
                if value is not None:
                    place = store.layout.places[index]
                    size = self._shapes_of(index).get(name, parameter.shape)
                    _array_at(array[place.start : place.end], size, parameter).copy_(value)
            store.write_state(name, array)
        counts = np.zeros(len(store.layout.spec.tensors), np.int64)
        scalars = np.zeros((len(counts), len(kernel.scalars)))
        for index in self._trained:
            entry = entries.get(index, {})
            # SGD keeps no count; with a momentum buffer the first step is over.
            has = any(value is not None for value in entry.values())
            counts[index] = max(int(entry.get("step", 0)), int(has))
            for number, name in enumerate(kernel.scalars):
                scalars[index, number] = float(entry.get(name, 0.0))
        store.set_counts(counts)
        store.set_scalars(scalars)

    def _check(self, index: int, entry: Entry) -> None:
        """Raises ValueError for state of a parameter that the optimizer does not keep."""
        kernel, sizes = self._arithmetic.kernel, self._shapes_of(index)
        name = self._store.layout.spec.tensors[index].name
        if isinstance(kernel, OwnStepKernel) and entry:
            keeps = {*sizes, *kernel.scalars}
            if entry.keys() != keeps:
                raise ValueError(
                    f"the state of parameter {name!r} has {sorted(entry)}, and "
                    f"{kernel.spec.name} keeps {sorted(keeps)}"
                )
        for key, size in sizes.items():
            value = entry.get(key)
            if value is not None and value.shape != size:
                raise ValueError(
                    f"the state {key!r} of parameter {name!r} has the shape {tuple(value.shape)}, "
                    f"and not {tuple(size)}"
                )

    @property
    def _is_made_at_once(self) -> bool:
        """The optimizer's class makes the state of a parameter before its first step."""
        kernel = self._arithmetic.kernel
        return isinstance(kernel, OwnStepKernel) and not kernel.spec.lazy

    def _shapes_of(self, index: int) -> Mapping[str, torch.Size]:
        """The arrays of state that a parameter has, and their shapes."""
        parameter, kernel = self._trained[index], self._arithmetic.kernel
        if not isinstance(kernel, OwnStepKernel):
            return dict.fromkeys(kernel.states, parameter.shape)
        group = self._store.layout.spec.tensors[index].group
        hyper = self._arithmetic.hyper()[group]
        return kernel.state_shapes(group, hyper, tuple(parameter.shape), parameter.dtype)

    # ---- averages of weights

    def averages(self) -> dict[int, torch.Tensor]:
        """The averages of weights, of parameters that have one."""
        store = self._store
        data = np.empty(store.layout.size_bytes, np.uint8)
        store.read_state(AVERAGE, data)
        counts = store.counts(averaged=True)
        return {
            i: tensor_at(data[store.layout.places[i].start : store.layout.places[i].end], parameter)
            for i, parameter in self._trained.items()
            if counts[i]
        }

    def _write_averages(self, averages: Mapping[int, torch.Tensor]) -> None:
        """Overwrites all averages; what has none begins anew."""
        store = self._store
        data = np.zeros(store.layout.size_bytes, np.uint8)
        counts = np.zeros(len(store.layout.spec.tensors), np.int64)
        for index, value in averages.items():
            place = store.layout.places[index]
            tensor_at(data[place.start : place.end], self._trained[index]).copy_(value)
            counts[index] = 1
        store.write_state(AVERAGE, data)
        store.set_counts(counts, averaged=True)


def _array_at(data: Bytes, size: torch.Size, parameter: torch.Tensor) -> torch.Tensor:
    """An array of state in the bytes of its parameter, in whose order of elements it is."""
    if size == parameter.shape:
        return tensor_at(data, parameter)
    return torch.frombuffer(data, dtype=parameter.dtype, count=size.numel()).view(size)
