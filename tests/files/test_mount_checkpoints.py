"""Checkpoints that programs of a shell write through a mount."""

import contextlib
import errno
import mmap
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from files.jobs import JobAtWork
from files.mounts import MARKS, Mounted, mounted, run
from files.outcomes import code_of, wait_until

from tensorwire.files.filesystem import TensorwireFileSystem
from tensorwire.files.reader import JobReader
from tensorwire.files.tree import Tree

pytestmark = [*MARKS, pytest.mark.slow]
LENT = 40 << 20
JOB = {"TENSORWIRE_CHECKPOINT_MEMORY": str(LENT)}


def others_see(address: str) -> dict[str, bytes]:
    """The checkpoints, as another program reads them."""
    with JobReader(address) as reader, contextlib.closing(Tree(reader)) as tree:
        found = {}
        for entry in tree.entries("checkpoints"):
            inner = tree.entries(entry.path) if entry.is_folder else [entry]
            for each in inner:
                with tree.open(each.path) as content:
                    found[each.path.removeprefix("checkpoints/")] = content.read()
        return found


@pytest.fixture
def cleared(job: JobAtWork) -> Iterator[None]:
    """Removes what the test leaves."""
    yield
    files = TensorwireFileSystem(job.address, use_listings_cache=False)
    for path in files.ls("checkpoints", detail=False):
        files.rm(path, recursive=True)
    files.close()


@pytest.fixture
def saved(made: Mounted, cleared: None) -> Path:
    return made.path / "checkpoints"


def refused(command: str) -> str:
    done = subprocess.run(["sh", "-c", command], check=False, capture_output=True, text=True)
    assert done.returncode != 0
    return done.stderr


def test_tools_write_checkpoints(job: JobAtWork, saved: Path, tmp_path: Path) -> None:
    one, large = tmp_path / "one", tmp_path / "large"
    one.write_bytes(os.urandom(3 << 20))
    large.write_bytes(os.urandom(35 << 20))
    several = tmp_path / "several"
    several.mkdir()
    contents = {name: os.urandom(5000) for name in ("a", "b", "c")}
    for name, data in contents.items():
        (several / name).write_bytes(data)
    # A file is there when it is closed, as it was, and another one takes its place.
    run("cp", str(one), str(saved / "one"))
    assert others_see(job.address) == {"one": one.read_bytes()}
    run("sh", "-c", f"cat {several}/a > {saved}/one")
    assert others_see(job.address) == {"one": contents["a"]}
    run("dd", f"if={one}", f"of={saved}/two", "bs=4099", "conv=fsync")
    assert (saved / "two").read_bytes() == one.read_bytes()
    run("sh", "-c", f": > {saved}/empty")
    wait_until(lambda: others_see(job.address).get("empty") == b"")
    run("cmp", str(one), str(saved / "two"))
    run("rm", str(saved / "one"), str(saved / "two"), str(saved / "empty"))
    assert others_see(job.address) == {}
    # Several files are there when the folder is synced, and removed together.
    run("cp", "-r", str(several), str(saved / "several"))
    assert sorted(os.listdir(saved / "several")) == ["a", "b", "c"]
    assert os.stat(saved / "several/a").st_size == 5000
    assert code_of((saved / "several/a").read_bytes) == errno.EBUSY
    assert others_see(job.address) == {}
    run("mv", str(saved / "several/c"), str(saved / "several/d"))
    run("sync", str(saved / "several"))
    names = {f"several/{name}" for name in ("a", "b", "d")}
    assert others_see(job.address).keys() == names
    assert (saved / "several/d").read_bytes() == contents["c"]
    assert "Operation not permitted" in refused(f"rm -r {saved}/several")
    assert "Operation not permitted" in refused(f"cp {one} {saved}/several/e")
    assert others_see(job.address).keys() == names
    run("rmdir", str(saved / "several"))
    assert others_see(job.address) == {}
    assert os.listdir(saved) == []
    # With `.metadata` it is complete, as torch.distributed.checkpoint leaves it.
    (saved / "saved").mkdir()
    (saved / "saved/__0_0.distcp").write_bytes(contents["a"])
    (saved / "saved/.metadata.tmp").write_bytes(contents["b"])
    os.rename(saved / "saved/.metadata.tmp", saved / "saved/.metadata")
    assert others_see(job.address).keys() == {"saved/.metadata", "saved/__0_0.distcp"}
    # A full disk: what does not fit is told, nothing of it stays, and what is there does.
    run("cp", str(one), str(saved / "kept"))
    run("cp", str(large), str(saved / "large"))
    assert "No space left on device" in refused(f"cp {one} {saved}/more")
    assert "No space left on device" in refused(f"cp {large} {saved}/more")
    before = others_see(job.address)
    assert before["kept"] == one.read_bytes()
    assert "more" not in before
    (saved / "wide").mkdir()
    (saved / "wide/a").write_bytes(b"a")
    assert "No space left on device" in refused(f"cp {one} {saved}/wide/b")
    late = code_of(lambda: (saved / "wide/c").write_bytes(b"c"))
    assert late in (errno.ENOENT, errno.ESTALE)  # all of it is gone
    assert "wide" not in os.listdir(saved)
    run("rm", str(saved / "large"))
    run("cp", str(one), str(saved / "more"))  # there is room again
    assert others_see(job.address)["more"] == one.read_bytes()


