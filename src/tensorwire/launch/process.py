"""Starts one process of a job, tied to its launcher's life, watches it by a pidfd, and ends it.

Knows nothing of the job; whether an end is a failure is the supervisor's to say.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from tensorwire import _core
from tensorwire.errors import UnavailableError
from tensorwire.launch.guard import Guard
from tensorwire.launch.output import Consumer, Stream
from tensorwire.membership.identity import LOST_MEMBER_CODE

_CHILD = str(Path(__file__).with_name("child.py"))
_HINTS: dict[int, str] = {
    signal.SIGKILL: "perhaps the machine ran out of memory; dmesg tells",
    signal.SIGBUS: "perhaps /dev/shm is full; df /dev/shm tells",
    signal.SIGSEGV: "native code crashed; PYTHONFAULTHANDLER=1 shows where",
}
_MEMORY_HINT = "give the job more memory, or let it use less: smaller batches, fewer workers"


class MemoryKills:
    """A counter of the processes of this control group that the kernel has killed for memory.

    The kernel counts before it kills, so the death of such a process is never seen too early.

    Args:
        root: where the files of the system are; "": the usual place.

    Attributes:
        count: how many were killed since this object was made, as of the last `explains_death`.
    """

    def __init__(self, root: str = "") -> None:
        own: dict[bool, str] = {}  # the first of each version is the process's own group
        for folder, _, version_2 in _core.control_groups("memory", root):
            own.setdefault(version_2, os.fsdecode(folder))
        self._files = [
            Path(folder, "memory.events" if version_2 else "memory.oom_control")
            for version_2, folder in own.items()
        ]
        self._before, self.count, self._explained = self._read(), 0, 0

    def explains_death(self) -> bool:
        """Counts a death by SIGKILL; returns whether the kernel has killed one more than known."""
        self.count = self._read() - self._before
        if self.count <= self._explained:
            return False
        self._explained += 1
        return True

    def _read(self) -> int:
        total = 0
        for file in self._files:
            with contextlib.suppress(OSError, ValueError):
                words = dict(line.split() for line in file.read_text().splitlines())
                total += int(words.get("oom_kill", 0))
        return total


class Replaceable(Protocol):
    """A server, a worker or a standby; `Process` and `Visitor` are two."""

    kind: str
    index: int
    name: str
    pid: int
    died_for_memory: bool

    @property
    def killed(self) -> bool:
        """True if it has ended in a way that allows a successor: without a reason of its own."""

    def ending(self) -> str:
        """Returns how it ended, as a phrase that follows its name."""

    def fence(self, why: str) -> None:
        """Ends it as if it had died; `ending` then gives `why` as the reason."""


class Process:
    """A running process in a session and a process group of its own.

    If the launcher dies, the kernel kills it. When it ends, the rest of its group is killed too:
    what a worker has started does not outlive the worker.

    Args:
        kind: "worker", "server" or "standby".
        index: its place among its kind; of a standby it says nothing.
        command: the program, looked up in PATH, and its arguments.
        environment: all of it.
        guard: that ends its group if we cannot.
        memory_kills: of the control group, which all processes of a job share.
        stdin: of the process; None gives it ours.
        stdout: takes what it prints; None gives it ours.
        stderr: the same for its errors.
        extra: takes what it writes into `extra_pipe`.
        extra_pipe: (reading end, writing end), owned by this object from now on; the process
            inherits the writing end under its number.
        inherited: more descriptors that it inherits under their numbers; the caller closes its own.
        open_files: its soft limit of open files.

    Attributes:
        kind: as given, until `rename`.
        index: as given, until `rename`.
        name: such as "worker 0".
        pid: its number, and its group's.
        pidfd: ready for reading when it has ended; closed by `collect`.
        streams: its open streams.
        code: None until `collect`; then its exit code, negative: the signal that killed it.
        told_to_end: whether we have sent it a signal to end, so that its end is no failure.
        died_for_memory: whether the kernel killed it because memory ran out.

    Raises:
        OSError: it cannot be started; nothing is left of it.
    """

    def __init__(
        self,
        kind: str,
        index: int,
        command: Sequence[str],
        environment: Mapping[str, str],
        guard: Guard,
        memory_kills: MemoryKills,
        *,
        stdin: int | None,
        stdout: Consumer | None,
        stderr: Consumer | None,
        open_files: int,
        extra: Consumer | None = None,
        extra_pipe: tuple[int, int] | None = None,
        inherited: Sequence[int] = (),
    ) -> None:
        self.rename(kind, index)
        self.code: int | None = None
        self.told_to_end = self.died_for_memory = False
        self._memory_kills = memory_kills
        self._fenced = self._memory = ""
        self.streams: list[Stream] = []
        self._guard = guard
        with contextlib.ExitStack() as theirs, contextlib.ExitStack() as undo:
            undo.callback(self._close_streams)
            extra_end = self._take(extra_pipe, extra, theirs)
            ends: list[int | None] = []
            for consumer in (stdout, stderr):
                pipe = None if consumer is None else os.pipe()
                ends.append(self._take(pipe, consumer, theirs))
            self._popen = subprocess.Popen(
                [
                    *(sys.executable, "-I", "-S", _CHILD, str(os.getpid()), str(open_files)),
                    *command,
                ],
                stdin=stdin,
                stdout=ends[0],
                stderr=ends[1],
                env=environment,
                pass_fds=[*inherited, *([] if extra_end is None else [extra_end])],
                start_new_session=True,  # the terminal's Ctrl-C is for the launcher alone
            )
            undo.callback(self._popen.wait)
            undo.callback(self._popen.kill)
            self.pid = self._popen.pid
            self.pidfd = os.pidfd_open(self.pid)
            undo.pop_all()
        guard.watch(self.pid)

    def _take(
        self, pipe: tuple[int, int] | None, consumer: Consumer | None, theirs: contextlib.ExitStack
    ) -> int | None:
        """Keeps the reading end; the writing end, returned, is closed here once it is inherited."""
        if pipe is None or consumer is None:
            return None
        theirs.callback(os.close, pipe[1])
        self.streams.append(Stream(pipe[0], consumer))
        return pipe[1]

    def __str__(self) -> str:
        return f"{self.name} (pid {self.pid})"

    @property
    def killed(self) -> bool:
        """True if a signal has ended it; False as long as `code` is None."""
        return self.code is not None and self.code < 0

    @property
    def has_ended(self) -> bool:
        """True if `pidfd` is ready by now."""
        poll = select.poll()
        poll.register(self.pidfd, select.POLLIN)
        return bool(poll.poll(0))

    def pause(self) -> None:
        """Stops it (SIGSTOP) until it is ended or goes on."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, signal.SIGSTOP)

    def go_on(self) -> None:
        """Lets a stopped process go on (SIGCONT)."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, signal.SIGCONT)

    @property
    def stands_still(self) -> bool:
        """True if all of it is stopped, or it has ended."""
        flags = os.WSTOPPED | os.WEXITED | os.WNOHANG | os.WNOWAIT
        return os.waitid(os.P_PIDFD, self.pidfd, flags) is not None

    def rename(self, kind: str, index: int) -> None:
        """Gives the process another role: a standby has become a server."""
        self.kind = kind
        self.index = index
        self.name = kind if kind == "standby" else f"{kind} {index}"

    def signal(self, number: int) -> None:
        """Asks the process itself to end, and none of its children."""
        self.told_to_end = True
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, number)

    def kill(self) -> None:
        """Ends the process and its group. It is gone when `pidfd` is ready."""
        self.told_to_end = True
        self._kill_group()

    def fence(self, why: str) -> None:
        """Ends the process and its group as if it had died: it cannot go on beside its successor.

        Args:
            why: how it ended, as a phrase that follows its name.
        """
        self._fenced = why
        self._kill_group()

    def read(self, ready: set[int]) -> None:
        """Reads from its streams whose descriptors are in `ready`."""
        for stream in self.streams:
            if stream.descriptor in ready:
                stream.read()
        self.streams = [stream for stream in self.streams if not stream.closed]

    def read_all(self) -> None:
        """Reads its streams as far as there is room."""
        for stream in self.streams:
            while not (stream.closed or stream.full) and stream.read():
                pass
        self.streams = [stream for stream in self.streams if not stream.closed]

    def collect(self) -> None:
        """Takes the last words and the exit code of a process whose `pidfd` is ready."""
        self._kill_group()  # before it is waited for: until then its number cannot be another's
        self._close_streams(finish=True)
        self.code = self._popen.wait()
        killed_by_others = self.code == -signal.SIGKILL and not (self.told_to_end or self._fenced)
        if killed_by_others and self._memory_kills.explains_death():
            self.died_for_memory = True
            most, of = _core.memory_limit()
            killed = self._memory_kills.count
            self._memory = (
                f" (memory ran out: {of} is {most >> 20} MiB; {killed} "
                f"{'process was' if killed == 1 else 'processes were'} killed for memory)"
            )
        os.close(self.pidfd)
        self._guard.forget(self.pid)

    def ending(self) -> str:
        """Returns how it ended, as a phrase that follows its name."""
        if self.code is None:
            return "was still running"
        if self.code == LOST_MEMBER_CODE and self.kind == "server":
            return "ended because it had lost another process"
        if self.code >= 0:
            return f"exited with code {self.code}"
        if self._fenced:
            return self._fenced
        return f"was killed by {signal_name(-self.code)}{self._memory}"

    def hint(self) -> str:
        """Returns a possible cause of its end; "" if none is known."""
        if self.code is None or self._fenced:
            return ""
        return _MEMORY_HINT if self.died_for_memory else _HINTS.get(-self.code, "")

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def _close_streams(self, finish: bool = False) -> None:
        for stream in self.streams:
            if finish:
                stream.finish()
            stream.close()
        self.streams = []


def signal_name(number: int) -> str:
    """Returns the name of a signal, such as "SIGKILL"; a real-time signal has only a number."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def check_pidfd() -> None:
    """Raises UnavailableError if this system cannot watch processes."""
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError) as error:
        raise UnavailableError(
            "this system has no pidfd, by which the launcher watches its processes; a Linux "
            "kernel of 5.3 or newer has it"
        ) from error
