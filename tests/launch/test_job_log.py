"""The log of a job's launcher, for `tensorwire status` and for its last lines."""

import json
import os
import resource
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from launching import Place, lines_of, summary
from test_launch_restarts import COLD, WARM, go, run, start

from tensorwire.jobs.job_log import JobLog, LoggedJob, logged_jobs
from tensorwire.launch.resume import resume_line

SAVE = """
from tensorwire.jobs.job_log import note_in_job_log
path = os.path.join(os.path.dirname(__file__), "checkpoint-000001")
"""


def status(place: Place, *options: str) -> str:
    command = [sys.executable, "-m", "tensorwire", "status", *options]
    environment = {**place.environment(), "COLUMNS": "200"}
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, check=True, timeout=60
    ).stdout


def logs(place: Place, monkeypatch: pytest.MonkeyPatch) -> list[LoggedJob]:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(place.runtime))
    return logged_jobs()


def test_who_has_which_term_is_written_down(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (
        "wait_for_go()\nprint('killed', kill())\nprint('pid of successor: %d.' % ask('who')[0])\n"
    )
    with start(place, text + "wait()", servers=2, patience=WARM) as job:
        standby = job.pid_of("standby")
        (log,) = logs(place, monkeypatch)
        assert log.running
        assert log.durable
        assert log.standby == standby
        assert [(each.kind, each.index, each.term) for each in log.members] == [
            ("server", 0, 0),
            ("server", 1, 0),
            ("worker", 0, 0),
        ]
        assert len(log.addresses) == 2
        assert stat.S_IMODE(os.stat(log.path).st_mode) == 0o600
        dead = log.members[0].pid
        job.text = ""
        go(place)
        successor = job.pid_of("successor")
        assert job.pid_of("standby") != standby == successor
        (log,) = logs(place, monkeypatch)
        assert (log.members[0].pid, log.members[0].term) == (successor, 1)
        death = log.members[0].last_death
        assert death is not None
        assert (death["pid"], death["evidence"]) == (dead, "was killed by SIGKILL")
        assert log.standby not in (None, standby)
        job.send(signal.SIGTERM)
        assert job.end() == 143
    assert not logs(place, monkeypatch), "the log of a job that was ended is left"


def test_a_successor_finds_its_term_on_the_disk(place: Place) -> None:
    """The term is written before the successor is told."""
    text = """
        import glob
        kill()
        pid, term, _ = ask("who")
        path, = glob.glob(os.environ["XDG_RUNTIME_DIR"] + "/tensorwire/job-*")
        assert os.environ["TENSORWIRE_JOB_LOG"] == path
        print(open(path).read())
        print("told", pid, term)
        goodbye()
        """
    done = run(place, text)
    assert done.returncode == 0, done.stderr
    lines = lines_of(done.stdout, "worker 0")
    pid, term = map(int, lines[-1].split()[1:])
    told = [json.loads(line) for line in lines if line.startswith("{")]
    (grant,) = (each for each in told if each["what"] == "grant")
    assert (grant["pid"], grant["term"]) == (pid, term)


@pytest.mark.slow
def test_a_failed_job_is_shown_until_others_have_failed(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = run(place, "kill()\nask('add')\ntell('exit 5')\nwait()")
    assert done.returncode == 5
    (log,) = logs(place, monkeypatch)
    assert not log.running
    assert log.failure.endswith("exited with code 5")
    (shown,) = json.loads(status(place, "--json"))
    assert shown["failed"] == log.failure
    assert [member["restarts"] for member in shown["members"]] == [1, 0]
    text = status(place)
    assert [log.failure in text, log.path in text, "job that failed" in text] == [True] * 3
    assert "was killed by SIGKILL" not in text
    assert "was killed by SIGKILL" in status(place, "--failed")
    for _ in range(10):
        JobLog("others", True, pytest.fail).close(keep=True)
    assert len(found := logs(place, monkeypatch)) == 8
    assert log.job not in [each.job for each in found]


def test_a_log_that_cannot_be_written_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    tmp_path.chmod(0o700)
    said: list[str] = []
    log = JobLog("train.py", True, said.append)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (os.stat(log.path).st_size + 10, limits[1]))
    try:
        log.add("grant", sync=True, kind="server")
        log.add("grant", sync=True, kind="server")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    (line,) = said
    assert line.startswith("the job has no log, and goes on without: ")
    assert not log.path
    assert not logged_jobs()


def test_without_a_folder_the_job_goes_on(place: Place) -> None:
    place.runtime.chmod(0o777)
    refused = place.temporary / f"tensorwire-{os.geteuid()}"
    refused.mkdir()
    refused.chmod(0o777)
    environment = {"XDG_CACHE_HOME": "nowhere"}
    done = run(place, "kill()\nask('add')\nos.kill(os.getpid(), 9)", environment=environment)
    refused.rmdir()
    assert done.returncode == 137
    first, second, third, *_, last = summary(done.stderr)
    assert first.startswith("the job has no log, and goes on without: no folder for")
    assert second.startswith("tensorwire scale will not find this job: no folder for")
    assert "takes its place" in third
    assert last.startswith("it has no log: if the script has saved a checkpoint, job.load goes on")


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        ("", "no checkpoint was saved (job.save), so that the job begins anew: COMMAND"),
        (
            "note_in_job_log('saved', path=__file__ + 'x')",  # it was removed
            "no checkpoint was saved (job.save), so that the job begins anew: COMMAND",
        ),
        (
            "note_in_job_log('saved', path=__file__)",
            "resume from SCRIPT: COMMAND (the script has to load what it finds there, by job.load, "
            "if it does not yet)",
        ),
        (
            "note_in_job_log('loaded', path='a')\nnote_in_job_log('saved', path=__file__)",
            "resume from SCRIPT: COMMAND (in which the script has to load that, and not a)",
        ),
        (
            "note_in_job_log('loaded', path=__file__)",
            "nothing was saved; resume from SCRIPT, as this job did: COMMAND",
        ),
    ],
)
@pytest.mark.parametrize("durable", [True, False])
def test_the_last_line_tells_how_to_go_on(
    place: Place, text: str, advice: str, durable: bool
) -> None:
    text = f"{SAVE}{text}\nos.kill(os.getpid(), signal.SIGKILL)"
    done = run(place, text, durable=durable, patience={**COLD, "goodbye_s": 0.1})
    assert done.returncode == 137
    (*_, last) = summary(done.stderr)
    script = str(place.folder / "script.py")
    start, _, command = advice.replace("SCRIPT", script).partition("COMMAND")
    assert last.startswith(start)
    assert "launching.py" in last
    assert last.endswith(f"{script}{command}")


