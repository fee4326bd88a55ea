"""Requests at a launcher's control socket, and their answers."""

import json
import math
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tensorwire.cli.scale import scale
from tensorwire.errors import TimeoutError, UnavailableError
from tensorwire.jobs.asking import ScaleError, ask_launcher
from tensorwire.jobs.door import proof_of, short_path
from tensorwire.jobs.job_file import JobFile, RunningServer
from tensorwire.jobs.job_log import JobLog
from tensorwire.launch.scaling import Scaling

SECRET = b"of the job"


class Fake:
    """A handler; done when `outcome` is set, or refused when `why` is."""

    def __init__(self) -> None:
        self.outcome: dict[str, Any] | None = None
        self.why = self.cancelled = ""
        self.asked: Mapping[str, Any] = {}

    def check(self, asked: Mapping[str, Any]) -> None:
        if asked.get("count", 1) < 1:
            raise ScaleError("at least 1 is needed")

    def begin(self, asked: Mapping[str, Any], say: Callable[[str], None]) -> None:
        self.asked = asked
        say("it has begun")

    def tend(self) -> dict[str, Any] | None:
        if self.why:
            raise ScaleError(self.why)
        return self.outcome

    def cancel(self, why: str) -> None:
        self.cancelled = self.why = why


class Launcher:
    """A loop around the requests of a job."""

    def __init__(self) -> None:
        self.handlers = {"workers": Fake(), "servers": Fake()}
        self.reason, self.path = "", ""
        self.scaling = Scaling(self.handlers, lambda: self.reason, self.note)
        self.scaling.open(SECRET)
        self.over = threading.Event()
        self.thread = threading.Thread(target=self.run)
        self.thread.start()

    def note(self, what: str, **about: Any) -> None:
        assert what == "control"
        self.path = about["path"]

    def run(self) -> None:
        while not self.over.is_set():
            poll = select.poll()
            for descriptor in self.scaling.descriptors():
                poll.register(descriptor, select.POLLIN)
            self.scaling.tend({descriptor for descriptor, _ in poll.poll(10)})
        self.scaling.close()

    def ask(self, message: dict[str, Any], timeout_s: float = 20.0) -> dict[str, Any]:
        return ask_launcher(self.path, SECRET, message, timeout_s, lambda text: None)


