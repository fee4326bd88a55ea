"""The folder of running jobs: only this user can write there, whatever strangers made before."""

import os
import pwd
import socket
import tempfile
from pathlib import Path

import pytest

from tensorwire.errors import UnavailableError
from tensorwire.jobs.folder import cache_folder, runtime_folder


@pytest.fixture(autouse=True)
def places(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Path]:
    """The three of them, in order."""
    for name, variable in (("run", "XDG_RUNTIME_DIR"), ("cache", "XDG_CACHE_HOME")):
        monkeypatch.setenv(variable, str(tmp_path / name))
    for name in ("run", "tmp"):
        (tmp_path / name).mkdir(mode=0o700)
    (tmp_path / "tmp").chmod(0o1777)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    return [
        tmp_path / "run" / "tensorwire",
        tmp_path / "tmp" / f"tensorwire-{os.geteuid()}",
        tmp_path / "cache" / f"tensorwire-{socket.gethostname()}",
    ]


def spoil(folder: Path, how: str) -> None:
    if how == "a file":
        folder.write_text("")
    elif how == "a link":
        folder.symlink_to(folder.parent)
    else:
        folder.mkdir()
        folder.chmod(0o770 if how == "a group" else 0o777)


def test_the_first_one_is_made_once(places: list[Path]) -> None:
    assert runtime_folder() == runtime_folder() == places[0]
    assert places[0].stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("value", ["", "run", "/no/such/folder"])
def test_without_a_runtime_folder(
    places: list[Path], monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", value)
    assert runtime_folder() == places[1]
    assert places[1].stat().st_mode & 0o777 == 0o700


def test_a_runtime_folder_to_which_others_can_write(places: list[Path]) -> None:
    places[0].parent.chmod(0o777)
    assert runtime_folder() == places[1]


def test_that_of_another_user_is_left_alone(
    places: list[Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The folder that `su` leaves; root could write there, and then its owner could not."""
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(UnavailableError, match=r"tensorwire-12345 \(owned by user \d+\)"):
        runtime_folder()
    assert not places[0].exists()


@pytest.mark.parametrize("how", ["a file", "a link", "a group", "everybody"])
def test_what_others_can_change_is_not_used(places: list[Path], how: str) -> None:
    spoil(places[0], how)
    spoil(places[1], how)
    assert runtime_folder() == places[2]


def test_where_nothing_is_fit_all_are_named(places: list[Path]) -> None:
    places[2].parent.mkdir()
    for folder in places:
        spoil(folder, "everybody")
    with pytest.raises(UnavailableError) as caught:
        runtime_folder()
    text = str(caught.value)
    assert all(f"{folder} (mode 777, so that others can write)" in text for folder in places)
    assert "set XDG_RUNTIME_DIR to a folder that is yours" in text


def test_a_user_without_a_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Named for a bug: a folder with the name "~" appeared where the program was started."""

    def unknown(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache"
    monkeypatch.setenv("XDG_CACHE_HOME", "~/.cache")  # no shell has put a home there
    assert cache_folder() is None
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    assert cache_folder() is None
    monkeypatch.chdir(tmp_path)
    assert runtime_folder().is_absolute()
    library = pytest.importorskip("tensorwire.torch.allocator.library")
    assert all(folder.is_absolute() for folder in library._places())
    assert not (tmp_path / "~").exists()


def test_where_nothing_is_fit_each_place_and_its_reason_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def nowhere() -> str:
        raise FileNotFoundError(2, "no usable temporary folder")

    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr("tempfile.gettempdir", nowhere)
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    with pytest.raises(UnavailableError) as caught:
        runtime_folder()
    text = str(caught.value)
    assert "$XDG_RUNTIME_DIR (not set" in text
    assert "no usable temporary folder" in text
    assert "~/.cache (neither XDG_CACHE_HOME nor HOME is" in text
