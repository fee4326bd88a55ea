"""Holds the core's Node and its closer, for all objects that need it open."""

from __future__ import annotations

import atexit
import os
import sys
import warnings
import weakref

from tensorwire import _core

from . import aio


class OpenNode:
    """A Node of the core, which is closed when the last object that holds this one is gone.

    So a Region or a Peer keeps its Node open, though the program has forgotten the Node itself.

    Attributes:
        core: the Node of the core.
        address: where others reach it, "host:port".
    """

    __slots__ = ("__weakref__", "_closer", "_owner_pid", "address", "core")

    def __init__(self, core: _core.Node, address: str) -> None:
        self.core = core
        self.address = address
        self._owner_pid = os.getpid()
        # Also at exit of the interpreter, so that peers see an orderly end.
        self._closer = weakref.finalize(self, _close, core, self._owner_pid, forgotten=True)

    def close(self) -> None:
        """Closes the Node; see `Node.close`."""
        self._closer.detach()
        _close(self.core, self._owner_pid)


def _close(core: _core.Node, owner_pid: int, forgotten: bool = False) -> None:
    if os.getpid() != owner_pid:
        return  # a forked child: the Node lives in the parent
    forgotten = forgotten and not core.closed
    core.close()
    aio.release(core)
    if forgotten:
        warnings.warn(
            f"Node {core.name!r} was never closed; use 'with Node(...)' or close()",
            ResourceWarning,
            stacklevel=1,
        )


def _begin_exit() -> None:
    """Prepares the core for the interpreter's end, before the open Nodes are closed.

    Objects held by daemon threads then are never released, which is no fault of the bindings.
    """
    if len(sys._current_frames()) > 1:
        _core.expect_leaks()
    _core.begin_exit(aio.silence_loop)


# Functions of atexit run in reverse order: this one before that of weakref, which closes Nodes and
# is registered with the first finalizer of a process.
weakref.finalize(OpenNode, _begin_exit).detach()
atexit.register(_begin_exit)