@pytest.fixture
def launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Launcher]:
    tmp_path.chmod(0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    made = Launcher()
    yield made
    made.over.set()
    made.thread.join(10)
    assert not Path(made.path).exists()


def test_one_part_and_two(launcher: Launcher) -> None:
    launcher.handlers["workers"].outcome = {"workers": {"text": "one"}}
    launcher.handlers["servers"].outcome = {"servers": {"text": "two"}}
    said: list[str] = []
    asked = {"workers": {"count": 2}}
    found = ask_launcher(launcher.path, SECRET, asked, 20.0, said.append)
    assert (found, said) == ({"workers": {"text": "one"}}, ["it has begun"])
    found = launcher.ask({"workers": {"count": 2}, "servers": {"count": 3}})
    assert found == {"workers": {"text": "one"}, "servers": {"text": "two"}}
    assert launcher.handlers["servers"].asked == {"count": 3}


@pytest.mark.parametrize(
    ("message", "why"),
    [
        ({"workers": {"count": 0}}, "at least 1"),
        ({"masters": {"count": 1}}, "this job cannot change masters"),
        ({}, "cannot change nothing"),
        ({"workers": 3}, "the request is not valid"),
    ],
)
def test_what_is_refused(launcher: Launcher, message: dict[str, Any], why: str) -> None:
    with pytest.raises(ScaleError, match=why):
        launcher.ask(message)


def test_nothing_is_begun_where_one_part_cannot_be(launcher: Launcher) -> None:
    launcher.handlers["workers"].outcome = {"workers": {"text": "three workers"}}
    with pytest.raises(ScaleError, match="at least 1"):
        launcher.ask({"workers": {"count": 3}, "servers": {"count": 0}})
    assert not launcher.handlers["workers"].asked


def test_what_was_done_before_an_error_is_told(launcher: Launcher) -> None:
    launcher.handlers["workers"].outcome = {"workers": {"text": "three workers"}}
    launcher.handlers["servers"].why = "no server starts"
    with pytest.raises(ScaleError, match=r"no server starts \(done before: three workers\)"):
        launcher.ask({"workers": {"count": 3}, "servers": {"count": 2}})


def test_who_would_wait_for_ever(launcher: Launcher) -> None:
    launcher.handlers["workers"].outcome = {"workers": {"text": "one"}}
    assert launcher.ask({"workers": {"count": 1}}, math.inf) == {"workers": {"text": "one"}}


def test_a_job_that_ends(launcher: Launcher) -> None:
    launcher.reason = "the job is ending"
    with pytest.raises(ScaleError, match="the job is ending"):
        launcher.ask({"workers": {"count": 1}})
    launcher.reason = ""
    threading.Timer(0.2, lambda: setattr(launcher, "reason", "its last worker has left")).start()
    with pytest.raises(ScaleError, match="its last worker has left"):
        launcher.ask({"workers": {"count": 1}})


def test_one_at_a_time_and_one_that_is_too_late(launcher: Launcher) -> None:
    found: list[str] = []

    def ask() -> None:
        try:
            launcher.ask({"workers": {"count": 1}}, 1.0)
        except TimeoutError as error:
            found.append(str(error))

    first = threading.Thread(target=ask)
    first.start()
    while not launcher.handlers["workers"].asked:
        time.sleep(0.01)
    with pytest.raises(ScaleError, match="another tensorwire scale is under way"):
        launcher.ask({"workers": {"count": 1}})
    first.join(20)
    assert found == ["not done within 1 s: the client has cancelled it"]
    launcher.handlers["workers"].why = ""
    launcher.handlers["workers"].outcome = {}
    assert launcher.ask({"workers": {"count": 1}}) == {}


def connect(launcher: Launcher, nonce: list[str] | None = None) -> socket.socket:
    channel = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    channel.settimeout(10)
    with short_path(launcher.path) as short:
        channel.connect(short)
    told = json.loads(channel.recv(1000))["nonce"]
    if nonce is not None:
        nonce.append(told)
    return channel


@pytest.mark.parametrize(
    ("told", "why"),
    [
        (b"no json", "the request is not valid"),
        (b"[1]", "the request is not valid"),
        (b'{"ask": {}}', "not the secret"),
        (b'{"ask": {"workers": {}}, "proof": "no"}', "not the secret"),
        (b'{"ask": {"workers": {}}, "proof": 7}', "proof is 7, not text"),
        (b"[" * 4096, "nested too deeply"),
        (
            b'{"ask": {"workers": {"count": true}}, "proof": ""}',
            "count is True, not a whole",
        ),
        (b'{"ask": {"workers": {"count": 2.0}}, "proof": ""}', "count is 2.0, not a whole number"),
        (b'{"ask": {"workers": {"drain": [1.0]}}, "proof": ""}', "is 1.0, not a whole number"),
        (b'{"ask": {"workers": {"drain": [true]}}, "proof": ""}', "is True, not a whole number"),
        (b'{"ask": {"workers": 3}, "proof": ""}', "workers is 3, not an object"),
        (b'{"ask": {"workers": {"many": 3}}, "proof": ""}', "'many', which is unknown"),
    ],
)
def test_strangers(launcher: Launcher, told: bytes, why: str) -> None:
    with connect(launcher) as channel:
        channel.send(told)
        assert why in json.loads(channel.recv(1000))["error"]
    assert not launcher.handlers["workers"].asked


def test_nonsense_instead_of_a_cancellation_takes_it_back(launcher: Launcher) -> None:
    nonce: list[str] = []
    with connect(launcher, nonce) as channel:
        message = {"ask": {"workers": {"count": 1}}, "proof": proof_of(SECRET, nonce[0])}
        channel.send(json.dumps(message).encode())
        assert json.loads(channel.recv(1000)) == {"says": "it has begun"}
        channel.send(b"[" * 4096)
        assert "nested too deeply" in json.loads(channel.recv(1000))["error"]
    while not launcher.handlers["workers"].cancelled:
        time.sleep(0.01)
    launcher.handlers["workers"].why = ""
    launcher.handlers["workers"].outcome = {}
    assert launcher.ask({"workers": {"count": 1}}) == {}


@pytest.mark.parametrize("at", ["check", "begin", "tend"])
def test_a_mistake_of_a_handler_ends_its_request_alone(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    """Named for a bug: whatever was no ScaleError ended the launcher, and the job with it."""

    def fail(*_: object) -> None:
        raise ZeroDivisionError("a mistake")

    workers = launcher.handlers["workers"]
    with monkeypatch.context() as patch:
        patch.setattr(workers, at, fail)
        with pytest.raises(ScaleError, match="made a mistake, ZeroDivisionError: a mistake"):
            launcher.ask({"workers": {"count": 1}})
    assert bool(workers.cancelled) == (at != "check")
    workers.why, workers.outcome = "", {}
    assert launcher.ask({"workers": {"count": 1}}) == {}


def test_who_asks_and_goes_away(launcher: Launcher) -> None:
    for _ in range(100):  # more than may wait
        connect(launcher).close()
    silent = [connect(launcher) for _ in range(100)]
    launcher.handlers["workers"].outcome = {"workers": {}}
    assert launcher.ask({"workers": {}}) == {"workers": {}}
    for each in silent:
        each.close()


def test_nobody_listens(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match="does not answer"):
        ask_launcher(str(tmp_path / "none"), SECRET, {}, 1.0, print)


def server(address: str) -> RunningServer:
    return RunningServer(0, address, 1, 1, "train.py", time.time(), SECRET.decode(), "")


def test_the_command(launcher: Launcher) -> None:
    def run(*options: str) -> tuple[int, str]:
        done = CliRunner().invoke(scale, options, catch_exceptions=False)
        return done.exit_code, done.output

    assert "say what is to change" in run()[1]
    assert "not a number of seconds above 0" in run("--workers", "1", "--timeout", "0")[1]
    assert run("--workers", "1") == (1, "Error: no job of this user runs on this host\n")
    logs = [JobLog(f"train{i}.py", True, pytest.fail) for i in range(2)]
    code, text = run("--workers", "1")
    assert code == 1
    assert "the job is still starting; try again: train" in text
    for number, log in enumerate(logs):
        log.add("server listens", address=f"127.0.0.1:700{number}")
    launcher.handlers["workers"].outcome = {"workers": {"text": "2 workers"}}
    with_files = JobFile(server("127.0.0.1:7000"))
    try:
        assert "several jobs run" in run("--workers", "2")[1]
        assert "no job of this user on this host has" in run("--workers", "2", "127.0.0.1:1")[1]
        assert "cannot be scaled" in run("--workers", "2", "127.0.0.1:7000")[1]
        logs[0].add("control", path=launcher.path)
        code, text = run("--workers", "2", "--drain", "1", "127.0.0.1:7000")
        assert (code, text.splitlines()[-1]) == (0, "2 workers")
        assert launcher.handlers["workers"].asked == {"count": 2, "drain": [1]}
        code, text = run("--workers", "0", "127.0.0.1:7000")
        assert (code, text) == (1, "Error: at least 1 is needed\n")
    finally:
        with_files.close()
        for log in logs:
            log.close(keep=False)


def test_a_job_that_ends_while_its_servers_are_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Named for a bug: the command waited 10 s for servers of a job that was over."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    log = JobLog("train.py", True, pytest.fail)
    log.add("server listens", address="127.0.0.1:7000")
    log.add("control", path=str(tmp_path / "control"))
    end = threading.Timer(0.3, lambda: log.close(keep=False))
    end.start()
    began = time.monotonic()
    done = CliRunner().invoke(scale, ["--workers", "2"])
    end.join()
    assert (done.exit_code, done.output) == (1, "Error: the job has ended\n")
    assert time.monotonic() - began < 5
