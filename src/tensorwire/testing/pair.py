"""Connects two Nodes of one process: the smallest fabric, for tests.

Transfers between them take the same path as between two processes of one host.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from tensorwire.memory import Node, Peer


class Pair(NamedTuple):
    """Two connected Nodes and how each sees the other.

    Attributes:
        near: the Node that connected.
        far: the Node that accepted.
        to_far: `far` as `near` sees it.
        to_near: `near` as `far` sees it.
    """

    near: Node
    far: Node
    to_far: Peer
    to_near: Peer


@contextlib.contextmanager
def node_pair(transports: Iterable[str] | None = None, **options: Any) -> Iterator[Pair]:
    """Yields two connected Nodes, and closes both at the end.

    Args:
        transports: as for `Node`; with one name, both directions use it.
        options: more arguments for both Nodes.

    Raises:
        UnavailableError: the transport cannot be had here.
    """
    chosen = None if transports is None else list(transports)
    with (
        Node("near", transports=chosen, **options) as near,
        Node("far", transports=chosen, **options) as far,
    ):
        to_far = near.connect(far.address)
        to_near = far.accept(timeout_s=10.0)
        yield Pair(near, far, to_far, to_near)
