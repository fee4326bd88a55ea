"""Which plain variables of a script a process in its place has not got."""

import re
import sys
import types
from pathlib import Path

import pytest

from tensorwire.torch.carried import Carried, carried_names

ROOT = Path(__file__).parents[2]

CASES = {
    # read before it is given a value, in an epoch
    "    n += 1": {"n"},
    "    best = max(best, job.mean(1.0))": {"best"},
    "    for x in loader:\n        n += 1\n        (min(1, n / 20) * f(x)).backward()": {"n"},
    "    if loss < best:\n        best, bad = loss, 0\n    else:\n        bad += 1": {
        "best",
        "bad",
    },
    "    if first:\n        warm()\n    first = False": {"first"},
    "    x = [n for n in range(3)]\n    if n:\n        n = 2": {"n"},
    "    if a:\n        b = 1\n    c = b": {"b"},
    "    try:\n        n = f()\n    except E:\n        pass\n    g(n)": {"n"},
    # given a value first
    "    n = 0\n    for x in loader:\n        n += 1": set(),
    "    total = 0.0\n    for x in loader:\n        total += f(x)\n    print(total)": set(),
    "    for x in loader:\n        loss = f(x)\n    print(loss)": set(),
    "    for n, x in enumerate(loader):\n        if n > 3: f(n)": set(),
    "    if a:\n        b = 1\n    else:\n        b = 2\n    c = b": set(),
    "    if a:\n        continue\n    else:\n        b = 2\n    c = b": set(),
    "    with f() as n:\n        g(n)": set(),
    "    print(epoch)": set(),
    "    if (n := f()):\n        g(n)": set(),
    "    try:\n        n = f()\n    except E:\n        raise\n    g(n)": set(),
    "    match f():\n        case 1:\n            n = 2": set(),
    "    def f():\n        return n\n    n = 2": set(),
    "    [n for n in range(3)]": set(),
    # never given one
    "    f(n)": set(),
    # of a clock
    "    now = time.time()\n    print(now - last)\n    last = now": set(),
    "    spent += perf_counter() - began": set(),
    "    _n += 1": set(),
}


@pytest.mark.parametrize("body", CASES)
def test_what_an_epoch_reads_before_it_gives_it_a_value(body: str) -> None:
    for head in ("for epoch in job.epochs(3):\n", "for epoch in tqdm(job.epochs(3)):\n"):
        assert carried_names(head + body) == CASES[body]
        assert carried_names("if __name__ == '__main__':\n  " + head + body) == CASES[body]
    assert carried_names("for epoch in range(3):\n" + body) == set()


def test_what_a_function_changes() -> None:
    function = "def step():\n    global n\n    n += 1\n    m = n\n    m += 1\n"
    assert carried_names(f"n = m = 0\n{function}for epoch in job.epochs(3):\n    step()") == {"n"}
    local = "def main():\n    n = 0\n    for epoch in job.epochs(3):\n        n += 1\n"
    assert carried_names(local) == set(), "local variables are not looked at"


def test_what_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = types.ModuleType("__main__")
    text = "for epoch in job.epochs(3):\n    n += 1\n    a += n\n    b = not b\n    c += x\n"
    (tmp_path / "script.py").write_text(text)
    vars(script).update(__file__=str(tmp_path / "script.py"), n=0, a=0.5, b=False, c=[1])
    monkeypatch.setitem(sys.modules, "__main__", script)
    carried = Carried()
    assert carried.values() == {"n": 0, "a": 0.5, "b": False}
    assert carried.difference({"n": 0, "a": 0.5, "x": 1}) == ""
    assert carried.difference({"n": 21, "a": 0.5, "b": False}).startswith(
        "n = 0, which was 21 in the process before it; if results depend on it, "
    )
    found = carried.difference({"n": 21, "b": True})
    assert found.startswith("b = False and n = 0, which were True and 21 in the process before")
    script.n = 21
    assert carried.difference({"n": 21}) == ""
    del script.n
    assert carried.difference({"n": 21}) == "", "the script gives it a value before it reads it"
    script.n = "x" * 200
    assert "n" not in carried.values()


@pytest.mark.parametrize("text", [None, "for epoch in", "a\0b"])
def test_a_script_without_a_text(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str | None
) -> None:
    script = types.ModuleType("__main__")
    if text is not None:
        (tmp_path / "script.py").write_text(text)
        script.__file__ = str(tmp_path / "script.py")
    monkeypatch.setitem(sys.modules, "__main__", script)
    assert Carried().values() == {}


def test_our_own_scripts_carry_nothing() -> None:
    """So nothing is told of them when a worker is replaced."""
    texts = {str(path): path.read_text() for path in ROOT.glob("examples/*.py")}
    for path in [ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("examples/*.md")]:
        for number, block in enumerate(re.findall(r"```python\n(.*?)```", path.read_text(), re.S)):
            texts[f"{path} {number}"] = block
    loops = 0
    for name, text in texts.items():
        loops += ".epochs(" in text
        assert carried_names(text) == set(), name
    assert loops > 3
