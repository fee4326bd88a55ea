"""Measures and adapts the size from which messages of the runtime travel by rendezvous.

Measured on the path when the two ends meet (`runtime/measuring.py`), and adapted by what calls take
afterwards: near the threshold every so many go the other way. Pure; knows no messages.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from statistics import median

OBSERVER: Callable[[str, str, int], object] | None = None
"""For `tensorwire rpc trace`: told of each threshold, with the side, the transport and bytes."""

LEAST_BYTES = 1 << 14
"""No threshold that is measured is lower."""

_VARIABLE = "TENSORWIRE_RPC_THRESHOLD_BYTES"
_TRY_EVERY = 16
_SAMPLES = 16
_LEAST_SAMPLES = 8
_BETTER = 0.9


def chosen_threshold(given: int | None) -> int | None:
    """The user's threshold: what it gives, else the environment variable; None: it is measured.

    Raises:
        ValueError: the variable is no whole number from 0 up.
    """
    if given is not None:
        return given
    text = os.environ.get(_VARIABLE, "")
    if not text:
        return None
    if not text.isascii() or not text.isdecimal():
        raise ValueError(f"{_VARIABLE} is a number of bytes, not {text!r}")
    return int(text)


class Threshold:
    """The threshold of one end of an attachment. Any thread may use it.

    Args:
        most_bytes: its first value, which it never exceeds.
        fixed: it is the user's, and never changes.
        about: "client" or "server", and the transport; told to who traces.

    Attributes:
        size_bytes: from this size messages go by rendezvous.
        most_bytes, fixed: as given.
        changed: told of a new value, if anybody is to be.
    """

    def __init__(self, most_bytes: int, *, fixed: bool, about: tuple[str, str]) -> None:
        self.size_bytes = most_bytes
        self.fixed = fixed
        self.changed: Callable[[int], object] | None = None
        self.most_bytes = most_bytes
        self._about = about
        self._lock = threading.Lock()
        self._count = 0
        self._taken: dict[tuple[int, bool], deque[float]] = {}
        if fixed:
            self._trace()

    def _trace(self) -> None:
        if OBSERVER is not None:
            OBSERVER(*self._about, self.size_bytes)

    def passed(self, size_bytes: int) -> bool:
        """Whether a message is to go by rendezvous. Near the threshold some go the other way."""
        above = size_bytes >= self.size_bytes
        if self._is_near(size_bytes):
            self._count += 1
            if self._count % _TRY_EVERY == 0:
                return not above
        return above

    def _is_near(self, size_bytes: int) -> bool:
        if self.fixed or not LEAST_BYTES // 2 < size_bytes < self.most_bytes:
            return False
        return self.size_bytes <= 2 * size_bytes < 4 * self.size_bytes

    def measured(self, size_bytes: int) -> None:
        """Sets what was measured, by this end or the other one."""
        with self._lock:
            self._set(size_bytes)
            if not self.fixed:
                self._trace()

    def observe(self, size_bytes: int, by_rendezvous: bool, seconds: float) -> None:
        """A call with a request of this size has taken so long."""
        if not self._is_near(size_bytes):
            return
        group = size_bytes.bit_length()
        with self._lock:
            taken = self._taken.setdefault((group, by_rendezvous), deque(maxlen=_SAMPLES))
            taken.append(seconds)
            inside = self._taken.get((group, False), ())
            beside = self._taken.get((group, True), ())
            if min(len(inside), len(beside)) < _LEAST_SAMPLES:
                return
            above = size_bytes >= self.size_bytes
            before, other = (beside, inside) if above else (inside, beside)
            if median(other) < _BETTER * median(before):
                self._set(1 << group if above else 1 << (group - 1))
                self._trace()
            else:
                self._taken.pop((group, not above), None)  # asked again with fresh ones

    def _set(self, size_bytes: int) -> None:
        size_bytes = min(max(size_bytes, LEAST_BYTES), self.most_bytes)
        self._taken.clear()
        if self.fixed or size_bytes == self.size_bytes:
            return
        self.size_bytes = size_bytes
        if self.changed is not None:
            self.changed(size_bytes)
