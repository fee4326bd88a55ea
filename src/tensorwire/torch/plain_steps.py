"""Prints a line if an optimizer steps in a job of several workers without being distributed."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook


class PlainSteps:
    """A watch over the steps of all optimizers of this process, until it prints its line.

    It prints nothing beside a process group of torch.distributed, where a library such as
    DistributedDataParallel may average the gradients.

    Args:
        workers: of the job.
    """

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._hook = register_optimizer_step_post_hook(self._stepped)

    def close(self) -> None:
        """Ends the watch."""
        self._hook.remove()

    def _stepped(self, optimizer: Any, *arguments: object) -> None:
        if hasattr(optimizer, "_tensorwire"):
            return
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            return
        self.close()
        cls = type(optimizer)
        print(
            f"tensorwire: {cls.__module__}.{cls.__qualname__} steps in a job of {self._workers} "
            "workers and is not distributed: every worker trains its parameters alone. "
            "tw.DistributedOptimizer(optimizer, model) trains them together",
            file=sys.stderr,
            flush=True,
        )
