"""Memory that a job lends for checkpoints: processes write them, die, and load them."""

import errno
import io
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from files.jobs import training
from files.outcomes import code_of
from files.shelves import MOST, Shelf, Writer

from tensorwire import Node
from tensorwire.files.filesystem import TensorwireFileSystem, WritableFile, WritableStream
from tensorwire.files.tree_items import Folder
from tensorwire.memory import RemoteMailbox
from tensorwire.parameters.checkpoint_files import (
    ASKS,
    BELL,
    LEASE_BYTES,
    PART_BYTES,
    lease_name,
)
from tensorwire.parameters.server.lending.checkpoints import MEMORY, open_shelf

pytestmark = pytest.mark.timeout(240)


@pytest.mark.parametrize("transports", [None, ("tcp",)], ids=["shm", "tcp"])
def test_a_file_is_there_when_it_is_whole(shelf: Shelf, transports: tuple[str] | None) -> None:
    writer = shelf.writer(transports=transports)
    data = np.random.default_rng(0).bytes(PART_BYTES + 12345)
    writing = writer.write("model.pt", data[:100], finish=False)
    assert shelf.tree.names() == []
    for at in range(100, len(data), 1 << 20):
        writing.write(at, data[at : at + (1 << 20)])
    writing.sync()
    writing.sync()
    assert shelf.tree.names() == ["model.pt"]
    assert shelf.read("model.pt") == data
    entry = shelf.tree.child("model.pt").entry()
    assert (entry.size_bytes, entry.writable) == (len(data), False)
    writer.node.close()
    time.sleep(0.6)
    assert shelf.read("model.pt") == data  # it is the job's
    other = shelf.writer("two")
    other.write("empty", b"")
    assert shelf.read("empty") == b""
    other.desk.remove("checkpoints/model.pt")
    assert shelf.tree.names() == ["empty"]
    assert code_of(lambda: other.desk.remove("checkpoints/model.pt")) == errno.ENOENT


def test_a_checkpoint_is_complete_with_its_metadata(shelf: Shelf) -> None:
    one, two = shelf.writer("one"), shelf.writer("two")
    for each in (one, two):
        each.desk.make_folder("checkpoints/c")
    one.write("c/a", b"1")
    late = two.write("c/b", b"2", finish=False)
    one.write("c/.metadata.tmp", b"m")
    assert shelf.tree.names() == []

    def rename() -> None:
        one.desk.rename("checkpoints/c/.metadata.tmp", "checkpoints/c/.metadata")

    assert code_of(rename) == errno.EBUSY  # b is still written
    late.sync()
    assert shelf.tree.names() == []
    one.write("c/.metadata", b"m2")
    folder = shelf.tree.child("c")
    assert isinstance(folder, Folder)
    assert folder.names() == [".metadata", ".metadata.tmp", "a", "b"]
    assert [shelf.read(f"c/{name}") for name in ("a", "b", ".metadata")] == [b"1", b"2", b"m2"]
    # Another one takes its place at once, when it is complete.
    one.desk.make_folder("checkpoints/c")
    one.write("c/a", b"10")
    assert shelf.read("c/a") == b"1"
    assert code_of(lambda: two.desk.remove("checkpoints/c/a")) == errno.EBUSY
    assert code_of(lambda: one.desk.remove("checkpoints/c/a")) is None  # which is written
    assert code_of(lambda: two.desk.remove("checkpoints/c/b")) == errno.EPERM
    one.write("c/a", b"11")
    one.write("c/.metadata", b"m3")
    assert folder.names() != ["a"]
    again = shelf.tree.child("c")
    assert isinstance(again, Folder)
    assert again.names() == [".metadata", "a"]
    assert shelf.read("c/a") == b"11"


