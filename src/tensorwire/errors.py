"""Defines the exceptions of tensorwire: each names the side that has to act.

Seven classes and five builtins are all that the core raises. The core reports numbers; the
bindings turn them into these classes with `from_code`. This module imports nothing of the
package, so that every layer may import it.
"""

from __future__ import annotations

import builtins

__all__ = [
    "BusyError",
    "ClosedError",
    "PeerLostError",
    "StaleHandleError",
    "TensorwireError",
    "TimeoutError",
    "UnavailableError",
    "consequence",
    "from_code",
]


class TensorwireError(Exception):
    """Base of every error that only tensorwire can raise."""


class ClosedError(TensorwireError):
    """This side closed it: the Node, the Peer, or (after a fork) the parent's Node.

    Nothing more will move through the object. A transfer that ends with this error may have been
    placed in part.
    """


class PeerLostError(TensorwireError, ConnectionError):
    """The other process or the link to it is gone.

    Every transfer that was in flight has completed with this error; its bytes may have been placed
    in full, in part or not at all. Connect again to reach a restarted process: its handles are new.
    """

    # A launcher shows the other process's failure first, and this one in a line.
    tensorwire_consequence = True


class StaleHandleError(TensorwireError):
    """The handle names memory that is no longer there.

    The region was freed, or its process has restarted (another incarnation). The connection is
    fine; ask the owner for a new handle.
    """


class BusyError(TensorwireError):
    """A limit or quota is reached; try again later, or have the limit raised where it was set."""


class TimeoutError(TensorwireError, builtins.TimeoutError):
    """The time given for waiting is over.

    Only the waiting has ended. The transfer goes on, its buffers stay in use, and it can be waited
    for again.
    """


class UnavailableError(TensorwireError):
    """A backend, device or library is missing here; the message says what to install or change."""


_CLASSES: dict[int, type[Exception]] = {
    1: ClosedError,
    2: PeerLostError,
    3: StaleHandleError,
    4: BusyError,
    5: TimeoutError,
    6: UnavailableError,
    7: ValueError,
    8: PermissionError,
    9: LookupError,
    10: MemoryError,
    11: TypeError,
}


def consequence(message: str) -> RuntimeError:
    """Returns the error of a process that cannot go on because another one has failed.

    Args:
        message: which process has failed, and why.

    Returns:
        The exception, not raised. Its attribute `tensorwire_consequence` tells a launcher that the
        cause is elsewhere.
    """
    error = RuntimeError(message)
    error.tensorwire_consequence = True  # type: ignore[attr-defined]
    return error


def from_code(code: int, message: str) -> Exception:
    """Builds the exception for a completion code of the core.

    Args:
        code: a code of `cpp/base/error.h`, never 0 (which is success).
        message: the full text, with peer, region, path and advice.

    Returns:
        The exception, not raised. A code that this version does not know becomes a plain
        `TensorwireError` that shows the code, so that no failure is lost.
    """
    error = _CLASSES.get(code)
    if error is None:
        return TensorwireError(f"{message} (unknown error code {code})")
    return error(message)
