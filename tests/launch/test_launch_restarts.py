"""Servers that die: their successors, with which state, how often, and how the job then ends."""

import os
import pty
import re
import resource
import signal
import subprocess
import textwrap
from typing import Any

import pytest
from launching import (
    FAKE_SERVER,
    QUICK,
    WAIT_S,
    Launched,
    Place,
    eventually,
    lines_of,
    summary,
)

from tensorwire.launch import JobSpec

WARM = {**QUICK, "standby_s": 0.1, "goodbye_s": 10.0}
COLD = {**WARM, "standby_s": 1000.0}

# Scripts talk to servers in words; what a dying server has not answered is asked again.
ASK = """
def addresses():
    return os.environ["TENSORWIRE_SERVERS"].split(",")

def ask(words, server=0):
    host, _, port = addresses()[server].rpartition(":")
    while True:
        try:
            with socket.create_connection((host, int(port))) as connection:
                connection.sendall(words.encode() + b"\\n")
                answer = connection.makefile().readline()
        except ConnectionResetError:
            continue
        if answer:
            return [int(part) for part in answer.split()]

def tell(words, server=0):
    host, _, port = addresses()[server].rpartition(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(words.encode() + b"\\n")
        connection.makefile().readline()

def wait_for_go():
    while not os.path.exists(os.path.join(os.path.dirname(__file__), "go")):
        time.sleep(0.01)

def kill(server=0):
    pid = ask("who", server)[0]
    os.kill(pid, signal.SIGKILL)
    return pid
"""


def run(place: Place, text: str, **options: Any) -> subprocess.CompletedProcess[str]:
    options = {"workers": 1, "durable": True, "patience": COLD, **options}
    return place.run(ASK + textwrap.dedent(text), **options)


def start(place: Place, text: str, **options: Any) -> Launched:
    options = {"workers": 1, "durable": True, "patience": COLD, **options}
    return place.start(ASK + textwrap.dedent(text), **options)


def go(place: Place) -> None:
    (place.folder / "go").touch()


