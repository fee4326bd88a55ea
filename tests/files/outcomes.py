"""The outcome of an action, for tests: the errno of its failure, and the final state."""

import time
from collections.abc import Callable


def code_of(action: Callable[[], object]) -> int | None:
    """The errno with which something fails; None if it does not."""
    try:
        action()
    except OSError as error:
        return error.errno
    return None


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)
