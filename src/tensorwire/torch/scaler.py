"""Defines a `GradScaler` with which all workers skip the same steps: the servers decide."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.amp.grad_scaler import OptState

from .optimizer import DistributedMixin, replica_of
from .replica.replica import Replica


class GradScaler(torch.amp.GradScaler):
    """A `torch.amp.GradScaler` for distributed optimizers (others are handled as in torch).

    The device is "cpu" by default.

    The servers divide by the scale and look for infinite or undefined elements in the averaged
    gradient; if there are any, no worker's parameters change and every worker's scale shrinks.
    """

    def __init__(self, device: str = "cpu", *args: Any, **kwargs: Any) -> None:
        super().__init__(device, *args, **kwargs)
        self._between_slices = False

    def step(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        """Steps unless the averaged gradient is not finite.

        Raises:
            RuntimeError: called twice between `update()`s, with a closure, or at a scale of 0 or
                infinity.
        """
        if not self._enabled or not isinstance(optimizer, DistributedMixin):
            super().step(optimizer, *args, **kwargs)
            return
        if any(closure is not None for closure in (*args, kwargs.get("closure"))):
            raise RuntimeError(
                "a scaler takes no closure, as in torch: call scaler.scale(loss).backward() "
                "yourself, then scaler.step(optimizer)"
            )
        state = self._per_optimizer_states[id(optimizer)]
        if state["stage"] is OptState.STEPPED:
            raise RuntimeError("step() has already been called since the last update().")
        core = replica_of(optimizer)
        core.reducer.check_scalable()
        self._begin(core)
        self._check_scale_growth_tracker("step")
        core.scaling, core.finite = (self._inverse(), True), True
        try:
            optimizer.step(*args, **kwargs)
        finally:
            core.scaling = (None, False)
        found = not core.finite
        self._between_slices = core.reducer.turn > 0
        state["found_inf_per_device"] = {
            torch.device("cpu"): torch.tensor(float(found), dtype=torch.float32, device="cpu")
        }
        state["stage"] = OptState.STEPPED

    def unscale_(self, optimizer: Any) -> None:
        """Makes `.grad` the averaged gradient without the scale; see `synchronize()`."""
        if not self._enabled or not isinstance(optimizer, DistributedMixin):
            super().unscale_(optimizer)
            return
        state = self._per_optimizer_states[id(optimizer)]
        if state["stage"] is not OptState.READY:
            raise RuntimeError("unscale_() comes once, before step(), after the last update().")
        core = replica_of(optimizer)
        self._begin(core)
        self._check_scale_growth_tracker("unscale_")
        core.reducer.check_scalable()
        core.synchronize(scale=self._inverse())
        state["stage"] = OptState.UNSCALED

    def _begin(self, core: Replica) -> None:
        """Makes the scale where another process of a split model has scaled the loss."""
        if core.ownership.split and self._scale is None:
            self._lazy_init_scale_growth_tracker(torch.device("cpu"))

    def _inverse(self) -> float:
        """Returns the factor that takes the scale out of gradients."""
        scale = float(self.get_scale())
        if not 0 < scale < math.inf:
            raise RuntimeError(
                f"the loss scale is {scale}, with which no step can be made: begin with an "
                "init_scale= above 0; a scale that has shrunk to 0 means that the loss was not "
                "finite for hundreds of steps, so look for NaN and infinity in it"
            )
        return 1.0 / scale

    def update(self, new_scale: Any = None) -> None:
        """Updates the scale as in torch; once per step also with several slices per worker."""
        if self._between_slices:
            self._per_optimizer_states.clear()
            return
        super().update(new_scale)
