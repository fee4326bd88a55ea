"""Jobs that benches start by a launcher: their processes, output, and turns by a socket."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar

from tensorwire.bench.processes import PairError

PACKAGE = Path(__file__).parent
_PATIENCE_S = 180.0
_END_S = 15.0
_REPLACED = re.compile(r"(?:\d \(pid (?=\d+\) takes its place)|is started again as pid )(\d+)")
# Variables of a launcher under which the bench itself may run.
_FOREIGN = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "SLURM_", "OMPI_", "PMI_", "TORCHELASTIC_")


def environment(**more: str) -> dict[str, str]:
    """Returns the environment of a process that finds this package and has one thread."""
    found = {name: text for name, text in os.environ.items() if not name.startswith(_FOREIGN)}
    paths = [str(PACKAGE.parent), *filter(None, [found.get("PYTHONPATH")])]
    return found | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"} | more


def run_command(*options: str, python: str = sys.executable) -> list[str]:
    """Returns a command that starts a job; its script and arguments follow."""
    return [python, "-m", "tensorwire", "run", *options]


def last_line(text: str) -> str:
    """Returns the first line with an error, or else the last line, of a process's output."""
    lines = text.strip().splitlines()
    found = [line for line in lines if "Error:" in line][:1] or lines[-1:]
    return found[0][:300] if found else "it said nothing"


def script(name: str, *arguments: object) -> list[str]:
    """Returns the path of a script in this folder, and its arguments."""
    return [str(PACKAGE / name), *map(str, arguments)]


