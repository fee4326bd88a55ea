"""Tells how this process ends: by which exception, and whether it is interactive."""

from __future__ import annotations

import multiprocessing
import os
import sys


def is_interactive() -> bool:
    """Tells whether a person types the program, as in a notebook; not so in its children."""
    return hasattr(sys, "ps1") and multiprocessing.parent_process() is None


def ending_error() -> BaseException | None:
    """Returns the exception that ends this process, which is about to end; None if it ends well."""
    if is_interactive():
        return None  # the last one has ended a cell or a line, and the person went on
    if multiprocessing.parent_process() is None:
        last: BaseException | None = getattr(sys, "last_value", None)
        if last is not None:
            return last  # set by the interpreter when an exception has ended the program
    error = sys.exception()  # multiprocessing ends its children while one is on its way
    return None if isinstance(error, SystemExit) and error.code in (None, 0) else error


def tell_of_no_step(model: str) -> None:
    """Prints that an optimizer made no step, so that the model is unchanged: a usual slip."""
    text = f"the optimizer of {model} got gradients, and its step() was never called"
    print(f"tensorwire: {text}; its parameters are as they were", file=sys.stderr, flush=True)


def tell_of_failed_write(error: BaseException) -> None:
    """Prints that a checkpoint could not be written, where no error can be raised."""
    text = f"tensorwire: a checkpoint was not written: {type(error).__name__}: {error}"
    print(text, file=sys.stderr, flush=True)


def end_with_error() -> None:
    """Ends a process that is ending anyway, with exit code 1, which an exception would not give.

    A notebook goes on.
    """
    if not is_interactive():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
