"""Statistics, rows and judges of the benches, and what a run says of its machine."""

import gc
import json
import math
import os
import random
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from tensorwire.bench import machine
from tensorwire.bench.harness import (
    Block,
    Budget,
    alternate,
    laps_of,
    median_interval,
    median_rank,
    paired_ratio,
    percentile,
    run_block,
    time_each,
    warm_up,
)
from tensorwire.bench.measuring import add_rows, measuring, take_turns
from tensorwire.bench.rows import Comparison, Report, Row, format_seconds, parse_size
from tensorwire.bench.svg import compact
from tensorwire.bench.verdicts import judge
from tensorwire.cli import main
from tensorwire_benchmarks import modes, modes_training, rpc, scaling
from tensorwire_benchmarks.figures import StepTimes, Turns
from tensorwire_benchmarks.verdicts import judge_links, judge_placement, judge_training

MIB = 1 << 20


# --- statistics -----------------------------------------------------------------------------------


# Ranks from the tables of the sign test, for 95 % two-sided.
@pytest.mark.parametrize(("count", "rank"), [(5, None), (6, 1), (9, 2), (20, 6), (100, 40)])
def test_median_rank_against_the_table(count: int, rank: int | None) -> None:
    assert median_rank(count) == rank


def test_median_interval_covers_as_often_as_it_says() -> None:
    generator = random.Random(7)
    covered = 0
    for _ in range(2000):
        interval = median_interval([generator.expovariate(1.0) for _ in range(20)])
        assert interval is not None
        covered += interval[0] <= math.log(2) <= interval[1]
    assert covered / 2000 == pytest.approx(0.9586, abs=0.02)  # of n = 20, ranks 6 and 15


def test_ratios_are_of_pairs() -> None:
    """Ignores what disturbs both."""
    disturbance = [1.0, 10.0, 3.0, 100.0, 2.0, 7.0, 1.5]
    ratio = paired_ratio([0.9 * factor for factor in disturbance], disturbance)
    assert ratio is not None
    assert (ratio.median, *(ratio.interval or ())) == pytest.approx((0.9, 0.9, 0.9))
    assert paired_ratio([], []) is None
    with pytest.raises(ValueError, match="cannot be paired"):
        paired_ratio([1.0], [])
    assert [percentile(list(range(1, 101)), part) for part in (0.5, 0.99, 1.0)] == [50, 99, 100]


def test_each_system_has_a_limit_right_after_it() -> None:
    order: list[str] = []

    def run(name: str, count: int) -> Block:
        order.append(name)
        return Block([1.0] * count, 0.1, 0.2, count)

    series = alternate(run, ["a", "b"], "limit", {"a": 2, "b": 3, "limit": 4}, 2)
    assert order == ["a", "limit", "b", "limit", "b", "limit", "a", "limit"]
    assert series["b"].cpu_per_operation() == pytest.approx((0.2 / 6, 0.4 / 6))


def test_turns_and_their_rows() -> None:
    order: list[str] = []
    ways = {name: (lambda name=name: order.append(name) or float(len(order))) for name in "ab"}
    found = take_turns(ways, 2)
    assert order == ["b", "a", "a", "b", "b", "a"], "the first of each are warm"
    assert found == {"a": [3.0, 6.0], "b": [4.0, 5.0]}
    report = Report("x", {})
    add_rows(report, "case", 8, {"own": [2.0], "limit": [1.0], "rival": [6.0]}, limit="limit")
    assert [row.ratio_to_limit for row in report.rows] == [0.5, None, None]
    assert [(item.rival, item.ratio) for item in report.comparisons] == [("rival", 3.0)]


def test_calls_are_timed_without_the_collector() -> None:
    calls: list[bool] = []
    assert len(time_each(lambda: calls.append(gc.isenabled()), 5)) == 5
    assert calls == [False] * 5
    assert gc.isenabled()
    figures = iter([100.0, 1.0, 1.0, 1.0])
    assert warm_up(lambda _: [next(figures)], max_s=1e9, max_count=4) == 1.0
    budget = Budget(case_s=1.0, block_s=1e-3, min_rounds=7, max_rounds=50, max_count=200)
    assert [budget.count(each) for each in (1e-6, 1e-4, 1.0)] == [200, 10, 1]
    assert [budget.rounds(each) for each in (0.1, 1e-6, 100.0)] == [10, 50, 7]
    assert [laps_of(10, 4), laps_of(3, 10)] == [[3, 3, 2, 2], [1, 1, 1]]
    block = run_block(lambda n: [1.0] * n, 3, os.getpid(), batch=5, extra_operations=1)
    assert (block.operations, block.cpu_seconds_remote >= 0) == (16, True)


# --- the machine ----------------------------------------------------------------------------------


