"""Workers are added to running jobs and leave them: the bits of the undisturbed run."""

import os
import re
import threading
import time
from pathlib import Path

import elastic
import pytest
import test_taken_slices
from elastic import SCRIPT, ElasticJob, disturb, running

from tensorwire.errors import TimeoutError
from tensorwire.jobs.asking import ScaleError
from tensorwire.jobs.job_log import logged_jobs
from tensorwire.phases_of_launcher import CHANGE
from tensorwire.transitions import CHANGING

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(autouse=True)
def own_jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs of other tests are not found."""
    folder = tmp_path / "runtime"
    folder.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))


def check(job: ElasticJob, folder: Path) -> str:
    """Ends a job and compares it with an undisturbed one; what it has printed."""
    digests = job.end()
    whole = elastic.undisturbed(folder / "undisturbed", len(digests), spare=len(digests))
    assert len(digests) > 1
    assert digests == whole
    return (folder / "job" / "output").read_text()


def test_down_to_one_and_up_to_the_slices(tmp_path: Path) -> None:
    with running(tmp_path / "job", "--workers 2:4 --servers 2") as job:
        job.wait_for("epoch 0 digest")
        first = job.pids()
        told = job.scale(1, [0])
        assert (told["before"], told["now"], told["went"]) == (2, 1, [0])
        assert list(job.pids()) == [1]
        assert job.scale(1)["text"] == "1 worker, as before"
        told = job.scale(4)
        assert (told["before"], told["now"], told["came"]) == (1, 4, [0, 2, 3])
        second = job.pids()
        assert sorted(second) == [0, 1, 2, 3]
        assert (second[1], second[0] != first[0]) == (first[1], True)
        changes = {each.index: each.change for each in job.log().members if each.kind == "worker"}
        assert changes == {1: "", **dict.fromkeys((0, 2, 3), f"joined after step {told['step']}")}
        text = check(job, tmp_path)
    assert f"worker 0 (pid {first[0]}) has left, after step" in text
    assert "tensorwire: worker 0 leaves after step" in text
    assert re.search(r"worker 3 \(pid \d+\) has joined, after step", text)
    # Of the first change, too, by worker 0, which has come after it.
    assert "] changes 2" in text, text


def test_killed_while_workers_come_and_go(tmp_path: Path) -> None:
    fail = (
        # The one that is to join, when it is ready; the next one, when it has joined,
        "worker-3+1:join.ready:1:kill,worker-3+2:join.made:1:kill,"
        # and one that stays and notes where the script is, when it has told it.
        "worker-0:change.made:2:kill,server-0:version.told:40:kill"
    )
    with running(tmp_path / "job", fail=fail) as job:
        job.wait_for("epoch 0 digest")
        with pytest.raises(ScaleError, match="was killed by SIGKILL before it had joined"):
            job.scale(4)
        job.scale(4)
        job.wait_for("(takeover")
        job.scale(2)
        job.wait_for("worker 0 (pid")
        job.scale(3)
        text = check(job, tmp_path)
    assert len(re.findall(r"worker \d \(pid \d+\) was killed by SIGKILL", text)) == 3
    assert "server 0 (pid" in text


def test_one_that_joins_is_stopped(tmp_path: Path) -> None:
    """Named for a bug: the stop was not noticed, and the others waited for ever."""
    fail = "worker-3+1:join.ready:1:stop"  # before it is told to go on
    options = "--workers 2:4 --silence 1"
    with running(tmp_path / "job", options, fail=fail) as job:
        job.wait_for("epoch 0 digest")
        with pytest.raises(ScaleError, match=r"was stopped for 1 s and was killed before it had"):
            job.scale(4)
        assert job.scale(4)["now"] == 4
        check(job, tmp_path)


@pytest.mark.parametrize("place", [row.name for row in CHANGE.rows])
def test_the_launcher_is_killed(tmp_path: Path, place: str) -> None:
    with running(tmp_path / "job", fail=f"launcher:{place}:1:kill") as job:
        job.wait_for("epoch 0 digest")
        pids = job.pids()
        with pytest.raises(ScaleError, match="the job has ended meanwhile"):
            job.scale(4)
        assert job.process.wait(20) == -9
        deadline = time.monotonic() + 20
        while any(os.path.exists(f"/proc/{pid}") for pid in pids.values()):
            assert time.monotonic() < deadline, "workers have outlived their launcher"
            time.sleep(0.05)


def test_every_place_is_tried() -> None:
    text = Path(__file__).read_text()
    assert all(f":{row.name}:" in text for row in CHANGING.rows)


@pytest.mark.cold  # a worker must not come within a second
def test_a_change_that_is_taken_back(tmp_path: Path) -> None:
    with running(tmp_path / "job") as job:
        job.wait_for("epoch 0 digest")
        before = job.pids()
        found: list[str] = []

        def ask() -> None:
            try:
                job.scale(4, timeout_s=1.0)
            except TimeoutError as error:
                found.append(str(error))

        first = threading.Thread(target=ask)
        first.start()
        while not job.said:
            time.sleep(0.01)
        with pytest.raises(ScaleError, match="another tensorwire scale is under way"):
            job.scale(2)
        first.join(60)
        assert found == ["not done within 1 s: the client has cancelled it"]
        assert job.pids() == before
        assert job.scale(2)["went"] == [2]
        check(job, tmp_path)


@pytest.mark.cold
def test_a_change_that_is_not_taken_back_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Named for a bug: the command said that the launcher did not answer."""
    monkeypatch.setattr("tensorwire.jobs.asking._ANSWER_S", 1.0)
    with running(tmp_path / "job", "--workers 2:2", pause_s=4.0) as job:
        deadline = time.monotonic() + 60
        while True:
            try:
                with pytest.raises(TimeoutError, match=r"goes on: all workers know of step \d+"):
                    job.scale(1, timeout_s=0.5)
                break
            except (ScaleError, OSError, AssertionError):
                assert time.monotonic() < deadline, job.text
                time.sleep(0.05)
        job.wait_for("has left, after step")


