"""The pure parts of `bench placement`: bars, the parts of a step, and the processes per machine."""

from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from tensorwire.bench.harness import Ratio
from tensorwire.bench.rows import Comparison, Report, Row
from tensorwire_benchmarks.bench import Settings
from tensorwire_benchmarks.benches import PLACEMENT
from tensorwire_benchmarks.contest import WireContest
from tensorwire_benchmarks.figures import (
    End,
    StepTimes,
    Turns,
    seconds_of,
)
from tensorwire_benchmarks.report import draw_placement, parts_of, print_placement
from tensorwire_benchmarks.systems import (
    COMPUTATION,
    COPY,
    GRPC,
    GRPC_ATTACHED,
    GRPC_RUNTIME,
    LIMIT,
    PLAN,
)
from tensorwire_benchmarks.verdicts import (
    judge_bits,
    judge_in_place,
    judge_overhead,
    judge_placement,
    judge_planning,
)
from tensorwire_benchmarks.workloads.catalog import Workload

MIB = 1 << 20
NETWORK = Workload("fcn5", "plain:Perceptron", "", 1, 1, arguments=(1 << 14, 1 << 14))  # 1 GiB


def contest_of(*systems: str) -> WireContest:
    pytest.importorskip("torch")
    settings = Settings((NETWORK,), ("tcp",), systems or PLACEMENT.names)
    return WireContest(PLACEMENT, settings, NETWORK, "tcp")


# --- parts of a step ----------------------------------------------------------------------------


def test_parts_are_those_of_the_slowest_worker() -> None:
    first = [StepTimes(0, 2, 5, 6, 7, 0), StepTimes(10, 11, 15, 16, 17, 0)]
    second = [StepTimes(0, 1, 6, 7, 8, 0), StepTimes(10, 13, 14, 15, 16, 0)]
    assert seconds_of("forward", [first, second]) == [2, 3]
    assert seconds_of("backward", [first, second]) == [5, 4]
    turns = Turns()
    turns.add([first, second], 0, 0, 1)
    assert (turns.samples["forward"], turns.samples["backward"]) == ([[3]], [[4]])


def report(copy_exposed_s: float = 0.2, ratio_to_limit: float = 0.8) -> Report:
    def row(wire: str, what: str, system: str, seconds: float, ratio: float | None = None) -> Row:
        case = PLACEMENT.case(wire, "fcn5", what)
        return Row("placement", case, system, 1000, seconds, ratio_to_limit=ratio)

    rows = []
    for wire in ("shm", "tcp"):
        exposed = {"plan": 0.05, "copy": copy_exposed_s, "grpc": 0.9, GRPC_RUNTIME.name: 0.4}
        for system, seconds in exposed.items():
            rows += [
                row(wire, "step", system, 0.15 + seconds),
                row(wire, "exchange", system, seconds, ratio_to_limit),
                row(wire, "isolated", system, seconds, ratio_to_limit),
                row(wire, "hidden", system, 0.01),
                row(wire, "exposed", system, seconds),
            ]
        rows += [
            row(wire, "step", "computation", 0.15),
            row(wire, "forward", "computation", 0.05),
            row(wire, "backward", "computation", 0.1),
            row(wire, "exchange", "limit", 0.04),
        ]
    found = Report("placement", {"cpu": "x"}, rows, settings={"workers": 2, "warnings": []})
    for case, rival, ratio in (
        ("fcn5/shm", "grpc", 18.0), ("fcn5/shm", "grpc-tensorwire", 2.0),
        ("fcn5/shm", "copy", 4.0), ("fcn5/tcp", "grpc", 4.5),
    ):  # fmt: skip
        found.comparisons.append(Comparison(case, 1000, "plan", rival, ratio, None, 3))
        isolated = Comparison(f"{case}/isolated", 1000, "plan", rival, ratio + 1, None, 3)
        found.comparisons.append(isolated)
    return found


