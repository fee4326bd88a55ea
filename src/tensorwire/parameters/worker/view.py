"""The parameters as one worker's script sees them: private to it, whatever it writes there.

Knows the layout and two mappings of the same bytes, and no versions, processes or numbers.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import Any

from tensorwire.memory import PrivateMapping, same_bytes

from ..layout import Layout, Selection
from ..messages import Bytes


class View:
    """See `Store.value`, `Store.differs` and `Store.take_back`.

    Args:
        layout: of all tensors.
        selection: of what lies in the memory.
        shared: the memory, where new values arrive.
        private: the same memory, for the script.
        own: which tensors the script has; None: those of `selection`.
    """

    def __init__(
        self,
        layout: Layout,
        selection: Selection,
        shared: Bytes,
        private: PrivateMapping,
        own: Selection | None = None,
    ) -> None:
        self._selection, self._shared, self._mapping = selection, shared, private
        self._private = private.array()
        own = own or selection
        here = [(start, stop) for start, stop, _ in own.ranges]
        places = [
            (selection.place(tensor), tensor)
            for tensor, place in enumerate(layout.places)
            if any(start <= place.start < place.end <= stop for start, stop in here)
        ]
        self._places = sorted((place.start, place.stop, tensor) for place, tensor in places)
        self._starts = [start for start, _, _ in self._places]

    def value(self, tensor: int) -> Bytes:
        """See `Store`."""
        return self._private[self._selection.place(tensor)]

    def differs(self, tensor: int, data: Any) -> bool:
        """See `Store`."""
        return not same_bytes(data, self._shared[self._selection.place(tensor)])

    def take_back(self, always: bool = False) -> list[int]:
        """See `Store`."""
        ranges = self._mapping.written()
        if not ranges:
            if always:
                self._mapping.revert()
            return []
        found = [tensor for start, stop in ranges for tensor in self._within(start, stop)]
        found = list(dict.fromkeys(found))
        differ = [tensor for tensor in found if self.differs(tensor, self.value(tensor))]
        self._mapping.revert()
        return sorted(differ or found)

    def _within(self, start: int, stop: int) -> list[int]:
        """Tensors that have bytes in [start, stop) of the memory."""
        first = max(bisect_right(self._starts, start) - 1, 0)
        found = []
        for begin, end, tensor in self._places[first:]:
            if begin >= stop:
                break
            if end > start:
                found.append(tensor)
        return found
