"""How `bench files` times a way to read: with what the kernel has kept of a file, or without."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

MIB = 1 << 20
OURS, COPY, TMPFS, TORCH, ALONE = "tensorwire", "copy", "tmpfs", "torch", "alone"
PASSTHROUGH, PYTHON = "passthrough_ll", "python"
SMALL_BYTES = 4096

Way = Callable[[], float]
"""Does it once; the seconds that it took."""


def timed(action: Callable[[], object]) -> float:
    """What it makes is thrown away within the time, as a program does that reads on."""
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def timed_cold(path: Path, action: Callable[[], object]) -> float:
    """Likewise, when the kernel has kept nothing of a file; of tmpfs it keeps all."""
    descriptor = os.open(path, os.O_RDONLY)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    found = timed(action)
    os.close(descriptor)
    return found
