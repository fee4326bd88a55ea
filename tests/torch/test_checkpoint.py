"""The file of a checkpoint: undamaged, complete, of the right kind, or an error that says what."""

import collections
import contextlib
import copy
import errno
import os
import random
import resource
import stat
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tensorwire.torch import archive, checkpoint


class Kept:
    def __init__(self, state: Any = None) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


class Point(NamedTuple):
    x: int
    y: int


def some(value: float = 0.5, size: int = 300) -> dict[str, Any]:
    return {"weight": torch.full((size,), value), "more": [torch.zeros(40), 3, "x"]}


def save(path: Path, value: float = 0.5, size: int = 300) -> None:
    kept = {"model": Kept(some(value, size)), "best": {"accuracy": 0.25, "at": [3]}}
    checkpoint.save(path, kept, [], 2, 7)


def fill(path: Path, mapped: bool = False, **kept: Any) -> int:
    loaded = checkpoint.load(path, kept, [], contextlib.nullcontext, 7, mapped)
    assert loaded is not None
    assert loaded.position is None
    return loaded.epochs


def load(path: Path, mapped: bool = False) -> tuple[int, Any]:
    into, best = Kept(), {"other": 1}
    done = fill(path, mapped, model=into, best=best)
    assert best == {"accuracy": 0.25, "at": [3]}
    return done, into.state


def same(state: Any, value: float = 0.5) -> bool:
    """Tells whether it is `some(value)`, of any size."""
    weight, (zeros, *more) = state["weight"], state["more"]
    whole = bool((weight == value).all()) and torch.equal(zeros, torch.zeros(40))
    return whole and more == [3, "x"]


@pytest.mark.slow
def test_a_flipped_bit_changes_nothing_or_is_an_error(tmp_path: Path) -> None:
    """Named for two bugs: a storage was loaded damaged; one was left as the memory had been.

    torch compares no checksum of a storage, and reads none whose record has a folder's attribute.
    """
    path = tmp_path / "checkpoint"
    save(path)
    whole = path.read_bytes()
    entry = whole.index(b"PK\x01\x02")
    attributes = [entry + 38, whole.index(b"PK\x01\x02", whole.index(b"byteorderPK")) + 38]
    flips = [(at, bit) for at in attributes for bit in range(8)]
    rng = random.Random(0)
    flips += [(at, rng.randrange(8)) for at in range(len(whole))]
    errors = []
    for at, bit in flips:
        damaged = bytearray(whole)
        damaged[at] ^= 1 << bit
        path.write_bytes(damaged)
        try:
            done, state = load(path, mapped=bool(at % 2))
        except ValueError as error:
            errors.append(str(error))
        else:
            assert done == 2, f"bit {bit} of byte {at}"
            assert same(state), f"bit {bit} of byte {at}"
    # The rest is padding, times, and what is noted twice.
    assert len(errors) > 0.6 * len(whole)
    assert [text for text in errors if not text.startswith(str(path))] == []


@pytest.mark.parametrize("mapped", [False, True])
def test_what_is_damaged_is_named(tmp_path: Path, mapped: bool) -> None:
    path = tmp_path / "checkpoint"
    save(path)
    whole = path.read_bytes()
    damaged = whole.replace(torch.full((9,), 0.5).numpy().tobytes(), b"\x7f" * 36, 1)
    path.write_bytes(damaged)
    with pytest.raises(ValueError, match=r"checkpoint is damaged: .*CRC-32.*data/0.*earlier"):
        load(path, mapped)
    path.write_bytes(whole[:-100])
    with pytest.raises(ValueError, match=r"damaged: of \d+ bytes, the last are not the end"):
        load(path, mapped)


HEAD = b'{"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'


def write_older_form(path: Path) -> None:
    torch.save({"w": torch.ones(2)}, path, _use_new_zipfile_serialization=False)


