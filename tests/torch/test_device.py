"""Models on a device whose servers are on the host.

Each test runs with tensors of the CPU that are treated like those of a device, and on a CUDA device
where there is one. The former have the bits of ordinary training, as the same kernels compute them.
"""

import hashlib
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from team import Team, make_team
from torch import nn
from torch.nn.functional import cross_entropy

import tensorwire.torch as tw
from tensorwire.errors import UnavailableError
from tensorwire.parameters import Place, RemoteStore
from tensorwire.torch import checkpoint, devices
from tensorwire.torch.replica import device_gradients

DEVICES = ["staged", pytest.param("cuda", marks=pytest.mark.gpu)]

both = pytest.mark.parametrize("kind", DEVICES)


@contextmanager
def device(kind: str) -> Iterator[torch.device]:
    """Inside, tensors of the CPU are treated as if they were on a device, for "staged"."""
    before = devices._STAGES_CPU
    devices._STAGES_CPU = kind == "staged"
    deterministic = torch.are_deterministic_algorithms_enabled()
    if kind == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    try:
        yield torch.device("cuda" if kind == "cuda" else "cpu")
    finally:
        devices._STAGES_CPU = before
        torch.use_deterministic_algorithms(deterministic)


def small_model() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(4), nn.Flatten(),
        nn.Dropout(0.2), nn.Linear(8 * 3 * 3, 32), nn.Tanh(), nn.Linear(32, 10),
    ).to(memory_format=torch.channels_last)  # fmt: skip


def samples(count: int = 48) -> torch.utils.data.TensorDataset:
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(count, 1, 16, 16, generator=generator)
    return torch.utils.data.TensorDataset(images, torch.randint(10, (count,), generator=generator))


def digest(model: nn.Module) -> str:
    total = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        total.update(name.encode() + value.detach().cpu().contiguous().numpy().tobytes())
    return total.hexdigest()[:16]


def train(
    job: Any,
    kind: str,
    optimizer: str = "adamw",
    way: str = "",
    **options: Any,
) -> tuple[str, float]:
    """Trains for two epochs in some way; returns a digest of the model and the last loss."""
    with device(kind) as where:
        model = small_model().to(where)
        make = {
            "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
            "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
            "nadam": lambda p: torch.optim.NAdam(p, lr=1e-2),
        }[optimizer]
        opt: Any = tw.DistributedOptimizer(make(model.parameters()), model, **options)
        scaler = tw.GradScaler(where.type, init_scale=1024.0) if "scaler" in way else None
        loss = torch.zeros(())
        for _ in job.epochs(2):
            for number, (images, labels) in enumerate(job.loader(samples(), 8, shuffle=True)):
                opt.zero_grad()
                outputs = model(images.to(where))
                loss = cross_entropy(outputs, labels.to(where))
                if scaler is None:
                    loss.backward()
                else:
                    scaler.scale(loss).backward()
                if "clip" in way:
                    tw.clip_grad_norm_(model.parameters(), 0.5)
                if "edit gradients" in way:
                    opt.synchronize()
                    for parameter in model.parameters():
                        parameter.grad.mul_(0.5)
                if scaler is None:
                    opt.step()
                else:
                    scaler.step(opt)
                    scaler.update()
                if "edit" in way.split(", ") and number == 1:
                    with tw.edit(model), torch.no_grad():
                        model[6].weight.mul_(0.9)
        found = digest(model)
        opt.close()
        assert digest(model) == found, "closing changes nothing"
        return found, float(loss.detach())


WAYS = {
    "plain": {},
    "sgd, copied": {"optimizer": "sgd", "placement": "copy"},
    "clipped": {"way": "clip"},
    "norm": {"max_norm": 0.5},
    "scaler": {"way": "scaler"},
    "gradients edited": {"way": "edit gradients"},
    "edited": {"way": "edit"},
    "by worker 0": {"apply": "worker"},
    "average": {"ema": 0.9},
    "buffers averaged": {"buffers": "average"},
    "buffers local": {"buffers": "local", "optimizer": "sgd"},
}


