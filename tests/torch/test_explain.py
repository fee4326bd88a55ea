"""`tensorwire explain`: what it prints and writes for workloads and scripts, and the drawing."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tensorwire.torch.explanation import ExplainRow, Explanation

TRAIN = """
import sys
import torch
from torch import nn
import tensorwire.torch as tw

print(sys.argv[1:])
model = nn.Sequential(nn.Linear(20, 30), nn.ReLU(), nn.Linear(30, 10))
with tw.init():
    opt = tw.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    for step in range(100):
        opt.zero_grad()
        model(torch.ones(4, 20)).square().mean().backward()
        opt.step()
assert False
"""

GAN = """
import torch
from torch import nn
import tensorwire.torch as tw

class Generator(nn.Linear): ...
class Critic(nn.Linear): ...

with tw.init():
    maker, critic = Generator(8, 16), Critic(16, 1)
    opts = [
        tw.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
        for model in (maker, critic)
    ]
    for step in range(100):
        for opt, sign in zip(opts, (1, -1)):
            opt.zero_grad()
            (sign * critic(maker(torch.ones(4, 8)))).mean().backward()
            opt.step()
assert False
"""


def explain(*arguments: object) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "tensorwire", "explain", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=100)


@pytest.mark.slow
def test_a_script_is_explained(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(TRAIN)
    out = tmp_path / "rows.json"
    done = explain("--json", out, script, "--lr", "3")
    assert done.returncode == 0, done.stderr
    assert "['--lr', '3']" in done.stdout
    assert "4 of 4 gradients are produced in place" in done.stdout
    found = json.loads(out.read_text())
    assert {"model", "tensors", "bytes", "bytes_in_place", "tensors_in_place", "rows"} <= set(found)
    assert found["bytes"] == found["bytes_in_place"] == 4 * (20 * 30 + 30 + 300 + 10)
    assert found["tensors"] == found["tensors_in_place"] == 4
    assert 0 < found["planning_seconds"] < 10


def test_a_script_without_steps_is_an_error(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("print('nothing')")
    done = explain(script)
    assert done.returncode == 1
    assert "had made 2 steps" in done.stderr


def test_what_a_script_raises_is_shown_whole(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("def deep():\n    raise KeyError('mine')\ndeep()\n")
    done = explain(script)
    assert done.returncode == 1
    assert "KeyError: 'mine'" in done.stderr
    assert "in deep" in done.stderr


@pytest.mark.slow
def test_a_script_with_two_optimizers_gives_two(tmp_path: Path) -> None:
    script, out = tmp_path / "gan.py", tmp_path / "rows.json"
    script.write_text(GAN)
    done = explain("--json", out, script)
    assert done.returncode == 0, done.stderr
    maker, critic = json.loads(out.read_text())
    assert [found["model"] for found in (maker, critic)] == ["Generator", "Critic"]
    assert [found["bytes"] for found in (maker, critic)] == [4 * (8 * 16 + 16), 4 * (16 + 1)]
    for found in (maker, critic):
        assert [(row["name"], row["role"]) for row in found["rows"]] == [
            (name, role) for role in ("gradient", "parameter") for name in ("weight", "bias")
        ]
    assert done.stdout.count("of 2 gradients are produced in place") == 2
    assert done.stdout.count("memory of the gradients") == 2


@pytest.mark.slow
def test_a_workload_is_explained(tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    done = explain("--tiny", "--json", out, "lstm")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].strip() == "lstm"
    table = {line.split()[0]: line for line in lines if line.startswith("  gates.")}
    gates = ("input", "forget", "cell", "output")
    assert set(table) == {f"gates.{gate}.{part}" for gate in gates for part in "WUb"}
    for name, line in table.items():
        shape, size = ("16", "64") if name.endswith("b") else ("16 × 16", "1,024")
        assert f" {shape} " in line
        assert f" {size} " in line
        assert "produced in place" in line
    text = " ".join(done.stdout.split())
    assert "14 of 14 gradients are produced in place: 9,128 of 9,128 bytes (100.00 %)." in text
    assert "14 of 14 parameters are read in place." in text
    (drawn,) = (line for line in lines if line.startswith("memory of the gradients "))
    cells = drawn.removeprefix("memory of the gradients ")
    assert len(cells) == 72
    assert {"█", "▓"} <= set(cells) <= set("█▓ ")
    assert lines[-2:] == ["█▓ in place  ░▒ copied", f"rows written to {out}"]
    found = json.loads(out.read_text())
    assert (found["model"], found["tensors"], found["bytes_in_place"]) == ("lstm", 14, 9128)
    assert len(found["rows"]) == 28


@pytest.mark.slow
def test_options_of_a_workload_stand_in_either_place(tmp_path: Path) -> None:
    """Named for a bug: after the name they were ignored, and no file was written."""
    out = tmp_path / "rows.json"
    done = explain("lstm", "--tiny", "--json", out)
    assert done.returncode == 0, done.stderr
    assert json.loads(out.read_text())["bytes"] == 9128


UNUSED = """
import torch
from torch import nn
import tensorwire.torch as tw

