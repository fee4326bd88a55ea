"""Pushes the rows of tables' gradients as soon as the host has them.

On a device several lookups of one row are several rows of the gradient. Only the device knows how
many rows are left when they are added up. It is asked once for all tables, and not while backward
runs, since this process waits for the answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import accumulate
from typing import NamedTuple

import torch

from tensorwire.parameters import Store

from ..devices import CopyStream, is_on_host
from ..statistics import Statistics
from ..views import bytes_of_rows, rows_of
from .gradient_state import GradientState, count_copied

# What is brought to the host in one go takes twice as much memory of the device meanwhile.
_TOGETHER_BYTES = 64 << 20


class _Waiting(NamedTuple):
    """A gradient that is on a device.

    Attributes:
        state: of its table.
        slice_index: the slice that it is of.
        gradient: sparse by rows, or dense.
        stream: the number of the stream that made it.
    """

    state: GradientState
    slice_index: int
    gradient: torch.Tensor
    stream: int

    @property
    def kind(self) -> object:
        """The key of gradients that are copied at once; each dense one has a key of its own."""
        if self.gradient.layout == torch.strided:
            return self.state.index
        return self.gradient.dtype, tuple(self.gradient.shape[1:])

    @property
    def size_bytes(self) -> int:
        """The bytes of its values."""
        is_dense = self.gradient.layout == torch.strided
        return int((self.gradient if is_dense else self.gradient._values()).nbytes)


class TableGradients:
    """The gradients of one optimizer's tables. One thread at a time; backward may be another.

    Args:
        store: gets the rows.
        statistics: of the worker.
    """

    def __init__(self, store: Store, statistics: Statistics) -> None:
        self._store = store
        self._statistics = statistics
        self._stream: CopyStream | None = None
        self._waiting: dict[int, _Waiting] = {}  # by the table's index

    def leave(self, state: GradientState, slice_index: int, gradient: torch.Tensor) -> None:
        """Sends a gradient, which is complete; on a device in the current stream."""
        self._waiting.pop(state.index, None)  # it was replaced
        found = gradient.detach()
        if is_on_host(found):
            rows, values, copied = rows_of(found)
            self._push(state, slice_index, rows, values, copied)
            return
        if self._stream is None:
            self._stream = CopyStream(found.device)
        current = self._stream.current()
        self._waiting[state.index] = _Waiting(state, slice_index, found, current)

    def arrive(self) -> None:
        """Brings gradients that left a device to the host, and pushes them."""
        for group in _groups(list(self._waiting.values())):
            assert self._stream is not None
            gradients = [each.gradient for each in group]
            streams = [each.stream for each in group]
            rows, values = self._stream.bring(partial(_added_up, gradients), streams)
            ends = torch.tensor(
                list(accumulate(map(len, gradients))), dtype=torch.int64, device="cpu"
            )
            stops = torch.searchsorted(rows, ends).tolist()
            starts, firsts = [0, *stops[:-1]], [0, *ends.tolist()[:-1]]
            for each, start, stop, first in zip(group, starts, stops, firsts, strict=True):
                part, its = rows[start:stop] - first, values[start:stop]
                self._push(each.state, each.slice_index, part, its, part.nbytes + its.nbytes)
                self._waiting.pop(each.state.index)  # not before: an interrupt may come anywhere

    def _push(
        self,
        state: GradientState,
        slice_index: int,
        rows: torch.Tensor,
        values: torch.Tensor,
        copied: int,
    ) -> None:
        numbers, data, again = bytes_of_rows(rows, values, state.parameter)
        state.size_bytes = numbers.nbytes + data.nbytes
        sent = self._store.push_rows(slice_index, state.index, numbers, data)
        count_copied(self._statistics, state, copied + again + sent)

    def forget(self, index: int) -> None:
        """Forgets the gradient of a table, which does not count."""
        self._waiting.pop(index, None)

    def withdraw(self) -> None:
        """Withdraws gradients that wait to be copied."""
        self._waiting.clear()


def _groups(waiting: Sequence[_Waiting]) -> Iterator[list[_Waiting]]:
    """Yields the groups of gradients that are copied at once."""
    by_kind: dict[object, list[_Waiting]] = {}
    for each in waiting:
        by_kind.setdefault(each.kind, []).append(each)
    for alike in by_kind.values():
        group: list[_Waiting] = []
        size = 0
        for each in alike:
            if group and size + each.size_bytes > _TOGETHER_BYTES:
                yield group
                group, size = [], 0
            group.append(each)
            size += each.size_bytes
        yield group


def _added_up(gradients: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Returns the rows of gradients, counted from the first tensor's, rising; and their values."""
    if gradients[0].layout == torch.strided:
        (dense,) = gradients
        return torch.arange(len(dense), device=dense.device), dense
    whole = gradients[0] if len(gradients) == 1 else torch.cat(list(gradients))
    single = whole.coalesce()
    return single.indices()[0], single.values()
