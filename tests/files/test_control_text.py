"""The texts that files of `control/` understand, without a job."""

import errno
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from files.outcomes import code_of

from tensorwire import Node
from tensorwire.errors import PeerLostError, UnavailableError
from tensorwire.files.control_tree import control_folder
from tensorwire.files.drafts import Drafts, DraftWriting
from tensorwire.files.npy import npy_header
from tensorwire.files.owner import JobOwner
from tensorwire.files.reader import JobReader
from tensorwire.files.tree import Tree
from tensorwire.files.tree_items import Changes, Folder
from tensorwire.jobs.asking import ScaleError
from tensorwire.parameters import AVERAGE_ONLY, TensorSpec


class FakeOwner:
    """Notes what it is told."""

    def __init__(self) -> None:
        self.told: list[Any] = []
        self.refuses: Exception | None = None

    def held(self) -> tuple[object, int] | None:
        return None

    def pause(self, timeout_s: float) -> int:
        self.told.append(("pause", timeout_s))
        return 3

    def go_on(self) -> None:
        self.told.append("go on")

    def scale(self, asked: object, timeout_s: float) -> str:
        if self.refuses is not None:
            raise self.refuses
        self.told.append((asked, timeout_s))
        return ""


class FakeReader:
    timeout_s = 30.0

    @staticmethod
    def members() -> tuple[int, int]:
        return 1, 2


class FakeTree:
    """A job whose owner is a FakeOwner."""

    def __init__(self) -> None:
        self.owner, self.changes, self.reader = FakeOwner(), Changes(), FakeReader()
        self.told = self.owner.told
        self.uncommitted: list[str] = []

    def version(self) -> int:
        return 12

    def take(self, store: int = 0, whole: bool = True) -> int:
        self.told.append(("take", store, whole))
        return 5

    def release(self, version: int, store: int = 0) -> None:
        self.told.append(("release", version))

    def taken(self) -> list[tuple[int, int]]:
        return [(0, 5)]

    def written(self) -> list[str]:
        return self.uncommitted

    def discard_written(self) -> None:
        self.told.append("discard")

    def commit_written(self, version: int, allow_nan: bool, path: str) -> None:
        self.told.append(("commit", version, allow_nan))


def folder_of(tree: FakeTree) -> Folder:
    return control_folder(tree, "control")  # type: ignore[arg-type]


def write(tree: FakeTree, name: str, text: str, offset: int = 0) -> None:
    folder_of(tree).child(name).open_for_writing().write(offset, text.encode())


def test_what_it_shows() -> None:
    tree = FakeTree()
    tree.uncommitted = ["a"]
    folder = folder_of(tree)
    found = {name: folder.child(name).open().read() for name in folder.names()}
    assert found == {
        "state": b"running 12\n",
        "pause": b"0\n",
        "commit": b"a.npy\n",
        "snapshot": b"0 5\n",
        "scale": b"workers 1\nservers 2\n",
    }
    modes = {name: folder.child(name).entry().mode for name in folder.names()}
    assert modes.pop("state") == 0o444
    assert set(modes.values()) == {0o644}


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("pause", "1\n", ("pause", 30.0)),
        ("pause", " 1 2.5 ", ("pause", 2.5)),
        ("pause", "0", "go on"),
        ("commit", "version 4", ("commit", 4, False)),
        ("commit", "nan\n\nversion 4\n", ("commit", 4, True)),
        ("commit", "discard", "discard"),
        ("snapshot", "take", ("take", 0, True)),
        ("snapshot", "take values\n", ("take", 0, False)),
        ("snapshot", "release 5", ("release", 5)),
        ("commit", "nan; version 4", ("commit", 4, True)),
        ("scale", "workers 3", ({"workers": {"count": 3, "drain": []}}, 300.0)),
        (
            "scale",
            "workers 1\ndrain 2 0\ndrain 2\nservers 2\ntimeout 5\n",
            ({"workers": {"count": 1, "drain": [0, 2]}, "servers": {"count": 2}}, 5.0),
        ),
    ],
)
def test_what_it_understands(name: str, text: str, told: object) -> None:
    tree = FakeTree()
    write(tree, name, text)
    assert tree.told == [told]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        *(("pause", each) for each in ("", "2", "01", "1 0", "1 inf", "1 1e9", "1 2 3", "0 1")),
        *(("commit", each) for each in ("", "nan", "4", "version", "version -1", "version 1.0")),
        *(("commit", each) for each in ("version ²", "discard\nversion 4", f"version {'9' * 30}")),
        *(("snapshot", each) for each in ("", "take all", "release", "release -1", "release 1 2")),
        *(("scale", each) for each in ("", "workers", "workers -1", "workers 1 2", "drain 0")),
        *(("scale", each) for each in ("drain", "servers x", "workers 1\nmore", "timeout 5")),
        *(("scale", each) for each in ("workers 1\nworkers 2", "servers 2\nservers 2")),
        *(("commit", each) for each in ("version 1\nversion 2", "nan\nversion 1\nnan")),
        ("scale", "servers 2\ndrain 0"),
    ],
)
def test_what_makes_no_sense(name: str, text: str) -> None:
    tree = FakeTree()
    assert code_of(lambda: write(tree, name, text)) == errno.EINVAL
    assert tree.told == []


