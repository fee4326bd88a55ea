"""The answers of servers to clients that are no workers, and the files by which these find them."""

import contextlib
import json
import os
import socket
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tensorwire import Node
from tensorwire.durability.descriptor_store import DescriptorStore
from tensorwire.errors import TimeoutError, UnavailableError
from tensorwire.jobs.job_file import JobFile, RunningServer, running_servers, shown_command
from tensorwire.jobs.lockfile import try_lock
from tensorwire.membership.server import ServerMember
from tensorwire.membership.status import StatusRegion, read_status, reader_name


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    tmp_path.chmod(0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path / "tensorwire"


def server(index: int = 0, started: float = 5.0) -> RunningServer:
    return RunningServer(
        index, "127.0.0.1:7000", os.getpid(), 2, "train.py", started, "a secret", ""
    )


def test_a_job_is_listed_while_its_server_lives(folder: Path) -> None:
    first, second = JobFile(server(started=9.0)), JobFile(server(started=8.0))
    (path, _) = sorted(folder.iterdir())
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [each.started for each in running_servers()] == [8.0, 9.0]
    second.close()
    second.close()
    assert running_servers() == [server(started=9.0)]
    first.close()
    assert running_servers() == []
    assert list(folder.iterdir()) == []


def test_what_a_killed_server_left_is_removed(folder: Path) -> None:
    pid = os.fork()
    if pid == 0:
        JobFile(server())
        os._exit(0)
    os.waitpid(pid, 0)
    assert len(list(folder.iterdir())) == 1
    assert running_servers() == []
    assert list(folder.iterdir()) == []


def test_files_that_make_no_sense_are_passed_over(folder: Path) -> None:
    mine = JobFile(server())
    (folder / "server-1-link").symlink_to("/etc/passwd")
    os.mkfifo(folder / "server-2-pipe")
    (folder / "server-3-folder").mkdir()
    with (folder / "server-4-text").open("w") as file:
        import fcntl

        file.write("{")
        file.flush()
        fcntl.flock(file, fcntl.LOCK_EX)
        assert running_servers() == [server()]
    mine.close()


def test_a_file_that_another_program_takes_for_a_dead_one_s(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between making and locking it, or while that program looks at it."""
    from tensorwire.jobs import lockfile

    taken: list[Path] = []

    def taken_first(descriptor: int) -> bool:
        if len(taken) < 2:
            (path,) = folder.iterdir()
            taken.append(path)
            if len(taken) == 1:
                return False
            path.unlink()
        return try_lock(descriptor)

    monkeypatch.setattr(lockfile, "try_lock", taken_first)
    with contextlib.closing(JobFile(server())):
        assert len(taken) == 2
        monkeypatch.undo()
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder.parent))
        assert running_servers() == [server()]


def test_commands_are_one_short_line_of_text() -> None:
    assert shown_command(["train.py", "--lr", "0.1"]) == "train.py --lr 0.1"
    assert shown_command(["a\nb\x1b[31m", "\udcff", Path("c")]) == "a?b?[31m ? c"
    assert shown_command(["x" * 200_000]) == "x" * 1000 + "…"


@pytest.fixture
def pair() -> Iterator[tuple[Node, Node]]:
    with Node("server-0") as there, Node(reader_name()) as here:
        yield there, here


def test_a_reader_sees_whole_descriptions(pair: tuple[Node, Node]) -> None:
    """The server writes as fast as it can; each text is of one length and one letter."""
    there, here = pair
    region, stop = StatusRegion(there), threading.Event()

    def write() -> None:
        number = 0
        while not stop.is_set():
            number += 1
            text = "abc"[number % 3] * (1 + number % 3 * 50_000)
            region.write({"readers": [here.name], "text": text})

    thread = threading.Thread(target=write)
    thread.start()
    try:
        peer, until = here.connect(there.address), time.monotonic() + 2
        for number in range(200):
            if number > 5 and time.monotonic() > until:
                break  # where the threads keep step, most of what is read is being written
            text = read_status(peer, here.name, 20.0)["text"]
            assert text == text[0] * (1 + "abc".index(text[0]) * 50_000)
    finally:
        stop.set()
        thread.join()


def test_a_description_that_is_too_long_says_so(pair: tuple[Node, Node]) -> None:
    there, here = pair
    region = StatusRegion(there)
    region.write({"readers": [here.name], "stores": ["x" * 1000] * 1000})
    found = read_status(here.connect(there.address), here.name)
    assert found["stores"] == []
    assert found["truncated"]


def test_nobody_answers(pair: tuple[Node, Node]) -> None:
    there, here = pair
    peer = here.connect(there.address)
    with pytest.raises(UnavailableError, match=r"'server-0' at .* tells no status"):
        read_status(peer, here.name)
    StatusRegion(there).write({"readers": ["reader-of-another-one"]})
    with pytest.raises(TimeoutError, match="did not tell its status in time"):
        read_status(peer, here.name, 0.2)


def test_a_reader_is_no_member(capfd: pytest.CaptureFixture[str]) -> None:
    """A reader may come before the workers, at the same time, and when all are there."""
    with contextlib.ExitStack() as stack:
        there = stack.enter_context(Node("server-0"))
        member = ServerMember(0, 1, there, 1)
        early, worker, late = (
            stack.enter_context(Node(name)) for name in (reader_name(), "worker-0", reader_name())
        )
        peers = [early.connect(there.address), worker.connect(there.address)]
        member.gather()
        assert list(member.workers) == [0]
        found: dict[str, Any] = read_status(peers[0], early.name)
        assert found["workers"][0] | {"pid": 0, "address": ""} == {
            "rank": 0, "state": "connected", "pid": 0, "address": "", "transport": "shm",
            "encrypted": False,
        }  # fmt: skip
        peer = late.connect(there.address)
        while not len(member.readers) > 1:
            assert member.returned() is None
        member.tell_readers([{"number": 0, "version": 7}])
        found = read_status(peer, late.name)
        assert found["stores"] == [{"number": 0, "version": 7}]
        assert json.dumps(found)
        for each in (early, late):
            each.close()
        member.check()
        deadline = time.monotonic() + 10
        while member.readers:  # until the Node's thread has seen that they are gone
            assert time.monotonic() < deadline
            member.tell_readers()
    assert "turned away" not in capfd.readouterr().err


def test_a_successor_tells_how_often_it_was_replaced() -> None:
    mine, launchers = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with launchers, Node("server-0") as there, Node(reader_name()) as here:
        member = ServerMember(0, 1, there, 1, DescriptorStore(mine), 2)
        peer = here.connect(there.address)
        while not member.readers:
            with contextlib.suppress(TimeoutError):
                member._admit(there.accept(0.1))
        member.tell_readers()
        assert read_status(peer, here.name)["restarts"] == 2
    mine.close()
