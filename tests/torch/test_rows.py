"""Tables with sparse gradients: their rows travel, and training is as in plain torch."""

from typing import Any

import pytest
import torch
from scripts import digest
from team import Team
from test_device import device
from torch import nn
from twins import STEPS, make_step, same

import tensorwire.torch as tw
from tensorwire.torch.devices import CopyStream
from tensorwire.torch.replica.declaration import tables_of

WORDS, PLACES = 3000, 90
LR = 0.05


class Tables(nn.Module):
    """Words and places by table, followed by a layer; some rows have an odd length."""

    def __init__(self, sparse: bool = True) -> None:
        super().__init__()
        self.words = nn.EmbeddingBag(WORDS, 33, mode="sum", sparse=sparse)
        self.places = nn.Embedding(PLACES, 8, sparse=sparse)
        self.more = nn.Embedding(40, 8, sparse=sparse)  # with places in one table
        self.last = nn.Linear(49, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = [self.words(x), self.places(x[:, 0] % PLACES), self.more(x[:, 1] % 40)]
        found = torch.cat(parts, 1)
        return self.last(found)  # type: ignore[no-any-return]


def tables(dtype: torch.dtype = torch.float64, sparse: bool = True) -> Tables:
    torch.manual_seed(4)
    return Tables(sparse).to(dtype)


def batch(step: int, rank: int) -> torch.Tensor:
    """Workers look up some of the same rows, and a sample the same row twice."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randint(WORDS, (6, 5), generator=generator)
    x[:, 3], x[0, :] = x[:, 2], torch.arange(5)
    return x


def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return (model(x) ** 2).mean()


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=LR)


def plain_step(twin: nn.Module, step: int, max_norm: float | None, ranks: range) -> None:
    """Plain torch, dense, with the gradients of all workers."""
    for rank in ranks:
        (loss(twin, batch(step, rank)) / len(ranks)).backward()
    if max_norm is not None:
        nn.utils.clip_grad_norm_(twin.parameters(), max_norm)
    sgd(twin).step()
    twin.zero_grad()


def training(job: tw.Job, way: str) -> str:
    model, twin = tables(), tables(sparse=False)
    limit = 0.02 if way in ("max_norm", "clip") else None
    opt = tw.DistributedOptimizer(sgd(model), model, max_norm=limit if way == "max_norm" else None)
    for step in range(STEPS):
        for number, rank in enumerate(job.my_slices):
            x = batch(step, rank)
            if way == "accumulate":
                with opt.accumulate():
                    (loss(model, x[:2]) / 3).backward()
                (loss(model, x[2:]) * 2 / 3).backward()
            else:
                loss(model, x).backward()
            if way == "clip":
                tw.clip_grad_norm_(model, 0.02)
            opt.step()
            opt.zero_grad(set_to_none=number % 2 == 0)
        plain_step(twin, step, limit, range(job.slices))
        same(model, twin)
    return digest(model)


@pytest.mark.parametrize("way", ["step", "accumulate", "max_norm", "clip"])
@pytest.mark.slow
def test_equals_dense_training(team: Team, way: str) -> None:
    found = team.run(training, way)
    for options in {"transports": ["tcp"]}, {"servers": 3}, {"servers": 2, "transports": ["tcp"]}:
        found += team.run(training, way, **options)
    assert len(set(found)) == 1


def test_one_process_computes_all_slices(team: Team) -> None:
    found = [team.alone(training, "step", slices=4)]
    found += team.run(training, "step", slices=4)
    found += team.run(training, "step", slices=4, transports={0: ["tcp"]})
    assert len(set(found)) == 1


def mixed(job: tw.Job) -> None:
    """Steps in which one worker has no gradient of a table, or all have none."""
    model, twin = tables(), tables(sparse=False)
    opt = tw.DistributedOptimizer(sgd(model), model)
    for step in range(STEPS):

        def of(model: Tables, rank: int, step: int = step) -> torch.Tensor:
            x = batch(step, rank)
            if step % 2 == rank or step == 3:
                return model.words(x).square().mean()
            return loss(model, x)

        before = model.places.weight.detach().clone()
        make_step(opt, of(model, job.rank))
        for rank in range(2):
            (of(twin, rank) / 2).backward()
        sgd(twin).step()
        twin.zero_grad()
        same(model, twin)
        assert torch.equal(before, model.places.weight) == (step == 3)


def withdrawing(job: tw.Job) -> None:
    """A withdrawn gradient does not come back with another tensor's of its table."""
    model, twin = tables(), tables(sparse=False)
    opt = tw.DistributedOptimizer(sgd(model), model)
    for step in range(STEPS):
        loss(model, 100 * torch.ones(2, 5, dtype=torch.int64)).backward()
        opt.zero_grad()

        def of(model: Tables, rank: int, step: int = step) -> torch.Tensor:
            return model.more(batch(step, rank) % 40).square().mean()

        make_step(opt, of(model, job.rank))
        for rank in range(2):
            (of(twin, rank) / 2).backward()
        sgd(twin).step()
        twin.zero_grad()
        same(model, twin)


def test_zero_grad_withdraws_rows(team: Team, transports: list[str] | None) -> None:
    team.run(withdrawing, transports=transports)


def test_a_table_that_not_all_use(team: Team, transports: list[str] | None) -> None:
    team.run(mixed, transports=transports)


def everything(job: tw.Job) -> None:
    """All rows change: then all come back."""
    model, twin = tables(), tables(sparse=False)
    opt = tw.DistributedOptimizer(sgd(model), model)
    for step in range(STEPS):
        rows = torch.arange(WORDS)[None] if step % 2 else torch.arange(3)[None]
        make_step(opt, model.words(rows).square().mean())
        twin.words(rows).square().mean().backward()
        sgd(twin).step()
        twin.zero_grad()
        same(model, twin)


@pytest.mark.parametrize("transports", ["shm", "tcp"], indirect=True)
def test_when_all_rows_change(team: Team, transports: list[str] | None) -> None:
    team.run(everything, transports=transports)


class Tied(nn.Module):
    """A table that the loss reads as a whole, beside its module: torch makes that dense."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 3, sparse=sparse).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.table(x).sum(1) @ self.table.weight.T).square().mean()


def tied(job: tw.Job) -> None:
    torch.manual_seed(1)
    model = Tied(True)
    twin = Tied(False)
    twin.load_state_dict(model.state_dict())
    opt = tw.DistributedOptimizer(sgd(model), model)
    for step in range(STEPS):
        make_step(opt, model(batch(step, job.rank) % 50))
        for rank in range(2):
            (twin(batch(step, rank) % 50) / 2).backward()
        sgd(twin).step()
        twin.zero_grad()
        same(model, twin)


def test_a_gradient_that_became_dense(team: Team, transports: list[str] | None) -> None:
    team.run(tied, transports=transports)


def scaled(job: tw.Job) -> None:
    """A scaler finds an infinity in a row, skips the step, and goes on."""
    model, twin = tables(torch.float32), tables(torch.float32, sparse=False)
    opt = tw.DistributedOptimizer(sgd(model), model)
    scaler = tw.GradScaler("cpu", init_scale=8.0)
    for step in range(STEPS):
        before = digest(model)
        y = loss(model, batch(step, job.rank))
        scaler.scale(y * torch.inf if step == 1 and job.rank == 1 else y).backward()
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
        if step == 1:
            assert digest(model) == before
            continue
        plain_step(twin, step, None, range(2))
        same(model, twin, rtol=1e-5, atol=1e-6)
    assert scaler.get_scale() == 4.0


def test_with_a_scaler(team: Team, transports: list[str] | None) -> None:
    team.run(scaled, transports=transports)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_other_dtypes(team: Team, dtype: torch.dtype) -> None:
    found = team.run(short, dtype) + team.run(short, dtype, transports=["tcp"], servers=2)
    assert len(set(found)) == 1


def short(job: tw.Job, dtype: torch.dtype) -> str:
    model, twin = tables(dtype), tables(dtype, sparse=False)
    opt = tw.DistributedOptimizer(sgd(model), model)
    for step in range(STEPS):
        make_step(opt, loss(model, batch(step, job.rank)))
        plain_step(twin, step, None, range(2))
    coarse = 1e-5 if dtype == torch.float32 else 0.05
    same(model, twin, rtol=coarse, atol=coarse)
    return digest(model)


# ---- what travels, and what is told of it


def told(job: tw.Job) -> dict[str, Any]:
    model = tables(torch.float32)
    opt = tw.DistributedOptimizer(sgd(model), model)
    written = 0
    for step in range(STEPS):
        if job.session.member:
            written = job.session.member.node.stats()["bytes_written"]
        make_step(opt, loss(model, batch(step, job.rank)))
    found = tw.explain_optimizer(opt)
    rows = {row.name: row for row in found.gradients}
    distinct = len(torch.unique(batch(STEPS - 1, job.rank)))
    assert rows["words.weight"].bytes == distinct * (8 + 33 * 4)
    assert rows["words.weight"].reason == "it is sparse: its rows are sent"
    assert rows["words.weight"].route == "rows sent"
    assert not rows["words.weight"].in_place
    assert rows["last.weight"].bytes == 49 * 2 * 4
    now = job.session.member.node.stats()["bytes_written"] if job.session.member else 0
    return {
        "written": now - written,
        "rows": sum(row.bytes for row in rows.values() if "last" not in row.name),
        "copied": {name: row.bytes_copied for name, row in rows.items()},
        "parameters": rows["words.weight"].shape,
        "in place": {name: row.in_place for name, row in rows.items()},
    }


MESSAGES = 4096  # more than commits and counts


@pytest.mark.parametrize("transports", ["shm", "tcp"], indirect=True)
def test_only_rows_are_written(team: Team, transports: list[str] | None) -> None:
    for found in team.run(told, transports=transports):
        assert found["rows"] <= found["written"] <= found["rows"] + MESSAGES
        assert found["parameters"] == (WORDS, 33)


def test_copies_of_rows_are_told(team: Team) -> None:
    """One for bringing rows in order, and on one host one into the server's memory."""
    for transports, times in (None, 2), (["tcp"], 1):
        for found in team.run(told, transports=transports):
            copied = sum(size for name, size in found["copied"].items() if "last" not in name)
            # The first copy is of rows that are not summed yet; behind the second is a count.
            assert times * found["rows"] <= copied <= 2 * times * found["rows"] + 16
            assert found["in place"]["last.weight"]


def server_writes(job: tw.Job) -> tuple[int, int]:
    """Returns the bytes that a server writes to a worker without a map of the parameters."""
    torch.manual_seed(1)
    model = nn.Embedding(20_000, 16, sparse=True)
    opt = tw.DistributedOptimizer(sgd(model), model)
    received = []
    for step in range(2):
        before = job.session.member.node.stats()["bytes_received"]
        make_step(opt, model(torch.arange(100 * step, 100 * step + 100)).square().mean())
        received.append(job.session.member.node.stats()["bytes_received"] - before)
    return max(received), model.weight.nbytes


def test_only_changed_rows_come_back(team: Team) -> None:
    for received, size in team.run(server_writes, transports=["tcp"]):
        assert 100 * (8 + 64) <= received <= 100 * (8 + 64) + 2 * MESSAGES < size / 10


def published(job: tw.Job, size: int) -> None:
    """Named for a bug: a gradient that was withdrawn became the parameters' values."""
    torch.manual_seed(2)
    model = nn.Embedding(size, 16, sparse=True)
    opt = tw.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    for _ in range(2):
        before = digest(model)
        model(torch.tensor([0, 1])).sum().backward()
        with tw.edit(model):
            pass
        assert digest(model) == before
        opt.zero_grad()
        make_step(opt, model(torch.tensor([2, 3])).sum())
        assert digest(model) != before


@pytest.mark.parametrize("transports", ["shm", "tcp"], indirect=True)
@pytest.mark.parametrize("size", [100, 20_000])
def test_publishing_takes_no_gradients(team: Team, transports: list[str] | None, size: int) -> None:
    team.run(published, size, transports=transports)
    team.alone(published, size)


def converted(job: tw.Job) -> None:
    """A gradient of another dtype, which torch allows."""
    model = nn.Embedding(9, 16, sparse=True)
    model.weight.grad_dtype = torch.float64
    opt = tw.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model)
    before = model.weight.detach().clone()
    rows = torch.tensor([1, 4])
    values = torch.full((2, 16), 0.5, dtype=torch.float64)
    model.weight.grad = torch.sparse_coo_tensor(rows[None], values, (9, 16), check_invariants=True)
    opt.step()
    before[rows] -= 0.5
    assert torch.equal(model.weight, before)


