"""`tensorwire bench modes`: its rows, and what its bars say of them. No timed assertion."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from tensorwire.bench.rows import Comparison, Report, Row
from tensorwire.cli import main
from tensorwire_benchmarks import modes, modes_training
from tensorwire_benchmarks.modes import ModesSettings, draw, ideal, judge
from tensorwire_benchmarks.modes_training import Curve, TrainingSettings
from tensorwire_benchmarks.modes_worker import Trained
from tensorwire_benchmarks.systems import SYNC

SLEEPS = ModesSettings()


def made_up(**ratios: float) -> Report:
    """Returns a report of cases whose systems are `ratios` times as fast as sync."""
    systems = {"slow": "async", "stalls": "bounded"}
    report = Report("modes", {}, settings={"interrupted": False})
    for case, ratio in ratios.items():
        report.rows.append(Row("modes", case, systems[case], 8, 1.0, 1.0))
        report.comparisons.append(Comparison(case, 8, systems[case], "sync", ratio, None, 8))
    report.verdicts = judge(report)
    return report


def test_a_missed_bar_is_told() -> None:
    slow, stalls = made_up(slow=2.5, stalls=1.6).verdicts[:2]
    assert slow.met is False
    assert "MISSED  slow" in slow.line()
    assert "0.5 x away" in slow.line()
    assert stalls.met is True


def test_steps_to_a_loss_are_those_of_all_workers() -> None:
    marks = [(0, 2.0, 0.1), (1, 1.0, 0.5), (2, 0.5, 0.9)]
    told = [Trained([1.0, 3.0], marks, 8), Trained([0.5, 0.9, 1.4, 3.0], [], 8)]
    curve = Curve.of("digits", "async", 0, told)
    assert curve.seconds == [0.0, 1.0, 3.0]
    assert curve.steps == [0.0, 1.5, 3.0]
    assert curve.reaches(1.0) == (1.0, 1.5)
    assert curve.reaches(0.4) is None


@pytest.mark.parametrize(("steps_ratio", "met"), [(0.7, True), (0.6, False)])
def test_more_steps_than_the_bar_are_told(steps_ratio: float, met: bool) -> None:
    report = made_up()
    report.comparisons.append(
        Comparison("digits.4.steps", 8, "async", "sync", steps_ratio, None, 5)
    )
    verdict = next(v for v in judge(report) if v.name == "digits: steps to the loss of sync, async")
    assert verdict.met is met
    assert verdict.measured == pytest.approx(1 / steps_ratio)


def test_what_was_left_out_or_failed_is_not_met() -> None:
    report = made_up(slow=3.2)
    assert [verdict.met for verdict in report.verdicts[:2]] == [True, None]
    assert "left out" in report.verdicts[1].line()
    report.rows.append(Row("modes", "stalls", "bounded", 8, note="worker 1: it ended"))
    assert "worker 1: it ended" in judge(report)[1].line()


@pytest.mark.parametrize(("ratio", "code"), [(2.9, 1), (3.1, 0)])
def test_strict_tells_by_its_exit_code(
    ratio: float, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(modes, "run", lambda settings, tell: made_up(slow=ratio))
    result = CliRunner().invoke(main, ["bench", "modes", "--strict", "--cases", "slow"])
    assert result.exit_code == code, result.output
    assert CliRunner().invoke(main, ["bench", "modes"]).exit_code == 0


def test_what_the_modes_could_gain() -> None:
    """By hand: two workers, the second pauses for three steps in its second one."""
    pauses = [[1.0] * 4, [1.0, 4.0, 1.0, 1.0]]
    assert ideal(pauses, 0) == [7.0, 7.0]
    assert ideal(pauses, 3) == [4.0, 7.0]
    assert ideal(pauses, 2) == [5.0, 7.0]  # after four it waits for the other's second
    assert ideal(pauses, 1) == [6.0, 7.0]
    assert ideal(pauses, None) == [4.0, 7.0]


def test_a_worker_stalls_once_in_four_steps() -> None:
    for steps in draw("stalls", "sync", SLEEPS, 0):
        for at in range(0, len(steps), 4):
            *normal, stalled = sorted(steps[at : at + 4])
            assert normal == [SLEEPS.step_s] * 3
            assert 3 <= stalled / SLEEPS.step_s <= 4  # with the step itself
    assert draw("stalls", "sync", SLEEPS, 0) == draw("stalls", "bounded", SLEEPS, 0)
    assert draw("stalls", "sync", SLEEPS, 0) != draw("stalls", "sync", SLEEPS, 1)


@pytest.mark.slow
def test_a_tiny_run_has_rows_and_verdicts(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    settings = replace(SLEEPS, cases=("slow",), workers=2, turns=2, steps=2, step_s=0.01)
    report = modes.run(settings, lambda done, total, label: None)
    report.write(tmp_path / "modes.json")
    found = json.loads((tmp_path / "modes.json").read_text())
    assert [row["system"] for row in found["rows"]] == ["sync", "async"]
    for row in found["rows"]:
        assert (row["case"], row["bytes"], row["operations"]) == ("slow", 4 * 65 * 64, 2), row
        assert 0 < row["ratio_to_limit"] < 1.1
    (comparison,) = found["comparisons"]
    assert (comparison["system"], comparison["rival"], comparison["pairs"]) == ("async", "sync", 2)
    verdicts = {verdict["name"]: verdict["met"] for verdict in found["verdicts"]}
    assert verdicts["slow: steps per second, async beside sync"] is not None
    assert verdicts["stalls: steps per second, bounded beside sync"] is None


@pytest.mark.slow
def test_a_tiny_training_has_rows_and_curves(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("sklearn")
    monkeypatch.setattr(modes_training, "_SYSTEMS", (SYNC,))
    training = TrainingSettings(sizes=(1,), seeds=2, shorten=20)
    settings = replace(SLEEPS, cases=("digits",), training=training)
    report = modes.run(settings, lambda done, total, label: None)
    (row,) = report.rows
    assert (row.case, row.system, row.operations) == ("digits.1", "sync", 2), row.note
    assert "steps to the loss of sync" in row.note
    for seed, curve in enumerate(report.settings["curves"]):
        assert (curve["seed"], curve["steps"]) == (seed, list(range(9)))
        assert curve["loss"][-1] < curve["loss"][0]
        assert curve["seconds"] == sorted(curve["seconds"])
    first, second = report.settings["curves"]
    assert first["loss"] != second["loss"]
    assert all(verdict.met is None for verdict in report.verdicts)
