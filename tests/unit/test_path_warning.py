"""The warning at connection: the rule, and when it is silent."""

import warnings

import pytest

import tensorwire as tw
from tensorwire.memory import path_warning
from tensorwire.memory.devices import RdmaPort
from tensorwire.memory.path_warning import warn_if_slower, why_slower

ACTIVE = RdmaPort("mlx5_0", 1, "ACTIVE", 100.0, "InfiniBand", ("fe80::1",), "")
DOWN = RdmaPort("mlx5_0", 1, "DOWN", 100.0, "InfiniBand", (), "")
APART = "the peer is on another host"
HIDDEN = "same host, but its shared memory cannot be reached (refused): another network namespace?"


def test_shm_is_never_too_slow() -> None:
    assert why_slower("shm", "the peer is on this host", [ACTIVE], False, {"rdma"}) is None


@pytest.mark.parametrize("transport", ["rdma", "something new"])
def test_only_tcp_is_judged(transport: str) -> None:
    assert why_slower(transport, APART, [ACTIVE], True, {"rdma"}) is None


def test_same_host_by_tcp() -> None:
    found = why_slower("tcp", HIDDEN, [], False, ())
    assert found is not None
    assert found.reason == HIDDEN
    assert "--network" in found.remedy


@pytest.mark.parametrize(
    ("ports", "there"),
    [([], {"rdma"}), ([DOWN], {"rdma"}), ([ACTIVE], {"shm", "tcp"}), ([ACTIVE], set())],
)
def test_no_rdma_at_one_end_is_no_fault(ports: list[RdmaPort], there: set[str]) -> None:
    assert why_slower("tcp", APART, ports, False, there) is None


def test_rdma_at_both_ends_but_no_library() -> None:
    found = why_slower("tcp", APART, [DOWN, ACTIVE], False, {"rdma", "tcp"})
    assert found is not None
    assert "libucp.so.0 is not installed here" in found.reason
    assert "libucx0" in found.remedy


def test_rdma_at_both_ends_but_not_used() -> None:
    reason = f"{APART}; this Node does not offer rdma"
    found = why_slower("tcp", reason, [ACTIVE], True, {"rdma", "tcp"})
    assert found is not None
    assert "this Node does not offer rdma" in found.reason
    assert "listen" in found.remedy


def test_one_warning_per_address() -> None:
    with pytest.warns(tw.PathWarning, match=r"peer 'x' at 192.0.2.1:7 is reached by tcp.*Remedy"):
        warn_if_slower("192.0.2.1:7", "x", "tcp", HIDDEN, ("tcp",))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_if_slower("192.0.2.1:7", "x", "tcp", HIDDEN, ("tcp",))
    with pytest.warns(tw.PathWarning):
        warn_if_slower("192.0.2.1:8", "x", "tcp", HIDDEN, ("tcp",))


def test_what_the_peer_offers_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """With an active port here, and only then, a peer that offers rdma would be reached faster."""
    monkeypatch.setattr(path_warning, "rdma_ports", lambda: [ACTIVE])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_if_slower("192.0.2.1:9", "x", "tcp", APART, ("shm", "tcp"))
    with pytest.warns(tw.PathWarning, match="both ends have RDMA"):
        warn_if_slower("192.0.2.1:10", "x", "tcp", APART, ("shm", "tcp", "rdma"))
    monkeypatch.setattr(path_warning, "rdma_ports", lambda: [])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_if_slower("192.0.2.1:11", "x", "tcp", APART, ("shm", "tcp", "rdma"))


def test_an_error_filter_leaves_no_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that turns the warning into an error gets no peer, and holds none."""

    def warn(address: str, *_: object) -> None:
        raise tw.PathWarning(address)

    monkeypatch.setattr("tensorwire.memory.node.warn_if_slower", warn)
    with tw.Node("a") as a, tw.Node("b") as b:
        with pytest.raises(tw.PathWarning):
            a.connect(b.address)
        assert a.peers == []
        assert a.connect(b.address, require="tcp").path.transport == "tcp"
    with tw.Node("a", transports=["tcp"]) as a, tw.Node("b") as b:
        assert a.connect(b.address).path.transport == "tcp"
    monkeypatch.setenv("TENSORWIRE_TRANSPORTS", "tcp")
    with tw.Node("a") as a, tw.Node("b") as b:
        assert a.connect(b.address).path.transport == "tcp"


def test_what_a_node_offers() -> None:
    with tw.Node("both") as both, tw.Node("b", transports=["tcp"]) as b:
        assert {"shm", "tcp"} <= set(b.connect(both.address).offered)
        assert both.connect(b.address).offered == ("tcp",)