def test_a_checkpoint_is_complete_when_its_writer_says_so(shelf: Shelf) -> None:
    one, two = shelf.writer("one"), shelf.writer("two")

    def complete(who: Writer, name: str = "c") -> int | None:
        return code_of(lambda: who.desk.complete(f"checkpoints/{name}"))

    assert complete(one) == errno.ENOENT  # nobody writes it
    one.desk.make_folder("checkpoints/c")
    assert complete(one) == errno.EINVAL  # it has no files
    one.write("c/a", b"1")
    late = one.write("c/b", b"2", finish=False)
    assert complete(one) == errno.EBUSY  # b is still written
    late.sync()
    assert complete(two) == errno.ENOENT  # that does not write it
    assert complete(one, "c/a") == errno.EPERM
    assert shelf.tree.names() == []
    assert complete(one) is None
    folder = shelf.tree.child("c")
    assert isinstance(folder, Folder)
    assert folder.names() == ["a", "b"]
    assert complete(one) == errno.ENOENT  # it is not written any more
    one.write("single", b"x", finish=False)
    assert complete(one, "single") == errno.ENOENT
    two.desk.make_folder("checkpoints/d")
    two.write("d/a", b"1").abandon()
    two.write("d/b", b"1", finish=False).abandon()
    assert complete(two, "d") == errno.ESTALE


def test_what_is_whole_takes_no_more(shelf: Shelf) -> None:
    writing = shelf.writer().write("a", b"12")
    assert code_of(lambda: writing.write(2, b"3")) == errno.EPERM
    assert shelf.read("a") == b"12"


def test_who_is_gone_takes_the_unfinished_along(shelf: Shelf) -> None:
    one, two = shelf.writer("one"), shelf.writer("two")
    for each in (one, two):
        each.desk.make_folder("checkpoints/c")
    one.write("c/a", bytes(PART_BYTES))
    two.write("c/b", bytes(PART_BYTES))
    half = two.write("c/d", bytes(100), finish=False)
    one.node.close()
    deadline = time.monotonic() + 10
    while code_of(lambda: two.write("c/e", b"")) != errno.ESTALE:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert code_of(half.sync) == errno.ESTALE
    assert shelf.tree.names() == []
    # All memory came back, and who is left may begin anew.
    two.desk.make_folder("checkpoints/c")
    two.write("c/a", bytes(MOST - 1))
    two.write("c/.metadata", b"m")
    assert len(shelf.read("c/a")) == MOST - 1


