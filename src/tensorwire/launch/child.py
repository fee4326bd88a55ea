"""Becomes a process of a job: ties itself to the launcher's life, then turns into the command.

Run by its path with `python -I -S`, so it starts in some ten milliseconds and imports the standard
library only. A program of its own, because code between fork and exec (`preexec_fn`) may deadlock
in a parent that has threads.
"""

import ctypes
import os
import resource
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Executes a command, after the launcher's pid and the limit of open files in sys.argv."""
    launcher, open_files, command = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    # Outlives the exec below. The kernel sends it when the thread that started us ends.
    if ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL):
        sys.exit("cannot be tied to the launcher: prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != launcher:
        sys.exit("the launcher ended first")  # before it could be watched
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)  # this interpreter ignores them; the command may not
    # The launcher may have raised its own; a program may be slow, or wrong, where it is very high.
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (open_files, hard))
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.stderr.write(f"cannot run {command[0]}: {error.strerror}\n")
        sys.exit(127)


if __name__ == "__main__":
    main()