def test_other_work_is_what_no_process_of_the_run_did(tmp_path: Path) -> None:
    def write(busy: int, mine: int, child: int) -> None:
        """Ticks: of each core, of this process, of a child that it started."""
        pages = {"stat": "".join(f"cpu{n} {busy} 0 0 900 9 9 9 0 0 0\n" for n in range(256))}
        me = os.getpid()
        for pid, parent, used in ((me, 1, mine), (2, me, child), (3, 2, child), (4, 1, 10**6)):
            pages[f"{pid}/stat"] = f"{pid} (a) b) S {parent} " + "0 " * 9 + f"{used} 0 0 0"
        for name, text in pages.items():
            (tmp_path / "proc" / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "proc" / name).write_text(text)

    cores, tick = len(os.sched_getaffinity(0)), os.sysconf("SC_CLK_TCK")
    write(0, 0, 0)
    others = machine.OtherWork(tmp_path)
    time.sleep(0.05)
    write(200, 100 * cores, 25 * cores)
    share = others.share()
    assert share is not None
    assert 0 < share <= 50 / tick / 0.05
    write(100, 100 * cores, 25 * cores)
    assert others.share() == 0, "ticks are counted at different moments"
    assert machine.OtherWork(tmp_path / "nowhere").share() is None


def test_a_run_says_who_else_was_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    for share, said in ((0.04, 0), (0.12, 1), (None, 1)):
        monkeypatch.setattr(machine.OtherWork, "share", lambda _, share=share: share)
        monkeypatch.setattr(machine, "warnings_about", lambda _: [])
        with measuring("x", {"rounds": 3}) as report:
            report.rows.append(Row("x", "case", "system", 8))
            raise KeyboardInterrupt
        assert (report.settings["interrupted"], len(report.rows)) == (True, 1)
        assert report.settings["other_work"] == share
        assert len(report.settings["warnings"]) == said
    json.dumps(machine.describe(), allow_nan=False)


def test_a_burning_process_is_other_work() -> None:
    """One that was not started by this process; it is a child of a shell that is gone."""
    program = "import os, time; e = time.monotonic() + 1\nwhile time.monotonic() < e: pass"
    others = machine.OtherWork()
    command = f"{sys.executable} -c '{program}' & "
    subprocess.run(["sh", "-c", command], check=True)
    time.sleep(1.2)
    share = others.share()
    assert share is not None
    assert share > 0.3 / len(os.sched_getaffinity(0))


def test_warnings_name_the_remedy() -> None:
    quiet = {"affinity": [0, 1], "cpu_quota": None, "governor": None}
    assert machine.warnings_about(quiet) == []
    loud = {"affinity": [0], "cpu_quota": 1.5, "governor": "powersave"}
    assert len(machine.warnings_about(loud)) == 3
    with pytest.raises(ProcessLookupError):
        machine.process_cpu_seconds(2**22 + 1)  # above the kernel's highest number


# --- rows -----------------------------------------------------------------------------------------


def row(case: str, system: str, size: int, ratio: float | None = None, **more: object) -> Row:
    figures = {"seconds_median": 1e-6, "seconds_p99": 2e-6, "ratio_to_limit": ratio} | more
    return Row("memory", case, system, size, **figures)  # type: ignore[arg-type]


def full_report() -> Report:
    """A report in which every bar is met."""
    rows = [
        row("shm.write", "tensorwire", 8),
        row("shm.write", "tensorwire-c++", 8, seconds_median=1e-7),
        row(
            "shm.write",
            "tensorwire",
            64 * MIB,
            0.97,
            ratio_interval=(0.95, 0.99),
            cpu_seconds_remote=0.0,
        ),
        row("shm.read", "tensorwire", MIB, 0.95, ratio_interval=(0.9, 1.0)),
        row("tcp.write", "tensorwire-c++", MIB, 0.92),
        row("tcp.read", "tensorwire-c++", MIB, 0.93),
        row("tcp.round_trip.one_core", "tensorwire-c++", 8, 0.8),
        row("tcp.round_trip.two_cores", "tensorwire-c++", 8, 1.5),
        row("shm.waiting", "tensorwire", 0, cpu_seconds_remote=1e-10),
        row("tcp.waiting", "tensorwire", 0, cpu_seconds_remote=1e-10),
        row("shm.signal_awake", "tensorwire", 8),
    ]
    comparisons = [
        Comparison(case, 8, "tensorwire", rival, 2.0, (1.9, 2.1), 10)
        for case in ("shm.write", "shm.read")
        for rival in ("nixl", "nixl-huge")
    ]
    return Report("memory", {"cpu": "none"}, rows, comparisons)


