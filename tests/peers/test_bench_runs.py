"""Tiny runs of the benches have all their rows, end their processes, and give honest reasons.

No timed assertion.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from tensorwire.bench import memory, rivals
from tensorwire.bench.harness import Budget
from tensorwire.bench.processes import PairError, ProcessPair
from tensorwire.bench.rows import Report
from tensorwire.cli import main
from tensorwire_benchmarks import link, modes
from tensorwire_benchmarks.bench import Settings
from tensorwire_benchmarks.benches import PLACEMENT, TRAINING
from tensorwire_benchmarks.engine import run
from tensorwire_benchmarks.systems import GRPC, SYSTEMS, System
from tensorwire_benchmarks.team import Team
from tensorwire_benchmarks.workloads.catalog import Workload, workload

pytest.importorskip("torch")
TINY = Workload("tiny", "plain:Convolutions", "", 2, 7, arguments=((1, 4, 4), (2,), (9, 3)))
DEVICE = "tensorwire.bench.device", {"wire": "shm", "size_bytes": 4096}
LINKED = link.missing(1000) is None


def state_of(pid: int) -> str:
    """Returns the state as ps shows it: T stands still. None is there: empty."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return ""


def until_all(pids: list[int], states: str) -> None:
    deadline = time.monotonic() + 5
    while any(state_of(pid) not in states for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.01)


# --- memory ---------------------------------------------------------------------------------------


def test_memory_has_its_rows_and_the_reasons_of_what_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    absent = rivals.Rival("nixl", "x", (("a_module_that_nobody_has",),), "pip install it",
                          ("write",), {"shm": {}})  # fmt: skip
    broken = rivals.Rival("gloo", "a_module_that_nobody_has", (), "", ("write",), {"shm": {}})
    monkeypatch.setattr(memory, "RIVALS", (absent, broken))
    budget = Budget(case_s=0.02, block_s=2e-4, min_rounds=7, max_rounds=7, max_count=20)
    named = "tensorwire", "tensorwire-c++", "memcpy", "raw-socket", "nixl", "gloo"
    settings = memory.MemorySettings(
        sizes=(4096,), systems=named, budget=budget, warm_s=0.01, waiting_s=0.7
    )
    report = memory.run(settings)
    for case in memory.plan(settings):
        row = report.find(case.name, "tensorwire", case.size_bytes)
        assert row is not None
        if case.name.endswith("two_cores") and not case.pins:
            continue
        assert row.measured, row
        assert (row.ratio_interval is not None) == case.moves_bytes == (row.gb_per_s is not None)
    for rival, reason in (("nixl", "pip install it"), ("gloo", "ModuleNotFoundError")):
        row = report.find("shm.write", rival, 4096)
        assert row is not None
        assert not row.measured
        assert reason in row.note
    assert report.find("tcp.read", "raw-socket", 4096).measured  # type: ignore[union-attr]
    assert len(report.verdicts) == 16


@pytest.mark.parametrize("rival", rivals.RIVALS, ids=lambda rival: rival.name)
def test_an_installed_rival_runs_or_says_why_not(rival: rivals.Rival) -> None:
    if (reason := rival.missing()) is not None:
        assert rival.remedy in reason
        pytest.skip(reason)
    with ProcessPair(rival.module, rival.options["shm"]) as pair:
        for case in ("write", "read"):
            assert isinstance(pair.call("prepare", case, 4096), str)
            assert len(pair.call("block", rival.name, 3).seconds) == 3


def test_a_pair_that_polls_stands_still_between_its_turns_and_ends_with_the_bench(
    tmp_path: Path,
) -> None:
    """Else it would take a core from the processes that are measured meanwhile."""
    with ProcessPair(*DEVICE, polls=True) as pair:
        processes = [pair.target_pid, int(pair._driver.pid or 0)]
        for _ in range(2):
            until_all(processes, "T")
            assert pair.call("pin", [0], [0]) is None
    assert not any(map(state_of, processes))
    program = tmp_path / "bench.py"
    program.write_text(
        "import time\n"
        "from tensorwire.bench.processes import ProcessPair\n"
        "if __name__ == '__main__':\n"
        f"    pair = ProcessPair(*{DEVICE!r}, polls=True)\n"
        "    print(pair.target_pid, pair._driver.pid, flush=True)\n"
        "    time.sleep(60)\n"
    )
    with subprocess.Popen(
        [sys.executable, str(program)], stdout=subprocess.PIPE, text=True
    ) as bench:
        assert bench.stdout is not None
        processes = [int(each) for each in bench.stdout.readline().split()]
        bench.kill()
    until_all(processes, "Z")