job = tw.init()
model = nn.ModuleDict({"used": nn.Linear(8, 4), "unused": nn.Linear(8, 2)})
opts = [tw.DistributedOptimizer(torch.optim.SGD(model["used"].parameters(), lr=0.1), model)]
opt = tw.DistributedOptimizer(torch.optim.SGD(model["unused"].parameters(), lr=0.1), model)
nets = [nn.Linear(2, 2) for _ in range(2)]
for net in nets:
    opts.append(tw.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), net))
job.track(critic=nets[1], second=opt)
opts.append(opt)
while True:
    x = torch.ones(4, 8)
    (model["used"](x).sum() + nets[0](x[:, :2]).sum() + nets[1](x[:, :2]).sum()).backward()
    for each in opts:
        each.step()
        each.zero_grad()
"""


@pytest.mark.slow
def test_gradients_that_never_came_and_models_of_one_class(tmp_path: Path) -> None:
    """Named for two bugs: they were called copied, and models had the same name."""
    script, out = tmp_path / "script.py", tmp_path / "rows.json"
    script.write_text(UNUSED)
    done = explain("--json", out, script)
    assert done.returncode == 0, done.stderr
    used, unused, first, critic = json.loads(out.read_text())
    assert [found["model"] for found in (used, unused, first, critic)] == [
        "ModuleDict 1", "ModuleDict second", "Linear", "critic (Linear)",
    ]  # fmt: skip
    assert (used["tensors"], used["tensors_without_gradient"]) == (2, 0)
    assert (unused["tensors"], unused["bytes"], unused["bytes_copied"]) == (0, 0, 0)
    assert (unused["tensors_without_gradient"], unused["bytes_without_gradient"]) == (2, 72)
    rows = [row for row in unused["rows"] if row["role"] == "gradient"]
    assert [(row["arrived"], row["route"]) for row in rows] == [(False, "never came")] * 2
    text = " ".join(done.stdout.split())
    assert "0 of 0 gradients are produced in place: 0 of 0 bytes (0.00 %). 2 never came (72" in text
    assert "no gradient came" in text


def test_what_is_neither_is_told_what_there_is() -> None:
    done = explain("lenet")
    assert done.returncode == 1
    assert "known: alexnet" in done.stderr
    assert "or give a script" in done.stderr
    assert "there is no script" in explain("/nowhere/train.py").stderr


# --- the drawing --------------------------------------------------------------------------------


def explanation(*tensors: tuple[int, int, bool]) -> Explanation:
    """Makes an explanation of gradients with these offsets and bytes, in place or not."""
    rows = tuple(
        ExplainRow(f"{i}", role, (size,), "float32", True, size, offset, in_place, "", 0, 0, "")
        for role in ("gradient", "parameter")
        for i, (offset, size, in_place) in enumerate(tensors)
    )
    return Explanation("model", rows, 0.0)


def test_a_cell_is_the_tensor_with_most_of_its_bytes() -> None:
    found = explanation((0, 400, True), (400, 80, False), (480, 320, True))
    first, second, third = ("in place", 0), ("copied", 1), ("in place", 2)
    assert found.drawing(width=10) == [*[first] * 5, second, *[third] * 4]
    assert found.drawing(width=4) == [first, first, third, third]
    assert len(found.drawing()) == 72


def test_where_no_tensor_is_a_cell_is_empty() -> None:
    found = explanation((0, 64, True), (192, 64, False))
    assert found.drawing(width=4) == [
        ("in place", 0), ("none", -1), ("none", -1), ("copied", 1),
    ]  # fmt: skip
    assert explanation().drawing() == []
    assert explanation((0, 0, True)).drawing() == []


def test_a_gradient_that_never_came_is_drawn_as_such() -> None:
    row = ExplainRow("a", "gradient", (8,), "float32", False, 32, 0, False, "never came", 0, 0, "")
    found = Explanation("model", (row,), 0.0)
    assert found.drawing(width=2) == [("no gradient", 0)] * 2
    assert str(found).startswith("model: 0 of 0 gradients in place, 0 of 0 bytes (0.00 %); 1 never")


def test_the_drawing_is_in_the_order_of_the_memory() -> None:
    found = explanation((64, 64, False), (0, 64, True))
    assert [what for what, _ in found.drawing(width=2)] == ["in place", "copied"]