def test_a_file_has_all_that_counts_and_no_more(tmp_path: Path) -> None:
    report = full_report()
    report.rows.append(Row("memory", "shm.write", "nixl", 8, note="nixl is not installed"))
    report.verdicts = judge(report)
    report.settings["curve"] = [n / 7 for n in range(1000)]
    path = tmp_path / "memory.json"
    report.write(path)
    assert list(tmp_path.iterdir()) == [path]
    back = Report.load(path)
    assert (back.rows, back.comparisons) == (report.rows, report.comparisons)
    assert [v.line() for v in back.verdicts] == [v.line() for v in report.verdicts]
    data = json.loads(path.read_text())
    names, *_, last = data["rows"]
    assert {name: value for name, value in zip(names, last, strict=True) if value is not None} == {
        "case": "shm.write", "system": "nixl", "bytes": 8, "note": "nixl is not installed",
    }  # fmt: skip
    curve = data["settings"]["curve"]
    assert (len(curve), curve[0], curve[-1]) == (50, 0.0, 142.7)
    report.rows = [row("x", "y", 8, float("nan"), cpu_seconds_local=1.23456789)]
    report.write(path)
    (only,) = Report.load(path).rows
    assert (only.ratio_to_limit, only.cpu_seconds_local) == (None, 1.235)
    path.write_text('{"format": 1}')
    with pytest.raises(ValueError, match=r"memory\.json: not a bench report of format 2"):
        Report.load(path)


