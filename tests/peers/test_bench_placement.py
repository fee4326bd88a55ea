"""A tiny `bench placement` trains every workload with every system, and has honest reasons.

No timed assertion.
"""

import importlib.util
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from tensorwire.bench.processes import ProcessPair
from tensorwire.bench.rows import Report
from tensorwire.cli import main
from tensorwire_benchmarks import contest, link
from tensorwire_benchmarks.bench import Bench, Settings
from tensorwire_benchmarks.benches import PLACEMENT
from tensorwire_benchmarks.engine import run
from tensorwire_benchmarks.systems import (
    COMPUTATION,
    GRPC,
    GRPC_ATTACHED,
    GRPC_RUNTIME,
    PLAN,
    System,
)
from tensorwire_benchmarks.traffic import Traffic
from tensorwire_benchmarks.workloads.catalog import WORKLOADS, Workload, workload

pytest.importorskip("torch")
pytest.importorskip("tensorwire.torch")
needs_grpc = pytest.mark.skipif(GRPC.missing() is not None, reason=str(GRPC.missing()))


# One test has the twins of grpc as well: they are the same program.
TWINS = (GRPC_ATTACHED.name, GRPC_RUNTIME.name)
SYSTEMS = tuple(name for name in PLACEMENT.names if name not in TWINS)


def tiny(*names: str, bench: Bench = PLACEMENT, **changes: object) -> Report:
    models = [workload(name).reduced() for name in names]
    settings = Settings(models, ("shm",), SYSTEMS, steps=12, turns=6)
    for name, value in changes.items():
        setattr(settings, name, value)
    return run(bench, settings)


def check(report: Report, model: Workload, wire: str, systems: set[str]) -> None:
    """All rows are there, all systems were at the same place, and copy has the bits of plan."""
    rows = {(row.case, row.system): row for row in report.rows}
    case = f"{model.name}/{wire}"
    for row in rows.values():
        assert row.measured, (row.case, row.system, row.note)
        assert row.bytes == model.traffic(2).up_bytes
    assert {system for what, system in rows if what == case} == systems - {"computation"}
    assert {system for what, system in rows if what == f"{case}/step"} == systems - {"limit"}
    exchanging = systems - {"computation", "limit"}
    for system in exchanging:
        assert (rows[case, system].ratio_to_limit is not None) == ("limit" in systems)
        assert rows[case, system].cpu_seconds_remote is not None
        assert (rows[f"{case}/isolated", system].ratio_to_limit is not None) == ("limit" in systems)
    assert {system for what, system in rows if what == f"{case}/isolated"} == exchanging
    assert {system for what, system in rows if what == f"{case}/hidden"} == exchanging
    computed = {"computation"} & systems
    assert {system for what, system in rows if what == f"{case}/exposed"} == (
        exchanging if computed else set()
    )
    for part in ("forward", "backward"):
        assert {system for what, system in rows if what == f"{case}/{part}"} == computed
    assert not any("different parameters" in text for text in report.settings["warnings"])
    bits = [
        verdict for verdict in report.verdicts if verdict.name == f"{case} bits of plan and copy"
    ]
    assert [(verdict.met, verdict.measured) for verdict in bits] == [(True, 41.0)]
    (share,) = [each for each in report.verdicts if each.name == f"{case} gradient bytes in place"]
    assert share.measured is not None
    # Of a tiny one the offsets that an LSTM of torch shares are not few bytes. Rows have no place.
    dense = sum(tensor.size_bytes for tensor in model.tensors() if not tensor.sparse)
    most = dense / model.traffic(2).up_bytes
    assert share.measured > (95 if model.name == "bilstm" else 99 * most - (most < 1))


@pytest.mark.slow
def test_what_placement_costs_alone() -> None:
    report = tiny("lstm", wires=("alone",))
    assert [(row.case, row.system) for row in report.rows] == [
        ("lstm/alone/step", "plan"), ("lstm/alone/step", "copy"),
        ("lstm/alone/first", "plan"), ("lstm/alone/first", "copy"),
        ("lstm/alone/planning", "plan"),
    ]  # fmt: skip
    assert all(row.measured for row in report.rows)
    assert all(row.cpu_seconds_local for row in report.rows[:2])
    first, planning = report.rows[2].seconds_median, report.rows[4].seconds_median
    assert first is not None
    assert planning is not None
    assert 0 < planning < first
    overhead, begin = (each for each in report.verdicts if "/alone" in each.name)
    assert (overhead.met, overhead.measured) == (None, None)
    assert "after 12 pairs; it counts from 30 on" in overhead.line()
    assert begin.measured is not None
    assert begin.measured >= planning
    assert begin.met is True


