"""Runs a command so that its Python processes record their RPCs.

Knows nothing of what they record. The command has the standard streams and the process group of
this process; a signal to this process alone is passed on to it.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from tensorwire.errors import UnavailableError

_STARTUP = str(Path(__file__).with_name("startup"))
_PASSED = (
    signal.SIGINT, signal.SIGQUIT, signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2,
)  # fmt: skip
_OF_TERMINALS = _PASSED[:3]


def run_traced(command: Sequence[str], folder: str) -> int:
    """Runs a command to its end, from the main thread.

    Args:
        command: program and arguments.
        folder: where its processes write.

    Returns:
        Its exit code, 128 + n if signal n killed it.

    Raises:
        OSError: it cannot be started.
        UnavailableError: tensorwire lies where PYTHONPATH cannot name it.
    """
    if os.pathsep in _STARTUP:
        raise UnavailableError(f"PYTHONPATH cannot name {_STARTUP}: install tensorwire elsewhere")
    paths = [_STARTUP, *filter(None, [os.environ.get("PYTHONPATH")])]
    added = {"PYTHONPATH": os.pathsep.join(paths), "TENSORWIRE_RPC_TRACE": folder}
    process: subprocess.Popen[bytes] | None = None
    early: list[int] = []

    def take(number: int, _: FrameType | None) -> None:
        if number in _OF_TERMINALS and _in_front():
            return  # the terminal has sent it to the command as well
        if process is None:
            early.append(number)
        else:
            process.send_signal(number)

    # What is ignored stays so, also for the command: nohup and background jobs mean it.
    passed = [each for each in _PASSED if signal.getsignal(each) is not signal.SIG_IGN]
    old = {each: signal.signal(each, take) for each in passed}  # default again after exec
    try:
        process = subprocess.Popen(command, env={**os.environ, **added})
        for number in early:
            process.send_signal(number)
        code = process.wait()
    finally:
        for each, handler in old.items():
            signal.signal(each, handler)
    return 128 - code if code < 0 else code


def _in_front() -> bool:
    """Tells whether our process group has the terminal."""
    try:
        terminal = os.open("/dev/tty", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    finally:
        os.close(terminal)