def write_zip(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("readme", "nothing")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty; a checkpoint is a file that job.save wrote"),
        (
            "learning_rate: 0.1 # für alle\n".encode() * 9,
            "is a text that begins with 'learning_rate: 0.1 #",
        ),
        (
            len(HEAD).to_bytes(8, "little") + HEAD + bytes(4),
            "is a safetensors file; a checkpoint is",
        ),
        (write_older_form, "torch.save wrote in its older form"),
        (write_zip, "is a zip archive that torch.save did not write"),
        ({"w": torch.ones(2)}, "something else that torch.save wrote: with 'w'; a checkpoint is"),
        (torch.ones(2), "something else that torch.save wrote: Tensor"),
        ({"w": Kept()}, "holds other Python objects than tensors"),
        ({"tensorwire": {"format": 9}}, "it has the format 9, this version reads 1"),
        (bytes(range(128, 256)), "is something unknown that begins with b'\\x80\\x81"),
        (os.mkfifo, "is no regular file"),
    ],
)
def test_a_file_that_is_no_checkpoint(tmp_path: Path, content: Any, words: str) -> None:
    path = tmp_path / "thing"
    if callable(content):
        content(path)
    elif isinstance(content, bytes):
        path.write_bytes(content)
    else:
        torch.save(content, path)
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        load(path)
    assert str(path) in str(caught.value)
    assert words in str(caught.value)
    assert "weights_only=False" not in str(caught.value), "advice to run what a file says"


def test_a_folder_and_no_file(tmp_path: Path) -> None:
    (tmp_path / "other").touch()
    with pytest.raises(ValueError, match="is a directory without checkpoints, and has other"):
        load(tmp_path)
    with pytest.raises(FileNotFoundError, match="missing"):
        load(tmp_path / "missing")
    with pytest.raises(IsADirectoryError, match="cannot save the checkpoint: there is a directory"):
        save(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"cannot save the checkpoint.*missing/checkpoint"):
        save(tmp_path / "missing/checkpoint")


def test_a_device_is_not_replaced(tmp_path: Path) -> None:
    """Named for a bug: saving to /dev/null, as root, replaced it."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    with pytest.raises(OSError, match="no regular file, which a checkpoint would replace"):
        save(fifo)
    assert stat.S_ISFIFO(fifo.stat().st_mode)


def test_what_cannot_be_loaded_is_not_saved(tmp_path: Path) -> None:
    """Named for a bug: it was saved, and the error came when it was needed."""
    path = tmp_path / "checkpoint"
    with pytest.raises(TypeError, match=r"state_dict\(\) of sampler holds .*Kept, which job.load"):
        checkpoint.save(path, {"sampler": Kept({"of": Kept()})}, [], 0, 0)
    assert list(tmp_path.iterdir()) == []


# ---- plain values

# Not b"", which torch does not load.
SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.complex_numbers(), st.text(),
    st.binary(min_size=1, max_size=20),
)  # fmt: skip
KEYS = st.one_of(st.none(), st.integers(), st.text(), st.tuples(st.integers(), st.text()))
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(KEYS, inner, max_size=3),
        st.sets(st.integers(), max_size=1),
    ),
    max_leaves=8,
)


@given(st.dictionaries(KEYS, VALUES, max_size=4), st.lists(VALUES, max_size=4))
def test_plain_values_come_back(best: dict[Any, Any], history: list[Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "checkpoint"
        checkpoint.save(path, {"best": best, "history": history}, [], 0, 7)
        into: tuple[dict[Any, Any], list[Any]] = {"old": 1}, [1, 2]
        fill(path, best=into[0], history=into[1])
    assert repr(into) == repr((best, history))  # of the same classes; and nan is nan


@pytest.mark.parametrize("mapped", [False, True])
def test_the_very_container_is_filled(tmp_path: Path, mapped: bool) -> None:
    """Also one of a class of its own; tensors in it are this process's own."""
    path = tmp_path / "checkpoint"
    weight = torch.arange(6.0)
    best = collections.defaultdict(list, {"weights": [weight[:2]], "score": 0.5})
    checkpoint.save(path, {"best": best, "counts": collections.Counter("abb")}, [], 0, 7)
    weight.zero_()
    assert path.stat().st_size < 3000, "the file has more than the tensors"
    best.update(score=0.1, later=1)  # type: ignore[arg-type]
    counts = collections.Counter("z")
    fill(path, mapped, best=best, counts=counts)
    path.write_bytes(bytes(path.stat().st_size))
    assert list(best) == ["weights", "score"]
    assert best["score"] == 0.5  # type: ignore[comparison-overlap]
    assert best["weights"][0].tolist() == [0.0, 1.0]
    assert best["new"] == []
    assert counts == {"a": 1, "b": 2}


