"""`tensorwire serve`: workers that something else starts join, die, come back, and leave."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from launching import HERE, Place, lines_of
from serving import Served, output_of, until

from tensorwire.errors import UnavailableError
from tensorwire.launch import ServeSupervisor, serve_spec
from tensorwire.launch.serve import open_door
from tensorwire.membership.entry import enter_job

SERVER = [sys.executable, str(HERE / "toy_server.py")]
TOY = (HERE / "toy_worker.py").read_text()

# A worker with what could be gone on with: its socket, and a file with numbers of which the first
# counts progress.
JOIN = """
import json
from tensorwire.membership.entry import enter_job
from tensorwire.durability.descriptor_store import DescriptorStore

enter_job()
term = int(os.environ.pop("TENSORWIRE_TERM", "0"))
store = DescriptorStore.of_descriptor(int(os.environ.pop("TENSORWIRE_DESCRIPTOR_STORE")))
print("term", term, "of", rank, "with", os.environ["TENSORWIRE_WORKERS"], flush=True)

def become():
    global file
    if term:
        assert store.wait_for_takeover().term == term
        os.close(store.take("listener").descriptor)
        file = store.take("numbers").descriptor
        return
    with socket.create_server(("127.0.0.1", 0)) as door:
        store.keep("listener", {}, door.fileno())
    file = os.memfd_create("numbers")
    os.truncate(file, 16)
    store.keep("numbers", {"progress": 0}, file)

def count(place=0):
    number = int.from_bytes(os.pread(file, 8, 8 * place), "little") + 1
    os.pwrite(file, number.to_bytes(8, "little"), 8 * place)
    return number

def leave():
    goodbye()
    store.leave(True)

def die():
    os.kill(os.getpid(), signal.SIGKILL)
    wait()
