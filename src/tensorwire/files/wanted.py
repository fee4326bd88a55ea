"""Tells whether a program still waits for its call: one that is interrupted does not."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

_here = threading.local()


def is_still_wanted() -> bool:
    """What this thread does at present is still wanted. Who waits long asks now and then."""
    check: Callable[[], bool] | None = getattr(_here, "check", None)
    return check is None or check()


@contextlib.contextmanager
def wanted_while(check: Callable[[], bool]) -> Iterator[None]:
    """What this thread does inside is wanted as long as `check` says so."""
    before = getattr(_here, "check", None)
    _here.check = check
    try:
        yield
    finally:
        _here.check = before