def test_what_a_checkpoint_of_a_mount_refuses(job: JobAtWork, made: Mounted, saved: Path) -> None:
    (saved / "one").write_bytes(b"one")
    (saved / "open").mkdir()
    (saved / "open/a").write_bytes(b"a")
    for code, action in (
        (errno.EROFS, lambda: os.mkdir(made.path / "params/x")),
        (errno.EROFS, lambda: open(made.path / "params/x", "w")),
        (errno.EROFS, lambda: os.rmdir(made.path / "params")),
        (errno.EPERM, lambda: os.mkdir(saved / "open/deeper")),
        (errno.ENAMETOOLONG, lambda: open(saved / ("n" * 256), "w")),
        (errno.EEXIST, lambda: os.mkdir(saved / "open")),
        (errno.EEXIST, lambda: os.mkdir(saved / "one")),
        (errno.ENOTDIR, lambda: open(saved / "one/x", "w")),
        (errno.EXDEV, lambda: os.rename(saved / "one", saved / "two")),
        (errno.EXDEV, lambda: os.rename(saved / "open/a", saved / "two")),
        (errno.EROFS, lambda: os.rename(saved / "one", made.path / "params/two.npy")),
        (errno.ESPIPE, lambda: open(saved / "one", "ab")),
        (errno.ESPIPE, lambda: open(saved / "one", "r+b")),
        (errno.ESPIPE, lambda: os.truncate(saved / "one", 1)),
        (errno.EISDIR, lambda: open(saved / "open", "w")),
        (errno.ENOENT, lambda: os.unlink(saved / "two")),
        (errno.ENOENT, lambda: os.rmdir(saved / "two")),
        (errno.EROFS, lambda: os.symlink("x", saved / "link")),
        (errno.EROFS, lambda: os.link(saved / "one", saved / "link")),
        (errno.EROFS, lambda: os.chmod(saved / "one", 0o777)),
    ):  # fmt: skip
        assert code_of(action) == code, action.__code__.co_firstlineno
    with open(saved / "writes", "wb", buffering=0) as file:
        file.write(b"12345")
        assert os.fstat(file.fileno()).st_size == 5
        assert code_of(lambda: open(saved / "writes", "wb")) == errno.EBUSY
        assert code_of((saved / "writes").read_bytes) == errno.EBUSY
        os.close(os.dup(file.fileno()))  # whole with the first close
        assert code_of(lambda: os.write(file.fileno(), b"x")) == errno.EPERM
    (saved / "empty").mkdir()
    descriptor = os.open(saved / "empty", os.O_RDONLY)
    assert code_of(lambda: os.fsync(descriptor)) == errno.EINVAL
    os.close(descriptor)
    with open(saved / "gone", "wb", buffering=0) as file:
        file.write(b"12345")
        os.unlink(saved / "gone")
    found = others_see(job.address)
    assert found == {"one": b"one", "writes": b"12345"}


def test_a_file_that_is_not_written_from_start_to_end(
    job: JobAtWork, saved: Path, tmp_path: Path
) -> None:
    """A file that lacks a part is no checkpoint, and the old one stays: sparse, or dd's seek."""
    (saved / "one").write_bytes(b"whole")
    with open(saved / "one", "wb", buffering=0) as file:
        file.write(b"12345")
        assert code_of(lambda: os.pwrite(file.fileno(), b"x", 4096)) == errno.ESPIPE
        assert code_of(lambda: file.write(b"6789")) == errno.ESPIPE
    assert others_see(job.address) == {"one": b"whole"}
    with open(saved / "one", "wb", buffering=0) as file:
        file.write(b"12345")
        assert code_of(lambda: os.truncate(file.fileno(), 2)) == errno.EINVAL
    assert others_see(job.address) == {"one": b"whole"}
    (tmp_path / "sparse").write_bytes(b"1")
    os.truncate(tmp_path / "sparse", 1 << 20)
    assert refused(f"cp --sparse=always {tmp_path}/sparse {saved}/sparse")
    assert others_see(job.address) == {"one": b"whole"}


