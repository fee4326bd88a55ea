"""Maps exceptions to the errno that a file system gives (table in docs/files.md)."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from tensorwire.errors import (
    BusyError,
    ClosedError,
    PeerLostError,
    StaleHandleError,
    TensorwireError,
    TimeoutError,
    UnavailableError,
)

# The first class that fits counts.
_ERRNOS: tuple[tuple[type[BaseException], int], ...] = (
    (BusyError, errno.EBUSY),
    (ClosedError, errno.EBADF),
    (PeerLostError, errno.ENOTCONN),
    (StaleHandleError, errno.ESTALE),
    (TimeoutError, errno.ETIMEDOUT),
    (UnavailableError, errno.EOPNOTSUPP),
    (PermissionError, errno.EACCES),
    (MemoryError, errno.ENOMEM),
    (LookupError, errno.ENOENT),
)


def refuse(code: int, path: str, why: str = "") -> OSError:
    """Returns the error for a path, in the subclass of OSError that Python has for this errno."""
    text = os.strerror(code)
    return OSError(code, f"{text}: {why}" if why else text, path)


# Errors of what a program asks for wrongly. Others say that something is missing or over, which
# programs ask for all the time.
_REFUSALS = {
    *(errno.EINVAL, errno.EBUSY, errno.EPERM, errno.EROFS, errno.EDOM, errno.EFBIG, errno.ENODATA),
    *(errno.ESTALE, errno.ENOSPC, errno.EOPNOTSUPP),
}


class Explanations:
    """A printer, to stderr, of reasons for refusals, as programs get only an error number.

    A line that equals the one before it is not printed again. Several threads may call it.

    Args:
        who: the name of the command, with which each line begins.
    """

    def __init__(self, who: str) -> None:
        self._who, self._last = who, ""

    def __call__(self, error: OSError) -> None:
        """Prints the text of a refusal if it says more than its number."""
        text = error.strerror or ""
        if error.errno not in _REFUSALS or text in ("", os.strerror(error.errno)):
            return
        line = f"{self._who}: {error.filename}: {text}"
        if line != self._last:
            self._last = line
            with suppress(OSError, ValueError):  # nobody reads it
                print(line, file=sys.stderr, flush=True)


@contextmanager
def as_os_errors(path: str) -> Iterator[None]:
    """Turns the block's errors into OSErrors about a path."""
    try:
        yield
    except OSError as error:
        if error.errno is not None:
            raise
        raise _translated(error, path) from error
    except (TensorwireError, MemoryError, LookupError) as error:
        raise _translated(error, path) from error


def _translated(error: BaseException, path: str) -> OSError:
    code = next((code for kind, code in _ERRNOS if isinstance(error, kind)), errno.EIO)
    return refuse(code, path, str(error))
