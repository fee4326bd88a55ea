"""Implements an Accelerator of Accelerate whose optimizers train on a tensorwire job.

Data loaders, schedulers, `gather`, trackers and checkpoints stay Accelerate's own; gradients,
clipping and the optimizer's step are the job's, and no model is wrapped.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from tensorwire.errors import UnavailableError

from . import adapter

try:
    import accelerate
    from accelerate.utils import DDPCommunicationHookType, DistributedType
except ImportError as error:
    raise adapter.unavailable("accelerate") from error

from ..job import Job

_ADVICE = (
    "make it with cpu=True (TrainingArguments with use_cpu=True), which is this Accelerator's "
    "default, before anything else asks Accelerate for its state, and start the processes by "
    "tensorwire run or torchrun"
)


class TensorwireAccelerator(accelerate.Accelerator):
    """An Accelerator in place of `accelerate.Accelerator`; one line changes in a script.

        from tensorwire.torch.integrations.accelerate import TensorwireAccelerator as Accelerator

    The job is joined here; random numbers stay as they are seeded. All that trains goes through
    `prepare`: the model, in one call with its optimizer or before it, and the data loaders, which
    Accelerate deals out to the processes.

    Args:
        options: those of `accelerate.Accelerator`; `cpu` is True if it is not given.

    Raises:
        ValueError: mixed precision other than "bf16", a communication hook, or slices.
        UnavailableError: FSDP, DeepSpeed or anything else than data parallelism on CPUs.
        RuntimeError: Accelerate sees other processes than the job has workers.
    """

    _models: list[Any]
    _optimizers: list[Any]
    _preparing = False  # the models of a call may come after their optimizers

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"cpu": True, **options})
        self._join()

    def _join(self) -> None:
        told = _other_than_cpus(self)
        if told:
            raise UnavailableError(
                f"tensorwire trains whole models on CPUs, and Accelerate was told {told}: make it "
                "with cpu=True (TrainingArguments with use_cpu=True) and without that, or use "
                "Accelerate's own class"
            )
        if self.state.mixed_precision not in ("no", "bf16"):
            raise ValueError(
                f"mixed_precision={self.state.mixed_precision!r} does nothing on a CPU or needs a "
                "scaler, whose decision would differ among workers; use mixed_precision='bf16'"
            )
        handler = self.ddp_handler
        if handler is not None and handler.comm_hook != DDPCommunicationHookType.NO:
            raise ValueError("a communication hook belongs to DDP; leave comm_hook= out")
        self._job = adapter.join("accelerate", self.process_index, self.num_processes, _ADVICE)

    @property
    def job(self) -> Job:
        """The job of this process."""
        return self._job

    @property
    def device(self) -> torch.device:
        """The CPU. Accelerate's own has an index, and `model.to("cpu:0")` copies the parameters."""
        return torch.device(self.state.device.type)

    # ---- preparing

    def prepare(self, *args: Any, device_placement: Sequence[bool] | None = None) -> Any:
        """Prepares objects as in Accelerate; the optimizers train together with other workers."""
        self._preparing = True
        try:
            prepared = super().prepare(*args, device_placement=device_placement)
        finally:
            self._preparing = False
        for optimizer in self._optimizers:
            self._distribute(optimizer)
        return prepared

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> Any:
        """Prepares a model as in Accelerate, without DistributedDataParallel around it."""
        return super().prepare_model(model, device_placement, evaluation_mode=True)

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> Any:
        """Prepares an optimizer as in Accelerate, to train together with the other workers."""
        prepared = super().prepare_optimizer(optimizer, device_placement)
        if not self._preparing:
            self._distribute(prepared)
        return prepared

    def _distribute(self, optimizer: Any) -> None:
        adapter.distribute(optimizer.optimizer, [self.unwrap_model(m) for m in self._models])

    # ---- a step

    def backward(self, loss: torch.Tensor, **options: Any) -> None:
        """Runs backward as in Accelerate.

        Raises:
            RuntimeError: a prepared model got gradients that no prepared optimizer applies.
        """
        super().backward(loss, **options)
        for model in self._models:
            if not adapter.optimizers_of(self.job, model) and _has_gradients(model):
                raise RuntimeError(
                    f"{type(self.unwrap_model(model)).__name__} was prepared and has gradients, "
                    "and its optimizer was not prepared, so that each worker would train alone: "
                    "pass it to accelerator.prepare() too, or freeze the model"
                )

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Makes backward only add to `.grad` inside."""
        with adapter.accumulating(adapter.optimizers_of(self.job, model)):
            yield

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2.0) -> Any:
        """Clips the averaged gradients by norm, in a step in which they are complete.

        Raises:
            RuntimeError: gradients are still being accumulated.
        """
        self._check_complete("clip_grad_norm_()")
        return adapter.clip_norm(self.job, _as_list(parameters), max_norm, norm_type)

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Clips the averaged gradients by value; otherwise like `clip_grad_norm_`."""
        self._check_complete("clip_grad_value_()")
        adapter.clip_value(self.job, _as_list(parameters), clip_value)

    def _check_complete(self, what: str) -> None:
        if not self.sync_gradients:
            raise RuntimeError(
                f"{what} is for complete gradients, and these are being accumulated: call it in "
                "'if accelerator.sync_gradients:'"
            )

    @contextmanager
    def join_uneven_inputs(
        self, joinables: Any, even_batches: bool | None = None
    ) -> Iterator[None]:
        """Joins nothing, as all workers make the same number of steps.

        Raises:
            ValueError: with `even_batches=False`.
        """
        if even_batches is False or not self.even_batches:
            raise ValueError(
                "every worker makes the same number of steps; leave even_batches= as it is, True"
            )
        yield

    # ---- checkpoints and the end

    def save_state(self, *args: Any, **options: Any) -> Any:
        """Saves as in Accelerate; only the writing processes read the optimizers' state."""
        optimizers, everywhere = self._optimizers, self.project_configuration.save_on_each_node
        if not (self.is_local_main_process if everywhere else self.is_main_process):
            self._optimizers = [_NotWritten() for _ in optimizers]
        try:
            return super().save_state(*args, **options)
        finally:
            self._optimizers = optimizers

    def load_state(self, *args: Any, **options: Any) -> None:
        """Loads as in Accelerate, on all workers; worker 0's values count."""
        optimizers = self._optimizers
        self._optimizers = later = [_Later() for _ in optimizers]
        try:
            with adapter.editing(self.job, map(self.unwrap_model, self._models)):
                super().load_state(*args, **options)
        finally:
            self._optimizers = optimizers
        for optimizer, saved in zip(optimizers, later, strict=True):
            optimizer.load_state_dict(saved.state)

    def free_memory(self, *objects: Any) -> Any:
        """Frees memory as in Accelerate; closes optimizers among the objects, in all workers."""
        inner: list[Any] = [getattr(thing, "optimizer", None) for thing in objects]
        for optimizer in filter(adapter.is_distributed, inner):
            optimizer.close()
        return super().free_memory(*objects)


