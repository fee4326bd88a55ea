"""Writes the lines of all processes of a job to the launcher's stdout and stderr, with names.

Colours are shown where the output is a terminal. Knows nothing of who prints what when.
"""

from __future__ import annotations

import errno
import os
import select

from tensorwire.launch.output import Lines, Output
from tensorwire.launch.process import Process

# ANSI: cyan, green, yellow, magenta, blue, and their bright forms. Red is for errors.
_COLOURS = (36, 32, 33, 35, 34, 96, 92, 93, 95, 94)
_SERVER_COLOUR = 90


class Screen:
    """Both outputs, or one if they are the same file, so that lines cannot cut into each other.

    Args:
        prefix: whether lines begin with the name of their process.
        program: what lines of the launcher itself begin with.
    """

    def __init__(self, prefix: bool, program: str) -> None:
        self._prefix, self._program = prefix, program
        self._stdout, self._stderr = Output(1), Output(2)
        if not self._stdout.lost and not self._stderr.lost and os.path.sameopenfile(1, 2):
            self._stderr = self._stdout
        self._outputs = {self._stdout, self._stderr}

    @property
    def pending(self) -> bool:
        """True if something waits to be written."""
        return self._stdout.pending or self._stderr.pending

    @property
    def loss(self) -> str:
        """Why output was lost; "" if none was, or if there was none from the beginning."""
        lost = self._stdout.lost
        return "" if lost is None or lost.errno == errno.EBADF else str(lost.strerror)

    def consumers(self, direct: bool) -> tuple[Lines | None, Lines | None]:
        """Returns consumers for stdout and stderr of a new process; `name_lines` names it.

        Args:
            direct: where an output is a terminal the process gets that itself, told by None.
        """
        stdout, stderr = (
            None if direct and _is_terminal(output) else Lines(output, "", None)
            for output in (self._stdout, self._stderr)
        )
        return stdout, stderr

    def name_lines(self, process: Process) -> None:
        """Puts its name in front of the lines of a process."""
        prefix = f"[{process.name}] " if self._prefix else ""
        for stream in process.streams:
            if isinstance(stream.consumer, Lines):
                output = stream.consumer.output
                stream.consumer.rename(prefix, _colour_of(process.name, output))

    def tell_of(self, name: str, text: str) -> None:
        """Prints lines about a process, with its name in front."""
        lines = Lines(self._stderr, f"[{name}] ", _colour_of(name, self._stderr))
        lines.feed(text.encode(errors="backslashreplace"))
        lines.close()

    def say(self, text: str) -> None:
        """Prints a line of the launcher itself."""
        line = f"{self._program}: {text}\n"
        self._stderr.add(line.encode(errors="backslashreplace"))

    def register(self, poll: select.poll) -> None:
        """Registers the descriptors that become ready when output that waited was written."""
        for output in self._outputs:
            output.register(poll)

    def note_ready(self) -> None:
        """Tells the outputs that a poll has returned, before output is read."""
        for output in self._outputs:
            output.note_ready()

    def close(self) -> None:
        """Ends the printing; does not wait for pending output."""
        for output in self._outputs:
            output.close()


def _is_terminal(output: Output) -> bool:
    return output.lost is None and os.isatty(output.descriptor)


def _colour_of(name: str, output: Output) -> int | None:
    """Returns the colour of a process; None where the output shows none."""
    wanted = not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    if not wanted or not _is_terminal(output):
        return None
    kind, _, index = name.partition(" ")
    return _COLOURS[int(index) % len(_COLOURS)] if kind == "worker" else _SERVER_COLOUR
