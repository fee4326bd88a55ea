"""The loggers of gRPC; who logs never waits for the handlers.

What users' functions raise in calls of the runtime goes to grpcio's own loggers, so an alert or a
filter that a program has for them sees both. What is ours alone goes to `tensorwire.rpc`. Most
threads here serve several calls. So a thread of its own hands records to the handlers: they may
write to a pipe that nobody reads.
"""

import atexit
import logging
import os
from collections.abc import Sequence

from tensorwire.aside import Aside

_MOST_RECORDS = 256  # each may hold what the frames of its traceback hold
_LAST_S = 2.0  # for records that wait when the process ends

_FORMAT = logging.Formatter()

_aside: Aside[logging.LogRecord] | None = None


def wait(timeout_s: float) -> bool:
    """Waits until handlers have all that was logged; returns whether they do."""
    return _aside is None or _aside.wait(timeout_s)


class _Logger(logging.Logger):
    """Stands for the logger of that name, whose level, filters and handlers count."""

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
    if wait(_LAST_S):
        return
    for logger in (COMMON, CHANNEL, SERVER, AIO_SERVER, OWN):
        real: logging.Logger | None = logger.real
        while real is not None:
            for handler in real.handlers:
                _abandon(handler)
            real = real.parent if real.propagate else None
    if logging.lastResort is not None:
        _abandon(logging.lastResort)


def _abandon(handler: logging.Handler) -> None:
    handler.createLock()
    handler.flush = lambda: None  # type: ignore[method-assign]


def _forked() -> None:
    """In a forked child, where the thread is not."""
    global _aside
    _aside = None


COMMON = _Logger("grpc._common")
"""Serializers and deserializers, but those of a server of asyncio."""
CHANNEL = _Logger("grpc._channel")
"""Iterators of requests."""
SERVER = _Logger("grpc._server")
"""Servicers and interceptors."""
AIO_SERVER = _Logger("grpc._cython.cygrpc")
"""Servicers of asyncio, and their callbacks."""
OWN = _Logger("tensorwire.rpc")
"""All else."""

os.register_at_fork(after_in_child=_forked)
atexit.register(_end)
