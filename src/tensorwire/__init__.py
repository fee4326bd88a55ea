"""tensorwire: one-sided movement of tensors between processes.

A remote process is a device: memory on it is allocated, written, read and signalled, and never
called. This package re-exports the memory API and the errors; it needs numpy only.
"""

from .errors import (
    BusyError,
    ClosedError,
    PeerLostError,
    StaleHandleError,
    TensorwireError,
    TimeoutError,
    UnavailableError,
)
from .memory import (
    Handle,
    Node,
    Path,
    PathWarning,
    Peer,
    Prepared,
    Region,
    RemoteRegion,
    RemoteWord,
    Transfer,
    Word,
    wait_all,
)

__version__: str

__all__ = [
    "BusyError",
    "ClosedError",
    "Handle",
    "Node",
    "Path",
    "PathWarning",
    "Peer",
    "PeerLostError",
    "Prepared",
    "Region",
    "RemoteRegion",
    "RemoteWord",
    "StaleHandleError",
    "TensorwireError",
    "TimeoutError",
    "Transfer",
    "UnavailableError",
    "Word",
    "wait_all",
]


def __getattr__(name: str) -> str:
    if name == "__version__":  # looked up when asked for: the metadata are slow to read
        from importlib.metadata import version

        return version("tensorwire")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
