"""A reader beside a job that trains: no versions are mixed, nothing is written, no worker waits."""

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jobs import JobAtWork, training

from tensorwire import BusyError, Node, PeerLostError, TensorwireError, TimeoutError
from tensorwire.files import JobReader
from tensorwire.files.job import find_way
from tensorwire.jobs.job_file import running_servers
from tensorwire.memory import RemoteMailbox
from tensorwire.parameters.reading import ASKS, LEASE_BYTES, LOST_S, MOST_LENT, Ask, AskKind

SHM, TCP = None, ("tcp",)
CUT_BY_SERVERS = ("--workers", "2", "--servers", "2")


def elements(data: bytes) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.frombuffer(data, np.float32)


def check_one_version(data: bytes, version: int) -> None:
    """Every element is the number of steps, and version 2 is before the first."""
    values = elements(data)
    assert (values == version - 2).all(), (values.min(), values.max(), version)


def held(reader: JobReader) -> list[list[int]]:
    found: list[list[int]] = reader.status()["snapshots"]["0"]
    return found


def hold_more(reader: JobReader) -> None:
    """Snapshots until one is of another version than those that are there, which can be shared."""
    while True:
        reader.snapshot().close()


def await_held(reader: JobReader, count: int, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while len(held(reader)) != count:
        assert time.monotonic() < deadline, held(reader)
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "mode"),
    [(("--workers", "1"), "sync"), (CUT_BY_SERVERS, "sync"), (CUT_BY_SERVERS, "async")],
)
def test_what_is_read_while_it_trains_is_of_one_version(
    folder: Path, arguments: tuple[str, ...], mode: str
) -> None:
    with training(folder, *arguments, MODE=mode, ROWS="3000") as job:
        for transports in (SHM, TCP):
            with JobReader(job.address, transports=transports) as reader:
                check_reads(reader)
        check_delays(job)


def check_reads(reader: JobReader) -> None:
    """Reads a large tensor and a part of a small one, also of snapshots, until it trained on."""
    large, small = (reader.store().tensor(name) for name in ("a", "b"))
    seen = set()
    until = time.monotonic() + 1.5
    deadline = until + 30  # for a busy machine
    while time.monotonic() < (deadline if len(seen) <= 3 else until):
        found = reader.read(large)
        check_one_version(found.data, found.version)
        seen.add(found.version)
        part = reader.read(small, 4, 12, b"head")
        assert part.data[:4] == b"head"
        check_one_version(part.data[4:], part.version)
        with reader.snapshot() as snapshot:
            check_one_version(snapshot.tensor_bytes(large), snapshot.version)
            check_one_version(snapshot.tensor_bytes(small), snapshot.version)
    assert len(seen) > 3
    assert sorted(seen)[0] >= 2
    await_held(reader, 0, 5)


# Reads all of a tensor, a part of it, and a snapshot of it, until its input ends.
READS = """
import select, sys
import numpy as np
from tensorwire.files import JobReader
versions = set()
def check(data, version):
    values = np.frombuffer(data, np.float32)
    assert (values == version - 2).all(), (values.min(), values.max(), version)
    versions.add(version)
with JobReader(sys.argv[1]) as reader:
    tensor = reader.store().tensor("a")
    target = np.empty(tensor.size_bytes, np.uint8)
    print("reads", flush=True)
    while not select.select([sys.stdin], [], [], 0)[0]:
        found = reader.read(tensor)
        check(found.data, found.version)
        found = reader.read(tensor, 4000, tensor.size_bytes - 4000)
        check(found.data, found.version)
        check(target, reader.read_into(tensor, target))
        with reader.snapshot() as snapshot:
            check(snapshot.tensor_bytes(tensor), snapshot.version)
print(len(versions))
"""


