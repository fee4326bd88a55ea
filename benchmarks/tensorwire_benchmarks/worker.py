"""A worker process of one system: it trains on command, and returns the times of its steps.

It is the driver of a pair (`tensorwire.bench.processes`). The targets of the first workers are the
system's servers, if it has any; other targets do nothing. The loop is the same for every system:
barrier, forward, backward, exchange, zero_grad. The barrier is the bench's own, and the clock of a
step starts after it, so that all workers begin together and their gradients are ready at about the
same time. A hook on every parameter, added before the system's own, takes the time of the last
gradient.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import importlib
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tensorwire.bench.harness import median
from tensorwire_benchmarks.figures import End, StepTimes
from tensorwire_benchmarks.link import Host
from tensorwire_benchmarks.systems import System
from tensorwire_benchmarks.systems.base import Trainer, TrainerPlace
from tensorwire_benchmarks.workloads.catalog import Workload

TeamHosts = tuple[Sequence[Host], Sequence[Host]]


@dataclass(frozen=True, slots=True)
class Order:
    """The description of a team's processes; picklable.

    Attributes:
        folder: the team's folder, also for the standard error of its processes.
        settings: environment variables of all processes, in addition to the bench's own.
        hosts: hosts of the servers, and hosts of the workers, used in turn; None: this host.
    """

    system: System
    model: Workload | None
    workers: int
    optimizer: str
    folder: str
    settings: dict[str, str]
    hosts: TeamHosts | None

    def enter(self, who: str, rank: int, settings: dict[str, str]) -> None:
        """Makes this process, which has not imported torch, the server or worker of that rank."""
        with open(Path(self.folder, f"{who}{rank}.err"), "wb") as errors:
            os.dup2(errors.fileno(), 2)
        if self.hosts is not None:
            theirs = self.hosts[0 if who == "server" else 1]
            theirs[rank % len(theirs)].enter()
        use_settings(self.settings | settings)


class Barrier:
    """A barrier of a team's workers: rank 0 waits for a message of each, then answers all.

    `links` are connections: of rank 0 one to every other worker, of the others one to rank 0.
    """

    def __init__(self, rank: int, links: Sequence[Connection]) -> None:
        self._rank = rank
        self._links = links

    def __call__(self) -> None:
        """Returns when all have called it.

        Raises:
            ConnectionError: another worker has ended.
        """
        try:
            if self._rank:
                self._links[0].send_bytes(b"!")
            for link in self._links:
                link.recv_bytes()
            if not self._rank:
                for link in self._links:
                    link.send_bytes(b"!")
        except (EOFError, OSError) as error:
            raise ConnectionError("another worker has ended") from error


def use_settings(settings: dict[str, str]) -> None:
    """Replaces the shell's TENSORWIRE_ variables by these; call it before importing torch."""
    for name in [name for name in os.environ if name.startswith("TENSORWIRE_")]:
        del os.environ[name]
    os.environ.update(settings)


