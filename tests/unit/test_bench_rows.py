"""Rows, verdicts and their JSON file: what readers of a bench rely on."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from tensorwire.bench.rows import (
    Comparison,
    Report,
    Row,
    Verdict,
    format_seconds,
    format_size,
    parse_size,
)
from tensorwire.bench.verdicts import judge
from tensorwire.cli import main

KEYS = {
    "bench", "case", "system", "bytes", "seconds_median", "seconds_p99", "gb_per_s",
    "ratio_to_limit", "ratio_interval", "cpu_seconds_local", "cpu_seconds_remote", "operations",
    "spin_bound_s", "note",
}  # fmt: skip
MIB = 1 << 20


def measured(case: str, system: str, size: int, **figures: object) -> Row:
    defaults: dict[str, object] = {
        "seconds_median": 1e-6,
        "seconds_p99": 2e-6,
        "cpu_seconds_local": 1e-6,
        "cpu_seconds_remote": 0.0,
        "operations": 100,
    }
    return Row("memory", case, system, size, **(defaults | figures))  # type: ignore[arg-type]


def full_report() -> Report:
    """A report in which every bar is met."""
    rows = [
        measured("shm.write", "tensorwire", 8, seconds_median=1.5e-6),
        measured("shm.write", "tensorwire-c++", 8, seconds_median=0.1e-6),
        measured(
            "shm.write", "tensorwire", 64 * MIB, ratio_to_limit=0.97, ratio_interval=(0.95, 0.99)
        ),
        measured("shm.read", "tensorwire", MIB, ratio_to_limit=0.95, ratio_interval=(0.9, 1.0)),
        measured("tcp.write", "tensorwire-c++", MIB, ratio_to_limit=0.92),
        measured("tcp.read", "tensorwire-c++", MIB, ratio_to_limit=0.93),
        measured("tcp.round_trip.one_core", "tensorwire-c++", 8, ratio_to_limit=0.8),
        measured("tcp.round_trip.two_cores", "tensorwire-c++", 8, ratio_to_limit=1.5),
        measured("shm.waiting", "tensorwire", 0, seconds_median=4.0, cpu_seconds_remote=0.001),
        measured("tcp.waiting", "tensorwire", 0, seconds_median=4.0, cpu_seconds_remote=0.001),
        measured("shm.signal_awake", "tensorwire", 8, seconds_median=6e-6),
    ]
    comparisons = [
        Comparison(case, 8, "tensorwire", rival, 2.0, (1.9, 2.1), 10)
        for case in ("shm.write", "shm.read")
        for rival in ("nixl", "nixl-huge")
    ]
    return Report("memory", {"cpu": "none"}, rows, comparisons)


def test_a_row_has_the_agreed_keys_and_survives_the_file(tmp_path: Path) -> None:
    report = full_report()
    report.rows.append(Row("memory", "shm.write", "nixl", 8, note="nixl is not installed"))
    report.verdicts = judge(report)
    path = tmp_path / "memory.json"
    report.write(path)
    data = json.loads(path.read_text())
    assert all(set(row) == KEYS for row in data["rows"])
    assert {"machine", "settings", "comparisons", "verdicts"} <= set(data)
    back = Report.load(path)
    assert back.rows == report.rows
    assert back.comparisons == report.comparisons
    assert back.verdicts == report.verdicts
    assert list(tmp_path.iterdir()) == [path]


def test_a_missing_system_has_null_figures_and_its_reason(tmp_path: Path) -> None:
    row = Row("memory", "shm.write", "nixl", 8, note="nixl is not installed")
    Report("memory", {}, [row]).write(tmp_path / "rows.json")
    (plain,) = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert not row.measured
    assert plain["note"] == "nixl is not installed"
    for key in KEYS - {"bench", "case", "system", "bytes", "operations", "note"}:
        assert plain[key] is None


def test_what_is_not_a_number_becomes_null(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    Report("memory", {}, [measured("shm.write", "x", 8, gb_per_s=float("nan"))]).write(path)
    assert json.loads(path.read_text())["rows"][0]["gb_per_s"] is None


@pytest.mark.parametrize(
    "text", ['{"format": 999}', '{"format": 1}', "[]", "", '{"format": 1, "bench":', "\0\udcff"]
)
def test_load_refuses_what_is_no_report(tmp_path: Path, text: str) -> None:
    path = tmp_path / "rows.json"
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ValueError, match=r"rows\.json: not a bench report of format 1"):
        Report.load(path)


def show_again(path: Path, *more: str) -> str:
    """Returns the output of `bench memory --from`, without a measurement."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr("tensorwire.bench.memory.plan")
        return CliRunner().invoke(main, ["bench", "memory", "--from", str(path), *more]).output