def test_what_is_in_a_container_stays_the_same_object(tmp_path: Path) -> None:
    """Named for a bug: the script's own name for it saw nothing of what was loaded."""
    path = tmp_path / "checkpoint"
    center, losses, grown = torch.ones(4), {"last": 0.5}, torch.ones(2)
    checkpoint.save(
        path, {"state": {"center": center, "losses": losses, "grown": grown, "all": [center]}},
        [], 0, 7,
    )  # fmt: skip
    center, losses, other = torch.zeros(4, requires_grad=True), {"last": 0.0, "more": 1}, [3]
    state = {"gone": 1, "center": center, "losses": losses, "grown": torch.ones(3), "all": other}
    fill(path, state=state)
    assert state["center"] is center
    assert state["losses"] is losses
    assert state["all"] is other
    assert center.tolist() == [1.0] * 4
    assert losses == {"last": 0.5}
    assert state["grown"].shape == (2,)  # type: ignore[union-attr, attr-defined]
    assert other[0].tolist() == [1.0] * 4  # type: ignore[attr-defined]
    assert "gone" not in state


def test_tensors_that_cannot_be_filled_are_replaced() -> None:
    sparse, one = torch.eye(2).to_sparse(), torch.ones(1)
    state = {"sparse": sparse, "expanded": one.expand(3)}
    checkpoint.fill(state, {"sparse": (2 * torch.eye(2)).to_sparse(), "expanded": torch.zeros(3)})
    assert state["sparse"].to_dense().tolist() == [[2.0, 0.0], [0.0, 2.0]]
    assert state["expanded"].tolist() == [0.0] * 3
    assert one.tolist() == [1.0]


def itself() -> list[Any]:
    made: list[Any] = []
    made.append({"more": made})
    return made


def deep() -> list[Any]:
    made: list[Any] = []
    for _ in range(100_000):
        made = [made]
    return made


