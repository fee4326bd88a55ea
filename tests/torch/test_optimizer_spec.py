"""Descriptions of optimizers that come from another process: nothing but an optimizer is made."""

import json
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tensorwire.errors import UnavailableError
from tensorwire.torch.kernels import (
    OptimizerSpec,
    ParameterKind,
    class_of,
    describe,
    import_all,
    kernel_of,
    permitted_imports,
)


def text(**changes: Any) -> str:
    """Returns the text of a plain RMSprop, with some parts changed."""
    optimizer = torch.optim.RMSprop([nn.Parameter(torch.zeros(3))], momentum=0.9)
    kind = ParameterKind(0, torch.float32, 1, False)
    return json.dumps({**json.loads(describe(optimizer, {kind}, ())), **changes})


def test_a_description_makes_the_kernel() -> None:
    kernel = kernel_of(text())
    assert kernel.states == ("momentum_buffer", "square_avg")
    assert kernel.scalars == ("step",)
    spec = OptimizerSpec.from_text(text())
    assert OptimizerSpec.from_text(spec.to_text()).to_text() == spec.to_text()


WRONG: dict[str, Any] = {
    "optimizer": [None, 5, "", ":", "torch.optim", "torch.optim:", "torch.optim:lr_scheduler",
                  "torch.optim:Adam.step.__globals__", "torch.optim.:Adam", "torch.optim.adam:math",
                  "os:system", "torch:optim.Adam", "torch.optimal:Adam", "torch.optim..adam:Adam",
                  "torch.optim\0:Adam", "torch.optim.nothing:Adam", "__main__:Adam"],
    "method": [None, 1, "all", [], {}, True],
    "numbers": [None, [], "lr", {"lr": "text"}, {"lr": None}, {"lr": []}, {"params": "float"}],
    "states": [None, "sum", [1], {}, [["sum"]], ["a", "a"], []],
    "scalars": [None, [], {"step": "complex64"}, {"step": 1}, {"square_avg": "float32"}],
    "groups": [None, [], {}, [1], [{}], [{"constants": 1, "states": []}],
               [{"constants": {"params": 1}, "states": []}],
               [{"constants": {}, "states": ["other"]}], [{"constants": {}, "states": "s"}]],
    "attributes": [None, [], "a", {"state": 1}, {"param_groups": []}],
    "lazy": [None, 1, "yes"],
    "edits_gradient": [None, 0, []],
    "rows": [None, "no"],
    "states_have_shape": [None, {}],
    "unknown": [1],
}  # fmt: skip


@pytest.mark.parametrize("part", WRONG)
def test_what_is_no_description_is_refused(part: str) -> None:
    says = r"not a description|was not told to import|no class of|cannot be imported|not permitted"
    for value in WRONG[part]:
        with pytest.raises(ValueError, match=says):
            kernel_of(text(**{part: value}))


@pytest.mark.parametrize(
    "raw",
    ["{", "{}", "{]", '{"a"', "{" * 100_000, '{"groups":' * 50_000, '{"groups": [' + "[" * 100_000,
     "{" + " " * 100_000, "[]", "5", "", "null", "torch.optim.RMSprop:", "average",
     '{"groups": 1e999}'],
)  # fmt: skip
def test_damaged_texts_are_refused(raw: str) -> None:
    with pytest.raises(ValueError, match=r"not a description|unknown optimizer"):
        kernel_of(raw)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)


@given(st.dictionaries(st.sampled_from(list(WRONG)), values, max_size=3))
@pytest.mark.slow
def test_random_parts_make_a_kernel_or_a_value_error(changes: dict[str, Any]) -> None:
    try:
        kernel = kernel_of(text(**changes))
    except ValueError:
        return
    assert all(isinstance(name, str) for name in (*kernel.hyper, *kernel.states, *kernel.scalars))


def test_a_group_that_is_not_described() -> None:
    group = json.loads(text())["groups"][0]
    spec = OptimizerSpec.from_text(text(groups=[group, group]))
    assert spec.options_of(1).states == tuple(group["states"])
    with pytest.raises(ValueError, match="2 groups"):
        spec.options_of(2)


