"""How a job ends: with which process's code, which one it names, and that the others end too."""

import os
import signal
import time

import pytest
from launching import Place, eventually, lines_of, summary


def test_all_is_well(place: Place) -> None:
    done = place.run("goodbye()", patience={})
    assert done.returncode == 0
    assert lines_of(done.stdout, "server 0")[-1] == "all have said goodbye"
    assert done.stderr == ""


@pytest.mark.parametrize("ending", ["goodbye()", "goodbye(); sys.exit(7)"])
@pytest.mark.parametrize("becomes", ["nothing", "a file"])
def test_a_runtime_folder_that_is_lost_meanwhile(place: Place, ending: str, becomes: str) -> None:
    """Named for a bug: cleaning up failed with an OSError, and a good job ended with 1."""
    lose = f"""
        import shutil
        shutil.rmtree(os.environ["XDG_RUNTIME_DIR"], ignore_errors=True)
        if {becomes == "a file"}:
            open(os.environ["XDG_RUNTIME_DIR"], "w").close()
        {ending}
    """
    done = place.run(lose, workers=1)
    assert done.returncode == (7 if "exit" in ending else 0)
    assert "Traceback" not in done.stderr
    for other in place.temporary.iterdir():  # where the launcher looked for jobs instead
        other.rmdir()


def test_a_server_may_end_while_workers_finish(place: Place) -> None:
    with place.start(
        """
        goodbye()
        print("waiting", flush=True)
        while True:
            try:
                goodbye()
            except (ConnectionRefusedError, ConnectionResetError):
                break
        print("server gone")
        """,
        workers=1,
    ) as job:
        assert job.end() == 0
        assert "[worker 0] server gone" in job.text


def test_servers_that_stay_are_ended(place: Place) -> None:
    done = place.run("print('done')", servers=2)
    assert done.returncode == 0
    said = list(summary(done.stderr))
    assert len(said) == 2
    assert "did not end within 0.1 s after the last worker" in said[0]
    assert "perhaps the script never calls tw.init()" in said[0]


def test_servers_that_ignore_sigterm_are_killed(place: Place) -> None:
    done = place.run("print('done')", environment={"FAKE_SERVER": "stubborn"})
    assert done.returncode == 0
    assert "did not end" in done.stderr


@pytest.mark.parametrize(
    ("failure", "code", "said"),
    [
        ("sys.exit(3)", 3, "exited with code 3"),
        ("raise RuntimeError('oh no')", 1, "raised RuntimeError at "),
        ("os._exit(255)", 255, "exited with code 255"),
        ("os.abort()", 134, "was killed by SIGABRT"),
        ("os.kill(os.getpid(), signal.SIGRTMIN + 2)", 128 + signal.SIGRTMIN + 2, "was killed by"),
    ],
)
def test_one_worker_fails(place: Place, failure: str, code: int, said: str) -> None:
    done = place.run(
        f"""
        if rank == 1:
            {failure}
        wait()
        """,
        workers=3,
    )
    assert done.returncode == code
    first, others, *_ = summary(done.stderr)
    assert first.startswith("worker 1 (pid ")
    assert said in first
    assert first.endswith("; this ended the job")
    assert all(name in others for name in ("worker 0", "worker 2", "server 0"))
    if "oh no" in failure:
        assert "RuntimeError: oh no" in lines_of(done.stderr, "worker 1")


def test_a_worker_that_fails_and_does_not_end(place: Place) -> None:
    """The worker has a thread that goes on, and the others would wait for it for ever."""
    done = place.run(
        """
        if rank == 1:
            import threading
            threading.Thread(target=wait).start()
            raise RuntimeError("oh no")
        wait()
        """,
        patience={"stuck_s": 0.5},
    )
    assert done.returncode == 1
    assert "raised RuntimeError at " in next(summary(done.stderr))
    assert "a thread of it may keep it alive" in done.stderr


def test_a_killed_worker(place: Place) -> None:
    with place.start('print(f"pid of {rank}: {os.getpid()}.")\nwait()') as job:
        os.kill(job.pid_of("1"), signal.SIGKILL)
        assert job.end() == 137
        said = f"worker 1 (pid {job.pid_of('1')}) was killed by SIGKILL (perhaps"
        assert said in job.text


def test_the_others_see_the_failure_and_say_so_themselves(place: Place) -> None:
    """A worker that ends by itself within the grace time is neither signalled nor blamed."""
    done = place.run(
        """
        read = f"{os.path.dirname(__file__)}/fifo"
        if rank == 0:
            open(read, "rb").read()  # ends when worker 1 has
            time.sleep(0.3)  # so that the launcher sees one end after the other
            print("worker 1 is lost", file=sys.stderr)
            sys.exit(9)
        file = open(read, "wb")
        os._exit(4)
        """,
        environment=_fifo(place),
        patience={"grace_s": 20, "alone_s": 0.1},
    )
    assert done.returncode == 4
    assert lines_of(done.stderr, "worker 0") == ["worker 1 is lost"]
    first, others, *_ = summary(done.stderr)
    assert first.startswith("worker 1 ")
    assert "worker 0 exited with code 9" in others


