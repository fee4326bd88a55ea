"""Manages several processes of a test: starts, calls, stops, kills and reaps them.

Processes are spawned, never forked, so each begins without the parent's threads and Nodes. The
parent's channel to each carries pickled objects between processes of one user and one program; it
is a tool for tests and no network protocol.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import pickle
import pkgutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection
from typing import Any

_PR_SET_PDEATHSIG = 1
_STACKS_SIGNAL = signal.SIGUSR1


class MemberError(Exception):
    """A process of a group failed; the message has its traceback or exit code, and its log."""


class Channel:
    """The control channel to the other side, for any objects that can be pickled.

    A process function gets one as its first argument; a `Member` is one too. One thread at a time.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def send(self, value: Any) -> None:
        """Sends an object. Blocks if the other side does not receive for long."""
        self._connection.send(("value", value))

    def recv(self, timeout_s: float | None = 30.0) -> Any:
        """Receives the next object.

        Raises:
            TimeoutError: none came in time (None waits for ever).
            EOFError: the other side has ended.
        """
        if not self._connection.poll(timeout_s):
            raise TimeoutError(f"nothing was received within {timeout_s:g} s")
        return self._connection.recv()[1]


class Member(Channel):
    """One process of a `PeerGroup`, as the parent sees it.

    Attributes:
        index: its place in the group.
        name: for messages.
        pid: its process number.
    """

    def __init__(
        self, index: int, name: str, process: subprocess.Popen[bytes], channel: Connection, log: Any
    ) -> None:
        super().__init__(channel)
        self.index = index
        self.name = name
        self.pid = process.pid
        self._process = process
        self._log = log
        self._outcome: tuple[str, Any] | None = None
        self._expected_end = False
        self._seen_failure = False
        self._final_log: str | None = None

    def __repr__(self) -> str:
        code = self.exit_code
        state = "running" if code is None else f"ended with {code}"
        return f"<Member {self.index} {self.name!r} pid {self.pid} {state}>"

    @property
    def exit_code(self) -> int | None:
        """The exit code: None while it runs; negative if a signal ended it."""
        return self._process.poll()

    def send(self, value: Any) -> None:
        """Sends an object to the process.

        Raises:
            MemberError: it has ended.
        """
        try:
            super().send(value)
        except OSError as error:
            raise self.failure(f"cannot be sent to: {error}") from error

    def recv(self, timeout_s: float | None = 30.0) -> Any:
        """Receives the next object that the process sent.

        Raises:
            TimeoutError: none came in time; the message shows where each thread stands.
            MemberError: it has failed or ended.
        """
        kind, value = self._next(timeout_s)
        if kind == "value":
            return value
        self._outcome = kind, value
        if kind == "result":
            raise self.failure(f"returned {value!r} and sends no more")
        raise self.failure(f"failed:\n{value}")

    def result(self, timeout_s: float | None = 30.0) -> Any:
        """Waits for the function to return and gives its result; may be called again.

        Objects that were sent and not received are thrown away.

        Raises:
            TimeoutError: it still runs; the message shows where each thread stands.
            MemberError: the function raised, or the process was ended by a signal.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while self._outcome is None:
            left = None if deadline is None else max(deadline - time.monotonic(), 0.0)
            kind, value = self._next(left)
            if kind != "value":
                self._outcome = kind, value
        kind, value = self._outcome
        if kind == "error":
            raise self.failure(f"failed:\n{value}")
        return value

    def kill(self) -> None:
        """Ends the process with SIGKILL, also if it is stopped, and waits until it is gone."""
        self._expected_end = True
        self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        """Freezes the process (SIGSTOP) and waits until it is frozen."""
        os.kill(self.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def cont(self) -> None:
        """Lets a frozen process go on (SIGCONT)."""
        os.kill(self.pid, signal.SIGCONT)

    def wait(self, timeout_s: float | None = 30.0) -> int:
        """Waits until the process is gone and returns its exit code.

        Raises:
            TimeoutError: it still runs.
        """
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"{self!r} still runs after {timeout_s:g} s") from None

    def log(self) -> str:
        """Returns the text that it has written to stdout and stderr so far."""
        if self._final_log is not None:
            return self._final_log
        with open(self._log.name, errors="replace") as file:
            return file.read()

    def _next(self, timeout_s: float | None) -> tuple[str, Any]:
        try:
            if not self._connection.poll(timeout_s):
                raise TimeoutError(
                    f"{self!r} was silent for {timeout_s:g} s. Its threads:\n{self._stacks()}"
                )
            kind, value = self._connection.recv()
            return kind, value
        except (EOFError, OSError) as error:
            if isinstance(error, TimeoutError):
                raise
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(5)
            raise self.failure("ended without a result") from None

    def failure(self, what: str) -> MemberError:
        """Returns an error of this text about the process, with its log; it counts as seen."""
        self._seen_failure = True
        return MemberError(f"{self!r} {what}\nIts log:\n{self.log()}")

    def _stacks(self) -> str:
        """Lets the process write its Python stacks to its log, and returns the log."""
        if self._is_stopped():
            # It would write them after it goes on, at any moment, which can crash the interpreter.
            return f"{self.log()}(stopped by a signal)"
        size = len(self.log())
        with contextlib.suppress(OSError):
            os.kill(self.pid, _STACKS_SIGNAL)
        deadline = time.monotonic() + 1.0
        while len(self.log()) == size and time.monotonic() < deadline:
            time.sleep(0.01)
        return self.log()

    def _is_stopped(self) -> bool:
        try:
            with open(f"/proc/{self.pid}/stat") as file:
                return file.read().rpartition(")")[2].split()[0] == "T"
        except OSError:
            return False

    def unnoticed(self) -> list[str]:
        """Returns the failure that lies in the channel unread, if there is one."""
        with contextlib.suppress(EOFError, OSError):
            while self._outcome is None and self._connection.poll(0):
                kind, value = self._connection.recv()
                if kind != "value":
                    self._outcome = kind, value
        if self._outcome and self._outcome[0] == "error" and not self._seen_failure:
            return [str(self.failure(f"failed:\n{self._outcome[1]}"))]
        return []

    def hang_up(self) -> None:
        """Asks the process to end: the function's next recv raises EOFError."""
        self._connection.close()

    def end(self, deadline: float) -> list[str]:
        """Waits for the end of the process, then kills it; returns the failure, if there is one."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(max(deadline - time.monotonic(), 0.0))
        if self.exit_code is None:
            self._expected_end = False
            self._process.kill()
        self._process.wait()
        self._final_log = self.log()
        if self.exit_code == 0 or self._expected_end or self._seen_failure:
            return []
        return [str(self.failure("was not expected to end so"))]


class PeerGroup:
    """A context that owns processes and leaves none behind.

    At the end of the block every member gets `deadline_s` seconds in all to end by itself, its
    channel being closed; what still runs then is killed and reported. After an exception in the
    block all are killed at once. If this process dies, they are killed by the kernel; start them
    from a thread that lives as long as the group.

    Args:
        deadline_s: for the orderly end of all members together.
        environment: more variables for the members.

    Raises:
        MemberError: at the end of the block: a member had failed and nobody had noticed, or had to
            be killed.
    """

    def __init__(
        self, *, deadline_s: float = 20.0, environment: Mapping[str, str] | None = None
    ) -> None:
        self.members: list[Member] = []
        self._deadline_s = deadline_s
        self._environment = dict(environment or {})
        self._logs = contextlib.ExitStack()

    def start(self, function: Callable[..., Any], *args: Any, name: str | None = None) -> Member:
        """Starts a process that runs `function(channel, *args)`.

        Args:
            function: importable by module and name; of a module other than `__main__`.
            args: anything that can be pickled.
            name: for messages; default the function's name.

        Raises:
            ValueError: the function cannot be imported by another process.
        """
        if function.__module__ == "__main__" or "<" in function.__qualname__:
            raise ValueError(
                f"{function.__qualname__} of {function.__module__} cannot be imported by another "
                "process; use a function at the top of a module other than __main__"
            )
        index = len(self.members)
        log = self._logs.enter_context(
            tempfile.NamedTemporaryFile(prefix=f"tensorwire-member-{index}-", suffix=".log")
        )
        ours, theirs = socket.socketpair()
        # The child imports nothing from its folder or arguments, only what the parent can import.
        command = "from tensorwire.testing.group import _run_member; _run_member({})"
        with theirs:
            process = subprocess.Popen(
                # Unbuffered: the log of one that is killed has all that it printed.
                [sys.executable, "-u", "-c", command.format(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **self._environment},
            )
        channel = Connection(ours.detach())
        member = Member(index, name or function.__name__, process, channel, log)
        self.members.append(member)
        # Names, not a pickled function: a pytest test module may have been imported in its own way.
        call = function.__module__, function.__qualname__, pickle.dumps(args), os.getpid()
        try:
            channel.send(call)
        except OSError as error:
            raise member.failure(f"did not start: {error}") from error
        return member

    def kill(self, index: int) -> None:
        """Ends member `index` with SIGKILL; see `Member.kill`."""
        self.members[index].kill()

    def stop(self, index: int) -> None:
        """Freezes member `index`; see `Member.stop`."""
        self.members[index].stop()

    def cont(self, index: int) -> None:
        """Lets member `index` go on; see `Member.cont`."""
        self.members[index].cont()

    def __iter__(self) -> Iterator[Member]:
        return iter(self.members)

    def __enter__(self) -> PeerGroup:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        with self._logs:
            failures = [failure for member in self.members for failure in member.unnoticed()]
            if error is not None:
                # One's failure is often another's first.
                for failure in failures:
                    error.add_note(f"Besides: {failure}")
                for member in self.members:
                    member.kill()
            # An orderly end needs all to run: a stopped one could not answer.
            for member in self.members:
                if member.exit_code is None:
                    member.cont()
                member.hang_up()
            deadline = time.monotonic() + self._deadline_s
            for member in self.members:
                failures += member.end(deadline)
        if failures and error is None:
            raise MemberError("\n\n".join(failures))


def _run_member(descriptor: int) -> None:
    """Runs a member: receives a function, calls it, and reports the result."""
    faulthandler.enable()
    faulthandler.register(_STACKS_SIGNAL, all_threads=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C: the parent decides
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    connection = Connection(descriptor)
    os.set_inheritable(descriptor, False)
    try:
        module, name, args, parent = connection.recv()
    except EOFError:
        return
    if os.getppid() != parent:
        return  # it died before it could be watched
    try:
        function = pkgutil.resolve_name(f"{module}:{name}")
        result = function(Channel(connection), *pickle.loads(args))
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            connection.send(("result", result))
    except BaseException as error:
        try:
            connection.send(("error", traceback.format_exc()))
        except OSError:
            if isinstance(error, EOFError):
                return  # the group ended while the function received: an orderly end
            traceback.print_exc()
        sys.exit(1)
