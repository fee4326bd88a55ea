"""The parameter server: layout, shards, versions. Knows no torch and no user's script.

Workers use a `Store`: `RemoteStore` on servers, `LocalStore` in the process itself; both run the
same `Shard`, so their bits are the same.
"""

from .collector import uncollected
from .device import DeviceBytes, ModelDevice, ShareDevice
from .kernel import AVERAGE_ONLY, Kernel, Lent, Lookup, Rows, Scalars, TableStep, Tile, Weight
from .layout import (
    CELL_BYTES,
    ITEM_BYTES,
    WITH_GRADIENT,
    Cell,
    Layout,
    Selection,
    Share,
    Spec,
    TensorSpec,
    padded,
)
from .messages import (
    ABSENT,
    APPLY,
    CHECK_FINITE,
    POOLED,
    PRODUCED,
    PUBLISH,
    PUSHED,
    REDUCE,
    REDUCED,
    WANT_NORM,
    WRITTEN,
    Bytes,
    Commit,
    Hyper,
    Result,
)
from .modes import SYNC, Mode, Pace, Paces, checked_mode
from .regions import AVERAGE
from .server.lending.room import groups_left
from .server.process import serve
from .server.server import Server, most_threads
from .shard import threads_for
from .worker.interface import Part, Place, Store
from .worker.local import LocalStore
from .worker.own_pace import OwnPaceStore
from .worker.snapshot import PresentVersion, Readable, RemoteSnapshot, Snapshot
from .worker.store import RemoteStore

__all__ = [
    "ABSENT",
    "APPLY",
    "AVERAGE",
    "AVERAGE_ONLY",
    "CELL_BYTES",
    "CHECK_FINITE",
    "ITEM_BYTES",
    "POOLED",
    "PRODUCED",
    "PUBLISH",
    "PUSHED",
    "REDUCE",
    "REDUCED",
    "SYNC",
    "WANT_NORM",
    "WITH_GRADIENT",
    "WRITTEN",
    "Bytes",
    "Cell",
    "Commit",
    "DeviceBytes",
    "Hyper",
    "Kernel",
    "Layout",
    "Lent",
    "LocalStore",
    "Lookup",
    "Mode",
    "ModelDevice",
    "OwnPaceStore",
    "Pace",
    "Paces",
    "Part",
    "Place",
    "PresentVersion",
    "Readable",
    "RemoteSnapshot",
    "RemoteStore",
    "Result",
    "Rows",
    "Scalars",
    "Selection",
    "Server",
    "Share",
    "ShareDevice",
    "Snapshot",
    "Spec",
    "Store",
    "TableStep",
    "TensorSpec",
    "Tile",
    "Weight",
    "checked_mode",
    "groups_left",
    "most_threads",
    "padded",
    "serve",
    "threads_for",
    "uncollected",
]