def test_without_the_allocator_placement_costs_nothing_that_counts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for variable in ("XDG_CACHE_HOME", "XDG_RUNTIME_DIR"):
        monkeypatch.setenv(variable, str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CXX", "")
    report = tiny("lstm", wires=("alone",))
    assert len(report.rows) == 5
    assert not any(row.measured for row in report.rows)
    alone = [each for each in report.verdicts if "/alone" in each.name]
    assert [each.met for each in alone] == [None, None]
    assert all("no C++ compiler was found" in each.line() for each in alone)


# `check` looks at the bits of these in the tests below; and of these the layers are like those of
# others: convolutions, cells, large matrices. That each of them can be trained is in tests/unit.
ELSEWHERE = {"lstm", "moe", "dlrm"} | {"alexnet", "vgg16", "inception-v3", "gru", "fcn5"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "model",
    [model for model in WORKLOADS if model.name not in ELSEWHERE],
    ids=lambda model: model.name,
)
def test_placement_and_copying_compute_the_same_bits(model: Workload) -> None:
    found = tiny(model.name, systems=("plan", "copy"))
    check(found, model.reduced(), "shm", {"plan", "copy"})


@pytest.mark.slow
@needs_grpc
@pytest.mark.parametrize(("name", "systems"), [("moe", PLACEMENT.names), ("dlrm", SYSTEMS)])
def test_all_systems_take_part_over_tcp(name: str, systems: Sequence[str]) -> None:
    found = tiny(name, wires=("tcp",), systems=systems)
    check(found, workload(name).reduced(), "tcp", set(systems))
    rivals = set(systems) - {"plan", "limit", "computation"}
    assert {item.rival for item in found.comparisons} == rivals
    assert {item.system for item in found.comparisons} == {"plan"}


@pytest.mark.slow
@needs_grpc
def test_of_sparse_gradients_rows_move() -> None:
    """Whatever optimizer is asked for; the limit's bytes are those of the rows."""
    systems = ("limit", "computation", "grpc")
    found = tiny("dlrm", wires=("tcp",), systems=systems, steps=6, optimizer="adamw")
    model = workload("dlrm").reduced()
    traffic = model.traffic(2)
    rows = {(row.case, row.system): row for row in found.rows}
    for row in rows.values():
        assert row.measured, (row.case, row.system, row.note)
        assert row.bytes == traffic.up_bytes
    limit, grpc = rows["dlrm/tcp", "limit"], rows["dlrm/tcp", "grpc"]
    assert limit.seconds_median is not None
    assert limit.gb_per_s == pytest.approx(traffic.up_bytes / limit.seconds_median / 1e9)
    assert "only the rows that are looked up" in limit.note
    assert "and rows of 26 tables in" in grpc.note
    assert "optimizer plain-sgd" in grpc.note
    assert not any("different parameters" in text for text in found.settings["warnings"])


NO_LINK = link.missing(1000)


@pytest.mark.slow
@needs_grpc
@pytest.mark.skipif(NO_LINK is not None, reason=str(NO_LINK))
def test_all_systems_take_part_between_two_hosts() -> None:
    before = namespaces()
    found = tiny("lstm", wires=("1gbit",))
    check(found, workload("lstm").reduced(), "1gbit", set(SYSTEMS))
    notes = {row.system: row.note for row in found.rows if row.case == "lstm/1gbit"}
    assert "both ways at once" in notes["limit"]
    assert "over TCP, 1000 Mbit/s" in notes["plan"]
    assert namespaces() == before


@pytest.mark.skipif(NO_LINK is not None, reason=str(NO_LINK))
def test_the_limit_between_two_hosts_is_that_of_the_link() -> None:
    """512 KiB from each of two workers, both ways at once, take 8.4 ms over 1 Gbit/s."""
    elements = 1 << 17
    with link.two_hosts(1000) as hosts:
        traffic = Traffic.dense(elements, 2)
        options = {"wire": "1gbit", "traffic": traffic, "workers": 2, "threads": 1,
                   "optimizer": "sgd", "hosts": hosts}  # fmt: skip
        with ProcessPair("tensorwire_benchmarks.limit", options) as pair:
            samples, _, _ = pair.call("block", 20)
    least_s = 2 * 4 * elements * 8 / 1e9
    burst_s = 1e-3  # what the bucket lets through at once, per direction
    for apply_s, both_s, nothing_s in samples:
        assert 0 < apply_s
        assert both_s > least_s - 2 * burst_s
        assert nothing_s == 0


def test_without_the_right_there_is_a_reason_and_no_host(monkeypatch: pytest.MonkeyPatch) -> None:
    before = namespaces()
    monkeypatch.setenv("PATH", "")
    assert link.missing(1000) == "ip is missing: apt-get install iproute2"
    found = tiny("lstm", wires=("1gbit",), systems=("plan", "limit"))
    assert {row.note for row in found.rows} == {"ip is missing: apt-get install iproute2"}
    assert not any(row.measured for row in found.rows)
    assert "ip is missing" in " ".join(verdict.detail for verdict in found.verdicts)
    assert namespaces() == before


def namespaces() -> set[str]:
    folder = Path("/run/netns")
    if not folder.is_dir():
        return set()
    return {path.name for path in folder.iterdir() if path.name.startswith("twb")}


@pytest.mark.slow
@needs_grpc
def test_without_memory_they_live_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contest.machine, "memory_bytes", lambda key="MemTotal": 1 << 20)
    found = tiny("lstm")
    check(found, workload("lstm").reduced(), "shm", set(SYSTEMS))
    notes = {row.system: row.note for row in found.rows if row.case == "lstm/shm"}
    assert "resident with nobody for lack of memory" in notes["plan"]
    assert "resident with nobody for lack of memory" in notes["grpc"]
    step = next(row for row in found.rows if row.system == "computation")
    assert step.note.startswith("resident with nobody for lack of memory; pairs with")


