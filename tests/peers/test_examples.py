"""The examples run, end, and leave nothing behind, also when one of their processes is killed."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

STEPS = 150  # enough for the accuracy that the example asks for


@pytest.fixture(params=["shm", "tcp"])
def wire(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("TENSORWIRE_TRANSPORTS", request.param)
    return str(request.param)


def start(script: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-W", "error", str(script), *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def test_hello_region(repository: Path, wire: str) -> None:
    with start(repository / "examples" / "hello_region.py") as process:
        printed, _ = process.communicate(timeout=60)
    assert process.returncode == 0, printed
    assert "[0.0, 1.0, 2.0, 3.0" in printed
    assert wire in printed


@pytest.mark.slow
def test_train_by_hand(repository: Path, wire: str) -> None:
    pytest.importorskip("sklearn")
    with start(repository / "examples" / "train_by_hand.py", f"--steps={STEPS}") as process:
        printed, _ = process.communicate(timeout=100)
    assert process.returncode == 0, printed
    assert f"2 workers, connected by {wire}" in printed
    assert re.search(rf"{STEPS} steps of \d+ µs, \d+ MB moved", printed)
    for name in ("worker-0", "worker-1", "server"):
        assert re.search(rf"{name} +computing .* waiting .* writing ", printed), printed
    assert float(re.findall(r"test accuracy (\d\.\d+)", printed)[-1]) >= 0.95


@pytest.mark.slow
def test_too_few_steps_fail(repository: Path) -> None:
    pytest.importorskip("sklearn")
    with start(repository / "examples" / "train_by_hand.py", "--steps=2") as process:
        printed, _ = process.communicate(timeout=100)
    assert process.returncode == 1
    assert "is below 0.95" in printed


@pytest.mark.parametrize(
    ("victim", "wire"), [("server", "shm"), ("worker", "tcp")], indirect=["wire"]
)
@pytest.mark.slow
def test_killed_while_training(repository: Path, wire: str, victim: str) -> None:
    pytest.importorskip("sklearn")
    with start(repository / "examples" / "train_by_hand.py", "--steps=1000000") as process:
        assert process.stdout is not None
        assert wire in process.stdout.readline()
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        assert len(children) == 2
        os.kill(process.pid if victim == "server" else int(children[0]), signal.SIGKILL)
        # Everything that still runs has the pipe open: this returns when nothing does.
        printed = process.stdout.read()
    assert process.returncode == (-signal.SIGKILL if victim == "server" else 1), printed
    assert "PeerLostError: lost peer" in printed


def test_serve_model(repository: Path, wire: str) -> None:
    pytest.importorskip("grpc")
    script = repository / "examples" / "serve_model.py"
    with start(script, "--batches=3", f"--transport={wire}") as process:
        printed, _ = process.communicate(timeout=100)
    assert process.returncode == 0, printed
    assert f"3 batches of 2 MiB by {wire}" in printed
