"""The processes of one system: its workers and, if it has any, its servers.

They stay between turns. Each worker is the driver of a `ProcessPair`, each server the target of one
(`worker.py`). The bench's process only sends commands and draws figures. If a process dies, fails
or does not answer, the bench gets a PairError with a reason, and the team is closed; closing ends
every process and removes the team's folder. Each process has one thread for torch.
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
from tensorwire_benchmarks.systems import System
from tensorwire_benchmarks.worker import TeamHosts
from tensorwire_benchmarks.workloads.catalog import Workload

_START_S = 120.0  # the longest wait for a system to start
_LOOK_S = 0.5  # between two checks that the servers live


class Team:
    """The owner of the processes of one system for one model over one wire.

    `hosts` has the hosts of the servers and the hosts of the workers. `program` is the module that
    runs in the workers; its Driver, a subclass of `worker.Driver`, may need no `model`.
    Methods block and are for one thread. After any error the team is closed. `close` may be called
    twice.

    Attributes:
        note: how the system is tuned, for the note of its rows.
        closed: whether it has ended, by `close` or because something failed.

    Raises:
        PairError: the processes did not start.
    """

    def __init__(
        self, system: System, wire: str, model: Workload | None, workers: int, optimizer: str,
        threads: int = 1, hosts: TeamHosts | None = None, program: str = worker.__name__,
        servers: int = 1,
    ) -> None:  # fmt: skip
        self.note = ""
        self.closed = False
        self._pids: list[int] = []
        self._name = system.name
        self._program = program
        self._folder = tempfile.TemporaryDirectory(prefix="tensorwire-bench-")
        self._pool = ThreadPoolExecutor(workers)  # one thread waits for each worker
        self._pairs: dict[int, ProcessPair] = {}
        self._workers = range(workers)
        self._servers: list[BaseProcess] = []
        settings = {"OMP_NUM_THREADS": "1"}
        if system.in_job:
            settings["TENSORWIRE_SECRET"] = secrets.token_hex(32)
            settings["TENSORWIRE_TRANSPORTS"] = "shm,tcp" if wire == "shm" else "tcp"
        order = worker.Order(system, model, workers, optimizer, self._folder.name, settings, hosts)

        def arguments(others: Sequence[str]) -> list[str]:
            host = "127.0.0.1" if hosts is None else hosts[0][len(others)].address
            return system.server_arguments(
                wire, workers, optimizer, threads, self._folder.name, host, servers, others
            )

        try:
            addresses = self._start(order, servers if system.server else 0, arguments)
            self._pids = self.call("start", ",".join(addresses), timeout_s=_START_S)
        except BaseException:
            self.close()
            raise

    # --- starting -------------------------------------------------------------------------------

    def _start(
        self, order: worker.Order, servers: int, arguments: Callable[[Sequence[str]], list[str]]
    ) -> list[str]:
        """Starts all pairs; returns the servers' addresses. A server knows the ones before it."""
        barriers = [Pipe() for _ in range(order.workers - 1)]
        addresses: list[str] = []

        def start(rank: int) -> None:
            ends = [ours for ours, _ in barriers] if rank == 0 else []
            if 0 < rank < order.workers:
                ends = [barriers[rank - 1][1]]
            options: dict[str, Any] = {"order": order, "rank": rank, "barrier": ends}
            if rank < servers:
                options["arguments"] = arguments(addresses)
            self._pairs[rank] = ProcessPair(self._program, options)

        try:
            at_once = [rank for rank in self._workers if rank == 0 or rank >= servers]
            self._together(start, at_once, "start")
            for rank in range(servers):
                if rank:
                    start(rank)
                addresses.append(self._address(rank))
        finally:
            for both in barriers:
                for end in both:
                    end.close()
        return addresses

    def _address(self, index: int) -> str:
        """Waits until the server of this index listens; returns its address.

        Raises:
            PairError: it has ended, or gave no address in time.
        """
        pair = self._pairs[index]
        self._servers += [each for each in active_children() if each.pid == pair.target_pid]
        address: str | None = pair.call("address", _START_S, timeout_s=2 * _START_S)
        if address is None:
            raise PairError("the server gave no address in time")
        if not address:
            raise PairError(f"the server ended before it listened{self._said(f'server{index}')}")
        return address

    # --- commands -------------------------------------------------------------------------------

    @property
    def pids(self) -> list[int]:
        """The process ids of the workers, then of the servers."""
        return [*self._pids, *(each.pid or 0 for each in self._servers)]

    def prepare(self, timeout_s: float = 300.0) -> None:
        """Lets the system look for its best settings."""
        self.note = self.call("prepare", timeout_s=timeout_s)[0]

    def run(
        self, count: int, timeout_s: float = 300.0, *, held: bool = False
    ) -> tuple[list[list[StepTimes]], float, float]:
        """Runs `count` steps, which are held as in `worker.Driver.run` if `held`.

        Returns:
            Steps per worker, CPU seconds of all workers, CPU seconds of the servers.
        """
        before = self.server_cpu()
        answers = self.call("run", count, held, timeout_s=timeout_s)
        return (
            [times for times, _ in answers],
            sum(cpu for _, cpu in answers),
            self.server_cpu() - before,
        )

    def digest(self) -> list[float]:
        """Returns for each worker the sum of its parameters' magnitudes."""
        return self.call("digest", timeout_s=60.0)

    def end(self) -> End:
        """Returns the state of the system after its last step."""
        return End.of(self.call("end", timeout_s=120.0))

    def server_cpu(self) -> float:
        """Returns CPU seconds of all servers so far; 0 if the team is closed."""
        if self.closed:
            return 0.0
        try:
            return sum(process_cpu_seconds(each.pid or 0) for each in self._servers)
        except ProcessLookupError as error:
            self.close()
            raise PairError("the server process has ended") from error

    def call(self, method: str, *arguments: Any, timeout_s: float) -> list[Any]:
        """Calls a method of all workers at the same time; returns the results by rank.

        Raises:
            PairError: a process failed, ended or did not answer in time.
        """
        if self.closed:
            raise PairError(f"the processes of {self._name} have ended")

        def call(rank: int) -> Any:
            pair = self._pairs[rank]
            try:
                return pair.call(method, *arguments, timeout_s=timeout_s)
            except PairError as error:
                said = self._said(f"worker{rank}") if pair.closed else ""
                raise PairError(f"worker {rank}: {error}{said}") from error

        return self._together(call, self._workers, method)

    def _together(self, act: Callable[[int], Any], ranks: Sequence[int], name: str) -> list[Any]:
        """Calls `act` for each rank in a thread of its own; any failure closes the team."""
        acts: list[Future[Any]] = [self._pool.submit(act, rank) for rank in ranks]
        waiting = set(acts)
        try:
            while waiting:
                done, waiting = wait(waiting, _LOOK_S, FIRST_EXCEPTION)
                for each in done:
                    each.result()
                for index, server in enumerate(self._servers if waiting else ()):
                    if not server.is_alive():
                        code, said = server.exitcode, self._said(f"server{index}")
                        raise PairError(f"the server ended in '{name}', exit code {code}{said}")
        except BaseException:
            self.close()
            raise
        return [each.result() for each in acts]

    def _said(self, who: str) -> str:
        """Returns the last line of a process's standard error, after ": ", or ""."""
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
        with ThreadPoolExecutor(max(1, len(self._pairs))) as pool:  # some end only together
            list(pool.map(ProcessPair.close, self._pairs.values()))
        self._pool.shutdown()
        self._folder.cleanup()
