"""Implements `job.save` and `job.load`: the calls that write, and the work of their thread."""

from __future__ import annotations

import hashlib
import os
import pickle
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

from tensorwire.jobs.job_log import note_in_job_log

from . import checkpoint, checkpoint_folder
from .ending import tell_of_failed_write
from .replica.replica import Replica
from .session import Session
from .worker_state import WorkerState

_MOST_NOTED = 1 << 18  # bytes of what a checkpoint has put into this process


class BackgroundWrites:
    """The background writes of one worker, at most one at a time for each path.

    An error is raised once, by the next call that looks for it. One thread uses it.
    """

    def __init__(self) -> None:
        self._running: dict[str, threading.Thread] = {}
        self._errors: list[BaseException] = []

    def start(self, path: str, write: Callable[[], object]) -> None:
        """Begins to write; nothing is being written to this path."""

        def run() -> None:
            try:
                write()
            except BaseException as error:
                traceback.clear_frames(error.__traceback__)  # they would keep what was written
                self._errors.append(error)

        # Not a daemon: a process that ends has its checkpoint written first.
        self._running[path] = threading.Thread(target=run, name="tensorwire-save")
        self._running[path].start()

    def wait(self, path: str) -> None:
        """Returns when nothing is being written to a path.

        Raises:
            OSError, ...: what could not be written, to other paths too.
        """
        if (thread := self._running.get(path)) is not None:
            thread.join()
            del self._running[path]
        self.check()

    def finish(self) -> None:
        """Returns when nothing is being written."""
        for thread in self._running.values():
            thread.join()
        self._running.clear()

    def check(self) -> None:
        """Raises the error of a write, once."""
        errors, self._errors = self._errors, []
        for other in errors[1:]:
            errors[0].add_note(f"nor was another checkpoint: {type(other).__name__}: {other}")
        if errors:
            raise errors[0]


