"""Writers of checkpoints whose server is late or goes: nothing is half there, and nothing stays."""

import errno
import os
import signal
import threading
from pathlib import Path

import pytest
from files.jobs import training
from files.outcomes import code_of, wait_until
from files.shelves import Shelf, Writer

from tensorwire import Node
from tensorwire.files.filesystem import TensorwireFileSystem

pytestmark = pytest.mark.timeout(240)


def connect_again(shelf: Shelf, writer: Writer) -> None:
    """Connects like a process whose connection was lost: to the same job, by another Node."""
    writer.node.close()
    wait_until(lambda: not shelf.shelf._pending)
    writer.node = Node(f"{writer.node.name} again")
    writer.peer = writer.node.connect(shelf.node.address)


def test_a_file_that_is_renamed_into_itself(shelf: Shelf) -> None:
    writer = shelf.writer()
    writing = writer.write("c/a", b"1", finish=False)
    assert code_of(lambda: writer.desk.rename("checkpoints/c/a", "checkpoints/c/b")) == errno.EBUSY
    writing.sync()
    writer.desk.rename("checkpoints/c/a", "checkpoints/c/a")
    writer.write("c/.metadata", b"m")
    assert shelf.read("c/a") == b"1"


def test_a_writer_that_is_connected_again(shelf: Shelf) -> None:
    """Its earlier part is gone, and the rest of it is no checkpoint."""
    writer = shelf.writer()
    writer.write("c/a", b"1")
    writer.desk.make_folder("checkpoints/d")
    writer.write("e/a", b"1")
    writer.write("f/.metadata", b"m")
    writer.write("g/a", b"1")
    connect_again(shelf, writer)
    assert code_of(lambda: writer.write("c/b", b"2")) == errno.ESTALE
    assert code_of(lambda: writer.desk.complete("checkpoints/d")) == errno.ESTALE
    assert code_of(lambda: writer.desk.make_folder("checkpoints/e", anew=False)) == errno.ESTALE
    writer.write("f/.metadata", b"n")  # the one before was complete
    writer.desk.make_folder("checkpoints/g")  # another one is begun
    writer.write("g/.metadata", b"m")
    writer.write("c/b", b"2")
    writer.write("c/.metadata", b"m")  # as is this one, after the error
    names = {"f/.metadata", "g/.metadata", "c/b", "c/.metadata"}
    assert shelf.checkpoints().keys() == names


def test_a_checkpoint_at_a_server_that_was_replaced(shelf: Shelf) -> None:
    """Files of another process may be lost with the former server, and no writer here knows."""
    shelf.shelf._replaces = True
    writer = shelf.writer()
    for name in ("b", ".metadata"):
        assert code_of(lambda name=name: writer.write(f"c/{name}", b"2")) == errno.ESTALE
    assert not shelf.checkpoints()
    writer.write("whole", b"1")  # of one file
    writer.desk.make_folder("checkpoints/c")
    writer.write("c/b", b"2")
    writer.write("c/.metadata", b"m")
    assert shelf.checkpoints().keys() == {"whole", "c/b", "c/.metadata"}


def test_what_came_too_late_is_given_up(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stopped server that goes on has nothing of what its writers were told has failed."""
    making, writing = shelf.writer("one"), shelf.writer("two")
    other = shelf.writer("three")
    part = writing.write("part", b"1" * 1000, finish=False)
    making.write("here", b"1")
    monkeypatch.setattr("tensorwire.files.checkpoints._ANSWER_S", 0.2)
    goes_on = threading.Event()
    look = shelf.shelf._look

    def stop() -> None:
        goes_on.wait(60)
        look()

    monkeypatch.setattr(shelf.shelf, "_look", stop)
    assert code_of(lambda: making.write("made", b"1")) == errno.ETIMEDOUT
    assert code_of(part.sync) == errno.ETIMEDOUT
    monkeypatch.setattr("tensorwire.files.checkpoints._ANSWER_S", 30)
    goes_on.set()
    wait_until(lambda: not making.desk._settling and not writing.desk._settling)
    assert shelf.checkpoints().keys() == {"here"}
    assert shelf.used() == 1
    other.write("made", b"2")
    other.write("part", b"2")


@pytest.mark.slow
def test_a_server_that_is_replaced_between_two_files(folder: Path, tmp_path: Path) -> None:
    """A checkpoint that lacks the first server's part is never seen."""
    for name in ("a", "b"):
        (tmp_path / name).write_bytes(b"1")
    with training(folder, "--workers", "1", "--on-death=restart", PAUSE="0.01") as job:
        fs = TensorwireFileSystem(address=job.address)
        fs.makedirs("checkpoints/c")
        fs.pipe("checkpoints/c/a", b"1")
        fs.put_file(str(tmp_path / "a"), "checkpoints/d/a")
        before = job.servers[0].pid
        os.kill(before, signal.SIGKILL)
        first: list[int | None] = []

        def is_back() -> bool:
            first.append(code_of(lambda: fs.pipe("checkpoints/c/b", b"2")))
            return first[-1] not in (errno.ENOTCONN, errno.ETIMEDOUT)

        wait_until(is_back)
        assert first[-1] == errno.ESTALE
        put = code_of(lambda: fs.put_file(str(tmp_path / "b"), "checkpoints/d/b"))
        assert put == errno.ESTALE
        assert fs.ls("checkpoints", detail=False) == []
        # Of another process some file may be lost: whoever begins anew says so.
        assert code_of(lambda: fs.pipe("checkpoints/c/b", b"2")) == errno.ESTALE
        fs.makedirs("checkpoints/c")
        fs.pipe({"checkpoints/c/b": b"2", "checkpoints/c/.metadata": b"m"})
        assert fs.cat("checkpoints/c/b") == b"2"
