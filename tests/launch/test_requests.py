"""What programs of the same user send to the control socket of a launcher that runs."""

import json
import socket
import time
from pathlib import Path
from typing import Any

import pytest
from launching import Launched, Place

from tensorwire.membership import LoggedJob, logged_jobs, proof_of

NONSENSE: tuple[tuple[Any, str], ...] = (
    ({"workers": {"count": 1, "drain": [1.0]}}, "is 1.0, not a whole number"),
    ({"workers": {"count": 1, "drain": [True]}}, "is True, not a whole number"),
    ({"workers": {"count": 1.0}}, "count is 1.0, not a whole number"),
    ({"workers": {"count": True}}, "count is True, not a whole number"),
    ({"workers": {"count": 1, "drain": {"1": 1}}}, "not a list"),
    ({"servers": {"count": 1, "step": 1}}, "'step', which is unknown"),
)


def logged(job: Launched) -> LoggedJob:
    """The log of a job whose control socket is there."""
    deadline = time.monotonic() + 30
    while not (found := [each for each in logged_jobs() if each.running and each.control]):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return found[0]


def ask(path: str, secret: bytes, asked: Any) -> dict[str, Any]:
    """The last that the launcher says."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as channel:
        channel.settimeout(20)
        channel.connect(path)
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
    script = """
        print("secret:", os.environ["TENSORWIRE_SECRET"], flush=True)
        while not os.path.exists("end"):
            time.sleep(0.01)
        goodbye()
    """
    end = Path("end")
    monkeypatch.chdir(place.folder)
    with place.start(script, workers=2) as job:
        job.wait_for("secret: ")
        path = logged(job).control
        secret = job.text.partition("secret: ")[2].split()[0].encode()
        for asked, why in NONSENSE:
            told = ask(path, secret, asked)
            assert why in told["error"]
            assert not told["busy"]
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as channel:
            channel.settimeout(20)
            channel.connect(path)
            channel.recv(1000)
            channel.send(b"[" * 4096)
            assert "nested too deeply" in json.loads(channel.recv(1 << 16))["error"]
        told = ask(path, secret, {"workers": {"count": 1, "drain": [1]}})
        assert "--elastic" in told["error"]  # it is understood, and cannot be done
        end.touch()
        assert job.end() == 0