@both
@pytest.mark.parametrize("name", WAYS)
@pytest.mark.slow
def test_every_way_to_train_has_its_bits_for_all_servers_and_paths(
    name: str, kind: str, team: Team, transports: list[str] | None
) -> None:
    options = WAYS[name]
    one = team.run(_train_with, kind, options, servers=1, transports=transports)
    if name != "buffers local":
        assert one[0][0] == one[1][0], "both workers have one model"
    two = team.run(_train_with, kind, options, servers=2, transports=transports)
    assert [each[0] for each in two] == [each[0] for each in one]
    if kind == "staged":
        assert [each[0] for each in team.run(_train_with, "host", options, servers=1)] == [
            each[0] for each in one
        ]


def _train_with(job: Any, kind: str, options: dict[str, Any]) -> tuple[str, float]:
    return train(job, kind, **options)


def change(job: Any, kind: str, how: str) -> str:
    """The message of the next step when a script has changed something without the optimizer."""
    with device(kind) as where:
        model = nn.Linear(300, 200).to(where)
        opt: Any = tw.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)

        def step(before: Any = lambda: None) -> None:
            opt.zero_grad()
            model(torch.ones(2, 300, device=where)).sum().backward()
            before()
            opt.step()

        step()
        kept = [each.detach().clone() for each in model.parameters()]
        try:
            if how == "parameter in place":
                with torch.no_grad():
                    model.bias.add_(1)
                step()
            elif how == "parameter by data":
                for _ in range(64):  # within 32 steps
                    model.bias.data.add_(1)
                    step()
            elif how == "gradient in place":
                step(lambda: model.weight.grad.mul_(2))
            else:
                for _ in range(64):
                    step(lambda: model.weight.grad.data.mul_(2))
        except RuntimeError as error:
            if how == "parameter in place":
                assert all(map(torch.equal, kept, model.parameters())), "the change is undone"
            opt.zero_grad()
            step()
            return str(error)
    return ""


@both
@pytest.mark.parametrize(
    "how", ["parameter in place", "parameter by data", "gradient in place", "gradient by data"]
)
def test_a_change_behind_the_back_of_the_optimizer_is_found(
    how: str, kind: str, team: Team
) -> None:
    (said,) = team.run(change, kind, how, workers=1)
    what, name = how.split()[0], "bias" if how.startswith("p") else "weight"
    assert said.startswith(f"{'the gradient of' if what == 'gradient' else 'parameter'} '{name}'")
    assert "was changed" in said


def look(job: Any, kind: str, place: str = "auto") -> Any:
    with device(kind) as where:
        model = small_model().to(where)
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        opt: Any = tw.DistributedOptimizer(sgd, model, parameters_on=place)
        for images, labels in job.loader(samples(), 8):
            opt.zero_grad()
            cross_entropy(model(images.to(where)), labels.to(where)).backward()
            opt.step()
        return tw.explain_optimizer(opt)


@pytest.mark.parametrize("transports", ["shm", "tcp"], indirect=True)
@both
def test_explain_tells_the_copies(kind: str, team: Team, transports: list[str] | None) -> None:
    found = team.run(look, kind, transports=transports)[0]
    name = "cuda:0" if kind == "cuda" else "cpu"
    route, how, reason = f"copied within {name} into its server's memory", "within", "on the same"
    if transports:
        route, how, reason = f"copied from {name}, then sent", "to", "on a device"
    for row in found.gradients:
        assert (row.route, row.copies, row.bytes_copied) == (route, 1, row.bytes)
        assert reason in row.reason
    for row in found.rows[len(found.gradients) :]:
        assert row.route == f"copied {how} {name}", "and not by way of the driver's buffer"
        assert row.bytes_copied == row.bytes
        assert not row.in_place


def look_where_pages_stay(job: Any, kind: str, place: str) -> Any:
    """Looks like `look`, where the driver locks no page."""
    before = devices.PageLocks.lock
    devices.PageLocks.lock = lambda self, memories: setattr(self, "why_not", "no")  # type: ignore
    try:
        return look(job, kind, place)
    finally:
        devices.PageLocks.lock = before  # type: ignore[method-assign]


