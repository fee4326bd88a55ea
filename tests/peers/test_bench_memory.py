"""A quick `bench memory` gives all rows, with all keys, and honest reasons. No timed assertion."""

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from tensorwire.bench import memory, rivals
from tensorwire.bench.harness import Budget
from tensorwire.bench.processes import PairError, ProcessPair
from tensorwire.bench.rows import Report
from tensorwire.cli import main

TINY = Budget(case_s=0.02, block_s=2e-4, min_rounds=7, max_rounds=7, max_count=20)


def tiny(**changes: object) -> memory.MemorySettings:
    settings = memory.MemorySettings(
        sizes=(8, 4096), systems=("tensorwire", "tensorwire-c++", "memcpy", "raw-socket"),
        budget=TINY, warm_s=0.01, waiting_s=0.7,
    )  # fmt: skip
    for name, value in changes.items():
        setattr(settings, name, value)
    return settings


@pytest.fixture(scope="module")
def report() -> Report:
    return memory.run(tiny())


def test_every_planned_case_is_measured(report: Report) -> None:
    for case in memory.plan(tiny()):
        row = report.find(case.name, "tensorwire", case.size_bytes)
        assert row is not None
        if case.name.endswith("two_cores") and not case.pins:
            assert row.note
            continue
        assert row.measured, row
        assert row.operations > 0
        assert row.cpu_seconds_remote is not None


def test_ratios_exist_exactly_where_bytes_move(report: Report) -> None:
    for row in report.rows:
        if row.system not in ("tensorwire", "tensorwire-c++") or not row.measured:
            continue
        moves = row.case.partition(".")[2].startswith(("write", "read", "batch", "round"))
        assert (row.ratio_to_limit is not None) == moves, row
        assert (row.ratio_interval is not None) == moves, row
        assert (row.gb_per_s is not None) == moves, row


def test_the_limit_stands_beside(report: Report) -> None:
    for wire, limit in (("shm", "memcpy"), ("tcp", "raw-socket")):
        for action in ("write", "read"):
            row = report.find(f"{wire}.{action}", limit, 4096)
            assert row is not None
            assert row.measured


def test_verdicts_and_circumstances_are_part_of_it(report: Report) -> None:
    assert len(report.verdicts) == 16
    assert report.machine["cores"] >= 1
    assert report.settings["interrupted"] is False
    nixl = [verdict for verdict in report.verdicts if "NIXL" in verdict.name]
    assert [verdict.met for verdict in nixl] == [None] * 4


def test_a_missing_rival_is_a_row_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    absent = rivals.Rival(
        name="nixl",
        module="tensorwire_benchmarks.rivals.nixl",
        needs=(("a_module_that_nobody_has",),),
        remedy="pip install it",
        cases=("write",),
        options={"shm": {}},
    )
    monkeypatch.setattr(memory, "RIVALS", (absent,))
    found = memory.run(
        tiny(systems=("tensorwire", "nixl"), cases=("write",), wires=("shm",), sizes=(8,))
    )
    row = found.find("shm.write", "nixl", 8)
    assert row is not None
    assert not row.measured
    assert row.gb_per_s is row.ratio_to_limit is row.seconds_p99 is None
    assert "a_module_that_nobody_has" in row.note
    assert "pip install it" in row.note
    assert found.find("shm.write", "tensorwire", 8).measured  # type: ignore[union-attr]
    assert any(row.note in verdict.line() for verdict in found.verdicts)


