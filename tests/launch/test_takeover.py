"""Servers that are killed at each place where it matters: the job ends as if nothing had happened.

Real servers and workers, without torch; `tensorwire bench faults` trains.
"""

import functools
import itertools
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import pytest
from launching import HERE, Place

from tensorwire.phases_of_launcher import DEATH
from tensorwire.phases_of_modes import EVENT, PAUSE
from tensorwire.transitions import CELL, NORMS, SUM, rows_of

SERVER = [sys.executable, str(HERE / "toy_server.py")]
WORKER = (HERE / "toy_worker.py").read_text()


def launch(
    place: Place, servers: int, fail: str, workers: int = 2, stores: int = 2
) -> subprocess.CompletedProcess[str]:
    return place.run(
        WORKER,
        environment={"TENSORWIRE_FAIL": fail, "TOY_STORES": str(stores)},
        servers=servers,
        workers=workers,
        server_command=SERVER,
        durable=True,
        patience={"standby_s": 60.0},
    )


def run(
    place: Place, servers: int, fail: str = "", workers: int = 2, stores: int = 2
) -> tuple[set[str], str]:
    """The digests of all workers, and what the launcher said."""
    done = launch(place, servers, fail, workers, stores)
    assert done.returncode == 0, done.stdout + done.stderr
    digests = re.findall(r"digest (\w+)", done.stdout)
    assert len(digests) == workers, done.stdout + done.stderr
    return set(digests), done.stderr


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], set[str]]:
    """The result where nothing is killed; it does not depend on the number of servers."""

    @functools.cache
    def undisturbed(stores: int) -> set[str]:
        digests, said = run(Place(tmp_path_factory.mktemp("undisturbed")), 1, stores=stores)
        assert "takes its place" not in said
        assert len(digests) == 1
        return digests

    return undisturbed


PACED = "tests/launch/test_paced_takeover.py"  # in the modes async and bounded
ELSEWHERE = {"norm.noted": "tests/torch/test_journal.py", "pause.ended": PACED}
"""Rows of a server that other tests try, with the file, as tests/torch/test_x.py."""
ELSEWHERE |= {row.name: PACED for phase in (EVENT, PAUSE) for row in phase.all_rows()}

NORM_ROWS = {row.name for row in NORMS.rows}
NAMES = [name for name in rows_of("server") if name not in ELSEWHERE]
# Of what the launcher does, that here; tests/torch/test_elastic.py and test_moves.py have the rest.
LAUNCHER = [row.name for row in DEATH.all_rows()]
SUMS = {row.name for row in SUM.rows}
# Sums are server 0's alone; of two servers the second one has the table. The second norm is that of
# an average that was kept, and with it rows of the table, which do not outlive a server.
AT_0 = [("server-0", name, 2) for name in NAMES if name in SUMS]
NORMS_AND_CELLS = [row.name for phase in (NORMS, CELL) for row in phase.rows]
AT_0 += [("server-0", name, times) for name in NORMS_AND_CELLS for times in (1, 3)]
AT_1 = [("server-1", name, 3 if name in NORM_ROWS else 2) for name in NAMES if name not in SUMS]
HALF = (len(NAMES) + 1) // 2
ALONE = [("server-0", name, 1) for name in NAMES[:HALF]]
ITS_SUCCESSOR = [("server-0+1", name, 1) for name in NAMES[HALF:]]
# The number of servers, and the kills of one job: which process, at which row and visit of it.
Kills = tuple[tuple[str, str, int], ...]
CASES: list[tuple[int, Kills]] = [
    (servers, tuple(filter(None, each)))
    for servers, (first, second) in ((1, (ALONE, ITS_SUCCESSOR)), (2, (AT_0, AT_1)))
    for each in itertools.zip_longest(first, second)
]


def told(servers: int, kills: Kills) -> str:
    return f"{servers}: " + ", ".join(f"{process} at {name}" for process, name, _ in kills)


@pytest.mark.parametrize(
    ("servers", "kills"), [pytest.param(*case, id=told(*case)) for case in CASES]
)
def test_killed_at_a_place(
    place: Place, whole: Callable[[int], set[str]], servers: int, kills: Kills
) -> None:
    # At the end of the last store workers may have left before the server is killed.
    stores = 3 if any(name.startswith("store.") for _, name, _ in kills) else 2
    fails = [f"{process}:{name}:{times}:kill" for process, name, times in kills]
    digests, said = run(place, servers, ",".join(fails), stores=stores)
    for process, *_ in kills:
        server, _, successor = process.removeprefix("server-").partition("+")
        died = rf"server {server} \(pid \d+\) was killed .* \(restart {1 + int(successor or 0)}\)"
        assert re.search(died, said), f"the place was not reached: {said}"
    assert said.count("takes its place") == len(kills), said
    assert digests == whole(stores)


# What a successor does first, and what is behind that.
@pytest.mark.parametrize(
    ("first", "then"),
    [
        ("cell.armed:2", "opening.described:1"),
        ("cell.changed:1", "opening.ready:1"),
        ("version.begun:2", "opening.told:1"),
        ("version.published:3", "opening.told:1"),
        ("cell.done:3", "cell.armed:1"),
        ("sum.noted:1", "sum.told:1"),
        ("store.through:1", "store.through:1"),
    ],
)
@pytest.mark.slow
def test_a_successor_is_killed_too(
    place: Place, whole: Callable[[int], set[str]], first: str, then: str
) -> None:
    digests, said = run(place, 2, f"server-0:{first}:kill,server-0+1:{then}:kill")
    assert "takes its place (restart 2)" in said
    assert digests == whole(2)


@pytest.mark.parametrize(
    ("name", "times"), [(name, times) for name in LAUNCHER for times in (1, 2)]
)
def test_the_launcher_is_killed(place: Place, name: str, times: int) -> None:
    """While it replaces servers: the job ends, and nothing is left."""
    fails = (
        "server-0:version.begun:1:kill,server-1:version.told:3:kill",
        f"launcher:{name}:{times}:kill",
    )
    done = launch(place, 2, ",".join(fails))
    assert done.returncode == -signal.SIGKILL, done.stdout + done.stderr
    deadline = time.monotonic() + 20
    while left := place.processes():
        assert time.monotonic() < deadline, left
        time.sleep(0.02)


def test_every_place_is_tried() -> None:
    """A row that is added to the protocol is tried here at once, or is told to be elsewhere."""
    each_kill = [kill for _, kills in CASES for kill in kills]
    tried, rows = {name for _, name, _ in each_kill}, set(rows_of("server"))
    assert tried | ELSEWHERE.keys() == rows
    for name in tried:
        times = {at for _, where, at in each_kill if where == name}
        assert min(times) == 1 < max(times)
    for name, file in ELSEWHERE.items():
        assert name in (HERE.parents[1] / file).read_text()
