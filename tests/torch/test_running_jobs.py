"""`tensorwire status` beside jobs that run."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from programs import TRAINED

SCRIPT = f"""{TRAINED}
import pathlib, sys, time
import tensorwire.torch as tw
job = tw.init()
model, opt = trained(job)
pathlib.Path(f"ready-{{job.rank}}").touch()
while not pathlib.Path("go").exists():
    time.sleep(0.02)
opt.close()
job.close()
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    tmp_path.chmod(0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    (tmp_path / "script.py").write_text(SCRIPT)
    yield tmp_path
    (tmp_path / "go").touch()


def status(*arguments: str, code: int = 0) -> str:
    command = [sys.executable, "-m", "tensorwire", "status", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


def jobs(*arguments: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(status("--json", *arguments))
    return found


def started(folder: Path, *arguments: str) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "tensorwire", "run", *arguments, "script.py"]
    job = subprocess.Popen(command, cwd=folder)
    deadline = time.monotonic() + 90
    while not all((folder / f"ready-{rank}").exists() for rank in range(2)):
        assert job.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return job


@pytest.mark.slow
def test_a_job_that_runs_is_shown_and_not_disturbed(folder: Path) -> None:
    assert jobs() == []
    assert "no job" in status()
    job = started(folder, "--workers", "2", "--servers", "2")
    (found,) = jobs()
    assert found["command"] == "script.py"
    assert [each["state"] for each in found["workers"]] == ["connected", "connected"]
    assert [each["transport"] for each in found["workers"]] == ["shm", "shm"]
    assert [each["index"] for each in found["servers"]] == [0, 1]
    stores = [store for each in found["servers"] for store in each["stores"]]
    # Version 2 has the first values, and then three steps were made.
    assert [(each["version"], each["tensors"]) for each in stores] == [(5, 2), (5, 2)]
    assert sum(each["bytes"] for each in stores) >= 4 * (30 * 3 + 3)
    assert found["durable"]
    assert [(each["kind"], each["index"]) for each in found["members"]] == [
        *(("server", 0), ("server", 1), ("worker", 0), ("worker", 1))
    ]
    assert {each["pid"] for each in found["servers"] + found["workers"]} == {
        each["pid"] for each in found["members"]
    }
    (again,) = jobs(found["address"])
    # There may be a process in reserve by now.
    assert {**again, "standby": found["standby"], "age_s": found["age_s"]} == found
    assert again["age_s"] > found["age_s"]
    doctor = [sys.executable, "-m", "tensorwire", "doctor", f"tw://{found['address']}/"]
    done = subprocess.run(doctor, capture_output=True, text=True, timeout=60)
    assert done.returncode in (0, 1), done.stdout + done.stderr  # a warning of a busy machine
    assert "a Node at work, no doctor" in done.stdout
    text = status()
    for word in ("script.py", "connected", "SGD", found["servers"][1]["address"], found["log"]):
        assert word in text
    with pytest.MonkeyPatch.context() as monkeypatch:  # a stranger sees nothing
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder / "another"))
        (folder / "another").mkdir(mode=0o700)
        monkeypatch.setenv("TENSORWIRE_SECRET", "this is not the secret of that job")
        (error,) = json.loads(status("--json", found["address"], code=1))
        assert "secret" in error["error"]
    (folder / "go").touch()
    assert job.wait(60) == 0
    assert jobs() == []
    assert not list((folder / "tensorwire").glob("server-*"))


@pytest.mark.slow
def test_a_server_that_was_killed_is_not_shown(folder: Path) -> None:
    job = started(folder, "--workers", "2", "--on-death=end")
    (found,) = jobs()
    os.kill(found["servers"][0]["pid"], signal.SIGKILL)
    assert job.wait(60) != 0
    (failed,) = jobs()
    assert "was killed by SIGKILL" in failed["failed"]
    assert "address" not in failed
    (error,) = json.loads(status("--json", found["address"], code=1))
    assert error["address"] == found["address"]
    assert error["error"]