@pytest.mark.slow
def test_what_is_missing_or_broken_is_a_row() -> None:
    absent = System("grpc", "x", (("a_module_that_nobody_has", "pip install it"),), None, {})
    broken = System("copy", "a_module_that_nobody_has", (), None, {"shm": ""})
    found = tiny("gru", bench=replace(PLACEMENT, systems=(PLAN, broken, COMPUTATION, absent)))
    notes = {row.system: row.note for row in found.rows if not row.measured}
    assert "pip install it" in notes["grpc"]
    assert "ModuleNotFoundError" in notes["copy"]
    assert set(notes) == {"grpc", "copy"}
    unjudged = [verdict for verdict in found.verdicts if "copy" in verdict.name]
    assert {verdict.met for verdict in unjudged} == {None}


# --- the command --------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_command_writes_rows_and_draws(tmp_path: Path) -> None:
    path, figure = tmp_path / "placement.json", tmp_path / "placement.svg"
    has_figure = importlib.util.find_spec("matplotlib") is not None
    result = CliRunner().invoke(
        main,
        ["bench", "placement", "--tiny", "--workload", "fcn5", "--wire", "shm", "--steps", "6",
         "--systems", "plan", "--systems", "computation", "--strict", "--json", str(path)]
        + (["--figure", str(figure)] if has_figure else []),
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "what a step is made of" in result.output
    data = json.loads(path.read_text())
    assert {(row["case"], row["system"]) for row in data["rows"]} == {
        ("fcn5/shm", "plan"),
        *((f"fcn5/shm/{part}", "plan") for part in ("isolated", "step", "hidden", "exposed")),
        *((f"fcn5/shm/{part}", "computation") for part in ("step", "forward", "backward")),
    }
    assert data["settings"]["workloads"][0]["tensors"] == 10
    assert figure.exists() == has_figure


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--workload", "lenet"], "unknown; choose from alexnet, inception-v3"),
        (["--systems", "tensorwire"], "unknown; choose from plan, limit, copy"),
        (["--wire", "rope"], "unknown; choose from shm, tcp"),
        (["--json", "/nowhere/at/all.json"], "does not exist"),
    ],
)
def test_bad_options_say_what_to_write(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(main, ["bench", "placement", *arguments])
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())
