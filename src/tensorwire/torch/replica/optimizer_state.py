"""An optimizer's state, between torch's own form and a store's arrays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from tensorwire.parameters import Store

from ..kernels import TorchKernels
from ..views import tensor_at

Entry = dict[str, Any]


def read(
    store: Store, apply: TorchKernels, trained: Mapping[int, torch.Tensor]
) -> dict[int, Entry]:
    """What torch would have in `optimizer.state`, for parameters that were stepped already.

    By index in the store; of a parameter only the format counts.
    """
    arrays = {}
    for name in apply.states:
        arrays[name] = np.empty(store.layout.size_bytes, np.uint8)
        store.read_state(name, arrays[name])
    found = {}
    for index, count in enumerate(store.counts().tolist()):
        if not count or index not in trained:
            continue
        parameter, place = trained[index], store.layout.places[index]
        # torch's SGD keeps no count.
        entry: Entry = {} if apply.is_sgd else {"step": torch.tensor(float(count))}
        for name, array in arrays.items():
            entry[name] = tensor_at(array[place.start : place.end], parameter)
        found[index] = entry
    return found


def write(
    store: Store,
    apply: TorchKernels,
    trained: Mapping[int, torch.Tensor],
    entries: Mapping[int, Entry],
) -> None:
    """Overwrites the store's state; what has no entry begins anew. As `read`."""
    for name in apply.states:
        array = np.zeros(store.layout.size_bytes, np.uint8)
        for index, parameter in trained.items():
            value = entries.get(index, {}).get(name)
            if value is not None:
                place = store.layout.places[index]
                tensor_at(array[place.start : place.end], parameter).copy_(value)
        store.write_state(name, array)
    counts = np.zeros(len(store.layout.spec.tensors), np.int64)
    for index in trained:
        entry = entries.get(index, {})
        # SGD keeps no count; with a momentum buffer the first step is over.
        has = any(value is not None for value in entry.values())
        counts[index] = int(entry["step"]) if "step" in entry else int(has)
    store.set_counts(counts)
