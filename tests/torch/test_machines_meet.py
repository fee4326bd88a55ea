"""The processes of a split model find each other by name, and no other process takes a place."""

import contextlib

import pytest

from tensorwire import Node
from tensorwire.errors import PeerLostError, UnavailableError
from tensorwire.torch.group import address_in, connect


def test_strangers_are_turned_away(capfd: pytest.CaptureFixture[str]) -> None:
    """Named for a bug: a second Node of a name took the place of the first, without a word."""
    names = ["machine-1", "machine-1", "machine-\u00b2", "machine-0", "machine-2"]
    with contextlib.ExitStack() as stack:
        node = stack.enter_context(Node("machine-0"))
        others = [stack.enter_context(Node(name)) for name in names]
        peers = [other.connect(node.address) for other in others]
        addresses = {0: node.address, 1: others[0].address, 2: others[4].address}
        mine = connect(node, 0, addresses).peers
        assert mine is not None
        assert [mine[1].incarnation, mine[2].incarnation] == [
            others[0].incarnation,
            others[4].incarnation,
        ]
        lines = capfd.readouterr().err.splitlines()
        for peer, line in zip(peers[1:4], lines, strict=True):
            assert line.startswith("rank 0 turned away 'machine-")
            assert line.endswith("expected: machine-2")
            with pytest.raises(PeerLostError, match="rank 0 turned away"):
                peer.region("anything", 20.0)
        assert not peers[0].lost
        assert not peers[4].lost


def test_another_one_at_an_address() -> None:
    with Node("machine-1") as node, Node("somebody") as other:
        addresses = {0: other.address, 1: node.address}
        with pytest.raises(UnavailableError, match=r"rank 0 .*'somebody' .* not machine-0"):
            connect(node, 1, addresses)
        with pytest.raises(UnavailableError, match="rank 1 cannot reach rank 0 at nowhere"):
            connect(node, 1, {**addresses, 0: "nowhere"})


def test_an_address_that_makes_no_sense() -> None:
    """Named for a bug: the error was of the conversion and did not name the worker."""
    assert address_in(b"127.0.0.1:7000".ljust(64, b"\0"), 3) == "127.0.0.1:7000"
    with pytest.raises(ValueError, match="worker 3 sent no valid address"):
        address_in(b"127.0.0.1:\xff000".ljust(64, b"\0"), 3)
