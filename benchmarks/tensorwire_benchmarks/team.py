"""The processes of one system: its server, if it has one, and its workers; resident between turns.

Each worker is the driver of a `ProcessPair`, the server the target of the first (`worker.py`). The
bench's process only sends commands and draws. A process that dies, fails or stops answering becomes
a PairError with a reason, and its team is closed; closing always ends every process and removes the
team's folder. All have one thread each for torch.
"""

from __future__ import annotations

import contextlib
import secrets
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from multiprocessing import Pipe, active_children
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from tensorwire.bench.machine import process_cpu_seconds
from tensorwire.bench.processes import PairError, ProcessPair
from tensorwire_benchmarks import worker
from tensorwire_benchmarks.figures import End, StepTimes
from tensorwire_benchmarks.link import Hosts
from tensorwire_benchmarks.systems import System
from tensorwire_benchmarks.workloads.catalog import Workload

_START_S = 120.0  # that a system has to come up
_LOOK_S = 0.5  # how often a waiting bench looks whether the server lives


class Team:
    """Owns the processes of one system for one model over one wire.

    With `hosts` the server is on the first and all workers are on the second. `program` is the
    module that runs in the workers; its Driver, a subclass of that of `worker`, may do without a
    `model`.

    Methods block and are for one thread. After any error the team is closed. `close` may be called
    twice.

    Attributes:
        note: how the system is tuned, for the note of its rows.
        closed: whether it has ended, by `close` or because something failed.

    Raises:
        PairError: the processes did not come up.
    """

    def __init__(
        self, system: System, wire: str, model: Workload | None, workers: int, optimizer: str,
        threads: int = 1, hosts: Hosts | None = None, program: str = worker.__name__,
    ) -> None:  # fmt: skip
        self.note = ""
        self.closed = False
        self._pids: list[int] = []
        self._name = system.name
        self._program = program
        self._folder = tempfile.TemporaryDirectory(prefix="tensorwire-bench-")
        self._pool = ThreadPoolExecutor(workers)  # one thread waits for each worker
        self._workers: dict[int, ProcessPair] = {}
        self._server: BaseProcess | None = None
        settings = {"OMP_NUM_THREADS": "1"}
        if system.in_job:
            settings["TENSORWIRE_SECRET"] = secrets.token_hex(32)
            settings["TENSORWIRE_TRANSPORTS"] = "shm,tcp" if wire == "shm" else "tcp"
        arguments = system.server_arguments(
            wire, workers, optimizer, threads, self._folder.name,
            "127.0.0.1" if hosts is None else hosts[0].address,
        )  # fmt: skip
        order = worker.Order(
            system, model, workers, optimizer, self._folder.name, arguments, settings, hosts
        )
        try:
            self._start_workers(order)
            address = self._address() if system.server is not None else ""
            self._pids = self.call("start", address, timeout_s=_START_S)
        except BaseException:
            self.close()
            raise

    # --- starting -------------------------------------------------------------------------------

    def _start_workers(self, order: worker.Order) -> None:
        barriers = [Pipe() for _ in range(order.workers - 1)]

        def start(rank: int) -> None:
            ends = [ours for ours, _ in barriers] if rank == 0 else [barriers[rank - 1][1]]
            options = {"order": order, "rank": rank, "barrier": ends}
            self._workers[rank] = ProcessPair(self._program, options)

        try:
            self._together(start, range(order.workers), "start")
        finally:
            for both in barriers:
                for end in both:
                    end.close()

    def _address(self) -> str:
        """Waits until the server listens: it is the target of the first worker."""
        pid = self._workers[0].target_pid
        self._server = next((each for each in active_children() if each.pid == pid), None)
        address: str | None = self._workers[0].call("address", _START_S, timeout_s=2 * _START_S)
        if address is None:
            raise PairError("the server gave no address in time")
        if not address:
            raise PairError(f"the server ended before it listened{self._said('server')}")
        return address

    # --- commands -------------------------------------------------------------------------------

    @property
    def pids(self) -> list[int]:
        """The process numbers of the workers, then of the server."""
        server = [self._workers[0].target_pid] if self._server is not None else []
        return [*self._pids, *server]

    def prepare(self, timeout_s: float = 300.0) -> None:
        """Lets the system look for its best settings."""
        self.note = self.call("prepare", timeout_s=timeout_s)[0]

    def run(
        self, count: int, timeout_s: float = 300.0, *, held: bool = False
    ) -> tuple[list[list[StepTimes]], float, float]:
        """Runs `count` steps; `held` as `worker.Driver.run` has it.

        Returns:
            Steps per worker, CPU seconds of all workers, CPU seconds of the server.
        """
        before = self._server_cpu()
        answers = self.call("run", count, held, timeout_s=timeout_s)
        return (
            [times for times, _ in answers],
            sum(cpu for _, cpu in answers),
            self._server_cpu() - before,
        )

    def digest(self) -> list[float]:
        """Per worker, a number that differs when parameters differ."""
        return self.call("digest", timeout_s=60.0)

    def end(self) -> End:
        """Where the workers are after their last step."""
        return End.of(self.call("end", timeout_s=120.0))

    def _server_cpu(self) -> float:
        if self._server is None or self.closed:
            return 0.0
        try:
            return process_cpu_seconds(self._workers[0].target_pid)
        except ProcessLookupError as error:
            self.close()
            raise PairError("the server process has ended") from error

    def call(self, method: str, *arguments: Any, timeout_s: float) -> list[Any]:
        """What this method of all workers returns; they run it at the same time."""
        if self.closed:
            raise PairError(f"the processes of {self._name} have ended")

        def call(rank: int) -> Any:
            pair = self._workers[rank]
            try:
                return pair.call(method, *arguments, timeout_s=timeout_s)
            except PairError as error:
                said = self._said(f"worker{rank}") if pair.closed else ""
                raise PairError(f"worker {rank}: {error}{said}") from error

        return self._together(call, range(len(self._workers)), method)

    def _together(self, act: Callable[[int], Any], ranks: Sequence[int], name: str) -> list[Any]:
        """Acts for each worker in a thread of its own; whatever fails ends the team."""
        acts: list[Future[Any]] = [self._pool.submit(act, rank) for rank in ranks]
        waiting = set(acts)
        try:
            while waiting:
                done, waiting = wait(waiting, _LOOK_S, FIRST_EXCEPTION)
                for each in done:
                    each.result()
                if waiting and self._server is not None and not self._server.is_alive():
                    code, said = self._server.exitcode, self._said("server")
                    raise PairError(f"the server ended in '{name}', exit code {code}{said}")
        except BaseException:
            self.close()
            raise
        return [each.result() for each in acts]

    def _said(self, who: str) -> str:
        """The last line on a process's standard error, for a reason."""
        with contextlib.suppress(OSError):
            text = Path(self._folder.name, f"{who}.err").read_text(errors="replace").strip()
            if text:
                return f": {text.splitlines()[-1][:200]}"
        return ""

    def close(self) -> None:
        """Ends all processes: asks the workers first, then kills. Always succeeds."""
        if self.closed:
            return
        self.closed = True
        with ThreadPoolExecutor(max(1, len(self._workers))) as pool:  # they may end together only
            list(pool.map(ProcessPair.close, self._workers.values()))
        self._pool.shutdown()
        self._folder.cleanup()
