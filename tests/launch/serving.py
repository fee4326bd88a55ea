"""Runs `tensorwire serve` as a process of its own, with workers that a test starts and restarts."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from launching import FAKE_SERVER, QUICK, WAIT_S, Launched, Place

from tensorwire import launch

HERE = Path(__file__).resolve().parent
WORKERS_OWN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


class Served:
    """A supervisor that runs, and its workers. Ends all of them."""

    def __init__(self, place: Place, text: str, **options: Any) -> None:
        self._place = place
        self.socket = place.folder / "job"
        self._script = place.script(text)
        self._environment = {"OMP_NUM_THREADS": "1"}
        self._environment |= options.pop("environment", {})
        options = {"server_command": FAKE_SERVER, "patience": QUICK, "workers": 2, **options}
        options |= {"socket": str(self.socket)}
        command = [sys.executable, str(HERE / "serving.py"), json.dumps(options)]
        self.supervisor = Launched(command, place.environment(**self._environment))
        self.workers: list[subprocess.Popen[str]] = []

    def __enter__(self) -> "Served":
        return self

    def __exit__(self, *_: object) -> None:
        self.supervisor.__exit__()
        for worker in self.workers:
            worker.kill()
            worker.communicate()

    def start(self, rank: object, **environment: str) -> "subprocess.Popen[str]":
        """Starts a worker as its own torchrun would: alone in a world of one."""
        alone = dict(zip(WORKERS_OWN, ("0", "1", "0", "1"), strict=True))
        own = {"TENSORWIRE_SUPERVISOR": str(self.socket), "TENSORWIRE_RANK": str(rank)}
        worker = subprocess.Popen(
            [sys.executable, self._script],
            env=self._place.environment(**{**self._environment, **alone, **own, **environment}),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.workers.append(worker)
        return worker

    def run(self, *ranks: int, **environment: str) -> dict[int, str]:
        """Starts workers, and again those that are killed; what each has printed in the end."""
        running = {rank: self.start(rank, **environment) for rank in ranks}
        texts = dict.fromkeys(ranks, "")
        for rank in ranks:
            while True:
                text, _ = running[rank].communicate(timeout=WAIT_S)
                texts[rank] += text
                if running[rank].returncode >= 0:
                    break
                running[rank] = self.start(rank, **environment)
        return texts

    def end(self) -> tuple[int, str]:
        """Waits for the supervisor; its exit code and all that it has printed."""
        return self.supervisor.end(), self.supervisor.text


def output_of(worker: "subprocess.Popen[str]") -> str:
    return worker.communicate(timeout=WAIT_S)[0]


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def main() -> None:
    """The supervisor: options as JSON."""
    options = json.loads(sys.argv[1])
    patience = launch.Patience(**options.pop("patience"))
    socket = Path(options.pop("socket"))
    return_s = options.pop("return_s", 30.0)
    job = launch.serve_spec(**options)
    supervisor = launch.ServeSupervisor(job, socket=socket, return_s=return_s, patience=patience)
    code = supervisor.run()
    if "COUNT_DESCRIPTORS" in os.environ:
        print(f"descriptors: {len(os.listdir('/proc/self/fd'))}", flush=True)
    sys.exit(code)


if __name__ == "__main__":
    main()