def test_a_killed_server(place: Place) -> None:
    done = place.run(
        """
        if rank == 1:
            parent = f"/proc/{os.getppid()}/task/{os.getppid()}/children"
            for child in open(parent).read().split():
                if b"fake_server" in open(f"/proc/{child}/cmdline", "rb").read():
                    os.kill(int(child), signal.SIGKILL)
        wait()
        """,
        durable=False,
    )
    assert done.returncode == 137
    assert next(summary(done.stderr)).startswith("server 0 (pid ")


# Worker 0 fails, and is seen to end after all who end because of it.
LATE = """
def children():
    return open(f"/proc/{os.getppid()}/task/{os.getppid()}/children").read().split()

before = children()
if rank == 0:
    server = next(c for c in before if "fake_server" in open(f"/proc/{c}/cmdline").read())
    open(f"{os.path.dirname(__file__)}/fifo", "rb").read()
    goodbye()  # the server ends when it has had all connections
    while server in children():
        time.sleep(0.01)
    time.sleep(1.5)  # more than others get to end by themselves
    FAILURE
goodbye()
error = RuntimeError("worker 0 was lost")
error.tensorwire_consequence = True
raise error
"""


@pytest.mark.parametrize(
    ("failure", "code", "said"),
    [
        ("sys.exit(7)", 7, "exited with code 7"),
        ("raise ValueError('oh no')", 1, "raised ValueError at "),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "was killed by SIGKILL"),
    ],
)
def test_a_consequence_that_is_seen_first_is_not_to_blame(
    place: Place, failure: str, code: int, said: str
) -> None:
    """Named for a bug: under load sys.exit(7) ended a job with 1, and a server was to blame."""
    script = LATE.replace("FAILURE", failure)
    script = script.replace("goodbye()\nerror =", "FIFO\ngoodbye()\nerror =", 1)
    script = script.replace("FIFO", 'open(f"{os.path.dirname(__file__)}/fifo", "wb").close()')
    environment = {**_fifo(place), "FAKE_SERVER": "consequence"}
    done = place.run(script, environment=environment, durable=False)
    assert done.returncode == code
    first, others, *_ = summary(done.stderr)
    assert first.startswith("worker 0 (pid ")
    assert said in first
    assert "server 0 ended because it had lost another process" in others
    assert "worker 1 exited with code 1" in others


def test_a_consequence_without_a_cause(place: Place) -> None:
    given = {"environment": {"FAKE_SERVER": "consequence"}, "patience": {"stuck_s": 0.5}}
    done = place.run("goodbye()\nwait()", durable=False, **given)
    assert done.returncode == 1
    said = next(summary(done.stderr))
    assert "server 0 (pid " in said
    assert "ended because it had lost another process; this ended the job" in said


def test_a_server_that_fails_after_the_goodbyes(place: Place) -> None:
    done = place.run("goodbye()", environment={"FAKE_SERVER": "late"}, patience={})
    assert done.returncode == 5
    assert next(summary(done.stderr)).startswith("server 0 (pid ")


@pytest.mark.slow
def test_a_worker_that_ignores_sigterm_is_killed_in_time(place: Place) -> None:
    with place.start(
        """
        if rank == 0:
            signal.signal(signal.SIGTERM, lambda *_: print("no, thanks"))
            print("armed")
            wait()
        sys.stdin.read()
        while not os.path.exists(sys.argv[1]):
            time.sleep(0.01)
        sys.exit(6)
        """,
        str(place.folder / "go"),
        patience={},
    ) as job:
        job.wait_for("armed")
        (place.folder / "go").touch()
        start = time.monotonic()
        assert job.end() == 6
        # 3 + 1 s by the contract; twice as much for a busy machine.
        assert 3.9 < time.monotonic() - start < 8
        assert "[worker 0] no, thanks" in job.text
        assert "worker 0 was killed by SIGKILL" in job.text


def test_what_a_worker_has_started_goes_with_it(place: Place) -> None:
    """A worker ends well and early; its children would stay, holding its stdout too."""
    with place.start(
        """
        if rank == 0:
            child = subprocess.Popen(["sleep", "1000"])
            print(f"pid of child: {child.pid}.")
            os._exit(0)
        wait()
        """
    ) as job:
        child = job.pid_of("child")
        assert eventually(lambda: child not in place.processes())
        assert job.poll() is None
        job.send(signal.SIGTERM)
        assert job.end() == 143


DAEMONS = {
    "a session of its own": (
        """
        child = subprocess.Popen(["sleep", "1000"], start_new_session=True).pid
        """,
        0,
    ),
    "forked twice": (
        """
        read, write = os.pipe()
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                os.write(write, b"%d" % os.getpid())
                os.execvp("sleep", ["sleep", "1000"])
            os._exit(0)
        child = int(os.read(read, 20))
        os.wait()
        """,
        7,
    ),
}


@pytest.mark.parametrize(("daemon", "code"), DAEMONS.values(), ids=DAEMONS)
def test_a_child_that_left_the_group_does_not_hold_the_job(
    place: Place, daemon: str, code: int
) -> None:
    """The child keeps the stdout of the worker, and is left alone, as docs/launch.md says."""
    end = f"""
        print(f"pid of child: {{child}}.")
        sys.exit({code})
        """
    with place.start(daemon + end, workers=1) as job:
        child = job.pid_of("child")
        try:
            assert job.end() == code
            assert child in place.processes()
        finally:
            os.kill(child, signal.SIGKILL)


def _fifo(place: Place) -> dict[str, str]:
    os.mkfifo(place.folder / "fifo")
    return {}