def check_delays(job: JobAtWork) -> None:
    """Stops servers and a reader in the middle of whatever they do; they go on."""
    rng = random.Random(18)
    reader = subprocess.Popen(
        [sys.executable, "-c", READS, job.address],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert reader.stdin is not None
    assert reader.stdout is not None
    assert reader.stdout.readline() == "reads\n"
    victims = [reader.pid, *(each.pid for each in job.servers)]
    until = time.monotonic() + 6
    while time.monotonic() < until and reader.poll() is None:
        victim = rng.choice(victims)
        os.kill(victim, signal.SIGSTOP)
        time.sleep(rng.random() * 0.03)
        os.kill(victim, signal.SIGCONT)
        time.sleep(rng.random() * 0.01)
    told, _ = reader.communicate(timeout=60)
    assert reader.returncode == 0
    assert int(told) > 3


@pytest.mark.slow
def test_a_server_that_is_replaced_tells_the_version_in_place(folder: Path) -> None:
    """Also where each worker goes at its own pace, before the next commit comes."""
    with training(folder, "--workers", "1", paused=True, MODE="async") as job:
        with JobReader(job.address) as reader:
            deadline = time.monotonic() + 30
            while (version := reader.store().version()) < 3:
                assert time.monotonic() < deadline
                time.sleep(0.01)
            os.kill(job.servers[0].pid, signal.SIGKILL)
        while True:
            assert time.monotonic() < deadline
            # Until it has written its job file, with the readers' secret, and opened the store.
            with contextlib.suppress(TensorwireError, LookupError, PermissionError):
                with JobReader(job.address) as reader:
                    assert reader.store().version() == version
                    break
            time.sleep(0.05)


@pytest.mark.slow
def test_a_version_that_is_half_made_is_not_read(folder: Path) -> None:
    environ = {"ROWS": "8000", "TENSORWIRE_FAIL": "server-0:cell.changed:80:stop"}
    with (
        training(
            folder, "--workers", "1", "--on-death=end", paused=True, one_core=True, **environ
        ) as job,
        JobReader(job.address, timeout_s=1.0) as reader,
    ):
        tensor, server = reader.store().tensor("a"), job.servers[0].pid
        with JobReader(job.address) as patient:
            patient.read(patient.store().tensor("a"))
        reader.read(tensor)
        job.go_on()
        # Its state follows its name, which is that of the interpreter.
        while Path(f"/proc/{server}/stat").read_text().rpartition(") ")[2][:1] != "T":
            time.sleep(0.01)
        torn = elements(tensor.copy(0, tensor.size_bytes))
        assert len(set(torn.tolist())) == 2  # who does not look at the version is misled
        with pytest.raises(TimeoutError, match="in the middle"):
            reader.read(tensor)
        os.kill(server, signal.SIGCONT)
        with JobReader(job.address) as patient:
            found = patient.read(patient.store().tensor("a"))
        check_one_version(found.data, found.version)


@pytest.mark.slow
def test_readers_write_nothing_and_are_no_members(job: JobAtWork) -> None:
    way = find_way(job.address)
    assert way.address == job.servers[0].door != job.address
    secret = way.secret.decode()
    assert secret not in ("", job.servers[0].secret)
    with Node("worker-0", secret=way.secret) as node:
        with pytest.raises(PermissionError):
            node.connect(job.address)
        for transport in ("shm", "tcp"):
            door = node.connect(way.address, require=transport)
            data = np.zeros(64, np.uint8)
            for name in ("0/view", "0/master", "0/version", "0/facts", "status"):
                try:
                    region = door.region(name)
                except LookupError:
                    assert name in ("0/view", "0/master")  # one of them
                    continue
                with pytest.raises(PermissionError):
                    region[:64].write(data)
                with pytest.raises(PermissionError):
                    region.word(0).set(1 << 62)
                with pytest.raises(PermissionError):
                    region.word(0).fetch_add(1, 10)
            for name in ("control", "0/commit/0", "0/slot/0", "collective"):
                with pytest.raises(LookupError):
                    door.region(name)
            with pytest.raises(BusyError):
                door.allocate(1 << 20)
            door.close()
    for wrong in (job.servers[0].secret, "w" * 32):
        with pytest.raises(PermissionError):
            JobReader(job.address, secret=wrong)
    with pytest.raises(ValueError, match="at least 16"):
        JobReader(job.address, secret="short")
    # Whatever a reader asks for, the server lives.
    with Node("reader-hostile", secret=way.secret) as node:
        door = node.connect(way.address)
        lease = door.allocate(LEASE_BYTES, "lease reader-hostile")
        lease.write(np.full(LEASE_BYTES, 255, np.uint8)).wait(10)
        door.region("bell").word(0).set(1 << 62).wait(10)
        with JobReader(job.address) as reader, reader.snapshot() as snapshot:
            tensor = reader.store().tensor("a")
            check_one_version(snapshot.tensor_bytes(tensor), snapshot.version)
            wanted = reader.store().version() + 100
            bell = np.zeros(8, np.uint8)
            door.region("bell")[:8].read(bell).wait(10)
            assert bell.view(np.uint64)[0] < 1000  # it is begun anew: nobody waits for it
        with Node("reader-rude", secret=way.secret) as other:
            door = other.connect(way.address)
            lease = door.allocate(LEASE_BYTES, "lease reader-rude")
            door.region("bell").word(0).fetch_add(1, 10)
            ask = Ask(AskKind.MAKE, 0, wanted).to_bytes()
            RemoteMailbox(lease[ASKS]).send(ask, 1).wait(10)
            # Of this word the server's own thread wants to ring when it has the version.
            door.region("bell").word(0).set((1 << 64) - 1).wait(10)
            with JobReader(job.address) as reader:
                await_held(reader, 1, 30)
                store = reader.store()
                while store.version() <= wanted + 1:
                    time.sleep(0.01)


HOLDER = """
import sys, time
from tensorwire.files import JobReader
reader = JobReader(sys.argv[1])
held = []
while len(held) < int(sys.argv[2]):
    snapshot = reader.snapshot()
    if not held or snapshot.version != held[-1].version:
        held.append(snapshot)
print("held", flush=True)
time.sleep(600)
"""


@contextlib.contextmanager
def holder(job: JobAtWork, count: int) -> Iterator["subprocess.Popen[str]"]:
    command = [sys.executable, "-c", HOLDER, job.address, str(count)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "held\n"
            yield process
        finally:
            process.kill()


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_memory_of_readers_that_die_or_stop_comes_back(job: JobAtWork) -> None:
    with JobReader(job.address) as reader:
        await_held(reader, 0, LOST_S + 10)  # of readers before
        for ending in (signal.SIGKILL, signal.SIGSTOP):
            with holder(job, MOST_LENT) as process:
                await_held(reader, MOST_LENT, 5)
                with pytest.raises(BusyError, match=f"{MOST_LENT} snapshots"):
                    hold_more(reader)
                reader.read(reader.store().tensor("a"))
                process.send_signal(ending)
                before = reader.store().version()
                await_held(reader, 0, LOST_S + 10)
                assert reader.store().version() > before
                with reader.snapshot() as snapshot:
                    assert snapshot.version > before


@pytest.mark.slow
def test_a_reader_goes_on_when_a_server_is_replaced_and_hears_of_the_end(folder: Path) -> None:
    with training(folder, "--workers", "1", "--on-death=restart", momentum=0.0) as job:
        reader = JobReader(job.address, timeout_s=20)
        first = reader.read(reader.store().tensor("a")).version
        os.kill(job.servers[0].pid, signal.SIGKILL)
        deadline = time.monotonic() + 30
        while True:
            try:
                found = reader.read(reader.store().tensor("a"))
                break
            except (PeerLostError, LookupError):
                assert time.monotonic() < deadline
                time.sleep(0.05)
        check_one_version(found.data, found.version)
        assert found.version >= first
        tensor = reader.store().tensor("a")
        assert job.end() == 0
        with pytest.raises(PeerLostError):
            reader.read(tensor)
        with pytest.raises(PeerLostError):
            reader.store()
        reader.close()


@pytest.mark.slow
def test_a_reader_that_comes_before_the_workers(folder: Path) -> None:
    """Named for a bug: it was told nothing, and that the server "did not tell in time"."""
    ours, theirs = os.pipe()
    command = [sys.executable, "-m", "tensorwire.torch.server", "--workers", "2", "--count", "1"]
    server = subprocess.Popen([*command, "--address-fd", str(theirs)], pass_fds=[theirs])
    try:
        os.close(theirs)
        with os.fdopen(ours) as channel:
            address = channel.readline().strip()
        while not running_servers():  # the job's file is written behind that
            assert server.poll() is None
            time.sleep(0.01)
        with JobReader(address) as reader:
            told = reader.status()
            assert [each["state"] for each in told["workers"]] == ["expected", "expected"]
            assert reader.stores() == []
            with pytest.raises(LookupError, match=r"no store 0 yet: workers 0, 1 have not joined"):
                reader.store()
    finally:
        server.kill()
        server.wait()
