"""Shortens an exception that ends a program to the frames of the user's code.

Loaded as part of the package, and by its path in workers that may never import tensorwire
(launch/startup/sitecustomize.py): it imports the standard library only, and nothing of the package.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any

VARIABLE = "TENSORWIRE_TRACEBACKS"
"""Environment variable: "short" (the default) or "full"."""

MARK = "tensorwire_consequence"
"""Attribute of an exception, true where it says only that another process has failed."""

# Frames of these packages say nothing of the user's program.
_LIBRARIES = ("torch", "tensorwire", "click", "lightning", "accelerate", "transformers")
_LONGEST_TEXT = 100_000
_LONGEST_MESSAGE = 400
_FOLD = "<folded>"


@dataclass(frozen=True, slots=True)
class Failure:
    """An uncaught exception, as text.

    Attributes:
        kind: its class as Python prints it, such as "KeyError".
        message: its text in one line, cut where it is very long.
        where: the innermost line of the user's code, "train.py:7 in train"; "" if unknown.
        text: the traceback shortened to the user's code, with causes, notes and groups; ends with a
            newline.
        hidden: how many frames were left out of it.
        consequence: another process has failed, and this one says only that.
        interrupt: it is a KeyboardInterrupt.
    """

    kind: str
    message: str
    where: str
    text: str
    hidden: int
    consequence: bool
    interrupt: bool

    def line(self) -> str:
        """Returns class, message and place in one line."""
        said = f"{self.kind}: {self.message}" if self.message else self.kind
        return f"{said}, at {self.where}" if self.where else said


def failure_of(error: BaseException, trace: TracebackType | None) -> Failure:
    """Returns the report of an exception.

    Args:
        error: the exception.
        trace: its traceback, as `sys.excepthook` gets it.
    """
    shown = traceback.TracebackException(type(error), error, trace, compact=True)
    # The message of a SyntaxError has the file and the line.
    where = "" if isinstance(error, SyntaxError) else _where(shown.stack)
    hidden = _shorten(shown, set())
    return Failure(
        kind=_kind(error),
        message=_one_line(error),
        where=where,
        text=_cut("".join(shown.format())),
        hidden=hidden,
        consequence=is_consequence(error),
        interrupt=isinstance(error, KeyboardInterrupt),
    )


def is_consequence(error: BaseException | None) -> bool:
    """Tells whether an exception, or a cause of it, says that another process has failed."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if getattr(error, MARK, False):
            return True
        if isinstance(error, BaseExceptionGroup):
            return all(map(is_consequence, error.exceptions))
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return False


def hint(hidden: int) -> str:
    """Returns one line on how many frames were left out."""
    frames = "1 frame" if hidden == 1 else f"{hidden} frames"
    return f"{frames} of libraries left out; {VARIABLE}=full shows everything"


def install(name: str) -> None:
    """Shortens the output of Python when an exception ends this process.

    An error that only says that another process has failed becomes one line. This is for workers
    whose launcher does not collect errors. A hook that the program has set stays, and so does
    Python's where whole tracebacks are wanted.

    Args:
        name: of this process, such as "worker 1".

    Raises:
        ValueError: as `wants_full`.
    """
    if wants_full() or sys.excepthook is not sys.__excepthook__:
        return

    def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        try:
            failure = failure_of(error, trace)
        except Exception:
            sys.__excepthook__(kind, error, trace)  # better whole than lost
            return
        if failure.consequence:
            text = f"{name}: {failure.line()} ({VARIABLE}=full shows everything)\n"
        else:
            text = failure.text + (f"({hint(failure.hidden)})\n" if failure.hidden else "")
        print(text, end="", file=sys.stderr, flush=True)

    sys.excepthook = show


def wants_full() -> bool:
    """Tells whether the environment asks for whole tracebacks.

    Raises:
        ValueError: it asks for something else.
    """
    wanted = os.environ.get(VARIABLE) or "short"
    if wanted not in ("short", "full"):
        raise ValueError(f"{VARIABLE} is {wanted!r}; it may be short or full")
    return wanted == "full"


# --- shortening ---------------------------------------------------------------------------------


class _Stack(traceback.StackSummary):
    """Frames, of which some stand for left-out ones."""

    def format_frame_summary(self, frame_summary: Any, **options: Any) -> str:
        if frame_summary.filename == _FOLD:
            return f"  … {frame_summary.name}\n"
        return str(super().format_frame_summary(frame_summary, **options))


