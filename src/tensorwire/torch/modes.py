"""Rejects options that have no meaning in a mode, and reports on modes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tensorwire.membership.world import World
from tensorwire.parameters import Mode, OwnPaceStore, Store

from .discovery import as_durable


def place_in(place: World, mode: Mode, durable: bool | None, pipeline: int) -> World:
    """Returns a worker's place as a mode and `tw.init(durable=…)` want it.

    Raises:
        ValueError: they cannot be had together.
    """
    if not mode.is_sync and pipeline > 1:
        raise ValueError(
            f"tw.init(pipeline={pipeline}, {mode}): the processes that share a model step "
            'together, use mode="sync"'
        )
    placed = as_durable(place, durable)
    if not mode.is_sync and placed.takeover:
        raise ValueError(
            f"tw.init({mode}) under --workers W:MAX or --on-death takeover: slices become other "
            'workers\' where all step together; use mode="sync", or leave these options out'
        )
    return placed


def check_slices(place: World, mode: Mode) -> None:
    """Raises ValueError if a worker that is alone has several slices, which it would average."""
    if not mode.is_sync and place.workers == 1 and place.slices > 1:
        raise ValueError(
            f"tw.init(slices={place.slices}, {mode}): a worker that is alone makes one step of "
            "all its slices; leave slices out"
        )


def check_optimizer(mode: Mode, buffers: str, by_worker: bool, tables: Sequence[str]) -> None:
    """Raises ValueError if an optimizer, or its model, needs that all step together."""
    if mode.is_sync:
        return
    if buffers == "average":
        raise ValueError(
            f'buffers="average" is the mean of slices that step together, and not for {mode}: use '
            '"broadcast" (slice 0\'s buffers) or "local"'
        )
    if by_worker:
        raise ValueError(
            f"worker 0 would apply this optimizer to averaged gradients, and {mode} has none: use "
            'one that servers apply (docs/optimizers.md), or mode="sync"'
        )
    if tables:
        raise ValueError(
            f"parameter {tables[0]!r} is a table with sparse gradients, which {mode} does not "
            'know: use sparse=False in the model, or mode="sync"'
        )


def check_averages(mode: Mode, slices: int) -> None:
    """Raises RuntimeError where there are no averaged gradients, or a worker has several slices."""
    if not mode.is_sync:
        raise RuntimeError(
            "synchronize(), clip_grad_norm_() and scaler.unscale_() are for averaged gradients, "
            f"and {mode} has none: to clip the gradients of each slice use "
            "DistributedOptimizer(max_norm=…)"
        )
    if slices > 1:
        raise RuntimeError(
            "synchronize() and clip_grad_norm_() need one slice per worker, here are "
            f"{slices}; use max_norm="
        )


def told_of(mode: Mode, stores: Sequence[Store]) -> dict[str, Any]:
    """Returns the mode and the staleness of this worker's versions, for a report."""
    told: dict[str, Any] = {"mode": mode.name}
    paces = [store.paces for store in stores if isinstance(store, OwnPaceStore)]
    if mode.is_sync or not paces:
        return told
    first = paces[0]
    for each in paces[1:]:
        first = first.joined(each)
    clock = max((each.last.clock for each in paces if each.last), default=0)
    return {**told, "bound": mode.staleness, "clock": clock, **first.described()}