def test_parts_are_found_for_every_system_and_wire() -> None:
    parts = parts_of(report())
    assert set(parts) == {
        (f"fcn5/{w}", s)
        for w in ("shm", "tcp")
        for s in ("plan", "copy", "grpc", GRPC_RUNTIME.name)
    }
    wanted = {"forward": 0.05, "backward": 0.1, "hidden": 0.01, "exposed": 0.2}
    assert parts["fcn5/shm", "copy"] == wanted


def test_without_computation_there_are_no_parts() -> None:
    found = report()
    found.rows = [row for row in found.rows if row.system != "computation"]
    assert parts_of(found) == {}


def test_the_figure_and_the_tables_show_the_parts(tmp_path: Path) -> None:
    console = Console(width=120, record=True, quiet=True)
    print_placement(report(), console)
    with console.capture() as capture:
        console.quiet = False
        print_placement(report(), console)
    text = capture.get()
    assert "fcn5/shm/step" in text
    assert "fcn5/shm/exposed" not in text
    assert "57 %" in text  # 0.2 of 0.35
    pytest.importorskip("matplotlib")
    path = tmp_path / "placement.svg"
    draw_placement(report(), path)
    assert path.read_text().startswith("<?xml")
    with pytest.raises(ValueError, match="no step"):
        draw_placement(Report("placement", {}), path)


# --- bars ---------------------------------------------------------------------------------------


def test_all_bars_are_met() -> None:
    verdicts = judge_placement(report(), ["fcn5"])
    assert [(verdict.bar, verdict.met) for verdict in verdicts] == [
        (1.5, True), (1.5, True), (15.0, True), (15.0, True), (15.0, True), (2.69, True),
        (4.0, True), (4.0, True), (4.0, True), (1.5, True), (1.5, True), (1.5, True), (0.95, None),
    ]  # fmt: skip
    assert [verdicts[i].measured for i in (0, 1)] == pytest.approx([1.25, 1.25])
    assert [verdicts[i].measured for i in (2, 3, 4)] == pytest.approx([19.0, 18.0, 18.0])
    assert verdicts[5].measured == 3.0
    assert [verdicts[i].measured for i in (9, 10, 11)] == pytest.approx([4.0, 5.0, 4.0])


def test_a_link_has_a_bar_of_its_own() -> None:
    for ratio, met in ((0.96, True), (0.94, False)):
        found = Report("placement", {}, settings={"wires": ["1gbit"]})
        row = Row("placement", "fcn5/1gbit", "plan", 1000, 1.0, ratio_to_limit=ratio)
        found.rows.append(row)
        assert judge_placement(found, ["fcn5"])[-1].met is met
    assert judge_placement(found, ["lstm", "fcn5"])[-1].met is False
    assert [verdict.name.split()[0] for verdict in judge_placement(found, ["lstm"])][
        -1
    ] == "lstm/1gbit"


def test_where_computation_takes_more_copying_is_not_judged() -> None:
    """Unless communication dominates in the paper, as with fcn5."""
    found = report(copy_exposed_s=0.1)
    assert judge_placement(found, ["fcn5"])[10].met is True
    found.rows = [replace(row, case=row.case.replace("fcn5", "gru")) for row in found.rows]
    judged = [verdict for verdict in judge_placement(found, ["gru"]) if "copy" in verdict.name]
    assert [verdict.met for verdict in judged] == [None]
    assert "computation takes more" in judged[0].line()


def test_differences_that_are_noise_give_no_ratio() -> None:
    none = judge_placement(report(copy_exposed_s=-0.01), ["fcn5"])[9]
    assert (none.met, none.measured) == (None, None)
    found = report()
    found.rows = [
        replace(row, seconds_median=-0.01)
        if (row.case, row.system) == ("fcn5/shm/exposed", "plan")
        else row
        for row in found.rows
    ]
    most = judge_placement(found, ["fcn5"])[9]
    assert (most.met, most.measured, most.detail) == (True, 100.0, "100 or more")


