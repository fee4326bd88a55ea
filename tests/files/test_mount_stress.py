"""A mount that programs of several processes use while a job trains, and many mounts."""

import contextlib
import mmap
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from files.jobs import JobAtWork, training
from files.mounts import MARKS, Mounted, run
from files.outcomes import wait_until

from tensorwire._core import fuse as core_fuse
from tensorwire.errors import UnavailableError
from tensorwire.files.mount import JobMount
from tensorwire.files.reader import JobReader
from tensorwire.files.tree import Tree

safetensors = pytest.importorskip("safetensors")
pytestmark = [*MARKS, pytest.mark.slow]
JOB = {"ROWS": "5000"}

# Reads places of a parameter at random, by pread and by mapping, of one version each.
READER = """
import mmap, os, random, sys
import numpy as np
path, seed = sys.argv[1], int(sys.argv[2])
rng, versions = random.Random(seed), set()
for turn in range(40):
    file = os.open(path, os.O_RDONLY)
    size = os.fstat(file).st_size
    mapped = mmap.mmap(file, size, prot=mmap.PROT_READ) if turn % 2 else None
    found = set()
    for _ in range(50):
        at = 128 + 4 * rng.randrange((size - 128) // 4 - 1024)
        data = mapped[at : at + 4096] if mapped is not None else os.pread(file, 4096, at)
        assert len(data) == 4096
        found |= set(np.frombuffer(data, np.float32).tolist())
    assert len(found) == 1, found
    versions |= found
    os.close(file)
print(len(versions))
"""


def test_four_readers_while_it_trains(made: Mounted) -> None:
    path = str(made.path / "params/a.npy")
    command = [sys.executable, "-c", READER, path]
    readers = [
        subprocess.Popen([*command, str(seed)], stdout=subprocess.PIPE, text=True)
        for seed in range(4)
    ]
    told = [reader.communicate(timeout=120)[0] for reader in readers]
    assert [reader.returncode for reader in readers] == [0] * 4
    assert all(int(each) > 5 for each in told)  # it trained meanwhile


def test_many_mounts_leave_nothing(job: JobAtWork, tmp_path: Path) -> None:
    """200 in one process, with a file open and one mapped each; all of it comes back."""

    def counts() -> tuple[int, int, int]:
        return len(os.listdir("/proc/self/fd")), threading.active_count(), mounts()

    def mounts() -> int:
        with open("/proc/self/mountinfo") as told:
            return sum(str(tmp_path) in line for line in told)

    path = tmp_path / "mnt"
    path.mkdir()

    def mount_once() -> None:
        mount = JobMount(tree, path)
        assert len(os.listdir(path / "params")) == 3
        with open(path / "params/b.npy", "rb") as file:
            assert file.read(6) == b"\x93NUMPY"
            mapped = np.load(path / "params/h.npy", mmap_mode="r")
            assert mapped.shape == (5, 4)
            del mapped
        mount.close()

    with JobReader(job.address) as reader:
        tree = Tree(reader)
        for _ in range(3):
            mount_once()
        wait_until(lambda: not mounts())
        before = counts()
        for _ in range(200):
            mount_once()
        wait_until(lambda: counts() <= before)
        tree.close()


def test_models_are_mapped_without_the_mount(made: Mounted) -> None:
    """The kernel reads the server's own copy: also while the mount's process is stopped."""
    descriptor = os.open(made.path / "model.safetensors", os.O_RDONLY)
    size = os.fstat(descriptor).st_size
    with mmap.mmap(descriptor, size, prot=mmap.PROT_READ) as mapped:
        try:
            os.kill(made.process.pid, signal.SIGSTOP)
            data = mapped[:]
            assert os.pread(descriptor, 5000, 100) == data[100:5100]
        finally:
            os.kill(made.process.pid, signal.SIGCONT)
    found = dict(safetensors.deserialize(data))
    values = np.frombuffer(found["a"]["data"], np.float32)
    assert (values == values[0]).all()
    # Another version is another file, and a server that is gone leaves what is mapped.
    again = os.open(made.path / "model.safetensors", os.O_RDONLY)
    assert os.pread(again, size, 0) != data
    assert os.pread(descriptor, size, 0) == data
    # As programs see it, it is the same: cp skips what was replaced since it looked.
    assert os.fstat(again).st_ino == os.fstat(descriptor).st_ino
    for each in (again, descriptor):
        os.close(each)


