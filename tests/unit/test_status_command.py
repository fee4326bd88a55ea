"""The output of `tensorwire status` for a job without answering servers: the log has the rest."""

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tensorwire.cli.status import status
from tensorwire.jobs.job_file import JobFile, RunningServer
from tensorwire.jobs.job_log import JobLog

ADDRESS = "127.0.0.1:7000"


@pytest.fixture
def process() -> Iterator["subprocess.Popen[bytes]"]:
    with subprocess.Popen(["sleep", "100"]) as started:
        os.kill(started.pid, signal.SIGSTOP)
        while Path(f"/proc/{started.pid}/stat").read_text().split()[2] != "T":
            time.sleep(0.001)
        yield started
        started.kill()


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[JobLog]:
    tmp_path.chmod(0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    made = JobLog("train.py --lr 0.1", True, pytest.fail)
    made.add("server listens", address=ADDRESS)
    made.add("saved", path="checkpoints/checkpoint-000007")
    yield made
    made.close(keep=False)


def server(pid: int) -> RunningServer:
    """The successor of a job's first server: younger than the job."""
    return RunningServer(0, ADDRESS, pid, 1, "train.py --lr 0.1", time.time() + 500, "so", "")


def shown(*options: str) -> str:
    done = CliRunner().invoke(status, options, catch_exceptions=False)
    assert done.exit_code == 0
    return done.output


def jobs() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(shown("--json"))
    return found


def test_a_server_that_is_stopped_is_not_asked(
    log: JobLog, process: "subprocess.Popen[bytes]"
) -> None:
    log.add("member", kind="server", index=0, pid=77)
    log.add("member", kind="worker", index=0, pid=process.pid)
    about = {"kind": "server", "index": 0, "term": 1, "pid": process.pid}
    log.add("grant", **about, dead=77, evidence="was killed by SIGKILL")
    began = time.monotonic()
    with contextlib.closing(JobFile(server(process.pid))):
        text, (job,) = shown(), jobs()
    assert time.monotonic() - began < 4, "it was asked"
    pid = process.pid
    stopped = f"(pid {pid}) is stopped; kill -CONT {pid} lets it go on"
    assert job["error"] == f"server 0 {stopped}"
    assert abs(job["started"] - time.time()) < 100, "the age of a process, and not of the job"
    assert [(each["state"], each["restarts"]) for each in job["members"]] == [
        ("stopped", 1),
        ("stopped", 0),
    ]
    assert f"  cannot be asked: server 0 {stopped}\n" in text
    assert f"  worker 0 {stopped}\n" in text
    for words in ("server 0 ", "pid 77 was killed by SIGKILL", "checkpoint-000007", log.path):
        assert words in text


def test_a_job_without_its_first_server_is_shown(log: JobLog) -> None:
    log.add("member", kind="worker", index=0, pid=os.getpid())
    (job,) = jobs()
    assert "is being replaced" in job["error"]
    assert [each["state"] for each in job["members"]] == ["running"]
    assert "checkpoint-000007" in shown()


def test_the_age_of_a_job_when_the_clock_was_set_back(
    log: JobLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Named for a bug: a job ran "for -7170 s"."""
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now - 7200)
    (job,) = jobs()
    assert 0 <= job["age_s"] < 100
    text = shown()
    assert "for -" not in text
    assert ", for " in text


def test_a_failed_job_is_a_few_lines(log: JobLog) -> None:
    log.add("member", kind="worker", index=0, pid=os.getpid())
    log.add("failed", text="worker 0 (pid 77) exited with code 3")
    log.close(keep=True)
    first, *rest = shown().splitlines()
    assert first.startswith("job that failed, started 2")
    assert first.endswith(": train.py --lr 0.1")
    assert rest == [
        "  worker 0 (pid 77) exited with code 3",
        "  last checkpoint: checkpoints/checkpoint-000007",
        f"  log: {log.path}",
    ]
    assert "restarts" in shown("--failed")
    (job,) = jobs()
    assert "state" not in job["members"][0]


def test_processes_of_another_container(log: JobLog, monkeypatch: pytest.MonkeyPatch) -> None:
    """Named for a bug: a worker that lived was "ended", as its number is in no table here."""
    monkeypatch.setattr("tensorwire.cli.status.pid_namespace", lambda: "pid:[7]")
    log.add("server listens", address="127.0.0.1:1")
    log.add("member", kind="worker", index=0, pid=999999998)
    log.add("member", kind="worker", index=1, pid=999999999)
    log.add("ended", pid=999999999)
    log.add("standby", pid=999999997)
    (job,) = jobs()
    assert [each["state"] for each in job["members"]] == ["running", "ended"]
    assert job["standby_state"] == "running"
    log.add("grant", kind="worker", index=1, term=1, pid=999999999, dead=999999999, evidence="died")
    assert [each["state"] for each in jobs()[0]["members"]] == ["running", "running"]
    monkeypatch.undo()