class _Later:
    """A stand-in for an optimizer whose state is loaded after the models."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


class _NotWritten:
    """A stand-in for an optimizer in a process that writes nothing, and perhaps has no state."""

    def state_dict(self) -> dict[str, Any]:
        return {}


def adopt(accelerator: accelerate.Accelerator) -> None:
    """Makes an Accelerator of Accelerate's own class one of ours, before it has prepared anything.

    Raises:
        TypeError: it is of another class.
        ValueError, UnavailableError, RuntimeError: as in `TensorwireAccelerator`.
    """
    if type(accelerator) is not accelerate.Accelerator:
        raise TypeError(f"{type(accelerator).__name__} is no plain Accelerator of Accelerate")
    accelerator.__class__ = TensorwireAccelerator
    accelerator._join()


def _other_than_cpus(accelerator: accelerate.Accelerator) -> str:
    """Returns the task of Accelerate besides data parallelism on CPUs; "" if there is none."""
    # Accelerate sets these for a plugin; on CPUs nothing else shows that there is one.
    for name in ("FSDP", "DEEPSPEED", "MEGATRON_LM"):
        if os.environ.get(f"ACCELERATE_USE_{name}", "").lower() == "true":
            return f"to use {name}"
    if accelerator.distributed_type not in (DistributedType.NO, DistributedType.MULTI_CPU):
        return str(accelerator.distributed_type).rpartition(".")[2]
    device: torch.device = accelerator.state.device
    return "" if device.type == "cpu" else f"to use {device}"


def _has_gradients(model: nn.Module) -> bool:
    return any(p.grad is not None for p in model.parameters())


def _as_list(parameters: Any) -> list[torch.Tensor]:
    return [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