class LaunchedJob:
    """The processes of one launcher, which runs within a `with` block.

    Args:
        command: the command line of the launcher.
        folder: its working directory, and the place of its `output`; should be empty.
        more: variables of its environment.

    Raises:
        PairError: from all methods, with the last output of the job.
    """

    def __init__(self, command: Sequence[str], folder: Path, **more: str) -> None:
        self._command, self.folder, self.environment = command, folder, environment(**more)
        self._output = folder / "output"

    def __enter__(self) -> Self:
        with self._output.open("wb") as output:
            self.process = subprocess.Popen(
                self._command, cwd=self.folder, env=self.environment, start_new_session=True,
                stdin=subprocess.DEVNULL, stdout=output, stderr=output,
            )  # fmt: skip
        return self

    def __exit__(self, *_: object) -> None:
        if self.runs:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(_END_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    @property
    def runs(self) -> bool:
        """True until the launcher has ended."""
        return self.process.poll() is None

    @property
    def said(self) -> str:
        """The output of the job so far."""
        return self._output.read_text(errors="replace")

    def failed(self, why: str) -> PairError:
        """Returns an error with the reason and the last output of the job."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(2.0)  # its last output may still come
        return PairError(f"{why}; it said: {last_line(self.said)}")

    def until(self, is_true: Callable[[], bool], what: str, wait_s: float = _PATIENCE_S) -> None:
        """Waits until `is_true` returns True.

        Raises:
            PairError: `what`, if that takes longer than `wait_s`, or the job ends before.
        """
        deadline = time.monotonic() + wait_s
        while not is_true():
            if time.monotonic() > deadline or not self.runs:
                raise self.failed(what)
            time.sleep(0.01)

    def finish(self, wait_s: float = _PATIENCE_S) -> None:
        """Waits until the job has ended; raises PairError if it fails or takes longer."""
        try:
            code = self.process.wait(wait_s)
        except subprocess.TimeoutExpired:
            raise self.failed(f"it did not end in {wait_s:g} s") from None
        if code:
            raise self.failed(f"exit code {code}")

    # --- its processes --------------------------------------------------------------------------

    def children(self, word: str, *, with_standbys: bool = True) -> list[int]:
        """Returns ids of the launcher's children with this word in their command."""
        pid, standbys = self.process.pid, set(self.standbys() if not with_standbys else ())
        children = map(int, read(f"/proc/{pid}/task/{pid}/children").split())
        return [
            each
            for each in children
            if word.encode() in read(f"/proc/{each}/cmdline") and each not in standbys
        ]

    def servers(self) -> list[int]:
        """Returns ids of the servers, without standbys."""
        return self.children("tensorwire.torch.server", with_standbys=False)

    def standbys(self) -> list[int]:
        """Returns ids of the processes that wait to replace a server."""
        return [pid for pid in self.children("--standby") if pid not in self.replaced()]

    def replaced(self) -> list[int]:
        """Returns ids of the processes that have replaced another one."""
        return [int(pid) for pid in _REPLACED.findall(self.said)]

    def has_warm_standby(self) -> bool:
        """Returns whether a standby has imported everything: it sleeps and uses no CPU time."""
        before = {pid: _ticks_asleep(pid) for pid in self.standbys()}
        time.sleep(0.3)
        return any(ticks > 50 and ticks == _ticks_asleep(pid) for pid, ticks in before.items())


def read(path: str) -> bytes:
    """Returns a file's bytes; none if it cannot be read."""
    try:
        return Path(path).read_bytes()
    except OSError:
        return b""


def _ticks_asleep(pid: int) -> int:
    """Returns ticks of CPU time of a sleeping process; 0 for any other."""
    fields = read(f"/proc/{pid}/stat").rpartition(b")")[2].split()
    return int(fields[11]) + int(fields[12]) if fields and fields[0] == b"S" else 0


J = TypeVar("J", bound="LinkedJob")


class LinkedJob(LaunchedJob):
    """A job whose workers connect to the bench, and do a turn when it sends them a line of JSON.

    The word `ADDRESS` of the command is replaced by the address of the bench's socket. Each worker
    first sends a line with its rank.
    """

    ADDRESS = "ADDRESS"

    def __init__(self, command: Sequence[str], folder: Path, workers: int, **more: str) -> None:
        address = str(folder / "bench")
        super().__init__(
            [address if word == self.ADDRESS else word for word in command], folder, **more
        )
        self._address, self._workers = address, workers
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            listener = stack.enter_context(socket.socket(socket.AF_UNIX))
            listener.bind(self._address)
            listener.listen(self._workers)
            listener.settimeout(1.0)
            super().__enter__()
            stack.callback(super().__exit__)
            links = [stack.enter_context(self._accept(listener)) for _ in range(self._workers)]
            for each in links:
                each.settimeout(_PATIENCE_S)
            self._files = [stack.enter_context(each.makefile("rw")) for each in links]
            self._files.sort(key=lambda file: int(self._read(file)["rank"]))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def turn(self, **order: object) -> list[dict[str, Any]]:
        """Lets all workers do a turn; returns their answers, by rank."""
        self._send(order)
        return [self._read(file) for file in self._files]

    def end(self) -> None:
        """Lets the workers finish their script, and waits for the end of the job."""
        self._send({"steps": 0})
        self.finish()

    def _accept(self, listener: socket.socket) -> socket.socket:
        found: list[socket.socket] = []

        def accepted() -> bool:
            with contextlib.suppress(TimeoutError):
                found.append(listener.accept()[0])
            return bool(found)

        self.until(accepted, "it did not start")
        return found[0]

    def _send(self, order: Mapping[str, object]) -> None:
        try:
            for file in self._files:
                file.write(json.dumps(order) + "\n")
                file.flush()
        except OSError as error:
            raise self.failed(str(error)) from error

    def _read(self, file: Any) -> dict[str, Any]:
        try:
            line = file.readline()
        except OSError as error:
            raise self.failed(str(error)) from error
        if not line:
            raise self.failed("a worker has ended")
        found: dict[str, Any] = json.loads(line)
        return found


@contextlib.contextmanager
def linked(jobs: Mapping[str, Callable[[Path], J]]) -> Iterator[dict[str, J]]:
    """Starts jobs that live at the same time, each in a folder of its own.

    Lets them end normally if the body did not fail, and else kills them.
    """
    with contextlib.ExitStack() as stack:
        made: dict[str, J] = {}
        for name, make in jobs.items():
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="tensorwire-bench-"))
            made[name] = make(Path(folder))
            stack.enter_context(made[name])
        yield made
        for job in made.values():
            job.end()
