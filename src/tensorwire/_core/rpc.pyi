"""Lines of calls between two processes."""

import collections
from typing import Any

import tensorwire._core


RING_BYTES: int = 524352

CAPACITY_BYTES: int = 524288

PIECE_BYTES: int = 49152

MOST_FRAME_BYTES: int = 147728

class FrameError(Exception):
    pass

def parse(data: bytes, frame_type: object) -> list[Any]:
    """The frames that bytes are made of, as a reader gives them."""

class LineReader:
    def __init__(self, node: tensorwire._core.Node, memory: tensorwire._core.Region, other: tensorwire._core.RemoteRegion, peer: tensorwire._core.Peer, frame_type: object) -> None: ...

    @property
    def awaited(self) -> int:
        """The value of the first word from which there is something to take."""

    def read(self, timeout_s: float | None) -> bool:
        """Waits until something has arrived, and takes it."""

    def take(self) -> None:
        """Takes what has arrived."""

    def next(self) -> Any:
        """The next frame of what was taken; None: there are no more."""

class LineWriter:
    def __init__(self, node: tensorwire._core.Node, memory: tensorwire._core.Region, other: tensorwire._core.RemoteRegion, peer: tensorwire._core.Peer) -> None: ...

    @property
    def room(self) -> int: ...

    def wait_room(self, bytes: int, timeout_s: float | None) -> None: ...

    def write_out(self, outbox: collections.deque[bytes], most_bytes: int, patient: bool) -> bool:
        """
        Writes frames as long as there is room, so many bytes at a time; False: some are left.
        """

    def drain(self, timeout_s: float | None) -> None: ...
