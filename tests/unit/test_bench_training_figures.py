"""The pure parts of `bench training`: figures, bars, the limit's loop, the rival's arithmetic."""

import threading
from pathlib import Path

import numpy as np
import pytest

from tensorwire import _core
from tensorwire.bench.rows import Comparison, Report, Row
from tensorwire.errors import TensorwireError
from tensorwire_benchmarks.figures import (
    StepTimes,
    Turns,
    extra_seconds,
    limit_over_wire,
    seconds_of,
    turn_ratio,
)
from tensorwire_benchmarks.report import draw_training
from tensorwire_benchmarks.systems import LIMIT, OWN, SYSTEMS, System
from tensorwire_benchmarks.verdicts import judge_alone, judge_training
from tensorwire_benchmarks.workloads.catalog import MODELS, Workload, named

bench_loops = _core.bench_loops


def at(begin: float, ready: float, readable: float, end: float) -> StepTimes:
    return StepTimes(begin, begin, ready, readable, end, 0.25)


FIRST = [at(0, 4, 6, 7), at(10, 14, 18, 19)]
SECOND = [at(1, 5, 8, 8), at(10, 12, 17, 21)]


def test_an_exchange_is_from_the_last_gradient_to_the_slowest_worker() -> None:
    assert seconds_of("exchange", [FIRST, SECOND]) == [3, 4]
    assert seconds_of("step", [FIRST, SECOND]) == [8, 11]
    assert seconds_of("skew", [FIRST, SECOND]) == [1, 2]


def test_workers_with_different_numbers_of_steps_are_a_mistake() -> None:
    with pytest.raises(ValueError, match="zip"):
        seconds_of("exchange", [FIRST, SECOND[:1]])


def test_turns_leave_out_the_warm_steps_but_for_cpu_time() -> None:
    turns = Turns()
    turns.add([FIRST, SECOND], cpu_workers_s=3.0, cpu_server_s=1.0, warm=1)
    turns.add([FIRST, SECOND], cpu_workers_s=3.0, cpu_server_s=1.0, warm=0)
    assert turns.samples["exchange"] == [[4], [3, 4]]
    assert turns.samples["step"] == [[11], [8, 11]]
    assert turns.steps_with_cpu == 4
    turns.add_isolated([FIRST, SECOND], cpu_server_s=0.5, warm=1)
    assert turns.samples["isolated"] == [[4]]
    assert turns.steps_with_cpu == 4
    assert turns.steps_isolated == 2
    assert (turns.cpu_isolated_s, turns.cpu_isolated_server_s) == (1.0, 0.5)
    assert (turns.cpu_workers_s, turns.cpu_server_s, turns.cpu_exchange_s) == (6.0, 2.0, 2.0)


def test_ratios_pair_turn_by_turn() -> None:
    ratio = turn_ratio([[2.0, 2.0, 9.0], [4.0], [8.0]], [[1.0], [1.0], [1.0]])
    assert ratio is not None
    assert (ratio.median, ratio.pairs, ratio.interval) == (4.0, 3, None)
    shorter = turn_ratio([[2.0], [4.0]], [[1.0], []])
    assert shorter is not None
    assert shorter.pairs == 1
    assert turn_ratio([], [[1.0]]) is None


def test_the_extra_is_of_pairs() -> None:
    """A slow minute makes both slow; the medians of each alone would differ by 4."""
    extra = extra_seconds(
        [2.0, 12.0, 3.0, 3.0, 8.0, 8.0, 3.0], [1.0, 10.0, 2.0, 1.0, 7.0, 4.0, 2.0]
    )
    assert extra.seconds == 1.0
    assert extra.interval == (1.0, 4.0)
    assert extra_seconds([3.0], [1.0]) == (2.0, None)
    with pytest.raises(ValueError, match="zip"):
        extra_seconds([1.0], [1.0, 2.0])


def test_the_bar_of_a_script_alone() -> None:
    met = judge_alone("alone.digits.step", extra_seconds([1.1e-3] * 6, [1e-3] * 6), "")
    assert met.met
    assert met.measured == pytest.approx(100)
    assert met.interval == pytest.approx((100, 100))
    missed = judge_alone("alone.digits.step", extra_seconds([1.3e-3], [1e-3]), "")
    assert "100 µs per step away" in missed.line()
    absent = judge_alone("alone.digits.step", None, "no torch")
    assert absent.met is None
    assert "no torch" in absent.line()


