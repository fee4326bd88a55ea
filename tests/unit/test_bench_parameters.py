"""`tensorwire bench parameters`: the work of servers, beside torch's own step."""

import importlib.util
import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from tensorwire.cli import main


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
    "wrong", [["--optimizers", "LBFGS"], ["--wires", "shm"], ["--libraries", "lightning"]]
)
def test_options_that_make_no_sense(wrong: list[str]) -> None:
    options = ["bench", "parameters", "--optimizers", "Adagrad", *wrong]
    result = CliRunner().invoke(main, options)
    assert result.exit_code == 2
