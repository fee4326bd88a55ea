"""Tells whether a program still waits for its call: one that is interrupted does not."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

_here = threading.local()


def is_still_wanted() -> bool:
    """Tells whether this thread's present task is still wanted; long waits ask now and then."""
    check: Callable[[], bool] | None = getattr(_here, "check", None)
    return check is None or check()


@contextlib.contextmanager
def wanted_while(check: Callable[[], bool]) -> Iterator[None]:
    """Makes the block's work wanted only as long as `check` says so."""
    before = getattr(_here, "check", None)
    _here.check = check
    try:
        yield
    finally:
        _here.check = before