def test_the_limit_over_a_wire_adds_the_ways_and_hides_the_smaller_part() -> None:
    assert limit_over_wire(3.0, 0.0, 0.0) == 3.0
    assert limit_over_wire(3.0, 2.0, 2.0) == 4.0
    assert limit_over_wire(5.0, 2.0, 2.0) == 5.0


# --- models -------------------------------------------------------------------------------------


def test_sizes_are_as_their_names_say() -> None:
    pytest.importorskip("torch")
    assert named("mlp50", MODELS).size_bytes / 2**20 == pytest.approx(50, abs=0.1)
    assert named("mlp200", MODELS).size_bytes / 2**20 == pytest.approx(200, abs=0.1)
    with pytest.raises(LookupError, match="digits, mlp50, mlp200"):
        named("gpt", MODELS)


@pytest.mark.parametrize("found", MODELS[:2], ids=lambda m: m.name)
def test_a_model_has_the_parameters_that_it_says(found: Workload) -> None:
    torch = pytest.importorskip("torch")
    network = found.build(torch)
    assert sum(p.numel() for p in network.parameters()) == found.size_bytes // 4
    inputs, labels = found.batches(torch, 0)[0]
    assert network(inputs).shape[0] == found.batch
    assert network(inputs).shape[1] > labels.max()
    assert labels.shape == (found.batch,)
    assert not torch.equal(inputs, found.batches(torch, 1)[0][0])


# --- the limit's loop ---------------------------------------------------------------------------


def address(array: np.ndarray) -> int:
    return array.ctypes.data


@pytest.mark.parametrize("states", [0, 1, 2])
@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("elements", [0, 1, 5, 2047, 2048, 2049, 10007])
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

    seconds = bench_loops.exchange_limit(
        address(parameters), [address(s) for s in state], [address(g) for g in gradients],
        elements, threads, 3,
    )  # fmt: skip
    assert len(seconds) == 3
    np.testing.assert_allclose(parameters[:-1], expected, rtol=1e-5, atol=1e-6)
    for found, wanted in zip(state, kept, strict=True):
        np.testing.assert_allclose(found[:-1], wanted, rtol=1e-5, atol=1e-6)
    assert [parameters[-1], *(s[-1] for s in state)] == guards  # nothing behind the end


@pytest.mark.parametrize(
    ("states", "gradients", "threads"),
    [([8] * 3, [8], 1), ([8], [], 1), ([8], [8], 0)],
)  # fmt: skip
def test_the_limit_refuses_what_it_cannot_do(
    states: list[int], gradients: list[int], threads: int
) -> None:
    with pytest.raises((TensorwireError, ValueError), match="exchange_limit"):
        bench_loops.exchange_limit(8, states, gradients, 1, threads, 1)


# --- the gRPC server's arithmetic ---------------------------------------------------------------


