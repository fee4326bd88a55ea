"""The warning at connection: the rule, and when it is silent."""

import warnings

import pytest

import tensorwire as tw
from tensorwire.memory import path_warning
from tensorwire.memory.devices import RdmaPort
from tensorwire.memory.offer import offered_by
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
        warn_if_slower("192.0.2.1:7", "x", "tcp", HIDDEN)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_if_slower("192.0.2.1:7", "x", "tcp", HIDDEN)
    with pytest.warns(tw.PathWarning):
        warn_if_slower("192.0.2.1:8", "x", "tcp", HIDDEN)


def test_the_peer_is_asked_only_with_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """With an active port here, a real Node is asked what it offers; without one, nobody is."""
    asked = []

    def ask(address: str) -> object:
        asked.append(address)
        return offered_by(address)

    monkeypatch.setattr(path_warning, "offered_by", ask)
    with tw.Node("there") as there, warnings.catch_warnings():
        warnings.simplefilter("error")
        monkeypatch.setattr(path_warning, "rdma_ports", lambda: [])
        warn_if_slower(there.address, "there", "tcp", APART)
        assert asked == []
        monkeypatch.setattr(path_warning, "rdma_ports", lambda: [ACTIVE])
        path_warning._warned.discard(there.address)
        warn_if_slower(there.address, "there", "tcp", APART)  # it offers no rdma
        assert asked == [there.address]


def test_an_error_filter_leaves_no_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever turns the warning into an error gets no peer, and holds none."""

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
    with tw.Node("both", secret=b"sixteen bytes...") as both, tw.Node("b", transports=["tcp"]) as b:
        offer = offered_by(both.address)
        assert offer is not None
        assert {"shm", "tcp"} <= offer.transports
        assert (offer.name, offer.has_secret) == ("both", True)
        assert both.peers == []
        restricted = offered_by(b.address)
        assert restricted is not None
        assert restricted.transports == {"tcp"}


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", bytes(160)])
def test_nobody_there_is_a_node(answer: bytes) -> None:
    import socket
    import threading

    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            stream, _ = listener.accept()
            with stream:
                stream.recv(160, socket.MSG_WAITALL)
                stream.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        assert offered_by(f"127.0.0.1:{listener.getsockname()[1]}") is None
        thread.join()
    assert offered_by("127.0.0.1:1") is None
    assert offered_by("no-such-host.invalid:1") is None
