"""Defines what a worker notes of its script for a process in its place; here it notes nothing.

`rejoin` has the notes of a worker that another process can replace, with the methods of this class.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Notes:
    """The notes of a worker that no process replaces.

    Attributes:
        repeated: versions that were made of commits of a former process.
    """

    repeated = 0

    def use(
        self,
        save: Callable[[], dict[str, Any]],
        load: Callable[[dict[str, Any]], None],
        count: Callable[[dict[str, Any]], None],
        is_between_steps: Callable[[], bool],
    ) -> None:
        """Learns how to note the state of this process.

        Args:
            save: gives what this process alone has.
            load: puts that back.
            count: counts sums and versions from where they were when the present epoch began.
            is_between_steps: tells whether no optimizer has committed a part of its slices.
        """

    def use_load(self, load_again: Callable[[], None]) -> None:
        """Learns how the job goes on from what a former process has loaded."""

    @property
    def returns(self) -> bool:
        """True if the script runs again, and is not yet where it was."""
        return False

    @property
    def notes(self) -> bool:
        """True if this process takes notes, so that another one can take its place."""
        return False

    @property
    def obstacle(self) -> str:
        """The reason why no process could join by this worker's notes; "" if there is none."""
        return "nothing is noted"

    def begin_loop(self, first: int, count: int) -> range:
        """Begins a loop of epochs; returns the epochs that it gives out."""
        return range(first, count)

    def end_loop(self) -> None:
        """Ends a loop of epochs."""

    def begin_epoch(self) -> dict[str, Any] | None:
        """Begins an epoch; returns where in it the script goes on, None: at its beginning."""
        return None

    def begin_batch(self, loader: str, number: int, first: bool) -> None:
        """Begins the reading of a batch of a loader's pass."""

    def end_pass(self, loader: str, number: int) -> None:
        """Ends a pass over a loader, which is over or was left."""

    def begin_load(self) -> bool:
        """Begins a `job.load`; tells whether it is to load."""
        return True

    def loaded_before(self) -> dict[str, Any] | None:
        """Returns a predecessor's note of a complete load at this place; None: load."""
        return None

    def end_load(self, told: Callable[[], bytes | None]) -> None:
        """Ends a load, whose values are in place here; others go on after it is noted.

        Args:
            told: gives the value that `loaded_before` returns, pickled; None: nothing is noted.
        """

    def find_load(self) -> None:
        """Repeats a predecessor's load if the script goes on without one at this place."""

    def begin_save(self) -> bool:
        """Begins a `job.save`; tells whether it is to save."""
        return True

    def stepped(self, repeated: bool) -> None:
        """Notes a new version; `repeated`: by commits that a predecessor has made."""

    def refuse(self, reason: str) -> None:
        """Refuses a successor to this process or another worker; worker 0 prints it."""

    def refuse_twice(self, what: str) -> None:
        """Refuses a successor to this process, which would do `what` twice.

        A worker that joins would not.
        """
