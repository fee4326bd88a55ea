"""Workers that something else than `tensorwire run` has started find each other, or are told why.

Slurm, MPI, Ray and the libraries on top are in tests/engines.
"""

import itertools
import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist
from programs import TRAINED

import tensorwire.torch as tw
from tensorwire.errors import UnavailableError
from tensorwire.jobs.claim import drop_claim
from tensorwire.jobs.engines import Start
from tensorwire.torch import rendezvous

# What each worker does: prints its place, the number of servers, and a figure that all must share.
TRAIN = (
    TRAINED
    + """
import subprocess, sys
import torch.distributed as dist
import torch.multiprocessing as mp
import multiprocessing.util

def train(job):
    model, opt = trained(job)
    servers = opt._tensorwire.store._member.place.servers
    told = f"done {job.rank} {job.size} {len(servers)} {model.weight.sum().item()!r}\\n"
    os.write(1, told.encode())  # in one piece

def check_group(rank):
    ranks = torch.ones(1) * rank
    dist.all_reduce(ranks)
    assert ranks == 1
"""
)


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def run(folder: Path, text: str, *command: str, **environment: str) -> "subprocess.Popen[str]":
    script = folder / "script.py"
    script.write_text(TRAIN + text)
    return subprocess.Popen(
        [sys.executable, *command, str(script)],
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def check_done(text: str) -> None:
    """Two workers with one server trained one model."""
    found = re.findall(r"done (\d) 2 1 (\S+)$", text, re.MULTILINE)
    assert sorted(rank for rank, _ in found) == ["0", "1"], text
    assert found[0][1] == found[1][1], text


SPAWN = """
def demo(rank, world_size, port):
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = port
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    job = tw.init()
    check_group(rank)
    train(job)
    store = tw.discovery.rendezvous._base(dist.distributed_c10d._get_default_store())
    assert store.check(["tensorwire/torch//0/0/members/1"])
    assert not store.check(["tensorwire/torch//0/0/secret"])
    dist.destroy_process_group()

if __name__ == "__main__":
    mp.spawn(demo, args=(2, os.environ["PORT"]), nprocs=2)
"""


@pytest.mark.slow
def test_spawn_as_in_the_tutorial_of_ddp(tmp_path: Path) -> None:
    """torch.distributed knows rank and world size; and its store does not keep the secret."""
    text = run(tmp_path, SPAWN, PORT=free_port()).communicate(timeout=100)[0]
    check_done(text)
    assert "Error" not in text


BLAME = """
def demo(rank, world_size, port):
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = port
    job = tw.init(rank=rank, world_size=world_size)
    if rank == 0:
        raise LookupError("bad luck")
    job.barrier()

if __name__ == "__main__":
    mp.spawn(demo, args=(3, os.environ["PORT"]), nprocs=3)
"""


@pytest.mark.slow
def test_spawn_shows_the_error_of_the_worker_that_failed(tmp_path: Path) -> None:
    """Spawn shows only the error of the first process that ends, and stops the others.

    Worker 0 ends after its server, which tells the others, and these must not be first.
    """
    text = run(tmp_path, BLAME, PORT=free_port()).communicate(timeout=100)[0]
    assert text.count("LookupError: bad luck") == 1, text
    assert "-- Process 0 terminated with the following error" in text


FORK = """
def demo(rank, port):
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = port
    job = tw.init(rank=rank, world_size=2)
    tell = lambda: os.write(1, f"left {job.closed}\\n".encode())
    multiprocessing.util.Finalize(None, tell, exitpriority=-1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    check_group(rank)
    train(job)
    try:
        if rank == 1:
            raise LookupError("bad luck")
        job.barrier()
    except RuntimeError as error:
        os.write(1, f"told {error}\\n".encode())

if __name__ == "__main__":
    context = mp.get_context("fork")
    both = [context.Process(target=demo, args=(rank, os.environ["PORT"])) for rank in range(2)]
    for process in both:
        process.start()
    for process in both:
        process.join()
    print("codes", both[0].exitcode, both[1].exitcode)
"""


@pytest.mark.slow
def test_ranks_by_arguments_and_a_child_that_fails(tmp_path: Path) -> None:
    """The process group comes second, at the same port; and multiprocessing's children run no
    atexit: the job is left nevertheless, and without a goodbye after an exception.
    """
    text = run(tmp_path, FORK, PORT=free_port()).communicate(timeout=100)[0]
    check_done(text)
    assert re.search(r"told worker 1 \(pid \d+\) was lost", text), text
    assert "codes 0 1" in text
    assert text.count("left True") == 2, text


SECOND_CLAIM = """
job = tw.init()
inner = [sys.executable, "-c", "import tensorwire.torch as tw; tw.init()"]
done = subprocess.run(inner, capture_output=True, text=True)
assert done.returncode == 1
assert f"worker {job.rank} of this job is process {os.getpid()} already" in done.stderr, done.stderr
dist.init_process_group("gloo")
check_group(job.rank)
train(job)
"""


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["variables", "tensorwire run"])
def test_a_second_claim_to_a_rank_is_refused(tmp_path: Path, launcher: str) -> None:
    """And the first is not disturbed. Then env:// finds all it needs."""
    if launcher == "tensorwire run":
        command = ["-m", "tensorwire", "run", "--workers=2"]
        made = [run(tmp_path, SECOND_CLAIM, *command)]
    else:
        meeting = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": free_port()}
        made = [run(tmp_path, SECOND_CLAIM, RANK=str(rank), **meeting) for rank in range(2)]
    text = "".join(each.communicate(timeout=100)[0] for each in made)
    check_done(text)
    assert not any(each.returncode for each in made), text


TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node=2")
SECOND_UNDER_TORCHRUN = """
GROUP = "import torch.distributed as dist; dist.init_process_group('gloo'); "
parent, child = (GROUP, "") if os.environ["FIRST"] == "the worker" else ("", GROUP)
exec(parent)
job = tw.init()
inner = [sys.executable, "-c", child + "import tensorwire.torch as tw; tw.init()"]
done = subprocess.run(inner, capture_output=True, text=True)
assert done.returncode == 1
assert f"worker {job.rank} of this job is process {os.getpid()} already" in done.stderr, done.stderr
train(job)
"""


@pytest.mark.slow
@pytest.mark.parametrize("first", ["the worker", "the subprocess"])
def test_a_second_claim_is_refused_although_one_has_a_process_group(
    tmp_path: Path, first: str
) -> None:
    """Under torchrun both can enter one store, whose keys must not be those of two jobs."""
    made = run(tmp_path, SECOND_UNDER_TORCHRUN, *TORCHRUN, FIRST=first)
    check_done(made.communicate(timeout=100)[0])
    assert made.returncode == 0


@pytest.mark.slow
def test_torchrun_starts_all_again_after_a_failure(tmp_path: Path) -> None:
    """Its store is the same as before, in which every rank is claimed already.

    Not with a process group, whose own keys are there too: torch may wait for the gloo of before.
    """
    text = """
job = tw.init()
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    job.barrier()
    raise LookupError("bad luck")
train(job)
"""
    made = run(tmp_path, text, *TORCHRUN, "--max-restarts=1", "--monitor-interval=0.1")
    told = made.communicate(timeout=100)[0]
    check_done(told)
    assert made.returncode == 0
    assert "LookupError: bad luck" in told


RESUMES = """
import signal

job = tw.init(seed=1)
again = os.environ.get("TORCHELASTIC_RESTART_COUNT", "2")
if again == "1" and job.rank == 0:
    server = tw.discovery._servers[0][1].pid
model = torch.nn.Linear(30, 3)
opt = tw.DistributedOptimizer(torch.optim.AdamW(model.parameters()), model)
job.track(model=model, opt=opt)
path = os.path.join(os.path.dirname(__file__), "checkpoint.pt")
if os.path.exists(path):
    job.load(path)
data = torch.arange(1200.0).view(40, 30) / 1200
epochs = 6
for epoch in job.epochs(epochs):
    for (batch,) in job.loader(torch.utils.data.TensorDataset(data), 4, shuffle=True):
        model(batch).square().sum().backward()
        opt.step()
        opt.zero_grad()
    os.write(1, f"epoch {epoch} of {job.rank} in round {again}\\n".encode())
    if job.rank == 0:
        job.save(path)
    job.barrier()
    if (again, epoch, job.rank) == ("0", 1, 1):
        os.kill(os.getpid(), signal.SIGKILL)
    if (again, epoch, job.rank) == ("1", 3, 0):
        os.kill(server, signal.SIGKILL)
train(job)
os.write(1, f"sum {[each.sum().item() for each in model.parameters()]}\\n".encode())
"""


