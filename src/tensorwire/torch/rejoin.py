"""Lets a replacement of a killed worker run its script again, to where the worker was.

A script can go on where the job gives something out: an epoch, a batch, the end of a pass, the end
of the epochs. There the state that no other process has is noted (`History.mark`). A successor
makes models, optimizers and loaders as the script says, and gets the answers that the former
process got. It skips the epochs and batches before the position, and goes on there.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from typing import Any

from tensorwire.durability.history import History, NoteKind
from tensorwire.failpoints import failpoint
from tensorwire.membership.takeovers import Takeovers

from .notes import Notes


class Rejoin(Notes):
    """The notes of a worker that another process can replace: where its script is.

    Args:
        history: of the worker.
        rank: of the worker.
        tells: worker 0 prints why no process can take the place of a worker, as soon as that is
            so; else the reason is shown only when a worker is killed.
        takeovers: where other workers take over the slices of a killed one: then the notes are for
            workers that join. None: a killed worker is replaced.
    """

    def __init__(
        self, history: History, rank: int, tells: bool, takeovers: Takeovers | None = None
    ) -> None:
        self._history, self._rank = history, rank
        self._takeovers, self._tells = takeovers, tells and takeovers is None
        self._loop, self._in_loop = 0, False  # of epochs
        self._stepped = False  # since the last position
        self._told = False  # that no process can take the place of this one
        self._load_again: Callable[[], None] = lambda: None
        self._began: dict[str, Any] = {}  # sums and versions before the present epoch

    def use(
        self,
        save: Callable[[], dict[str, Any]],
        load: Callable[[dict[str, Any]], None],
        count: Callable[[dict[str, Any]], None],
        is_between_steps: Callable[[], bool],
    ) -> None:
        """See `Notes`."""
        self._save, self._load, self._count = save, load, count
        self._is_between_steps = is_between_steps

    def use_load(self, load_again: Callable[[], None]) -> None:
        """See `Notes`."""
        self._load_again = load_again

    # ---- for the job and its loaders

    @property
    def returns(self) -> bool:
        """True if the script runs again, and is not yet where it was."""
        return self._history.position is not None

    @property
    def notes(self) -> bool:
        """True if this process takes notes, so that another one can take its place."""
        return self._takeovers is None and not self._history.is_refused

    def begin_loop(self, first: int, count: int) -> range:
        """Begins a loop of epochs; returns the epochs that it gives out."""
        self._loop, self._in_loop = self._loop + 1, True
        if self._takeovers is not None and self._takeovers.joins and self._loop == 1:
            self._takeovers.wait_to_join()
            self._history.join(self._takeovers.donor())
        there = self._history.position
        if there is None:
            self._history.begin_loop()
            return range(first, count)
        if there["loop"] > self._loop or self._is_at("done"):
            return range(0)
        return range(there["epoch"], count)

    def end_loop(self) -> None:
        """Ends a loop of epochs."""
        self._in_loop = False
        if not self.returns:
            self._mark("done", again=True)
        elif self._is_at("done"):
            self._reach()

    def begin_epoch(self) -> dict[str, Any] | None:
        """Begins an epoch; returns where in it the script goes on, None: at its beginning."""
        there = self._history.position
        if there is None:
            self._mark("epoch", again=True)
            return None
        self._began = there["began"]
        if self._is_at("epoch"):
            self._reach()
        else:  # what the epoch has made so far is made again
            self._count(self._began)
        where: dict[str, Any] | None = there["state"]["position"]
        return where

    def begin_batch(self, loader: str, number: int, first: bool) -> None:
        """Begins the reading of a batch of a loader's pass."""
        if self.returns:
            if self._is_at("batch", loader, number):
                self._reach()
        elif (first or self._stepped) and self._is_between_steps():
            if self._takeovers is None:
                self._mark("batch", loader, number, passing=True)
            else:
                self._stepped = False
                self._history.begin_pass()
                self._change(self._takeovers, loader, number)

    def _change(self, takeovers: Takeovers, loader: str, number: int) -> None:
        """Makes a change of the workers that is due here; a leaving worker ends."""
        if (change := takeovers.due()) is None:
            return
        obstacle = ""
        if change.donor == self._rank:
            self._mark("batch", loader, number, passing=True)
            obstacle = self._history.reason
        if not takeovers.make(change, obstacle):
            text = f"worker {self._rank} leaves after step {change.step}; others have its slices"
            print(f"tensorwire: {text}", file=sys.stderr, flush=True)
            raise SystemExit(0)

    @property
    def obstacle(self) -> str:
        """The reason why no process could join by this worker's notes; "" if there is none."""
        return self._history.reason

    def end_pass(self, loader: str, number: int) -> None:
        """Ends a pass over a loader, which is over or was left."""
        if not self.returns:
            self._mark("over", loader, number)
        elif self._is_at("over", loader, number):
            self._reach()

    def begin_load(self) -> bool:
        """Begins a `job.load`; tells whether it is to load.

        A script that loads an existing file may find another state of the files when it runs again:
        the loads of its worker lie before the position.
        """
        if self._history.replaying and not self._history.is_next(NoteKind.LOAD):
            text = f"worker {self._rank}, in a new process, leaves out job.load: it goes on later"
            print(f"tensorwire: {text}", file=sys.stderr, flush=True)
            return False
        return True

    def loaded_before(self) -> dict[str, Any] | None:
        """Returns a predecessor's note of a complete load at this place; None: load.

        The file may have been removed or replaced since.
        """
        if (data := self._history.skip_load()) is not None:
            told: dict[str, Any] = pickle.loads(data)
            self._count(told)
            return told
        if self._history.take(NoteKind.LOAD) is None:
            self._history.note(NoteKind.LOAD, b"")
        return None

    def end_load(self, told: Callable[[], bytes | None]) -> None:
        """See `Notes`."""
        if (data := told()) is not None:
            self._history.take_or_note(NoteKind.LOAD, data, 0, 1, 0)

    def find_load(self) -> None:
        """Repeats a predecessor's load if the script goes on without one at this place.

        A script that loads an existing file may not find it again.
        """
        if self._history.is_next(NoteKind.LOAD):
            text = (
                f"worker {self._rank}, in a new process, goes on from the checkpoint that it had "
                "loaded, though the script does not call job.load again"
            )
            print(f"tensorwire: {text}", file=sys.stderr, flush=True)
            self._load_again()

    def begin_save(self) -> bool:
        """Begins a `job.save`; tells whether it is to save.

        A predecessor that got further has saved here; the servers no longer have that version.
        """
        if self._history.replaying:
            text = f"worker {self._rank}, in a new process, leaves out job.save: it goes on later"
            print(f"tensorwire: {text}", file=sys.stderr, flush=True)
        return not self._history.replaying

    def stepped(self, repeated: bool) -> None:
        """Notes a new version; `repeated`: by commits that a predecessor has made."""
        self._stepped = True
        self.repeated += repeated

    def refuse(self, reason: str) -> None:
        """Refuses a successor to this process or another worker; worker 0 prints it."""
        self._history.refuse(reason)
        self._tell()

    def refuse_twice(self, what: str) -> None:
        """See `Notes`."""
        if self._takeovers is None:
            self.refuse(f"{what}, which a successor would do twice")

    # ----

    def _tell(self) -> None:
        if self._tells and not self._told and self._rank == 0:
            now = "" if self._history.is_refused else " at present"
            reason = self._history.reason
            text = f"a worker of this job that is killed is not replaced{now}, as {reason}"
            print(f"tensorwire: {text}", file=sys.stderr, flush=True)
        self._told = True

    def _is_at(self, *where: Any) -> bool:
        there = self._history.position
        return there is not None and there["loop"] == self._loop and there["at"] == where

    def _mark(self, *where: Any, passing: bool = False, again: bool = False) -> None:
        self._stepped = False
        if self._history.is_refused:
            self._tell()
            return
        try:
            state = self._save()
        except Exception as error:  # of an object that was kept
            self.refuse(
                f"what job.track has named cannot be noted: {type(error).__name__}: {error}"
            )
            return
        if where[0] == "epoch":
            self._began = {each: state[each] for each in ("sums", "versions")}
        position = {"at": where, "loop": self._loop, "epoch": state["epoch"], "state": state}
        position["began"] = self._began
        # Outside of a loop a pass is not gone on with, but made again.
        passing = passing and self._in_loop
        if too_long := self._history.mark(position, passing=passing, again=again):
            self.refuse(too_long)
        elif self._history.reason:
            self._tell()
        failpoint("position.noted")

    def _reach(self) -> None:
        there = self._history.position
        assert there is not None
        self._history.reach()
        self._stepped = False
        self._load(there["state"])
        if self._takeovers is not None and self._takeovers.joins:
            self._takeovers.joined()
