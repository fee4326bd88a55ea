"""Shares move from server to server while a job runs, and the results have the same bits.

Real servers and workers, without torch.
"""

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from launching import HERE, WAIT_S, Launched, Place, eventually

from tensorwire.phases_of_launcher import MOVE

SERVER = [sys.executable, str(HERE / "toy_server.py")]
WORKER = (HERE / "toy_worker.py").read_text()
STEPS, SHARES = 16, 4


class Job:
    """A job that runs, and what is asked of it."""

    def __init__(self, place: Place, launched: Launched, folder: Path) -> None:
        self._place, self._launched, self._folder = place, launched, folder

    def command(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self._place.call([sys.executable, "-m", "tensorwire", *arguments])

    def scale(self, servers: int) -> dict[str, Any]:
        done = self.command("scale", "--servers", str(servers), "--json")
        if done.returncode != 0:
            why = self._launched.heard(2.0)
            raise AssertionError(done.stdout + done.stderr + why)
        found: dict[str, Any] = json.loads(done.stdout)["servers"]
        return found

    def status(self) -> dict[str, Any]:
        done = self.command("status", "--json")
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout)
        assert len(found) == 1
        job: dict[str, Any] = found[0]
        return job

    def steps(self) -> int:
        events = self._folder / "events-0"
        return len(events.read_text().splitlines()) if events.exists() else 0

    def reach(self, steps: int) -> None:
        assert eventually(lambda: self.steps() >= steps), self._launched.text

    def servers(self) -> list[int]:
        """Processes that serve or wait for what to serve."""
        found = self._place.processes().items()
        return sorted(pid for pid, command in found if command.startswith(" ".join(SERVER)))

    def owners(self) -> dict[int, int]:
        """The process of each share, by the log."""
        return {m["index"]: m["pid"] for m in self.status()["members"] if m["kind"] == "share"}

    def end(self) -> str:
        """Lets it make its last steps; the digest of all workers."""
        (self._folder / "gate").touch()
        assert self._launched.end() == 0, self._launched.text
        digests = re.findall(r"digest (\w+)", self._launched.text)
        assert len(digests) == 2, self._launched.text
        assert len(set(digests)) == 1
        return str(digests[0])

    @property
    def said(self) -> str:
        return self._launched.text

    def wait_for(self, text: str) -> None:
        self._launched.wait_for(text)

    @property
    def launcher(self) -> int:
        return self._launched.pid


