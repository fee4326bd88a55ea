"""Training through a library equals the library's own DDP over gloo, on the same batches."""

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import TENSORWIRE, TORCHRUN, Runs, skip_without

pytestmark = pytest.mark.timeout(300)  # the first test of a library waits for its processes

# Rounding only, as of a norm that is summed in another order. Measured: below 3e-7.
EXACT = {"rtol": 1e-5, "atol": 1e-6}
# In bfloat16 a last bit that falls the other way is 2^-8 of an activation. Measured: 0.
ROUGH = {"rtol": 2e-2, "atol": 2e-3}

CASES = {
    "lightning": "plain adam clipped clipped_by_value accumulated bf16 resumed written evaluated "
    "manual",
    "accelerate": "plain adam clipped clipped_by_value clipped_in_part clipped_by_largest "
    "norm_alone accumulated bf16 resumed applied_by_one several",
    "transformers": "plain adam clipped accumulated bf16 resumed best",
}
SOME = "plain clipped accumulated bf16 resumed"
TRIED = [
    (library, way, case)
    for library, cases in CASES.items()
    for way, some in (("tensorwire run", cases), ("torchrun", cases), ("alone", SOME))
    for case in some.split()
]


def runs_for(runs_of: Callable[[str], Runs], library: str, way: str) -> tuple[Runs, str]:
    """The script was run in a way; also returns the way in which the other side was."""
    skip_without(library)
    runs, cases = runs_of(library), CASES[library].split()
    if way == "alone":
        runs.run(way, [sys.executable], "theirs+ours", *SOME.split())
        return runs, way
    # Both in the same processes, since importing takes longer than training.
    runs.run("torchrun", TORCHRUN, "theirs+ours", *cases)
    if way == "tensorwire run":
        runs.run(way, TENSORWIRE, "ours", *cases, "misused")
    return runs, "torchrun"


def check_equal(mine: Any, other: Any, tolerance: dict[str, float]) -> None:
    assert type(mine) is type(other)
    if isinstance(mine, dict):
        assert mine.keys() == other.keys()
        mine, other = list(mine.values()), list(other.values())
    if isinstance(mine, list):
        assert len(mine) == len(other)
        for one, two in zip(mine, other, strict=True):
            check_equal(one, two, tolerance)
    elif isinstance(mine, float | torch.Tensor):
        torch.testing.assert_close(mine, other, **tolerance)
    else:
        assert mine == other


@pytest.mark.parametrize(("library", "way", "case"), TRIED)
def test_as_ddp(runs_of: Callable[[str], Runs], library: str, way: str, case: str) -> None:
    """Losses, figures, parameters, the optimizer's state, and which files there are."""
    runs, others = runs_for(runs_of, library, way)
    ours, theirs = runs.seen(way, "ours", case), runs.seen(others, "theirs", case)
    assert len(ours) == len(theirs) == (1 if way == "alone" else 2)
    check_equal(ours, theirs, ROUGH if case == "bf16" else EXACT)
    for each in ours:
        check_equal(each["values"], ours[0]["values"], {"rtol": 0, "atol": 0})


@pytest.mark.parametrize("library", CASES)
def test_what_is_asked_for_is_done(runs_of: Callable[[str], Runs], library: str) -> None:
    """The comparison above would pass if neither side did it."""
    runs, _ = runs_for(runs_of, library, "tensorwire run")
    found = {
        case: runs.seen("tensorwire run", "ours", case)[0]["values"]
        for case in CASES[library].split()
    }
    plain = found.pop("plain")
    same = [
        case
        for case, values in found.items()
        if values.keys() == plain.keys() and all(torch.equal(values[k], plain[k]) for k in plain)
    ]
    assert set(same) <= {"norm_alone", "written"}  # which train as the plain one does


@pytest.mark.parametrize("library", ["lightning", "accelerate"])
def test_workers_have_parts_of_the_data(runs_of: Callable[[str], Runs], library: str) -> None:
    runs, _ = runs_for(runs_of, library, "tensorwire run")
    first, second = runs.seen("tensorwire run", "ours", "plain")
    assert len(first["losses"]) == len(second["losses"]) == 10  # of 9 batches in 2 epochs
    assert not set(first["losses"]) & set(second["losses"])


MISUSE = {
    "lightning": {
        "scaler": "ValueError: Lightning's GradScaler looks at the gradients of one worker",
        "devices": "ValueError: Trainer(devices=4) asks for other processes than the 2",
        "as many": "nothing",
    },
    "accelerate": {
        "cpu": "RuntimeError: accelerate takes this process for number 0 of 1, and it is worker",
        "fp16": "ValueError: mixed_precision='fp16' does nothing on a CPU",
        "fsdp": "UnavailableError: tensorwire trains whole models on CPUs, and Accelerate was",
        "hook": "ValueError: a communication hook belongs to DDP",
        "forgotten": "RuntimeError: Sequential was prepared and has gradients, and its optimizer",
        "optimizer": "ValueError: the optimizer has parameters of no model that was prepared",
        "early": "RuntimeError: clip_grad_norm_() is for complete gradients",
        "by hand": "RuntimeError: parameter '0.weight' has other memory since the model was moved",
        "uneven": "ValueError: every worker makes the same number of steps",
    },
    "transformers": {
        "use_cpu": "RuntimeError: accelerate takes this process for number 0 of 1, and it is",
        "fp16": "ValueError: mixed_precision='fp16' does nothing on a CPU",
    },
}


@pytest.mark.parametrize(
    ("library", "what"), [(library, what) for library in MISUSE for what in MISUSE[library]]
)
def test_what_cannot_work_is_an_error(
    runs_of: Callable[[str], Runs], library: str, what: str
) -> None:
    runs, _ = runs_for(runs_of, library, "tensorwire run")
    told = runs.seen("tensorwire run", "ours", "misused")
    assert len(told) == 2
    for each in told:
        assert each[what].startswith(MISUSE[library][what])


@pytest.mark.parametrize("library", ["lightning", "accelerate"])
def test_data_that_nobody_deals_out_is_told(runs_of: Callable[[str], Runs], library: str) -> None:
    """An IterableDataset in Lightning, a DataLoader that was not prepared in Accelerate."""
    runs, _ = runs_for(runs_of, library, "tensorwire run")
    first, second = runs.seen("tensorwire run", "ours", "misused")
    assert first["same"].startswith("workers 0 and 1 computed the same gradients")
    assert second["same"] == ""


def test_lightning_starts_the_processes_itself(runs_of: Callable[[str], Runs]) -> None:
    """Like for its DDP: the script is started once, and devices= says how many."""
    runs, _ = runs_for(runs_of, "lightning", "tensorwire run")
    runs.run("devices", [sys.executable], "ours", "plain", DEVICES="2")
    ours = runs.seen("devices", "ours", "plain")
    check_equal(ours, runs.seen("torchrun", "theirs", "plain"), EXACT)
