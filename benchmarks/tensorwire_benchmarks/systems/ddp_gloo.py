"""torch's DistributedDataParallel over gloo, tuned as its users would.

Gradients live in DDP's buckets (`gradient_as_bucket_view`), the graph is declared static, and each
worker applies torch's fused optimizer to its own copy of the parameters. Reduction overlaps with
backward and ends before backward returns; the bench's clock starts at the last gradient, so the
rest of the reduction after it is part of the exchange.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

from tensorwire_benchmarks.systems.base import Trainer, TrainerPlace, make_optimizer


class DdpTrainer(Trainer):
    """A rank of DDP."""

    note = "gradient_as_bucket_view, static_graph, fused optimizer"

    def __init__(self, place: TrainerPlace, module: Any) -> None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        self._distributed = importlib.import_module("torch.distributed")
        if not self._distributed.is_initialized():  # by an earlier trainer
            self._distributed.init_process_group(
                "gloo",
                init_method=f"file://{os.path.join(place.folder, 'rendezvous')}",
                rank=place.rank,
                world_size=place.workers,
            )
        parallel = importlib.import_module("torch.nn.parallel")
        self.module = parallel.DistributedDataParallel(
            module, gradient_as_bucket_view=True, static_graph=True
        )
        self._optimizer = make_optimizer(
            place.torch, place.optimizer, module.parameters(), place.learning_rate, fused=True
        )

    def exchange(self) -> None:
        """Steps the optimizer; the reduction ended with backward."""
        self._optimizer.step()

    def zero_grad(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)
