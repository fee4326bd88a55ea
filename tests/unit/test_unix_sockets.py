"""Unix sockets of jobs: their names, in folders of any length and of several containers."""

import os
import socket
import threading
from pathlib import Path

import pytest

from tensorwire.launch.control import ControlDoor
from tensorwire.launch.visitors import Door
from tensorwire.membership import ScaleError, ask_launcher, enter_job, listen_in, short_path
from tensorwire.membership.unix_sockets import remove_dead


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The runtime folder, with a longer name than a socket may have."""
    long = tmp_path / ("long" * 30)
    long.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(long))
    return long / "tensorwire"


def test_a_long_folder(folder: Path) -> None:
    """Named for a bug: with a runtime folder of 100 characters, tensorwire scale found no job."""
    door = ControlDoor(b"secret")
    assert len(str(door.path)) > 120
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
        with short_path(door.path) as short:
            client.connect(short)
        assert not list(door.requests())
        assert b"nonce" in client.recv(1000)
    door.close()
    assert not list(folder.iterdir())


def test_a_supervisor_in_a_long_folder(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    door = Door(folder / "job")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as visitor:
        with short_path(folder / "job") as short:
            visitor.connect(short)
        visitor.send(b'{"rank": 0}')
        assert not list(door.claims())
        (claim,) = door.claims()
        claim.refuse(refused="it is a test")
    door.close()
    assert not list(folder.iterdir())


def test_who_connects_in_a_long_folder(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    listener, path = listen_in(folder, "any-")
    listener.setblocking(True)
    environ = {"TENSORWIRE_SUPERVISOR": str(path), "TENSORWIRE_RANK": "0"}

    def answer() -> None:
        for said, then in ((b'{"refused": "one"}', b""), (b'{"nonce": "n"}', b'{"error": "two"}')):
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
    doors = [ControlDoor(b"one"), ControlDoor(b"two"), Door(), Door()]
    assert len({door.path for door in doors}) == 4
    doors[0].close()
    assert doors[1].path.exists()
    for door in doors[1:]:
        door.close()
    assert not list(folder.iterdir())


def test_whether_somebody_listens_tells_and_no_number(folder: Path) -> None:
    """A process of another container is in no process table of this one."""
    folder.mkdir(mode=0o700)
    living, path = listen_in(folder, "control-")
    other = path.rename(folder / "control-999999999-00")  # there is no such process
    dead, left = listen_in(folder, "control-")
    dead.close()
    mine = left.rename(folder / f"control-{os.getpid()}-00")
    assert other.exists()
    assert mine.exists()
    third, _ = listen_in(folder, "control-")
    assert other.exists()
    assert not mine.exists()
    remove_dead(other)
    assert other.exists()
    for each in (living, third):
        each.close()


def test_a_folder_that_is_gone_at_the_end(folder: Path) -> None:
    """Named for a bug: a good job ended with 1, by an OSError of its last steps."""
    doors = [ControlDoor(b"secret"), Door()]
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    folder.touch()
    for door in doors:
        door.close()
