"""Maps exceptions to the errno that a file system gives (table in docs/files.md)."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager

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
    """The error for a path; Python makes it a FileNotFoundError or the like where it has one."""
    text = os.strerror(code)
    return OSError(code, f"{text}: {why}" if why else text, path)


@contextmanager
def as_os_errors(path: str) -> Iterator[None]:
    """What tensorwire raises becomes an OSError about a path."""
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
