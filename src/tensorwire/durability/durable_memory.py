"""Allocates a member's memory that outlives its process, kept by the launcher."""

from __future__ import annotations

import os
from typing import Any

from tensorwire.durability.descriptor_store import LISTENER, DescriptorStore
from tensorwire.memory import Node, Region

RESTORED = "restored"
"""The name of a region that a successor of a server allocates when all its memory is there.

The successor's Node listens before that; a region that is not there yet would be stale for its
peers.
"""

_OF_REGION = "id", "generation", "size_bytes", "access", "on_gpu"
_REGION = "region "  # in front of a region's name: the key under which it is kept


def open_node(
    name: str, store: DescriptorStore | None, *, key: str = LISTENER, **options: Any
) -> Node:
    """Opens a member's Node; with a store, in the place of its predecessor's.

    Args:
        name: of the Node.
        store: has the socket on which a predecessor listened, or gets this one's.
        key: under which the store has it.
        options: for `Node`.
    """
    if store is None:
        return Node(name, **options)
    kept = store.take(key)
    if kept is not None:
        try:
            return Node(
                name,
                incarnation=kept.about["incarnation"],
                listener=kept.descriptor,
                **options,
            )
        finally:
            os.close(kept.descriptor)
    node = Node(name, **options)
    descriptor = node.listener()
    try:
        about = {"incarnation": node.incarnation, "address": node.address}
        store.keep(key, about, descriptor)
    finally:
        os.close(descriptor)
    return node


class DurableMemory:
    """The regions of one member. All of a predecessor's are restored when it is made.

    Peers wait for the region RESTORED before they look for others.

    Args:
        node: of the member.
        store: keeps the memory, and a predecessor's; None: memory ends with this process.

    Raises:
        ValueError: what was kept is no region.
    """

    def __init__(self, node: Node, store: DescriptorStore | None) -> None:
        self._node, self._store = node, store
        # First of all, because others could get their ids.
        self._restored = {} if store is None else self._restore(store)
        if store is not None:
            node.allocate(1, name=RESTORED, access="none")

    @property
    def durable(self) -> bool:
        """True if allocated memory outlives this process."""
        return self._store is not None

    def allocate(
        self,
        size_bytes: int,
        *,
        name: str,
        access: str = "rw",
        device: str | None = None,
        **counters: int | None,
    ) -> Region:
        """Allocates like `Node.allocate`; if durable, returns a predecessor's region of that name.

        Args:
            size_bytes: of the region; the same as the predecessor's.
            name: of the region.
            access: of peers; not "r" where it is durable.
            device: as of `Node.allocate`; a predecessor's region is where that had allocated it.
            counters: where in it 64 bits lie that the launcher reads: `progress` counts what the
                member has achieved, `work` the nanoseconds that it has worked for that, and `size`
                is in bytes.

        Raises:
            ValueError: a predecessor's region is of another size.
        """
        if self._store is None:
            return self._node.allocate(size_bytes, name=name, access=access, device=device)
        if (region := self._restored.pop(name, None)) is not None:
            if region.size_bytes != size_bytes:
                raise ValueError(
                    f"{region!r} was allocated by the process that this one replaces, which needs "
                    f"{size_bytes} bytes: start the job anew, all with the same script and version"
                )
            return region
        region = self._node.allocate(size_bytes, name=name, access=access, device=device)
        handle = region.handle()
        about: dict[str, Any] = {"id": handle.id, "generation": handle.generation}
        about |= {"size_bytes": size_bytes, "access": access, "on_gpu": device is not None}
        about |= {name: offset for name, offset in counters.items() if offset is not None}
        descriptor = region.descriptor()
        try:
            self._store.keep(f"{_REGION}{name}", about, descriptor)
        finally:
            os.close(descriptor)
        return region

    def free(self, region: Region) -> None:
        """Frees a region of `allocate`. Any thread may call it."""
        if self._store is not None:
            # First: as soon as it is freed, another thread may get and keep its id.
            self._store.drop(f"{_REGION}{region.name}")
        region.free()

    def is_left(self, name: str) -> bool:
        """Tells whether a predecessor had a region of this name that was not asked for yet."""
        return name in self._restored

    def forget(self, prefix: str) -> None:
        """Frees all regions of a predecessor with names of this beginning."""
        for name in [each for each in list(self._restored) if each.startswith(prefix)]:
            if (region := self._restored.pop(name, None)) is not None:  # of another thread perhaps
                self.free(region)

    def _restore(self, store: DescriptorStore) -> dict[str, Region]:
        found = {}
        for key in store.left():
            kept = store.take(key) if key.startswith(_REGION) else None
            if kept is not None:
                name = key.removeprefix(_REGION)
                about = {each: kept.about[each] for each in _OF_REGION}
                try:
                    found[name] = self._node.restore(kept.descriptor, name=name, **about)
                finally:
                    os.close(kept.descriptor)
        return found
