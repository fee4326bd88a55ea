"""Tracks gradients on their way to a server: which units of a version are still missing."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tensorwire.memory import Word


class Announced(NamedTuple):
    """The announcement of one commit: units that are there or on their way.

    Attributes:
        words: of the units.
        stamps: what the words are raised to.
        wait: returns when a word has a value.
    """

    words: Sequence[Word]
    stamps: NDArray[np.uint64]
    wait: Callable[[Word, int], None]


class ArrivingUnits:
    """The units that all commits have `announced` for one version; see `Arrivals`."""

    def __init__(self, units: Sequence[range], announced: Sequence[Announced]) -> None:
        self._unit_of = [number for number, unit in enumerate(units) for _ in unit]
        self.announced = announced
        self._here = bytearray(len(units))
        self._lock = threading.Lock()
        self.waited_s = 0.0

    def order(self, cells: Sequence[int]) -> list[int]:
        """See `Arrivals`. Workers send in much the same order."""
        if not self.announced:
            return list(cells)
        last = np.max([each.stamps for each in self.announced], axis=0).tolist()
        return sorted(cells, key=lambda cell: last[self._unit_of[cell]])

    def wait(self, cell: int) -> None:
        """See `Arrivals`."""
        unit = self._unit_of[cell]
        if self._here[unit]:
            return
        for words, stamps, wait in self.announced:
            word, stamp = words[unit], int(stamps[unit])
            if word.value < stamp:
                started = time.perf_counter()
                wait(word, stamp)
                with self._lock:
                    self.waited_s += time.perf_counter() - started
        self._here[unit] = 1
