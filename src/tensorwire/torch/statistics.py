"""Measures where a worker's time goes, computation and communication, for reports."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from tensorwire.parameters import Result, Store


class Statistics:
    """Sums since the job began, over all optimizers.

    Attributes:
        exposed_s, hidden_s, bytes_pushed: added to by the optimizers as they push and step.
        bytes_produced: of gradients that backward wrote where the servers read them.
        bytes_copied: of copies that this worker made of gradients.
        values: the last figures, by the names under which the script logs them.
        returns_s: for each process that took the place of this worker, how long it took from the
            last position that was noted until it was there.
    """

    def __init__(self) -> None:
        self.exposed_s = 0.0
        self.hidden_s = 0.0
        self.bytes_pushed = 0
        self.bytes_produced = 0
        self.bytes_copied = 0
        self.versions = 0
        self.steps = 0  # those of them that were measured
        self.train_s = 0.0
        self.server_work_s = 0.0
        self.server_wait_s = 0.0
        self.server_notes_s = 0.0
        self.values: dict[str, float] = {}
        self.history: list[dict[str, float]] = []
        self.returns_s: list[float] = []
        # By the clock of the host, which a process in the place of this one shares.
        self._epoch_at = self._noted_at = time.monotonic()
        self._last: float | None = None

    def noted(self) -> dict[str, Any]:
        """Returns all numbers, for a successor of this process."""
        self._noted_at = time.monotonic()
        return vars(self)

    def go_on(self, noted: Mapping[str, Any]) -> None:
        """Takes the numbers that a predecessor noted at the place that this process has reached."""
        vars(self).update(noted)
        self.returns_s = [*self.returns_s, time.monotonic() - self._noted_at]
        self.begin_pass()

    def begin_epoch(self) -> None:
        """Begins to measure an epoch."""
        self._epoch_at = time.monotonic()

    @property
    def epoch_s(self) -> float:
        """Seconds that the present epoch has taken so far, also in former processes."""
        return time.monotonic() - self._epoch_at

    def begin_pass(self) -> None:
        """Begins a pass: the time from here to the first step counts."""
        self._last = time.perf_counter()

    def step(self, result: Result) -> None:
        """Counts a new version."""
        now = time.perf_counter()
        self.versions += 1
        if self._last is not None:
            self.train_s += now - self._last
            self.steps += 1
        self._last = now
        self.server_work_s += result.work_s
        self.server_wait_s += result.wait_s
        self.server_notes_s += result.notes_s

    def end_epoch(self, epoch: int) -> None:
        """Keeps the epoch's last figures."""
        self.history.append({"epoch": epoch, **self.values})
        self._last = None

    def report(
        self,
        worker: Mapping[str, Any],
        stores: Sequence[Store],
        path: str | os.PathLike[str] | None,
    ) -> dict[str, Any]:
        """See `Job.report`."""
        steps, versions = max(self.steps, 1), max(self.versions, 1)
        exposed = self.exposed_s / versions
        whole = self.train_s / steps
        result = {
            **worker,
            "worker_returns_s": self.returns_s,
            "steps": self.steps,
            "seconds_per_step": whole,
            "computation_s": max(whole - exposed, 0.0),
            "hidden_communication_s": self.hidden_s / versions,
            "exposed_communication_s": exposed,
            "server_work_s": self.server_work_s / steps,
            "server_wait_s": self.server_wait_s / steps,
            "server_notes_s": self.server_notes_s / steps,
            "bytes_pushed_per_step": self.bytes_pushed // versions,
            "bytes_produced_per_step": self.bytes_produced // versions,
            "bytes_copied_per_step": self.bytes_copied // versions,
            "bytes_of_parameters": sum(store.layout.size_bytes for store in stores),
            "bytes_of_notes": sum(store.notes_bytes for store in stores),
            "paths": sorted({store.path for store in stores}),
            "last": dict(self.values),
            "epochs": self.history,
            "versions": {"torch": torch.__version__, "python": platform.python_version()},
        }
        if path is not None:
            Path(path).write_text(json.dumps(result, indent=2) + "\n")
        return result