SAVES = """
                if job.rank == 0 and job.save("steps", every=7):
                    print("saved after step", scheduler.last_epoch, flush=True)
    if job.rank == 0 and job.save("epochs", every=2):
        print("saved in epoch", epoch, flush=True)
"""


def test_checkpoints_come_at_the_same_steps_whoever_writes_them(tmp_path: Path) -> None:
    """Named for a bug: the worker that acted for worker 0 counted its own calls."""
    script = SCRIPT.replace("scheduler.step()\n", "scheduler.step()" + SAVES, 1)
    with running(tmp_path / "job", "--workers 2:4", script=script) as job:
        job.wait_for("saved in epoch 1")
        for count, drain in ((1, [0]), (2, []), (1, [0])):
            job.scale(count, drain)
            known = job.text.count("saved in epoch")
            while job.text.count("saved in epoch") < known + 2:
                time.sleep(0.05)
                assert job.process.poll() is None, job.text
        check(job, tmp_path)
        text = job.text
    steps = [int(each) for each in re.findall(r"saved after step (\d+)", text)]
    assert steps == [7 * (number + 1) for number in range(len(steps))]
    epochs = [int(each) for each in re.findall(r"saved in epoch (\d+)", text)]
    assert epochs == [2 * number + 1 for number in range(len(epochs))]


KEEPS_ON = """
def given():
    try:
        yield from loader
    except SystemExit:
        for does in (
            lambda: job.sum([1.0]), lambda: job.save("late"), lambda: list(loader), opt.step,
            lambda: tw.edit(model).__enter__(),
        ):
            try:
                does()
            except RuntimeError as error:
                print("refused", "this worker has left the job" in str(error), flush=True)
for epoch in"""


def test_a_script_that_keeps_on_where_it_was_to_leave(tmp_path: Path) -> None:
    """Named for a bug: what it computed was added to what others did, and the results differed."""
    script = SCRIPT.replace("for epoch in", KEEPS_ON, 1).replace("(loader)", "(given())")
    with running(tmp_path / "job", script=script) as job:
        job.wait_for("epoch 0 digest")
        assert job.scale(2)["went"] == [2]
        text = check(job, tmp_path)
    assert text.count("refused True") == 5, text
    assert "worker 2 leaves after step" in text
    assert "; it exited with code 1" in text
    assert not (tmp_path / "job" / "late").exists()


