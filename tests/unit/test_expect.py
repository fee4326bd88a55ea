"""What a path should reach."""

import tensorwire as tw
from tensorwire.memory.expect import interface_of, memory_gb_per_s, network_gb_per_s


def test_memory_speed_is_measured_once() -> None:
    first = memory_gb_per_s()
    assert 0.1 < first < 1000
    assert memory_gb_per_s() == first


def test_loopback_is_found_and_promises_nothing() -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("no-such-host.invalid") is None
    assert network_gb_per_s("127.0.0.1:9") is None


def test_paths_tell_what_to_expect() -> None:
    with tw.Node("a") as a, tw.Node("b") as b:
        assert a.connect(b.address).path.expected_gb_per_s == memory_gb_per_s()
        assert a.connect(b.address, require="tcp").path.expected_gb_per_s is None
