"""Launchers, servers and `doctor` whose output is not read: all go on, and SIGTERM ends them."""

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest
from launching import HERE, QUICK, WAIT_S, Place, eventually
from test_takeover import SERVER, WORKER

from tensorwire.jobs.job_file import running_servers

# Of a job that is done but for its output, which the signal cuts short.
ENDED = (0, 128 + signal.SIGTERM)
LOUD = [sys.executable, str(HERE / "loud_server.py")]


@contextlib.contextmanager
def unread(
    command: Sequence[str], environment: Mapping[str, str]
) -> Iterator["subprocess.Popen[bytes]"]:
    """Starts a process whose stdout and stderr are one pipe, which is full and is not read."""
    ours, theirs = os.pipe()
    fcntl.fcntl(theirs, fcntl.F_SETPIPE_SZ, 4096)
    os.write(theirs, b"x" * 4096)
    process = subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=theirs,
        stderr=theirs,
        process_group=0,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        os.close(ours)
        os.close(theirs)


@pytest.mark.slow
def test_a_job_whose_server_prints(place: Place, tmp_path: Path) -> None:
    """The job trains to its end, of which the launcher cannot tell; SIGTERM ends that."""
    command = place.command(place.script(WORKER), workers=2, servers=1, server_command=LOUD)
    environment = place.environment(TOY_FOLDER=str(tmp_path), TOY_STORES="1")
    with unread(command, environment) as launcher:
        assert eventually(lambda: all((tmp_path / f"final-{rank}").exists() for rank in range(2)))
        members = (" ".join(LOUD), "script.py")

        def are_gone() -> bool:
            others = (text for pid, text in place.processes().items() if pid != launcher.pid)
            return not any(name in text for text in others for name in members)

        assert eventually(are_gone), place.processes()
        launcher.send_signal(signal.SIGTERM)
        assert launcher.wait(WAIT_S) in ENDED


@pytest.mark.slow
def test_a_job_whose_server_prints_is_ended(place: Place, tmp_path: Path) -> None:
    command = place.command(place.script(WORKER), workers=2, servers=1, server_command=LOUD)
    toy = {"TOY_FOLDER": str(tmp_path), "TOY_GATE": str(tmp_path / "never"), "TOY_STORES": "1"}
    with unread(command, place.environment(**toy)) as launcher:
        assert eventually((tmp_path / "events-0").exists)
        launcher.send_signal(signal.SIGTERM)
        assert launcher.wait(WAIT_S) == 128 + signal.SIGTERM


@pytest.mark.slow
@pytest.mark.parametrize("ends", [True, False])
def test_serve_whose_server_prints(place: Place, tmp_path: Path, ends: bool) -> None:
    """Workers join, train and leave; a second SIGTERM is not needed in either case."""
    door = place.folder / "job"
    options = {"workers": 2, "server_command": LOUD, "patience": QUICK, "socket": str(door)}
    command = [sys.executable, str(HERE / "serving.py"), json.dumps(options)]
    gate = {} if ends else {"TOY_GATE": str(tmp_path / "never")}
    toy = {"TOY_FOLDER": str(tmp_path), "TOY_STORES": "1", **gate}
    with unread(command, place.environment()) as supervisor, contextlib.ExitStack() as stack:
        assert eventually(door.exists)
        workers = []
        for rank in range(2):
            own = {"TENSORWIRE_SUPERVISOR": str(door), "TENSORWIRE_RANK": str(rank)}
            worker = subprocess.Popen(
                [sys.executable, place.script(WORKER)],
                env=place.environment(**toy, **own),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            )
            stack.callback(worker.wait, WAIT_S)
            stack.callback(worker.kill)
            workers.append(worker)
        if ends:
            assert [worker.wait(WAIT_S) for worker in workers] == [0, 0]
        else:
            assert eventually((tmp_path / "events-0").exists)
        supervisor.send_signal(signal.SIGTERM)
        assert supervisor.wait(WAIT_S) in (ENDED if ends else ENDED[1:])


@pytest.mark.slow
def test_doctor_beside_a_job(place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The job goes on at its own pace and ends well."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(place.runtime))
    gate = tmp_path / "gate"
    toy = {"TOY_FOLDER": str(tmp_path), "TOY_GATE": str(gate), "TOY_STORES": "1"}
    environment = {"TENSORWIRE_SECRET": "a secret of this job", **toy}
    with place.start(WORKER, environment=environment, servers=1, server_command=SERVER) as job:
        assert eventually((tmp_path / "events-0").exists)
        address = running_servers()[0].address
        command = [sys.executable, "-m", "tensorwire", "doctor", "--seconds", "30", address]
        with unread(command, place.environment(**environment)) as doctor:
            assert not eventually(lambda: doctor.poll() is not None, 2.0), "it has not measured"
            gate.touch()
            assert job.end() == 0, job.text
            doctor.send_signal(signal.SIGTERM)
            doctor.wait(WAIT_S)