def test_stored_rows_are_shown_again(tmp_path: Path) -> None:
    report = full_report()
    report.verdicts = judge(report)
    report.write(tmp_path / "memory.json")
    printed = show_again(tmp_path / "memory.json")
    assert "shm.write" in printed
    assert printed.count("met  ") == len(report.verdicts)


def test_the_figure_of_stored_rows_is_drawn_again(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    full_report().write(tmp_path / "memory.json")
    figure = tmp_path / "memory.svg"
    assert f"figure written to {figure}" in show_again(
        tmp_path / "memory.json", "--figure", str(figure)
    ).replace("\n", "")
    drawn = figure.read_bytes()
    assert b"</svg>" in drawn
    show_again(tmp_path / "memory.json", "--figure", str(figure))
    assert figure.read_bytes() == drawn


def test_rows_of_another_bench_are_not_shown(tmp_path: Path) -> None:
    Report("training", {}).write(tmp_path / "rows.json")
    assert "rows of bench training, not of bench memory" in show_again(tmp_path / "rows.json")


def test_find() -> None:
    report = full_report()
    assert report.find("shm.write", "tensorwire", 8) is report.rows[0]
    assert report.find("shm.write", "tensorwire", 9) is None


@pytest.mark.parametrize(
    ("text", "size"), [("8", 8), ("64KiB", 65536), ("1 MiB", MIB), ("2gib", 2 << 30), ("7B", 7)]
)
def test_parse_size(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "0", "-1", "1.5MiB", "MiB", "8 parsecs", "1kb"])
def test_parse_size_refuses(text: str) -> None:
    with pytest.raises(ValueError, match="no size"):
        parse_size(text)


def test_formats() -> None:
    assert [format_size(n) for n in (8, 1024, 1536, 64 * MIB)] == [
        "8 B",
        "1 KiB",
        "1536 B",
        "64 MiB",
    ]
    assert [format_seconds(s) for s in (None, 1.85e-6, 4e-9, 2.5, 0.0015)] == [
        "–", "1.85 µs", "4 ns", "2.5 s", "1.5 ms",
    ]  # fmt: skip
    assert [format_seconds(s) for s in (999.4e-6, 999.7e-6)] == ["999 µs", "1 ms"]


def test_all_bars_met() -> None:
    verdicts = judge(full_report())
    assert [verdict.name for verdict in verdicts if verdict.met is not True] == []
    assert all(verdict.distance == 0 for verdict in verdicts)


def test_a_missed_bar_says_by_how_much_and_where() -> None:
    report = full_report()
    report.rows.append(
        measured(
            "shm.write", "tensorwire", 256 * MIB, ratio_to_limit=0.8, ratio_interval=(0.78, 0.82)
        )
    )
    verdict = judge(report)[0]
    assert verdict.met is False
    assert verdict.distance == pytest.approx(0.1)
    line = verdict.line()
    assert line.startswith("MISSED")
    for part in ("0.8", "bar >= 0.9", "0.78 to 0.82", "0.1 away", "256 MiB", "1 of 2 sizes"):
        assert part in line


def test_the_round_trip_bar_is_in_times_of_the_raw_socket() -> None:
    report = full_report()
    report.rows[6] = measured(
        "tcp.round_trip.one_core",
        "tensorwire-c++",
        8,
        ratio_to_limit=0.5,
        ratio_interval=(0.4, 0.8),
    )
    verdict = next(v for v in judge(report) if "one core" in v.name)
    assert verdict.measured == pytest.approx(2.0)
    assert verdict.interval == pytest.approx((1.25, 2.5))
    assert verdict.met is False


def test_what_was_not_measured_is_not_met() -> None:
    note = "nixl is not installed; pip install nixl-cu12"
    report = Report("memory", {}, [Row("memory", "shm.write", "nixl", 8, note=note)])
    verdicts = judge(report)
    assert {verdict.met for verdict in verdicts} == {None}
    assert {verdict.distance for verdict in verdicts} == {None}
    assert all(verdict.line().startswith("not measured") for verdict in verdicts)
    assert any(note in verdict.line() for verdict in verdicts)


def test_small_sizes_do_not_count_for_the_bandwidth_bar() -> None:
    report = Report("memory", {}, [measured("shm.write", "tensorwire", 8, ratio_to_limit=0.001)])
    assert judge(report)[0].met is None


def test_a_verdict_without_unit_reads_well() -> None:
    verdict = Verdict("shm write", 0.9, ">=", "", 0.95, (0.94, 0.96), True)
    assert verdict.line() == "met     shm write: 0.95 (bar >= 0.9, 95 % interval 0.94 to 0.96)"