def test_a_rival_that_fails_to_start_is_a_row_too(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = rivals.Rival("gloo", "a_module_that_nobody_has", (), "", ("write",), {"shm": {}})
    monkeypatch.setattr(memory, "RIVALS", (broken,))
    found = memory.run(
        tiny(systems=("tensorwire", "gloo"), cases=("write",), wires=("shm",), sizes=(8,))
    )
    row = found.find("shm.write", "gloo", 8)
    assert row is not None
    assert not row.measured
    assert "ModuleNotFoundError" in row.note


@pytest.mark.parametrize("rival", rivals.RIVALS, ids=lambda rival: rival.name)
def test_an_installed_rival_runs_or_says_why_not(rival: rivals.Rival) -> None:
    reason = rival.missing()
    if reason is not None:
        assert rival.remedy in reason
        pytest.skip(reason)
    with ProcessPair(rival.module, rival.options["shm"]) as pair:
        for case in ("write", "read"):
            assert isinstance(pair.call("prepare", case, 4096), str)
            assert pair.call("warm", rival.name, 0.01) > 0
            block = pair.call("block", rival.name, 3)
            assert len(block.seconds) == 3


def state_of(pid: int) -> str:
    """Returns the state as ps shows it: T stands still."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_a_pair_that_polls_stands_still_between_its_turns() -> None:
    """Else it would take a core from the processes that are measured meanwhile."""
    with ProcessPair(
        "tensorwire.bench.device", {"wire": "shm", "size_bytes": 4096}, polls=True
    ) as pair:
        processes = [pair.target_pid, int(pair._driver.pid or 0)]
        for _ in range(2):
            deadline = time.monotonic() + 5
            while [state_of(pid) for pid in processes] != ["T", "T"]:
                assert time.monotonic() < deadline
                time.sleep(0.01)
            assert pair.call("pin", [0], [0]) is None
    assert not any(Path(f"/proc/{pid}").exists() for pid in processes)


def test_a_pair_that_stands_still_ends_with_the_bench(tmp_path: Path) -> None:
    """The same if the bench is killed, and can wake no process."""
    program = tmp_path / "bench.py"
    program.write_text(
        "import time\n"
        "from tensorwire.bench.processes import ProcessPair\n"
        "if __name__ == '__main__':\n"
        "    options = {'wire': 'shm', 'size_bytes': 4096}\n"
        "    pair = ProcessPair('tensorwire.bench.device', options, polls=True)\n"
        "    print(pair.target_pid, pair._driver.pid, flush=True)\n"
        "    time.sleep(60)\n"
    )
    bench = subprocess.Popen([sys.executable, str(program)], stdout=subprocess.PIPE, text=True)
    assert bench.stdout is not None
    processes = [int(each) for each in bench.stdout.readline().split()]
    assert len(processes) == 2
    bench.kill()
    bench.wait()
    bench.stdout.close()
    deadline = time.monotonic() + 5
    while any(Path(f"/proc/{pid}").exists() and state_of(pid) != "Z" for pid in processes):
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.slow
def test_a_pair_that_does_not_answer_is_ended() -> None:
    pair = ProcessPair("tensorwire.bench.device", {"wire": "shm", "size_bytes": 4096})
    with pytest.raises(PairError, match="no answer"):
        pair.call("waiting", 30.0, timeout_s=0.2)
    assert pair.closed
    with pytest.raises(PairError, match="ended"):
        pair.call("describe")
    pair.close()


def test_the_command_writes_rows_and_shows_verdicts(tmp_path: Path) -> None:
    path = tmp_path / "memory.json"
    result = CliRunner().invoke(
        main,
        ["bench", "memory", "--quick", "--seconds", "0.01", "--systems", "tensorwire,memcpy",
         "--cases", "write", "--wires", "shm", "--sizes", "8,1KiB", "--json", str(path)],
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "against the bars" in result.output
    rows = json.loads(path.read_text())["rows"]
    assert {(row["system"], row["bytes"]) for row in rows} == {
        (system, size) for system in ("tensorwire", "memcpy") for size in (8, 1024)
    }


def processes_with(mark: str) -> list[int]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark.encode() in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
    return found


def test_sigterm_ends_it_with_all_that_it_has_started(tmp_path: Path) -> None:
    """Named for a bug: its workers went on."""
    name, value = "TENSORWIRE_TEST_MARK", str(tmp_path)
    mark = f"{name}={value}"
    with subprocess.Popen(
        [sys.executable, "-m", "tensorwire", "bench", "memory", "--seconds", "30"],
        env={**os.environ, name: value}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    ) as bench:  # fmt: skip
        while len(processes_with(mark)) < 2:
            assert bench.poll() is None
            time.sleep(0.05)
        bench.terminate()
        assert bench.wait(60) in (0, 130), "as after Ctrl-C"
    deadline = time.monotonic() + 5.0  # for one that was starting, and for Python's own trackers
    while (left := processes_with(mark)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert left == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--systems", "carrier-pigeon"], "unknown; choose from tensorwire"),
        (["--sizes", "tiny"], "no size"),
        (["--wires", "rdma"], "unknown; choose from shm, tcp, gpu"),
        (["--json", "/nowhere/at/all.json"], "does not exist"),
    ],
)
def test_bad_options_say_what_to_write(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(main, ["bench", "memory", *arguments])
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())


def test_a_figure_is_drawn_of_the_rows(report: Report, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from tensorwire.bench.report import draw

    path = tmp_path / "memory.svg"
    draw(report, path)
    assert path.read_text().startswith("<?xml")
    with pytest.raises(ValueError, match="no measured"):
        draw(Report("memory", {}), path)
