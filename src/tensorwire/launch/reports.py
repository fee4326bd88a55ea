"""Collects the workers' reports of exceptions that end them, and decides how each is shown.

One traceback is shown, of the error that ended the job; every other one is a line. Knows no
terminal, and waits for nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

from tensorwire.launch.output import FirstLine
from tensorwire.launch.process import Process
from tensorwire.membership.identity import LOST_MEMBER_CODE
from tensorwire.outside import parse_json
from tensorwire.tracebacks import Failure, hint

LONGEST_REPORT = 4 << 20


def failure_in(told: FirstLine) -> Failure | None:
    """Returns the failure that a worker wrote when an exception ended it; else None.

    A report that is no `Failure` as JSON, or was cut off, is shown as text, for it may say what is
    wrong.
    """
    if not told.complete and not (told.closed and told.text):
        return None
    line = told.text.partition(b"\n")[0]
    try:
        return parse_json(bytes(line), Failure, LONGEST_REPORT)
    except ValueError:
        shown = bytes(line[:1000]).decode(errors="replace")
        return Failure("a report that cannot be read", shown, "", f"{shown}\n", 0, False, False)


class Reports:
    """The failures of a job's workers, in the order in which they came.

    Attributes:
        shown: the name of the worker whose traceback was shown; "" so far.
    """

    def __init__(self) -> None:
        self.shown = ""
        self._failures: dict[str, Failure] = {}

    def add(self, name: str, failure: Failure) -> None:
        """Adds the failure of a worker."""
        self._failures[name] = failure

    def has(self, name: str) -> bool:
        """Tells whether this process has reported why it ends."""
        return name in self._failures

    def cause(self) -> str:
        """Returns the first worker whose error no other process has caused; "" if there is none."""
        own = (n for n, each in self._failures.items() if not each.consequence | each.interrupt)
        return next(own, "")

    def is_consequence(self, process: Process) -> bool:
        """Tells whether an ended process reports that another one had failed before."""
        if process.kind == "server":
            return process.code == LOST_MEMBER_CODE
        return self.has(process.name) and self._failures[process.name].consequence

    def culprit(self, process: Process, others: Iterable[Process]) -> Process | None:
        """Returns the worker whose error came first, if a process failed after it and ended before.

        A server ends when a worker is lost, and on a busy machine sooner than that worker.
        """
        told = self.has(process.name) or (
            process.kind == "server" and process.code in (1, LOST_MEMBER_CODE)
        )
        cause = self.cause() if told else ""
        return next((other for other in others if other.name == cause), None)

    def first(self) -> str:
        """Returns the first worker that has failed; "" if none has."""
        return next(iter(self._failures), "")

    def kind(self, name: str) -> str:
        """Returns class and place of a worker's error; its message is in the traceback."""
        failure = self._failures[name]
        return f"{failure.kind} at {failure.where}" if failure.where else failure.kind

    def traceback(self, name: str) -> str:
        """Returns the traceback of a worker, which is shown from now on and will not be a line."""
        self.shown = name
        failure = self._failures[name]
        text = failure.text if failure.text.endswith("\n") else f"{failure.text}\n"
        return f"{text}({hint(failure.hidden)})\n" if failure.hidden else text

    def lines(self, blamed: bool) -> list[tuple[str, str]]:
        """Returns the other workers: name, and one line without an end.

        Args:
            blamed: the process that failed first is known, and these ended because of it.
        """
        first = self._failures.get(self.shown)
        found = []
        for name, failure in self._failures.items():
            if name == self.shown:
                continue
            if first is not None and (first.kind, first.message) == (failure.kind, failure.message):
                found.append((name, f"{failure.line()}: the same error"))
            elif failure.consequence and blamed:
                found.append((name, f"{failure.line()}: a consequence, not the cause"))
            elif failure.interrupt or failure.consequence or first is None:
                found.append((name, failure.line()))
            else:
                found.append((name, f"{failure.line()}: another error"))
        return found