@both
def test_explain_tells_why_copies_are_slow(kind: str, team: Team) -> None:
    """Named for a bug: it said nothing of those of gradients, which backward then waits for."""
    found = team.run(look_where_pages_stay, kind, "host")[0]
    for row in found.rows:
        assert "by way of the driver's buffer" in row.route
        assert row.reason == "no"


@both
def test_servers_keep_their_shares_in_memory_of_the_host_on_request(kind: str, team: Team) -> None:
    found = team.run(look, kind, "host")[0]
    name = "cuda:0" if kind == "cuda" else "cpu"
    for row in found.gradients:
        assert row.route == f"copied from {name} into its server's memory"
        assert "reads the host's memory" in row.reason


SHARED_WAYS: dict[str, dict[str, Any]] = {
    "norm": {"max_norm": 0.5, "ema": 0.9},
    "by own step": {"optimizer": "nadam"},
}


@both
@pytest.mark.parametrize("name", SHARED_WAYS)
def test_a_share_on_a_device_has_the_bits_of_one_on_the_host(
    name: str, kind: str, team: Team
) -> None:
    """On a CUDA device the bits are those of its kernels, for all servers, or a worker alone."""
    options = SHARED_WAYS[name]
    one = team.run(_train_with, kind, options, servers=1, slices=2)
    two = team.run(_train_with, kind, options, servers=2, slices=2)
    alone = team.alone(_train_with, kind, options, slices=2)
    assert {each[0] for each in [*one, *two, alone]} == {one[0][0]}
    if kind == "staged":
        host = team.run(_train_with, kind, {**options, "parameters_on": "host"}, slices=2)
        assert host[0][0] == one[0][0]


def test_an_unknown_place_of_parameters_is_an_error(team: Team) -> None:
    said = team.run(_make_with_parameters_on, "gpu", workers=1)[0]
    assert said == "parameters_on is 'auto' or 'host', not 'gpu'"


def _make_with_parameters_on(job: Any, place: str) -> str:
    model = nn.Linear(2, 2)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="parameters_on is") as error:
        tw.DistributedOptimizer(sgd, model, parameters_on=place)
    return str(error.value)


class Mixed(nn.Module):
    """A table with sparse gradients on the host or the device, and layers on the device."""

    def __init__(self, where: torch.device, table: torch.device) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.table = nn.Embedding(100, 8, sparse=True).to(table)
        self.head = nn.Linear(8, 4).to(where)
        self.frozen = nn.Linear(4, 4).to(where).requires_grad_(False)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        found = self.table(words.to(self.table.weight.device)).mean(1)
        return self.frozen(self.head(found.to(self.head.weight.device)))


def train_mixed(job: Any, kind: str, table: str) -> str:
    with device(kind) as where:
        model = Mixed(where, where if table == "device" else torch.device("cpu"))
        opt: Any = tw.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5), model)
        words = torch.randint(100, (64, 5), generator=torch.Generator().manual_seed(3))
        for _ in job.epochs(2):
            for (batch,) in job.loader(torch.utils.data.TensorDataset(words), 8):
                opt.zero_grad()
                model(batch).square().sum().backward()
                opt.step()
        return digest(model)


@both
@pytest.mark.parametrize("table", ["device", "host"])
def test_tables_and_layers_may_be_on_different_memory(
    table: str, kind: str, team: Team, transports: list[str] | None
) -> None:
    found = team.run(train_mixed, kind, table, servers=2, transports=transports)
    assert len(set(found)) == 1
    if kind == "staged":
        assert found == team.run(train_mixed, "host", table)


def save_and_load(job: Any, kind: str, path: str) -> tuple[str, str, str]:
    with device(kind) as where:
        model = small_model().to(where)
        opt: Any = tw.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2), model)
        job.track(model=model, opt=opt)

        def epoch() -> None:
            for images, labels in job.loader(samples(), 8, shuffle=True):
                opt.zero_grad()
                cross_entropy(model(images.to(where)), labels.to(where)).backward()
                opt.step()

        epoch()
        saved = digest(model)
        if job.rank == 0:
            job.save(path)
        job.barrier()
        epoch()
        later = digest(model)
        job.load(path)
        assert all(each.device.type == where.type for each in model.state_dict().values())
        assert digest(model) == saved
        epoch()
        return saved, later, digest(model)