def test_a_server_that_is_killed_is_replaced(place: Place) -> None:
    done = run(
        place,
        """
        assert os.environ["TENSORWIRE_DURABLE"] == "1"
        for _ in range(3):
            ask("add")
        old = kill()
        pid, term, counter = ask("add")
        assert (pid != old, term, counter) == (True, 1, 4)
        print(old, pid)
        goodbye()
        """,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    old, new = lines_of(done.stdout, "worker 0")[0].split()
    assert list(summary(done.stderr)) == [
        f"server 0 (pid {old}) was killed by SIGKILL; server 0 (pid {new}) takes its place "
        "(restart 1)"
    ]
    assert "durable 1 True" in lines_of(done.stdout, "server 0")
    assert lines_of(done.stdout, "server 0")[-1] == "all have said goodbye"


@pytest.mark.parametrize("kind", ["terminal", "pipe"])
def test_a_server_is_replaced_while_nobody_reads(place: Place, kind: str) -> None:
    """Not even what a worker prints without end, more than the launcher keeps."""
    text = """
        import select
        wait_for_go()
        os.set_blocking(1, False)
        poll = select.poll()
        poll.register(1, select.POLLOUT)
        while poll.poll(500):
            os.write(1, b"x" * 199 + b"\\n")
        kill()
        ask("add")
        open(os.path.join(os.path.dirname(__file__), "replaced"), "w").close()
        wait()
        """
    ours, theirs = pty.openpty() if kind == "terminal" else os.pipe()
    options = {"workers": 2, "durable": True, "patience": COLD}
    process = subprocess.Popen(
        place.command(
            place.script(f"{ASK}if rank == 0: wait()\n{textwrap.dedent(text)}"), **options
        ),
        env=place.environment(),
        stdin=subprocess.DEVNULL,
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    go(place)
    try:
        assert eventually((place.folder / "replaced").exists)
        process.send_signal(signal.SIGTERM)
        assert process.wait(WAIT_S) == 143
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def test_a_warm_standby_takes_over_and_another_one_follows(place: Place) -> None:
    text = """
        wait_for_go()
        kill()
        print(f"pid of successor: {ask('add')[0]}.")
        wait()
        """
    with start(place, text, patience=WARM) as job:
        standby = job.pid_of("standby")
        go(place)
        assert job.pid_of("successor") == standby
        job.wait_for("[server 0] took over")
        assert f"[standby] pid of standby: {standby}." in job.text
        job.text = ""
        assert job.pid_of("standby") != standby
        job.send(signal.SIGTERM)
        assert job.end() == 143
        assert list(summary(job.text)) == ["ended by SIGTERM"]


def test_a_standby_is_no_part_of_a_job_that_ends_well(place: Place) -> None:
    with start(place, "wait_for_go()\ngoodbye()", patience=WARM) as job:
        job.pid_of("standby")
        go(place)
        assert job.end() == 0
        assert not list(summary(job.text))


def test_a_standby_is_no_part_of_a_job_that_fails(place: Place) -> None:
    with start(place, "wait_for_go()\nsys.exit(3)", patience={**QUICK, "standby_s": 0.1}) as job:
        job.pid_of("standby")
        go(place)
        assert job.end() == 3
        assert "standby" not in " ".join(summary(job.text))


@pytest.mark.parametrize("patience", [WARM, COLD], ids=["warm", "cold"])
def test_many_deaths_with_progress_between_them(place: Place, patience: dict[str, float]) -> None:
    done = run(
        place,
        """
        for n in range(8):
            assert ask("add")[1:] == [n, n + 1]
            kill()
        ask("who")  # one that dies may still accept a goodbye and take it with it
        goodbye()
        """,
        restarts=1,
        patience=patience,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    said = list(summary(done.stderr))
    assert len(said) == 8, said
    assert said[-1].endswith("(restart 8)")


def test_deaths_without_progress_end_the_job(place: Place) -> None:
    done = run(
        place,
        """
        kill()
        ask("add")
        for _ in range(3):
            kill()
        wait()
        """,
        restarts=2,
    )
    assert done.returncode == 137
    *replaced, why, others, advice = summary(done.stderr)
    assert len(replaced) == 3
    assert re.fullmatch(
        r"server 0 \(pid \d+\) was killed by SIGKILL after it had been replaced 3 times, "
        r"the last 2 without getting any further \(perhaps .*\); this ended the job",
        why,
    )
    assert others.startswith("after that worker 0 ")
    assert "server" not in others
    assert advice.startswith("no checkpoint was saved (job.save), so that the job begins anew: ")


def test_two_servers_that_are_killed_at_once(place: Place) -> None:
    text = """
        wait_for_go()
        pids = [ask("who", server)[0] for server in (0, 1)]
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        assert ask("add", 0)[1:] == ask("add", 1)[1:] == [1, 1]
        goodbye()
        """
    with start(place, text, servers=2, patience=WARM) as job:
        job.pid_of("standby")
        go(place)
        assert job.end() == 0, job.text
        assert "took over with servers=''" in job.text
        assert "took over with servers='127.0.0.1:" in job.text
        assert len(list(summary(job.text))) == 2


def test_a_standby_that_is_killed_is_started_again(place: Place) -> None:
    with start(place, "wait_for_go()\nkill()\nask('who')\ngoodbye()", patience=WARM) as job:
        first = job.pid_of("standby")
        job.text = ""
        os.kill(first, signal.SIGKILL)
        assert job.pid_of("standby") != first
        go(place)
        assert job.end() == 0
        assert len(list(summary(job.text))) == 1


def test_a_standby_that_cannot_run_is_given_up(place: Place) -> None:
    with start(
        place, "wait()", patience={**WARM, "standby_s": 0.01}, environment={"FAKE_STANDBY": "fails"}
    ) as job:
        job.wait_for("the standby exited with code 3, 4 times in a row: there is none from now on")
        job.send(signal.SIGTERM)
        assert job.end() == 143
        assert job.text.count("pid of standby") == 4


@pytest.mark.parametrize(
    ("wrong", "code", "how"),
    [
        ("dies", 137, "was killed by SIGKILL"),
        ("exits", 9, "exited with code 9"),
        ("fails", 3, "exited with code 3"),
        ("deaf", 137, "did not take over within 0.5 s"),
    ],
)
def test_a_successor_that_does_not_take_over_is_one_more_death(
    place: Place, wrong: str, code: int, how: str
) -> None:
    done = run(
        place,
        "kill()\nwait()",
        restarts=2,
        patience={**COLD, "start_s": 0.5 if wrong == "deaf" else 30},
        environment={"FAKE_STANDBY": wrong, "FAKE_FILES": "1"},
    )
    assert done.returncode == code
    first, second, why, *_ = summary(done.stderr)
    assert first.endswith("(restart 1)")
    assert how in second
    assert f"{how} after it had been replaced 2 times without getting any further" in why


@pytest.mark.parametrize("files", [0, 1500])
def test_ctrl_c_during_a_takeover(place: Place, files: int) -> None:
    """With many files the successor has not been told everything when the job ends."""
    environment = {"FAKE_STANDBY": "slow", "FAKE_FILES": str(files)}
    with start(place, "print('ready')\nkill()\nask('who')", environment=environment) as job:
        job.wait_for("(restart 1)")
        job.send(signal.SIGINT)
        assert job.end() == 130
        assert "this ended the job" not in job.text


def test_many_descriptors_are_handed_over_again_and_again(place: Place) -> None:
    """More than a socket holds at once, and each time the launcher still has all of them."""
    done = run(
        place,
        "for n in range(1, 3):\n    kill()\n    assert ask('add')[1:] == [n, n]\ngoodbye()",
        environment={"FAKE_FILES": "1500"},
    )
    assert done.returncode == 0, done.stdout + done.stderr


UNREADABLE = "its message to the launcher cannot be understood"
MISTAKES = {
    "nothing": "its message has no known key: '{}'",
    "no-json": f"{UNREADABLE}: 'utf-8' codec can't decode byte 0xff",
    "deep": f"{UNREADABLE}: it is nested too deeply: '[[[",
    "no-object": f"{UNREADABLE}: it is [1], not an object: '[1]'",
    "no-descriptor": "its 'keep' of 'a' came with 0 descriptors",
    "two-descriptors": "its 'keep' of 'a' came with 2 descriptors",
    "a-drop-with-one": "its 'drop' of 'numbers' came with 1 descriptors",
    "too-long": f"{UNREADABLE}: it is longer than 65536 bytes",
    "no-offset": "the offset of 'progress' in 'a' is -1",
    "many-keys": "the launcher keeps at most 4096 descriptors",
}


@pytest.mark.parametrize(("what", "said"), MISTAKES.items(), ids=MISTAKES)
def test_what_a_server_may_not_say_fails_the_job(place: Place, what: str, said: str) -> None:
    done = run(place, f"tell('say {what}')\nwait()", patience={**COLD, "goodbye_s": 0.1})
    assert done.returncode == 1, done.stderr
    why = next(summary(done.stderr))
    unkept = r"server 0 \(pid \d+\) could not be replaced if it were killed: "
    assert re.match(unkept + re.escape(said), why), why
    assert why.endswith("; this ended the job")


def test_too_few_descriptors_to_keep_fails_the_job(place: Place) -> None:
    limits = {"hard_limit": 64}
    done = run(place, "wait()", environment={"FAKE_FILES": "100"}, **limits)
    assert done.returncode == 1
    why = next(summary(done.stderr))
    assert (
        "it may have 64 open files; raise the hard limit (ulimit -Hn) or use --on-death end" in why
    )


def test_processes_keep_the_limit_that_was(place: Place) -> None:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    text = "import resource\nprint(resource.getrlimit(resource.RLIMIT_NOFILE)[0])\ngoodbye()"
    assert lines_of(run(place, text).stdout, "worker 0") == [str(soft)]


@pytest.mark.parametrize("end", ["goodbye()", "sys.exit(3)", "tell('say two-descriptors')\nwait()"])
def test_no_descriptor_is_left_open(place: Place, end: str) -> None:
    options = {"FAKE_FILES": "20", "COUNT_DESCRIPTORS": "1"}
    done = run(place, f"kill()\nask('add')\n{end}", environment=options)
    before, after = re.findall(r"descriptors: (\d+)", done.stdout)
    assert before == after
    assert "(restart 1)" in done.stderr


@pytest.mark.parametrize("durable", [True, False])
def test_a_server_without_a_listener_or_a_keeper_is_not_replaced(
    place: Place, durable: bool
) -> None:
    if durable:
        done = run(place, "ask('lose')\nkill()\nwait()")
    else:
        text = """
            import glob
            for path in glob.glob("/proc/[0-9]*/cmdline"):
                words = open(path, "rb").read()
                if b"fake_server" in words and b"launching" not in words:
                    pid = int(path.split("/")[2])
                    if f"PPid:\\t{os.getppid()}\\n" in open(f"/proc/{pid}/status").read():
                        os.kill(pid, signal.SIGKILL)
            wait()
            """
        done = run(place, text, durable=False, environment={"TENSORWIRE_DURABLE": "1"})
        assert "durable None False" in done.stdout
    assert done.returncode == 137
    why, *_ = summary(done.stderr)
    assert re.match(r"server 0 \(pid \d+\) was killed by SIGKILL \(perhaps", why)


def test_a_server_that_exits_with_a_code_ends_the_job(place: Place) -> None:
    done = run(place, "kill()\nask('add')\ntell('exit 5')\nwait()")
    assert done.returncode == 5
    _, why, *_ = summary(done.stderr)
    assert why.endswith("exited with code 5; this ended the job")


def test_a_worker_that_fails_after_a_restart_is_the_cause(place: Place) -> None:
    done = run(place, "kill()\nask('add')\nsys.exit(6)")
    assert done.returncode == 6
    _, why, others, *_ = summary(done.stderr)
    assert why.startswith("worker 0 ")
    assert others.count("server 0") == 1


def test_a_server_that_is_killed_in_the_end_is_not_replaced(place: Place) -> None:
    text = """
        def stop(*_):
            kill()
            sys.exit(0)
        signal.signal(signal.SIGTERM, stop)
        print("ready")
        wait()
        """
    with start(place, text) as job:
        job.wait_for("ready")
        job.send(signal.SIGTERM)
        assert job.end() == 143
        assert "takes its place" not in job.text


def test_a_host_that_does_not_tell_which_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Named for a bug: an unreadable boot id forbade every job, also those that need none."""
    monkeypatch.setattr("tensorwire.launch.spec.boot_id", lambda: "")
    job: dict[str, Any] = {"command": (__file__,), "workers": 1}
    job["server_command"] = tuple(FAKE_SERVER)
    assert not JobSpec(**job).is_durable
    with pytest.raises(ValueError, match="boot_id cannot be read here"):
        JobSpec(**job, durable=True)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"restarts": 0}, "restarts is 0"),
        ({"transports": ("tcp",)}, "add shm, or use --on-death end"),
        ({"listen": "0.0.0.0"}, "listen on 127.0.0.1, or use --on-death end"),
        ({"restarts": -1}, "restarts is -1"),
    ],
)
def test_jobs_that_cannot_be_durable(options: dict[str, Any], said: str) -> None:
    job = {"command": (__file__,), "workers": 1, "server_command": tuple(FAKE_SERVER), **options}
    with pytest.raises(ValueError, match=re.escape(said)):
        JobSpec(**job, durable=True)
    if options != {"restarts": -1}:
        assert not JobSpec(**job).is_durable
        assert not JobSpec(**job, durable=False).is_durable


def test_transports_of_the_environment_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENSORWIRE_TRANSPORTS", "tcp")
    with pytest.raises(ValueError, match="add shm"):
        JobSpec((__file__,), 1, durable=True, server_command=tuple(FAKE_SERVER))


def test_the_default() -> None:
    job = JobSpec((__file__,), 1, listen="::1", server_command=tuple(FAKE_SERVER))
    assert job.is_durable
    assert job.environment()["TENSORWIRE_DURABLE"] == "default"
    asked = JobSpec((__file__,), 1, durable=True, server_command=tuple(FAKE_SERVER))
    assert asked.environment()["TENSORWIRE_DURABLE"] == "1"


def test_a_job_that_nobody_asked_to_be_durable_is_not_ended_by_that(place: Place) -> None:
    """With a low limit of open files the job runs without durability, and a line says it."""
    text = "ask('add')\nprint(os.environ.get('TENSORWIRE_DURABLE'))\ngoodbye()"
    few = {"hard_limit": 256, "environment": {"FAKE_FILES": "300"}}
    done = run(place, text, durable=None, **few)
    assert done.returncode == 0, done.stderr
    assert lines_of(done.stdout, "worker 0") == ["default"]
    (line,) = summary(done.stderr)
    assert re.match(r"server 0 \(pid \d+\) will not be replaced if it is killed: the la", line)
    done = run(place, "goodbye()", durable=None, hard_limit=128)
    assert done.returncode == 0, done.stderr
    assert "durable None False" in done.stdout
    assert not list(summary(done.stderr))


@pytest.mark.parametrize("options", [{"restarts": 0}, {"transports": ("tcp",)}])
def test_where_it_cannot_be_the_default_is_not_durable(
    place: Place, options: dict[str, Any]
) -> None:
    done = run(place, "goodbye()", durable=None, **options)
    assert done.returncode == 0, done.stderr
    assert "durable None False" in done.stdout
    assert not list(summary(done.stderr))