def test_gradients_are_converted(team: Team, transports: list[str] | None) -> None:
    team.run(converted, transports=transports)


def test_which_parameters_are_tables() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.sparse = nn.Embedding(4, 3, sparse=True)
            self.bag = nn.EmbeddingBag(4, 3, sparse=True)
            self.dense = nn.Embedding(4, 3)
            self.tied = nn.Embedding(4, 3, sparse=True)
            self.out = nn.Linear(3, 4, bias=False)
            self.out.weight = self.tied.weight
            self.twice = nn.Embedding(4, 3, sparse=True)
            self.again = nn.Embedding(4, 3)
            self.again.weight = self.twice.weight
            self.with_bias = WithBias(4, 3, sparse=True)

    class WithBias(nn.Embedding):
        def __init__(self, *sizes: int, sparse: bool) -> None:
            super().__init__(*sizes, sparse=sparse)
            self.bias = nn.Parameter(torch.zeros(3))

    model = Model()
    assert tables_of(model) == {
        id(each.weight) for each in (model.sparse, model.bag, model.with_bias)
    }


# ---- state


def saved(job: tw.Job, folder: str) -> str:
    model = tables()
    opt = tw.DistributedOptimizer(sgd(model), model)
    job.track(model=model, optimizer=opt)
    for step in range(2):
        make_step(opt, loss(model, batch(step, job.rank)))
    if job.rank == 0:
        job.save(f"{folder}/saved")
    job.barrier()
    middle = digest(model)
    with tw.edit(model), torch.no_grad():
        model.words.weight.fill_(1.0)
    assert digest(model) != middle
    assert bool((model.words.weight == 1).all())
    job.load(f"{folder}/saved")
    assert digest(model) == middle
    for step in range(2, STEPS):
        make_step(opt, loss(model, batch(step, job.rank)))
    return digest(model)


