"""The speed that a path should reach."""

import pytest

import tensorwire as tw
from tensorwire.memory.bandwidth import (
    interface_of,
    interface_with,
    memory_gb_per_s,
    network_gb_per_s,
    source_address,
)


def test_memory_speed_is_measured_once() -> None:
    first = memory_gb_per_s()
    assert 0.1 < first < 1000
    assert memory_gb_per_s() == first


def test_loopback_is_found_and_promises_nothing() -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("no-such-host.invalid") is None
    assert network_gb_per_s("127.0.0.1:9") is None


def test_an_own_address_leads_nowhere() -> None:
    """Whichever interface has it, what is sent there never leaves this host."""
    own = source_address("192.0.2.1")
    if own is None:
        pytest.skip("no interface leads out of this machine")
    assert interface_with(own) not in (None, "lo")
    assert interface_of(own) == "lo"
    assert network_gb_per_s(f"{own}:9") is None
    assert source_address("no-such-host.invalid") is None


def test_paths_tell_what_to_expect() -> None:
    with tw.Node("a") as a, tw.Node("b") as b:
        assert a.connect(b.address).path.expected_gb_per_s == memory_gb_per_s()
        assert a.connect(b.address, require="tcp").path.expected_gb_per_s is None
