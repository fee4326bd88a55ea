"""An optimizer's state, between torch's own form and a store's arrays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from tensorwire.parameters import Bytes, Hyper, Store

from ..kernels import OwnStepKernel, TorchKernel, scalar_of
from ..views import tensor_at

Entry = dict[str, Any]


def read(
    store: Store,
    kernel: TorchKernel,
    hyper: tuple[Hyper, ...],
    trained: Mapping[int, torch.Tensor],
) -> dict[int, Entry]:
    """What torch would have in `optimizer.state`, for parameters that have a state already.

    By index in the store; of a parameter only the format counts.
    """
    arrays = {}
    for name in kernel.states:
        arrays[name] = np.empty(store.layout.size_bytes, np.uint8)
        store.read_state(name, arrays[name])
    scalars = store.scalars().tolist()
    found = {}
    for index, count in enumerate(store.counts().tolist()):
        if index not in trained or not (count or _has_state_from_the_start(kernel)):
            continue
        parameter, place = trained[index], store.layout.places[index]
        group = store.layout.spec.tensors[index].group
        entry: Entry = {}
        if isinstance(kernel, OwnStepKernel):
            numbers = zip(kernel.spec.scalars.items(), scalars[index], strict=True)
            entry = {name: scalar_of(kind, value) for (name, kind), value in numbers}
        elif kernel.keeps_count:
            entry["step"] = torch.tensor(float(count))
        for name, size in _shapes_of(kernel, group, hyper, parameter).items():
            entry[name] = _array_at(arrays[name][place.start : place.end], size, parameter)
        if entry:
            found[index] = entry
    return found


def write(
    store: Store,
    kernel: TorchKernel,
    hyper: tuple[Hyper, ...],
    trained: Mapping[int, torch.Tensor],
    entries: Mapping[int, Entry],
) -> None:
    """Overwrites the store's state; what has no entry begins anew. As `read`.

    Raises:
        ValueError: the optimizer makes its state when it is made, and some parameter has none.
    """
    groups = {i: store.layout.spec.tensors[i].group for i in trained}
    for index in trained if _has_state_from_the_start(kernel) else ():
        if not entries.get(index):
            raise ValueError(
                f"{kernel.spec.name} makes its state when it is made, and parameter "  # type: ignore[union-attr]
                f"{store.layout.spec.tensors[index].name!r} has none, as where a group was added "
                "later: make the optimizer with all parameters"
            )
    for name in kernel.states:
        array = np.zeros(store.layout.size_bytes, np.uint8)
        for index, parameter in trained.items():
            value = entries.get(index, {}).get(name)
            if value is not None:
                place = store.layout.places[index]
                shapes = _shapes_of(kernel, groups[index], hyper, parameter)
                there = array[place.start : place.end]
                _array_at(there, shapes.get(name, parameter.shape), parameter).copy_(value)
        store.write_state(name, array)
    counts = np.zeros(len(store.layout.spec.tensors), np.int64)
    scalars = np.zeros((len(counts), len(kernel.scalars)))
    for index in trained:
        entry = entries.get(index, {})
        # SGD keeps no count; with a momentum buffer the first step is over.
        has = any(value is not None for value in entry.values())
        counts[index] = max(int(entry.get("step", 0)), int(has))
        for number, name in enumerate(kernel.scalars):
            scalars[index, number] = float(entry.get(name, 0.0))
    store.set_counts(counts)
    store.set_scalars(scalars)


def _has_state_from_the_start(kernel: TorchKernel) -> bool:
    return isinstance(kernel, OwnStepKernel) and not kernel.spec.lazy


def _shapes_of(
    kernel: TorchKernel, group: int, hyper: tuple[Hyper, ...], parameter: torch.Tensor
) -> Mapping[str, torch.Size]:
    """The arrays of state that a parameter has, and their shapes."""
    if isinstance(kernel, OwnStepKernel):
        return kernel.state_shapes(group, hyper[group], tuple(parameter.shape), parameter.dtype)
    return dict.fromkeys(kernel.states, parameter.shape)


def _array_at(data: Bytes, size: torch.Size, parameter: torch.Tensor) -> torch.Tensor:
    """An array of state in the bytes of its parameter, in whose order of elements it is."""
    if size == parameter.shape:
        return tensor_at(data, parameter)
    return torch.frombuffer(data, dtype=parameter.dtype, count=size.numel()).view(size)
