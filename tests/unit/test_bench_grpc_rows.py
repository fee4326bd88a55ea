"""The gRPC rival moves rows of sparse gradients, and what it computes is what torch's SGD does.

Server and workers are threads of one process, over a real channel.
"""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tensorwire_benchmarks.systems.base import LEARNING_RATE, TrainerPlace, make_optimizer
from tensorwire_benchmarks.workloads.catalog import workload

torch = pytest.importorskip("torch")
pytest.importorskip("grpc")

from tensorwire_benchmarks.systems.grpc_server import (  # noqa: E402 (they need torch and grpc)
    HEADER,
    GrpcShard,
    listen,
    pack_rows,
    unpack_rows,
)
from tensorwire_benchmarks.systems.grpc_worker import GrpcTrainer  # noqa: E402

WORKERS = 2
STEPS = 6
DLRM = workload("dlrm").reduced()


class TwoWidths(torch.nn.Module):
    """Tables of two widths, one that is looked up twice, and a dense one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.a = torch.nn.Embedding(9, 3, sparse=True)
        self.b = torch.nn.Embedding(5, 2, sparse=True)
        self.c = torch.nn.Embedding(7, 3, sparse=True)
        self.dense = torch.nn.Embedding(6, 8)

    def forward(self, rows: Any) -> Any:
        found = [self.a(rows % 9), self.b(rows % 5), self.c(rows % 7), self.a(rows % 4)]
        return (torch.cat(found, 1)[:, :8] * self.dense(rows % 6)).sum(1)


def two_widths() -> tuple[Callable[[], Any], list[list[Any]], Callable[[Any, Any], Any]]:
    random = torch.Generator().manual_seed(5)
    batches = [
        [(torch.randint(99, (4,), generator=random), torch.ones(4)) for _ in range(4)]
        for _ in range(WORKERS)
    ]
    return TwoWidths, batches, lambda output, labels: 9 * (output - labels).square().mean()


def dlrm() -> tuple[Callable[[], Any], list[list[Any]], Callable[[Any, Any], Any]]:
    batches = [DLRM.batches(torch, rank) for rank in range(WORKERS)]
    loss = DLRM.loss(torch)

    def build() -> Any:
        network = DLRM.build(torch)
        with torch.no_grad():
            for table in network.tables:
                table.weight.mul_(20)  # steps that change more than rounding does
        return network

    return build, batches, lambda *pair: 1000 * loss(*pair)


def expected(build: Callable[[], Any], batches: list[list[Any]], loss: Any) -> list[Any]:
    """Plain SGD in one process with the mean of both workers' gradients."""
    network = build()
    optimizer = torch.optim.SGD(network.parameters(), lr=LEARNING_RATE)
    for step in range(STEPS):
        optimizer.zero_grad()
        for mine in batches:
            inputs, labels = mine[step % len(mine)]
            (loss(network(inputs), labels) / WORKERS).backward()
        optimizer.step()
    return [parameter.detach() for parameter in network.parameters()]


def trained(
    bucket_bytes: int, build: Callable[[], Any], batches: list[list[Any]], loss: Any, folder: Path
) -> list[list[Any]]:
    """The parameters of each worker; every other step is held."""
    barrier = threading.Barrier(WORKERS, timeout=60)
    server, address = listen(GrpcShard(torch, WORKERS, "plain-sgd"), WORKERS, f"unix:{folder}/grpc")
    networks = [build() for _ in range(WORKERS)]

    def train(rank: int) -> list[Any]:
        place = TrainerPlace(torch, rank, WORKERS, "plain-sgd", str(folder), address, barrier.wait)
        trainer = GrpcTrainer(place, networks[rank])
        assert trainer.configure(bucket_bytes) == bucket_bytes
        for step in range(STEPS):
            inputs, labels = batches[rank][step % len(batches[rank])]
            value = loss(trainer.module(inputs), labels)
            if step % 2:
                with trainer.held():
                    value.backward()
            else:
                value.backward()
            trainer.exchange()
            trainer.zero_grad()
        found = [parameter.detach().clone() for parameter in networks[rank].parameters()]
        trainer.close()
        return found

    try:
        with ThreadPoolExecutor(WORKERS) as pool:
            return list(pool.map(train, range(WORKERS)))
    finally:
        server.stop(None).wait()


@pytest.mark.parametrize("bucket_bytes", [1 << 8, 1 << 10, 1 << 20])
@pytest.mark.parametrize("task", [dlrm, two_widths])
def test_rows_are_trained_as_torch_s_sgd_does(
    task: Callable[[], Any], bucket_bytes: int, tmp_path: Path
) -> None:
    build, batches, loss = task()
    before = [parameter.detach() for parameter in build().parameters()]
    wanted = expected(build, batches, loss)
    first, second = trained(bucket_bytes, build, batches, loss, tmp_path)
    for start, mine, theirs, right in zip(before, first, second, wanted, strict=True):
        assert torch.equal(mine, theirs)
        torch.testing.assert_close(mine - start, right - start, rtol=1e-3, atol=1e-6)
        assert (right - start).abs().max() > 1e-4


def test_rows_that_one_worker_looked_up_change_for_all() -> None:
    """By hand: tables of 3 and 2 rows; row 4 is looked up by both."""
    shard = GrpcShard(torch, WORKERS, "plain-sgd")
    values = np.arange(10, dtype=np.float32).reshape(5, 2)
    shard.start(np.zeros(0, np.float32), [values])
    answers: list[bytes] = []
    for rank, rows in enumerate(([1, 4], [4])):
        assert not answers
        gradients = np.full((len(rows), 2), 1000 * (rank + 1), np.float32)
        shard.push(pack_rows(rank, 0, np.array(rows, np.int64), gradients), answers.append)
    assert len(answers) == WORKERS
    assert HEADER.unpack_from(answers[0]) == (0, 0)
    changed, new = unpack_rows(answers[0], 2)
    assert changed.tolist() == [1, 4]
    np.testing.assert_allclose(new, [[2 - 0.5, 3 - 0.5], [8 - 1.5, 9 - 1.5]])
    shard.push(pack_rows(0, 0, np.zeros(0, np.int64), np.zeros((0, 2), np.float32)), answers.append)
    shard.push(pack_rows(1, 0, np.array([1]), np.zeros((1, 2), np.float32)), answers.append)
    changed, new = unpack_rows(answers[-1], 2)  # the server kept what it answered
    assert (changed.tolist(), new.tolist()) == ([1], [[1.5, 2.5]])


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_an_optimizer_that_changes_all_rows_is_refused(optimizer: str) -> None:
    place = TrainerPlace(torch, 0, WORKERS, optimizer, "", "", lambda: None)
    with pytest.raises(ValueError, match="sparse gradients need plain-sgd"):
        GrpcTrainer(place, DLRM.build(torch))
    shard = GrpcShard(torch, WORKERS, optimizer)
    with pytest.raises(ValueError, match="tables need plain-sgd"):
        shard.start(np.zeros(0, np.float32), [np.zeros((2, 2), np.float32)])
    with pytest.raises(ValueError, match="no optimizer 'adam'"):
        make_optimizer(torch, "adam", [], fused=False)
