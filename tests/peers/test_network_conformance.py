"""The tcp transport passes its suites between two hosts, over a link of 1 Gbit/s."""

import functools
from collections.abc import Iterator

import hosts
import pytest
from hosts import Hosts, enter
from network import pair_on, second_of
from test_faults import OPERATIONS, everything

from tensorwire.testing import check_names, check_transport, for_every_n

WHY_NOT = hosts.missing_shape()
pytestmark = [
    pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT)),
    pytest.mark.timeout(120),
]


@pytest.fixture(scope="module")
def pair() -> Iterator[Hosts]:
    with hosts.two_hosts() as made:
        hosts.shape(made, 1000)
        yield made


@pytest.mark.slow
def test_conformance_between_hosts(pair: Hosts) -> None:
    with enter(pair[0].path):
        passed = list(check_transport("tcp", places=[second_of(pair)]))
    assert passed == [("two hosts", name) for name in check_names("two processes")]


@pytest.mark.parametrize("action", ["fail", "drop", "delay", "cut"])
def test_every_operation_between_hosts(pair: Hosts, action: str) -> None:
    build = functools.partial(pair_on, pair)
    options = {"transports": ["tcp"], "timeout_s": 0.25, "delay_s": 0.03}
    assert for_every_n(everything, action, build=build, **options) == OPERATIONS
