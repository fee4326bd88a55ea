"""A worker of `scaling.py`, without torch: it sleeps where a recorded step computed.

It pushes each gradient at the time at which the recorded backward had made it. `Replayer` is the
common base with the worker of plain sockets (`scaling_raw.py`).
"""

from __future__ import annotations

import os
import time
from abc import abstractmethod
from typing import Any

import numpy as np

from tensorwire.membership.worker import WorkerMember
from tensorwire.membership.world import World
from tensorwire.parameters import (
    APPLY,
    PUBLISH,
    PUSHED,
    Commit,
    Mode,
    OwnPaceStore,
    RemoteStore,
    Spec,
    TensorSpec,
)
from tensorwire_benchmarks import worker

serve = worker.serve


class Replayer(worker.Driver):
    """A worker on a host of its own, which replays recorded steps."""

    def start(self, server: str) -> int:
        """Makes this process the worker; returns its process id."""
        self._enter_job(server, "tcp")
        self._addresses = server.split(",")
        return os.getpid()

    @abstractmethod
    def begin(self, plan: dict[str, Any]) -> None:
        """Connects to the servers before the first step; all workers begin together."""

    @abstractmethod
    def push(self, tensor: int) -> None:
        """Begins to send a gradient to the servers."""

    @abstractmethod
    def advance(self) -> None:
        """Ends a step: waits for the new parameters."""

    @abstractmethod
    def leave(self) -> None:
        """Closes the connections to the servers."""

    def replay(self, plan: dict[str, Any]) -> tuple[list[float], float]:
        """Replays the steps of a plan; returns the seconds of each, and CPU seconds of all."""
        self.begin(plan)
        seconds, steps = [], plan["steps"]
        cpu = time.process_time()
        for number in range(plan["count"]):
            step = steps[number % len(steps)]
            begin = time.monotonic()
            time.sleep(step["forward_s"])
            backward = time.monotonic()
            for tensor, at in step["ready"]:
                _sleep_until(backward + at)
                self.push(tensor)
            _sleep_until(backward + step["backward_s"])
            self.advance()
            seconds.append(time.monotonic() - begin)
        cpu = time.process_time() - cpu
        self.leave()
        return seconds, cpu


def _sleep_until(at: float) -> None:
    if (left := at - time.monotonic()) > 0:
        time.sleep(left)


class Driver(Replayer):
    """A worker of a job."""

    def begin(self, plan: dict[str, Any]) -> None:
        """Joins, and publishes the first values."""
        world = World.from_environment()
        assert world is not None
        self._member = WorkerMember.join(world)
        tensors = tuple(
            TensorSpec(name, "float32", tuple(shape), "trained", 0)
            for name, shape in plan["tensors"]
        )
        spec = Spec(
            plan["optimizer"], tuple(plan["hyper_names"]), 1, world.slices, tensors, 1,
            tuple(plan["scalars"]),
        )  # fmt: skip
        self._store: RemoteStore | OwnPaceStore
        if plan["mode"] == "sync":
            self._store = RemoteStore(self._member, 0, spec)
        else:
            self._store = OwnPaceStore(self._member, 0, spec, Mode(plan["mode"]))
        random = np.random.default_rng(world.rank)
        self._gradients = [
            random.standard_normal(each.elements).astype(np.float32).view(np.uint8)
            for each in tensors
        ]
        (self._slice,) = world.my_slices
        self._hyper = (tuple(plan["hyper"]),)
        for tensor in range(len(tensors)) if self._slice == 0 else ():
            self.push(tensor)
        self._commit(PUBLISH, self._slice == 0)

    def push(self, tensor: int) -> None:
        """Pushes a gradient to the servers."""
        self._store.push(self._slice, tensor, self._gradients[tensor])

    def advance(self) -> None:
        """Commits the step, and waits for the next version."""
        self._commit(APPLY, True)

    def _commit(self, operation: int, pushed: bool) -> None:
        present = bytes([PUSHED * pushed]) * len(self._gradients)
        head = self._store.version + 1, operation, 0, 1.0, float("inf"), 1.0
        self._store.commit(self._slice, Commit(*head, self._hyper, present))
        self._store.wait()

    def leave(self) -> None:
        """Leaves the job."""
        self._store.release()
        self._member.close()
