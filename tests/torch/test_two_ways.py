"""Over a link, gradients go one way while new values of others come back."""

import hashlib
import time
from collections.abc import Iterator
from itertools import pairwise

import hosts
import pytest
import torch
from hosts import Hosts
from team import Team
from torch import nn

import tensorwire.torch as tw

WHY_NOT = hosts.missing_shape()
pytestmark = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))

MEGABITS = 400
WIDTHS = (500, 3000, 500)
SIZE = 4 * 2 * 500 * 3000  # bytes of the weights
ONE_WAY_S = SIZE / (MEGABITS * 125_000)


@pytest.fixture(scope="module")
def pair() -> Iterator[Hosts]:
    with hosts.two_hosts() as made:
        hosts.shape(made, MEGABITS)
        yield made


def train(job: tw.Job, max_norm: float | None) -> tuple[float, str]:
    """Seconds of the shortest exchange of a step, and a digest of the parameters."""
    torch.manual_seed(0)
    layers = [nn.Linear(a, b) for a, b in pairwise(WIDTHS)]
    model = nn.Sequential(*layers)
    opt = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    opt = tw.DistributedOptimizer(opt, model, max_norm=max_norm)
    times = []
    for _ in range(7):
        job.barrier()
        model(torch.randn(2, WIDTHS[0])).square().mean().backward()
        started = time.perf_counter()
        opt.step()
        times.append(time.perf_counter() - started)
        opt.zero_grad()
    values = [parameter.detach().numpy().tobytes() for parameter in model.parameters()]
    return min(times), hashlib.sha256(b"".join(values)).hexdigest()


@pytest.mark.slow
def test_both_ways_are_used(team: Team, pair: Hosts) -> None:
    """The second worker is across the link. One way after the other would take twice as long."""
    far_s = team.run(train, None, transports=["tcp"], hosts=pair)[1][0]
    assert 0.8 * ONE_WAY_S < far_s < 1.75 * ONE_WAY_S


@pytest.mark.slow
@pytest.mark.parametrize("max_norm", [None, 0.1])
def test_same_bits_as_with_shared_memory(team: Team, pair: Hosts, max_norm: float | None) -> None:
    (_, here), _ = team.run(train, max_norm)
    for servers in (1, 2):
        options = {"transports": ["tcp"], "hosts": pair, "servers": servers}
        assert [bits for _, bits in team.run(train, max_norm, **options)] == [here] * 2
