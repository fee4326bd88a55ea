"""tests/warm.py: a forked process is what the command would have given."""

import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import warm

FACTS = """
import ctypes, json, os, resource, signal, sys, threading
kept = (0, 1, 2)
facts = {
    "argv": sys.argv, "orig": sys.orig_argv, "path": sys.path, "name": __name__,
    "file": globals().get("__file__"), "main": sys.modules["__main__"].__dict__ is globals(),
    "environment": dict(os.environ), "folder": os.getcwd(), "parent": os.getppid(),
    "session": os.getsid(0) == os.getpid(), "group": os.getpgid(0) == os.getpid(),
    "limits": [resource.getrlimit(each) for each in range(16)],
    "signals": [str(signal.getsignal(each)) for each in range(1, 32) if each not in (9, 19)],
    "descriptors": sorted(int(each) for each in os.listdir("/proc/self/fd"))[:-1],
    "streams": [[each.encoding, each.errors, each.mode, each.name, each.line_buffering,
                 each.write_through, each is original]
                for each, original in ((sys.stdin, sys.__stdin__), (sys.stdout, sys.__stdout__),
                                       (sys.stderr, sys.__stderr__))],
    "thread": threading.get_native_id() == os.getpid(), "threads": threading.active_count(),
    "shown": [open(f"/proc/self/{each}", "rb").read().decode() for each in ("cmdline", "environ")],
    "cores": sorted(os.sched_getaffinity(0)), "collector": __import__("gc").isenabled(),
    "hash": os.environ.get("PYTHONHASHSEED"), "bytecode": sys.dont_write_bytecode,
}
print(json.dumps(facts))
"""


@pytest.fixture(scope="module", autouse=True)
def nursery() -> None:
    """Waits until it can fork."""
    if not warm.installed[0].forks:
        pytest.skip("none can be forked here: torch is missing, or PR_SET_MM_MAP in the kernel")


def ways(folder: Path) -> dict[str, list[str]]:
    (folder / "facts.py").write_text(FACTS)
    (folder / "link.py").symlink_to(folder / "facts.py")
    return {
        "script": ["facts.py", "a", "-c"],
        "link": [str(folder / "link.py")],
        "module": ["-m", "facts", "-x"],
        "code": ["-u", "-c", FACTS, "b"],
        "safe": ["-P", str(folder / "facts.py")],
    }


def run(monkeypatch: pytest.MonkeyPatch, cold: bool, *command: str, **options: Any) -> Any:
    """Runs Python; when warm, it must have been forked."""
    with monkeypatch.context() as patch:
        if cold:
            patch.setenv(warm.COLD, "1")
        else:
            patch.setattr(warm, "_execute_child", None)  # what else would start it
        return subprocess.run(  # the C library's environment has LINES, which os.environ has not
            [sys.executable, *command],
            capture_output=True,
            text=True,
            timeout=60,
            env=dict(os.environ),
            **options,
        )


@pytest.mark.parametrize("way", ["script", "link", "module", "code", "safe"])
def test_a_forked_process_has_what_the_command_gives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}elsewhere")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    command = ways(tmp_path)[way]
    with open(os.devnull) as file:
        options = {"cwd": tmp_path, "pass_fds": [file.fileno()], "start_new_session": True}
        facts = []
        for cold in (False, True):
            done = run(monkeypatch, cold, *command, **options)
            assert done.returncode == 0, done.stderr
            facts.append(json.loads(done.stdout))
    forked, started = facts
    started["environment"].pop(warm.COLD)
    started["shown"][1] = started["shown"][1].replace(f"{warm.COLD}=1\0", "")
    for name in started:
        assert forked[name] == started[name], name


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import sys; sys.exit(7)", ""),
        ("import sys; sys.exit('no')", "no\n"),
        ("import os; os.abort()", ""),
        ("import os; os.kill(os.getpid(), 9)", ""),
        ("import os, signal; os.kill(os.getpid(), signal.SIGINT)", None),
        ("import atexit; atexit.register(print, 'late'); 1 / 0", None),
        ("import os; os.write(1, b'x'); print('y', end='')", ""),
        ("def", None),
    ],
)
def test_a_forked_process_ends_as_the_command_does(
    monkeypatch: pytest.MonkeyPatch, code: str, said: str | None
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    forked, started = (run(monkeypatch, cold, "-c", code) for cold in (False, True))
    assert (forked.returncode, forked.stdout) == (started.returncode, started.stdout)
    assert forked.stderr.splitlines()[-1:] == started.stderr.splitlines()[-1:]
    assert said is None or forked.stderr == said


def test_torch_is_there_and_no_thread_beside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    code = """
import os, sys
print("torch._dynamo" in sys.modules, len(os.listdir("/proc/self/task")))
import numpy, torch
weight = torch.randn(100, 100, requires_grad=True)
(weight @ weight).sum().backward()
print(torch.get_num_threads(), bool(weight.grad.isfinite().all()))
"""
    assert run(monkeypatch, False, "-c", code).stdout.split() == ["True", "1", "1", "True"]
    monkeypatch.delenv("OMP_NUM_THREADS")
    code = "import torch; print(torch.get_num_threads())"
    forked, started = (run(monkeypatch, cold, "-c", code).stdout for cold in (False, True))
    assert forked == started


@pytest.mark.parametrize(
    "command",
    [
        ["-I", "-c", "pass"], ["-W", "error", "-c", "pass"], ["-X", "dev", "-c", "pass"],
        ["-c", "pass", "LD_PRELOAD"], ["-c", "pass", "PYTHONHASHSEED"], ["-c", "pass", "MKL_CBWR"],
    ],
)  # fmt: skip
def test_what_would_differ_is_not_forked(
    monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    started = []
    original = warm._execute_child

    def execute(*args: Any, **more: Any) -> None:
        started.append(args)
        original(*args, **more)

    monkeypatch.setattr(warm, "_execute_child", execute)
    if len(command) == 3 and command[-1].isupper():
        monkeypatch.setenv(command.pop(), "2" if "LD" not in command else "")
    subprocess.run([sys.executable, *command], check=True)
    assert len(started) == 1


def test_the_workers_of_a_forked_launcher_are_its_children_and_forked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "script.py"
    script.write_text("""
import json, os, sys
print(json.dumps([os.getppid(), os.getpid(), "torch._dynamo" in sys.modules]), flush=True)
if sys.argv[1:]:
    import time; time.sleep(60)
""")
    command = [sys.executable, "-m", "tensorwire", "run", "-w", "2", str(script), "wait"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        facts = [json.loads(launcher.stdout.readline().split("] ", 1)[1]) for _ in range(2)]
        assert [[parent, torch] for parent, _, torch in facts] == [[launcher.pid, True]] * 2
        launcher.kill()
    deadline = time.monotonic() + 10
    while any(_lives(pid) for _, pid, _ in facts):  # they end with their launcher
        assert time.monotonic() < deadline
        time.sleep(0.01)


def _lives(pid: int) -> bool:
    try:
        return "Z" != Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False


def test_limits_of_this_process_are_those_of_a_forked_one(monkeypatch: pytest.MonkeyPatch) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    code = "import resource; print(*resource.getrlimit(resource.RLIMIT_NOFILE))"
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft - 1, hard))
    try:
        assert run(monkeypatch, False, "-c", code).stdout.split() == [str(soft - 1), str(hard)]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert signal.getsignal(signal.SIGPIPE) == signal.SIG_IGN
