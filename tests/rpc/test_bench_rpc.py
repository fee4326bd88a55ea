"""The bench of calls runs, and says what it did not measure."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from tensorwire.bench.processes import ProcessPair
from tensorwire.bench.rows import Comparison, Report
from tensorwire.bench.verdicts import MIB
from tensorwire.cli import main
from tensorwire_benchmarks import rpc, rpc_names


@pytest.mark.slow
def test_some_rows_of_everything(tmp_path: Path) -> None:
    file = tmp_path / "rpc.json"
    options = ["--quick", "--sizes", "8,1MiB", "--wires", "shm", "--json", str(file)]
    result = CliRunner().invoke(main, ["bench", "rpc", *options])
    assert result.exit_code == 0, result.output
    report = json.loads(file.read_text())
    cases = {(row["case"], row["system"], row["bytes"]) for row in report["rows"]}
    systems = (
        "grpcio",
        "bytes",
        "tensor",
        "runtime",
        "by-hand",
        "memcpy",
    )  # torch RPC is slow to begin
    unary = {("shm.unary", system, size) for size in (8, 1 << 20) for system in systems}
    unary |= {("shm.unary", system, 1 << 20) for system in rpc_names.LARGE_LIMITS}
    unary |= {("shm.unary", system, 8) for system in rpc_names.SMALL_LIMITS.values()}
    crowd = {("shm.clients16", system, 8) for system in ("grpcio", "bytes", "runtime", "by-hand")}
    assert cases == unary | crowd
    assert all(row["seconds_median"] > 0 for row in report["rows"])
    assert len(report["comparisons"]) == 15
    met = {verdict["name"]: verdict["met"] for verdict in report["verdicts"]}
    assert met["shm bytes against grpcio's bytes, at 1 MiB"] is not None
    assert met["shm bytes against grpcio's bytes, at 64 MiB"] is None
    assert met["shm runtime, small calls against grpcio's"] is not None
    assert met["shm unary bytes against grpcio's bytes, 8 B to 64 MiB, upper end"] is not None
    assert met["shm aio bytes against grpcio's bytes, 8 B to 64 MiB, upper end"] is None
    assert met["shm runtime, of the speed by hand, 8 B to 4 MiB"] is not None
    assert met["shm bytes, descriptors by grpcio's"] is None
    assert met["shm runtime, p99 of small calls by grpcio's"] is not None
    assert met["shm runtime, calls of 16 clients for each CPU second, by grpcio's"] is not None
    assert met["tcp runtime, p99 of small calls by grpcio's"] is None


@pytest.mark.slow
def test_every_case(tmp_path: Path) -> None:
    """All systems of all cases have rows, torch RPC among them."""
    sizes = (8, 1 << 20)
    settings = rpc.RpcSettings(sizes, wires=("shm",), rounds=1, block_s=0.01, channels=40)
    report = rpc.run(settings, lambda *_: None)
    found = {(row.case, row.system) for row in report.rows}
    assert found == {
        (f"shm.{case}", system) for case in rpc_names.CASES for system in rpc_names.SYSTEMS[case]
    }
    assert [row for row in report.rows if not row.measured] == []
    total = {row.bytes for row in report.rows if row.case == "shm.skew"}
    assert total == {6 * (1 << 20) + 3 * (10 << 10) + 16}
    rivals = {each.system for each in report.comparisons if each.case == "shm.aio"}
    assert rivals == {"bytes", "tensor", "runtime", "grpcio-marked", "grpcio-tensor"}
    held = report.settings["held"]
    assert held.keys() == {"shm.descriptors", "shm.slow_reader"}
    assert held["shm.descriptors"]["grpcio"] >= 20
    met = {verdict.name: verdict.met for verdict in report.verdicts}
    for system in ("bytes", "runtime"):
        assert met[f"shm {system}, a channel for each call"] is not None
        assert met[f"shm {system}, descriptors by grpcio's"] is not None
        assert met[f"shm {system}, slow reader by grpcio's"] is not None


@pytest.mark.slow
def test_many_processes_by_both_wires() -> None:
    """Servers have 64 attachments, and each process has those alone that it calls by."""
    case = f"processes{rpc_names.CLIENTS[-1]}"
    report = rpc.run(rpc.RpcSettings(cases=(case,), rounds=1, block_s=0.01), lambda *_: None)
    found = {(row.case, row.system) for row in report.rows if row.measured}
    assert found == {
        (f"{wire}.{case}", system) for wire in rpc_names.WIRES for system in rpc_names.SYSTEMS[case]
    }


def test_a_missed_bar_names_the_limit_of_the_sizes_that_miss_it() -> None:
    bar = rpc._against("tcp", "bytes", 1.2, MIB, float("inf"))
    for at_one, at_two, limit_at_two, expected in (
        (1.0, 1.3, 3.0, "beyond this machine, in-turn-bytes: 1.1 x as fast"),
        (1.3, 1.0, 3.0, "in-turn-bytes: 3 x as fast"),
        (1.0, 1.0, 3.0, "in-turn-bytes: 1.1 x as fast"),
        (1.0, 1.0, None, "in-turn-bytes: 1.1 x as fast"),
        (1.3, 1.3, 0.5, ""),
    ):
        report = Report("rpc", {})
        for system, size, ratio in (
            ("bytes", MIB, at_one), ("bytes", 2 * MIB, at_two),
            ("in-turn-bytes", MIB, 1.1), ("in-turn-bytes", 2 * MIB, limit_at_two),
        ):  # fmt: skip
            if ratio is not None:
                report.comparisons.append(
                    Comparison("tcp.unary", size, system, "grpcio", ratio, None, 1)
                )
        verdict = rpc._with_limit(bar, bar.judge(report), report)
        assert verdict.detail.split("; ")[-1].endswith(expected), verdict
        assert ("beyond" in verdict.detail) == ("beyond" in expected)


def test_a_bar_of_equal_speed_names_the_limit_of_payload_in_its_message() -> None:
    (bar,) = [each for each in rpc.BARS if each.name.startswith("tcp unary tensor against")]
    for size, ratio, expected in (
        (8, 0.88, "beyond this machine, grpcio-tensor: 0.88"),
        (1 << 18, 0.95, "grpcio-tensor: 0.95"),
    ):
        report = Report("rpc", {})
        for system, found in (("tensor", 0.8), ("grpcio-tensor", ratio), ("in-turn", 2.0)):
            report.comparisons.append(
                Comparison("tcp.unary", size, system, "grpcio", found, None, 1)
            )
        assert rpc._with_limit(bar, bar.judge(report), report).detail == expected


def test_what_is_held_is_judged_by_what_grpcio_holds() -> None:
    report = Report("rpc", {}, settings={"held": {"shm.descriptors": {"grpcio": 50, "bytes": 101}}})
    missed = rpc._held(report, "shm", "descriptors", "bytes")
    assert (missed.met, missed.detail) == (False, "101 by 50")
    assert rpc._held(report, "shm", "descriptors", "runtime").met is None
    assert rpc._held(report, "tcp", "slow_reader", "bytes").met is None


def test_sizes_that_cannot_be() -> None:
    result = CliRunner().invoke(main, ["bench", "rpc", "--sizes", "9"])
    assert result.exit_code == 2
    assert "no multiple of 8" in result.output


@pytest.mark.slow
def test_many_requests_between_two_processes() -> None:
    """Named for a bug: a write that was done while somebody looked at it ended the client."""
    with ProcessPair("tensorwire_benchmarks.rpc_pair", {"wires": ["tcp"]}) as pair:
        assert len(pair.call("time", "tcp", "requests", "runtime", 4096, 5000)) > 0
