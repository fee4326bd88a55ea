"""A worker process of one system: takes commands over a pipe, trains, says when what happened.

The loop is the same for every system: barrier, forward, backward, exchange, zero_grad. The barrier
is the bench's own, over sockets between the workers, and lies before the clock of a step starts, so
that all workers begin together and their gradients are ready at about the same time. The moment of
the last gradient is taken by a hook on every parameter, put there before the system puts its own.

    command             answer
    "start", Order      none
    "prepare"           note; the system has looked for its best settings
    "run", Run          [StepTimes], CPU seconds of this process
    "digest"            sum of the magnitudes of all parameters
    "end"               WorkerEnd, after the last "run"
    "stop"              no answer, the process ends
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import hashlib
import importlib
import os
import queue
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from tensorwire.bench.harness import median
from tensorwire_benchmarks.figures import StepTimes, WorkerEnd
from tensorwire_benchmarks.models import Model
from tensorwire_benchmarks.systems.base import Place, Trainer


@dataclass(frozen=True, slots=True)
class Order:
    """What a worker is to be."""

    trainer: str
    model: Model
    rank: int
    workers: int
    optimizer: str
    folder: str
    server: str


class Run(NamedTuple):
    """Steps to train.

    Attributes:
        held: nothing leaves before all workers have all their gradients; the moment when they have
            is then that of the last gradient.
    """

    steps: int
    held: bool = False


class Barrier:
    """All workers of a team meet: rank 0 hears from each of the others, then answers them all.

    `links` are connected sockets: of rank 0 one to every other worker, of the others one to rank 0.
    """

    def __init__(self, rank: int, links: list[socket.socket]) -> None:
        self._rank = rank
        self._links = links

    def __call__(self) -> None:
        """Returns when all have called it.

        Raises:
            ConnectionError: another worker has ended.
        """
        if self._rank:
            self._links[0].sendall(b"!")
        for link in self._links:
            if not link.recv(1):
                raise ConnectionError("another worker has ended")
        if not self._rank:
            for link in self._links:
                link.sendall(b"!")


class Worker:
    """The model, its system and the loop."""

    def __init__(self, order: Order, barrier: Callable[[], None]) -> None:
        torch: Any = importlib.import_module("torch")
        torch.set_num_threads(1)
        self._torch = torch
        self._barrier = barrier
        network = order.model.build(torch)
        self._parameters = list(network.parameters())
        self._ready = (0.0, 0.0)
        for parameter in self._parameters:
            parameter.register_post_accumulate_grad_hook(self._gradient_arrived)
        place = Place(
            torch, order.rank, order.workers, order.optimizer, order.folder, order.server, barrier
        )
        module, _, name = order.trainer.partition(":")
        self._trainer: Trainer = getattr(importlib.import_module(module), name)(place, network)
        self._loss = order.model.loss(torch)
        self._batches = order.model.batches(torch, order.rank)
        self._at = 0
        self._held = 0  # of these steps

    def _gradient_arrived(self, parameter: object) -> None:
        self._ready = (time.monotonic(), time.process_time())

    def prepare(self) -> str:
        """Lets the system look for its best settings; returns the note of its rows."""
        self._trainer.tune(self._median_step)
        return self._trainer.note

    def _median_step(self, count: int) -> float:
        times, _ = self.run(Run(count))
        return median([t.end - t.begin for t in times])

    def run(self, order: Run) -> tuple[list[StepTimes], float]:
        """Runs steps with the garbage collector off; all workers do it together."""
        collecting = gc.isenabled()
        gc.disable()
        cpu = time.process_time()
        try:
            times = [self._step(order.held) for _ in range(order.steps)]
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
        backward_begin = time.monotonic()
        if held:
            with self._trainer.held():
                loss.backward()
            self._barrier()
            self._ready = (time.monotonic(), time.process_time())
            self._held += 1
        else:
            loss.backward()
        self._trainer.exchange()
        readable, cpu = time.monotonic(), time.process_time()
        self._trainer.zero_grad()
        ready, ready_cpu = self._ready
        return StepTimes(begin, backward_begin, ready, readable, time.monotonic(), cpu - ready_cpu)

    def digest(self) -> float:
        """Differs when parameters differ; equal up to rounding for equal ones."""
        return float(sum(p.detach().double().abs().sum() for p in self._parameters))

    def end(self) -> WorkerEnd:
        """Where this worker is now."""
        bits = hashlib.sha256()
        for parameter in self._parameters:
            bits.update(parameter.detach().contiguous().numpy().reshape(-1).data)
        hidden_s = self._trainer.hidden_s() / max(1, self._at - self._held)
        return WorkerEnd(self._at, bits.hexdigest(), hidden_s, self._trainer.in_place())

    def close(self) -> None:
        """Ends the system's part."""
        self._trainer.close()


def _reason(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else 'no message'}"[:300]


def _act(worker: Worker | None, barrier: Barrier, name: str, argument: Any) -> tuple[Any, Any]:
    if name == "start":
        worker = Worker(argument, barrier)
        return worker, None
    assert worker is not None, "start comes first"
    actions: dict[str, Callable[..., Any]] = {
        "prepare": lambda _: worker.prepare(),
        "run": worker.run,
        "digest": lambda _: worker.digest(),
        "end": lambda _: worker.end(),
    }
    return worker, actions[name](argument)


def _commands(control: Connection) -> queue.SimpleQueue[Any]:
    """Commands as they come. The process ends with the bench, even in the middle of a step."""
    found: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def read() -> None:
        try:
            while True:
                found.put(control.recv())
        except (EOFError, OSError):
            os._exit(1)

    threading.Thread(target=read, daemon=True).start()
    return found


def main() -> None:
    """Acts on commands until "stop" or until the bench is gone."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--control-fd", type=int, required=True)
    parser.add_argument("--barrier-fds", default="", help="as Barrier has them: 5,6,7")
    arguments = parser.parse_args()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C: the bench ends its teams in order
    control = Connection(arguments.control_fd)
    numbers = [int(part) for part in arguments.barrier_fds.split(",") if part]
    barrier = Barrier(arguments.rank, [socket.socket(fileno=number) for number in numbers])
    commands = _commands(control)
    worker: Worker | None = None
    while True:
        name, argument = commands.get()
        if name == "stop":
            break
        try:
            worker, result = _act(worker, barrier, name, argument)
            control.send((True, result))
        except Exception as error:
            traceback.print_exc(file=sys.stderr)
            control.send((False, _reason(error)))
    if worker is not None:
        with contextlib.suppress(Exception):
            worker.close()
    sys.stderr.flush()
    os._exit(0)  # threads of libraries may wait for peers that are gone


if __name__ == "__main__":
    main()
