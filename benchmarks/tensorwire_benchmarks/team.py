"""The processes of one system: its server, if it has one, and its workers; resident between turns.

The bench's process only sends commands and draws. A process that dies, fails or stops answering
becomes a TeamError with a reason, and its team is closed; closing always ends every process and
removes the team's folder. All are started by command (never forked) with one thread each for torch.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import selectors
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from tensorwire.bench.machine import process_cpu_seconds
from tensorwire.bench.processes import PairError
from tensorwire_benchmarks.figures import StepTimes, WorkerEnd
from tensorwire_benchmarks.link import Hosts
from tensorwire_benchmarks.models import Model
from tensorwire_benchmarks.systems import System
from tensorwire_benchmarks.worker import Order, Run

_BENCHMARKS = str(Path(__file__).resolve().parents[1])
"""Where the processes import this package from."""

_LOOK_S = 0.5  # how often a waiting bench looks whether the server lives


class TeamError(PairError):
    """A team could not do what it was asked; the message is the reason for a row's note."""


class Team:
    """Owns the processes of one system for one model over one wire.

    With `hosts` the server is on the first and all workers are on the second.

    Methods block and are for one thread. After any error the team is closed. `close` may be called
    twice.

    Attributes:
        note: how the system is tuned, for the note of its rows.

    Raises:
        TeamError: the processes did not come up within `start_timeout_s`.
    """

    def __init__(
        self, system: System, wire: str, model: Model, workers: int, optimizer: str,
        threads: int = 1, start_timeout_s: float = 120.0, hosts: Hosts | None = None,
    ) -> None:  # fmt: skip
        self._name = system.name
        self._folder = tempfile.TemporaryDirectory(prefix="tensorwire-bench-")
        self._workers: list[subprocess.Popen[bytes]] = []
        self._links: list[Connection] = []
        self._server: subprocess.Popen[bytes] | None = None
        self._closed = False
        self._hosts = hosts
        environment = _environment(system, wire)
        try:
            address = ""
            if system.server is not None:
                arguments = system.server_arguments(
                    wire, workers, optimizer, threads, self._folder.name,
                    "127.0.0.1" if hosts is None else hosts[0].address,
                )  # fmt: skip
                address = self._start_server(
                    [sys.executable, "-m", system.server, *arguments], environment, start_timeout_s
                )
            if system.in_job and wire != "shm":
                # A server on another host; these workers are on one, and share memory there.
                environment["TENSORWIRE_TRANSPORTS"] = "shm,tcp"
            self._start_workers(workers, _for_workers(environment, system, workers, address))
            orders = [
                Order(system.trainer, model, rank, workers, optimizer, self._folder.name, address)
                for rank in range(workers)
            ]
            self._call("start", orders, start_timeout_s)
        except BaseException:
            self.close()
            raise
        self.note = ""

    # --- starting -------------------------------------------------------------------------------

    def _error_file(self, who: str) -> IO[bytes]:
        return open(os.path.join(self._folder.name, f"{who}.err"), "wb")

    def _on(self, host: int, command: Sequence[str]) -> list[str]:
        """The command on one of the hosts, where there are hosts."""
        return list(command) if self._hosts is None else self._hosts[host].command(*command)

    def _start_server(
        self, command: Sequence[str], environment: Mapping[str, str], timeout_s: float
    ) -> str:
        """Starts it and returns the address that it writes into an inherited descriptor."""
        reading, writing = os.pipe()
        try:
            with self._error_file("server") as errors:
                self._server = subprocess.Popen(
                    self._on(0, [*command, "--address-fd", str(writing)]),
                    # Its input ends with the bench, whatever happens to the bench.
                    stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=errors,
                    pass_fds=(writing,), env=environment, start_new_session=True,
                )  # fmt: skip
            os.close(writing)
            writing = -1
            return self._read_line(reading, time.monotonic() + timeout_s)
        finally:
            os.close(reading)
            if writing >= 0:
                os.close(writing)

    def _read_line(self, descriptor: int, end: float) -> str:
        text = b""
        with selectors.DefaultSelector() as selector:
            selector.register(descriptor, selectors.EVENT_READ)
            while not text.endswith(b"\n"):
                if not selector.select(max(0.0, end - time.monotonic())):
                    raise TeamError("the server gave no address in time")
                part = os.read(descriptor, 1024)
                if not part:
                    raise TeamError(f"the server ended before it listened{self._said('server')}")
                text += part
        return text.decode().strip()

    def _start_workers(self, count: int, environments: Sequence[Mapping[str, str]]) -> None:
        pairs = [socket.socketpair() for _ in range(count - 1)]
        try:
            for rank, environment in enumerate(environments):
                barrier = [a for a, _ in pairs] if rank == 0 else [pairs[rank - 1][1]]
                self._start_worker(rank, [end.fileno() for end in barrier], environment)
        finally:
            for pair in pairs:
                for end in pair:
                    end.close()

    def _start_worker(
        self, rank: int, barrier: Sequence[int], environment: Mapping[str, str]
    ) -> None:
        ours, theirs = Pipe()
        self._links.append(ours)
        with theirs, self._error_file(f"worker{rank}") as errors:
            command = [
                sys.executable, "-m", "tensorwire_benchmarks.worker", "--rank", str(rank),
                "--control-fd", str(theirs.fileno()),
                "--barrier-fds", ",".join(map(str, barrier)),
            ]  # fmt: skip
            self._workers.append(
                subprocess.Popen(
                    self._on(1, command), stderr=errors,
                    stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(), *barrier), env=environment, start_new_session=True,
                )
            )  # fmt: skip

    # --- commands -------------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        """Whether it has ended, by close or because something failed."""
        return self._closed

    @property
    def pids(self) -> list[int]:
        """All its processes, workers first."""
        server = [self._server.pid] if self._server is not None else []
        return [*(worker.pid for worker in self._workers), *server]

    def prepare(self, timeout_s: float = 300.0) -> None:
        """Lets the system look for its best settings."""
        self.note = self._call("prepare", None, timeout_s)[0]

    def run(
        self, count: int, timeout_s: float = 300.0, *, held: bool = False
    ) -> tuple[list[list[StepTimes]], float, float]:
        """Runs `count` steps; `held` as in `worker.Run`.

        Returns:
            Steps per worker, CPU seconds of all workers, CPU seconds of the server.
        """
        before = self._server_cpu()
        answers = self._call("run", Run(count, held), timeout_s)
        return (
            [times for times, _ in answers],
            sum(cpu for _, cpu in answers),
            self._server_cpu() - before,
        )

    def digest(self) -> list[float]:
        """Per worker, a number that differs when parameters differ."""
        return self._call("digest", None, 60.0)

    def end(self) -> list[WorkerEnd]:
        """Where each worker is after its last step."""
        return self._call("end", None, 120.0)

    def _server_cpu(self) -> float:
        if self._server is None or self._closed:
            return 0.0
        try:
            return process_cpu_seconds(self._server.pid)
        except ProcessLookupError as error:
            self.close()
            raise TeamError("the server process has ended") from error

    def _call(self, name: str, arguments: Any, timeout_s: float) -> list[Any]:
        """Sends a command to all workers (a list: one argument each) and returns their answers."""
        if self._closed:
            raise TeamError(f"the processes of {self._name} have ended")
        try:
            for rank, link in enumerate(self._links):
                link.send((name, arguments[rank] if isinstance(arguments, list) else arguments))
            return self._answers(name, time.monotonic() + timeout_s, timeout_s)
        except OSError as error:
            reason = TeamError(f"a worker ended before '{name}' ({error})")
            self.close()
            raise reason from error
        except BaseException:
            self.close()
            raise

    def _answers(self, name: str, end: float, timeout_s: float) -> list[Any]:
        answers: dict[int, Any] = {}
        while len(answers) < len(self._links):
            waiting = [link for rank, link in enumerate(self._links) if rank not in answers]
            ready = wait(waiting, min(_LOOK_S, max(0.0, end - time.monotonic())))
            for link in ready:
                assert isinstance(link, Connection)
                rank = self._links.index(link)
                answers[rank] = self._receive(rank, name)
            if not ready:
                self._look(name, end, timeout_s)
        return [answers[rank] for rank in range(len(self._links))]

    def _receive(self, rank: int, name: str) -> Any:
        try:
            good, result = self._links[rank].recv()
        except EOFError:
            code = _exit_code(self._workers[rank])
            raise TeamError(
                f"worker {rank} ended in '{name}', exit code {code}{self._said(f'worker{rank}')}"
            ) from None
        if not good:
            raise TeamError(f"worker {rank}: {result}")
        return result

    def _look(self, name: str, end: float, timeout_s: float) -> None:
        """Nobody answered for a while: is the server alive, is there time left?"""
        if self._server is not None and self._server.poll() is not None:
            raise TeamError(
                f"the server ended in '{name}', exit code {self._server.returncode}"
                f"{self._said('server')}"
            )
        if time.monotonic() >= end:
            raise TeamError(f"no answer to '{name}' within {timeout_s:g} s")

    def _said(self, who: str) -> str:
        """The last line on a process's standard error, for a reason."""
        with contextlib.suppress(OSError):
            text = Path(self._folder.name, f"{who}.err").read_text(errors="replace").strip()
            if text:
                return f": {text.splitlines()[-1][:200]}"
        return ""

    def close(self) -> None:
        """Ends all processes: asks the workers first, then kills. Always succeeds."""
        if self._closed:
            return
        self._closed = True
        for link in self._links:
            with contextlib.suppress(OSError):
                link.send(("stop", None))
        end = time.monotonic() + 3
        for worker in self._workers:
            _end(worker, max(0.1, end - time.monotonic()))
        for link in self._links:
            link.close()
        if self._server is not None:
            assert self._server.stdin is not None
            with contextlib.suppress(OSError):
                self._server.stdin.close()
            self._server.terminate()
            _end(self._server, 2)
        self._folder.cleanup()

    def __enter__(self) -> Team:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _environment(system: System, wire: str) -> dict[str, str]:
    """That of all processes of a team: one thread each, nothing of the developer's shell."""
    found = {k: v for k, v in os.environ.items() if not k.startswith("TENSORWIRE_")}
    found["OMP_NUM_THREADS"] = "1"
    found["PYTHONPATH"] = os.pathsep.join(filter(None, (_BENCHMARKS, found.get("PYTHONPATH"))))
    if system.in_job:
        found["TENSORWIRE_SECRET"] = secrets.token_hex(32)
        found["TENSORWIRE_TRANSPORTS"] = "shm,tcp" if wire == "shm" else "tcp"
    return found


def _for_workers(
    environment: Mapping[str, str], system: System, workers: int, address: str
) -> list[dict[str, str]]:
    if not system.in_job:
        return [dict(environment)] * workers
    job = {"TENSORWIRE_WORKERS": str(workers), "TENSORWIRE_SERVERS": address}
    return [{**environment, **job, "TENSORWIRE_RANK": str(rank)} for rank in range(workers)]


def _exit_code(process: subprocess.Popen[bytes]) -> int | None:
    with contextlib.suppress(subprocess.TimeoutExpired):
        return process.wait(1)
    return None


def _end(process: subprocess.Popen[bytes], patience_s: float) -> None:
    try:
        process.wait(patience_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
