"""Receives the signals that ask a launcher to end, as something that can be polled.

Knows nothing of processes; the supervisor decides what a signal means.
"""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType
from typing import Any

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopSignals:
    """A block in which SIGINT, SIGTERM and SIGHUP are kept for `take` and do nothing else.

    A signal that is ignored at the start stays ignored: `nohup` and background jobs mean it so.

    Attributes:
        descriptor: ready for reading when `take` has something.

    Raises:
        ValueError: not in the main thread, which alone may handle signals.
    """

    def __init__(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise ValueError("a job is run from the main thread, which alone may handle signals")
        self.descriptor, self._sender = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._old_handlers: dict[int, Any] = {}
        self._old_wakeup = -1

    def take(self) -> list[int]:
        """Returns the signals that came since the last call, in their order."""
        try:
            numbers = os.read(self.descriptor, 4096)
        except BlockingIOError:
            return []
        return [number for number in numbers if number in self._old_handlers]

    def __enter__(self) -> StopSignals:
        self._old_wakeup = signal.set_wakeup_fd(self._sender, warn_on_full_buffer=False)
        for number in _STOP_SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._old_handlers[number] = signal.signal(number, _nothing)
        # Where it is ignored, the kernel throws the exit codes of children away.
        self._old_handlers[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        return self

    def __exit__(self, *_: object) -> None:
        for number, old in self._old_handlers.items():
            signal.signal(number, signal.SIG_DFL if old is None else old)  # None: not Python's
        signal.set_wakeup_fd(self._old_wakeup)
        os.close(self.descriptor)
        os.close(self._sender)


def _nothing(number: int, frame: FrameType | None) -> None:
    """Does nothing: the wakeup descriptor has the number already."""