@pytest.mark.parametrize("optimizer", ["sgd", "plain-sgd", "adamw"])
@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("bucket_bytes", [4, 40, 1 << 20])
def test_the_grpc_server_applies_as_one_process_would(
    bucket_bytes: int, workers: int, optimizer: str
) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("grpc")
    from tensorwire_benchmarks.systems.base import make_optimizer
    from tensorwire_benchmarks.systems.grpc_server import (
        BUCKET_BYTES,
        HEADER,
        GrpcShard,
        cut,
    )

    random = np.random.default_rng(7)
    start = random.standard_normal(33).astype(np.float32)
    alone = torch.nn.Parameter(torch.from_numpy(start.copy()))
    single = make_optimizer(torch, optimizer, [alone], fused=False)
    shard = GrpcShard(torch, workers, optimizer)
    shard.start(start, [])
    shard.configure(BUCKET_BYTES.pack(bucket_bytes))
    for _ in range(4):
        gradients = random.standard_normal((workers, 33)).astype(np.float32)
        alone.grad = torch.from_numpy(gradients.mean(axis=0))
        single.step()
        for index, (begin, end) in enumerate(cut(33, bucket_bytes)):
            answers: list[bytes] = []
            requests = [
                HEADER.pack(rank, index) + gradients[rank, begin:end].tobytes()
                for rank in reversed(range(workers))
            ]
            threads = [
                threading.Thread(target=shard.push, args=(request, answers.append))
                for request in requests
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert len(answers) == workers
            assert HEADER.unpack_from(answers[0]) == (0, index)
            got = np.frombuffer(answers[0], np.float32, offset=HEADER.size)
            np.testing.assert_allclose(got, alone.detach()[begin:end], rtol=1e-5, atol=1e-7)


def test_nobody_is_answered_before_the_last_worker_has_sent() -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("grpc")
    from tensorwire_benchmarks.systems.grpc_server import HEADER, GrpcShard

    shard = GrpcShard(torch, 2, "sgd")
    shard.start(np.zeros(3, np.float32), [])
    answers: list[bytes] = []
    shard.push(HEADER.pack(0, 0) + bytes(12), answers.append)
    assert answers == []
    shard.push(HEADER.pack(1, 0) + bytes(12), answers.append)
    assert len(answers) == 2


# --- verdicts, report ---------------------------------------------------------------------------


def full_report(ratio_to_limit: float = 0.6, gloo: float = 3.5, grpc: float = 4.5) -> Report:
    rows = []
    for wire in ("shm", "tcp"):
        for what in ("step", "exchange"):
            for system in (OWN, "ddp-gloo", "grpc", *([LIMIT] if what == "exchange" else [])):
                rows.append(
                    Row(
                        "training", f"{wire}.digits.{what}", system, 1000, seconds_median=1e-3,
                        seconds_p99=2e-3, operations=10,
                        ratio_to_limit=ratio_to_limit if what == "exchange" else None,
                        ratio_interval=(0.4, 0.8) if what == "exchange" else None,
                    )
                )  # fmt: skip
    comparisons = [
        Comparison("shm.digits.exchange", 1000, OWN, "ddp-gloo", gloo, (3.0, 4.0), 10),
        Comparison("shm.digits.exchange", 1000, OWN, "grpc", 9.0, None, 3),
        Comparison("tcp.digits.isolated", 1000, OWN, "grpc", grpc, None, 3),
        Comparison("tcp.digits.exchange", 1000, OWN, "grpc", grpc, None, 3),
    ]
    return Report("training", {"cpu": "x"}, rows, comparisons, settings={"workers": 2})


def test_all_bars_are_met() -> None:
    verdicts = judge_training(full_report(), ["digits"])
    assert [verdict.met for verdict in verdicts] == [True] * 4
    assert verdicts[0].measured == pytest.approx(1 / 0.6)
    assert verdicts[0].interval == pytest.approx((1.25, 2.5))


def test_missed_bars_are_said_to_be_missed() -> None:
    verdicts = judge_training(full_report(ratio_to_limit=0.4, gloo=2.9, grpc=3.9), ["digits"])
    assert [verdict.met for verdict in verdicts] == [False] * 4
    assert "0.5 x away" in verdicts[0].line()


def test_a_bar_without_figures_is_not_met_and_has_the_reason() -> None:
    report = Report("training", {})
    report.rows.append(Row("training", "shm.digits.exchange", OWN, 8, note="not written yet"))
    verdicts = judge_training(report, ["digits"])
    assert [verdict.met for verdict in verdicts] == [None] * 4
    assert "not written yet" in verdicts[0].line()
    assert "did not both run" in verdicts[2].line()


def test_a_system_that_cannot_run_says_why() -> None:
    absent = System("x", "y", (("a_module_that_nobody_has", "pip install it"),), None, {})
    assert absent.missing() == "a_module_that_nobody_has is not installed; pip install it"
    assert len({system.name for system in SYSTEMS}) == len(SYSTEMS)


def test_a_figure_is_drawn_of_the_rows(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "training.svg"
    report = full_report()
    report.rows.append(Row("training", "alone.digits.step", OWN, 1000, seconds_median=1e-3))
    draw_training(report, path)
    assert path.read_text().startswith("<?xml")
    with pytest.raises(ValueError, match="no measured"):
        draw_training(Report("training", {}), path)
