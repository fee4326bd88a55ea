"""Finds the line of a script that has called tensorwire, for warnings."""

from __future__ import annotations

import sys


def script_stacklevel() -> int:
    """Returns the `stacklevel` with which the caller's `warnings.warn` shows the script's line.

    torch wraps `step()` of optimizers, so the number of frames between differs.
    """
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and _is_ours(frame.f_globals.get("__name__")):
        frame, level = frame.f_back, level + 1
    return level


def _is_ours(module: object) -> bool:
    return str(module).partition(".")[0] in ("torch", "tensorwire")
