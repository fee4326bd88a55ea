"""A tiny `bench training` gives all rows, ends its processes, and has honest reasons.

No timed assertion.
"""

import importlib.util
import json
import os
import signal
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from tensorwire.bench.processes import PairError
from tensorwire.bench.rows import Report
from tensorwire.cli import main
from tensorwire_benchmarks import alone
from tensorwire_benchmarks.bench import Bench, Settings
from tensorwire_benchmarks.benches import TRAINING
from tensorwire_benchmarks.engine import run
from tensorwire_benchmarks.systems import LIMIT, OWN, SYSTEMS, System
from tensorwire_benchmarks.team import Team
from tensorwire_benchmarks.workloads.catalog import Workload

pytest.importorskip("torch")

TINY = Workload("tiny", "plain:Convolutions", "", 2, 7, arguments=((1, 4, 4), (2,), (9, 3)))
BY_NAME = {system.name: system for system in SYSTEMS}


def tiny(bench: Bench = TRAINING, **changes: object) -> Report:
    settings = Settings((TINY,), ("shm",), TRAINING.names, turns=6)
    for name, value in changes.items():
        setattr(settings, name, value)
    return run(bench, settings)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def needed(name: str) -> System:
    system = BY_NAME[name]
    reason = system.missing()
    if reason is not None:
        pytest.skip(reason)
    return system


@pytest.fixture(params=[("ddp-gloo", "sgd"), ("grpc", "adamw")], ids=lambda pair: pair[0])
def chosen(request: pytest.FixtureRequest) -> tuple[str, str]:
    name, optimizer = request.param
    return name, optimizer


@pytest.fixture
def rival(chosen: tuple[str, str]) -> Iterator[Team]:
    name, optimizer = chosen
    with closing(Team(needed(name), "shm", TINY, 2, optimizer)) as team:
        yield team


def single_process(optimizer: str, steps: int) -> float:
    """The digest of the same training in one process: mean loss over the workers' batches."""
    import torch

    from tensorwire_benchmarks.systems.base import make_optimizer

    network = TINY.build(torch)
    inner = make_optimizer(torch, optimizer, network.parameters(), fused=False)
    batches = [TINY.batches(torch, rank) for rank in range(2)]
    loss = torch.nn.CrossEntropyLoss()
    for step in range(steps):
        inner.zero_grad()
        for mine in batches:
            inputs, labels = mine[step % len(mine)]
            (loss(network(inputs), labels) / 2).backward()
        inner.step()
    return float(sum(p.detach().double().abs().sum() for p in network.parameters()))


@pytest.mark.slow
def test_a_rival_trains_as_one_process_would(rival: Team, chosen: tuple[str, str]) -> None:
    workers, cpu_workers, cpu_server = rival.run(5)
    assert [len(steps) for steps in workers] == [5, 5]
    for step in (step for steps in workers for step in steps):
        assert step.begin <= step.backward_begin <= step.gradients_ready
        assert step.gradients_ready <= step.readable <= step.end
    assert cpu_workers > 0
    assert cpu_server >= 0
    assert rival.digest() == pytest.approx([single_process(chosen[1], 5)] * 2, rel=1e-5)


@pytest.mark.slow
def test_a_step_that_is_held_is_an_ordinary_one_for_the_parameters(
    rival: Team, chosen: tuple[str, str]
) -> None:
    if not BY_NAME[chosen[0]].holds:
        with pytest.raises(PairError, match="exchanges during backward"):
            rival.run(2, held=True)
        return
    for held in (True, False, True):
        workers, _, _ = rival.run(2, held=held)
    for step in (step for steps in workers for step in steps):
        assert step.backward_begin <= step.gradients_ready <= step.readable
    for first, second in zip(*workers, strict=True):  # nobody begins before all are there
        assert max(first.backward_begin, second.backward_begin) <= first.gradients_ready
    assert rival.digest() == pytest.approx([single_process(chosen[1], 6)] * 2, rel=1e-5)


@pytest.mark.slow
def test_preparing_keeps_the_workers_equal(rival: Team) -> None:
    rival.prepare()
    rival.run(2)
    first, second = rival.digest()
    assert first == second
    assert rival.note


@pytest.mark.slow
def test_a_killed_worker_is_a_reason_and_nothing_stays(rival: Team) -> None:
    pids = rival.pids
    os.kill(pids[1], signal.SIGKILL)
    with pytest.raises(PairError, match="worker"):
        rival.run(2)
    assert rival.closed
    assert not any(map(alive, pids))
    with pytest.raises(PairError, match="have ended"):
        rival.run(1)
    rival.close()


@pytest.mark.slow
def test_a_killed_server_is_a_reason_and_nothing_stays() -> None:
    with closing(Team(needed("grpc"), "tcp", TINY, 2, "sgd")) as team:
        pids = team.pids
        os.kill(pids[-1], signal.SIGKILL)
        with pytest.raises(PairError, match=r"server|worker"):
            team.run(2)
        assert not any(map(alive, pids))


def test_a_system_that_does_not_come_up_is_a_reason() -> None:
    absent = System("x", "a_module_that_nobody_has", (), None, {"shm": ""})
    with pytest.raises(PairError, match="ModuleNotFoundError"):
        Team(absent, "shm", TINY, 2, "sgd")
    serverless = System("x", "y", (), "a_module_that_nobody_has", {"shm": ""})
    with pytest.raises(PairError, match=r"before it listened.*a_module_that_nobody_has"):
        Team(serverless, "shm", TINY, 2, "sgd")


