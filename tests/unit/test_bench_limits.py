"""The limit's loop in C++, and the rival's arithmetic: both compute what one process would."""

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tensorwire import _core
from tensorwire.errors import TensorwireError

bench_loops = _core.bench_loops


@pytest.mark.parametrize("states", [0, 1, 2])
@pytest.mark.parametrize(
    ("elements", "threads", "workers"),
    [(0, 1, 1), (1, 3, 2), (5, 1, 3), (2047, 3, 1), (2048, 1, 2), (2049, 3, 3), (10007, 3, 2)],
)
def test_the_limit_computes_what_it_says(
    elements: int, threads: int, workers: int, states: int
) -> None:
    rate, momentum, beta1, beta2, epsilon, decay = bench_loops.exchange_limit_constants()
    random = np.random.default_rng(elements)

    def some() -> np.ndarray:
        return random.standard_normal(elements + 1).astype(np.float32)

    parameters, gradients = some(), [some() for _ in range(workers)]
    state = [np.abs(some()) for _ in range(states)]
    expected = parameters.astype(np.float64)[:elements]
    kept = [s.astype(np.float64)[:elements] for s in state]
    mean = np.mean(np.array(gradients, np.float64), axis=0)[:elements]
    guards = [parameters[-1], *(s[-1] for s in state)]
    for _ in range(3):
        if states == 0:
            expected -= rate * mean
        elif states == 1:
            kept[0] = momentum * kept[0] + mean
            expected -= rate * kept[0]
        else:
            kept[0] = beta1 * kept[0] + (1 - beta1) * mean
            kept[1] = beta2 * kept[1] + (1 - beta2) * mean**2
            expected = expected * (1 - rate * decay) - rate * kept[0] / (np.sqrt(kept[1]) + epsilon)
    addresses = [[each.ctypes.data for each in some] for some in (state, gradients)]
    seconds = bench_loops.exchange_limit(parameters.ctypes.data, *addresses, elements, threads, 3)
    assert len(seconds) == 3
    np.testing.assert_allclose(parameters[:-1], expected, rtol=1e-5, atol=1e-6)
    for found, wanted in zip(state, kept, strict=True):
        np.testing.assert_allclose(found[:-1], wanted, rtol=1e-5, atol=1e-6)
    assert [parameters[-1], *(s[-1] for s in state)] == guards  # nothing behind the end


@pytest.mark.parametrize(
    ("states", "gradients", "threads"), [([8] * 3, [8], 1), ([8], [], 1), ([8], [8], 0)]
)
def test_the_limit_refuses_what_it_cannot_do(
    states: list[int], gradients: list[int], threads: int
) -> None:
    with pytest.raises((TensorwireError, ValueError), match="exchange_limit"):
        bench_loops.exchange_limit(8, states, gradients, 1, threads, 1)


def test_the_grpc_server_applies_as_one_process_would(tmp_path: Path) -> None:
    """Dense gradients and rows, of two workers, which hear nothing before both have sent."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("grpc")
    from tensorwire_benchmarks.systems.base import LEARNING_RATE, TrainerPlace, make_optimizer
    from tensorwire_benchmarks.systems.grpc_server import GrpcShard, listen
    from tensorwire_benchmarks.systems.grpc_worker import GrpcTrainer

    def build() -> Any:
        torch.manual_seed(3)
        table, dense = torch.nn.Embedding(9, 3, sparse=True), torch.nn.Linear(12, 33)
        return torch.nn.Sequential(table, torch.nn.Flatten(), dense)

    batches = [torch.randint(9, (4, 4)) for _ in range(2)]
    alone = build()
    optimizer = torch.optim.SGD(alone.parameters(), lr=LEARNING_RATE)
    for _ in range(4):
        optimizer.zero_grad()
        for rows in batches:
            (9 * alone(rows).square().mean() / 2).backward()
        optimizer.step()
    barrier = threading.Barrier(2, timeout=60)
    shard = GrpcShard(torch, 2, "plain-sgd")
    server, address = listen(shard, 2, f"unix:{tmp_path}/grpc")
    networks = [build(), build()]

    def train(rank: int) -> None:
        place = TrainerPlace(torch, rank, 2, "plain-sgd", str(tmp_path), address, barrier.wait)
        trainer = GrpcTrainer(place, networks[rank])
        trainer.configure(1 << 8)
        for _ in range(4):
            (9 * trainer.module(batches[rank]).square().mean()).backward()
            trainer.exchange()
            trainer.zero_grad()
        trainer.close()

    threads = [threading.Thread(target=train, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    server.stop(None).wait()
    for mine, theirs, right in zip(*(n.parameters() for n in (*networks, alone)), strict=True):
        assert torch.equal(mine, theirs)
        torch.testing.assert_close(mine, right, rtol=1e-3, atol=1e-6)
    place = TrainerPlace(torch, 0, 2, "adamw", "", "", lambda: None)
    with pytest.raises(ValueError, match="sparse gradients need plain-sgd"):
        GrpcTrainer(place, build())
    with pytest.raises(ValueError, match="no optimizer 'adam'"):
        make_optimizer(torch, "adam", [], fused=False)
