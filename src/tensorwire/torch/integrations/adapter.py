"""Shares code of the adapters: joining the job, and lookups by model or parameters.

The libraries deal out the data and have a process group of torch.distributed for their own
figures. Gradients, parameters and the optimizer's state are the job's. This module imports none of
the libraries.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from tensorwire.errors import UnavailableError

from ..job import Job
from ..joining import init, latest_job
from ..optimizer import DistributedMixin, DistributedOptimizer, clip_grad_norm_, replica_of


def unavailable(library: str) -> UnavailableError:
    """Returns the error for a library that cannot be imported."""
    return UnavailableError(
        f"tensorwire.torch.integrations.{library} needs the package {library}: pip install "
        f"'tensorwire[integrations]', or pip install {library}"
    )


def join(library: str, rank: int, size: int, advice: str) -> Job:
    """Returns the job of this process, joined if need be, in which the library has the same place.

    Random numbers are left as the library or the script has seeded them.

    Args:
        library: its name.
        rank: of this process, as the library sees it.
        size: number of processes that the library sees.
        advice: what to do if the library sees others.

    Raises:
        RuntimeError: the library sees other processes than the job has workers, so that each would
            train with the wrong part of the data.
        ValueError: a worker of the job has several slices, or shares a model that is split.
    """
    job = latest_job()
    if job is None or job.closed:
        random = torch.get_rng_state()
        job = init()
        torch.set_rng_state(random)
    if (job.rank, job.size) != (rank, size):
        raise RuntimeError(
            f"{library} takes this process for number {rank} of {size}, and it is worker "
            f"{job.rank} of {job.size} in the job, so it would not train with its part of the "
            f"data: {advice}"
        )
    if job.pipeline > 1 or len(job.my_slices) > 1:
        raise ValueError(
            f"{library} computes one slice per worker of a model that is whole, and this job has "
            f"{job.slices} slices and pipelines of {job.pipeline} for {job.size} workers: leave "
            f"--slices and pipeline= out, and let {library} accumulate gradients"
        )
    return job


def is_distributed(optimizer: Any) -> bool:
    """Tells whether an optimizer trains together with the other workers."""
    return isinstance(optimizer, DistributedMixin)


def optimizers_of(job: Job, model: nn.Module) -> list[Any]:
    """Returns the distributed optimizers that train parameters of a model, or keep them."""
    return [o for o in job.optimizers if replica_of(o).shares(model)]


def distribute(optimizer: torch.optim.Optimizer, models: Sequence[nn.Module]) -> None:
    """Makes an optimizer train together with the other workers, unless it does already.

    Args:
        optimizer: of parameters of one or several models.
        models: those that were handed over for training.

    Raises:
        ValueError: some parameter is of none of the models; and as `DistributedOptimizer`.
    """
    if is_distributed(optimizer):
        return
    wanted = {id(p) for group in optimizer.param_groups for p in group["params"]}
    parts = [model for model in models if wanted & {id(p) for p in model.parameters()}]
    if len(parts) != 1:
        parts = [nn.ModuleList(parts)]
    if wanted - {id(p) for p in parts[0].parameters()}:
        raise ValueError(
            "the optimizer has parameters of no model that was prepared: prepare its model in the "
            "same call, or before it"
        )
    DistributedOptimizer(optimizer, parts[0])


@contextmanager
def accumulating(optimizers: Iterable[Any]) -> Iterator[None]:
    """Makes backward only add to `.grad` inside, as in `no_sync` of DDP."""
    with ExitStack() as stack:
        for optimizer in optimizers:
            stack.enter_context(optimizer.accumulate())
        yield


@contextmanager
def editing(job: Job, models: Iterable[nn.Module]) -> Iterator[None]:
    """Permits loading of parameters inside, by all workers; untrained models need no permission."""
    with ExitStack() as stack:
        for model in models:
            if optimizers_of(job, model):
                stack.enter_context(job.editing(model))
        yield


def clip_norm(
    job: Job, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float = 2.0
) -> torch.Tensor:
    """Clips the averaged gradients by norm; all workers call it.

    All parameters of one optimizer are clipped on the servers. For other sets of parameters, and
    for another norm than 2, the averaged gradients are read and clipped here.
    """
    given = list(parameters)
    ids = {id(p) for p in given if p.requires_grad}
    concerned = []
    for optimizer in job.optimizers:
        own = {id(p) for group in optimizer.param_groups for p in group["params"]}
        if ids & own:
            concerned.append(optimizer)
    if len(concerned) == 1 and norm_type == 2 and _trained(concerned[0]) == ids:
        return clip_grad_norm_(concerned[0], max_norm)
    for optimizer in concerned:
        optimizer.synchronize()
    return nn.utils.clip_grad_norm_(given, max_norm, norm_type)


def clip_value(job: Job, parameters: Iterable[torch.Tensor], limit: float) -> None:
    """Clips the averaged gradients by value; all workers call it."""
    given = list(parameters)
    ids = {id(p) for p in given}
    for optimizer in job.optimizers:
        if any(id(p) in ids for group in optimizer.param_groups for p in group["params"]):
            optimizer.synchronize()
    nn.utils.clip_grad_value_(given, limit)


def _trained(optimizer: Any) -> set[int]:
    replica = replica_of(optimizer)
    return {id(replica.parameters[i]) for i in replica.trained}
