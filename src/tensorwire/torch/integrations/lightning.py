"""Implements a strategy for Lightning: `Trainer(strategy=TensorwireStrategy())`.

It is Lightning's DDPStrategy without DistributedDataParallel: samplers, metrics, loggers and
checkpoints stay Lightning's own; gradients, clipping and the optimizer's step are the job's.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch

from . import adapter

try:
    from lightning.fabric.plugins.environments import TorchElasticEnvironment
    from lightning.pytorch.accelerators import CPUAccelerator
    from lightning.pytorch.strategies import DDPStrategy
except ImportError as error:
    raise adapter.unavailable("lightning") from error

from ..job import Job

_TIMEOUT = timedelta(minutes=30)


class TensorwireStrategy(DDPStrategy):
    """A strategy that trains on a tensorwire job; one line changes in a script.

        trainer = Trainer(strategy=TensorwireStrategy(), max_epochs=3)

    Under `tensorwire run` and torchrun the launcher decides how many processes there are, and
    `devices=` may be left out; otherwise Lightning starts `devices=` processes itself. The job is
    joined when `fit`, `validate`, `test` or `predict` begins, and random numbers stay as they are
    seeded. After `fit` the model goes on living in the job's memory, until it ends or the next
    `fit` of the same model.

    Args:
        cluster_environment, checkpoint_io, precision_plugin: as of DDPStrategy.
        timeout: for what Lightning's process group does.

    Raises:
        ValueError: another accelerator than the CPU, `devices=` that contradicts the launcher, or a
            precision with a scaler.
        RuntimeError: the job has another number of workers than Lightning has processes.
    """

    strategy_name = "tensorwire"
    optimizers: list[Any]

    def __init__(
        self,
        *,
        cluster_environment: Any = None,
        checkpoint_io: Any = None,
        precision_plugin: Any = None,
        timeout: timedelta = _TIMEOUT,
    ) -> None:
        if cluster_environment is None and "TENSORWIRE_RANK" in os.environ:
            cluster_environment = TorchElasticEnvironment()  # tensorwire run sets its variables
        super().__init__(
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            process_group_backend="gloo",
            timeout=timeout,
        )
        self._job: Job | None = None

    # ---- processes

    @property
    def root_device(self) -> torch.device:
        """The CPU, in every process."""
        return torch.device("cpu")

    @property
    def num_processes(self) -> int:
        """Processes of this host: those that a launcher has started, or that Lightning starts."""
        environment = self.cluster_environment
        if environment is not None and environment.creates_processes_externally:
            started = os.environ.get("LOCAL_WORLD_SIZE")
            if started is not None:
                return int(started)
        return len(self.parallel_devices or ())

    def set_world_ranks(self) -> None:
        """Checks the Trainer's settings, then sets the ranks as in DDPStrategy."""
        if not isinstance(self.accelerator, CPUAccelerator):
            raise ValueError(
                "TensorwireStrategy trains on the CPU; call Trainer(accelerator='cpu', "
                "strategy=TensorwireStrategy())"
            )
        asked = len(self.parallel_devices or ())
        if asked not in (1, self.num_processes):
            raise ValueError(
                f"Trainer(devices={asked}) asks for other processes than the {self.num_processes} "
                "that the launcher has started on this host; leave devices= out"
            )
        super().set_world_ranks()

    def setup_environment(self) -> None:
        """Opens Lightning's process group, then joins the job."""
        super().setup_environment()
        self._job = adapter.join(
            "lightning",
            self.global_rank,
            self.world_size,
            "start it by tensorwire run or torchrun, or leave it to devices=, and do not call "
            "tw.init() before Lightning has started the processes",
        )

    @property
    def job(self) -> Job:
        """The job of this process.

        Raises:
            RuntimeError: the Trainer has not begun anything.
        """
        if self._job is None:
            raise RuntimeError("the job is joined when fit, validate, test or predict begins")
        return self._job

    # ---- the model and its optimizers

    def configure_ddp(self) -> None:
        """Wraps nothing."""

    def setup_optimizers(self, trainer: Any) -> None:
        """Makes the module's optimizers train together with the other workers."""
        super().setup_optimizers(trainer)
        module, job = self.lightning_module, self.job
        for former in adapter.optimizers_of(job, module):  # of an earlier fit
            former.close()
        for optimizer in self.optimizers:
            if optimizer.param_groups:  # the Trainer's stand-in for none has no groups
                adapter.distribute(optimizer, [module])
        self.optimizers = self.optimizers  # Lightning's wrappers take their classes over

    def setup_precision_plugin(self) -> None:
        """Makes clipping work on averaged gradients."""
        super().setup_precision_plugin()
        plugin = self.precision_plugin
        if getattr(plugin, "scaler", None) is not None:
            raise ValueError(
                "Lightning's GradScaler looks at the gradients of one worker, and its decision "
                "would differ among workers; use precision='bf16-mixed', which needs no scaler"
            )
        plugin.clip_grad_by_norm = self._clip_by_norm
        plugin.clip_grad_by_value = self._clip_by_value

    def _clip_by_norm(self, optimizer: Any, clip_val: float) -> None:
        adapter.clip_norm(self.job, self.precision_plugin.main_params(optimizer), clip_val)

    def _clip_by_value(self, optimizer: Any, clip_val: float) -> None:
        adapter.clip_value(self.job, self.precision_plugin.main_params(optimizer), clip_val)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Makes backward only add to `.grad` inside."""
        with adapter.accumulating(filter(adapter.is_distributed, self.optimizers)):
            yield

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Returns the state, read from the servers, in the process that writes it; else {}."""
        return super().optimizer_state(optimizer) if self.is_global_zero else {}

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """The arguments of the DistributedSampler that Lightning puts into every DataLoader."""
        return {"num_replicas": self.world_size, "rank": self.global_rank}
