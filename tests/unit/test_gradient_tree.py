"""The file by which a worker without a script commits."""

import pytest

from tensorwire.files.gradient_tree import _CommitWriting


class Worker:
    """Keeps the committed texts, and writes more during a commit."""

    def __init__(self, error: OSError | None = None) -> None:
        self.texts: list[str] = []
        self.error, self.writes = error, b""
        self.file = _CommitWriting(self, "commit")  # type: ignore[arg-type]

    def commit_text(self, text: str) -> None:
        self.texts.append(text)
        if self.writes:
            self.file.write(0, self.writes)
        if self.error is not None:
            raise self.error


def test_what_was_committed_is_not_committed_again() -> None:
    worker = Worker()
    worker.file.write(0, b"version 3\n")
    worker.file.sync()
    assert (worker.texts, worker.file.text) == (["version 3\n"], b"")


def test_what_is_written_while_it_is_committed_is_for_the_next_commit() -> None:
    worker = Worker()
    worker.file.write(0, b"version 3\n")
    worker.writes = b"version 4\n"
    worker.file.sync()
    assert worker.file.text == b"version 4\n"


def test_what_was_refused_can_be_committed_again() -> None:
    worker = Worker(OSError(61, "half of it is missing"))
    worker.file.write(0, b"version 3\n")
    for _ in range(2):
        with pytest.raises(OSError, match="half of it"):
            worker.file.sync()
    assert worker.texts == ["version 3\n"] * 2


def test_what_is_no_text() -> None:
    worker = Worker()
    worker.file.write(0, b"\xff\xfe")
    with pytest.raises(OSError, match="no text in UTF-8"):
        worker.file.sync()
    with pytest.raises(OSError, match="has at most"):
        worker.file.write(0, b"x" * 10_000_000)
    assert worker.texts == []
