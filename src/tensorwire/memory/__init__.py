"""The device: memory of other processes, allocated, written, read and signalled.

Start with `Node`. docs/memory.md is the guide; the docstrings are the contract.
"""

from tensorwire._core import (
    Pace,
    Transfer,
    checksum,
    cores,
    crowded,
    put_rows,
    same_bytes,
    take_rows,
)

from .handle import Handle
from .mailbox import Mailbox, RemoteMailbox, mailbox_bytes
from .node import Node, wait_all
from .path import Path
from .path_warning import PathWarning
from .peer import Peer, Prepared, RemoteRegion, RemoteWord
from .private import PrivateMapping, local_memory, memory_file
from .region import Region, Word

__all__ = [
    "Handle",
    "Mailbox",
    "Node",
    "Pace",
    "Path",
    "PathWarning",
    "Peer",
    "Prepared",
    "PrivateMapping",
    "Region",
    "RemoteMailbox",
    "RemoteRegion",
    "RemoteWord",
    "Transfer",
    "Word",
    "checksum",
    "cores",
    "crowded",
    "local_memory",
    "mailbox_bytes",
    "memory_file",
    "put_rows",
    "same_bytes",
    "take_rows",
    "wait_all",
]
