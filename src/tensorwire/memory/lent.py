"""Lends memory of another Node of this process to the peers of one Node, for reading."""

from __future__ import annotations

from tensorwire import _core

from .open_node import OpenNode


class LentRegion:
    """A region lent by `Node.lend`: peers reach the memory until `free`. Any thread.

    It shows no memory here: the Node that the memory belongs to does.

    Attributes:
        name: by which peers find it.
        size_bytes: of what they see.
    """

    __slots__ = ("_core", "_node", "name", "size_bytes")

    def __init__(self, node: OpenNode, core: _core.Region) -> None:
        self._node, self._core = node, core
        self.name, self.size_bytes = core.name, core.size_bytes

    def free(self) -> None:
        """Takes the memory away from peers; calling it again does nothing.

        Their next use raises `StaleHandleError`. A peer on the same host that has the memory mapped
        keeps its mapping.
        """
        if not self._node.core.closed:
            self._node.core.free(self._core)