@contextlib.contextmanager
def job(
    place: Place,
    pause_s: float = 0.1,
    fail: str = "",
    steps: int = STEPS,
    gate_step: int | None = None,
    **options: Any,
) -> Generator[Job]:
    folder = place.folder / f"job {len(list(place.folder.iterdir()))}"
    folder.mkdir()
    toy = {"TOY_FOLDER": str(folder), "TOY_STEPS": str(steps), "TOY_PAUSE_S": str(pause_s)}
    toy |= {"TOY_STORES": "1", "TOY_GATE": str(folder / "gate")}
    if gate_step is not None:
        toy["TOY_GATE_STEP"] = str(gate_step)
    options = {"servers": 1, "shares": SHARES, "server_command": SERVER, **options}
    options["patience"] = {"standby_s": 60.0, **options.get("patience", {})}
    options = {key: value for key, value in options.items() if value is not None}
    with place.start(WORKER, environment={"TENSORWIRE_FAIL": fail, **toy}, **options) as launched:
        yield Job(place, launched, folder)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The result where one server has everything, and nothing moves."""
    with job(Place(tmp_path_factory.mktemp("undisturbed")), 0.0, shares=None) as undisturbed:
        return undisturbed.end()


@pytest.mark.slow
def test_servers_come_and_go(place: Place, whole: str) -> None:
    with job(place) as running:
        running.reach(2)
        for count in (3, 4, 2, 1):
            found = running.scale(count)
            assert len(found["shares"]) == count
            dealt = [len(each) for each in found["shares"].values()]
            assert sum(dealt) == SHARES
            assert max(dealt) - min(dealt) <= 1
            assert len(set(running.owners().values())) == count
        moves = running.status()["moves"]
        owners = dict.fromkeys(range(SHARES), 0)
        for move in moves:
            assert move["giver"] == owners[move["share"]] != move["taker"]
            owners[move["share"]] = move["taker"]
            assert move["memory"] > move["size"] > 0
            assert move["versions"]["0"] >= 2
            assert move["why"].startswith("tensorwire scale --servers ")
        assert owners == dict.fromkeys(range(SHARES), 0)
        now = running.status()  # shares that move are no deaths
        members = [each for each in now["members"] if each["kind"] == "share"]
        assert [(each["restarts"], each["last_death"]) for each in members] == [(0, None)] * SHARES
        assert [each["restarts"] for each in now["servers"]] == [0] * SHARES
        shown = running.command("status").stdout
        assert "shares that moved" in shown
        assert "share 0 (server 0)" in shown
        (server,) = set(running.owners().values())
        os.kill(server, signal.SIGKILL)
        running.wait_for("takes its place (restart 1)")
        assert running.end() == whole
    assert running.said.count("goes from server") == len(moves)


@pytest.mark.slow
def test_what_cannot_be_is_an_error(place: Place, whole: str) -> None:
    with job(place) as running:
        running.reach(1)
        for count in (0, SHARES + 1, -1):
            done = running.command("scale", "--servers", str(count))
            assert done.returncode == 1
            assert f"the job can have 1 to {SHARES} servers" in done.stderr
        assert running.scale(1)["moved"] == 0
        assert running.end() == whole
    with job(place, servers=2, shares=None, durable=True) as fixed:
        fixed.reach(1)
        done = fixed.command("scale", "--servers", "1")
        assert done.returncode == 1
        assert "the servers of this job keep what they have" in done.stderr
        assert fixed.end() == whole


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"servers": 2, "shares": 1}, "shares is 1 and servers is 2"),
        ({"shares": 2, "durable": False}, "--on-death end says that nothing outlives a process"),
        ({"shares": 2, "transports": ["tcp"]}, "only what is in shared memory outlives"),
        ({"rebalance": True, "listen": "0.0.0.0"}, "they listen on 0.0.0.0"),
    ],
)
def test_jobs_whose_shares_cannot_move(place: Place, options: dict[str, Any], text: str) -> None:
    done = place.run(WORKER, server_command=SERVER, **options)
    assert done.returncode != 0
    assert text in done.stderr


def stop_at(row: str, times: int = 1) -> str:
    return f"launcher:{row}:{times}:stop"


def is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


# Who is killed while the launcher stands behind a row of a move from 2 servers to 3: a server that
# has shares (the one that gives, when it still lives), one that gets some, or any other.
@pytest.mark.slow
@pytest.mark.parametrize("row", [row.name for row in MOVE.rows])
@pytest.mark.parametrize("victim", ["oldest", "youngest", "all"])
def test_servers_are_killed_while_shares_move(
    place: Place, whole: str, row: str, victim: str
) -> None:
    with job(place, servers=2, fail=stop_at(row)) as running:
        running.reach(2)
        answer: list[dict[str, Any]] = []
        asking = threading.Thread(target=lambda: answer.append(running.scale(3)))
        asking.start()
        assert eventually(lambda: is_stopped(running.launcher)), running.said
        pids = running.servers()
        chosen = {"oldest": pids[:1], "youngest": pids[-1:], "all": pids}[victim]
        for pid in chosen:
            os.kill(pid, signal.SIGKILL)
        os.kill(running.launcher, signal.SIGCONT)
        asking.join(WAIT_S)
        assert answer, running.said
        assert len(answer[0]["shares"]) == 3
        dealt = [share for shares in answer[0]["shares"].values() for share in shares]
        assert sorted(dealt) == list(range(SHARES))
        assert running.end() == whole


# Before its step 5 the script can be run again; there it makes a snapshot of a version, which a
# process that runs it again later does not find.
@pytest.mark.slow
@pytest.mark.parametrize("gate_step", [4, 12])
def test_a_worker_is_killed_while_shares_move(place: Place, whole: str, gate_step: int) -> None:
    with job(place, fail=stop_at("giver.killed"), gate_step=gate_step) as running:
        running.reach(gate_step)
        asking = subprocess.Popen(
            [sys.executable, "-m", "tensorwire", "scale", "--servers", "2"],
            env=place.environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        assert eventually(lambda: is_stopped(running.launcher)), running.said
        found = place.processes().items()
        script = f"{sys.executable} {place.folder / 'script.py'}"
        workers = [pid for pid, command in found if command.startswith(script)]
        os.kill(workers[0], signal.SIGKILL)
        os.kill(running.launcher, signal.SIGCONT)
        said, _ = asking.communicate(timeout=WAIT_S)
        if gate_step == 4:
            assert "2 servers" in said
            assert running.end() == whole
        else:
            assert running._launched.end() != 0
            assert "raised RuntimeError" in running.said
            # The move may have been over before the end of the job was noticed.
            assert ("2 servers" if asking.returncode == 0 else "the job") in said
        assert "is started again" in running.said
        assert eventually(lambda: not place.processes())


@pytest.mark.slow
@pytest.mark.parametrize("row", [row.name for row in MOVE.rows])
def test_the_launcher_is_killed_while_shares_move(place: Place, row: str) -> None:
    with job(place, fail=f"launcher:{row}:1:kill") as running:
        running.reach(2)
        done = running.command("scale", "--servers", "2")
        assert done.returncode == 1
        assert "the job has ended meanwhile" in done.stderr
        assert eventually(lambda: not place.processes())


# A server that ends at once where the file is that is named first.
UNLESS = """
import os, sys
if os.path.exists(sys.argv[1]):
    sys.exit(9)
