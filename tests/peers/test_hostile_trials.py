"""The harness of `make test-hostile` itself: it runs, and its judge notices harm."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

HOSTILE = Path(__file__).parents[1] / "hostile"
sys.path.append(str(HOSTILE))

from honest import Observed, Timed  # noqa: E402
from judge import Evidence, complaints  # noqa: E402

pytestmark = pytest.mark.timeout(110)


def trials(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(HOSTILE / "run.py"), "--jobs", "0", *arguments],
        capture_output=True, text=True, timeout=100,
    )  # fmt: skip


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.slow
def test_trials_of_a_fixed_seed_harm_nobody() -> None:
    kinds = ("ForeignDescriptors", "MemberDescriptors", "Frames", "FreedUnderWay")
    ended = trials("--seed", "suite", "--trials", "3", "--only", *kinds)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "3 trials, 0 harmed somebody, 0 broken" in ended.stdout
    assert "SEED=suite TRIAL=2" in ended.stdout


@pytest.mark.slow
def test_a_stopped_node_is_harm() -> None:
    ended = trials("--seed", "1", "--trials", "1", "--only", "StopsTheVictim")
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert "HARMED" in ended.stdout
    # Who notices first tells it: by a call that hangs, or by how long its worst one took.
    assert "hangs, for 1." in ended.stdout or re.search(r"worst [1-9]\.", ended.stdout)
    assert "1 trials, 1 harmed somebody" in ended.stdout


def seen(**operations: list[float]) -> Observed:
    return Observed({kind: Timed(seconds) for kind, seconds in operations.items()})


def evidence(party: Observed, **values: object) -> Evidence:
    plain = seen(answer=[0.0001, 0.0001, 0.5])
    before = {("tcp", "read"): 0.001}
    return Evidence({"tcp": party}, plain, undisturbed=before, **values)  # type: ignore[arg-type]


HARM = {
    "an error": (evidence(Observed({}, ["tcp: OSError: x"])), "OSError"),
    "a long operation": (evidence(seen(read=[0.001, 1.6, 0.001])), "read took 1.60 s"),
    "one that hangs": (evidence(Observed({}, [], ("read", 1.6))), "read hangs, for 1.60 s"),
    "a high median": (evidence(seen(read=[0.05, 0.05, 0.05])), "takes 50.0 ms, and 1.00 ms"),
    "a connect": (evidence(seen(**{"connect tcp": [5.6]})), "connect tcp took 5.60 s"),
    "nothing at all": (evidence(Observed()), "did nothing"),
    "a long step": (
        evidence(seen(read=[0.001]), job_steps=[0.1, 0.1, 12.0], job_undisturbed_s=0.1),
        "a step took 12.00 s",
    ),
    "no step": (evidence(seen(read=[0.001]), job_steps=[]), "no step"),
    "growth": (evidence(seen(read=[0.001]), growth=["descriptors: 1"]), "descriptors: 1"),
    "memory": (evidence(seen(read=[0.001]), memory_bytes=1 << 30), "grew by 1024 MiB and"),
    "a busy core": (evidence(seen(read=[0.001]), idle_share=0.9), "90% of a core"),
    "another fact": (evidence(seen(read=[0.001]), facts=["it crashed"]), "it crashed"),
}


@pytest.mark.parametrize("case", HARM.values(), ids=HARM.keys())
def test_every_kind_of_harm_is_a_complaint(case: tuple[Evidence, str]) -> None:
    found = complaints(case[0])
    assert len(found) == 1
    assert case[1] in found[0]


def test_what_the_machine_does_is_no_harm() -> None:
    """The plain pair waited for 0.5 s meanwhile, or the victim had no core for as long."""
    assert complaints(evidence(seen(read=[0.001, 1.4, 0.001]))) == []
    assert complaints(evidence(seen(read=[0.001, 1.9, 0.001]), waited_s=0.5)) == []
    slow = seen(read=[0.05, 0.05, 0.05])
    assert complaints(evidence(slow, waited_s=1.2, seconds=1.5)) == []
    assert complaints(evidence(seen(read=[0.05, 0.05]))) == []  # too few for a median
