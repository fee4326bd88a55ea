"""Members that are stopped: for how long they are waited for, and what happens then."""

import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
from launching import HERE, QUICK, WAIT_S, Launched, Place, eventually, summary
from test_launch_restarts import ASK
from test_launch_worker_restarts import KEPT

from tensorwire.launch import JobSpec
from tensorwire.launch.silence import is_stopped

COLD = {**QUICK, "standby_s": 1000.0, "goodbye_s": 10.0}
SERVER = [sys.executable, str(HERE / "toy_server.py")]
WORKER = (HERE / "toy_worker.py").read_text()
STOPPED = re.compile(r"(?:server|worker|standby) ?\d* \(pid (\d+)\) is stopped; in [\d.]+ s it ")


def start(place: Place, text: str, silence_s: float, **options: Any) -> Launched:
    options = {"workers": 1, "durable": True, "patience": COLD, **options}
    return place.start(text, silence_s=silence_s, **options)


def stopped(job: Launched) -> int:
    """Waits until the launcher says that a member is stopped; which one that is."""
    job.wait_for("is stopped; in ", "(kill -CONT ")
    found = STOPPED.search(job.text)
    assert found, job.text
    return int(found[1])


def test_a_stopped_server_is_killed_and_replaced(place: Place) -> None:
    text = """
        old = ask("add")[0]
        os.kill(old, signal.SIGSTOP)
        pid, term, counter = ask("add")
        assert (term, counter) == (1, 2)
        assert not os.path.exists(f"/proc/{old}")
        goodbye()
        """
    with start(place, ASK + textwrap.dedent(text), 1.0) as job:
        assert job.end() == 0, job.text
        first, second = summary(job.text)
        assert STOPPED.match(first)
        assert re.match(
            r"server 0 \(pid \d+\) was stopped for 1 s and was killed; server 0 \(pid \d+\) takes "
            r"its place \(restart 1\)",
            second,
        )


def test_a_stopped_worker_is_killed_and_replaced(place: Place) -> None:
    text = "become()\nif not term:\n    os.kill(os.getpid(), signal.SIGSTOP)\ngoodbye()"
    with start(place, KEPT + text, 1.0) as job:
        assert job.end() == 0, job.text
        assert "worker 0 (pid" in next(summary(job.text))
        assert "was stopped for 1 s and was killed; worker 0 is started again as pid" in job.text


def test_a_stopped_standby_is_replaced(place: Place) -> None:
    with start(place, "wait()", 1.0, patience={**COLD, "standby_s": 0.1}) as job:
        standby = job.pid_of("standby")
        job.text = ""
        os.kill(standby, signal.SIGSTOP)
        assert job.pid_of("standby") != standby
        job.send(signal.SIGTERM)
        assert job.end() == 143


def test_one_that_goes_on_in_time_is_not_killed(place: Place) -> None:
    text = "become()\nos.kill(os.getpid(), signal.SIGSTOP)\nprint('goes on')\ngoodbye()"
    with start(place, KEPT + text, 30.0) as job:
        os.kill(stopped(job), signal.SIGCONT)
        assert job.end() == 0
        assert "goes on" in job.text
        assert len(list(summary(job.text))) == 1


