"""Servers and standbys that are killed at random moments, without torch.

A judge that knows nothing of tensorwire compares what the jobs have written.

`tensorwire bench faults` does the same to jobs that train, and their workers.
"""

import os
import random
import runpy
import signal
from pathlib import Path

import pytest
from launching import HERE, Launched, Place, eventually
from test_takeover import SERVER, WORKER

JUDGE = HERE.parents[1] / "benchmarks/tensorwire_benchmarks/faults_judge.py"
STEPS, KILLS, WORKERS = 40, 8, 2


def start(place: Place, folder: Path, pause_s: float) -> Launched:
    folder.mkdir()
    runtime = place.folder / f"{folder.name} runtime"
    runtime.mkdir(mode=0o700)
    toy = {"TOY_FOLDER": str(folder), "TOY_STEPS": str(STEPS), "TOY_PAUSE_S": str(pause_s)}
    return place.start(
        WORKER,
        environment={"XDG_RUNTIME_DIR": str(runtime), **toy},
        servers=2,
        workers=WORKERS,
        server_command=SERVER,
        durable=True,
    )


def steps(folder: Path) -> int:
    """Events of worker 0, which has a slice of each step."""
    events = folder / "events-0"
    return len(events.read_text().splitlines()) if events.exists() else 0


@pytest.mark.slow
def test_killed_at_random_moments(place: Place, tmp_path: Path) -> None:
    one, other = tmp_path / "undisturbed", tmp_path / "disturbed"
    with start(place, one, 0.0) as job:
        assert job.end() == 0, job.text
    chance, killed = random.Random(1), 0
    with start(place, other, 0.08) as job:
        assert eventually(lambda: steps(other) > 0)
        while killed < KILLS:
            mark = steps(other) + 2  # one of them needs the repair
            found = place.processes().items()
            # A process that was only forked, and is not yet what it will be, is the launcher too.
            pids = [pid for pid, command in found if command.startswith(" ".join(SERVER))]
            os.kill(chance.choice(sorted(pids)), chance.choice((signal.SIGKILL, signal.SIGTERM)))
            killed += 1
            assert eventually(lambda mark=mark: steps(other) >= mark), job.text
        assert not (other / "final-0").exists(), "it has ended before the last repair"
        assert job.end() == 0, job.text
    assert job.text.count("(restart ") >= KILLS // 2, "the others were standbys"
    judge = runpy.run_path(str(JUDGE))["judge"]
    found = judge(one, other, WORKERS, STEPS * WORKERS)
    assert found == {"parameters": [], "samples": [], "steps": []}
    assert judge(one, tmp_path, WORKERS, STEPS * WORKERS) != found, "it finds what is missing"
