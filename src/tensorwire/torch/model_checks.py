"""Checks a model before its parameters move into the job's memory."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn

from tensorwire.errors import UnavailableError

_WRAPPERS = {
    "DistributedDataParallel": "it averages gradients over a process group of its own",
    "FullyShardedDataParallel": "it deals out parameters over a process group of its own",
}


def check_model(model: Any) -> None:
    """Raises an error for a model that cannot be trained as it is.

    Raises:
        TypeError: it is no module, or one around which another library's training is wrapped.
        UnavailableError: parameters share memory, which would be memory of their own here.
    """
    if not isinstance(model, nn.Module):
        several = isinstance(model, list | tuple | dict)
        raise TypeError(
            "the second argument of DistributedOptimizer has to be a torch.nn.Module, not "
            f"{type(model).__name__}"
            + (": of several models make one, as torch.nn.ModuleList(models)" if several else "")
        )
    for name, module in model.named_modules():
        kind = type(module).__name__
        if kind in _WRAPPERS and type(module).__module__.startswith("torch."):
            raise TypeError(
                f"{name or 'the model'} is wrapped in {kind}, and {_WRAPPERS[kind]}: leave the "
                "wrapper out and give DistributedOptimizer the model itself"
            )
    _check_shared_memory(model)


def _check_shared_memory(model: nn.Module) -> None:
    # The range of a tensor that is not dense, as every second element of another, does not tell.
    ranges = []
    for is_parameter, tensors in ((True, model.named_parameters()), (False, model.named_buffers())):
        for name, tensor in tensors:
            if (place := _dense_range(tensor)) is not None:
                ranges.append((*place, is_parameter, name))
    ranges.sort()
    end, before = 0, ("", False)
    for first, last, is_parameter, name in ranges:
        if first < end and (is_parameter or before[1]):
            raise UnavailableError(
                f"{before[0]!r} and {name!r} of the model share memory, and each parameter gets "
                "memory of its own here, so that they would part: share the Parameter itself, as "
                "in decoder.weight = encoder.weight, compute the one from the other in forward(), "
                "or give each a copy"
            )
        if last > end:
            end, before = last, (name, is_parameter)


def _dense_range(tensor: torch.Tensor) -> tuple[int, int] | None:
    """Returns the addresses of a tensor whose elements lie side by side."""
    if tensor.layout is not torch.strided or tensor.is_meta or not tensor.numel():
        return None
    if not tensor.is_contiguous():
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        if 1 + sum((size - 1) * stride for size, stride in steps) != tensor.numel():
            return None
    try:
        address = tensor.data_ptr()
    except RuntimeError:  # of a tensor that has no memory, as functorch's
        return None
    return (address, address + tensor.nbytes) if address else None


def tell_of_model(model: nn.Module, slices: int) -> None:
    """Tells the user, in worker 0, how the model behaves differently here."""
    if slices > 1 and any(isinstance(each, nn.SyncBatchNorm) for each in model.modules()):
        print(
            "tensorwire: SyncBatchNorm takes its mean and variance over the samples of one slice "
            "here, as BatchNorm does: nothing is synchronized in forward() "
            "(docs/from-ddp.md#buffers-and-batchnorm)",
            file=sys.stderr,
            flush=True,
        )