def test_saved_edited_and_loaded(team: Team, transports: list[str] | None, tmp_path: Any) -> None:
    found = team.run(saved, str(tmp_path), transports=transports)
    assert set(found) == set(team.run(training, "step"))


def lazily(job: tw.Job) -> None:
    """SGD with momentum and decay by name: rows of a step are all that there is to it."""
    model, twin = tables(), tables(sparse=False)
    options = {"lr": LR, "momentum": 0.9, "weight_decay": 0.01}
    with pytest.raises(ValueError, match='sparse="lazy"'):
        tw.DistributedOptimizer(torch.optim.SGD(model.parameters(), **options), model)
    plain = torch.optim.SGD(model.parameters(), **options)
    opt = tw.DistributedOptimizer(plain, model, sparse="lazy")
    names = [name for name, _ in twin.named_parameters()]
    buffers = [torch.zeros_like(p) for p in twin.parameters()]
    for step in range(STEPS):
        opt.zero_grad()
        loss(model, batch(step, job.rank)).backward()
        opt.step()
        twin.zero_grad()
        for rank in range(job.size):
            (loss(twin, batch(step, rank)) / job.size).backward()
        with torch.no_grad():
            for name, p, buffer in zip(names, twin.parameters(), buffers, strict=True):
                rows = p.grad.abs().sum(1) > 0 if not name.startswith("last") else slice(None)
                update = p.grad[rows] + 0.01 * p[rows]
                buffer[rows] = 0.9 * buffer[rows] + update
                p[rows] -= LR * buffer[rows]
    same(model, twin)


