"""Processes are killed where each worker goes at its own pace: every step is applied once.

Real servers and workers, without torch; a program apart judges what workers have adopted.
"""

import paced_judge
import pytest
from launching import HERE, Place
from test_takeover import SERVER

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
    """What the launcher said; everything was applied once."""
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


def test_undisturbed(place: Place) -> None:
    run(place)


@pytest.mark.parametrize(
    "fail",
    [
        "worker-1:gradients.sent:5:kill",
        "worker-1:commit.noted:5:kill",
        "worker-1:commit.sent:5:kill",
        "worker-1:result.come:5:kill",
        "worker-0:result.noted:5:kill",
        "worker-0:pause.asked:1:kill",
        "worker-0:pause.held:2:kill",
        "worker-0:snapshot.held:1:kill",
        "worker-0:snapshot.asked:1:kill",
        "worker-0:answer.come:2:kill",
        "worker-0:part.sent:2:kill",
        "worker-0:pause.held:1:kill,server-0:pause.begun:1:kill",
        "worker-0:commit.sent:4:kill,server-0:event.made:4:kill",
        "worker-1:commit.sent:4:kill,server-1:event.made:4:kill",
        "server-0:event.sent:4:kill,server-1:event.made:4:kill",
    ],
)
def test_x(place: Place, fail: str) -> None:
    run(place, fail, staleness=2)
