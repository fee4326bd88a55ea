"""Processes are killed where each worker goes at its own pace: every step is applied once.

Real servers and workers, without torch; a program apart judges what workers have adopted.
"""

import contextlib
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path

import paced_judge
import pytest
from launching import HERE, Place, eventually
from test_takeover import SERVER

from tensorwire.phases_of_modes import EVENT, PAUSE, STANDING

WORKER = (HERE / "paced_worker.py").read_text()
STEPS, ROUNDS = 8, 2


def run(
    place: Place,
    fail: str = "",
    servers: int = 2,
    workers: int = 2,
    staleness: int | None = None,
    slices: int | None = None,
    **more: str,
) -> str:
    """Returns the output of the launcher; everything was applied once."""
    folder = place.folder / "log"
    folder.mkdir()
    environment = {
        "TENSORWIRE_FAIL": fail,
        "TOY_FOLDER": str(folder),
        "TOY_STEPS": str(STEPS),
        "TOY_ROUNDS": str(ROUNDS),
        "TOY_STALENESS": "" if staleness is None else str(staleness),
        **more,
    }
    done = place.run(
        WORKER,
        environment=environment,
        servers=servers,
        workers=workers,
        server_command=SERVER,
        durable=True,
        patience={"standby_s": 60.0},
        **({} if slices is None else {"slices": slices}),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("done ") == workers, done.stdout + done.stderr
    kills = fail.count(":kill")
    assert done.stderr.count("(restart ") == kills, done.stderr
    looked_at = paced_judge.judge(folder, STEPS, ROUNDS, slices or workers, staleness)
    assert looked_at > (slices or workers) * STEPS * ROUNDS - 2 - kills
    return done.stderr


# Of the first store with two workers: commits and answers, two publications, the release, pauses.
LAST = 2 * 2 * STEPS * ROUNDS + ROUNDS + 1 + 2 * (ROUNDS * STEPS // 4 + 1)

# A job a line: whose processes end at which visit of a row, "server-0+1" is server 0's successor.
KILLS = {
    "decided": "server-0:event.decided:1 server-0+1:event.decided:9 "
    "server-1:event.come:1 server-1+1:event.come:12",
    "sent": "server-0:event.sent:1 server-0+1:event.sent:9 "
    "server-1:event.made:1 server-1+1:event.made:12",
    "made": "server-0:event.made:1 server-0+1:event.made:10 "
    "server-1:event.noted:1 server-1+1:event.noted:10",
    "noted": "server-0:event.noted:1 server-0+1:event.noted:8 "
    "server-1:event.told:1 server-1+1:event.told:10",
    "told": "server-0:event.told:1 server-0+1:event.told:9 "
    "server-1:cell.changed:3 server-1+1:cell.done:4",
    # The pauses, of which each worker takes two a round.
    "begun": "server-0:pause.begun:1 server-0+1:pause.over:2 server-1:pause.over:1 "
    "server-1+1:pause.ended:2 worker-1:pause.asked:3 worker-1+1:pause.held:4",
    "ended": "server-0:pause.ended:1 server-0+1:pause.begun:3 server-1:snapshot.copied:1 "
    "server-1+1:pause.begun:2 worker-0:pause.held:1 worker-0+1:pause.asked:2",
    "over": "server-0:pause.over:1 server-0+1:snapshot.noted:2 worker-0:snapshot.held:1",
    # Several at once: what follows from one commit, and what from the next.
    "several": "server-0:event.made:4 server-0+1:norms.sent:1 server-1:event.made:4 "
    "server-1+1:norms.awaited:1 worker-0:commit.sent:2 worker-0+1:commit.noted:9 "
    "worker-1:commit.noted:3 worker-1+1:result.come:8",
    # The store is freed, and workers go on with another one.
    "freed": f"server-0:event.noted:{LAST} server-0+1:store.through:1 "
    f"server-1:event.made:{LAST} server-1+1:event.told:1",
    "awaited": f"server-0:event.told:{LAST} server-1:store.awaited:1",
}
STALENESS = {"sent": 1, "made": 0, "told": 2, "ended": 1, "over": 2, "several": 1}


@pytest.mark.slow
@pytest.mark.parametrize("name", KILLS)
def test_killed_at_a_place(place: Place, name: str) -> None:
    fail = ",".join(f"{each}:kill" for each in KILLS[name].split())
    # Servers end a store behind the workers, which might leave the job meanwhile.
    rest_s = "1" if "store." in fail else "0"
    run(place, fail, staleness=STALENESS.get(name), TOY_REST_S=rest_s)


def test_every_place_is_tried() -> None:
    """A row that is added to what is done at a worker's own pace is tried here at once."""
    tried = {each.partition(":")[2] for kills in KILLS.values() for each in kills.split()}
    for phase in EVENT, PAUSE, STANDING:
        for row in phase.all_rows():
            assert sum(each.startswith(f"{row.name}:") for each in tried) > 1, row.name
    assert any(each.startswith("pause.ended:") for each in tried)


def test_a_server_is_replaced(place: Place) -> None:
    run(place, "server-1:event.made:9:kill", staleness=1)


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "slices"), [(3, 3), (2, 4)])
def test_stopped_and_slow_workers(place: Place, workers: int, slices: int) -> None:
    """One is stopped again and again, another one is slow; a server and a worker are killed."""
    fail = "server-0:event.sent:20:kill,worker-1:commit.sent:9:kill"
    run(place, fail, 3, workers, 1, slices, TOY_STOPS="0", TOY_PAUSE_S="0.02")


