"""A command in a machine, as this host sees it: what it writes, how it ends, signals to it."""

import base64
import contextlib
import queue
import re
import shlex
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rig import Machine


class RigError(Exception):
    """The rig, a machine or a command in it failed; the message has what it wrote last."""


class MachineOffError(RigError):
    """The machine is off: powered off, or ended by itself, which the message then explains."""


class Process:
    """A command in a machine. As a context: killed, with its group, when the block ends.

    Its standard input is empty. It leads a process group of its own.

    Attributes:
        machine: where it runs.
        argv: the command.
        pid: its number there.
        returncode: None while it runs; negative: ended by that signal.
    """

    def __init__(self, machine: "Machine", id_: int, argv: list[str]) -> None:
        self.machine = machine
        self.argv = argv
        self.pid = 0
        self.returncode: int | None = None
        self._id = id_
        self._written = {"out": bytearray(), "err": bytearray(), "all": bytearray()}
        self._ended = {"out": False, "err": False}
        self._failure: str | None = None
        self._signalled: list[str | None] = []
        self._lost = False
        self._to_channel: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def __repr__(self) -> str:
        state = "lost" if self._lost else self.returncode
        state = "running" if state is None else f"ended with {state}" if state != "lost" else state
        return f"<{shlex.join(self.argv)[:200]} in machine {self.machine.name}, {state}>"

    @property
    def output(self) -> str:
        """Returns the output so far, both streams as they came."""
        return self._text("all")

    @property
    def stdout(self) -> str:
        return self._text("out")

    @property
    def stderr(self) -> str:
        return self._text("err")

    def poll(self) -> int | None:
        """The exit code, or None while it runs.

        Raises:
            MachineOffError: the machine went off before it ended.
        """
        with self.machine.changed:
            self._check()
            return self.returncode

    def wait(self, timeout_s: float = 60.0) -> int:
        """Waits for its end and returns the exit code.

        Raises:
            TimeoutError: it still runs; the message has its output.
            MachineOffError: the machine went off before it ended.
        """
        self._wait_for(lambda: self.returncode is not None, timeout_s, "it still runs")
        assert self.returncode is not None
        return self.returncode

    def check(self, timeout_s: float = 60.0) -> str:
        """Waits for a good end and returns what it wrote to its standard output.

        Raises:
            RigError: its exit code is not 0.
        """
        if self.wait(timeout_s) != 0:
            raise RigError(f"{self!r}\n{self.output}")
        return self.stdout

    def wait_for(self, pattern: str, timeout_s: float = 60.0) -> re.Match[str]:
        """Waits until its output has a match for a pattern (a line: `(?m)^…$`).

        Raises:
            TimeoutError: there is none.
            RigError: the process ended without one.
        """
        found: re.Match[str] | None = None

        def look() -> bool:
            nonlocal found
            ended = self.returncode is not None  # its output came before
            found = re.search(pattern, self.output)
            return found is not None or ended

        self._wait_for(look, timeout_s, f"nothing matches {pattern!r}")
        if found is None:
            raise RigError(f"{self!r} wrote nothing that matches {pattern!r}\n{self.output}")
        return found

    def lines(self, timeout_s: float = 60.0) -> Iterator[str]:
        """Gives the lines of its standard output as they come, until it ends.

        Args:
            timeout_s: the longest wait for one line.
        """
        start = 0
        out = self._written["out"]
        while True:

            def more(start: int = start) -> bool:
                return out.find(b"\n", start) >= 0 or self._ended["out"]

            self._wait_for(more, timeout_s, "no line came")
            end = out.find(b"\n", start)
            if end < 0:
                if len(out) > start:
                    yield out[start:].decode(errors="replace")
                return
            yield out[start:end].decode(errors="replace")
            start = end + 1

    def signal(self, number: int, timeout_s: float = 20.0) -> None:
        """Sends a signal to its group and waits until it is sent; for SIGSTOP, until it stands."""
        with self.machine.changed:
            expected = len(self._signalled) + 1
            self.machine.order("signal", id=self._id, number=int(number))
        self._wait_for(lambda: len(self._signalled) >= expected, timeout_s, "no signal was sent")
        if error := self._signalled[expected - 1]:
            raise RigError(f"signal {number} to {self!r}: {error}")

    def kill(self) -> None:
        """Ends it, its group included, if it still runs, and waits until it is gone."""
        with contextlib.suppress(MachineOffError):
            if self.poll() is None:
                self.signal(signal.SIGKILL)
                self.wait()

    def __enter__(self) -> "Process":
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def _text(self, stream: str) -> str:
        with self.machine.changed:
            return self._written[stream].decode(errors="replace")

    def _check(self) -> None:
        if self._lost and self.returncode is None:
            raise MachineOffError(f"{self!r}: {self.machine.why_off}")

    def _wait_for(self, condition: Callable[[], bool], timeout_s: float, what: str) -> None:
        def over() -> bool:
            if condition():
                return True
            self._check()
            return False

        with self.machine.changed:
            if not self.machine.changed.wait_for(over, timeout_s):
                raise TimeoutError(f"after {timeout_s:g} s {what}: {self!r}\n{self.output}")

    # The reader's thread calls these, with the machine's lock.

    def on_started(self, event: dict[str, Any]) -> None:
        self.pid = event["pid"]

    def on_failed(self, event: dict[str, Any]) -> None:
        self._failure = event["error"]

    def on_out(self, event: dict[str, Any]) -> None:
        self._on_data("out", base64.b64decode(event["data"]))

    def on_err(self, event: dict[str, Any]) -> None:
        self._on_data("err", base64.b64decode(event["data"]))

    def _on_data(self, stream: str, data: bytes) -> None:
        self._written[stream] += data
        self._written["all"] += data
        self._ended[stream] |= not data

    def on_channel(self, event: dict[str, Any]) -> None:
        self._to_channel.put(base64.b64decode(event["data"]))

    def on_signalled(self, event: dict[str, Any]) -> None:
        self._signalled.append(event["error"])

    def on_exit(self, event: dict[str, Any]) -> None:
        self.returncode = event["code"]
        self._ended = dict.fromkeys(self._ended, True)

    def on_lost(self) -> None:
        self._lost = True
        self._to_channel.put(b"")

    def open_channel(self) -> socket.socket:
        """Joins a socket of this process to the one that the command was given."""
        ours, relay = socket.socketpair()

        def outward() -> None:
            with contextlib.suppress(MachineOffError):
                while True:
                    try:
                        data = relay.recv(1 << 16)
                    except OSError:
                        data = b""
                    encoded = base64.b64encode(data).decode()
                    self.machine.order("channel", id=self._id, data=encoded)
                    if not data:
                        break

        def inward() -> None:
            outgoing = threading.Thread(target=outward, name="rig channel out", daemon=True)
            outgoing.start()
            with relay, contextlib.suppress(OSError):
                while data := self._to_channel.get():
                    relay.sendall(data)
                relay.shutdown(socket.SHUT_WR)
                outgoing.join()

        threading.Thread(target=inward, name="rig channel in", daemon=True).start()
        return ours