def _shorten(shown: traceback.TracebackException, seen: set[int]) -> int:
    """Leaves out frames of libraries, also in causes and members of groups; returns how many."""
    if id(shown) in seen:
        return 0
    seen.add(id(shown))
    hidden, kept = 0, _Stack()
    run: list[str] = []
    for frame in [*shown.stack, None]:
        library = "" if frame is None else _library(frame.filename)
        if library:
            run.append(library)
            continue
        if run:
            # Frames above the user's program started it, and are the same for every error.
            if kept or frame is None:
                count = "1 frame" if len(run) == 1 else f"{len(run)} frames"
                names = " and ".join(dict.fromkeys(run))
                kept.append(traceback.FrameSummary(_FOLD, len(kept), f"{count} of {names}"))
            hidden += len(run)
            run = []
        if frame is not None:
            kept.append(frame)
    if any(frame.filename != _FOLD for frame in kept):
        shown.stack = kept
        for name in ("__cause__", "__context__"):
            other = getattr(shown, name)
            if other is not None and (frames := _frames_of_ours(other)):
                setattr(shown, name, None)
                hidden += frames
    else:
        hidden = 0  # all of it is a library's: there is nothing to shorten to
    others = [shown.__cause__, shown.__context__, *(shown.exceptions or ())]
    return hidden + sum(_shorten(other, seen) for other in others if other is not None)


def _frames_of_ours(shown: traceback.TracebackException) -> int:
    """Returns the number of frames of an exception that tensorwire has caught and retold.

    0 if the exception is another one, or if it or its cause has a frame of the user's code.
    """
    files = [frame.filename for frame in shown.stack]
    if not files or _library(files[0]) != "tensorwire" or shown.exceptions:
        return 0
    if not all(map(_is_known, files)):
        return 0
    count = len(files)
    other = shown.__cause__ or shown.__context__
    if other is not None:
        below = _frames_of_ours(other)
        return count + below if below else 0
    return count


def _is_known(filename: str) -> bool:
    """Tells whether a file belongs to a library or to Python."""
    folder = os.path.dirname(os.__file__) + os.sep
    own = filename.startswith(folder) and "-packages" + os.sep not in filename
    return own or bool(_library(filename))


def _library(filename: str) -> str:
    """Returns the name of the library that a file belongs to; "" for the user's code."""
    if filename.startswith("<frozen "):
        return "Python"
    standard = os.path.dirname(os.__file__)
    # An error that ends a `with` of a library, such as tw.edit(), comes through contextlib.
    if filename in (os.path.join(standard, name) for name in ("runpy.py", "contextlib.py")):
        return "Python"
    if filename.startswith(os.path.join(standard, "importlib") + os.sep):
        return "Python"
    for name in _LIBRARIES:
        for folder in getattr(sys.modules.get(name), "__path__", ()):
            if filename.startswith(str(folder) + os.sep):
                return name
    return ""


def _where(stack: traceback.StackSummary) -> str:
    for frame in reversed(stack):
        if not _library(frame.filename):
            path = os.path.relpath(frame.filename) if os.path.exists(frame.filename) else ""
            path = frame.filename if not path or path.startswith("..") else path
            inside = "" if frame.name == "<module>" else f" in {frame.name}"
            return f"{path}:{frame.lineno}{inside}"
    return ""


def _kind(error: BaseException) -> str:
    module, name = type(error).__module__, type(error).__qualname__
    return name if module in ("builtins", "__main__") else f"{module}.{name}"


def _one_line(error: BaseException) -> str:
    try:
        text = str(error)
    except Exception as why:
        return f"its text cannot be had: {type(why).__name__}"
    lines: Iterator[str] = (line.strip() for line in text.splitlines())
    joined = " ".join(line for line in lines if line)
    return joined if len(joined) <= _LONGEST_MESSAGE else joined[:_LONGEST_MESSAGE] + " …"


def _cut(text: str) -> str:
    left = len(text) - _LONGEST_TEXT
    if left <= 0:
        return text
    half = _LONGEST_TEXT // 2
    return f"{text[:half]}\n… {left} characters left out …\n{text[-half:]}"
