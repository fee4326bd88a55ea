"""Prints worker 0's progress: a line for every epoch, and on a terminal a bar."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


def _text(values: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in values.items())


def _new_bar() -> Progress:
    # Imported here: a worker whose stderr is no terminal begins 20 ms earlier without it.
    from rich import progress
    from rich.console import Console

    return progress.Progress(
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TimeRemainingColumn(),
        progress.TextColumn("{task.fields[values]}"),
        console=Console(stderr=True),
        refresh_per_second=4,
    )


class ProgressLine:
    """The progress of one call of `Job.epochs`, shown on stderr."""

    def __init__(self, epochs: int) -> None:
        self._epochs = epochs
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        if sys.stderr.isatty():
            self._bar = _new_bar()
            self._bar.start()

    def begin(self, epoch: int) -> None:
        """Begins the line of an epoch."""
        if self._bar:
            text = f"epoch {epoch + 1}/{self._epochs}"
            self._task = self._bar.add_task(text, total=None, values="")

    def expect(self, steps: int) -> None:
        """Sets how many steps the bar has."""
        if self._bar and self._task is not None:
            self._bar.update(self._task, total=steps)

    def advance(self) -> None:
        """Advances the bar by a step."""
        if self._bar and self._task is not None:
            self._bar.advance(self._task)

    def show(self, values: Mapping[str, float]) -> None:
        """Shows figures beside the bar."""
        if self._bar and self._task is not None:
            self._bar.update(self._task, values=_text(values))

    def end(self, epoch: int, values: Mapping[str, float], seconds: float) -> None:
        """Ends an epoch: its line stays, its bar goes."""
        figures = f": {_text(values)}" if values else ""
        line = f"epoch {epoch + 1}/{self._epochs}{figures} ({seconds:.1f} s)"
        if self._bar is None:
            print(line, file=sys.stderr, flush=True)
            return
        self._bar.console.print(line, highlight=False, markup=False)
        if self._task is not None:
            self._bar.remove_task(self._task)
            self._task = None

    def close(self) -> None:
        """Takes the bar away."""
        if self._bar:
            self._bar.stop()
