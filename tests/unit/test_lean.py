"""tests/lean: torch begins without its compiler, and with it is what it was."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import gc, json, sys, torch
if sys.argv[1] == "compiler":
    import torch._dynamo
torch.manual_seed(1)
model = torch.nn.Linear(3, 2)
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))], "lr": 0.2})
from torch._library.utils import get_source
run = torch.compile(model, backend="eager") if sys.argv[1] == "compiled" else model
for _ in range(3):
    run(torch.ones(4, 3)).sum().backward()
    optimizer.step(), optimizer.zero_grad()
    assert torch.is_grad_enabled()
print(json.dumps({
    "weight": model.weight.tolist(),
    "sources": [get_source(1), (lambda: get_source(2))()],
    "compiler": "torch._dynamo" in sys.modules,
    "exporter": "torch.export.exported_program" in sys.modules,
    "frozen": gc.get_freeze_count() > 50_000,
    "collects": gc.isenabled(),
}))
"""


def _result(tmp_path: Path, how: str) -> dict[str, object]:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, how],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    result: dict[str, object] = json.loads(done.stdout)
    return result


@pytest.mark.slow
def test_a_process_of_the_tests_has_no_compiler_and_the_same_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lean = _result(tmp_path, "plain")
    assert not lean["compiler"]
    assert not lean["exporter"]
    assert lean["frozen"]
    for how in ("compiler", "compiled"):
        assert _result(tmp_path, how) == {**lean, "compiler": True, "exporter": True}
    folder = str(Path(__file__).parents[1] / "lean")
    rest = os.environ["PYTHONPATH"].removeprefix(folder).removeprefix(os.pathsep)
    monkeypatch.setenv("PYTHONPATH", rest)
    assert _result(tmp_path, "plain") == {
        **lean, "compiler": True, "exporter": True, "frozen": False
    }  # fmt: skip


@pytest.mark.slow
def test_what_is_left_out_is_there_when_it_is_asked_for(tmp_path: Path) -> None:
    script = """
import torch
assert type(torch.export) is not type(torch)
assert torch.Generator().manual_seed(3).initial_seed() == 3
program = torch.export.export(torch.nn.Linear(3, 2), (torch.ones(4, 3),))
assert program.module()(torch.ones(4, 3)).shape == (4, 2)
from torch._meta_registrations import register_meta
assert type(torch.export) is type(torch._meta_registrations) is type(torch)
"""
    subprocess.run([sys.executable, "-c", script], cwd=tmp_path, check=True)


@pytest.mark.whole_torch
@pytest.mark.slow
def test_a_test_may_have_the_whole_torch(tmp_path: Path) -> None:
    assert _result(tmp_path, "plain")["compiler"]
