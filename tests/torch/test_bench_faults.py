"""`tensorwire bench faults`: its judge finds each kind of violation, and the command runs.

The kills of CI are two here, and those of tests/launch/test_random_kills.py without torch.
"""

import dataclasses
import functools
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from tensorwire.bench.rows import Comparison
from tensorwire.cli import main
from tensorwire_benchmarks import durable_cost, faults, faults_changes, faults_judge
from tensorwire_benchmarks.durable_cost import CostRow, CostSettings
from tensorwire_benchmarks.faults_changes import ChangeRow, ChangeSettings
from tensorwire_benchmarks.faults_job import write_final

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


def by_a_later_process(events: Events) -> Events:
    """The last step is logged by two processes, of which the second one has another loss."""
    again = {**events[-1], "pid": 2, "losses": [(0.1).hex()]}
    return [*({**event, "pid": 1} for event in events), again]


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


def again_with_other_samples(events: Events) -> Events:
    *before, last = by_a_later_process(events)
    return [*before, {**last, "samples": [0, 1]}]


def a_later_step_again(events: Events) -> Events:
    *before, last = by_a_later_process(events)
    return [*before, {**before[0], "pid": 2}, last]


def repeat(events: Events) -> Events:
    return [*events, events[-1]]


def other_samples(events: Events) -> Events:
    return [{**events[0], "samples": [1, 1]}, *events[1:]]


def fewer_samples(events: Events) -> Events:
    return [{**events[0], "samples": [0]}, *events[1:]]


def further(events: Events) -> Events:
    return [*events, {**events[-1], "step": 7, "samples": []}]


def other_loss(events: Events) -> Events:
    return [events[0], {**events[1], "losses": [(0.1).hex()]}]


@pytest.mark.parametrize(
    ("change", "kinds"),
    [
        (repeat, {"steps", "samples"}),
        (again_with_other_samples, {"steps", "samples"}),
        (a_later_step_again, {"steps", "samples", "parameters"}),
        (lambda events: events[1:], {"steps", "samples"}),
        (other_samples, {"samples", "parameters"}),
        (fewer_samples, {"samples", "parameters"}),
        (further, {"steps", "parameters"}),
        (other_loss, {"parameters"}),
        (lambda events: [{}], {"steps"}),
    ],
)
def test_each_violation_is_found(
    folders: tuple[Path, Path], change: Callable[[Events], Events], kinds: set[str]
) -> None:
    write_events(folders[1], 0, change(events_of(0)))
    found = faults_judge.judge(*folders, 2, SAMPLES)
    assert {kind for kind, texts in found.items() if texts} == kinds
    command = [sys.executable, faults_judge.__file__, *map(str, folders), "2", str(SAMPLES)]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=False)
    assert done.returncode == 1
    assert json.loads(done.stdout) == found


def test_recovery_ends_with_the_longest_pause() -> None:
    times = [1.0, 2.0, 2.1, 3.6, 3.7]
    assert faults.recovery_s(2.05, times) == pytest.approx(1.55)
    assert faults.recovery_s(0.0, times) == pytest.approx(3.6)
    assert faults.recovery_s(4.0, times) is None


def test_what_is_unequal_fails() -> None:
    good = faults.FaultRow(
        "faults", "x", "tensorwire", 1, parameters_equal=True, samples_once=True, steps_once=True
    )
    report = faults.Report("faults", {}, [good])
    assert not faults.fails(report)
    report.rows.append(faults.FaultRow("faults", "y", "tensorwire", 1))
    assert faults.fails(report)
    assert [verdict.met for verdict in faults.judge(report)] == [False, None, None]


def test_a_worker_may_need_its_script_and_two_seconds() -> None:
    rows = [
        faults.FaultRow("faults", name, "tensorwire", 1, rejoin_s_median=rejoin, script_s=script)
        for name, rejoin, script in (("x", 3.9, 2.0), ("y", 9.0, None), ("z", None, 1.0))
    ]
    met = faults.judge(faults.Report("faults", {}, rows[1:]))[2].met
    assert met is None
    assert faults.judge(faults.Report("faults", {}, rows))[2].met
    slower = dataclasses.replace(rows[0], rejoin_s_median=4.1)
    assert faults.judge(faults.Report("faults", {}, [slower, *rows]))[2].met is False