def show_again(path: Path, *more: str) -> str:
    """Returns the output of `bench memory --from`, without a measurement."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr("tensorwire.bench.memory.plan")
        return CliRunner().invoke(main, ["bench", "memory", "--from", str(path), *more]).output


def test_stored_rows_are_shown_and_drawn_again(tmp_path: Path, repository: Path) -> None:
    pytest.importorskip("matplotlib")
    assert "shm.write" in show_again(repository / "docs/measured/memory.json")
    stored, figure = tmp_path / "memory.json", tmp_path / "memory.svg"
    report = full_report()
    report.rows = report.rows[:3]
    report.write(stored)
    show_again(stored, "--figure", str(figure))
    drawn = figure.read_bytes()
    assert b"<text" in drawn, "letters are text, and no outlines"
    svg = "http://www.w3.org/2000/svg"
    exponent = "<tspan>10</tspan>"
    assert exponent in compact(f"<svg xmlns='{svg}'><style/><text>{exponent}</text></svg>")
    show_again(stored, "--figure", str(figure))
    assert figure.read_bytes() == drawn
    Report("training", {}).write(tmp_path / "rows.json")
    assert "rows of bench training, not of bench memory" in show_again(tmp_path / "rows.json")


def test_stored_results_are_small(repository: Path) -> None:
    folder = repository / "docs/measured"
    assert sum(path.stat().st_size for path in folder.iterdir()) <= 400_000
    for path in folder.glob("*.json"):
        report = Report.load(path)
        assert report.machine["time"], path
        assert "warnings" in report.settings, path


def test_sizes_and_seconds() -> None:
    assert [parse_size(each) for each in ("8", "64KiB", "1 MiB")] == [8, 65536, MIB]
    for wrong in ("", "0", "1.5MiB", "8 parsecs"):
        with pytest.raises(ValueError, match="no size"):
            parse_size(wrong)
    found = [format_seconds(s) for s in (None, 1.85e-6, 2.5, 999.7e-6, -0.002)]
    assert found == ["–", "1.85 µs", "2.5 s", "1 ms", "-2 ms"]


# --- bars -----------------------------------------------------------------------------------------


def test_bars_that_are_met_missed_and_not_measured() -> None:
    assert {verdict.met for verdict in judge(full_report())} == {True}
    report = full_report()
    report.rows.append(row("shm.write", "tensorwire", 256 * MIB, 0.8, ratio_interval=(0.78, 0.82)))
    line = judge(report)[0].line()
    for part in ("MISSED", "bar >= 0.9", "0.78 to 0.82", "0.1 away", "256 MiB", "1 of 2 sizes"):
        assert part in line
    nothing = judge(Report("memory", {}, [Row("memory", "shm.write", "nixl", 8, note="not here")]))
    assert {verdict.met for verdict in nothing} == {None}
    assert any("not here" in verdict.line() for verdict in nothing)


def test_an_exchange_is_from_the_last_gradient_to_the_slowest_worker() -> None:
    first = [StepTimes(0, 4, 6, 7, 0.25), StepTimes(10, 14, 18, 19, 0.25)]
    second = [StepTimes(1, 5, 8, 8, 0.25), StepTimes(10, 12, 17, 21, 0.25)]
    turns = Turns()
    turns.add([first, second], cpu_workers_s=3.0, cpu_server_s=1.0, warm=0)
    assert {what: each[0] for what, each in turns.samples.items()} == {
        "step": [8, 11], "exchange": [3, 4], "skew": [1, 2],
    }  # fmt: skip


@pytest.mark.parametrize(("ratio", "met"), [(0.6, True), (0.4, False)])
def test_steps_are_judged_by_their_limit(ratio: float, met: bool) -> None:
    for bench, own, case in (
        ("training", "tensorwire", "shm.x.exchange"),
        ("placement", "plan", "x/shm"),
    ):
        report = Report(bench, {}, [Row(bench, case, own, 8, 1.0, ratio_to_limit=ratio * 1.2)])
        judged = judge_training if bench == "training" else judge_placement
        assert judged(report, ["x"])[0].met is met
        assert {verdict.met for verdict in judged(Report(bench, {}), ["x"])} == {None}


def test_a_link_is_judged_by_its_limit_and_by_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """If cores and not the link are the bound, the slower link counts."""
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    rows = [
        Row("parameters", f"{wire}.net.isolated", system, MIB, 1.0, ratio_to_limit=ratio,
            cpu_seconds_local=cpu / 4, cpu_seconds_remote=cpu * 3 / 4)
        for wire, system, cpu, ratio in (
            ("1gbit", "tensorwire", 1.9, 0.96), ("1gbit", "grpc", 3.0, 0.9),
            ("5gbit", "tensorwire", 1.5, 0.97),
        )
    ]  # fmt: skip
    report = Report("parameters", {}, rows, settings={"wires": ["1gbit", "5gbit"]})
    found = judge_links(report, ["net"])
    assert [verdict.met for verdict in found] == [True, False, None, None]
    assert "75 % of all cores is busy" in found[2].detail


def test_what_links_let_through() -> None:
    """A megabyte of gradients, links of a megabyte per second."""
    step = {"forward_s": 1.0, "backward_s": 2.0, "ready": [(0, 2.0)]}
    recording = scaling.Recording("a net", [("w", [250, 1000])], "", ["lr"], [0.1], [], [step])
    found = [
        scaling.limit_seconds(scaling.Point(*point), recording, 1e6)
        for point in (
            ("sync", 1, 1),
            ("sync", 4, 1),
            ("sync", 4, 4),
            ("async", 4, 1),
            ("async", 8, 1),
        )
    ]
    assert found == [1 + 2 + 1, 1 + 4 + 4, 4, 4, 8]


def test_what_the_modes_could_gain_and_what_they_need() -> None:
    """By hand: two workers, the second pauses for three steps in its second one."""
    pauses = [[1.0] * 4, [1.0, 4.0, 1.0, 1.0]]
    assert [modes.ideal(pauses, bound)[0] for bound in (0, 1, 2, 3, None)] == [7, 6, 5, 4, 4]
    report = Report("modes", {}, [Row("modes", "slow", "async", 8, 1.0, 1.0)])
    report.compare("slow", 8, "async", "sync", [2.5], [1.0])
    report.compare("digits.4.steps", 8, "async", "sync", [0.7], [1.0])
    met = {verdict.name: verdict.met for verdict in modes.judge(report)}
    assert met["slow: steps per second, async beside sync"] is False
    assert met["digits: steps to the loss of sync, async"] is True
    assert met["stalls: steps per second, bounded beside sync"] is None
    run = {"task": "digits", "workers": 4, "system": "sync", "steps": [0]}
    curves = [run | {"seed": n, "seconds": [float(n)], "loss": [1.0 / n]} for n in (1, 2, 4)]
    assert modes_training.middles(curves) == [run | {"seconds": [2.0], "loss": [0.5]}]


def test_a_missed_bar_names_the_limit_of_the_sizes_that_miss_it() -> None:
    bar = rpc._against("tcp", "bytes", 1.2, MIB, float("inf"))
    for own, limit, expected in (
        ((1.0, 1.3), 1.1, "beyond this machine, in-turn-bytes: 1.1 x as fast"),
        ((1.3, 1.0), 3.0, "in-turn-bytes: 3 x as fast"),
    ):
        report = Report("rpc", {})
        for size, ratio in zip((MIB, 2 * MIB), own, strict=True):
            report.compare("tcp.unary", size, "bytes", "grpcio", [ratio], [1.0])
            report.compare("tcp.unary", size, "in-turn-bytes", "grpcio", [limit], [1.0])
        verdict = rpc._with_limit(bar, bar.judge(report), report)
        assert verdict.detail.split("; ")[-1] == expected
    held = {"held": {"shm.descriptors": {"grpcio": 50, "bytes": 101}}}
    missed = rpc._held(Report("rpc", {}, settings=held), "shm", "descriptors", "bytes")
    assert replace(missed, name="") == replace(missed, name="", met=False, detail="101 by 50")