def test_a_command_is_one_write() -> None:
    tree = FakeTree()
    writing = folder_of(tree).child("pause").open_for_writing()
    writing.truncate(0)
    for code, attempt in (
        (errno.EINVAL, lambda: writing.write(1, b"1")),
        (errno.EINVAL, lambda: writing.truncate(1)),
        (errno.EFBIG, lambda: writing.write(0, b"1" * 4097)),
        (errno.EINVAL, lambda: writing.write(0, b"\xff")),
    ):
        assert code_of(attempt) == code
    assert code_of(folder_of(tree).child("state").open_for_writing) == errno.EROFS
    assert tree.told == []


@pytest.mark.parametrize(
    ("refusal", "code"),
    [
        (ScaleError("another one is under way", busy=True), errno.EBUSY),
        (ScaleError("it has no more servers"), errno.EPERM),
        (PermissionError("not yours"), errno.EACCES),
    ],
)
def test_what_the_launcher_refuses(refusal: Exception, code: int) -> None:
    tree = FakeTree()
    tree.owner.refuses = refusal
    with pytest.raises(OSError, match=str(refusal)) as caught:
        write(tree, "scale", "workers 2")
    assert caught.value.errno == code


def test_a_change_is_done_when_readers_see_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Server 0 hears of it later than the launcher."""
    told = [(2, 1), (3, 1), (3, 2), (9, 9)]
    reader: Any = SimpleNamespace(address="a", members=lambda: told.pop(0))
    server = SimpleNamespace(address="a", secret="", secret_file="")
    log = SimpleNamespace(running=True, control="door", addresses=["a"])
    outcome = {"workers": {"text": "w", "now": 3}, "servers": {"text": "s", "shares": {0: 1, 1: 2}}}
    for name, made in {
        "find_server": server, "logged_jobs": [log], "ask_launcher": outcome
    }.items():  # fmt: skip
        monkeypatch.setattr(f"tensorwire.files.owner.{name}", lambda *_, made=made: made)
    assert JobOwner(reader).scale({}, 1.0) == "w\ns\n"
    assert told == [(9, 9)]


@pytest.mark.parametrize(
    ("log", "error"),
    [
        pytest.param({"addresses": ["127.0.0.1:1"]}, PeerLostError, id="replaced"),
        pytest.param({"addresses": ["127.0.0.1:2"]}, PermissionError, id="of-another"),
        pytest.param({"addresses": ["127.0.0.1:1"], "running": False}, PermissionError, id="over"),
    ],
)
def test_who_writes_first_while_server_0_is_replaced(
    log: dict[str, Any], error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its user is told that it is gone, and not that the job is another's."""
    logged = SimpleNamespace(**{"running": True, **log})
    monkeypatch.setattr("tensorwire.files.owner.find_server", lambda _: None)
    monkeypatch.setattr("tensorwire.files.job.logged_jobs", lambda: [logged])
    with pytest.raises(error):
        JobOwner(SimpleNamespace(address="127.0.0.1:1")).first()  # type: ignore[arg-type]


def test_who_reads_while_server_0_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """A successor that listens, and has not written yet by what secret it is read."""
    with Node("server-0", secret=b"s" * 32) as server:
        logged = SimpleNamespace(running=True, addresses=[server.address])
        monkeypatch.setattr("tensorwire.files.job.logged_jobs", lambda: [logged])
        with pytest.raises(PeerLostError, match="another server takes its place"):
            JobReader(server.address)
        monkeypatch.setattr("tensorwire.files.job.logged_jobs", list)
        with pytest.raises(PermissionError, match="tensorwire ls --save-secret"):
            JobReader(server.address)