@pytest.mark.slow
def test_a_pair_that_does_not_answer_is_ended() -> None:
    pair = ProcessPair(*DEVICE)
    with pytest.raises(PairError, match="no answer"):
        pair.call("waiting", 30.0, timeout_s=0.2)
    with pytest.raises(PairError, match="ended"):
        pair.call("describe")
    pair.close()


def test_sigterm_ends_it_with_all_that_it_has_started(tmp_path: Path) -> None:
    """Named for a bug: its workers went on."""
    name, value = "TENSORWIRE_TEST_MARK", str(tmp_path)

    def marked() -> list[int]:
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if f"{name}={value}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                    found.append(int(folder.name))
        return found

    with subprocess.Popen(
        [sys.executable, "-m", "tensorwire", "bench", "memory", "--seconds", "30"],
        env={**os.environ, name: value}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    ) as bench:  # fmt: skip
        while len(marked()) < 2:
            assert bench.poll() is None
            time.sleep(0.05)
        bench.terminate()
        assert bench.wait(60) in (0, 130), "as after Ctrl-C"
    deadline = time.monotonic() + 5.0  # for one that was starting, and for Python's own trackers
    while (left := marked()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert left == []


# --- steps ----------------------------------------------------------------------------------------


def single_process(optimizer: str, steps: int) -> float:
    """The digest of the same training in one process: mean loss over the workers' batches."""
    import torch

    from tensorwire_benchmarks.systems.base import make_optimizer

    network = TINY.build(torch)
    inner = make_optimizer(torch, optimizer, network.parameters(), fused=False)
    for step in range(steps):
        inner.zero_grad()
        for mine in (TINY.batches(torch, rank) for rank in range(2)):
            inputs, labels = mine[step % len(mine)]
            (torch.nn.functional.cross_entropy(network(inputs), labels) / 2).backward()
        inner.step()
    return float(sum(p.detach().double().abs().sum() for p in network.parameters()))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "optimizer"), [("ddp-gloo", "sgd"), ("grpc", "adamw")])
def test_a_rival_trains_as_one_process_would_and_is_ended(name: str, optimizer: str) -> None:
    (system,) = [each for each in SYSTEMS if each.name == name]
    if (reason := system.missing()) is not None:
        pytest.skip(reason)
    with closing(Team(system, "shm", TINY, 2, optimizer)) as team:
        workers, cpu_workers, _ = team.run(3)
        for step in (step for steps in workers for step in steps):
            assert step.begin <= step.gradients_ready <= step.readable <= step.end
        assert cpu_workers > 0
        if system.holds:
            team.run(2, held=True)
        steps = 5 if system.holds else 3
        assert team.digest() == pytest.approx([single_process(optimizer, steps)] * 2, rel=1e-5)
        pids = team.pids
        os.kill(pids[-1], signal.SIGKILL)  # the server, where there is one
        with pytest.raises(PairError, match=r"server|worker"):
            team.run(2)
        until_all(pids, "")


@pytest.mark.slow
@pytest.mark.skipif(GRPC.missing() is not None, reason=str(GRPC.missing()))
@pytest.mark.parametrize("wire", ["shm", "tcp", "1gbit"])
def test_placement_has_its_rows_and_one_result(wire: str) -> None:
    """All systems that train have the same parameters, plan and copy to the bit."""
    if wire == "1gbit" and not LINKED:
        pytest.skip(str(link.missing(1000)))
    model = workload("dlrm" if wire == "tcp" else "lstm").reduced()
    absent = System("grpc", "x", (("a_module_that_nobody_has", "pip install it"),), None, {})
    systems = [absent if wire == "shm" and each is GRPC else each for each in PLACEMENT.systems]
    bench = replace(PLACEMENT, systems=systems)
    report = run(bench, Settings([model], (wire,), PLACEMENT.names, steps=12, turns=6))
    rows = {(row.case, row.system): row for row in report.rows}
    case = f"{model.name}/{wire}"
    for (_, system), row in rows.items():
        assert row.measured != (wire == "shm" and system == "grpc"), (row.case, row.note)
        assert row.bytes == model.traffic(2).up_bytes
    exchanging = (
        set(PLACEMENT.names) - {"limit", "computation"} - ({"grpc"} if wire == "shm" else set())
    )
    for what in ("", "/isolated", "/exposed"):
        assert {s for c, s in rows if c == case + what and rows[c, s].measured} >= exchanging
    assert not any("different parameters" in text for text in report.settings["warnings"])
    (bits,) = [each for each in report.verdicts if each.name == f"{case} bits of plan and copy"]
    assert (bits.met, bits.measured) == (True, 41.0)
    assert 0 <= report.settings["other_work"]