@both
def test_a_checkpoint_brings_back_what_was_on_the_device(
    kind: str, team: Team, tmp_path: Any
) -> None:
    found = team.run(save_and_load, kind, str(tmp_path / "model.pt"))
    assert found[0] == found[1]
    saved, later, again = found[0]
    assert saved != later
    assert again != saved


def save_here(job: Any, kind: str, path: str) -> str:
    with device(kind) as where:
        model = small_model().to(where)
        opt: Any = tw.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2), model)
        job.track(model=model, opt=opt, seen={"labels": torch.zeros(10, device=where)})
        images, labels = samples(8).tensors
        cross_entropy(model(images.to(where)), labels.to(where)).backward()
        opt.step()
        if job.rank == 0:
            job.save(path)
        return digest(model)


def load_here(job: Any, kind: str, path: str) -> tuple[str, list[float]]:
    with device(kind) as where:
        model = small_model().to(where)
        opt: Any = tw.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2), model)
        seen = {"labels": torch.ones(10, device=where)}
        job.track(model=model, opt=opt, seen=seen)
        job.load(path)
        assert {each.device.type for each in [*model.state_dict().values(), seen["labels"]]} == {
            where.type
        }
        return digest(model), seen["labels"].tolist()


@both
@pytest.mark.parametrize("back", [False, True], ids=["loaded on the host", "saved on the host"])
def test_a_checkpoint_goes_from_a_device_to_the_host_and_back(
    back: bool, kind: str, team: Team, tmp_path: Any
) -> None:
    saves, loads = ("host", kind) if back else (kind, "host")
    path = str(tmp_path / "model.pt")
    saved = team.run(save_here, saves, path)
    assert team.run(load_here, loads, path) == [(saved[0], [0.0] * 10)] * 2


def save_as_from_a_device(job: Any, path: str) -> str:
    """The file says that its tensors were on a device that is not here."""
    write, tag = checkpoint._write, torch.serialization.location_tag

    def write_tagged(*given: Any) -> None:
        torch.serialization.location_tag = lambda storage: "cuda:7"
        try:
            write(*given)
        finally:
            torch.serialization.location_tag = tag

    checkpoint._write = write_tagged
    try:
        return save_here(job, "staged", path)
    finally:
        checkpoint._write = write


def test_a_file_with_tensors_of_a_device_that_is_not_here_is_loaded(
    team: Team, tmp_path: Any
) -> None:
    """Named for a bug: it was called damaged, since buffers were saved as tensors of the device."""
    path = str(tmp_path / "model.pt")
    saved = team.run(save_as_from_a_device, path)
    assert team.run(load_here, "staged", path) == [(saved[0], [0.0] * 10)] * 2


def accumulate(job: Any, kind: str) -> str:
    with device(kind) as where:
        model = small_model().to(where)
        opt: Any = tw.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
        for _ in range(3):
            opt.zero_grad()
            with opt.accumulate():
                for images, labels in list(job.loader(samples(32), 8))[:-1]:
                    cross_entropy(model(images.to(where)), labels.to(where)).backward()
            images, labels = (each.to(where) for each in samples(8).tensors)
            cross_entropy(model(images), labels).backward()
            cross_entropy(model(images), labels).backward()  # a gradient comes twice
            opt.step()
        return digest(model)


@both
def test_gradients_add_up_on_the_device(kind: str, team: Team) -> None:
    found = team.run(accumulate, kind, servers=2)
    assert len(set(found)) == 1
    if kind == "staged":
        assert found == team.run(accumulate, "host")


@both
@pytest.mark.parametrize("mode", ["async", "bounded"])
def test_each_worker_at_its_own_pace(mode: str, kind: str, team: Team) -> None:
    staleness = 2 if mode == "bounded" else None
    found = team.run(train, kind, "sgd", mode=mode, staleness=staleness, servers=2)
    assert all(loss < 5 for _, loss in found)


