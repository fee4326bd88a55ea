"""Keeps Python's collector of cycles from looking at objects that are being made and stay.

A store of 20,000 tensors makes some 300,000 objects. Meanwhile full collections ran again and
again, looked at each of them, and took nearly half of the time.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Stops collections of cycles inside, in all threads; for short code with many objects."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