class Saving:
    """The checkpoints of one worker.

    Args:
        session: of the worker.
        kept: what `job.track` has named; more may be added.
        replicas: of its optimizers; more may be added.

    Attributes:
        counts: how often `save` was called, by path.
        writes: what is being written.
    """

    def __init__(
        self, session: Session, kept: Mapping[str, Any], replicas: Sequence[Replica]
    ) -> None:
        self._session, self._kept, self._replicas = session, kept, replicas
        self.counts: dict[str, int] = {}
        self._state = WorkerState(session, kept=kept, replicas=replicas, saves=self.counts)
        session.rejoin.use_load(self._load_unasked)
        self.writes = BackgroundWrites()
        session.before_release = self.writes.finish  # they read from a store

    def save(
        self, path: str | os.PathLike[str], keep: int | None, every: int, wait: bool
    ) -> Path | None:
        """See `Job.save`."""
        for name, number in (("keep", keep), ("every", every)):
            if number is not None and (type(number) is not int or number < 1):
                raise ValueError(f"{name} is a whole number from 1 up, not {number!r}")
        session, where = self._session, os.path.abspath(path)
        session.turns.check_present("job.save()")
        self.counts[where] = 1 + self._calls_before(where)
        if self.counts[where] % every:
            return None
        if not session.rejoin.begin_save():
            return None
        self.writes.wait(where)
        session.turns.begin_save(where)
        position = session.position.saved()
        done = session.done if position is None else position["epoch"]
        content = checkpoint.Content(
            self._kept, self._replicas, done, session.seed, position, session.slices
        )

        def write() -> Path:
            written = content.write(path, keep)
            session.turns.end_save()
            note_in_job_log("saved", path=os.path.abspath(written))
            return written

        if wait:
            return write()
        self.writes.start(where, write)
        return None

    def _calls_before(self, where: str) -> int:
        """Returns how many calls to a path were made, by the worker whose rank this one has.

        Their calls are assumed to follow each step, or each pass over the data, as this one does.
        """
        session = self._session
        if not session.acts_for_another:
            return self.counts.get(where, 0)
        return session.epoch if session.position.inside else max(session.turns.steps - 1, 0)

    def load(
        self, path: str | os.PathLike[str], editing: Callable[[Any], AbstractContextManager[None]]
    ) -> checkpoint.Loaded | None:
        """See `Job.load`; None: there is nothing to load, or the job goes on later."""
        session, rejoin = self._session, self._session.rejoin
        if not checkpoint_folder.is_unused(path):
            note_in_job_log("loaded", path=os.path.abspath(path))
        if not rejoin.begin_load():
            return None  # what a former process goes on from is noted
        is_noted, loaded = self._load_again()
        if is_noted:
            return loaded
        self.finish()
        session.barrier()  # others' too
        loaded = checkpoint.load(
            path, self._kept, self._replicas, editing, session.seed, session.pipeline > 1
        )
        rejoin.end_load(partial(self._told, loaded))
        self._compare(loaded, os.fspath(path))
        if loaded is None and session.rank == 0:
            text = f"nothing was saved in {os.fspath(path)} so far, and nothing is loaded"
            print(f"tensorwire: {text}", file=sys.stderr, flush=True)
        if loaded is not None and session.rank == 0:
            self._tell_of_slices(loaded)
        return loaded

    def _told(self, loaded: checkpoint.Loaded | None) -> bytes | None:
        """Returns a note of a load; None: a process in the place of this one reads it again."""
        if (put := self._state.loaded()) is None:
            return None
        told = pickle.dumps({"loaded": loaded and tuple(loaded), **put})
        return told if len(told) <= _MOST_NOTED else None

    def _tell_of_slices(self, loaded: checkpoint.Loaded) -> None:
        """Prints that a checkpoint of a job with other slices leads to other steps."""
        if loaded.slices not in (None, self._session.slices):
            text = (
                f"the checkpoint is of a job with {loaded.slices} slices in each step, and this "
                f"one has {self._session.slices}: its steps have other samples, and so another "
                f"result, than in that job; --slices {loaded.slices} or "
                f"tw.init(slices={loaded.slices}) goes on with the same, on any number of workers "
                "that divides it"
            )
            print(f"tensorwire: {text}", file=sys.stderr, flush=True)

    def _load_again(self) -> tuple[bool, checkpoint.Loaded | None]:
        """Repeats a load that a predecessor has noted here.

        Returns:
            Whether there is such a note, and the loaded checkpoint.
        """
        if (told := self._session.rejoin.loaded_before()) is None:
            return False, None
        loaded = told["loaded"] and checkpoint.Loaded(*told["loaded"])
        self._state.load_again(told)
        self._compare(loaded, "the checkpoint")
        return True, loaded

    def _load_unasked(self) -> None:
        is_noted, loaded = self._load_again()
        if not is_noted:
            raise RuntimeError(
                f"worker {self._session.rank} was killed while it loaded a checkpoint, and the "
                "process that took its place does not call job.load: is the file still there?"
            )
        if loaded is not None:
            self._session.begin_behind(loaded.epochs, loaded.position)

    def _compare(self, loaded: checkpoint.Loaded | None, name: str) -> None:
        """Raises RuntimeError if workers have loaded different checkpoints."""
        told = self._session.gather(hashlib.sha256(repr(loaded).encode()).digest())
        there = [rank for rank, each in enumerate(told) if any(each)]  # the others were killed
        if others := [rank for rank in there if told[rank] != told[there[0]]]:
            raise RuntimeError(
                f"worker {others[0]} has loaded another checkpoint than worker {there[0]}: {name} "
                "was written while it was read. Call job.barrier() between save and load"
            )

    def finish(self) -> None:
        """Waits until nothing is being written; raises the error of a write."""
        self.writes.finish()
        self.writes.check()

    def end(self, orderly: bool) -> None:
        """Ends all saving; raises or prints the error of a pending write."""
        try:
            self.finish()
        except Exception as failed:
            if orderly:
                raise
            tell_of_failed_write(failed)  # another error is on its way