FAULTS = int(os.environ.get("FAULTS", "8"))


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("staleness", [None, 1])
def test_killed_and_stopped_at_random(place: Place, staleness: int | None) -> None:
    """Servers, standbys and workers, one of which is slow and another one stopped now and then."""
    chance, workers, steps = random.Random(staleness or 0), 3, STEPS * ROUNDS
    folder = place.folder / "log"
    folder.mkdir()
    toy = {"TOY_FOLDER": str(folder), "TOY_STEPS": str(STEPS), "TOY_ROUNDS": str(ROUNDS)}
    toy |= {"TOY_PAUSE_S": "0.6", "TOY_STALENESS": "" if staleness is None else str(staleness)}
    options = {"servers": 2, "workers": workers, "server_command": SERVER, "durable": True}

    def made() -> int:
        return sum(len(path.read_text().splitlines()) for path in folder.glob("adopted-*"))

    kills = stops = 0
    more = {"restarts": 100, "patience": {"standby_s": 60.0}}
    with place.start(WORKER, environment=toy, **options, **more) as job:
        assert eventually(lambda: made() > workers)
        # Who has left the job is replaced no more: all are to be in the middle of it.
        while kills + stops < FAULTS and made() < workers * steps - 4 * workers:
            mark = made() + 1
            pid = chance.choice(sorted(members(place)))
            if (kills + stops) % 4 == 2:
                stops += 1
                send(pid, signal.SIGSTOP)
                threading.Timer(0.5, send, (pid, signal.SIGCONT)).start()
            else:
                kills += 1
                send(pid, signal.SIGKILL)
            time.sleep(chance.uniform(0.0, 0.3))  # some come while the last one is repaired
            assert eventually(lambda mark=mark: made() >= mark), job.text
        assert job.end() == 0, job.text
    assert kills > stops > 0
    assert job.text.count("done ") == workers, job.text
    looked_at = paced_judge.judge(folder, STEPS, ROUNDS, workers, staleness)
    assert looked_at > workers * steps - 2 - kills


def send(pid: int, number: int) -> None:
    """A signal to a process that may be gone."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def members(place: Place) -> list[int]:
    """The processes of servers, standbys and workers."""
    script = Path(sys.executable), place.folder / "script.py"
    commands = " ".join(SERVER), " ".join(map(str, script))
    return [pid for pid, command in place.processes().items() if command.startswith(commands)]
