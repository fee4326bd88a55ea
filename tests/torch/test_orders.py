"""Orders that samplers give, batches that they make, and streams: dealt out by slices as any data.

The promises for data in the loader's own order hold: each sample once, the same bits for any number
of workers, with a kill, with workers that come and go, and from a checkpoint.
"""

import copy
import itertools
import random
import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import elastic
import numpy as np
import pytest
import torch
from orders import COUNT, SOURCES, Numbered, Stream, Training, endless, loader_of
from programs import output_of
from scripts import digest
from team import Team
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, Sampler, TensorDataset

import tensorwire.torch as tw
from tensorwire.torch.order import mark_of


class Stop(Exception):
    pass


def trained(job: tw.Job, readers: int) -> dict[str, list[Any]]:
    """Returns for each source the model after two epochs, and this worker's samples in each."""
    result: dict[str, list[Any]] = {}
    for source in SOURCES:
        of, counts = Training(job), []
        loader = loader_of(job, source, readers)
        random.seed(1), np.random.seed(1)
        numbers = random.getstate(), np.random.get_state()[1].tolist()
        for _ in job.epochs(2):
            foreseen, batches = source != "stream" and len(loader), 0
            for batch in loader:
                of.step(batch)
                batches += 1
            assert foreseen in (batches, False)
            counts.append(of.seen)
            of.seen = []
        if not readers:
            assert numbers == (random.getstate(), np.random.get_state()[1].tolist())
        result[source] = [digest(of.model), counts]
        of.opt.close()
    return result


