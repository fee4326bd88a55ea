"""Messages of other processes, at every socket and file where they are parsed."""

import contextlib
import fcntl
import json
import os
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_control import SECRET, Launcher, connect

from tensorwire.errors import UnavailableError
from tensorwire.files.worker_process import Writers
from tensorwire.jobs.asking import ScaleError, ask_launcher
from tensorwire.jobs.door import knock, proof_of, short_path
from tensorwire.jobs.job_file import running_servers
from tensorwire.jobs.job_log import logged_jobs
from tensorwire.launch.keeper import Keeper, KeeperError, make_pair
from tensorwire.launch.output import FirstLine
from tensorwire.launch.reports import failure_in
from tensorwire.launch.serve import open_door
from tensorwire.membership.entry import enter_job
from tensorwire.outside import parse_json

NAMES = (
    "ask", "workers", "servers", "count", "drain", "proof", "cancel", "rank", "do", "text", "keep",
    "about", "drop", "leave", "offer", "saving", "took", "at", "number", "switched", "kind",
    "message", "nonce", "says", "done", "error", "busy", "environment", "term", "holder", "refused",
    "what", "started", "pid",
)  # fmt: skip
LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 3), st.integers(), st.floats(), st.text(max_size=5),
    st.sampled_from([1.0, 10**30, "PROOF", "open", "commit", "\ud800", "\0"]),
)  # fmt: skip
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=4)
    ),
    max_leaves=8,
)
MESSAGES = st.one_of(
    st.binary(min_size=1, max_size=60),
    VALUES.map(lambda value: json.dumps(value).encode()),
    st.sampled_from([b"[" * 4096, b'{"rank":' * 500, b'{"rank": 1, "rank": 1}', b"1" * 5000]),
    st.just(b'{"ask": {"workers": {"count": 2, "drain": [1.0]}}, "proof": "PROOF"}'),
    st.just(b'{"ask": {"workers": {"count": true}}, "proof": "PROOF"}'),
)
FAST = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))


class Named(TypedDict, total=False):
    name: str


@dataclass
class Form:
    number: int
    names: list[str]
    share: float = 0.5
    more: dict[str, int] | None = None
    anything: Any = None
    flag: bool = False