def test_the_bars_of_the_cost() -> None:
    rows = [
        CostRow("faults", f"cost.{case}.momentum", durable_cost.ON, 1, **figures)
        for case, figures in (
            ("exchange", {"cpu_ratio": 1.46, "cpu_ratio_interval": (1.4, 1.5)}),
            ("computation", {"step_ratio": 1.07, "computation_by_exchange": 10.2}),
        )
    ]
    found = durable_cost.judge(faults.Report("faults", {}, rows), CostSettings())
    assert [verdict.met for verdict in found] == [False, True, None, None]
    assert found[1].line().endswith("10.2:1")


@pytest.mark.parametrize(("upper", "met"), [(0.971, True), (0.969, False)])
def test_no_interval_wholly_below_the_bar(upper: float, met: bool) -> None:
    report = faults.Report("faults", {})
    settings = CostSettings(("adam",), beside="elsewhere")
    report.settings["cost"] = dataclasses.asdict(settings)
    (found,) = durable_cost.judge(report, settings)
    assert found.met is None
    interval = 0.9, upper
    report.comparisons.append(Comparison("cost.before.adam", 1, "now", "before", 0.95, interval, 9))
    (found,) = durable_cost.judge(report, settings)
    assert found.met == met
    assert json.dumps(report.to_json())


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_the_cost_is_measured() -> None:
    report, settings = faults.Report("faults", {}), CostSettings(("adam",), 1, 6, 2, 1)
    durable_cost.measure(report, settings, lambda what: None)
    assert [(row.case, row.system, row.note) for row in report.rows] == [
        (f"cost.{case}.adam", side, "")
        for case in ("exchange", "computation")
        for side in (durable_cost.ON, durable_cost.OFF)
    ]
    durable, plain = report.rows[:2]
    assert isinstance(durable, CostRow)
    assert isinstance(plain, CostRow)
    assert durable.notes_bytes
    assert durable.notes_bytes > plain.notes_bytes == 0
    assert durable.rss_bytes
    assert durable.cpu_seconds_remote
    assert durable.cpu_ratio_interval
    assert all(verdict.measured is not None for verdict in durable_cost.judge(report, settings))


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its jobs have one epoch, so that they end soon."""
    path = tmp_path / "faults.json"
    short = functools.partial(faults.FaultSettings, epochs=1)
    monkeypatch.setattr(faults, "FaultSettings", short)
    options = ["--kills", "2", "--scenario", "tables", "--json", str(path)]
    result = CliRunner().invoke(main, ["bench", "faults", *options])
    assert result.exit_code == 0, result.output
    (row,) = json.loads(path.read_text())["rows"]
    assert (row["bench"], row["case"], row["system"]) == ("faults", "tables", "tensorwire")
    assert row["kills"] >= 2
    assert all(row[key] for key in ("parameters_equal", "samples_once", "steps_once"))
    assert row["bytes"] > 4 * 400 * 16
    assert row["script_s"] > 0
    assert row["ratio_to_limit"] is None


def test_a_job_that_has_counted_wrong_fails() -> None:
    good = ChangeRow("faults", "changes.move", "tensorwire", 1, 0.1, operations=3)
    bad = dataclasses.replace(good, failures=("in 3 epochs samples were used [3.0, 4.0] times",))
    for rows, met in (([good], True), ([good, bad], False)):
        report = faults.Report("faults", {}, rows)
        assert faults.fails(report) is not met
        (verdict,) = faults_changes.judge(report)
        assert (verdict.met, verdict.detail) == (met, f"{3 * len(rows)} pauses")


@pytest.mark.parametrize("other", ["--cost", "--kills=3"])
def test_changes_are_for_themselves(other: str) -> None:
    result = CliRunner().invoke(main, ["bench", "faults", "--changes", other])
    assert result.exit_code == 2
    assert "--changes is for itself" in result.output


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_changes_are_measured() -> None:
    """Shares move, workers come, go and are killed; a server and a worker are in a mode."""
    report = faults.Report("faults", {})
    faults_changes.measure(report, ChangeSettings(1, ("bounded",), 0.0), lambda _: None)
    rows = [row for row in report.rows if isinstance(row, ChangeRow)]
    assert [row.case.removeprefix("changes.") for row in rows] == [
        "move", "joins", "leaves", "taken over", "bounded, server", "bounded, worker",
        "bounded, others",
    ]  # fmt: skip
    assert not any(row.failures for row in rows), rows
    assert all(row.operations == 1 for row in rows)
    limits = {row.case: row.seconds_median for row in report.rows if row.system == "limit"}
    assert limits.pop("changes.bounded, others") is None
    assert all(limits.values())
    (verdict,) = faults_changes.judge(report)
    assert verdict.met
