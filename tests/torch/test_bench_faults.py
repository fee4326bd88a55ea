"""`tensorwire bench faults`: its judge finds each kind of violation, and the command runs.

The kills of CI are two here, and those of tests/launch/test_random_kills.py without torch.
"""

import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from tensorwire.bench.rows import Report
from tensorwire.cli import main
from tensorwire_benchmarks import durable_cost, faults, faults_changes, faults_judge
from tensorwire_benchmarks.durable_cost import CostRow, CostSettings
from tensorwire_benchmarks.faults_changes import ChangeRow, ChangeSettings
from tensorwire_benchmarks.faults_job import write_final

pytestmark = pytest.mark.cold  # the CPU time of a standby tells when it has imported everything
SAMPLES, STEPS = 8, 2
Events = list[dict[str, Any]]


def events_of(rank: int) -> Events:
    return [
        {
            "optimizer": "SGD", "epoch": 0, "step": step, "slice": rank,
            "samples": [4 * step + 2 * rank, 4 * step + 2 * rank + 1],
            "losses": [(0.5 + step).hex()], "at": 1.0 + step,
        }
        for step in range(STEPS)
    ]  # fmt: skip


def write_events(folder: Path, rank: int, events: Events) -> None:
    (folder / f"events-{rank}").write_text("".join(json.dumps(each) + "\n" for each in events))


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """The folders of a job that was not disturbed, and of one that did the same."""
    one, other = tmp_path / "one", tmp_path / "other"
    one.mkdir()
    for rank in range(2):
        write_events(one, rank, events_of(rank))
        state = {"model": {"weight": torch.arange(6.0).reshape(2, 3)}, "means": [0.5, None]}
        write_final(one / f"final-{rank}", state)
    shutil.copytree(one, other)
    return one, other


def test_equal_jobs_are_equal_at_other_times(folders: tuple[Path, Path]) -> None:
    write_events(folders[1], 1, [{**event, "at": 9.0} for event in events_of(1)])
    assert not any(faults_judge.judge(*folders, 2, SAMPLES).values())


def test_a_byte_is_found(folders: tuple[Path, Path]) -> None:
    path = folders[1] / "final-1"
    content = path.read_bytes()
    head_bytes = content.index(b"\n") + 1
    for at in range(head_bytes, len(content)):
        changed = bytearray(content)
        changed[at] ^= 1
        path.write_bytes(changed)
        found = faults_judge.judge(*folders, 2, SAMPLES)
        assert len(found["parameters"]) == 1
        assert found["parameters"][0].startswith("worker 1: /")
        assert found["samples"] == found["steps"] == []


@pytest.mark.parametrize("content", [None, b"", b"[]\n", b'[["x", "int", [], 3]]\n1'])
def test_final_values_that_are_missing_are_found(
    folders: tuple[Path, Path], content: bytes | None
) -> None:
    path = folders[1] / "final-0"
    path.unlink() if content is None else path.write_bytes(content)
    assert faults_judge.judge(*folders, 2, SAMPLES)["parameters"]


def by_a_later_process(events: Events, *more: dict[str, Any], **what: Any) -> Events:
    """The last step is logged by two processes, of which the second one has another loss."""
    again = {**events[-1], "pid": 2, "losses": [(0.1).hex()], **what}
    return [*({**event, "pid": 1} for event in events), *more, again]


def test_a_later_process_may_compute_its_first_step_again(folders: tuple[Path, Path]) -> None:
    state = {"model": {"weight": torch.arange(6.0).reshape(2, 3)}, "means": [0.7, None]}
    write_final(folders[1] / "final-0", state)
    assert faults_judge.judge(*folders, 2, SAMPLES)["parameters"], "nobody was replaced"
    write_events(folders[1], 1, by_a_later_process(events_of(1)))
    assert not any(faults_judge.judge(*folders, 2, SAMPLES).values())
    alone = by_a_later_process(events_of(1))
    write_events(folders[1], 1, [alone[0], alone[2]])
    assert not any(faults_judge.judge(*folders, 2, SAMPLES).values())
    write_final(folders[1] / "final-0", {"model": {"weight": torch.zeros(2, 3)}, "means": [0.7]})
    assert faults_judge.judge(*folders, 2, SAMPLES)["parameters"]


