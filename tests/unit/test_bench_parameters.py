"""`tensorwire bench parameters`: the work of servers, beside torch's own step."""

import importlib.util
import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from tensorwire.bench.rows import Report, Row
from tensorwire.cli import main
from tensorwire_benchmarks import link, scaling
from tensorwire_benchmarks.scaling_report import draw_scaling
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
        ["--scaling"],
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
    """If cores and not the link are the bound, the slower link counts."""
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


# ---- more workers and servers

STEP = {"forward_s": 1.0, "backward_s": 2.0, "ready": [(0, 2.0)]}
RECORDING = scaling.Recording("a net", [("w", [250, 1000])], "", ["lr"], [0.1], [], [STEP])


def test_what_links_let_through() -> None:
    """A megabyte of gradients, links of a megabyte per second."""

    def seconds(mode: str, workers: int, servers: int) -> float:
        return scaling.limit_seconds(scaling.Point(mode, workers, servers), RECORDING, 1e6)

    assert seconds("sync", 1, 1) == 1 + 2 + 1
    assert seconds("sync", 4, 1) == 1 + 4 + 4  # the push takes longer than backward
    assert seconds("sync", 4, 4) == seconds("sync", 1, 4) == 4  # a worker's own link
    assert seconds("async", 4, 1) == 4  # one link, at all times
    assert seconds("async", 8, 1) == 8


def test_scaling_is_judged_by_linear_or_by_links(tmp_path: Path) -> None:
    settings = scaling.ScalingSettings(modes=("sync",), workers=(1, 2, 4), servers=(1,))
    report = Report("parameters", {"cpu": "a machine"})
    report.settings["scaling"] = {
        name: getattr(settings, name) for name in scaling.ScalingSettings.__slots__
    }
    for count, own, limit in ((1, 1.0, 0.9), (2, 1.05, 0.9), (4, None, 1.8)):
        case = scaling.Point("sync", count, 1).case
        report.rows += [
            Row("parameters", case, "tensorwire", 8, seconds_median=own, note="it broke"),
            Row("parameters", case, "limit", 8, seconds_median=limit),
        ]
    two, four = scaling.judge(report, settings)
    assert two.met
    assert two.measured == pytest.approx(1 / 1.05)
    assert (four.met, four.detail) == (None, "it broke")
    report.rows[4] = Row("parameters", report.rows[4].case, "tensorwire", 8, seconds_median=2.5)
    _, four = scaling.judge(report, settings)
    assert "or by the 0.50 of it that links let through" in four.name
    assert (four.met, four.measured) == (False, pytest.approx(0.8))
    for count, sockets in ((1, 1.0), (4, 2.4)):
        case = scaling.Point("sync", count, 1).case
        report.rows.append(Row("parameters", case, scaling.RAW, 8, seconds_median=sockets))
    _, four = scaling.judge(report, settings)
    assert "or by the 0.42 of it that raw sockets reach" in four.name
    assert (four.met, four.measured) == (True, pytest.approx(0.96))
    draw_scaling(report, tmp_path / "scaling.svg")
    assert "4 workers" not in (tmp_path / "scaling.svg").read_text()
    with pytest.raises(ValueError, match="no measured scaling"):
        draw_scaling(Report("parameters", {}), tmp_path / "other.svg")


@pytest.mark.slow
@pytest.mark.skipif(link.missing(200) is not None, reason=str(link.missing(200)))
def test_two_workers_on_hosts_of_their_own(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    options = ["--quick", "--scaling", "--json", str(path)]
    result = CliRunner().invoke(main, ["bench", "parameters", *options])
    assert result.exit_code == 0, result.output
    report = json.loads(path.read_text())
    rows = {(row["case"], row["system"]): row for row in report["rows"]}
    assert len(rows) == 12
    for mode in scaling.MODES:
        for count in (1, 2):
            case = scaling.Point(mode, count, 1).case
            own, limit = rows[case, "tensorwire"], rows[case, "limit"]
            assert own["seconds_median"] >= 0.9 * limit["seconds_median"] > 0, own
            sockets = rows[case, scaling.RAW]
            assert sockets["seconds_median"] >= 0.9 * limit["seconds_median"], sockets
            assert own["bytes"] > 900_000
    assert 0 < report["settings"]["scaling"]["link_bytes_per_s"] < 200e6 / 8
    assert sum(verdict["met"] is not None for verdict in report["verdicts"]) == 2