def test_what_has_the_form() -> None:
    text = b'{"number": 3, "names": ["a"], "share": 1, "more": {"b": 2}, "anything": [1.5, null]}'
    found = parse_json(text, Form)
    assert found == Form(3, ["a"], 1.0, {"b": 2}, [1.5, None])
    assert type(found.share) is float
    assert parse_json("{}", Named) == {}
    assert parse_json('{"name": "n"}', Named) == {"name": "n"}
    assert parse_json("[18446744073709551615, -9223372036854775808]", list[int])[0] == 2**64 - 1


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (b"", "Expecting value"),
        (b"\xff", "decode"),
        (b"[" * 4096, "nested too deeply"),
        (b"[" * 40 + b"]" * 40, "nested too deeply"),
        (b"[" * 70000, "longer than 65536 bytes"),
        (b'{"number": 1.0, "names": []}', "^number is 1.0, not a whole number"),
        (b'{"number": true, "names": []}', "^number is True, not a whole number"),
        (b'{"number": null, "names": []}', "^number is None, not a whole number"),
        (b'{"number": 1}', "it has no 'names'"),
        (b'{"number": 1, "names": {}}', "names is {}, not a list"),
        (b'{"number": 1, "names": [7]}', r"names\[0\] is 7, not text"),
        (b'{"number": 1, "names": [], "more": {"a": 1.0}}', "more.a is 1.0, not a whole number"),
        (b'{"number": 1, "names": [], "more": 7}', "more is 7, not an object"),
        (b'{"number": 1, "names": [], "flag": 1}', "flag is 1, not true or false"),
        (b'{"number": 1, "names": [], "other": 1}', "'other', which is unknown"),
        (b'{"number": 1, "number": 2, "names": []}', "a key twice"),
        (b'{"number": 18446744073709551616, "names": []}', "64 bits do not hold"),
        (b'{"number": %s, "names": []}' % (b"9" * 5000), "64 bits do not hold"),
        (b'{"number": 1, "names": [], "share": NaN}', "NaN is no number"),
        (b'{"number": 1, "names": [], "share": 1e999}', "1e999 is no number"),
        (b"7", "it is 7, not an object"),
    ],
)
def test_what_has_not(text: bytes, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        parse_json(text, Form)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    tmp_path.chmod(0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path


@pytest.fixture
def launcher(folder: Path) -> Iterator[Launcher]:
    made = Launcher()
    yield made
    made.over.set()
    made.thread.join(10)


@FAST
@given(message=MESSAGES)
def test_a_launcher_answers_everything(launcher: Launcher, message: bytes) -> None:
    nonce: list[str] = []
    with connect(launcher, nonce) as channel:
        channel.send(message.replace(b"PROOF", proof_of(SECRET, nonce[0]).encode()))
        launcher.handlers["workers"].outcome = launcher.handlers["servers"].outcome = {}
        answer = json.loads(channel.recv(1 << 16))
        while "says" in answer:
            answer = json.loads(channel.recv(1 << 16))
        assert answer == {"done": {}} or answer["error"]
    assert launcher.thread.is_alive()


@FAST
@given(message=MESSAGES)
def test_a_supervisor_answers_everything(folder: Path, message: bytes) -> None:
    door = open_door(folder / "door", print)
    try:
        with knock(door.path, 10.0) as visitor:
            assert not list(door.messages())
            visitor.send(message)
            for client, question in door.messages():
                assert question is not None
                assert type(question["rank"]) is int
                client.refuse("none is wanted")
            assert json.loads(visitor.recv(1 << 16))["error"]
    finally:
        door.close()


@FAST
@given(message=MESSAGES)
def test_a_keeper_takes_it_or_says_that_it_cannot(message: bytes) -> None:
    keeper, (ours, theirs) = Keeper(), make_pair()
    keeper.attach(ours)
    with theirs, contextlib.suppress(KeeperError):
        theirs.send(message)
        keeper.read()
    assert type(keeper.took) is int
    assert keeper.address == ""
    keeper.close()


class Place:
    class place:
        rank, servers = 1, ("127.0.0.1:1",)


@FAST
@given(message=MESSAGES)
def test_a_file_worker_answers_everything(folder: Path, message: bytes) -> None:
    writers = Writers(Place())  # type: ignore[arg-type]
    try:
        (path,) = folder.rglob("writers-*")
        with knock(path, 10.0) as writer:
            writers.serve(10)
            writer.send(message)
            writers.serve(10)
            assert json.loads(writer.recv(1 << 16))["error"]
    finally:
        writers.close()


@FAST
@given(message=MESSAGES)
def test_who_asks_gets_an_error(
    folder: Path, monkeypatch: pytest.MonkeyPatch, message: bytes
) -> None:
    """A program that took a socket's name, of the same user, says something else."""
    (folder / "taken").unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        with short_path(folder / "taken") as short:
            listener.bind(short)
        listener.listen()

        def hear(question: bytes = b"") -> None:
            came, _ = listener.accept()
            with came:
                came.send(message)
                came.recv(1000)

        for ask in (ask_the_launcher, ask_the_supervisor):
            thread = threading.Thread(target=hear)
            thread.start()
            with contextlib.suppress(UnavailableError, ScaleError, RuntimeError):
                ask(str(folder / "taken"))
            thread.join(10)
            assert not thread.is_alive()


def ask_the_launcher(path: str) -> None:
    ask_launcher(path, SECRET, {}, 10.0, lambda text: None)


def ask_the_supervisor(path: str) -> None:
    environ = {"TENSORWIRE_SUPERVISOR": path, "TENSORWIRE_RANK": "0"}
    enter_job(environ, 10.0)
    os.close(int(environ["TENSORWIRE_DESCRIPTOR_STORE"]))


@FAST
@given(message=MESSAGES)
def test_files_that_make_no_sense_name_no_job(folder: Path, message: bytes) -> None:
    (folder / "tensorwire").mkdir(mode=0o700, exist_ok=True)
    paths = [folder / "tensorwire" / name for name in ("server-1-aa", "job-1-aa")]
    for path in paths:
        path.write_bytes(message)
    with paths[0].open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert running_servers() == []
    assert [job.members for job in logged_jobs()] == [[]]


@FAST
@given(message=MESSAGES)
def test_a_report_that_makes_no_sense_is_shown(message: bytes) -> None:
    told = FirstLine(1 << 20)
    told.feed(message.replace(b"\n", b" ") + b"\n")
    failure = failure_in(told)
    assert failure is not None
    assert failure.kind == "a report that cannot be read"
