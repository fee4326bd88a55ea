"""Shares of servers on the device of the workers' models, where that takes more than one place.

As in test_device.py, tensors of the CPU are treated as if they were on a device.
"""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from team import Team
from test_device import device, digest, small_model
from torch import nn

import tensorwire.torch as tw
from tensorwire.errors import UnavailableError
from tensorwire.parameters import ModelDevice
from tensorwire.parameters.regions import RegionKind
from tensorwire.parameters.server.opening import Opening
from tensorwire.torch import devices
from tensorwire.torch.kernels.share_device import TorchDevice
from tensorwire.torch.optimizer import replica_of
from tensorwire.torch.replica import device_parameters


def edit_much(job: Any, place: str) -> str:
    with device("staged"):
        torch.manual_seed(1)
        model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(6)))
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        opt: Any = tw.DistributedOptimizer(sgd, model, parameters_on=place)
        inputs = torch.randn(4, 1024, generator=torch.Generator().manual_seed(job.rank))
        for factor in (0.5, 2.0, 3.0):
            opt.zero_grad()
            model(inputs).square().sum().backward()
            opt.synchronize()
            for parameter in model.parameters():
                parameter.grad.mul_(factor)
            opt.step()
        return digest(model)


@pytest.mark.slow
def test_edited_gradients_that_are_still_on_their_way(team: Team) -> None:
    """Named for a bug: the step took what was there, as their commit goes ahead of them."""
    host = team.run(edit_much, "host", transports=["tcp"])
    assert team.run(edit_much, "auto", transports=["tcp"]) == host


def train_beside(job: Any, elsewhere: bool) -> tuple[str, list[bool], int]:
    """Trains; where worker 1 has another device, as it says.

    Returns:
        A digest, of which slices a server has memory for gradients on the device, and how many
        shares this worker sees there.
    """
    before = device_parameters.model_device
    if elsewhere and job.rank == 1:
        other = ModelDevice("staged other", "cuda:1")
        device_parameters.model_device = lambda where: other
    try:
        with device("staged"):
            model = small_model()
            adamw = torch.optim.AdamW(model.parameters(), lr=1e-2)
            opt: Any = tw.DistributedOptimizer(adamw, model)
            for _ in range(3):
                opt.zero_grad()
                model(torch.ones(4, 1, 16, 16)).square().sum().backward()
                opt.step()
            store: Any = replica_of(opt).store
            found = [store._links[0].find(RegionKind.PRODUCED, i) for i in range(2)]
            return digest(model), [each is not None for each in found], len(store.on_device())
    finally:
        device_parameters.model_device = before


def test_no_memory_is_taken_for_gradients_of_workers_on_another_device(team: Team) -> None:
    """Named for a bug: the device of worker 0 had memory for gradients of all slices."""
    host, beside, shares = team.run(train_beside, False)[0]
    assert (beside, shares) == ([True, True], 1)
    found = team.run(train_beside, True)
    assert found == [(host, [True, False], 1), (host, [True, False], 0)]


def look_at_shares(job: Any, frozen: int) -> int:
    with device("staged"):
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, frozen).requires_grad_(False))
        sgd = torch.optim.SGD(model[0].parameters(), lr=0.1)
        opt: Any = tw.DistributedOptimizer(sgd, model)
        model(torch.ones(1, 64)).sum().backward()
        opt.step()
        return len(replica_of(opt).store.on_device())


@pytest.mark.parametrize(("frozen", "shares"), [(16, 1), (256, 0)])
def test_frozen_parameters_do_not_fill_the_device(frozen: int, shares: int, team: Team) -> None:
    """Named for a bug: a device had room for state and gradients of what has neither."""
    assert team.run(look_at_shares, frozen) == [shares, shares]
    assert team.alone(look_at_shares, frozen) == shares


class Driver:
    """Locks pages as CUDA's does: not twice."""

    def __init__(self) -> None:
        self.spans: list[tuple[int, int]] = []

    def lock(self, start: int, stop: int) -> bool:
        if any(start < last and first < stop for first, last in self.spans):
            return False
        self.spans.append((start, stop))
        return True


def lock_alone(job: Any) -> list[str]:
    driver, before = Driver(), devices.PageLocks.lock

    def lock(self: Any, memories: Any) -> None:
        for each in memories:
            address = each.ctypes.data
            if each.nbytes and not driver.lock(address, address + each.nbytes):
                self.why_not = "locked already"

    devices.PageLocks.lock = lock  # type: ignore[method-assign]
    try:
        with device("staged"):
            model = nn.Sequential(nn.Linear(9, 9), nn.Linear(9, 2).requires_grad_(False))
            sgd = torch.optim.SGD(model[0].parameters(), lr=0.1)
            opt: Any = tw.DistributedOptimizer(sgd, model)
            model(torch.ones(1, 9)).sum().backward()
            opt.step()
            assert replica_of(opt).store.on_device()
            assert driver.spans
            return [row.route for row in tw.explain_optimizer(opt).rows if "buffer" in row.route]
    finally:
        devices.PageLocks.lock = before  # type: ignore[method-assign]


def test_one_process_locks_memory_once(team: Team) -> None:
    """Named for a bug: a worker alone locked its values twice, and said that it could not."""
    assert team.alone(lock_alone) == []


def test_a_share_that_a_predecessor_has_elsewhere_is_an_error() -> None:
    """Else the parameters of a new region, which are 0, would be those of the model."""
    opening = object.__new__(Opening)
    opening.number, opening._allocated, opening.member = 3, [], SimpleNamespace()  # type: ignore
    region = SimpleNamespace(device="cuda:0", array=lambda: np.zeros(64, np.uint8))
    opening.regions = SimpleNamespace(  # type: ignore[assignment]
        server=1, share=SimpleNamespace(size_bytes=64), allocate=lambda *given: region
    )
    opening.device = TorchDevice("staged cpu")
    with pytest.raises(UnavailableError, match=r"on cuda:0.*start the job anew"):
        opening.worked_on(RegionKind.ON_DEVICE)