@pytest.mark.parametrize("servers", [1, 2])
def test_momentum_by_name(team: Team, servers: int) -> None:
    team.run(lazily, servers=servers)


def lazily_wrong(job: tw.Job) -> None:
    for model, make in ((nn.Linear(2, 2), torch.optim.SGD), (tables(), torch.optim.Adagrad)):
        with pytest.raises(ValueError, match='sparse="lazy" is for SGD'):
            tw.DistributedOptimizer(make(model.parameters(), lr=0.1), model, sparse="lazy")
    with pytest.raises(ValueError, match="sparse is 'exact' or 'lazy'"):
        tw.DistributedOptimizer(sgd(tables()), tables(), sparse="maybe")


def test_what_lazy_is_for(team: Team) -> None:
    team.alone(lazily_wrong)


# ---- on a device


def staged(job: tw.Job, name: str, *args: Any) -> Any:
    """One of the cases above, with tables that are treated as if they were on a device."""
    with device("staged"):
        return globals()[name](job, *args)


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("training", ("accumulate",)),
        ("training", ("step",)),
        ("training", ("max_norm",)),
        ("short", (torch.bfloat16,)),
        ("withdrawing", ()),
        ("mixed", ()),
        ("everything", ()),
        ("tied", ()),
        ("scaled", ()),
        ("converted", ()),
    ],
    ids=lambda each: each if isinstance(each, str) else "-".join(map(str, each)),
)
def test_tables_on_a_device(
    team: Team, transports: list[str] | None, name: str, args: tuple[Any, ...]
) -> None:
    found = team.run(staged, name, *args, transports=transports)
    if found[0] is not None:
        assert found == team.run(globals()[name], *args, transports=transports)


def interrupted(job: tw.Job) -> None:
    """Named for a bug: a step after an interrupted one had the rows of an earlier one."""
    bring = CopyStream.bring
    with device("staged"), pytest.MonkeyPatch.context() as patch:
        model, twin = tables(), tables(sparse=False)
        opt = tw.DistributedOptimizer(sgd(model), model)
        for step in range(STEPS):
            loss(model, batch(step, job.rank)).backward()
            for group in range(3):  # of the tables there are two

                def interrupt(self: CopyStream, *args: Any, left: list[int] = [group]) -> Any:  # noqa: B006
                    if not left[0]:
                        raise KeyboardInterrupt
                    left[0] -= 1
                    return bring(self, *args)

                if group < 2:
                    patch.setattr(CopyStream, "bring", interrupt)
                    with pytest.raises(KeyboardInterrupt):
                        opt.step()
                    patch.setattr(CopyStream, "bring", bring)
                else:
                    opt.step()
            opt.zero_grad()
            plain_step(twin, step, None, range(job.slices))
            same(model, twin)


def test_a_step_that_is_interrupted_while_rows_come_is_made_again(
    team: Team, transports: list[str] | None
) -> None:
    team.run(interrupted, transports=transports)