def check_reading(address: str, path: Path) -> None:
    path.mkdir()
    with JobReader(address) as reader, contextlib.closing(Tree(reader)) as tree:
        mount = JobMount(tree, path)
        try:
            data = subprocess.run(  # of a process of its own, as pages are waited for
                ["cat", str(path / "model.safetensors")], check=True, capture_output=True
            ).stdout
        finally:
            mount.close()
    values = np.frombuffer(dict(safetensors.deserialize(data))["a"]["data"], np.float32)
    assert (values == values[0]).all()


def test_models_are_read_through_the_mount_without_passthrough(
    job: JobAtWork, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: core_fuse.Mount, file: int) -> int:
        raise UnavailableError("the kernel does not read a file itself")

    monkeypatch.setattr(core_fuse.Mount, "back", refuse)
    check_reading(job.address, tmp_path / "mnt")


def test_models_of_two_servers_are_read_through_the_mount(folder: Path) -> None:
    """No single file of a server has the model."""
    with training(folder, "--workers", "1", "--servers", "2", PAUSE="0.01") as job:
        check_reading(job.address, folder / "mnt")


def test_rsync_copies_a_snapshot(made: Mounted, tmp_path: Path) -> None:
    if shutil.which("rsync") is None:
        pytest.skip("no rsync; tools/need.sh rsync installs it")
    wait_until(lambda: os.listdir(made.path / "snapshots") == [])  # of what was open before
    run("sh", "-c", f"echo take > {made.path}/control/snapshot")
    (held,) = (made.path / "snapshots").iterdir()
    target = tmp_path / "copy"
    run("rsync", "-a", "--checksum", f"{held}/", str(target))
    again = run("rsync", "-a", "--checksum", "--itemize-changes", f"{held}/", str(target))
    assert not [line for line in again.splitlines() if line.startswith(">f")]
    a = np.load(target / "params/a.npy")
    assert (a == a[0, 0]).all()
    assert int(held.name) == a[0, 0] + 2
    refused = subprocess.run(
        ["rsync", "-a", str(target) + "/", str(made.path / "params")],
        check=False, capture_output=True,
    )  # fmt: skip
    assert b"Read-only file system" in refused.stderr


def test_fio_verifies_what_it_writes(made: Mounted) -> None:
    """Random writes of a parameter of a paused job, each of which fio reads back and compares."""
    if shutil.which("fio") is None:
        pytest.skip("no fio; tools/need.sh fio installs it")
    run("sh", "-c", f"echo 1 > {made.path}/control/pause")
    for name, options in (
        ("writes", ("--rw=randwrite", "--bs=4k", "--verify=crc32c")),
        ("sizes", ("--rw=randwrite", "--bsrange=512-32k", "--verify=md5")),
        ("both", ("--rw=randrw", "--bs=4k", "--verify=pattern", "--verify_pattern=0x5a")),
        ("threads", ("--rw=randread", "--bs=4k", "--numjobs=4", "--thread")),
    ):
        run(
            "fio", f"--name={name}", f"--filename={made.path}/params/a.npy",
            "--size=1m", "--ioengine=psync", "--fallocate=none", "--overwrite=0",
            "--allow_file_create=0", "--verify_state_save=0", *options,
        )  # fmt: skip
    run("sh", "-c", f"echo discard > {made.path}/control/commit")
    run("sh", "-c", f"echo 0 > {made.path}/control/pause")
    before = np.load(made.path / "params/a.npy")
    assert (before == before[0, 0]).all()  # nothing of it counts
