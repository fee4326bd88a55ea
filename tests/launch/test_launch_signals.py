"""Signals to the launcher: passed on once, then insisted on; nothing survives a killed launcher."""

import concurrent.futures
import os
import signal
import time

import pytest
from launching import FAKE_SERVER, WAIT_S, Place, ended, eventually

from tensorwire import launch
from tensorwire.launch.spec import JobSpec
from tensorwire.launch.supervisor import _SECOND_INTERRUPT_S
from tensorwire.testing import assert_no_leak

LISTENING = """
def note(number, frame):
    print("got", signal.Signals(number).name)
    sys.exit(0)

for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, note)
print(f"ready {rank}")
wait()
"""
DEAF = """
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda number, frame: print("got", number))
print(f"ready {rank}")
wait()
"""


@pytest.mark.parametrize(
    ("sent", "code", "received"),
    [
        (signal.SIGINT, 130, "SIGINT"),
        (signal.SIGTERM, 143, "SIGTERM"),
        (signal.SIGHUP, 129, "SIGTERM"),
    ],
)
def test_a_signal_ends_the_job(place: Place, sent: int, code: int, received: str) -> None:
    with place.start(LISTENING, patience={"grace_s": 20, "alone_s": 0.1}) as job:
        job.wait_for("ready 0", "ready 1")
        job.send(sent)
        assert job.end() == code
        for rank in (0, 1):
            assert job.text.count(f"[worker {rank}] got {received}\n") == 1
        assert f"tensorwire run: ended by {signal.Signals(sent).name}" in job.text


def test_a_keyboard_interrupt_in_the_workers(place: Place) -> None:
    with place.start('print(f"ready {rank}")\nwait()') as job:
        job.wait_for("ready 0", "ready 1")
        job.send(signal.SIGINT)
        assert job.end() == 130
        assert job.text.count("KeyboardInterrupt") == 2
        assert "this ended the job" not in job.text


def test_who_ignores_it_is_terminated_and_killed(place: Place) -> None:
    with place.start(DEAF, environment={"FAKE_SERVER": "stubborn"}) as job:
        job.wait_for("ready 0", "ready 1")
        job.send(signal.SIGINT)
        assert job.end() == 130
        for rank in (0, 1):
            for number in (signal.SIGINT, signal.SIGTERM):
                assert f"[worker {rank}] got {int(number)}\n" in job.text


def test_a_second_interrupt_kills_at_once(place: Place) -> None:
    with place.start(DEAF, patience={"grace_s": 1000}) as job:
        job.wait_for("ready 0", "ready 1")
        job.send(signal.SIGINT)
        job.wait_for("[worker 0] got 2", "[worker 1] got 2", "once more Ctrl-C kills it")
        time.sleep(_SECOND_INTERRUPT_S + 0.1)  # sooner it would count as the same
        job.send(signal.SIGINT)
        assert job.end() == 130


def test_a_second_sigterm_is_the_first_one(place: Place) -> None:
    """`timeout` sends two, and a closing terminal two SIGHUP: no reason to kill."""
    with place.start(DEAF) as job:
        job.wait_for("ready 0", "ready 1")
        os.kill(job.pid, signal.SIGTERM)
        job.wait_for("[worker 0] got 15")
        job.send(signal.SIGTERM)
        assert job.end() == 143
        assert job.text.count("[worker 0] got 15") == 2  # passed on, and after the grace time


def test_an_interrupt_while_a_server_starts(place: Place) -> None:
    with place.start(
        "print('never')", environment={"FAKE_SERVER": "silent"}, patience={"grace_s": 1000}
    ) as job:
        job.wait_for("[server 0] started")
        job.send(signal.SIGINT)
        assert job.end() == 130
        assert "never" not in job.text


def test_an_interrupt_while_the_servers_end(place: Place) -> None:
    with place.start('print("done")', patience={"goodbye_s": 1000, "grace_s": 1000}) as job:
        job.wait_for("[worker 0] done", "[worker 1] done")
        job.send(signal.SIGINT)
        assert job.end() == 130


def test_an_interrupt_while_nobody_reads_our_output(place: Place) -> None:
    """After Ctrl-S in a terminal, or in `| less`, the job must end all the same."""
    with place.start(
        """
        print(f"pid of {rank}: {os.getpid()}.")
        while True:
            print("x" * 1000)
        """,
        workers=1,
    ) as job:
        worker = job.pid_of("0")
        os.kill(job.pid, signal.SIGINT)
        assert eventually(lambda: ended(worker))
        assert eventually(lambda: ended(job.pid))
        assert job.end() == 130


def test_nohup_is_respected(place: Place) -> None:
    with place.start(LISTENING, workers=1, ignored=[signal.SIGHUP]) as job:
        job.wait_for("ready 0")
        job.send(signal.SIGHUP)
        job.send(signal.SIGTERM)
        assert job.end() == 143


@pytest.mark.parametrize("when", ["running", "starting"])
def test_a_killed_launcher_takes_all_with_it(place: Place, when: str) -> None:
    with place.start(
        """
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
        print(f"ready {rank}")
        wait()
        """,
        environment={"FAKE_SERVER": "silent"} if when == "starting" else {},
    ) as job:
        job.wait_for(*(["ready 0", "ready 1"] if when == "running" else ["[server 0] started"]))
        # Launcher, guard, server; two workers with a child each.
        expected = 7 if when == "running" else 3
        assert eventually(lambda: len(place.processes()) == expected)
        job.send(signal.SIGKILL)
        start = time.monotonic()
        assert eventually(lambda: not place.processes())
        assert time.monotonic() - start < 10


def test_the_kernel_ends_the_job_where_even_the_guard_is_gone(place: Place) -> None:
    with place.start('print(f"ready {rank}")\nwait()') as job:
        job.wait_for("ready 0", "ready 1")
        (guard,) = (pid for pid, command in place.processes().items() if "guard.py" in command)
        os.kill(guard, signal.SIGKILL)
        assert eventually(lambda: guard not in place.processes())
        os.kill(job.pid, signal.SIGKILL)
        assert eventually(lambda: not place.processes())


def test_a_stopped_worker_is_ended_too(place: Place) -> None:
    with place.start('print(f"pid of {rank}: {os.getpid()}.")\nwait()') as job:
        os.kill(job.pid_of("0"), signal.SIGSTOP)
        os.kill(job.pid_of("1"), signal.SIGKILL)
        assert job.end() == 137


def test_ignored_sigchld_loses_no_exit_code(place: Place) -> None:
    assert place.run("sys.exit(3)", workers=1, ignored=[signal.SIGCHLD]).returncode == 3


def test_the_caller_has_its_handlers_back(place: Place) -> None:
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD)
    before = [signal.getsignal(number) for number in numbers]
    with assert_no_leak():
        code = launch.run(JobSpec([place.script("goodbye()")], 1, server_command=FAKE_SERVER))
    assert code == 0
    assert [signal.getsignal(number) for number in numbers] == before
    assert signal.set_wakeup_fd(-1) == -1


def test_only_the_main_thread_can_run_a_job(place: Place) -> None:
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        job = JobSpec([place.script("")], 1, server_command=FAKE_SERVER)
        call = pool.submit(launch.run, job)
        with pytest.raises(ValueError, match="main thread"):
            call.result(WAIT_S)
