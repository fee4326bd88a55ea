"""Servers that are killed at each place where it matters: the job ends as if nothing had happened.

Real servers and workers, without torch; `tensorwire bench faults` trains.
"""

import re
import sys

import pytest
from launching import HERE, Place

from tensorwire.failpoints import FAILPOINTS

SERVER = [sys.executable, str(HERE / "toy_server.py")]
WORKER = (HERE / "toy_worker.py").read_text()


def run(place: Place, servers: int, fail: str = "", workers: int = 2) -> tuple[set[str], str]:
    """The digests of all workers, and what the launcher said."""
    done = place.run(
        WORKER,
        environment={"TENSORWIRE_FAIL": fail},
        servers=servers,
        workers=workers,
        server_command=SERVER,
        durable=True,
        patience={"standby_s": 60.0},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    digests = re.findall(r"digest (\w+)", done.stdout)
    assert len(digests) == workers, done.stdout + done.stderr
    return set(digests), done.stderr


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """What comes out where nothing is killed; it does not depend on the number of servers."""
    digests, said = run(Place(tmp_path_factory.mktemp("undisturbed")), 1)
    assert "takes its place" not in said
    assert len(digests) == 1
    return digests


# Sums are server 0's alone, and the table is the second server's if there are two.
CASES = [
    (servers, server, name, times)
    for name in FAILPOINTS
    for servers, server, times in ((1, 0, 1), (2, 1, 1), (2, 0, 2))
    if not (name.startswith("sum.") and server == 1)
    and not (name == "norms.sent" and servers == 1)
    and not (times == 2 and not name.startswith(("cell.", "version.", "sum.")))
]


@pytest.mark.parametrize(("servers", "server", "name", "times"), CASES)
def test_killed_at_a_place(
    place: Place, whole: set[str], servers: int, server: int, name: str, times: int
) -> None:
    digests, said = run(place, servers, f"server-{server}:{name}:{times}:kill")
    assert f"server {server} (pid" in said, "the place was not reached"
    assert "takes its place (restart 1)" in said
    assert digests == whole


def test_every_place_is_tried() -> None:
    assert {name for _, _, name, _ in CASES} == set(FAILPOINTS)


def test_the_documentation_names_every_place() -> None:
    page = (HERE.parents[1] / "docs/fault-tolerance.md").read_text()
    for name, what in FAILPOINTS.items():
        assert f"| `{name}` | {what} |" in page
