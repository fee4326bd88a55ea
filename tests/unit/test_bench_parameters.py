"""`tensorwire bench parameters`: the work of servers, beside torch's own step."""

import importlib.util
import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from tensorwire.bench.rows import Report, Row
from tensorwire.cli import main
from tensorwire_benchmarks.verdicts import judge_links


def test_an_optimizer_is_measured_beside_torch(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    options = ["--quick", "--optimizers", "Adagrad,Adafactor", "--json", str(path)]
    result = CliRunner().invoke(main, ["bench", "parameters", *options])
    assert result.exit_code == 0, result.output
    report = json.loads(path.read_text())
    found = {(row["case"], row["system"]): row for row in report["rows"]}
    assert found.keys() == {
        (case, system) for case in ("Adagrad", "Adafactor") for system in ("tensorwire", "torch")
    }
    for row in found.values():
        assert row["bytes"] == 4 << 20
        assert row["seconds_median"] > 0
        assert row["operations"] == 8
    assert found["Adagrad", "tensorwire"]["ratio_to_limit"] > 0
    names = [verdict["name"] for verdict in report["verdicts"]]
    assert "Adagrad: work per MiB beside torch's own step" in names


def test_a_library_that_is_missing_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: None if name == "lightning" else found(name)
    )
    path = tmp_path / "rows.json"
    options = ["--quick", "--libraries", "lightning", "--json", str(path)]
    result = CliRunner().invoke(main, ["bench", "parameters", *options])
    assert result.exit_code == 0, result.output
    report = json.loads(path.read_text())
    assert len(report["rows"]) == 2
    assert {row["note"] for row in report["rows"]} == {
        "lightning is not installed; pip install 'tensorwire[integrations]'"
    }
    assert [verdict["met"] for verdict in report["verdicts"]] == [None]


@pytest.mark.parametrize(
    "wrong",
    [
        ["--optimizers", "LBFGS"],
        ["--wires", "shm"],
        ["--libraries", "lightning"],
        ["--links", "1gbit"],
    ],
)
def test_options_that_make_no_sense(wrong: list[str]) -> None:
    options = ["bench", "parameters", "--optimizers", "Adagrad", *wrong]
    result = CliRunner().invoke(main, options)
    assert result.exit_code == 2


def on_link(wire: str, system: str, seconds: float, cpu_s: float, ratio: float | None) -> Row:
    return Row(
        "parameters", f"{wire}.net.isolated", system, 1 << 20, seconds_median=seconds,
        ratio_to_limit=ratio, cpu_seconds_local=cpu_s / 4, cpu_seconds_remote=cpu_s * 3 / 4,
    )  # fmt: skip


def test_a_link_is_judged_by_its_limit_and_by_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where cores and not the link are what bounds, the slower link counts."""
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    rows = [
        on_link("1gbit", "tensorwire", 1.0, 1.9, 0.96),  # busy, but there is no slower one
        on_link("1gbit", "grpc", 1.0, 3.0, 0.9),
        on_link("2.5gbit", "tensorwire", 1.0, 1.2, 0.94),
        on_link("2.5gbit", "grpc", 1.0, 2.4, 0.9),
        on_link("5gbit", "tensorwire", 1.0, 1.5, 0.97),
    ]
    report = Report("parameters", {}, rows, settings={"wires": ["1gbit", "2.5gbit", "5gbit"]})
    found = judge_links(report, ["net"])
    assert [(verdict.name.partition(".net")[0], verdict.met) for verdict in found] == [
        ("1gbit", True), ("1gbit", False), ("2.5gbit", False), ("2.5gbit", True),
        ("5gbit", None), ("5gbit", None),
    ]  # fmt: skip
    assert found[1].measured == pytest.approx(1.9 / 3)
    assert "75 % of all cores is busy" in found[4].detail
    assert "grpc" in found[5].detail
