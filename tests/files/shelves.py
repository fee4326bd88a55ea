"""A server that lends memory for checkpoints, its readers and writers, in one process."""

import time
from collections.abc import Sequence
from typing import Any

from tensorwire import Node
from tensorwire.files.checkpoints import CheckpointDesk, checkpoints_folder
from tensorwire.files.tree_items import Folder
from tensorwire.memory import Peer, RemoteMailbox, RemoteRegion
from tensorwire.parameters.checkpoint_files import (
    INDEX,
    INDEX_PLACES,
    PART_BYTES,
    Index,
    read_index,
)
from tensorwire.parameters.server.lending.checkpoints import CheckpointShelf

MOST = 3 * PART_BYTES


class Writer:
    """A process that may write, as `JobOwner` is one; here a Node of its own."""

    def __init__(self, name: str, address: str, transports: Sequence[str] | None = None) -> None:
        self.node = Node(name, transports=transports)
        self.peer = self.node.connect(address)
        self.desk = CheckpointDesk(self)  # type: ignore[arg-type]

    def first(self) -> tuple[Peer, str]:
        return self.peer, self.node.name

    def write(self, path: str, data: bytes, finish: bool = True) -> Any:
        writing = self.desk.write(f"checkpoints/{path}")
        writing.write(0, data)
        if finish:
            writing.sync()
        return writing


class Shelf:
    """A server with a shelf, its readers and its writers."""

    def __init__(self) -> None:
        self.node, self.door = Node("server-0"), Node("door-0")
        self.shelf = CheckpointShelf(self.node, self.door, MOST)
        self.reading = Node("reader")
        self.at_door = self.reading.connect(self.door.address)
        self.writers: list[Writer] = []

    def writer(self, name: str = "one", transports: Sequence[str] | None = None) -> Writer:
        self.writers.append(Writer(name, self.node.address, transports))
        return self.writers[-1]

    def checkpoints(self) -> Index:
        mailbox = RemoteMailbox(self.at_door.region(INDEX), INDEX_PLACES)
        return read_index(mailbox.latest(time.monotonic() + 5)[1].tobytes().partition(b"\0")[0])

    def regions(self, names: Sequence[str]) -> list[RemoteRegion]:
        return [self.at_door.region(name) for name in names]

    def used(self) -> int:
        """The bytes that are lent."""
        return sum(each.size_bytes for each in self.shelf._all())

    @property
    def tree(self) -> Folder:
        return checkpoints_folder(self, "checkpoints")  # type: ignore[arg-type]

    def read(self, path: str) -> bytes:
        item: Any = self.tree
        for part in path.split("/"):
            item = item.child(part)
        content = item.open()
        data: bytes = content.read()
        mapped = content.buffers()
        assert mapped is None or b"".join(mapped) == data
        return data

    def close(self) -> None:
        for node in (*(each.node for each in self.writers), self.reading, self.node, self.door):
            node.close()
        self.shelf.join()