def test_missed_and_unmeasured_bars_are_not_met() -> None:
    assert judge_placement(report(ratio_to_limit=0.5), ["fcn5"])[0].met is False
    verdicts = judge_placement(Report("placement", {}), ["alexnet", "lstm"])
    assert len(verdicts) == 17  # lstm has no bar beside grpc on shm; none asked for a link
    assert {verdict.met for verdict in verdicts} == {None}


def test_bits_must_be_equal_after_as_many_steps() -> None:
    end = End(30, ["a", "a"], 0.0)
    assert judge_bits("x", {"plan": end, "copy": end}).met
    for other in (End(30, ["a", "b"], 0.0), End(30, ["b", "b"], 0.0)):
        verdict = judge_bits("x", {"plan": end, "copy": other})
        assert verdict.met is False
        assert "differ after 30" in verdict.line()
    few = End(19, ["a", "a"], 0.0)
    assert judge_bits("x", {"plan": few, "copy": few}).met is False
    assert judge_bits("x", {"plan": end, "copy": few}).met is None
    assert judge_bits("x", {"plan": end}).met is None


def test_99_percent_of_the_bytes_must_be_in_place() -> None:
    for share, met in ((0.9901, True), (0.9899, False), (None, None)):
        verdict = judge_in_place("x", {"plan": End(30, ["a"], 0.0, share), "copy": End(30, [], 0)})
        assert verdict.met is met
    assert judge_in_place("x", {"copy": End(30, ["a"], 0.0, 1.0)}).met is None


def test_overhead_counts_with_30_pairs() -> None:
    assert judge_overhead("x", Ratio(1.02, None, 30)).met is True
    assert judge_overhead("x", Ratio(1.03, None, 30)).met is False
    few = judge_overhead("x", Ratio(1.0, None, 29))
    assert few.met is None
    assert few.line().startswith("not measured")
    assert "1 x after 29 pairs; it counts from 30 on" in few.line()
    assert judge_overhead("x", None, "no compiler").line().endswith("no compiler")


def test_planning_is_what_the_first_steps_take_longer_and_at_least_the_learning() -> None:
    verdict = judge_planning("x", (3.0, 0.1))
    assert (verdict.measured, verdict.met) == (3.0, True)
    assert "3 s more than copy; learning allocations 100 ms" in verdict.line()
    saved = judge_planning("x", (-3.0, 0.1))
    assert (saved.measured, saved.met) == (0.1, True)
    assert "3 s less than copy" in saved.line()
    assert judge_planning("x", (10.1, 0.1)).met is False
    assert judge_planning("x", (-1.0, 10.1)).met is False
    assert judge_planning("x", None, "no compiler").met is None


# --- memory -------------------------------------------------------------------------------------


def test_systems_live_together_where_memory_suffices() -> None:
    contest = contest_of()
    names = list(PLACEMENT.names)
    assert contest._groups(256 << 30) == [names]
    assert contest._groups(None) == [names]


def test_else_they_live_in_groups_in_the_order_of_turns() -> None:
    contest = contest_of()
    assert contest._groups(26 << 30) == [
        [PLAN.name, LIMIT], [COPY.name, COMPUTATION.name], [GRPC.name], [GRPC_ATTACHED.name],
        [GRPC_RUNTIME.name],
    ]  # fmt: skip
    assert [len(group) for group in contest._groups(1 << 30)] == [1] * 7


def test_only_what_was_asked_for_runs() -> None:
    contest = contest_of("grpc", "plan")
    assert contest._groups(None) == [[PLAN.name, GRPC.name]]
    assert [(row.case, row.system) for row in contest.rows()] == [
        ("fcn5/tcp/step", "plan"), ("fcn5/tcp/step", "grpc"),
        ("fcn5/tcp", "plan"), ("fcn5/tcp", "grpc"),
        ("fcn5/tcp/isolated", "plan"), ("fcn5/tcp/isolated", "grpc"),
    ]  # fmt: skip
