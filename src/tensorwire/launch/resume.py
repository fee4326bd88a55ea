"""Prints the last line of a job that failed: how to go on from its checkpoint.

Pure, but for a look at whether that is still there.
"""

from __future__ import annotations

import os
import shlex

from tensorwire.jobs.job_log import LoggedJob


def resume_line(log: LoggedJob | None, command: str, died: bool) -> str:
    """Returns a line of advice after a failure or a signal; "" without advice.

    Args:
        log: of the job; None if it has none.
        command: that started the job.
        died: the job ended because a process died, and not by an error of the script, which would
            come again, nor by a signal to the launcher.
    """
    if log is None:
        text = "it has no log: if the script has saved a checkpoint, job.load goes on from it"
        return f"{text}: {command}" if died else ""
    if log.saved and os.path.exists(log.saved):
        command, named = _with_checkpoint(command, log.loaded, log.saved)
        text = f"resume from {_shown(log.saved)}: {command}"
        if log.loaded and not named:
            text += f" (in which the script has to load that, and not {_shown(log.loaded)})"
        elif not log.loaded:
            text += " (the script has to load what it finds there, by job.load, if it does not yet)"
        return text
    if log.loaded:
        text = f"nothing was saved; resume from {_shown(log.loaded)}, as this job did: {command}"
    else:
        text = f"no checkpoint was saved (job.save), so that the job begins anew: {command}"
    return text if died else ""


def _with_checkpoint(command: str, loaded: str, saved: str) -> tuple[str, bool]:
    """Returns the command with `saved` in place of `loaded`, and whether it loads `saved` now."""
    if not loaded or loaded in (saved, os.path.dirname(saved)):
        return command, True  # a folder: the last one is loaded
    found, words = False, shlex.split(command)
    for at, word in enumerate(words):
        option, equals, path = word.rpartition("=")
        if path and os.path.abspath(path) == loaded:
            words[at], found = f"{option}{equals}{_shown(saved)}", True
    return shlex.join(words) if found else command, found


def _shown(path: str) -> str:
    """Returns a path as short as it can be from where the command is given."""
    inside = path.startswith(os.path.join(os.getcwd(), ""))
    return os.path.relpath(path) if inside else path
