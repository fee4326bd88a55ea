"""Shares of servers on the device of the workers' models, where that takes more than one place.

As in test_device.py, tensors of the CPU are treated as if they were on a device.
"""

from typing import Any

import torch
from team import Team
from test_device import device, digest
from torch import nn

import tensorwire.torch as tw


def edit_much(job: Any, shares: str) -> str:
    with device("staged"):
        torch.manual_seed(1)
        model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(6)))
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        opt: Any = tw.DistributedOptimizer(sgd, model, shares=shares)
        inputs = torch.randn(4, 1024, generator=torch.Generator().manual_seed(job.rank))
        for factor in (0.5, 2.0, 3.0):
            opt.zero_grad()
            model(inputs).square().sum().backward()
            opt.synchronize()
            for parameter in model.parameters():
                parameter.grad.mul_(factor)
            opt.step()
        return digest(model)


def test_edited_gradients_that_are_still_on_their_way(team: Team) -> None:
    """Named for a bug: the step took what was there, as their commit goes ahead of them."""
    host = team.run(edit_much, "host", transports=["tcp"])
    assert team.run(edit_much, "auto", transports=["tcp"]) == host