def test_which_modules_may_be_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "permitted_package"
    package.mkdir()
    (package / "__init__.py").write_text("import torch, math\nOurs = torch.optim.SGD\n")
    (package / "leaves.py").write_text("import sys\nsys.exit(3)\n")
    (package / "fails.py").write_text("1 / 0\n")
    (package / "below.py").write_text(
        "import torch\nfrom forbidden_module import Theirs\n"
        "class Mine(torch.optim.SGD):\n    class Inner(torch.optim.SGD):\n        pass\n"
    )
    (tmp_path / "forbidden_module.py").write_text(
        "import torch\nclass Theirs(torch.optim.SGD):\n    pass\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    permitted = ("permitted_package",)
    try:
        assert class_of("permitted_package.below:Mine", permitted).__name__ == "Mine"
        assert class_of("permitted_package.below:Mine.Inner", permitted).__name__ == "Inner"
        assert class_of("permitted_package:Ours", permitted) is torch.optim.SGD
        for name, why in {
            "permitted_package.below:Theirs": "class of forbidden_module, which is not permitted",
            "permitted_package:math": "no class of optimizers",
            "permitted_package.leaves:Mine": "cannot be imported here",
            "permitted_package.fails:Mine": "division by zero",
            "permitted_package.absent:Mine": "cannot be imported here",
            "permitted_packages:Mine": "was not told to import",
            "forbidden_module:Theirs": "was not told to import",
        }.items():
            with pytest.raises(ValueError, match=why):
                class_of(name, permitted)
        for name in ("permitted_package.leaves", "permitted_package.fails", "no_such_module"):
            with pytest.raises(UnavailableError, match=f"--import {name}"):
                import_all([name])
    finally:
        for name in [each for each in sys.modules if each.startswith(("permitted_", "forbidden_"))]:
            del sys.modules[name]


@pytest.mark.parametrize(
    "named", ["os.system()", "a b", "a-b", "..", "a.", ".a", "1a", "a;b", "/a"]
)
def test_nonsense_in_the_environment(named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENSORWIRE_IMPORT", f"good,{named}")
    with pytest.raises(ValueError, match="TENSORWIRE_IMPORT"):
        permitted_imports()
    monkeypatch.setenv("TENSORWIRE_IMPORT", " good , better.best,,")
    assert permitted_imports() == ("good", "better.best")


@pytest.mark.slow
@pytest.mark.cold
def test_making_a_step_imports_no_compiler() -> None:
    """Named for a bug: the first step on a server took seconds, for torch's compiler."""
    program = f"""
import sys, numpy as np, torch
from tensorwire.parameters import Cell
from tensorwire.torch.kernels import kernel_of
kernel = kernel_of({text()!r})
data = [np.zeros(64, np.uint8) for _ in range(4)]
cell = Cell(0, "trained", 0, "float32", 0, 64, ())
states = dict(zip(kernel.states, data[2:], strict=True))
tile = kernel.bind(cell, None, data[0], [data[1]], states, data[1])
data[1].view(np.float32)[:] = 1
tile.reduce([(0, 1.0)], 0, 64, False)
hyper = tuple(0.0 if name in ("centered", "maximize") else 0.1 for name in kernel.hyper)
tile.step(hyper, 1, (0.0,), 0, 64, False, 1.0)
assert data[0].any()
assert "torch._dynamo" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


class Warns(torch.optim.Adagrad):
    """Warns in the first step that the process makes, as torch does about sparse tensors."""

    warned = False

    def step(self, closure: Any = None) -> Any:
        if not Warns.warned:
            Warns.warned = True
            warnings.warn("once in a process", UserWarning, stacklevel=2)
        return super().step(closure)


def test_a_warning_changes_no_description() -> None:
    """Named for a bug: where warnings are errors, workers of one job came to different ones."""
    kinds = [ParameterKind(0, torch.float32, 2, True)]
    Warns.warned = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = [describe(Warns([nn.Parameter(torch.zeros(3, 2))]), kinds, None) for _ in range(2)]
    assert found[0] == found[1]