@both
def test_one_worker_computes_all_slices(kind: str, team: Team) -> None:
    alone = team.alone(train, kind, slices=2)
    two = team.run(train, kind, slices=2)
    assert alone[0] == two[0][0] == two[1][0]


def close_and_look(job: Any, kind: str, adds: bool) -> list[str]:
    """The optimizer has locked pages, is gone, and did not wait for copies to end."""
    made: dict[Any, str] = {}
    before = devices.PageLocks.__init__, devices.PageLocks.release

    def make(self: Any, where: torch.device) -> None:
        before[0](self, where)
        owner: Any = sys._getframe(1).f_locals["self"]
        made[self] = type(owner).__name__

    def release(self: Any) -> None:
        before[1](self)
        made.pop(self, None)

    devices.PageLocks.__init__ = make  # type: ignore[method-assign]
    devices.PageLocks.release = release  # type: ignore[method-assign]
    try:
        with device(kind) as where:
            model = small_model().to(where)
            parameters = list(model.parameters())
            first = parameters[:-2] if adds else parameters
            opt: Any = tw.DistributedOptimizer(torch.optim.SGD(first, lr=0.1), model)
            for images, labels in job.loader(samples(32), 8):
                opt.zero_grad()
                cross_entropy(model(images.to(where)), labels.to(where)).backward()
                opt.step()
            assert sorted(made.values()) == ["DeviceGradients", "DeviceParameters", "PackedBuffers"]
            former = made.copy()
            if adds:
                opt.add_param_group({"params": parameters[-2:]})
            else:
                opt.close()
            return [name for each, name in former.items() if each in made]
    finally:
        devices.PageLocks.__init__, devices.PageLocks.release = before  # type: ignore[method-assign]


@both
@pytest.mark.parametrize("adds", [False, True], ids=["closed", "moved"])
def test_locked_pages_are_let_go_behind_the_copies(adds: bool, kind: str, team: Team) -> None:
    """Named for a bug: those of buffers went while a device might still copy from them."""
    assert team.run(close_and_look, kind, adds) == [[], []]


class Copied:
    """A moment after copies from the store, which was not waited for yet."""

    waited_for: ClassVar[list["Copied"]] = []
    under_way: ClassVar[list["Copied"]] = []

    def __init__(self, stream: int) -> None:
        self._stream = stream
        self.under_way.append(self)

    def synchronize(self) -> None:
        """Waits for this moment; all earlier work of its stream is done too."""
        for each in self.under_way.copy():
            if each._stream == self._stream:
                self.under_way.remove(each)
            if each is self:
                return

    def wait(self) -> None:
        self.waited_for.append(self)


def commit_and_look(job: Any, path: str, apply: str) -> tuple[int, int, int]:
    """Trains in two streams, by numbers that a test can choose.

    Returns:
        How many commits there were, and copies of parameters at the end; how many of them while the
        store's memory was still being copied; and how often a stream was told to wait for copies
        of the other one.
    """
    Copied.waited_for, Copied.under_way = [], []
    commits: list[bool] = []
    number = 0
    addresses: list[int] = []
    before = (
        devices.CopyStream.mark, devices.CopyStream.current, RemoteStore.commit,
        torch.Tensor.clone,
    )  # fmt: skip

    def mark(self: Any, stream: Any = None) -> Any:  # without a stream it is of the parameters
        return before[0](self, stream) if stream is not None else Copied(number)

    def commit(self: Any, *given: Any) -> None:
        commits.append(bool(Copied.under_way))
        before[2](self, *given)

    def clone(self: torch.Tensor, **options: Any) -> torch.Tensor:
        commits.append(bool(Copied.under_way) and self.data_ptr() in addresses)
        return before[3](self, **options)

    devices.CopyStream.mark = mark  # type: ignore[method-assign]
    devices.CopyStream.current = lambda self: number  # type: ignore[method-assign]
    RemoteStore.commit = commit  # type: ignore[method-assign]
    try:
        with device("staged"):
            model = nn.Linear(300, 200)
            plain = torch.optim.SGD(model.parameters(), lr=0.1)
            opt: Any = tw.DistributedOptimizer(plain, model, apply=apply)
            job.track(model=model, opt=opt)
            for _ in range(2):
                number = 7
                opt.zero_grad()
                model(torch.ones(2, 300)).sum().backward()
                opt.step()
                number = 8
                with tw.edit(model), torch.no_grad():
                    model.weight.mul_(0.9)
            if job.rank == 0:
                job.save(path)
            job.barrier()
            job.load(path)
            assert Copied.under_way
            number = 9
            addresses = [each.data_ptr() for each in model.parameters()]
            torch.Tensor.clone = clone  # type: ignore[assignment, method-assign]
            opt.close()
    finally:
        torch.Tensor.clone = before[3]  # type: ignore[method-assign]
        devices.CopyStream.mark, devices.CopyStream.current = before[:2]  # type: ignore[method-assign]
        RemoteStore.commit = before[2]  # type: ignore[method-assign]
    return len(commits), sum(commits), len(Copied.waited_for)


