"""Averages the values of all workers: numbers, tensors, or dicts of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch


def as_number(value: Any) -> float:
    """Returns a number, or a tensor of one element, which may require a gradient."""
    return float(value.detach() if isinstance(value, torch.Tensor) else value)


def checked_weight(weight: Any) -> float:
    """Returns a weight of a slice as a number; 0: its gradient does not count.

    Raises:
        TypeError: it is no number.
        ValueError: it is negative, infinite or not a number.
    """
    try:
        number = as_number(weight)
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(
            f"a weight is a number, of tokens for example, and not {weight!r}: give "
            "int(mask.sum()) or the like"
        ) from None
    if not (number >= 0 and math.isfinite(number)):
        raise ValueError(f"a weight is a finite number from 0 up, not {number!r}")
    return number


def mean_of(sum_up: Callable[[Sequence[float]], list[float]], value: Any, weight: float) -> Any:
    """See `Job.mean`; `sum_up` adds up over all workers."""
    if not (weight >= 0 and math.isfinite(weight)):
        raise ValueError(f"a weight is a number from 0 up, not {weight!r}")
    if value is None:
        value, weight = 0.0, 0.0
    items = value if isinstance(value, Mapping) else {"": value}
    tensors = {k: torch.as_tensor(v, dtype=torch.float64, device="cpu") for k, v in items.items()}
    flat = [float(weight)]
    for tensor in tensors.values():
        flat += (tensor.detach().cpu().reshape(-1) * weight).tolist()
    total = sum_up(flat)
    if total[0] == 0:
        raise ValueError(
            "mean() has no result, as all workers gave weight=0 or None: one needs a weight above 0"
        )
    result, at = {}, 1
    for key, tensor in tensors.items():
        own = total[at : at + tensor.numel()]
        part = torch.tensor(own, dtype=torch.float64, device="cpu") / total[0]
        at += tensor.numel()
        result[key] = part.reshape(tensor.shape) if tensor.dim() else float(part)
    return result if isinstance(value, Mapping) else result[""]