def test_a_file_that_is_read_while_it_is_written_anew(made: Mounted, saved: Path) -> None:
    """A program that has it open, or mapped, keeps its content: it is another file."""
    old, new = b"1" * 300_000, b"2" * 200_000
    path = saved / "one"
    path.write_bytes(old)
    with open(path, "rb", buffering=0) as reading:
        mapped = mmap.mmap(reading.fileno(), len(old), prot=mmap.PROT_READ)
        mapped[:1]
        with open(path, "wb", buffering=0) as writing:
            assert reading.readall() == old
            for at in range(0, len(new), 1000):
                writing.write(new[at : at + 1000])
                assert os.pread(reading.fileno(), 1000, 250_000) == old[:1000]
            assert mapped[:] == old
            assert os.fstat(reading.fileno()).st_size == len(old)
            assert os.fstat(writing.fileno()).st_size == len(new)
        assert (os.pread(reading.fileno(), len(old), 0), mapped[:]) == (old, old)
        assert path.read_bytes() == new
        mapped.close()
    # A parameter that is written while the job is paused.
    (made.path / "control/pause").write_text("1")
    path = made.path / "params/a.npy"
    present = path.read_bytes()
    with open(path, "rb", buffering=0) as reading, open(path, "wb", buffering=0) as writing:
        assert reading.readall() == present
        assert path.read_bytes() == present
        writing.write(present)
    (made.path / "control/commit").write_text("discard")
    (made.path / "control/pause").write_text("0")


def test_a_mount_that_ends_while_a_file_is_written(
    job: JobAtWork, made: Mounted, saved: Path
) -> None:
    """A file that was not closed is not whole, and the old one stays."""
    (saved / "one").write_bytes(b"whole")
    with contextlib.suppress(OSError), open(saved / "one", "wb", buffering=0) as file:
        file.write(b"half")
        made.process.terminate()
        assert made.process.wait(30) == 0
        assert code_of(lambda: file.write(b"rest")) == errno.ENOTCONN
    assert others_see(job.address) == {"one": b"whole"}


def test_a_mount_whose_server_is_replaced(folder: Path) -> None:
    """A folder of which the first server had a part is no checkpoint, and is not shown either."""
    job = JobAtWork(folder, "--workers", "1", "--on-death=restart", PAUSE="0.01")
    try:
        with mounted(folder, job.address) as made:
            at = made.path / "checkpoints"
            for name in ("written", "synced", "removed"):
                (at / name).mkdir()
                (at / name / "a").write_bytes(b"a")
            os.kill(job.servers[0].pid, signal.SIGKILL)
            with JobReader(job.address) as reader:  # when there is one again

                def has_a_store() -> bool:
                    with contextlib.suppress(LookupError):
                        return reader.store().version() > 0
                    return False

                wait_until(has_a_store)
            codes: list[int | None] = []

            def is_back() -> bool:
                codes.append(code_of(lambda: (at / "written/b").write_bytes(b"b")))
                return codes[-1] != errno.ENOTCONN

            wait_until(is_back)
            assert codes[-1] in (errno.ENOENT, errno.ESTALE)  # Linux looks again behind ESTALE
            descriptor = os.open(at / "synced", os.O_RDONLY)
            assert code_of(lambda: os.fsync(descriptor)) == errno.ESTALE
            os.close(descriptor)
            assert code_of(lambda: os.rmdir(at / "removed")) == errno.ENOENT
            assert os.listdir(at) == []
    finally:
        assert job.end() == 0


WRITER = """
import os, sys
for turn in range(10_000):
    with open(f"{sys.argv[1]}/{turn % 3}", "wb") as file:
        file.write(bytes([turn % 251]) * 3_000_000)
"""


def kill_while_used(folder: Path, address: str, after_s: float) -> None:
    """A mount that one program writes by and another reads from is killed."""
    made = Mounted(folder, address)
    at = made.path / "checkpoints"
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(at)], stderr=subprocess.DEVNULL)
    reads = f"while :; do cat {made.path}/params/a.npy {made.path}/status/job.json; done"
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    reader = subprocess.Popen(["sh", "-c", reads], **quiet)  # type: ignore[call-overload]
    try:
        wait_until(lambda: os.listdir(at) != [])
        time.sleep(after_s)
        made.process.kill()
        made.process.wait(30)
        assert code_of(lambda: os.listdir(made.path)) == errno.ENOTCONN
        assert writer.wait(30) != 0
    finally:
        for each in (writer, reader):
            each.kill()
            each.wait(30)
        made.end()


def test_a_mount_that_is_killed_at_random_instants(
    job: JobAtWork, tmp_path: Path, cleared: None
) -> None:
    """Training goes on, and a checkpoint that was written through it is whole or not there."""
    rng = random.Random(18)

    def goes_on(reader: JobReader) -> None:
        version = reader.store().version()
        wait_until(lambda: reader.store().version() > version + 3)

    with JobReader(job.address) as reader:
        for _ in range(6):
            kill_while_used(tmp_path, job.address, rng.random())
            goes_on(reader)
            for name, data in others_see(job.address).items():
                assert (len(data), len(set(data))) == (3_000_000, 1), name
