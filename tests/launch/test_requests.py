"""Requests of the same user's programs to the control socket of a running launcher."""

import json
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from launching import WAIT_S, Launched, Place

from tensorwire.cli.scale import scale
from tensorwire.cli.status import status
from tensorwire.jobs.door import proof_of, short_path
from tensorwire.jobs.job_file import JobFile, RunningServer
from tensorwire.jobs.job_log import LoggedJob, logged_jobs

UNSHARE = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
NONSENSE: tuple[tuple[Any, str], ...] = (
    ({"workers": {"count": 1, "drain": [1.0]}}, "is 1.0, not a whole number"),
    ({"workers": {"count": 1, "drain": [True]}}, "is True, not a whole number"),
    ({"workers": {"count": 1.0}}, "count is 1.0, not a whole number"),
    ({"workers": {"count": True}}, "count is True, not a whole number"),
    ({"workers": {"count": 1, "drain": {"1": 1}}}, "not a list"),
    ({"servers": {"count": 1, "step": 1}}, "'step', which is unknown"),
)


SCRIPT = """
print("secret:", os.environ["TENSORWIRE_SECRET"], flush=True)
while not os.path.exists("end"):
    time.sleep(0.01)
goodbye()
"""


def logged(count: int = 1) -> list[LoggedJob]:
    """The logs of jobs whose control sockets are there, and that have started all members."""
    deadline = time.monotonic() + WAIT_S
    while True:
        found = [each for each in logged_jobs() if each.control and len(each.members) == 3]
        if len(found) == count:
            return found
        assert time.monotonic() < deadline
        time.sleep(0.01)


def connect(channel: socket.socket, path: str) -> None:
    channel.settimeout(20)
    with short_path(path) as short:
        channel.connect(short)


def ask(path: str, secret: bytes, asked: Any) -> dict[str, Any]:
    """The last that the launcher says."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as channel:
        connect(channel, path)
        nonce = json.loads(channel.recv(1 << 16))["nonce"]
        proof = proof_of(secret, nonce)
        channel.send(json.dumps({"ask": asked, "proof": proof}).encode())
        told: dict[str, Any] = json.loads(channel.recv(1 << 16))
        return told


def test_a_request_of_wrong_types_is_refused_and_nothing_is_under_way(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Named for a bug: "drain": [1.0] passed, a worker failed, and all else was "under way"."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(place.runtime))
    end = Path("end")
    monkeypatch.chdir(place.folder)
    with place.start(SCRIPT) as job:
        job.wait_for("secret: ")
        path = logged()[0].control
        secret = job.text.partition("secret: ")[2].split()[0].encode()
        for asked, why in NONSENSE:
            told = ask(path, secret, asked)
            assert why in told["error"]
            assert not told.get("busy")
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as channel:
            connect(channel, path)
            channel.recv(1000)
            channel.send(b"[" * 4096)
            assert "nested too deeply" in json.loads(channel.recv(1 << 16))["error"]
        told = ask(path, secret, {"workers": {"count": 1, "drain": [1]}})
        assert "--workers W:MAX" in told["error"]  # it is understood, and cannot be done
        end.touch()
        assert job.end() == 0


def test_the_command_finds_a_job_in_a_folder_with_a_long_path(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Named for a bug: no socket's name has room for a path of more than 107 characters."""
    place.runtime = place.folder / ("r" * 110)
    place.runtime.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(place.runtime))
    monkeypatch.chdir(place.folder)
    with place.start(SCRIPT) as job:
        job.wait_for("secret: ")
        (found,) = logged()
        secret = job.text.partition("secret: ")[2].split()[0]
        address, pid = found.addresses[0], found.members[0].pid
        server = JobFile(RunningServer(0, address, pid, 2, "", time.time(), secret, ""))
        done = CliRunner().invoke(scale, ["--workers", "3"], catch_exceptions=False)
        server.close()
        assert done.exit_code == 1
        assert "--workers W:MAX" in done.output  # the launcher has heard it, and says why not
        Path("end").touch()
        assert job.end() == 0


def can_unshare() -> bool:
    command = [*UNSHARE, "true"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


@pytest.mark.skipif(not can_unshare(), reason="no PID namespaces: unshare --pid is not permitted")
def test_launchers_in_two_containers_share_a_runtime_folder(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Named for a bug: each was process 1, took the other's socket, and living workers "ended"."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(place.runtime))
    end = place.folder / "end"
    monkeypatch.chdir(place.folder)
    command = [*UNSHARE, *place.command(place.script(SCRIPT))]
    with (
        Launched(command, place.environment()) as one,
        Launched(command, place.environment()) as other,
    ):
        secrets = {}
        for job in (one, other):
            job.wait_for("secret: ")
            secrets[job.text.partition("secret: ")[2].split()[0].encode()] = job
        found = logged(2)
        assert len({each.control for each in found}) == 2
        assert [each.launcher for each in found] == [1, 1]
        told = [
            ask(each.control, key, {"workers": {"count": 1}}) for each in found for key in secrets
        ]
        assert sorted("secret" in each["error"] for each in told) == [False, False, True, True]
        shown = json.loads(CliRunner().invoke(status, ["--json"]).output)
        states = [member["state"] for job in shown for member in job["members"]]
        assert states == ["running"] * 6
        end.touch()
        assert [one.end(), other.end()] == [0, 0]