os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
"""


@pytest.mark.slow
def test_a_server_that_cannot_be_started_leaves_all_as_it_was(place: Place, whole: str) -> None:
    program, no_more = place.folder / "server.py", place.folder / "no more"
    program.write_text(UNLESS)
    command = [sys.executable, str(program), str(no_more), *SERVER[1:]]
    with job(place, server_command=command) as running:
        running.reach(2)
        before = running.owners()
        no_more.touch()
        done = running.command("scale", "--servers", "2")
        assert done.returncode == 1
        assert "server 1 ended 3 times before it had got a share" in done.stderr
        assert running.owners() == before
        assert running.end() == whole


@contextlib.contextmanager
def slowed(pid: Callable[[], int]) -> Iterator[None]:
    """Lets a process run for a quarter of the time."""
    done = threading.Event()

    def slow() -> None:
        while not done.is_set():
            with contextlib.suppress(ProcessLookupError):
                found = pid()
                os.kill(found, signal.SIGSTOP)
                time.sleep(0.03)
                os.kill(found, signal.SIGCONT)
            time.sleep(0.01)

    thread = threading.Thread(target=slow)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


@pytest.mark.slow
def test_a_slow_server_gives_shares_away_by_itself(place: Place) -> None:
    steps, patience = 160, {"rebalance_s": 0.5}
    with job(place, 0.0, steps=steps, shares=None) as undisturbed:
        expected = undisturbed.end()
    moving = {"servers": 2, "shares": None, "rebalance": True, "patience": patience}
    # A launcher that looks now and then may always find it stopped, and must not replace it.
    with job(place, 0.02, steps=steps, silence_s=0.0, **moving) as running:
        running.reach(2)
        slow = running.owners()[0]
        with slowed(lambda: slow):
            running.wait_for("goes from server 0 to server 1")
        assert running.end() == expected
    line = next(each for each in running.said.splitlines() if "goes from server 0" in each)
    assert re.search(r"server 0 took \d+\.\d times as long as 1", line)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_random_moves_and_kills(place: Place) -> None:
    steps, commands = 60, int(os.environ.get("MOVES", "8"))
    with job(place, 0.0, steps=steps, shares=None) as undisturbed:
        expected = undisturbed.end()
    chance = random.Random(2)
    # At the gate nothing gets any further, however often servers are killed.
    with job(place, 0.02, steps=steps, shares=6, restarts=100) as running:
        running.reach(1)
        for _ in range(commands):
            if chance.random() < 0.3:
                victim = chance.choice(running.servers())
                with contextlib.suppress(ProcessLookupError):
                    os.kill(victim, signal.SIGKILL)
            count = chance.randint(1, 6)
            assert len(running.scale(count)["shares"]) == count
        assert running.end() == expected
