"""The loggers of gRPC; a thread that logs never waits for the handlers.

Errors of users' functions in calls of the runtime go to grpcio's own loggers, so an alert or a
filter that a program has for them sees both. Records of ours alone go to `tensorwire.rpc`. Most
threads here serve several calls. So a thread of its own hands records to the handlers: they may
write to a pipe that is not read.
"""

import atexit
import io
import logging
import os
import sys
from collections.abc import Sequence
from typing import Any, TextIO

from tensorwire.aside import Aside

_MOST_RECORDS = 256  # each may hold all objects of the frames of its traceback
_LAST_S = 2.0  # for records that wait when the process ends

_FORMAT = logging.Formatter()

_aside: Aside[logging.LogRecord] | None = None
_ended = False
"""True when records are not delivered any more: a handler has not returned in time at exit."""


def wait(timeout_s: float) -> bool:
    """Waits until handlers have all that was logged; returns whether they do."""
    return _aside is None or _aside.wait(timeout_s)


class _Logger(logging.Logger):
    """A stand-in for the logger of that name, whose level, filters and handlers count."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.real = logging.getLogger(name)

    def isEnabledFor(self, level: int) -> bool:
        return self.real.isEnabledFor(level)

    def handle(self, record: logging.LogRecord) -> None:
        global _aside
        if _aside is None:
            _aside = Aside(_deliver, _MOST_RECORDS, _missing)
        if record.exc_info and _aside.waiting:  # frames would hold memory of messages
            record.exc_text, record.exc_info = _FORMAT.formatException(record.exc_info), None
        _aside.put(record)


def _deliver(records: Sequence[logging.LogRecord]) -> None:
    for record in records:
        if _ended:
            return
        try:
            logging.getLogger(record.name).handle(record)
        except Exception:  # of a user's filter or handler
            if logging.lastResort is not None:
                logging.lastResort.handleError(record)


def _missing(count: int) -> logging.LogRecord:
    text = "%d records are missing here: handlers took too long"
    return logging.LogRecord(OWN.name, logging.WARNING, __file__, 0, text, (count,), None)


def _end() -> None:
    """Waits for handlers at exit, but not for ever: `logging.shutdown` would, for their locks."""
    global _ended
    if wait(_LAST_S):
        return
    _ended = True  # before their locks are new ones, which the thread would take if it went on
    for logger in (COMMON, CHANNEL, SERVER, AIO_SERVER, OWN):
        real: logging.Logger | None = logger.real
        while real is not None:
            for handler in real.handlers:
                _abandon(handler)
            real = real.parent if real.propagate else None
    if logging.lastResort is not None:
        _abandon(logging.lastResort)


def _abandon(handler: logging.Handler) -> None:
    """Replaces a handler's locks, and its file's, which the thread may hold, so that none waits."""
    handler.createLock()  # which the thread may take too, if it goes on at this moment
    handler.acquire = handler.release = lambda: None  # type: ignore[method-assign]
    handler.flush = handler.close = lambda: None  # type: ignore[method-assign]
    target = getattr(handler, "target", None)  # of a MemoryHandler
    if isinstance(target, logging.Handler):
        _abandon(target)
    stream = getattr(handler, "stream", None)
    if stream is not None:
        for name in ("stdout", "stderr", "__stdout__", "__stderr__"):
            if getattr(sys, name, None) is stream:
                setattr(sys, name, _twin(stream))


def _twin(stream: Any) -> TextIO | None:
    """Returns another stream to the file of one, which the thread may be writing to.

    Python flushes `sys.stderr` when it ends. If another thread has its lock, it waits a second,
    then ends by a fatal error, which it writes to the same file and so waits for ever.
    """
    try:
        raw = io.FileIO(stream.fileno(), "w", closefd=False)
        return io.TextIOWrapper(raw, stream.encoding, stream.errors, write_through=True)
    except (AttributeError, OSError, ValueError):
        return None


def _forked() -> None:
    """Resets the state in a forked child, where the thread does not run."""
    global _aside
    _aside = None


COMMON = _Logger("grpc._common")
"""The logger of serializers and deserializers, but not of a server of asyncio."""
CHANNEL = _Logger("grpc._channel")
"""The logger of iterators of requests."""
SERVER = _Logger("grpc._server")
"""The logger of servicers and interceptors."""
AIO_SERVER = _Logger("grpc._cython.cygrpc")
"""The logger of servicers of asyncio, and their callbacks."""
OWN = _Logger("tensorwire.rpc")
"""The logger of all else."""

os.register_at_fork(after_in_child=_forked)
atexit.register(_end)
