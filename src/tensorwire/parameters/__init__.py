"""The parameter server: layout, shards, versions. Knows no torch and no user's script.

Workers use a `Store`: `RemoteStore` on servers, `LocalStore` in the process itself; both run the
same `Shard`, so their bits are the same.
"""

from .apply import Apply, Hyper, Tile
from .layout import ITEM_BYTES, Layout, Share, Spec, TensorSpec
from .messages import (
    APPLY,
    CHECK_FINITE,
    PUBLISH,
    REDUCE,
    REDUCED,
    WANT_NORM,
    Bytes,
    Commit,
    Result,
)
from .server import Server
from .store import LocalStore, RemoteStore, Store

__all__ = [
    "APPLY",
    "CHECK_FINITE",
    "ITEM_BYTES",
    "PUBLISH",
    "REDUCE",
    "REDUCED",
    "WANT_NORM",
    "Apply",
    "Bytes",
    "Commit",
    "Hyper",
    "Layout",
    "LocalStore",
    "RemoteStore",
    "Result",
    "Server",
    "Share",
    "Spec",
    "Store",
    "TensorSpec",
    "Tile",
]
