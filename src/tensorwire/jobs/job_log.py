"""Writes and reads the log of a job: its processes, replacements with evidence, checkpoints.

One JSON object per line, in a file of the user's runtime folder that nobody else can read and that
is locked while the job's launcher lives. The launcher writes who has which term before it tells the
successor; workers add what they save. docs/internals/launch.md has the lines.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypedDict

from tensorwire.errors import UnavailableError
from tensorwire.jobs.folder import runtime_folder
from tensorwire.jobs.host import pid_namespace
from tensorwire.jobs.lockfile import make_locked, remove_own, try_lock
from tensorwire.outside import parse_json

JOB_LOG = "TENSORWIRE_JOB_LOG"
"""The variable that tells a worker where the log is."""

_MOST_KEPT = 8  # of jobs that are over
_MOST_BYTES = 4 << 20  # that are read of one


class _LogLine(TypedDict, total=False):
    """A line; docs/internals/launch.md has which keys go with which `what`."""

    what: str
    time: float
    job: str
    launcher: int
    pids: str
    command: str
    started: float
    ticks: float
    durable: bool
    kind: str
    index: int
    pid: int
    server: int
    address: str
    term: int
    dead: int
    evidence: str
    moves: bool
    step: int
    share: int
    giver: int
    taker: int
    size: int
    memory: int
    versions: dict[str, int]
    why: str
    path: str
    text: str


@dataclass
class LoggedMember:
    """A server or worker as a log has it.

    Attributes:
        kind: "server" or "worker"; "share" where servers have shares that can move.
        index: its place among its kind.
        pid: of the process that is this member now.
        server: of a share, the number of the server that has it; None of all others.
        term: how many processes before this one had its place.
        restarts: how often it was replaced because a process had died.
        last_death: the process before: its "pid", the "evidence" as a phrase that follows its name,
            the "time" in seconds since 1970; None if there was none.
        change: how it came or went while the job ran, as "joined after step 12"; "" if it did not.
    """

    kind: str
    index: int
    pid: int
    server: int | None = None
    term: int = 0
    restarts: int = 0
    last_death: dict[str, Any] | None = None
    change: str = ""


@dataclass
class LoggedJob:
    """The state of a job by its log.

    Attributes:
        path: of the log.
        running: its launcher lives.
        job: a name that no other job has.
        launcher: number of that process.
        pids: the namespace of these numbers; "" if that is not known.
        command: what it was told to run.
        started: seconds since 1970.
        ticks: the same in seconds of this host's clock that is never set; 0: not known.
        durable: whether members are replaced.
        addresses: of the servers.
        members: in the order in which they were started.
        standby: number of the process that waits for a server to die; None: there is none.
        saved: the checkpoint that was written last, and where it belongs; "" if there is none.
        loaded: the one that job.load was called for; "" if it was not called.
        failure: why the job ended; "" if it did not, or nobody said.
        moves: of shares from server to server: "share", "giver", "taker", "size" and "memory" in
            bytes, "versions" by stores, "why", "time" in seconds since 1970.
        ended: numbers of processes of the job that its launcher has seen end.
        control: the socket at which the launcher hears `tensorwire scale`; "" if it hears nothing.
    """

    path: str
    running: bool
    job: str = ""
    launcher: int = 0
    pids: str = ""
    command: str = ""
    started: float = 0.0
    ticks: float = 0.0
    durable: bool = False
    addresses: list[str] = field(default_factory=list)
    members: list[LoggedMember] = field(default_factory=list)
    standby: int | None = None
    saved: str = ""
    loaded: str = ""
    failure: str = ""
    control: str = ""
    moves: list[dict[str, Any]] = field(default_factory=list)
    ended: set[int] = field(default_factory=set)

    def take(self, line: _LogLine) -> None:
        """Applies the next line to the job; KeyError if the line is incomplete."""
        what = line.pop("what")
        if "pid" in line:
            self.ended -= {line["pid"]}  # the number may be another process's now
        match what:
            case "ended":
                self.ended.add(line["pid"])
            case "job":
                self.pids = line.get("pids", "")
                self.job, self.launcher = line["job"], line["launcher"]
                self.command, self.started = line["command"], line["started"]
                self.durable, self.ticks = line["durable"], line.get("ticks", 0.0)
            case "member":
                self.members.append(_member(line))
            case "server listens":
                self.addresses.append(line["address"])
            case "grant":
                for member in self.members:
                    if (member.kind, member.index) == (line["kind"], line["index"]):
                        member.pid, member.term = line["pid"], line["term"]
                        if not line.get("moves"):  # else a server was ended to give shares away
                            death = {"pid": line["dead"], "evidence": line["evidence"]}
                            member.last_death = {**death, "time": line["time"]}
                            member.restarts += 1
                if self.standby == line["pid"]:
                    self.standby = None
            case "joined":
                index, change = line["index"], f"joined after step {line['step']}"
                self.members = [m for m in self.members if (m.kind, m.index) != ("worker", index)]
                self.members.append(LoggedMember("worker", index, line["pid"], change=change))
            case "drained":
                for member in self.members:
                    if (member.kind, member.index) == ("worker", line["index"]):
                        member.change = f"left after step {line['step']}"
            case "moved":
                self.moves.append({**line})
                for member in self.members:
                    if (member.kind, member.index) == ("share", line["share"]):
                        member.server = line["taker"]
            case "standby":
                self.standby = line["pid"]
            case "saved":
                self.saved = line["path"]
            case "loaded":
                self.loaded = line["path"]
            case "control":
                self.control = line["path"]
            case "failed":
                self.failure = line["text"]


def _member(line: _LogLine) -> LoggedMember:
    return LoggedMember(line["kind"], line["index"], line["pid"], line.get("server"))


class JobLog:
    """The launcher's side. Where it cannot be written the job goes on, and a line says so.

    On one host nothing outlives the launcher, so that nobody has to read it to go on.

    Args:
        command: what runs, for people.
        durable: whether members are replaced.
        say: prints a line.

    Attributes:
        path: of the file; "" if there is none.
    """

    def __init__(self, command: str, durable: bool, say: Callable[[str], None]) -> None:
        self.path = ""
        self._say, self._descriptor = say, -1
        try:
            folder = runtime_folder()
            _remove_old(folder)
            path, self._descriptor = make_locked(folder, "job-", os.O_APPEND)
            self.path = str(path)
        except (UnavailableError, OSError) as error:
            self._lose(error)
        self.add(
            "job",
            job=secrets.token_hex(8),
            launcher=os.getpid(),
            pids=pid_namespace(),
            command=command,
            started=time.time(),
            ticks=time.monotonic(),
            durable=durable,
        )

    def add(self, what: str, *, sync: bool = False, **about: Any) -> None:
        """Adds a line.

        Args:
            what: it is about.
            sync: return when it is on the disk.
            about: all else that it says.
        """
        if self._descriptor < 0:
            return
        try:
            _write(self._descriptor, what, about)
            if sync:
                os.fsync(self._descriptor)
        except OSError as error:
            self.close(keep=False)
            self._lose(error)

    def read(self) -> LoggedJob:
        """Reads the log, with the workers' lines; an empty one if it cannot be read any more."""
        with contextlib.suppress(OSError):
            if self._descriptor >= 0:
                return _read(self.path, self._descriptor)
        return LoggedJob("", True)

    def close(self, keep: bool) -> None:
        """Ends it; the file is removed unless it is kept. Idempotent."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            if not keep:
                remove_own(Path(self.path), descriptor, self._say)
            os.close(descriptor)

    def _lose(self, error: Exception) -> None:
        self.path = ""
        why = error.strerror if isinstance(error, OSError) else str(error)
        self._say(
            f"the job has no log, and goes on without: {why}; tensorwire status will not show who "
            "was replaced, nor the end of the job the last checkpoint"
        )


def note_in_job_log(what: str, **about: Any) -> None:
    """Adds a line to the log of this worker's job, if there is one."""
    if path := os.environ.get(JOB_LOG):
        with contextlib.suppress(OSError):  # the log then lacks this line
            flags = os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
            descriptor = os.open(path, flags)
            try:
                _write(descriptor, what, about)
            finally:
                os.close(descriptor)