def test_a_job_that_ends_meanwhile(tmp_path: Path) -> None:
    """A worker that joins too late is not waited for."""
    with running(tmp_path / "job", pause_s=0.0, epochs=2) as job:
        job.wait_for("epoch 0 digest")
        with pytest.raises(ScaleError, match=r"the job|has left|ending"):
            job.scale(4)
        job.process.wait(60)
        assert len(job.end()) == 2


def test_what_cannot_be(tmp_path: Path) -> None:
    with running(tmp_path / "a", "--workers 2:4") as job:
        deadline = time.monotonic() + 60
        while not any(each.control for each in logged_jobs()):
            assert time.monotonic() < deadline, job.text
            time.sleep(0.005)
        with pytest.raises(ScaleError, match=r"has not come to job\.epochs|is still starting"):
            job.scale(1)  # workers import torch, which takes longer
        job.wait_for("epoch 0 digest")
        for count, drain, why in (
            (0, [], "can have 1 to 4 workers, as many as its slices, and not 0"),
            (5, [], "tensorwire run --workers W:MAX"),
            (1, [2], "there is no worker 2; those that could leave are 0, 1"),
            (2, [0], "--drain names 1 of the 2 workers, and --workers 2 leaves no room"),
        ):
            with pytest.raises(ScaleError, match=why):
                job.scale(count, drain)
        job.end()


@pytest.mark.parametrize(
    ("options", "old", "new", "why"),
    [
        ("--workers 2 --slices 4", "", "", "start it with tensorwire run --workers W:MAX"),
        (
            "--workers 2:4",
            ", scheduler=scheduler)",
            ")",
            "no worker can join: the script does not track a learning rate scheduler: job.track",
        ),
        (
            "--workers 2:4",
            'buffers="average"',
            'buffers="local"',
            "cannot become another one's: each worker has buffers of its own",
        ),
    ],
)
def test_jobs_that_cannot(tmp_path: Path, options: str, old: str, new: str, why: str) -> None:
    with running(tmp_path / "job", options, SCRIPT.replace(old, new) if old else SCRIPT) as job:
        job.wait_for("epoch 0 digest")
        with pytest.raises(ScaleError, match=why):
            job.scale(3)


def test_several_optimizers_and_a_checkpoint(tmp_path: Path) -> None:
    """Optimizers in passes of their own, a scaler, clipping, edits, and what is saved."""
    script = test_taken_slices.SCRIPT
    for old, new in (
        ("sys.argv[2]", "0"),
        ("sys.argv[1]", "'checkpoint'"),
        ("import os, sys", "import os, sys, time"),
        (
            "for epoch in job.epochs(2)",
            "count = {}; job.track(count=count)\nfor epoch in job.epochs(3)",
        ),
        ("    for a, b in again:", "    print('begun', epoch)\n    for a, b in again:"),
        (
            "        second.zero_grad()",
            "        time.sleep(float(sys.argv[1])); second.zero_grad()",
        ),
        ("scaler.step(opt),", "time.sleep(float(sys.argv[1])), scaler.step(opt),"),
        # Who joins has what is kept, and no other variable.
        ("    steps = 0", "    count['steps'] = 0"),
        ("if steps", "if count['steps']"),
        ("        steps +=", "        count['steps'] +="),
    ):
        assert old in script
        script = script.replace(old, new)
    found = []
    for name, pause_s in (("a", 0.3), ("b", 0.0)):
        options = "--workers 3:3 --servers 2"
        with running(tmp_path / name, options, script, pause_s=pause_s) as job:
            if pause_s:
                job.wait_for("begun 0")
                assert job.scale(2, [0])["went"] == [0]
                assert job.scale(3)["came"] == [0]
            job.process.wait(100)
            digests = set(re.findall(r"digest (\w+)", job.text))
            accuracy = set(re.findall(r"accuracy (\S+)", job.text))
            assert len(digests) == len(accuracy) == 1, job.text
            found.append((digests, accuracy, (tmp_path / name / "checkpoint").read_bytes()))
    assert found[0] == found[1]


def test_at_random(tmp_path: Path) -> None:
    outcomes, _ = disturb(tmp_path, 5, 11)
    assert sum(count for what, count in outcomes.items() if what.startswith("done")) > 0