# --- a run --------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["shm", "tcp"])
def report(request: pytest.FixtureRequest) -> Report:
    return tiny(wires=(request.param,), systems=(LIMIT, "ddp-gloo", "grpc"))


@pytest.mark.slow
def test_every_system_has_its_rows(report: Report) -> None:
    wire = report.settings["wires"][0]
    for name in ("ddp-gloo", "grpc"):
        if BY_NAME[name].missing() is not None:
            continue
        step = report.find(f"{wire}.tiny.step", name, TINY.size_bytes)
        exchange = report.find(f"{wire}.tiny.exchange", name, TINY.size_bytes)
        assert step is not None
        assert exchange is not None
        assert step.measured, step
        assert exchange.measured, exchange
        assert step.operations == exchange.operations == TINY.steps
        assert step.ratio_to_limit is None
        assert exchange.ratio_to_limit is not None
        assert exchange.ratio_interval is not None
        assert step.cpu_seconds_local is not None
        assert step.note
        isolated = report.find(f"{wire}.tiny.isolated", name, TINY.size_bytes)
        if not BY_NAME[name].holds:
            assert isolated is None
            continue
        assert isolated is not None
        assert isolated.operations == TINY.steps
        assert isolated.ratio_to_limit is not None
    limit = report.find(f"{wire}.tiny.exchange", LIMIT, TINY.size_bytes)
    assert limit is not None
    assert limit.operations == TINY.steps
    assert ("raw socket" in limit.note) == (wire == "tcp")
    assert not any("different parameters" in text for text in report.settings["warnings"])


@pytest.mark.slow
def test_tensorwire_runs_beside_them() -> None:
    needed(OWN)
    pytest.importorskip("tensorwire.torch")
    found = tiny(systems=(OWN, LIMIT, "ddp-gloo"))
    row = found.find("shm.tiny.exchange", OWN, TINY.size_bytes)
    assert row is not None
    assert row.measured, row.note
    assert row.ratio_to_limit is not None
    assert {item.rival for item in found.comparisons} == {"ddp-gloo"}
    assert not any("different parameters" in text for text in found.settings["warnings"])


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_script_that_runs_alone(optimizer: str) -> None:
    """Rows of both scripts, which computed the same, and the bar's verdict on their difference."""
    found = tiny(wires=("alone",), optimizer=optimizer)
    rows = {row.system: row for row in found.rows}
    assert list(rows) == [OWN, "plain"]
    for row in rows.values():
        assert row.case == "alone.tiny.step"
        assert row.measured, row.note
        assert row.operations == 24 * 20
        assert row.cpu_seconds_local is not None
        assert row.cpu_seconds_remote is None
    assert rows[OWN].ratio_to_limit is not None
    assert rows[OWN].ratio_interval is not None
    verdict = found.verdicts[-1]
    assert verdict.name == "alone.tiny.step, extra to plain torch"
    assert verdict.met is not None
    assert verdict.interval is not None


@pytest.mark.slow
def test_scripts_that_do_not_compute_the_same_are_no_measurement(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(alone, "_SAME", -1.0)
    found = tiny(wires=("alone",))
    assert not any(row.measured for row in found.rows)
    assert found.verdicts[-1].met is None
    assert "the parameters differ" in found.verdicts[-1].detail


@pytest.mark.slow
def test_what_is_missing_or_broken_is_a_row() -> None:
    absent = System("ddp-gloo", "x", (("a_module_that_nobody_has", "pip install it"),), None, {})
    broken = System("grpc", "a_module_that_nobody_has", (), None, {"shm": ""})
    bench = replace(TRAINING, systems=(absent, broken))
    found = tiny(bench, systems=(LIMIT, "ddp-gloo", "grpc"))
    for name, reason in (("ddp-gloo", "pip install it"), ("grpc", "ModuleNotFoundError")):
        row = found.find("shm.tiny.exchange", name, TINY.size_bytes)
        assert row is not None
        assert not row.measured
        assert reason in row.note
    assert [verdict.met for verdict in found.verdicts] == [None] * 5


# --- the command --------------------------------------------------------------------------------


def test_the_command_writes_rows_and_shows_verdicts(tmp_path: Path) -> None:
    path, figure = tmp_path / "training.json", tmp_path / "training.svg"
    has_figure = importlib.util.find_spec("matplotlib") is not None
    result = CliRunner().invoke(
        main,
        ["bench", "training", "--models", "digits", "--systems", "limit,ddp-gloo", "--wires", "shm",
         "--steps", "6", "--strict", "--json", str(path)]
        + (["--figure", str(figure)] if has_figure else []),
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "against the bars" in result.output
    rows = json.loads(path.read_text())["rows"]
    assert {(row["case"], row["system"]) for row in rows} == {
        ("shm.digits.step", "ddp-gloo"),
        ("shm.digits.exchange", "ddp-gloo"),
        ("shm.digits.exchange", "limit"),
    }
    assert figure.exists() == has_figure


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--systems", "carrier-pigeon"], "unknown; choose from tensorwire, limit"),
        (["--models", "gpt"], "unknown; choose from digits, mlp50, mlp200"),
        (["--wires", "rope"], "unknown; choose from shm, tcp, alone"),
        (["--optimizer", "adam"], "adamw"),
        (["--json", "/nowhere/at/all.json"], "does not exist"),
    ],
)
def test_bad_options_say_what_to_write(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(main, ["bench", "training", *arguments])
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())