def logged_jobs() -> list[LoggedJob]:
    """Returns the running and the failed jobs of this user on this host, the oldest first.

    Raises:
        UnavailableError: no folder is fit for logs.
    """
    found = []
    for path in runtime_folder().glob("job-*"):
        with contextlib.suppress(OSError):
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                found.append(_read(str(path), descriptor, running=not try_lock(descriptor)))
            finally:
                os.close(descriptor)
    return sorted(found, key=lambda each: each.started)


def _write(descriptor: int, what: str, about: dict[str, Any]) -> None:
    # In one piece: others add lines, too.
    line = json.dumps({"what": what, "time": time.time(), **about}).encode() + b"\n"
    if os.write(descriptor, line) < len(line):
        raise OSError(0, "no space is left for it")


def _read(path: str, descriptor: int, running: bool = True) -> LoggedJob:
    job = LoggedJob(path, running)
    for line in os.pread(descriptor, _MOST_BYTES, 0).splitlines():
        with contextlib.suppress(ValueError, KeyError):
            job.take(parse_json(line, _LogLine))
    return job


def _remove_old(folder: Path) -> None:
    """Removes logs of jobs that are over, but the last ones."""
    for path in sorted(_over(folder), reverse=True)[_MOST_KEPT - 1 :]:
        with contextlib.suppress(OSError):
            path[1].unlink()


def _over(folder: Path) -> Iterator[tuple[float, Path]]:
    for path in folder.glob("job-*"):
        with contextlib.suppress(OSError):
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                if try_lock(descriptor):
                    yield os.fstat(descriptor).st_mtime, path
            finally:
                os.close(descriptor)