@pytest.mark.parametrize("apply", ["auto", "worker"])
def test_no_version_is_made_while_the_last_one_is_being_copied(
    apply: str, team: Team, tmp_path: Any
) -> None:
    """Named for a bug: only steps waited for the copies, and only for those of one stream."""
    for commits, early, waits in team.run(commit_and_look, str(tmp_path / "model.pt"), apply):
        assert commits >= 6, "the first values, steps, edits, a checkpoint"
        assert early == 0
        assert waits > 0, "an edit reads parameters behind what the step's stream copies"


def slices_in_turn(job: Any, kind: str) -> tuple[str, int, int]:
    """A digest, the bytes that were locked to send gradients from, and those of the gradients."""
    locked = 0
    before = device_gradients.locked_memory

    def lock(size_bytes: int, locks: Any) -> Any:
        nonlocal locked
        locked += size_bytes
        return before(size_bytes, locks)

    device_gradients.locked_memory = lock
    try:
        found, _ = train(job, kind, "sgd", placement="copy")
    finally:
        device_gradients.locked_memory = before
    return found, locked, sum(-(-each.nbytes // 64) * 64 for each in small_model().parameters())


@both
def test_slices_in_turn_share_the_memory_that_they_are_sent_from(kind: str, team: Team) -> None:
    """Named for a bug: a worker that computed many slices had locked memory for each of them."""
    ((found, locked, size),) = team.run(slices_in_turn, kind, workers=1, slices=4)
    assert locked == size
    if kind == "staged":
        assert team.run(slices_in_turn, "host", workers=1, slices=4) == [(found, 0, size)]


class _on:
    def __init__(self, name: str) -> None:
        self.device = torch.device(name)
        self.is_cpu, self.is_meta = self.device.type == "cpu", False


def test_a_model_on_two_devices_is_an_error_that_says_what_to_do() -> None:
    with pytest.raises(UnavailableError, match=r"cuda:0, cuda:1.*a worker for each device"):
        devices.device_of([_on("cuda:0"), _on("cuda:1"), _on("cpu")])  # type: ignore[list-item]


def move_too_late(job: Any, kind: str) -> str:
    model = nn.Linear(3, 2)
    opt: Any = tw.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    with device(kind) as where:
        model.to(where)
        for parameter in model.parameters() if kind == "staged" else ():
            parameter.data = parameter.data.clone()
        try:
            model(torch.ones(1, 3, device=where)).sum().backward()
            opt.step()
        except RuntimeError as error:
            return str(error)
    return ""


PLACES = (
    "device_buffers", "device_parameters", "edit_memory", "gradient_checks", "gradient_state",
    "reducer",
)  # fmt: skip
"""Modules of the package that ask whether a tensor is on the host."""


@both
def test_a_model_that_is_moved_too_late_is_an_error(kind: str, team: Team) -> None:
    """Named for a bug: backward ended with an assertion."""
    (said,) = team.run(move_too_late, kind, workers=1)
    if kind == "cuda":
        assert "float32 on cpu, and is torch.float32 on cuda:0 since the model was moved" in said
    else:
        assert "has other memory since the model was moved or converted" in said


def move_a_part_too_late(job: Any) -> str:
    """One tensor is on the host until a step was made; those of 6 elements are."""
    moved = False

    def on_host(tensor: torch.Tensor) -> bool:
        return tensor.numel() == 6 and not moved

    places = [devices, *(sys.modules[f"{tw.__name__}.replica.{name}"] for name in PLACES)]
    before = devices.is_on_host
    try:
        for place in places:
            place.is_on_host = on_host
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 6))  # its last bias has 6
        opt: Any = tw.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
        for moved in (False, True):
            model[1].bias.data = model[1].bias.data.clone() if moved else model[1].bias.data
            model(torch.ones(1, 3)).sum().backward()
            opt.step()
    except RuntimeError as error:
        return str(error)
    finally:
        for place in places:
            place.is_on_host = before
    return ""


