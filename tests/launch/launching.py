"""Runs the launcher as a process of its own, with scripts for its workers, and watches both."""

import contextlib
import json
import os
import resource
import secrets
import select
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tensorwire import launch

HERE = Path(__file__).resolve().parent
FAKE_SERVER = [sys.executable, str(HERE / "fake_server.py")]
MARK = "LAUNCH_TEST_MARK"
WAIT_S = 30.0
# Servers that get no goodbye are ended quickly; the rest is long enough for a busy machine.
QUICK = {"goodbye_s": 0.1, "grace_s": 1.0, "alone_s": 0.2, "kill_s": 0.5}

# What the scripts of the tests begin with.
PREAMBLE = """
import os, signal, socket, subprocess, sys, time
rank = int(os.environ["TENSORWIRE_RANK"])

def wait():
    while True:
        signal.pause()

def goodbye():
    for address in os.environ["TENSORWIRE_SERVERS"].split(","):
        host, _, port = address.rpartition(":")
        socket.create_connection((host, int(port))).close()
"""


class Place:
    """A folder for scripts, and a mark in the environment by which every process is found."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.mark = secrets.token_hex(16)
        self.temporary = folder / "temporary"
        self.temporary.mkdir()
        self.runtime = folder / "runtime"
        self.runtime.mkdir(mode=0o700)

    def script(self, text: str, name: str = "script.py") -> str:
        path = self.folder / name
        path.write_text(PREAMBLE + textwrap.dedent(text))
        return str(path)

    def environment(self, **more: str) -> dict[str, str]:
        places = {"TMPDIR": str(self.temporary), "XDG_RUNTIME_DIR": str(self.runtime)}
        environment = {**os.environ, MARK: self.mark, **places, **more}
        for name in ("OMP_NUM_THREADS", "NO_COLOR"):
            if name not in more:
                environment.pop(name, None)
        return environment

    def command(self, *command: str, **options: Any) -> list[str]:
        """Command of a launcher with the fake server; `options`: of `JobSpec` and `run`."""
        options = {"workers": 2, "server_command": FAKE_SERVER, "patience": QUICK, **options}
        return [sys.executable, str(HERE / "launching.py"), json.dumps(options), *command]

    def run(
        self, text: str, *arguments: str, environment: dict[str, str] | None = None, **options: Any
    ) -> subprocess.CompletedProcess[str]:
        """Runs a job to its end."""
        command = self.command(self.script(text), *arguments, **options)
        return self.call(command, env=self.environment(**(environment or {})))

    def call(self, command: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
        """Runs a command to its end; `options` are those of subprocess."""
        given = {"env": self.environment(), "timeout": 60, **options}
        if "input" not in given:
            given["stdin"] = subprocess.DEVNULL
        return subprocess.run(command, capture_output=True, text=True, errors="replace", **given)

    def start(
        self, text: str, *arguments: str, environment: dict[str, str] | None = None, **options: Any
    ) -> "Launched":
        """Starts a job in a process group of its own."""
        command = self.command(self.script(text), *arguments, **options)
        return Launched(command, self.environment(**(environment or {})))

    def processes(self) -> dict[int, str]:
        """Living processes with our mark: number and command."""
        found = {}
        for folder in Path("/proc").iterdir():
            if not folder.name.isdigit():
                continue
            try:
                marked = self.mark.encode() in (folder / "environ").read_bytes()
                if marked and not ended(int(folder.name)):
                    command = (folder / "cmdline").read_bytes().replace(b"\0", b" ")
                    found[int(folder.name)] = command.decode(errors="replace")
            except OSError:
                continue
        return found


class Launched:
    """A running launcher; its stdout and stderr come together."""

    def __init__(self, command: list[str], environment: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            process_group=0,
        )
        self.pid = self._process.pid
        self.text = ""

    def __enter__(self) -> "Launched":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def wait_for(self, *texts: str) -> None:
        """Reads what the launcher prints until all texts are in it."""
        deadline = time.monotonic() + WAIT_S
        while not all(text in self.text for text in texts):
            assert self._read(deadline), f"no {texts} in:\n{self.text}"

    def pid_of(self, who: str) -> int:
        """Returns the number that a process printed as "pid of WHO: N."."""
        self.wait_for(f"pid of {who}: ")
        while "." not in (rest := self.text.partition(f"pid of {who}: ")[2]):
            assert self._read(time.monotonic() + WAIT_S)
        return int(rest.partition(".")[0])

    def send(self, number: int) -> None:
        """Sends a signal to the whole process group, as a terminal does."""
        os.killpg(self.pid, number)

    def end(self) -> int:
        """Waits for the end and returns the exit code."""
        deadline = time.monotonic() + WAIT_S
        while self._read(deadline):
            pass
        return self._process.wait(max(deadline - time.monotonic(), 0.1))

    def poll(self) -> int | None:
        return self._process.poll()

    def heard(self, within_s: float) -> str:
        """All that it has printed, and prints within so long."""
        deadline = time.monotonic() + within_s
        with contextlib.suppress(AssertionError):
            while self._read(deadline):
                pass
        return self.text

    def _read(self, deadline: float) -> bool:
        assert self._process.stdout is not None
        left = deadline - time.monotonic()
        ready, _, _ = select.select([self._process.stdout], [], [], max(left, 0))
        assert ready, f"nothing came in time; before came:\n{self.text}"
        data = os.read(self._process.stdout.fileno(), 1 << 16)
        self.text += data.decode(errors="replace")
        return bool(data)


def ended(pid: int) -> bool:
    """Tells whether it is gone, or only waits for its parent to take notice."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return True
    return stat.rpartition(")")[2].split()[0] in "ZX"


def eventually(condition: Callable[[], bool], within_s: float = WAIT_S) -> bool:
    deadline = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def lines_of(text: str, name: str) -> list[str]:
    """Returns the lines of one process, without the prefix."""
    prefix = f"[{name}] "
    return [line.removeprefix(prefix) for line in text.split("\n") if line.startswith(prefix)]


def summary(text: str) -> Iterator[str]:
    """Returns the lines of the launcher itself."""
    start = "tensorwire run: "
    return (line.removeprefix(start) for line in text.splitlines() if line.startswith(start))


def main() -> None:
    """Runs the launcher: the options of `JobSpec` and `run` as JSON, then the command.

    Two more options: "ignored" are signals, and "hard_limit" is the limit of open files.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)  # a shell may run the tests with some ignored
    options = json.loads(sys.argv[1])
    for number in options.pop("ignored", []):
        signal.signal(number, signal.SIG_IGN)
    patience = launch.Patience(**options.pop("patience"))
    prefix = options.pop("prefix", True)
    if limit := options.pop("hard_limit", None):
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit // 2, limit))
    _count_descriptors()
    code = launch.run(launch.JobSpec(sys.argv[2:], **options), prefix=prefix, patience=patience)
    _count_descriptors()
    sys.exit(code)


def _count_descriptors() -> None:
    if "COUNT_DESCRIPTORS" in os.environ:
        print(f"descriptors: {len(os.listdir('/proc/self/fd'))}", flush=True)


if __name__ == "__main__":
    main()
