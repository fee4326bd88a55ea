"""A mount of which this process answers the files."""

from collections.abc import Sequence


MOST_BYTES: int = 1048576

class Mount:
    def __init__(self, path: str, uid: int, gid: int) -> None: ...

    def next(self) -> tuple[int, int, int, bytes] | None:
        """
        Waits for a request: its operation, number, node and body. None: it is unmounted.
        """

    def answer(self, unique: int, error: int, buffers: Sequence[object] = []) -> None: ...

    def serve(self, handle: int, buffers: Sequence[object]) -> None:
        """Answers the reads of an open file from memory."""

    def unserve(self, handle: int) -> None: ...

    def wake_poll(self, poll: int) -> None: ...

    def end(self) -> None: ...