def test_a_part_that_is_moved_too_late_is_an_error(team: Team) -> None:
    """Named for a bug: backward ended with a KeyError."""
    (said,) = team.run(move_a_part_too_late, workers=1)
    assert said.startswith("parameter '1.bias' has other memory since the model was moved")


class Slow(torch.autograd.Function):
    """Its gradient comes late on the device, long after the CPU has gone on."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        torch.cuda._sleep(20_000_000)
        return gradient * 2


def late_gradients(job: Any, waits: bool, side: bool) -> int:
    """Steps of 20 in which a gradient arrived at the servers as it was before backward had it."""
    if not waits:
        devices.CopyStream._wait_for = lambda self, number: None  # type: ignore[method-assign]
    stale = 0
    with device("cuda") as where:
        model = nn.Linear(512, 512, bias=False).to(where)
        opt: Any = tw.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.0), model)
        stream = torch.cuda.Stream() if side else torch.cuda.current_stream()
        for step in range(1, 21):
            opt.zero_grad()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                inputs = torch.full((4, 512), float(step), device=where)
                Slow.apply(model(inputs)).sum().backward()
            torch.cuda.current_stream().wait_stream(stream)
            opt.synchronize()
            stale += not bool((model.weight.grad == 8 * step).all())
            opt.step()
    return stale


@pytest.mark.gpu
@pytest.mark.parametrize("side", [False, True], ids=["default stream", "own stream"])
def test_gradients_leave_behind_what_computes_them(side: bool) -> None:
    with make_team() as team:
        assert team.run(late_gradients, True, side, workers=1) == [0]
        (found,) = team.run(late_gradients, False, side, workers=1)
        assert found > 0, "without the wait this test finds stale gradients"


def train_compiled(job: Any, kind: str, compiled: bool) -> str:
    with device(kind) as where:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of torch about itself
            torch._dynamo.reset()
        model = small_model().to(where)
        opt: Any = tw.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
        forward = torch.compile(model, backend="aot_eager") if compiled else model
        for images, labels in job.loader(samples(32), 8):
            opt.zero_grad()
            with torch.autocast(where.type, torch.bfloat16):
                loss = cross_entropy(forward(images.to(where)), labels.to(where))
            loss.backward()
            opt.step()
        return digest(model)


@both
@pytest.mark.slow
def test_a_compiled_model_under_autocast(kind: str, team: Team) -> None:
    """Both workers have one model, however it is computed."""
    for compiled in (False, True):
        found = team.run(train_compiled, kind, compiled)
        assert len(set(found)) == 1
        if kind == "staged":
            assert found == team.run(train_compiled, "host", compiled)


@pytest.mark.parametrize("transposed", [False, True])
def test_a_gradient_is_cut_where_servers_share_its_place(transposed: bool) -> None:
    with device("staged") as where:
        parameter = nn.Parameter(torch.zeros(6, 10))
        pieces = [torch.zeros(64, dtype=torch.uint8), torch.zeros(176, dtype=torch.uint8)]
        place = Place(np.empty(0, np.uint8), True, None, 0, pieces)
        there = device_gradients.DeviceGradients(where, {0: parameter}, [place])
        gradient = torch.arange(60.0).view(6, 10)
        there.leave(0, gradient.T.contiguous().T if transposed else gradient)
        assert [each.tensor for each in there.arrive()] == [0]
        assert torch.cat(pieces).view(torch.float32).tolist() == list(range(60))
        there.close()