@pytest.mark.parametrize(
    ("change", "kinds"),
    [
        (lambda all: [*all, all[-1]], "steps samples"),
        (lambda all: by_a_later_process(all, samples=[0, 1]), "steps samples"),
        (lambda all: by_a_later_process(all, {**all[0], "pid": 2}), "steps samples parameters"),
        (lambda all: all[1:], "steps samples"),
        (lambda all: [{**all[0], "samples": [1, 1]}, *all[1:]], "samples parameters"),
        (lambda all: [{**all[0], "samples": [0]}, *all[1:]], "samples parameters"),
        (lambda all: [*all, {**all[-1], "step": 7, "samples": []}], "steps parameters"),
        (lambda all: [all[0], {**all[1], "losses": [(0.1).hex()]}], "parameters"),
        (lambda all: [{}], "steps"),
    ],
    ids=("repeated", "again with other samples", "a later step again", "missing", "other samples",
         "fewer samples", "further", "other loss", "empty"),
)  # fmt: skip
def test_each_violation_is_found(
    folders: tuple[Path, Path], change: Callable[[Events], Events], kinds: str
) -> None:
    write_events(folders[1], 0, change(events_of(0)))
    found = faults_judge.judge(*folders, 2, SAMPLES)
    assert {kind for kind, texts in found.items() if texts} == set(kinds.split())


def test_what_is_unequal_slow_or_counted_wrong_is_told() -> None:
    good = faults.FaultRow("faults", "x", "tensorwire", 1, rejoin_s_median=3.9, script_s=2.0,
                           parameters_equal=True, samples_once=True, steps_once=True)  # fmt: skip
    slow = faults.FaultRow("faults", "y", "tensorwire", 1, rejoin_s_median=4.1, script_s=2.0)
    counted = ChangeRow("faults", "changes.move", "tensorwire", 1, failures=("3 and 4 times",))
    for rows, fails, met in (
        ([good], False, [True, None, True]), ([slow, good], True, [False, None, False]),
        ([good, counted], True, [True, None, True]),
    ):  # fmt: skip
        report = Report("faults", {}, list(rows))
        assert faults.fails(report) is fails
        assert [verdict.met for verdict in faults.judge(report)] == met
    assert faults_changes.judge(report)[0].met is False
    assert faults.recovery_s(2.05, [1.0, 2.0, 2.1, 3.6, 3.7]) == pytest.approx(1.55)


@pytest.mark.parametrize(("upper", "met"), [(0.971, True), (0.969, False)])
def test_the_bars_of_the_cost(upper: float, met: bool) -> None:
    """No interval of a comparison is wholly below the bar."""
    rows = [CostRow("faults", "cost.exchange.adam", durable_cost.ON, 1, cpu_ratio=1.9),
            CostRow("faults", "cost.computation.adam", durable_cost.ON, 1, step_ratio=1.07,
                    computation_by_exchange=10.2)]  # fmt: skip
    report = Report("faults", {}, list(rows))
    found = durable_cost.judge(report, CostSettings(("adam",)))
    assert [verdict.met for verdict in found] == [False, True]
    report.compare("cost.before.adam", 1, "now", "before", [0.9] * 3 + [upper] * 3, [1.0] * 6)
    assert durable_cost.judge(report, CostSettings(("adam",), beside="x"))[0].met is met


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_the_cost_is_measured() -> None:
    report, settings = Report("faults", {}), CostSettings(("adam",), 1, 6, 2, 1)
    durable_cost.measure(report, settings, lambda what: None)
    assert [row.note for row in report.rows] == [""] * 4
    durable, plain = report.rows[:2]
    assert isinstance(durable, CostRow)
    assert isinstance(plain, CostRow)
    assert (durable.notes_bytes or 0) > plain.notes_bytes == 0
    assert durable.rss_bytes
    assert all(verdict.measured is not None for verdict in durable_cost.judge(report, settings))


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("scenario", ["tables", "launcher"])
def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scenario: str) -> None:
    """Its jobs have one epoch, so that they end soon."""
    path = tmp_path / "faults.json"
    monkeypatch.setattr(faults, "FaultSettings", functools.partial(faults.FaultSettings, epochs=1))
    options = ["--kills", "2", "--scenario", scenario, "--json", str(path)]
    result = CliRunner().invoke(main, ["bench", "faults", *options])
    assert result.exit_code == 0, result.output
    names, values = json.loads(path.read_text())["rows"]
    row = dict(zip(names, values, strict=True))
    assert row["kills"] >= 2
    assert all(row[key] for key in ("parameters_equal", "samples_once", "steps_once"))
    assert row["script_s"] > 0


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_changes_are_measured() -> None:
    """Shares move, workers come, go and are killed; a server and a worker are in a mode."""
    report = Report("faults", {})
    faults_changes.measure(report, ChangeSettings(1, ("bounded",), 0.0), lambda _: None)
    rows = [row for row in report.rows if isinstance(row, ChangeRow)]
    assert [row.case.removeprefix("changes.") for row in rows] == [
        "move", "joins", "leaves", "taken over", "bounded, server", "bounded, worker",
        "bounded, others",
    ]  # fmt: skip
    assert not any(row.failures for row in rows), rows
    assert faults_changes.judge(report)[0].met