def test_a_signal_to_the_launcher_is_answered_by_the_last_checkpoint(place: Place) -> None:
    for saved in (True, False):
        text = "note_in_job_log('saved', path=__file__)" if saved else ""
        with start(place, f"{SAVE}{text}\nprint('ready', flush=True)\nwait()") as job:
            job.wait_for("ready")
            job.send(signal.SIGINT)
            assert job.end() == 130, job.text
        _, ended, *rest = summary(job.text)
        assert ended == "ended by SIGINT"
        assert any(each.startswith("resume from ") for each in rest) == saved, job.text


@pytest.mark.parametrize(
    ("loaded", "command", "resumes"),
    [
        ("c/checkpoint-000002", "run t.py c c/checkpoint-000002", "run t.py c c/checkpoint-000007"),
        ("c/checkpoint-000002", "run t.py --from=c/./checkpoint-000002 'a b'",
         "run t.py --from=c/checkpoint-000007 'a b'"),
        ("c", "run t.py c", "run t.py c"),
        ("c/checkpoint-000007", "run t.py", "run t.py"),
        ("", "run t.py", "run t.py (the script has to load what it finds"),
        ("c/checkpoint-000002", "run t.py",
         "run t.py (in which the script has to load that, and not c/checkpoint-000002)"),
    ],
)  # fmt: skip
def test_the_command_names_the_checkpoint_that_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loaded: str, command: str, resumes: str
) -> None:
    """Named for a bug: it named the one that the job had loaded, which `keep` had removed since."""
    monkeypatch.chdir(tmp_path)
    saved = tmp_path / "c/checkpoint-000007"
    saved.mkdir(parents=True)
    log = LoggedJob("", False, saved=str(saved), loaded=loaded and str(tmp_path / loaded))
    line = resume_line(log, command, True)
    assert line.startswith(f"resume from c/checkpoint-000007: {resumes}")


def test_an_error_of_the_script_is_not_answered_by_running_it_again(place: Place) -> None:
    done = run(place, "raise ValueError('so')")
    assert done.returncode == 1
    assert "checkpoint" not in "".join(summary(done.stderr))