class Driver:
    """The model, its system and the loop; call `start` first."""

    def __init__(self, link: Connection, options: dict[str, Any]) -> None:
        self._link = link
        self._order: Order = options["order"]
        self._rank: int = options["rank"]
        self._barrier = Barrier(self._rank, options["barrier"])
        self._ready = (0.0, 0.0)
        self._at = 0

    def address(self, timeout_s: float) -> str | None:
        """Returns the server's address; None if that takes too long; "" if the server has ended."""
        try:
            return str(self._link.recv()) if self._link.poll(timeout_s) else None
        except EOFError:
            return ""

    def start(self, server: str) -> int:
        """Builds model and system, in all workers at the same time; returns the process id."""
        self._place = place = self._enter(server)
        torch, model = place.torch, self._order.model
        assert model is not None
        network = model.build(torch)
        self._parameters = list(network.parameters())
        for parameter in self._parameters:
            parameter.register_post_accumulate_grad_hook(self._gradient_arrived)
        self._trainer = self._make_trainer(place, network)
        self._loss = model.loss(torch)
        self._batches = model.batches(torch, self._rank)
        return os.getpid()

    def _enter_job(self, server: str, transports: str) -> None:
        """Makes this process the worker, without torch."""
        order, settings = self._order, {}
        if order.system.in_job:
            settings = {
                "TENSORWIRE_RANK": str(self._rank),
                "TENSORWIRE_WORKERS": str(order.workers),
                "TENSORWIRE_SERVERS": server,
                "TENSORWIRE_TRANSPORTS": transports,
            }
        order.enter("worker", self._rank, settings)

    def _enter(self, server: str) -> TrainerPlace:
        """Makes this process the worker, with torch."""
        order, rank = self._order, self._rank
        # On tcp the server counts as another host; workers are on one host and share memory.
        self._enter_job(server, "shm,tcp")
        torch: Any = importlib.import_module("torch")
        torch.set_num_threads(1)
        return TrainerPlace(
            torch, rank, order.workers, order.optimizer, order.folder, server, self._barrier
        )

    def _make_trainer(self, place: TrainerPlace, network: Any) -> Trainer:
        module, _, name = self._order.system.trainer.partition(":")
        made: Trainer = getattr(importlib.import_module(module), name)(place, network)
        return made

    def _gradient_arrived(self, parameter: object) -> None:
        self._ready = (time.monotonic(), time.process_time())

    def prepare(self) -> str:
        """Lets the system look for its best settings; returns the note of its rows."""
        self._trainer.tune(self._median_step)
        return self._trainer.note

    def _median_step(self, count: int) -> float:
        times, _ = self.run(count)
        return median([t.end - t.begin for t in times])

    def run(self, steps: int, held: bool = False) -> tuple[list[StepTimes], float]:
        """Makes steps without garbage collection; returns their times, and CPU seconds of all.

        All workers call it together. In `held` steps nothing is sent before all workers have all
        their gradients; that time then counts as the time of the last gradient.
        """
        collecting = gc.isenabled()
        gc.disable()
        cpu = time.process_time()
        try:
            times = [self._step(held) for _ in range(steps)]
            return times, time.process_time() - cpu
        finally:
            if collecting:
                gc.enable()

    def _step(self, held: bool) -> StepTimes:
        inputs, labels = self._batches[self._at % len(self._batches)]
        self._at += 1
        self._barrier()
        begin = time.monotonic()
        loss = self._loss(self._trainer.module(inputs), labels)
        if held:
            with self._trainer.held():
                loss.backward()
            self._barrier()
            self._ready = (time.monotonic(), time.process_time())
        else:
            loss.backward()
        self._trainer.exchange()
        readable, cpu = time.monotonic(), time.process_time()
        self._trainer.zero_grad()
        ready, ready_cpu = self._ready
        return StepTimes(begin, ready, readable, time.monotonic(), cpu - ready_cpu)

    def digest(self) -> float:
        """Returns the sum of the parameters' magnitudes."""
        return float(sum(p.detach().double().abs().sum() for p in self._parameters))

    def end(self) -> End:
        """Returns the state of this worker now."""
        bits = hashlib.sha256()
        for parameter in self._parameters:
            bits.update(parameter.detach().contiguous().numpy().reshape(-1).data)
        return End(self._at, [bits.hexdigest()], self._trainer.in_place())

    def close(self) -> None:
        """Closes the trainer, and ends the process."""
        try:
            self._trainer.close()
        finally:
            os._exit(0)  # threads of libraries may wait for peers that are gone


def serve(link: Connection, options: dict[str, Any]) -> None:
    """Runs a server of the system, if the pair has one; else it waits for the end."""
    for end in options.get("barrier", ()):
        end.close()
    arguments: list[str] | None = options.get("arguments")
    if arguments is None:
        with contextlib.suppress(EOFError):
            link.recv()
        return
    order: Order = options["order"]
    order.enter("server", options["rank"], {})
    reading, writing = os.pipe()

    def tell() -> None:
        with open(reading) as told:
            link.send(told.readline().strip())
        with contextlib.suppress(EOFError, OSError):
            link.recv()
        os._exit(0)  # the worker has ended; threads may still wait for it

    threading.Thread(target=tell, daemon=True).start()
    server = importlib.import_module(str(order.system.server))
    server.main([*arguments, "--address-fd", str(writing)])