def test_limits(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = shelf.writer()
    writer.write("a", bytes(MOST - 10))
    assert code_of(lambda: writer.write("b", bytes(11))) == errno.ENOSPC
    writer.write("b", bytes(10))
    writer.desk.remove("checkpoints/a")

    def no_room(size_bytes: int) -> None:
        raise MemoryError(f"{size_bytes} bytes are wanted")

    monkeypatch.setattr("tensorwire.parameters.server.lending.checkpoints.check_room", no_room)
    assert code_of(lambda: writer.write("a", bytes(11))) == errno.ENOMEM
    assert shelf.tree.names() == ["b"]
    monkeypatch.undo()
    monkeypatch.setattr(shelf.shelf, "_most_parts", 1)
    assert code_of(lambda: writer.write("a", bytes(11))) == errno.ENOSPC
    assert shelf.tree.names() == ["b"]
    monkeypatch.undo()
    monkeypatch.setattr("tensorwire.parameters.server.lending.checkpoints.INDEX_BYTES", 60)
    assert code_of(lambda: writer.write("n" * 100, bytes(10))) == errno.ENOSPC
    writer.desk.make_folder("checkpoints/c")
    writer.write("c/" + "n" * 100, bytes(10))
    writer.write("c/tmp", b"m")
    assert code_of(
        lambda: writer.desk.rename("checkpoints/c/tmp", "checkpoints/c/.metadata")
    ) == errno.ENOSPC  # fmt: skip
    assert shelf.tree.names() == ["b"]
    assert shelf.used() == 10  # nobody else's memory is kept


def test_what_is_refused(shelf: Shelf) -> None:
    writer, other = shelf.writer("one"), shelf.writer("two")
    writer.write("file", b"1")
    writer.desk.make_folder("checkpoints/c")
    writer.write("c/a", b"1")
    desk = writer.desk
    refused: list[tuple[int, Callable[[], object]]] = [
        (errno.EPERM, lambda: writer.write("c/d/e", b"")),
        (errno.EINVAL, lambda: writer.write("c/..", b"")),
        (errno.EINVAL, lambda: writer.write("c/a\nb", b"")),
        (errno.EINVAL, lambda: desk.make_folder("checkpoints/")),
        (errno.ENAMETOOLONG, lambda: writer.write("é" * 200, b"")),
        (errno.ENAMETOOLONG, lambda: writer.write("x" * 5000, b"")),
        (errno.ENOTDIR, lambda: desk.make_folder("checkpoints/file")),
        (errno.ENOTDIR, lambda: writer.write("file/a", b"")),
        (errno.ENOENT, lambda: desk.rename("checkpoints/c/b", "checkpoints/c/d")),
        (errno.ENOENT, lambda: other.desk.rename("checkpoints/c/a", "checkpoints/c/d")),
        (errno.EXDEV, lambda: desk.rename("checkpoints/c/a", "checkpoints/d/a")),
        (errno.EOPNOTSUPP, lambda: desk.rename("checkpoints/c/a", "checkpoints/c/__0.metadata")),
        (errno.ENOENT, lambda: desk.remove("checkpoints/none")),
        (errno.ENOENT, lambda: other.desk.remove("checkpoints/c")),
        (errno.EINVAL, lambda: desk.ask("x", do="dance")),
        (errno.EINVAL, lambda: desk.ask("x", do="make")),
        (errno.ESTALE, lambda: other.desk.ask("x", do="part", number=2, size=1)),
        (errno.EINVAL, lambda: desk.ask("x", do="part", number="many", size=1)),
        (errno.ESPIPE, lambda: writer.write("b", b"1", finish=False).write(0, b"2")),
        (errno.EINVAL, lambda: writer.write("b", b"1", finish=False).truncate(9)),
    ]
    for number, (code, attempt) in enumerate(refused):
        assert (number, code_of(attempt)) == (number, code)
    number = int(desk.ask("x", do="make", path="d")["number"])
    for size in (0, -1, PART_BYTES + 1, 1 << 70):
        assert code_of(
            lambda size=size: desk.ask("x", do="part", number=number, size=size)
        ) == errno.EINVAL  # fmt: skip
    writer.write("c/.metadata", b"")
    assert code_of(lambda: writer.write("c", b"")) == errno.EISDIR


def test_what_could_not_be_written_is_never_complete(shelf: Shelf) -> None:
    """Not when there is room again, either: some bytes after the failed ones are elsewhere."""
    one, two = shelf.writer("one"), shelf.writer("two")
    one.write("before", bytes(MOST - PART_BYTES))
    data = np.arange(2 * PART_BYTES + 10, dtype=np.uint8).tobytes()
    file = io.BufferedWriter(WritableFile(two.desk.write("checkpoints/after")), 1 << 16)
    assert code_of(lambda: file.write(data)) == errno.ENOSPC
    one.write("small", bytes(PART_BYTES))  # what had been written took no room any more
    for name in ("before", "small"):
        one.desk.remove(f"checkpoints/{name}")
    assert code_of(file.close) == errno.ENOSPC
    assert shelf.tree.names() == []
    two.write("after", data)
    assert shelf.read("after") == data


def test_who_cannot_write_a_part_takes_the_checkpoint_along(shelf: Shelf) -> None:
    one, two = shelf.writer("one"), shelf.writer("two")
    for each in (one, two):
        each.desk.make_folder("checkpoints/c")
    one.write("c/a", bytes(PART_BYTES))
    assert code_of(lambda: two.write("c/b", bytes(MOST))) == errno.ENOSPC
    assert code_of(lambda: one.write("c/.metadata", b"")) == errno.ESTALE
    one.write("whole", bytes(MOST))
    one.desk.remove("checkpoints/whole")
    one.desk.make_folder("checkpoints/c")
    one.write("c/a", b"1")
    one.write("c/.metadata", b"")
    assert shelf.read("c/a") == b"1"


def test_who_fails_while_writing_leaves_nothing(shelf: Shelf) -> None:
    """By an error of its own, as of a pickle: the checkpoint of the others is not to be, either."""
    one, two = shelf.writer("one"), shelf.writer("two")
    one.write("single", b"before")

    def write(path: str, remove: bool) -> None:
        with WritableStream(WritableFile(two.desk.write(f"checkpoints/{path}")), 10) as stream:
            stream.write(bytes(PART_BYTES + 1))
            if remove:  # as torch does
                two.desk.remove(f"checkpoints/{path}")
            raise ZeroDivisionError

    def fail(path: str, remove: bool) -> None:
        with pytest.raises(ZeroDivisionError):
            write(path, remove)

    fail("single", remove=False)
    assert shelf.read("single") == b"before"
    assert shelf.used() == 6
    for remove in (True, False):
        for each in (one, two):
            each.desk.make_folder("checkpoints/c")
        one.write("c/a", bytes(100))
        two.write("c/b", bytes(100))
        fail("c/d", remove)
        assert shelf.used() == 6
        assert code_of(lambda: one.write("c/.metadata", b"")) == errno.ESTALE
    for each in (one, two):
        each.desk.make_folder("checkpoints/c")
    two.write("c/d", b"4")
    one.write("c/.metadata", b"")
    assert shelf.read("c/d") == b"4"


def test_metadata_that_come_too_early(shelf: Shelf) -> None:
    """The metadata take along files that are still written: no memory is kept for nothing."""
    writer = shelf.writer()
    half = writer.write("c/a", bytes(100), finish=False)
    assert code_of(lambda: writer.write("c/.metadata", b"m")) == errno.EBUSY
    assert code_of(half.sync) == errno.ESTALE
    assert shelf.used() == 0


def test_memory_that_is_no_number(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with Node("server-0") as node, Node("door-0") as door:
        for text in ("2G", "-1", ""):
            monkeypatch.setenv(MEMORY, text)
            assert open_shelf(node, door, replaces=False) is None
            assert f"{MEMORY} is {text!r}, and not a whole" in capfd.readouterr().err


def test_two_programs_do_not_mix_one_checkpoint(shelf: Shelf) -> None:
    one, two = shelf.writer("one"), shelf.writer("two")
    for each in (one, two):
        each.desk.make_folder("checkpoints/c")
    one.write("c/__0_0.distcp", b"1")
    assert code_of(lambda: two.write("c/__0_0.distcp", b"2")) == errno.EBUSY
    assert code_of(lambda: two.write("c", b"2")) == errno.EBUSY
    two.node.close()  # who has written nothing of it
    three = shelf.writer("three")
    three.write("d", b"3", finish=False)  # it is noticed by then
    assert code_of(lambda: three.write("d/a", b"3")) == errno.EBUSY
    one.write("c/.metadata", b"1")
    assert shelf.read("c/__0_0.distcp") == b"1"


def test_no_file_has_the_number_of_one_of_a_predecessor(shelf: Shelf) -> None:
    """By it a mount and caches know whether they have the file."""
    shelf.writer().write("a", b"1")
    other = Shelf()
    try:
        other.writer().write("a", b"2")
        assert other.checkpoints()["a"].number != shelf.checkpoints()["a"].number
    finally:
        other.close()


def test_an_answer_that_is_late(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer that got no answer in time, from a stopped server, can write when it goes on."""
    writer = shelf.writer()
    writer.write("a", b"1")
    monkeypatch.setattr("tensorwire.files.checkpoints._ANSWER_S", 0.2)
    blocked, goes_on = threading.Event(), threading.Event()
    look = shelf.shelf._look

    def stop() -> None:
        blocked.set()
        goes_on.wait(60)
        look()

    monkeypatch.setattr(shelf.shelf, "_look", stop)
    codes = [code_of(lambda: writer.write("b", b"1")) for _ in range(2)]
    assert codes == [errno.ETIMEDOUT] * 2
    assert blocked.is_set()
    goes_on.set()
    monkeypatch.setattr("tensorwire.files.checkpoints._ANSWER_S", 30)
    writer.write("b", b"2")
    assert shelf.read("b") == b"2"


GARBAGE = (
    b"\xff" * 4096,
    b"[" * 4096,
    b"null",
    b'{"do":',
    b"{}",
    b'{"do": "part", "number": Infinity}',
)


def test_garbage_hurts_nobody(shelf: Shelf) -> None:
    hostile, writer = shelf.writer("hostile"), shelf.writer("one")
    hostile.peer.allocate(8, lease_name("hostile"))  # too small to be one
    stranger = shelf.writer("stranger")
    lease = stranger.peer.allocate(LEASE_BYTES, lease_name("stranger"))
    box, bell = RemoteMailbox(lease[ASKS]), stranger.peer.region(BELL).word(0)
    for number, text in enumerate(GARBAGE, 1):
        box.send(np.frombuffer(text, np.uint8), number).wait(5)
        bell.fetch_add(1)
        writer.write(f"n{number}", b"x")
    for value in (1 << 62, (1 << 64) - 2, (1 << 64) - 1):  # the last that a word can have
        bell.set(value).wait(5)
        time.sleep(0.3)  # until that was seen
        writer.write(f"at {value}", b"x")
        assert shelf.node.region(BELL).word(0).value < 100  # it is begun anew: nobody waits for it
    writer.write("last", b"x")
    assert len(shelf.tree.names()) == len(GARBAGE) + 4
    assert shelf.read("last") == b"x"


# ---- with jobs

PROGRAM = Path(__file__).with_name("checkpoint_program.py")
ONE_THREAD = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}


class Programs:
    """Runs PROGRAM, in as many processes as are wanted."""

    def __init__(self, folder: Path, address: str) -> None:
        self._folder, self._address, self._count = folder, address, 0

    def run(self, verb: str, world: int, seed: int) -> list[int]:
        self._count += 1
        meeting = self._folder / f"meeting-{self._count}"
        rest = [str(world), str(meeting), str(seed)]
        command = [sys.executable, str(PROGRAM), verb, self._address]
        processes = [
            subprocess.Popen([*command, str(rank), *rest], env={**os.environ, **ONE_THREAD})
            for rank in range(world)
        ]
        try:
            return [each.wait(100) for each in processes]
        finally:
            for each in processes:
                each.kill()
                each.wait()


@pytest.mark.slow
def test_sharded_checkpoints_of_torch(folder: Path) -> None:
    with training(folder, "--workers", "1", PAUSE="0.02") as job:
        programs = Programs(folder, f"tw://{job.address}/checkpoints/step")
        files = TensorwireFileSystem(job.address)
        assert programs.run("save", 2, 5) == [0, 0]
        assert files.ls("checkpoints", detail=False) == ["checkpoints/step"]
        assert programs.run("load", 1, 5) == [0]
        assert -signal.SIGKILL in programs.run("die", 2, 6)
        assert programs.run("load", 3, 5) == [0, 0, 0]  # nothing of the killed one is seen
        assert programs.run("save", 1, 7) == [0]  # takes its place
        assert programs.run("load", 2, 7) == [0, 0]
        files.rm("checkpoints/step", recursive=True)
        assert files.ls("checkpoints") == []
        assert not files.exists("checkpoints/step/.metadata")
        files.close()


@pytest.mark.slow
@pytest.mark.timeout(500)
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_savers_that_are_killed_at_random_instants(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is one checkpoint at any time, whole: the one of the last that came to its end."""
    savers, size = 12, 40 * (4 << 18)
    # What is kept of a few of them leaves no room for the next ones.
    monkeypatch.setenv("TENSORWIRE_CHECKPOINT_MEMORY", str(3 * size))
    with training(folder, "--workers", "1", PAUSE="0.02") as job:
        files = TensorwireFileSystem(job.address, use_listings_cache=False)
        address = f"tw://{job.address}/checkpoints/step"
        killed, value = 0, -1.0
        with subprocess.Popen(
            [sys.executable, str(PROGRAM.with_name("killed_savers.py")), address, str(savers), "0"],
            env={**os.environ, **ONE_THREAD},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as program:
            assert program.stdin is not None
            assert program.stdout is not None
            for line in program.stdout:
                number, ended = map(int, line.split())
                killed += not ended
                found = {f"p{each}": torch.zeros(1 << 18) for each in range(40)}
                dcp.load(found, checkpoint_id=address, no_dist=True)
                (there,) = {float(each) for tensor in found.values() for each in tensor.unique()}
                # One that was killed may have completed its checkpoint before.
                assert there in ({number} if ended else {value, number})
                value = there
                program.stdin.write("\n")
                program.stdin.flush()
        assert program.returncode == 0
        assert killed > savers // 4
        names = files.ls("checkpoints/step", detail=False)
        assert {name.rpartition("/")[2] for name in names} == {".metadata", "__0_0.distcp"}
        files.pipe("checkpoints/rest", bytes(2 * size - (1 << 20)))
        files.close()


@pytest.mark.slow
def test_files_of_a_checkpoint(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENSORWIRE_CHECKPOINT_MEMORY", str(1 << 20))
    with training(folder, "--workers", "1", PAUSE="0.02") as job:
        files = TensorwireFileSystem(job.address)
        value = torch.arange(1000.0)
        with files.open("checkpoints/value.pt", "wb") as file:
            torch.save(value, file)
        with files.open("checkpoints/value.pt") as file:
            assert torch.equal(torch.load(file), value)
        (folder / "here").write_bytes(b"here")
        files.put_file(str(folder / "here"), "checkpoints/put")
        far = TensorwireFileSystem(
            job.servers[0].door, secret=job.servers[0].reading_secret, transports=["tcp"]
        )
        assert far.cat("checkpoints/put") == b"here"
        assert far.cat_file("checkpoints/put", 1, 3) == b"er"
        elsewhere = folder / "elsewhere"
        elsewhere.mkdir(mode=0o700)
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(elsewhere))
        assert code_of(lambda: far.pipe("checkpoints/x", b"1")) == errno.EACCES
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
        assert code_of(lambda: files.pipe("checkpoints/x", bytes(1 << 20))) == errno.ENOSPC
        assert code_of(lambda: files.cat("checkpoints/x")) == errno.ENOENT
        assert code_of(lambda: files.rm("checkpoints/x")) == errno.ENOENT  # nothing is left of it
        files.pipe("checkpoints/x", bytes(1000 << 10))
        files.rm("checkpoints/x")
        assert code_of(lambda: files.touch("checkpoints/t")) == errno.EROFS
        assert code_of(lambda: files.mv("checkpoints/put", "params/a.npy")) == errno.EROFS
        files.makedirs("checkpoints/c")
        files.pipe("checkpoints/c/.metadata", b"")
        assert files.isdir("checkpoints/c")
        assert code_of(lambda: files.mkdir("checkpoints/c")) == errno.EEXIST
        assert code_of(lambda: files.rm("checkpoints/c")) == errno.EISDIR
        files.rm("checkpoints/c", recursive=True)
        assert not files.exists("checkpoints/c")
        for each in (far, files):
            each.close()
