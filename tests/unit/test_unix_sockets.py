"""Unix sockets of jobs: their names, in folders of any length and of several containers."""

import os
import socket
import threading
from pathlib import Path
from typing import TypedDict

import pytest

from tensorwire.jobs.asking import ScaleError, ask_launcher
from tensorwire.jobs.door import Door, knock, remove_dead, short_path
from tensorwire.launch.serve import open_door
from tensorwire.membership.entry import enter_job


class Question(TypedDict, total=False):
    rank: int
    proof: str


def control(secret: bytes = b"secret") -> Door[Question]:
    return Door(Question, "control-", secret=secret)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The runtime folder, with a longer name than a socket may have."""
    long = tmp_path / ("long" * 30)
    long.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(long))
    return long / "tensorwire"


def test_a_long_folder(folder: Path) -> None:
    """Named for a bug: with a runtime folder of 100 characters, tensorwire scale found no job."""
    door = control()
    assert len(str(door.path)) > 120
    with knock(door.path, 10.0) as client:
        assert not list(door.messages())
        assert b"nonce" in client.recv(1000)
    door.close()
    assert not list(folder.iterdir())


def test_a_supervisor_in_a_long_folder(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    door = open_door(folder / "job", print)
    with knock(door.path, 10.0) as visitor:
        visitor.send(b'{"rank": 0}')
        assert not list(door.messages())
        ((client, question),) = door.messages()
        assert (question, client.pid) == ({"rank": 0}, os.getpid())
        client.refuse("it is a test")
        assert visitor.recv(1000) == b'{"error": "it is a test"}'
    door.close()
    assert not list(folder.iterdir())


def test_who_connects_in_a_long_folder(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    path = folder / "any"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with short_path(path) as short:
        listener.bind(short)
    listener.listen()
    environ = {"TENSORWIRE_SUPERVISOR": str(path), "TENSORWIRE_RANK": "0"}

    def answer() -> None:
        for said, then in ((b'{"error": "one"}', b""), (b'{"nonce": "n"}', b'{"error": "two"}')):
            came, _ = listener.accept()
            with came:
                came.send(said)
                came.recv(1000)
                if then:  # who was refused has gone, perhaps
                    came.send(then)

    thread = threading.Thread(target=answer)
    thread.start()
    with pytest.raises(RuntimeError, match="no place for worker 0: one"):
        enter_job(environ)
    with pytest.raises(ScaleError, match="two"):
        ask_launcher(str(path), b"secret", {}, 10.0, print)
    thread.join(10)
    listener.close()


def test_launchers_of_two_containers_have_two_sockets(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Named for a bug: each launcher was process 1, and took the other's control-1."""
    monkeypatch.setattr(os, "getpid", lambda: 1)
    doors = [control(b"one"), control(b"two"), open_door(None, print), open_door(None, print)]
    assert len({door.path for door in doors}) == 4
    doors[0].close()
    assert doors[1].path.exists()
    for door in doors[1:]:
        door.close()
    assert not list(folder.iterdir())


def test_whether_somebody_listens_tells_and_no_number(folder: Path) -> None:
    """A process of another container is in no process table of this one."""
    folder.mkdir(mode=0o700)
    living = control()
    other = living.path.rename(folder / "control-999999999-00")  # there is no such process
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as dead:
        mine = folder / f"control-{os.getpid()}-00"
        with short_path(mine) as short:
            dead.bind(short)
    assert other.exists()
    assert mine.exists()
    third = control()
    assert other.exists()
    assert not mine.exists()
    remove_dead(other)
    assert other.exists()
    for each in (living, third):
        each.close()


def test_a_stranger_that_sends_descriptors_leaves_none(folder: Path) -> None:
    door = Door(Question, "any-")
    with knock(door.path, 10.0) as client:
        assert not list(door.messages())
        before = len(os.listdir("/proc/self/fd"))
        socket.send_fds(client, [b'{"rank": 1}'], [0, 1, 2])
        socket.send_fds(client, [b"no json"], [0, 1, 2])
        ((_, question),) = door.messages()
        assert question == {"rank": 1}
        ((_, question),) = door.messages()
        assert question is None
        assert b"the request is not valid" in client.recv(1000)
        assert len(os.listdir("/proc/self/fd")) == before - 1  # its connection is closed
    door.close()


def test_a_folder_that_is_gone_at_the_end(folder: Path) -> None:
    """Named for a bug: a good job ended with 1, by an OSError of its last steps."""
    doors = [control(), open_door(None, print)]
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    folder.touch()
    for door in doors:
        door.close()