@pytest.mark.parametrize("more", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_same_bits_for_any_workers_and_each_sample_once(team: Team, more: bool) -> None:
    """With two workers; or with processes that read the data, and with four."""
    one = team.alone(trained, 0, slices=4)
    if more:
        others = [team.run(trained, 2, slices=4), team.run(trained, 0, slices=4, workers=4)]
    else:
        others = [team.run(trained, 0, slices=4)]
    for run in [[one], *others]:
        for source in SOURCES:
            assert {worker[source][0] for worker in run} == {one[source][0]}, source
            for epoch in range(2):
                seen = [i for worker in run for i in worker[source][1][epoch]]
                assert sorted(seen) == list(range(COUNT)), (source, epoch)
    for source in SOURCES:
        assert one[source][1][0] != one[source][1][1], "both epochs have the same order"


def run(job: tw.Job, source: str, path: Path, stop: tuple[int, int], load: bool) -> str:
    of = Training(job)
    loader = loader_of(job, source)
    if load:
        job.load(path)
    with suppress(Stop):
        for epoch in job.epochs(2):
            for number, batch in enumerate(loader, loader.first_batch):
                of.step(batch)
                if (epoch, number) == stop:
                    if job.rank == 0:
                        job.save(path)
                    raise Stop
    job.barrier()
    return digest(of.model)


@pytest.mark.parametrize("source", SOURCES)
def test_a_job_goes_on_in_mid_pass(team: Team, tmp_path: Path, source: str) -> None:
    path = tmp_path / "checkpoint"
    whole = team.alone(run, source, path, (9, 9), False, slices=2)
    team.run(run, source, path, (1, 2), False)
    assert team.alone(run, source, path, (9, 9), True, slices=2) == whole


def shapes(job: tw.Job) -> dict[str, Any]:
    """More shapes: no end, evaluation, leaving early, accumulation, a user's DataLoader."""
    found: dict[str, Any] = {}
    loader = job.loader(endless(), 2, accumulate=2)
    found["endless"] = [b.tolist() for b in itertools.islice(loader, 4)]
    with suppress(TypeError):
        found["length"] = len(loader)
    short = job.loader(Stream(), 5, accumulate=3, drop_last=True)
    found["accumulated"] = sum(1 for _ in short)
    with torch.no_grad():
        torch.manual_seed(7)
        before = torch.get_rng_state()
        found["evaluated"] = sorted(i for index, *_ in loader_of(job, "stream") for i in index)
        assert torch.equal(before, torch.get_rng_state())
    loader = loader_of(job, "batch_sampler")
    passes = [[b[0].tolist() for b in loader] for _ in range(2)]
    assert passes[0] != passes[1]
    own = DataLoader(Numbered(), 4, shuffle=True, collate_fn=len, drop_last=True)
    found["sizes"] = list(job.loader(own))
    ours = [b[0].tolist() for b in job.loader(Numbered(), 4, shuffle=True, drop_last=True)]
    theirs = [b[0].tolist() for b in job.loader(DataLoader(Numbered(), 4, True, drop_last=True))]
    found["taken"] = [len(each) for each in theirs] == [len(each) for each in ours]
    replaced = RandomSampler(Numbered(), True, 12, torch.Generator())
    before = replaced.generator.get_state()
    found["replaced"] = sum(
        len(b[0]) for b in job.loader(DataLoader(Numbered(), 4, sampler=replaced))
    )
    assert torch.equal(before, replaced.generator.get_state())
    lists = job.loader(DataLoader(Numbered(), batch_sampler=[[1, 2, 3], [4], [5, 6]]))
    found["lists"] = [b[0].tolist() for b in lists], len(lists)
    found["few"] = len(job.loader(Numbered(), batch_sampler=[[1, 2], [3], [4]]))
    return found


def test_what_else_works(team: Team) -> None:
    found = team.alone(shapes, slices=2)
    assert found["endless"] == [[0, 1], [4, 5], [2, 3], [6, 7]]
    assert "length" not in found
    assert found["accumulated"] == 6  # a group of three steps of both slices
    assert found["evaluated"] == list(range(COUNT))
    assert found["sizes"] == [4] * 10
    assert found["taken"] is True
    assert found["replaced"] == 12
    assert found["lists"] == ([[1, 2, 3], [4], [5], [6]], 4)
    assert found["few"] == 2  # the last batch joins the step before


def shuffled_anew(job: tw.Job) -> list[list[int]]:
    """Loaders made anew inside and outside of job.epochs, and one that is iterated as often."""
    loader, kept, anew = job.loader(range(20), 5, shuffle=True), [], []
    for _ in job.epochs(2):
        kept.append([[b.tolist() for b in loader] for _ in range(3)])
    for _ in job.epochs(2):
        made = (job.loader(range(20), 5, shuffle=True) for _ in range(3))
        anew.append([[b.tolist() for b in each] for each in made])
    assert anew == kept
    passes = [each for epoch in anew for each in epoch]
    assert all(one != other for one, other in itertools.combinations(passes, 2))
    job.session.position.orders.clear()
    anew = [[b.tolist() for b in job.loader(range(20), 5, shuffle=True)] for _ in range(3)]
    job.session.position.orders.clear()
    loader = job.loader(range(20), 5, shuffle=True)
    kept = [[b.tolist() for b in loader] for _ in range(3)]
    tw.init(**job._given)  # a notebook's cells run again
    assert [b.tolist() for b in job.loader(range(20), 5, shuffle=True)] == anew[0]
    assert anew == kept
    return [sorted(itertools.chain(*each)) for each in anew] + [anew[0], anew[1]]


def test_a_loader_made_anew_goes_on_shuffling(team: Team) -> None:
    """Named for a bug: in a loop that makes a loader for each pass all had the same order."""
    found = team.alone(shuffled_anew)
    assert found[:3] == [list(range(20))] * 3
    assert found[3] != found[4]


@dataclass
class Record:
    """A sample that is neither a number nor in a container; what was cached of it differs."""

    index: int
    cached: Any = field(default_factory=object, compare=False)


class Counted(IterableDataset[Any]):
    def __init__(self, count: int, first: int | None = None) -> None:
        self.count, self.first = count, first

    def __iter__(self) -> Iterator[Any]:
        if self.first is None:
            return (Numbered()[index % COUNT] for index in range(self.count))
        return map(Record, range(self.first, self.first + self.count))


class Shorter(Numbered):
    def __init__(self, by: int) -> None:
        self._by = by

    def __len__(self) -> int:
        return COUNT - self._by


def of_records(records: list[Record]) -> list[torch.Tensor]:
    return [torch.tensor([each.index for each in records]), torch.ones(len(records), 5)]


def different(job: tw.Job, what: str) -> None:
    of = Training(job)
    if what == "stream":
        loader = job.loader(Stream((job.rank, job.size)), 3)
    elif what == "longer":
        loader = job.loader(Counted(38 + job.rank), 3)
    elif what == "records":
        loader = job.loader(Counted(COUNT, job.rank), 3, collate_fn=of_records)
    elif what == "part":
        loader = job.loader(job.shard(Numbered()), 3, shuffle=True)
    elif what == "list":
        loader = job.loader([Numbered()[i] for i in range(job.rank, COUNT, job.size)], 3)
    elif what == "tensors":
        mine = torch.arange(job.rank, COUNT, job.size)
        loader = job.loader(TensorDataset(mine, torch.ones(len(mine), 5)), 3, shuffle=True)
    elif what == "length":
        loader = job.loader(Shorter(job.rank), 3)
    elif what == "more":
        loader = job.loader(Numbered(), 3, sampler=list(range(COUNT - 6 * job.rank)))
    else:
        loader = job.loader(Numbered(), 3, sampler=list(range(job.rank, COUNT, job.size)))
    for _ in job.epochs(1):
        for batch in loader:
            of.step(batch)


@pytest.mark.parametrize(
    ("what", "step"),
    [
        *(("stream", 1), ("sampler", 1), ("part", 1), ("longer", 7), ("records", 1), ("more", 1)),
        *(("list", 1), ("tensors", 1), ("length", 1)),
    ],
)
def test_data_by_rank_are_told(team: Team, what: str, step: int) -> None:
    """Names a stream that is one sample longer in one worker, after its last step."""
    told = f"worker 1 has read other samples than worker 0 up to step {step} of a pass"
    for failure in team.failures(different, what):
        assert failure.kind == "RuntimeError"
        assert told in failure.text
        assert "leave out whatever gives a process its part" in failure.text


def test_what_is_compared_of_a_sample() -> None:
    alike = [Record(3), {Record(3).index: {"b", "a"}}, np.array([None, 2]), 3j, Path("a"), {1, 2}]
    other = [Record(4), {Record(3).index: {"b", "c"}}, np.array([0, None]), 4j, Path("b"), {1, 3}]
    for one, more in zip(alike, other, strict=True):
        assert mark_of(one) == mark_of(copy.deepcopy(one))
        assert (mark_of(one) == mark_of(more)) == isinstance(one, np.ndarray)  # by its class
    assert mark_of({"a", "b", "c"}) == mark_of({"c", "b", "a"})


def refused(job: tw.Job) -> list[str]:
    class Distributed(Sampler[int]):
        num_replicas = 2

    class Own(DataLoader[Any]):
        def __iter__(self) -> Any:
            return super().__iter__()

    calls: list[Any] = [
        lambda: job.loader(range(9), 2, sampler=Distributed()),
        lambda: job.loader(range(9), 2, sampler=iter([1, 2])),
        lambda: job.loader(iter(range(9)), 2),
        lambda: job.loader(Stream(), 2, shuffle=True),
        lambda: job.loader(Stream(), 2, sampler=[1, 2]),
        lambda: job.loader(range(9), 2, shuffle=True, sampler=[1, 2]),
        lambda: job.loader(range(9), 2, batch_sampler=[[1], [2]]),
        lambda: list(job.loader(range(9), batch_sampler=[[1], [], [2]])),
        lambda: job.loader(job.loader(range(9), 2)),
        lambda: job.loader(3, 2),
        lambda: job.loader(DataLoader(range(9), batch_size=None)),
        lambda: job.loader(DataLoader(range(9), 2), 2),
        lambda: job.loader(Own(range(9), 2)),
        lambda: list(job.loader(nothing(), 2)),
    ]
    found = []
    for number, call in enumerate(calls):
        try:
            call()
        except (TypeError, ValueError) as error:
            found.append(str(error))
        else:
            raise AssertionError(number)
    return found


def nothing() -> Any:
    class Nothing(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(())

    return Nothing()


def test_what_cannot_be_dealt_out(team: Team) -> None:
    texts = [
        "would not have each sample once: leave it out, and say job.loader(dataset, batch_size,",
        "is empty after the first: give a list",
        "which only one pass can read",
        "let its __iter__ shuffle",
        "for data that are read by index",
        "two orders: give one of them",
        "batch_sampler= makes the batches",
        "has given an empty batch",
        "not another job.loader",
        "is no dataset",
        "let the dataset give single samples",
        "a DataLoader has its own batch_size",
        "gives out batches in its own way",
        "0 samples do not fill one step",
    ]
    for said, text in zip(team.alone(refused), texts, strict=True):
        assert text in said


SCRIPT = """
import hashlib, os, sys, time, torch, torch.nn.functional as F, tensorwire.torch as tw
sys.path.insert(0, FOLDER)
from orders import SOURCES, Training, loader_of

job = tw.init(seed=3)
of = Training(job)
loaders = [loader_of(job, source, readers=job.rank % 2) for source in SOURCES]
pause_s, stop, epochs = float(sys.argv[1]), sys.argv[2], int(sys.argv[3])
for epoch in job.epochs(epochs):
    for loader in loaders:
        for batch in loader:
            of.step(batch)
            time.sleep(pause_s)
    content = b"".join(each.numpy().tobytes() for each in of.model.state_dict().values())
    if job.rank == 0:
        print("epoch", epoch, "digest", hashlib.sha256(content).hexdigest(), flush=True)
    if job.sum([os.path.exists(stop)])[0]:
        break
""".replace("FOLDER", repr(str(Path(__file__).parent)))


def in_a_job(folder: Path, fail: str, *options: str) -> tuple[list[str], str]:
    """The digests of two epochs, and what was printed."""
    folder.mkdir()
    (folder / "script.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "tensorwire", "run", "--slices", "4", *options, "script.py"]
    said = output_of([*command, "0", "stop", "2"], folder, limit_s=250, TENSORWIRE_FAIL=fail)
    return re.findall(r"digest (\w+)", said), said


# In the passes over a sampler, a batch sampler and a stream, which have 4, 5 and 4 steps; a worker
# of two slices commits twice in each.
KILLS = {
    "replaced": (
        "worker-1:commit.begun:5:kill,worker-1+1:commit.begun:8:kill,worker-0:commit.begun:22:kill",
        ("--workers", "2", "--on-death=restart:5"),
        "(restart ",
    ),
    "taken over": (
        "worker-1:commit.begun:12:kill,worker-2:commit.begun:24:kill",
        ("--workers", "4", "--on-death=takeover"),
        "(takeover ",
    ),
}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_workers_that_are_killed(tmp_path: Path) -> None:
    whole, _ = in_a_job(tmp_path / "whole", "", "--workers", "2")
    assert len(whole) == 2
    for name, (fail, options, told) in KILLS.items():
        found, said = in_a_job(tmp_path / name.split()[0], fail, *options)
        assert said.count(told) == fail.count("kill"), said
        assert found == whole, said


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_workers_come_and_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "runtime"
    folder.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    options = "--workers 2:4"
    with elastic.running(tmp_path / "job", options, SCRIPT) as job:
        job.wait_for("epoch 0 digest")
        assert job.scale(3)["came"] == [2]
        assert job.scale(2, [0])["went"] == [0]
        found = job.end()
    assert len(found) > 1
    assert found == elastic.undisturbed(tmp_path / "undisturbed", len(found), SCRIPT)