REFUSED: dict[str, tuple[Any, str]] = {
    "numpy": ({"accuracy": np.float64(0.5)}, r"best holds numpy.*float\(x\) makes one"),
    "array": ({"weights": np.ones(2)}, "best holds numpy"),
    "object": ([Kept()], "best holds .*Kept, which job.load would refuse"),
    "function": ({"of": lambda: 0}, "best holds what cannot be saved: .*lambda"),
    "itself": (itself(), "best contains itself, or is too deep"),
    "deep": (deep(), "best contains itself, or is too deep"),
    "named tuple": ({"at": Point(1, 2)}, "best holds .*Point"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_plain_values_that_cannot_be_loaded_are_not_saved(tmp_path: Path, name: str) -> None:
    value, words = REFUSED[name]
    with pytest.raises(TypeError, match=words):
        checkpoint.save(tmp_path / "checkpoint", {"best": value}, [], 0, 0)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("thing", [3, 0.5, "x", None, (1, 2), {1}, torch.ones(2), np.ones(2)])
def test_what_cannot_be_filled_cannot_be_kept(thing: Any) -> None:
    with pytest.raises(TypeError, match=r"as in job\.track\(best=\{'value': 0\.5\}\)"):
        checkpoint.check_trackable("best", thing)


MADE: dict[str, Any] = {"dict": {"w": 1}, "list": [1], "object": Kept({"w": 1})}


@pytest.mark.parametrize("here", MADE)
@pytest.mark.parametrize("there", MADE)
def test_another_kind_under_a_name(tmp_path: Path, here: str, there: str) -> None:
    """Else a scheduler, for example, would take whatever dict there is."""
    path, first = tmp_path / "checkpoint", Kept({"old": 1})
    checkpoint.save(path, {"first": Kept({"new": 1}), "thing": MADE[there]}, [], 0, 7)
    mine = copy.deepcopy(MADE[here])
    if here == there:
        fill(path, first=first, thing=mine)
        return
    words = {"dict": "a dict", "list": "a list", "object": "what state_dict"}
    with pytest.raises(ValueError, match=f"thing is {words[there]}.*and not {words[here]}"):
        fill(path, first=first, thing=mine)
    assert first.state == {"old": 1}, "what comes before it was loaded"


@pytest.mark.parametrize(
    "position",
    [
        3,
        {"epoch": 1, "passes": {}},
        {"epoch": "1", "passes": {}, "over": {}},
        {"epoch": 1, "passes": {"0": [1, 2]}, "over": {}},
        {"epoch": 1, "passes": {}, "over": {"0": "1"}},
    ],
)
def test_a_position_that_cannot_be_one(tmp_path: Path, position: Any) -> None:
    path, into = tmp_path / "checkpoint", Kept()
    head = {"format": 1, "epochs": 2, "seed": 7, "position": position}
    torch.save({"model": some(), "tensorwire": head}, path)
    with pytest.raises(ValueError, match="does not tell where in its data it was"):
        fill(path, model=into)
    assert into.state is None, "nothing was loaded"


def test_a_checkpoint_that_knows_no_plain_values(tmp_path: Path) -> None:
    path, into = tmp_path / "checkpoint", Kept()
    head = {"format": 1, "epochs": 2, "seed": 7}
    torch.save({"model": some(), "tensorwire": head}, path)
    assert fill(path, model=into) == 2
    assert same(into.state)
    with pytest.raises(ValueError, match=r"has \['model'\], the job tracks \['best', 'model'\]"):
        fill(path, model=into, best={})


@pytest.mark.parametrize("plain", [3, "best", ["nowhere"], [["best"]], ["best", "weight"], [None]])
def test_a_file_that_does_not_tell_what_is_plain(tmp_path: Path, plain: Any) -> None:
    path = tmp_path / "checkpoint"
    head = {"format": 1, "epochs": 2, "seed": 7, "plain": plain}
    torch.save({"best": {}, "weight": torch.ones(2), 3: 4, "tensorwire": head}, path)
    with pytest.raises(ValueError, match="does not tell what is plain in it"):
        fill(path, best={}, weight=[])
    head["plain"] = ["best"]
    torch.save({"best": {}, "weight": torch.ones(2), 3: 4, "tensorwire": head}, path)
    with pytest.raises(ValueError, match=r"has \['3', 'best', 'weight'\]"):
        fill(path, best={}, weight=[])


@contextlib.contextmanager
def small_files(folder: Path) -> Iterator[Path]:
    """No file of this process may be larger than 64 KiB."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64 << 10, before[1]))
    try:
        yield folder
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    where = folder / "disk"
    where.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64k", "tensorwire-test", str(where)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("no right to mount a file system of 64 KiB")
    try:
        yield where
    finally:
        subprocess.run(["umount", str(where)], check=True)


@pytest.mark.parametrize("limited", [small_files, small_disk])
def test_a_full_disk(tmp_path: Path, limited: Any, capfd: pytest.CaptureFixture[str]) -> None:
    """Named for a bug: it was torch's RuntimeError, with no path and no reason."""
    with limited(tmp_path) as folder:
        path = folder / "checkpoint"
        save(path, 1.0)
        with pytest.raises(OSError, match=r"cannot save the checkpoint: .*older file st") as caught:
            save(path, 2.0, size=100_000)
        assert caught.value.filename == str(path)
        assert caught.value.errno
        assert list(folder.iterdir()) == [path]
        assert same(load(path)[1], 1.0)
    assert capfd.readouterr().err == ""


def test_the_target_of_a_link_is_replaced(tmp_path: Path) -> None:
    """Named for a bug: the link became a file, and its target stayed as it was."""
    (tmp_path / "far/deep").mkdir(parents=True)
    target, link = tmp_path / "far/deep/real", tmp_path / "checkpoint"
    link.symlink_to("far/hop")
    (tmp_path / "far/hop").symlink_to("deep/real")
    for value in (1.0, 2.0):  # the target is made, then replaced
        save(link, value)
        assert link.is_symlink()
        assert same(load(link)[1], value)
        assert not target.is_symlink()
        assert os.listdir(target.parent) == ["real"]
    loop = tmp_path / "loop"
    loop.symlink_to("loop")
    with pytest.raises(OSError, match="a link that leads to itself"):
        save(loop)


def test_a_replaced_file_keeps_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    save(path)
    umask = os.umask(0o077)
    os.umask(umask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~umask
    path.chmod(0o640)
    save(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


def test_parts_that_were_left_are_removed_and_no_others(tmp_path: Path) -> None:
    path = tmp_path / "check[1].point"
    save(path, 1.0)
    left, others = tmp_path / f".{path.name}.{'0a' * 8}.part", tmp_path / ".other.part"
    for use in (lambda: save(path, 2.0), lambda: load(path)):
        left.write_bytes(b"half")
        others.write_bytes(b"somebody's")
        live: list[Path] = []

        def slowly(file: Any, use: Any = use, live: list[Path] = live) -> None:
            live += [p for p in tmp_path.glob(".*.part") if p not in (left, others)]
            use()  # meanwhile
            file.write(b"complete")

        archive.replace(tmp_path / "beside" / ".." / path.name, slowly)
        assert path.read_bytes() == b"complete"
        assert len(live) == 1
        assert sorted(tmp_path.iterdir()) == sorted([path, others])
        save(path, 1.0)


def test_a_part_that_somebody_else_made_is_not_waited_for(tmp_path: Path) -> None:
    """Named for a bug: a pipe with the name of a part held up `save` and `load` for ever."""
    path, kept = tmp_path / "checkpoint", tmp_path / "kept"
    kept.write_bytes(b"not mine to remove")
    parts = [tmp_path / f".checkpoint.{digit * 16}.part" for digit in "012"]
    os.mkfifo(parts[0])
    parts[1].symlink_to(kept)
    parts[2].mkdir()
    save(path)
    assert same(load(path)[1])
    assert kept.read_bytes() == b"not mine to remove"
    assert all(os.path.lexists(part) for part in parts)


def test_where_no_file_can_be_locked_parts_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that another process writes cannot be told from one that was left."""

    def refuse(descriptor: int) -> bool:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(archive, "try_lock", refuse)
    path, other = tmp_path / "checkpoint", tmp_path / f".checkpoint.{'0a' * 8}.part"
    other.write_bytes(b"half")
    save(path)
    assert same(load(path)[1])
    assert sorted(tmp_path.iterdir()) == sorted([path, other])


def test_the_longest_name(tmp_path: Path) -> None:
    path = tmp_path / ("n" * 255)
    for value in (1.0, 2.0):
        save(path, value)
    assert same(load(path)[1], 2.0)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("mapped", [False, True])
def test_a_damaged_archive_before_a_whole_one(tmp_path: Path, mapped: bool) -> None:
    """Named for a bug: zipfile found the last archive undamaged, and torch read the first."""
    path = tmp_path / "checkpoint"
    save(path)
    whole = path.read_bytes()
    damaged = bytearray(whole)
    damaged[whole.index(bytes(some()["weight"].numpy().tobytes()))] ^= 1
    path.write_bytes(damaged + whole)
    with pytest.raises(ValueError, match=r"is damaged: its first bytes are of no record\. Copy"):
        load(path, mapped)


PROGRAM = """
import os, signal, sys
sys.path.insert(0, {tests!r})
from pathlib import Path
from test_checkpoint import load, same, save
from tensorwire.torch import archive
path = Path({path!r})
"""


def run(tmp_path: Path, program: str) -> str:
    head = PROGRAM.format(tests=str(Path(__file__).parent), path=str(tmp_path / "checkpoint"))
    command = [sys.executable, "-c", head + program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


KILLED = """
calls = ("realpath", "_new_part", "try_lock", "write", "fchmod", "fsync", "replace", "sync_folder")
for when in calls:
    for after in (False, True):
        save(path, 1.0)
        if not (pid := os.fork()):
            place = {"fchmod": os, "fsync": os, "replace": Path, "realpath": os.path}
            name, place = when, place.get(when, archive)
            if when == "write":
                import io
                from tensorwire.torch import checkpoint
                name, place = "write", checkpoint._Output
            true = getattr(place, name)
            def die(*arguments):
                result = true(*arguments) if after else None
                os.kill(os.getpid(), signal.SIGKILL)
                return result
            setattr(place, name, die)
            save(path, 2.0)
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        assert status == signal.SIGKILL, (when, after, status)
        left = len(os.listdir(path.parent)) - 1
        _, state = load(path)
        complete = when == "sync_folder" or (when, after) == ("replace", True)
        assert same(state, 2.0 if complete else 1.0), (when, after)
        assert os.listdir(path.parent) == [path.name], (when, after)
        print(when, after, left)
"""


@pytest.mark.slow
def test_a_kill_at_any_moment_of_a_save(tmp_path: Path) -> None:
    """The older checkpoint can be loaded, and the part that was left is gone then."""
    lines = run(tmp_path, KILLED).splitlines()
    assert len(lines) == 16
    assert sum(line.endswith("1") for line in lines) >= 8, "kills came before there was a part"


TOGETHER = """
children = []
for value in (1.0, 2.0, 3.0):
    if not (pid := os.fork()):
        os.getpid = lambda: 77  # as in two containers that share a folder
        for _ in range(10):
            save(path, value, size=30_000)
        os._exit(0)
    children.append(pid)
seen = set()
while children:
    pid, status = os.waitpid(-1, os.WNOHANG)
    assert status == 0
    if pid:
        children.remove(pid)
    try:
        _, state = load(path)
    except FileNotFoundError:
        continue
    value = float(state["weight"][0])
    assert same(state, value)
    seen.add(value)
assert os.listdir(path.parent) == [path.name]
print(sorted(seen))
"""


def test_saves_at_a_time_to_one_path(tmp_path: Path) -> None:
    """Named for a bug: two jobs with one process number, as in containers, wrote one part.

    A process that loads meanwhile gets one of them, never a mixture, and nothing else is left.
    """
    assert run(tmp_path, TOGETHER) != "[]\n"


def test_a_part_that_is_not_locked_yet(tmp_path: Path) -> None:
    """Named for a bug: another process took it for one that was left, and this save failed."""
    children = []
    for _ in range(4):
        if not (pid := os.fork()):
            code = 1
            try:
                for _ in range(400):
                    archive.replace(
                        tmp_path / "checkpoint", lambda file: file.write(b"it") and None
                    )
                code = 0
            finally:
                os._exit(code)
        children.append(pid)
    assert [os.waitpid(pid, 0)[1] for pid in children] == [0] * 4
    assert os.listdir(tmp_path) == ["checkpoint"]
