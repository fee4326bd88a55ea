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

    def back(self, file: int) -> int:
        """
        Lets the kernel read an open file itself; the number that names it in an answer.
        """

    def unback(self, backing: int) -> None: ...

    @property
    def backs(self) -> bool | None:
        """Whether the kernel does that; None before it has said so."""

    def wake_poll(self, poll: int) -> None: ...

    def end(self) -> None: ...