def test_nobody_is_killed_when_the_launcher_was_stopped_too(place: Place) -> None:
    """The same as on a suspended machine: its clock goes on and its processes do not."""
    text = "become()\nos.kill(os.getpid(), signal.SIGSTOP)\ntime.sleep(1.0)\ngoodbye()"
    with start(place, KEPT + text, 2.0) as job:
        worker = stopped(job)
        job.send(signal.SIGSTOP)
        assert eventually(lambda: is_stopped(job.pid))
        time.sleep(2.5)
        job.send(signal.SIGCONT)
        assert eventually(lambda: not is_stopped(job.pid))
        time.sleep(0.3)  # for a launcher that would kill it
        os.kill(worker, signal.SIGCONT)
        assert job.end() == 0
        assert "(restart 1)" not in job.text
        assert "was killed" not in job.text


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("become()", {"silence_s": 0.0}),
        ("", {"silence_s": 0.4}),  # it has not joined
        ("", {"silence_s": 0.4, "durable": False}),
    ],
    ids=["never", "not joined", "not durable"],
)
def test_one_that_is_waited_for(place: Place, text: str, options: dict[str, Any]) -> None:
    preamble = KEPT if options.get("durable", True) else ""
    text += "\nprint(f'pid of worker: {os.getpid()}.', flush=True)"
    text += "\nos.kill(os.getpid(), signal.SIGSTOP)\ngoodbye()"
    with start(place, preamble + text, **options) as job:
        worker = job.pid_of("worker")
        assert eventually(lambda: is_stopped(worker))
        time.sleep(1.0)
        os.kill(worker, signal.SIGCONT)
        assert job.end() == 0
        assert not list(summary(job.text))


# One place of each kind of write of a server: a cell, regions, counts, a table, a sum.
PLACES = ["cell.changed", "opening.described", "version.begun", "table.changed", "sum.gathered"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> str:
    with _toy(Place(tmp_path_factory.mktemp("undisturbed")), "") as job:
        assert job.end() == 0
        return _digest(job)


@pytest.mark.parametrize("name", PLACES)
def test_a_server_that_is_stopped_inside_a_write_goes_on(
    place: Place, whole: str, name: str
) -> None:
    with _toy(place, f"server-0:{name}:1:stop") as job:
        os.kill(stopped(job), signal.SIGCONT)
        assert job.end() == 0
        assert "(restart 1)" not in job.text
        assert _digest(job) == whole


def test_a_server_that_stays_stopped_inside_a_write_is_replaced(place: Place, whole: str) -> None:
    with _toy(place, "server-0:cell.changed:1:stop", silence_s=1.0) as job:
        assert job.end() == 0
        assert "takes its place (restart 1)" in job.text
        assert _digest(job) == whole


def test_what_is_stopped_is_told_from_what_waits() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        assert not is_stopped(process.pid)
        process.send_signal(signal.SIGSTOP)
        assert eventually(lambda: is_stopped(process.pid))
        process.send_signal(signal.SIGCONT)
        assert eventually(lambda: not is_stopped(process.pid))
        process.kill()
        process.wait()
        assert not is_stopped(process.pid)


def test_a_frozen_cgroup_stops_a_process() -> None:
    roots = [
        root
        for root in map(Path, ("/sys/fs/cgroup", "/sys/fs/cgroup/unified"))
        if (root / "cgroup.procs").exists() and (root / "cgroup.controllers").exists()
    ]
    group = roots[0] / f"tensorwire-test-{os.getpid()}" if roots else Path()
    try:
        group.mkdir()
    except OSError:
        pytest.skip("no cgroup of version 2 that this user may make")
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        (group / "cgroup.procs").write_text(str(process.pid))
        assert not is_stopped(process.pid)
        (group / "cgroup.freeze").write_text("1")
        assert eventually(lambda: is_stopped(process.pid))
        process.kill()  # the fence ends what is frozen
        process.wait(WAIT_S)
    finally:
        process.kill()
        process.communicate()
        (group / "cgroup.freeze").write_text("0")
        group.rmdir()


@pytest.mark.parametrize("silence_s", [-1.0, float("nan"), float("inf")])
def test_silence_is_a_number_of_seconds(silence_s: float) -> None:
    with pytest.raises(ValueError, match="silence is"):
        JobSpec((__file__,), 1, silence_s=silence_s, server_command=tuple(SERVER))


def _toy(place: Place, fail: str, silence_s: float = 30.0) -> Launched:
    environment = {"TENSORWIRE_FAIL": fail}
    return start(
        place, WORKER, silence_s, environment=environment, workers=2, server_command=SERVER
    )


def _digest(job: Launched) -> str:
    found = set(re.findall(r"digest (\w+)", job.text))
    assert len(found) == 1, job.text
    return str(found.pop())