def test_parameters_that_nobody_can_write() -> None:
    """Parameters that worker 0 makes, and buffers that each worker keeps for itself."""
    spec = SimpleNamespace(optimizer=AVERAGE_ONLY)
    store: Any = SimpleNamespace(layout=SimpleNamespace(spec=spec))
    with pytest.raises(UnavailableError, match="worker 0 applies this optimizer"):
        JobOwner(None).write(store, 3, {})  # type: ignore[arg-type]
    tensor: Any = SimpleNamespace(spec=TensorSpec("b", "float32", (3,), "constant"))
    with pytest.raises(OSError, match="frozen parameter, or a buffer") as caught:
        DraftWriting(Drafts(store), tensor, bytes, "params/b.npy")
    assert caught.value.errno == errno.EROFS


def test_drafts() -> None:
    """A file begins with the present values, or empty; another pause finds nothing of it."""
    held: list[int | None] = [None]
    tensors = [TensorSpec("a", "float32", (3,)), TensorSpec("b", "float32", (2,))]
    store: Any = SimpleNamespace(
        held_version=lambda: held[0], layout=SimpleNamespace(spec=SimpleNamespace(tensors=tensors))
    )
    drafts, made = Drafts(store), []
    owner: Any = SimpleNamespace(write=lambda *told: made.append(told))
    a: Any = SimpleNamespace(index=0, spec=tensors[0])
    whole = npy_header("float32", (3,)) + np.arange(3, dtype=np.float32).tobytes()

    def writing() -> DraftWriting:
        return DraftWriting(drafts, a, lambda: whole, "params/a.npy")

    assert code_of(writing) == errno.EROFS
    held[0] = 7
    file = writing()
    assert file.read(0, 10) is None
    assert file.write(len(whole) - 4, np.float32(9).tobytes()) == 4
    assert file.read(0, 1000) == whole[:-4] + np.float32(9).tobytes()
    assert drafts.names == ["a"]
    assert code_of(lambda: drafts.commit(owner, 8, False, "commit")) == errno.ESTALE
    drafts.commit(owner, 7, False, "commit")
    ((_, version, values),) = made
    assert version == 7
    assert values.keys() == {0}
    assert values[0].tobytes() == np.array([0, 1, 9], np.float32).tobytes()
    assert drafts.names == []
    assert code_of(lambda: drafts.commit(owner, 7, False, "commit")) == errno.EBUSY
    file = writing()
    file.truncate(0)
    file.write(len(whole), b"")
    file.write(0, whole)
    assert code_of(lambda: file.write(5000, b"1")) == errno.EFBIG
    assert code_of(lambda: file.truncate(5000)) == errno.EFBIG
    file.truncate(len(whole) - 1)
    assert code_of(lambda: drafts.commit(owner, 7, False, "commit")) == errno.ENODATA
    held[0] = 9  # another pause
    assert file.read(0, 1) is None
    assert code_of(lambda: file.write(0, b"x")) == errno.ESTALE
    assert code_of(lambda: file.truncate(0)) == errno.ESTALE
    file = writing()
    file.write(0, b"x")
    assert file.read(0, 1000) == b"x" + whole[1:]
    held[0] = None
    assert code_of(lambda: file.write(0, b"x")) == errno.EROFS
    assert code_of(lambda: drafts.commit(owner, 9, False, "commit")) == errno.EROFS


def test_what_is_written_and_not_committed_is_not_lost_without_a_word() -> None:
    tree = FakeTree()
    tree.uncommitted = ["a"]
    assert code_of(lambda: write(tree, "pause", "0")) == errno.EBUSY
    assert tree.told == []
    tree.uncommitted = []
    write(tree, "pause", "0")
    assert tree.told == ["go on"]


def test_a_snapshot_is_held_as_often_as_it_is_taken() -> None:
    """And it has the optimizer's state if one of them asked for it."""
    closed: list[Any] = []

    def snapshot(store: int, *, whole: bool) -> Any:
        made = SimpleNamespace(version=5, whole=whole)
        made.close = lambda: closed.append(made)
        return made

    tree = Tree(SimpleNamespace(snapshot=snapshot, address="127.0.0.1:1"))  # type: ignore[arg-type]
    assert [tree.take(whole=whole) for whole in (False, True, False)] == [5, 5, 5]
    assert [each.whole for each in closed] == [False, False]
    assert tree._snapshots[0, 5].whole
    tree.release(5)
    tree.release(5)
    assert tree.taken() == [(0, 5)]
    tree.release(5)
    assert tree.taken() == []
    assert [each.whole for each in closed] == [False, False, True]
    assert code_of(lambda: tree.release(5)) == errno.ENOENT
