"""A process that another one succeeds: it owns regions, or takes up those of the last one."""

import os
import socket
from typing import Any

from tensorwire import Handle, Node
from tensorwire.testing import Channel

SIZE = 1 << 16
NAMES = ("data", "words", "private")


def own(channel: Channel, path: str) -> None:
    """Process function: allocates, hands the descriptors over, and waits to be killed."""
    with Node("server") as node, socket.socket(socket.AF_UNIX) as passing:
        passing.connect(path)
        regions = [
            node.allocate(SIZE, name=name, access="none" if name == "private" else "rw")
            for name in NAMES
        ]
        regions[2].array()[:] = 42
        descriptors = [node.listener(), *(region.descriptor() for region in regions)]
        socket.send_fds(passing, [b"all"], descriptors)
        channel.send((node.address, [region.handle() for region in regions]))
        channel.recv(None)


def succeed(channel: Channel, handles: list[Handle], path: str) -> None:
    """Process function: restores all of it, and does what it is told until it is killed."""
    with socket.socket(socket.AF_UNIX) as passing:
        passing.connect(path)
        _, descriptors, _, _ = socket.recv_fds(passing, 16, 1 + len(handles))
    listener, *memory = descriptors
    incarnation = handles[0].incarnation
    with Node("server", incarnation=incarnation, listener=listener) as node:
        regions: dict[str, Any] = {}
        for handle, descriptor in zip(handles, memory, strict=True):
            regions[handle.name] = node.restore(
                descriptor,
                name=handle.name,
                id=handle.id,
                generation=handle.generation,
                size_bytes=handle.size_bytes,
                access=handle.access,
            )
        for descriptor in descriptors:
            os.close(descriptor)
        assert (regions["private"].array() == 42).all()
        assert [regions[handle.name].handle() for handle in handles] == handles
        fresh = node.allocate(64, name="ready")
        channel.send((node.address, os.getpid(), fresh.handle().id))
        while True:
            offset, value = channel.recv(None)
            regions["words"].word(offset).wait_until(value, 20)
            channel.send(regions["data"].array()[:8].tobytes())