@pytest.mark.slow
def test_what_a_script_costs_alone() -> None:
    own = run(TRAINING, Settings((TINY,), ("alone",), TRAINING.names, turns=6))
    assert [(row.system, row.operations) for row in own.rows] == [
        ("tensorwire", 24 * 20), ("plain", 24 * 20)
    ]  # fmt: skip
    assert own.verdicts[-1].met is not None


@pytest.mark.slow
def test_modes_have_rows_and_curves() -> None:
    pytest.importorskip("sklearn")
    training = modes.TrainingSettings(sizes=(2,), seeds=1, shorten=20)
    settings = modes.ModesSettings(("slow", "digits"), 2, 2, 0.01, 2, training)
    report = modes.run(settings, lambda done, total, label: None)
    assert all(row.measured for row in report.rows), report.rows
    assert {row.case for row in report.rows} == {"slow", "digits.2"}
    steps = report.settings["curves"][0]["steps"]  # of all workers: not all are in one step
    assert (steps[0], len(steps), steps) == (0, 9, sorted(steps))


# --- the commands ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "rows"),
    [
        ("memory --quick --seconds 0.01 --systems tensorwire,memcpy --cases write --wires shm "
         "--sizes 8", [("shm.write", "tensorwire"), ("shm.write", "memcpy")]),
        ("parameters --quick --optimizers Adagrad",
         [("Adagrad", "tensorwire"), ("Adagrad", "torch")]),
        ("training --models digits --systems limit,ddp-gloo --wires shm --steps 6 --strict",
         [("shm.digits.step", "ddp-gloo"), ("shm.digits.exchange", "ddp-gloo"),
          ("shm.digits.exchange", "limit")]),
    ],
    ids=lambda value: value.split()[0] if isinstance(value, str) else "",
)  # fmt: skip
def test_a_command_writes_rows(words: str, rows: list[tuple[str, str]], tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    result = CliRunner().invoke(main, ["bench", *words.split(), "--json", str(path)])
    assert result.exit_code == 0, result.output
    assert "against the bars" in result.output
    report = Report.load(path)
    assert [(row.case, row.system) for row in report.rows] == rows
    assert all(row.measured for row in report.rows)


@pytest.mark.slow
@pytest.mark.skipif(not LINKED, reason="no hosts of their own")
def test_two_workers_on_hosts_of_their_own(tmp_path: Path) -> None:
    path, figure = tmp_path / "rows.json", tmp_path / "scaling.svg"
    options = ["--quick", "--scaling", "--json", str(path), "--figure", str(figure)]
    result = CliRunner().invoke(main, ["bench", "parameters", *options])
    assert result.exit_code == 0, result.output
    report = Report.load(path)
    assert len(report.rows) == 12
    assert all(row.measured for row in report.rows)
    assert [verdict.met is not None for verdict in report.verdicts] == [True, True]
    assert figure.exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("memory --systems carrier-pigeon", "unknown; choose from tensorwire"),
        ("memory --sizes tiny", "no size"),
        ("memory --json /nowhere/at/all.json", "does not exist"),
        ("training --models gpt", "unknown; choose from digits, mlp50, mlp200"),
        ("placement --workload lenet", "unknown; choose from alexnet, inception-v3"),
        ("parameters --optimizers Adagrad --scaling", "ask for one"),
        ("faults --changes --cost", "--changes is for itself"),
        ("rpc --sizes 9", "no multiple of 8"),
    ],
)
def test_bad_options_say_what_to_write(words: str, message: str) -> None:
    result = CliRunner().invoke(main, ["bench", *words.split()])
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())