"""


def said(text: str) -> str:
    """Returns the lines of the supervisor itself."""
    start = "tensorwire serve: "
    lines = [line.removeprefix(start) for line in text.splitlines() if line.startswith(start)]
    return "\n".join(lines)


def serve(place: Place, text: str, **options: Any) -> Served:
    return Served(place, JOIN + text, **options)


def test_a_worker_that_is_killed_comes_back_to_what_it_kept(place: Place) -> None:
    text = (
        "become()\nprint('counted', count(1), flush=True)\n"
        "if rank == 1 and term < 2: count(); die()\nleave()"
    )
    with serve(place, text, environment={"COUNT_DESCRIPTORS": "1"}) as job:
        texts = job.run(0, 1)
        code, told = job.end()
    assert code == 0, told
    assert texts[0] == "term 0 of 0 with 2\ncounted 1\n"
    assert texts[1] == "".join(f"term {n} of 1 with 2\ncounted {n + 1}\n" for n in range(3))
    places = re.findall(r"worker 1 \(pid \d+\) has come again \(restart (\d)\)", said(told))
    assert places == ["1", "2"]
    assert said(told).count("ended without a goodbye; it may come back within 30 s") == 2
    assert int(told.partition("descriptors: ")[2].split()[0]) < 10
    assert not list(job.socket.parent.glob("job*"))


def test_a_worker_that_kept_nothing_begins_anew(place: Place) -> None:
    text = "mark = sys.argv[0] + 'mark'\nif not os.path.exists(mark): open(mark, 'w'); die()\n"
    with serve(place, text + "become()\nleave()", workers=1) as job:
        texts = job.run(0)
        code, told = job.end()
    assert code == 0, told
    assert texts[0] == "term 0 of 0 with 1\n" * 2


def test_a_rank_that_is_claimed_twice(place: Place) -> None:
    """The first one is not disturbed, and another one may come when it has died."""
    with serve(place, "become()\nif term == 0: wait()\nleave()", workers=1) as job:
        first = job.start(0)
        job.supervisor.wait_for("has come")
        second = output_of(job.start(0))
        assert f"RuntimeError: worker 0 of this job is process {first.pid} already" in second
        assert "TENSORWIRE_RANK and TENSORWIRE_SUPERVISOR say" in second
        assert first.poll() is None
        first.kill()
        first.wait()
        assert output_of(job.start(0)) == "term 1 of 0 with 1\n"
        assert job.end()[0] == 0


def test_ranks_that_there_are_not_and_those_that_have_left(place: Place) -> None:
    with serve(place, "become()\nleave()") as job:
        assert job.run(0) == {0: "term 0 of 0 with 2\n"}
        until(lambda: "has done its work" in output_of(job.start(0)))
        text = output_of(job.start(2))
        assert "has no place for worker 2: it serves workers 0 to 1 (--workers 2)" in text
        job.run(1)
        assert job.end()[0] == 0
        text = output_of(job.start(0, TORCHELASTIC_RESTART_COUNT="1"))
        assert "nobody could be reached there (No such file or directory): start" in text


def test_a_worker_that_does_not_come_back_ends_the_job(place: Place) -> None:
    text = "become()\nif rank == 0: die()\nwait()"
    with serve(place, text, return_s=0.5) as job:
        first, _ = job.start(0), job.start(1)
        code, told = job.end()
        assert code == 1
        assert re.search(
            rf"worker 0 \(pid {first.pid}\) ended without a goodbye and was not started again "
            r"within 0.5 s \(--return-within\), as torchrun .*; this ended the job",
            said(told),
        ), told
        assert "no checkpoint was saved" in said(told)


def test_a_worker_that_never_comes_ends_the_job(place: Place) -> None:
    with serve(place, "become()\nwait()", return_s=0.3) as job:
        job.start(1)
        code, told = job.end()
    assert code == 1
    assert "worker 0 did not come within 0.3 s (--return-within) after the first one" in said(told)


def test_deaths_without_progress_end_the_job(place: Place) -> None:
    text = "become()\nprint('log', os.environ['TENSORWIRE_JOB_LOG'], flush=True)\ndie()"
    with serve(place, text, workers=1, restarts=2, options=["-w", "1"]) as job:
        workers = [job.start(0)]
        for _ in range(2):
            workers[-1].wait()
            workers.append(job.start(0))
        code, told = job.end()
        path = output_of(workers[-1]).partition("log ")[2].strip()
    assert code == 1
    lines = [json.loads(line) for line in Path(path).read_text().splitlines()]
    grants = [(e["term"], e["dead"], e["pid"]) for e in lines if e["what"] == "grant"]
    assert lines[0]["command"] == "-m tensorwire serve -w 1"
    pids = [worker.pid for worker in workers]
    assert grants == [(1, pids[0], pids[1]), (2, pids[1], pids[2])]
    assert "after it had been replaced 2 times without getting any further" in said(told)
    assert "no checkpoint was saved" in said(told)


def test_a_stopped_worker_is_killed_and_comes_back(place: Place) -> None:
    text = "become()\nif not term: os.kill(os.getpid(), signal.SIGSTOP)\nleave()"
    with serve(place, text, workers=1, silence_s=0.4) as job:
        assert job.run(0) == {0: "term 0 of 0 with 1\nterm 1 of 0 with 1\n"}
        code, told = job.end()
    assert code == 0, told
    assert "was stopped for 0.4 s and was killed; it may come back within 30 s" in said(told)


def test_a_worker_that_fails_ends_the_job(place: Place) -> None:
    text = "become(); store.leave(False); print('failed', flush=True); wait()"
    with serve(place, text, workers=1, patience={"grace_s": 60.0}) as job:
        worker = job.start(0)
        assert worker.stdout is not None
        assert [worker.stdout.readline() for _ in range(2)] == ["term 0 of 0 with 1\n", "failed\n"]
        assert "the job is over: worker 0 (pid" in output_of(job.start(0))  # as torchrun would
        job.supervisor.send(signal.SIGTERM)
        code, told = job.end()
    assert code == 1
    assert f"worker 0 (pid {worker.pid}) has failed; its own messages tell why" in said(told)


def test_what_is_malformed_ends_the_job(place: Place) -> None:
    with serve(place, "become(); store._channel.send(b'{}'); wait()", workers=1) as job:
        job.start(0)
        code, told = job.end()
    assert code == 1
    assert "could not be replaced if it were killed: its message has no known key" in said(told)


def test_workers_may_be_there_first(place: Place) -> None:
    with serve(place, "become()\nleave()", workers=1) as job:
        job.supervisor.wait_for("a worker joins by TENSORWIRE_SUPERVISOR=")
        job.supervisor.send(signal.SIGTERM)
        assert job.end()[0] == 143
        worker = job.start(0)
        with pytest.raises(subprocess.TimeoutExpired):
            worker.wait(0.5)
        with Served(place, "", workers=1) as again:
            again._script = job._script
            assert again.end()[0] == 0
            assert output_of(worker) == "term 0 of 0 with 1\n"


def test_strangers_at_the_door(place: Place) -> None:
    """A stranger that is silent, sends nonsense, or leaves at once disturbs no worker."""
    with serve(place, "become()\nleave()", workers=1) as job:
        job.supervisor.wait_for("a worker joins")
        kept = []
        for data in (b"", b"x" * 5000, b"[1]", b'{"rank": "0"}'):
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
                stranger.connect(str(job.socket))
                if data:
                    stranger.send(data)
        # A process that claims a rank has it as long as it lives.
        claims = (
            "import socket, sys; s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET); "
            "s.connect(sys.argv[1]); s.send(b'{\"rank\": 0}')"
        )
        subprocess.run([sys.executable, "-c", claims, str(job.socket)], check=True)
        for _ in range(260):
            kept.append(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            kept[-1].connect(str(job.socket))
        assert job.run(0) == {0: "term 0 of 0 with 1\n"}
        assert job.end()[0] == 0
        for stranger in kept:
            stranger.close()


def test_nonsense_at_the_door_is_refused_and_the_job_goes_on(place: Place) -> None:
    """Named for a bug: 4,096 brackets ended the supervisor, and its job, by RecursionError."""
    with serve(place, "become(); leave()") as job:
        job.supervisor.wait_for("workers join by")
        for nonsense in (b"[" * 4096, b'{"rank": true}', b'{"rank": 0.0}', b'{"rank": 1e999}'):
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as visitor:
                visitor.settimeout(10)
                visitor.connect(str(job.socket))
                visitor.send(nonsense)
                assert "the request is not valid" in json.loads(visitor.recv(1000))["error"]
        job.run(0, 1)
        assert job.end()[0] == 0


def test_two_supervisors_at_one_place(place: Place, tmp_path: Path) -> None:
    with serve(place, "become()\nleave()", workers=1) as job:
        job.supervisor.wait_for("a worker joins")
        with pytest.raises(
            UnavailableError, match=r"another tensorwire serve listens at .*--socket"
        ):
            open_door(job.socket, print)
        job.run(0)
        assert job.end()[0] == 0
    (tmp_path / "file").touch()
    with pytest.raises(UnavailableError, match="is there already, and is no socket"):
        open_door(tmp_path / "file", print)
    with pytest.raises(UnavailableError, match=r"AF_UNIX path too long; --socket"):
        open_door(tmp_path / ("x" * 107), print)
    with pytest.raises(UnavailableError, match=r"cannot listen at .*No such file"):
        open_door(tmp_path / "no" / "folder", print)


def test_what_killed_supervisors_left_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    tmp_path.chmod(0o700)
    folder = tmp_path / "tensorwire"
    folder.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as left:
        left.bind(str(folder / "serve-1"))
    door = open_door(None, print)
    assert list(folder.iterdir()) == [door.path]
    door.close()
    door.close()
    assert not list(folder.iterdir())


def test_a_place_of_a_killed_supervisor_is_taken(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as left:
        left.bind(str(tmp_path / "job"))
    door = open_door(tmp_path / "job", print)
    with pytest.raises(UnavailableError, match="another tensorwire serve listens"):
        open_door(tmp_path / "job", print)
    door.close()


def test_what_cannot_be_served() -> None:
    with pytest.raises(ValueError, match="restarts is 0; 1 or more"):
        serve_spec(2, restarts=0)
    with pytest.raises(ValueError, match="transports are rdma, tcp; shm has to be among them"):
        serve_spec(2, transports=["rdma", "tcp"])
    with pytest.raises(ValueError, match="to come back is 0, not some seconds"):
        ServeSupervisor(serve_spec(2), return_s=0.0)


def test_what_a_worker_is_told_where_nobody_listens(tmp_path: Path) -> None:
    environ = {"TENSORWIRE_SUPERVISOR": str(tmp_path / "job")}
    with pytest.raises(ValueError, match="TENSORWIRE_RANK is not: set it to the number"):
        enter_job(environ)
    environ["TENSORWIRE_RANK"] = "1"
    with pytest.raises(UnavailableError, match=r"there within 0\.1 s \(No such file .*: start"):
        enter_job(environ, 0.1)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as left:
        left.bind(environ["TENSORWIRE_SUPERVISOR"])
    with pytest.raises(UnavailableError, match=r"0\.1 s \(Connection refused\).* it was killed"):
        enter_job(environ, 0.1)


def test_a_killed_server_under_serve(place: Place) -> None:
    """Real servers, and workers with real stores: the digest is the one of an undisturbed run."""
    short = {"TOY_STEPS": "4", "OMP_NUM_THREADS": "1"}  # numpy's sums depend on threads
    fail = {**short, "TENSORWIRE_FAIL": "server-1:cell.armed:5:kill"}
    options: dict[str, Any] = {"servers": 2, "server_command": SERVER, "patience": {}}
    with Served(place, TOY, environment=fail, **options) as job:
        texts = job.run(0, 1)
        code, told = job.end()
    assert code == 0, told
    assert "server 1 (pid" in said(told), "the place was not reached"
    run = place.run(TOY, environment=short, durable=True, **options)
    assert run.returncode == 0, run.stderr
    whole = {*lines_of(run.stdout, "worker 0"), *lines_of(run.stdout, "worker 1")}
    assert {text.strip() for text in texts.values()} == whole
    assert len(whole) == 1


def test_a_supervisor_that_is_killed_ends_the_job(place: Place) -> None:
    environment = {"TOY_STEPS": "100000"}
    with Served(place, TOY, server_command=SERVER, environment=environment, patience={}) as job:
        workers = [job.start(rank) for rank in range(2)]
        job.supervisor.wait_for("worker 0 (pid", "worker 1 (pid")
        with pytest.raises(subprocess.TimeoutExpired):
            workers[0].wait(1.0)
        os.kill(job.supervisor.pid, signal.SIGKILL)
        for worker in workers:
            text = output_of(worker)
            assert worker.returncode == 1
            assert "PeerLostError: the launcher of this job has ended, and its servers" in text