@pytest.mark.slow
def test_torchrun_starts_all_again_after_kills_and_they_resume(tmp_path: Path) -> None:
    """First a worker is killed, then the server that the first worker had started."""
    torchrun = (*TORCHRUN, "--max-restarts=2", "--monitor-interval=0.1")
    made = run(tmp_path, RESUMES, *torchrun)
    told = made.communicate(timeout=100)[0]
    assert made.returncode == 0, told
    check_done(told)
    assert re.search(
        r"^tensorwire: server 0 \(pid \d+\), beside .* by signal 9$", told, re.MULTILINE
    )
    rounds = re.findall(r"^epoch (\d) of (\d) in round (\d)$", told, re.MULTILINE)
    expected = [(str(e), str(r), str(e // 2)) for e in range(6) for r in range(2)]
    assert sorted(rounds) == expected, told
    (tmp_path / "checkpoint.pt").unlink()
    alone = run(tmp_path, RESUMES.replace("train(job)", ""), TENSORWIRE_SLICES="2")
    sums = re.findall(r"^sum .*$", alone.communicate(timeout=100)[0], re.MULTILINE)
    assert re.findall(r"^sum .*$", told, re.MULTILINE) == sums * 2


@pytest.mark.slow
def test_one_job_after_another_at_one_port(tmp_path: Path) -> None:
    text = """
def demo(rank, port):
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = port
    train(tw.init(rank=rank, world_size=2))

if __name__ == "__main__":
    for _ in range(2):  # forked, since each would import torch again
        mp.start_processes(demo, args=(os.environ["PORT"],), nprocs=2, start_method="fork")
"""
    made = run(tmp_path, text, PORT=free_port())
    told = made.communicate(timeout=100)[0]
    assert made.returncode == 0, told
    assert sorted(re.findall(r"^done (\d) 2 1 ", told, re.MULTILINE)) == ["0", "0", "1", "1"], told


@pytest.mark.slow
@pytest.mark.parametrize("waits", ["worker 0", "worker 1", "a name"])
def test_ctrl_c_ends_the_wait_for_others(tmp_path: Path, waits: str) -> None:
    text = """
print("begins", flush=True)
try:
    tw.init()
except KeyboardInterrupt:
    print("interrupted")
"""
    address = "no-such-host.invalid" if waits == "a name" else "127.0.0.1"
    rank = "0" if waits == "worker 0" else "1"
    meeting = {"RANK": rank, "WORLD_SIZE": "2", "MASTER_ADDR": address, "MASTER_PORT": free_port()}
    made = run(tmp_path, text, TENSORWIRE_JOIN_TIMEOUT="500", **meeting)
    assert made.stdout is not None
    assert made.stdout.readline() == "begins\n"
    with pytest.raises(subprocess.TimeoutExpired):
        made.wait(2.0)  # until it waits; earlier is easier
    made.send_signal(signal.SIGINT)
    try:
        assert made.communicate(timeout=30)[0] == "interrupted\n"
    finally:
        made.kill()


@pytest.mark.slow
def test_tensorwire_run_behind_a_process_group(tmp_path: Path) -> None:
    text = """
dist.init_process_group("gloo")
job = tw.init()
check_group(job.rank)
train(job)
"""
    made = run(tmp_path, text, "-m", "tensorwire", "run", "--workers=2")
    check_done(made.communicate(timeout=100)[0])
    assert made.returncode == 0


@pytest.mark.slow
def test_spawn_that_says_nothing_is_refused(tmp_path: Path) -> None:
    """Each process would train a model of its own."""
    text = """
def demo(rank):
    tw.init()

if __name__ == "__main__":
    mp.spawn(demo, nprocs=1)
"""
    told = run(tmp_path, text).communicate(timeout=100)[0]
    assert "ValueError: torch.multiprocessing.spawn has started this process" in told


def test_another_child_of_multiprocessing_is_told_that_it_is_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: object())
    with pytest.warns(RuntimeWarning, match="so it trains alone"):
        tw.init().close()
    tw.init(rank=0, world_size=1).close()  # a warning is an error here


# ---- in one process, where the others are played


@pytest.fixture
def environ(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    monkeypatch.setenv("TENSORWIRE_JOIN_TIMEOUT", "1")
    monkeypatch.setenv("TENSORWIRE_SECRET", "0" * 32)
    yield monkeypatch
    drop_claim()


def test_missing_workers_are_named(environ: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    store.set("members/1", "here")
    with pytest.raises(UnavailableError, match=r"waited 1 s .* for worker 2, worker 3: RANK say"):
        rendezvous.Meeting(Start(0, 4, "RANK"), store)


def test_there_is_one_time_for_all_that_has_to_come(environ: pytest.MonkeyPatch) -> None:
    """Members that are late leave less of it for the secret; what follows has its own."""
    environ.setenv("TENSORWIRE_JOIN_TIMEOUT", "500")
    store = dist.HashStore()
    store.set("members/0", '{"host": "5", "name": "process 7 on b"}')
    with pytest.raises(UnavailableError, match=r"worker 1 waited 500 s .* for worker 0: its own"):
        rendezvous.Meeting(Start(1, 2, "RANK"), store, time.monotonic() + 0.1)
    store = dist.HashStore()
    store.set("members/0", '{"host": "5", "name": "process 7 on b"}')
    store.set("secret", "TENSORWIRE_SECRET")
    meeting = rendezvous.Meeting(Start(1, 2, "RANK"), store, time.monotonic() + 0.1)
    environ.setenv("TENSORWIRE_JOIN_TIMEOUT", "1")
    setting = threading.Timer(0.3, store.set, ("later", "x"))
    setting.start()
    meeting.wait({"later": "somebody"}, "no advice")
    setting.join()


def test_what_names_the_store_of_a_group(environ: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A store has the name that it would have without the group; a shared one has none."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True)
    assert rendezvous._place_of(store) == f"127.0.0.1:{store.port}"
    environ.setenv("MASTER_ADDR", "localhost")
    environ.setenv("MASTER_PORT", "1")
    assert rendezvous._place_of(store) == f"127.0.0.1:{store.port}"
    environ.setenv("MASTER_PORT", str(store.port))
    assert rendezvous._place_of(store) == f"localhost:{store.port}"
    file = dist.FileStore(str(tmp_path / "store"), 1)
    assert rendezvous._place_of(file) == str(tmp_path / "store")
    assert rendezvous._place_of(dist.HashStore()) == ""


@pytest.mark.parametrize("below", [None, "half"])
def test_a_store_that_several_groups_may_share(environ: pytest.MonkeyPatch, below: str) -> None:
    """Each of these is a job, with a worker 0."""
    base = dist.HashStore()
    store = dist.PrefixStore(below, base) if below else base
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        found = rendezvous._whole(dist.distributed_c10d._get_default_store())
        assert (found == base) == (below is None)
    finally:
        dist.destroy_process_group()


def test_alone_whatever_a_launcher_has_said(environ: pytest.MonkeyPatch) -> None:
    environ.setenv("TENSORWIRE_RANK", "1")
    environ.setenv("TENSORWIRE_WORKERS", "2")
    with pytest.raises(ValueError, match="TENSORWIRE_SERVERS is not set"):
        tw.init()
    with tw.init(rank=0, world_size=1) as job:
        assert job.size == 1


def test_a_store_of_somebody_else(environ: pytest.MonkeyPatch) -> None:
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        environ.setenv("MASTER_ADDR", "127.0.0.1")
        environ.setenv("MASTER_PORT", str(other.getsockname()[1]))
        with pytest.raises(UnavailableError, match="set MASTER_PORT to a free port for all"):
            tw.init(rank=0, world_size=2)
    with pytest.raises(UnavailableError, match=r"for the store of worker 0 at 127\.0\.0\.1:"):
        tw.init(rank=1, world_size=2)


def test_a_rank_that_is_taken_on_another_host(environ: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    store.add("claims/1", 1)
    store.set("members/1", '{"host": "5", "name": "process 7 on b"}')
    with pytest.raises(RuntimeError, match="worker 1 of this job is process 7 on b already"):
        rendezvous.Meeting(Start(1, 2, "RANK"), store)


@pytest.mark.parametrize("kind", ["nobody", "TENSORWIRE_SECRET_FILE"])
def test_secrets_that_do_not_fit(environ: pytest.MonkeyPatch, kind: str) -> None:
    store = dist.HashStore()
    store.set("members/0", '{"host": "5", "name": "process 7 on b"}')
    store.set("secret", "1" * 64 if kind == "nobody" else kind)
    with pytest.raises(ValueError, match=f"worker 0 has its secret from {kind} and worker 1 from"):
        rendezvous.Meeting(Start(1, 2, "RANK"), store)


def test_a_file_as_a_store_is_private(environ: pytest.MonkeyPatch, tmp_path: Path) -> None:
    environ.delenv("TENSORWIRE_SECRET")
    path = tmp_path / "store"
    store = dist.FileStore(str(path), 2)
    store.set("members/1", '{"host": "5", "name": "process 7 on b"}')
    meeting = rendezvous.Meeting(Start(0, 2, "RANK"), store)
    assert path.stat().st_mode & 0o077 == 0
    assert len(os.environ["TENSORWIRE_SECRET"]) == 64
    assert meeting.hosts == [[0], [1]]


def test_a_server_that_fails_is_told_to_all(environ: pytest.MonkeyPatch) -> None:
    from tensorwire.torch import discovery

    store = dist.HashStore()
    store.set("servers/0", "!OSError: no memory")
    meeting = object.__new__(rendezvous.Meeting)
    meeting.rank, meeting.workers, meeting.hosts, meeting.store = 1, 2, [[0, 1]], store
    with pytest.raises(UnavailableError, match="server 0, which worker 0 starts, failed: OSError"):
        discovery._start_servers(meeting)


def test_arguments_that_make_no_sense(environ: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="given together"):
        tw.init(rank=1)
    environ.setenv("TENSORWIRE_SERVERS", "127.0.0.1:1")
    environ.setenv("TENSORWIRE_WORKERS", "2")
    environ.setenv("TENSORWIRE_RANK", "0")
    with pytest.raises(ValueError, match="is not what tensorwire run has said: rank 0 of 2"):
        tw.init(rank=1, world_size=2)
    environ.setenv("TENSORWIRE_JOIN_TIMEOUT", "soon")
    with pytest.raises(ValueError, match="TENSORWIRE_JOIN_TIMEOUT is 'soon'"):
        rendezvous.join_timeout_s()


def test_a_forked_child_of_a_worker_is_told_whose_job_it_is() -> None:
    with tw.init() as job:
        job._pid += 1  # as it looks in a fork
        with pytest.raises(RuntimeError, match=r"is a fork of process \d+, which is worker 0"):
            tw.init()
        job._pid -= 1


def test_one_store_for_several_meetings(environ: pytest.MonkeyPatch) -> None:
    """A job that is closed and joined again finds nothing of the first one."""
    environ.setenv("MASTER_ADDR", "127.0.0.1")
    environ.setenv("MASTER_PORT", free_port())
    environ.setenv("TENSORWIRE_JOIN_TIMEOUT", "30")
    environ.setattr(rendezvous, "_meetings", itertools.count())
    for number in range(2):

        def other(number: int = number) -> None:
            store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False)
            store = dist.PrefixStore(f"tensorwire/torch//0/{number}", store)
            rendezvous.Meeting(Start(1, 2, "RANK"), store)

        thread = threading.Thread(target=other)
        thread.start()
        meeting = rendezvous.meet(0, 2)
        thread.join()
        assert meeting is not None
        assert meeting.hosts == [[0, 1]]
