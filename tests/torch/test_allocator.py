"""The allocator that produces gradients in place: scripts of their own.

How it is got, what it does beside other allocators and in forked processes.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tensorwire.torch.allocator import library

ROOT = Path(__file__).resolve().parents[2]

PREAMBLE = """
import os, sys
import torch
from torch import nn
import tensorwire.torch as tw

def train(steps, placement="plan", close=True):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(20, 30), nn.ReLU(), nn.Linear(30, 10))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    opt = tw.DistributedOptimizer(opt, model, placement=placement)
    for step in range(steps):
        opt.zero_grad()
        model(torch.ones(4, 20)).square().mean().backward()
        opt.step()
    rows = tw.explain_optimizer(opt).gradients
    if close:
        opt.close()
    return model, [row.in_place for row in rows], {row.reason for row in rows}

job = tw.init()
"""


def run(script: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-W", "error::UserWarning", "-c", PREAMBLE + script],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=100,
    )


@pytest.mark.slow
def test_importing_installs_nothing() -> None:
    done = run(
        """
from tensorwire.torch.allocator.library import load
train(2, "copy")
assert not load.cache_info().currsize
"""
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_without_a_compiler_there_is_a_warning_with_the_remedy(tmp_path: Any) -> None:
    done = run(
        """
import warnings
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    _, places, reasons = train(3)
(warning,) = [each for each in seen if each.category is tw.PlacementWarning]
assert "no C++ compiler was found" in str(warning.message), warning.message
assert "g++" in str(warning.message)
assert warning.filename == "<string>", warning.filename
assert not any(places) and "no C++ compiler" in reasons.pop()
""",
        PATH=str(tmp_path),
        XDG_CACHE_HOME=str(tmp_path),
        CXX="",
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_what_does_not_compile_is_told(tmp_path: Any) -> None:
    compiler = tmp_path / "c++"
    compiler.write_text("#!/bin/sh\necho 'x.cc:1: error: no such torch' >&2; exit 1\n")
    compiler.chmod(0o755)
    done = run("train(1)", CXX=str(compiler), XDG_CACHE_HOME=str(tmp_path))
    assert done.returncode != 0
    assert "error: no such torch" in done.stderr
    assert not list(tmp_path.glob("tensorwire/*")), "half a library was left"


@pytest.mark.slow
def test_a_cache_that_others_may_write_is_not_used(tmp_path: Any) -> None:
    folder = tmp_path / "tensorwire"
    folder.mkdir()
    folder.chmod(0o777)
    done = run("_, places, _ = train(3); assert all(places)", XDG_CACHE_HOME=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert not list(folder.iterdir())


def test_each_torch_has_a_library_of_its_own(tmp_path: Any, monkeypatch: Any) -> None:
    """Where torch is replaced by another version at the same place, its headers are other ones."""
    compiler = tmp_path / "c++"  # which takes no time
    compiler.write_text('#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done; echo made >"$2"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first = library._compiled()
    written = first.stat()
    with monkeypatch.context() as another:
        another.setattr(torch, "__version__", "2.99.0")
        second = library._compiled()
    assert torch.__version__ in first.name
    assert "2.99.0" in second.name
    assert sorted(tmp_path.glob("tensorwire/*")) == sorted([first, second])
    assert library._compiled() == first
    assert (first.stat().st_ino, first.stat().st_mtime_ns) == (written.st_ino, written.st_mtime_ns)


@pytest.fixture(scope="module")
def brought(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the allocator that a wheel for this torch has."""
    folder = tmp_path_factory.mktemp("wheel")
    options = ["PYTHON=OFF", "WERROR=ON", f"TORCHES={Path(torch.__file__).parent}"]
    for command in (
        ["-G", "Ninja", "-S", str(ROOT), *(f"-DTENSORWIRE_{option}" for option in options)],
        ["--build", str(folder), "--target", library._brought().stem],
    ):
        where = ["-B", str(folder)] if "-S" in command else []
        subprocess.run(["cmake", *command, *where], check=True, capture_output=True)
    return folder


FROM = (
    "from pathlib import Path; from tensorwire.torch.allocator import library\n"
    "library._FOLDER = Path({!r})\n"
)


@pytest.mark.slow
def test_with_the_library_of_a_wheel_nothing_is_compiled(brought: Path, tmp_path: Path) -> None:
    done = run(
        FROM.format(str(brought)) + "_, places, _ = train(3); assert all(places)",
        PATH=str(tmp_path),
        XDG_CACHE_HOME=str(tmp_path),
        CXX="",
    )
    assert done.returncode == 0, done.stderr
    assert not list(tmp_path.iterdir())
    binary = (brought / library._brought().name).read_bytes()
    assert str(Path(torch.__file__).parent).encode() not in binary, "it names this machine's torch"


@pytest.mark.slow
def test_one_that_cannot_be_loaded_is_compiled_here(tmp_path: Path) -> None:
    folder, cache = tmp_path / "package", tmp_path / "cache"
    folder.mkdir()
    (folder / library._brought().name).write_bytes(b"\x7fELF of a machine that is not this one")
    done = run(
        FROM.format(str(folder)) + "_, places, _ = train(3); assert all(places)",
        XDG_CACHE_HOME=str(cache),
    )
    assert done.returncode == 0, done.stderr
    assert len(list(cache.glob("tensorwire/allocator-*.so"))) == 1


def test_why_it_cannot_be_loaded_is_told_where_it_cannot_be_compiled(tmp_path: Path) -> None:
    (tmp_path / library._brought().name).write_bytes(b"\x7fELF of a machine that is not this one")
    done = run(
        FROM.format(str(tmp_path)) + "train(1)",
        PATH="",
        XDG_CACHE_HOME=str(tmp_path / "cache"),
        CXX="",
    )
    assert done.returncode != 0
    assert "no C++ compiler was found" in done.stderr
    assert "came with tensorwire cannot be loaded" in done.stderr


def test_the_library_of_another_minor_version_is_not_taken(monkeypatch: Any) -> None:
    mine = library._brought().name
    monkeypatch.setattr(torch, "__version__", "2.99.1+cu130")
    assert library._brought().name == mine.replace(mine.split("-")[1], "2.99")


@pytest.mark.slow
def test_a_forked_child_uses_malloc() -> None:
    done = run(
        """
from tensorwire.torch.allocator.library import load
model, places, _ = train(3, close=False)
assert all(places)
before = [p.grad.clone() for p in model.parameters()]
count = load().placed()
child = os.fork()
if child == 0:
    for p in model.parameters():
        p.grad = None
        torch.ones(p.shape)
    os._exit(0 if load().placed() == count else 1)
assert os.waitpid(child, 0)[1] == 0
assert all(torch.equal(p.grad, b) for p, b in zip(model.parameters(), before))
"""
    )
    assert done.returncode == 0, done.stderr


OTHER_ALLOCATOR = r"""
#include <c10/core/CPUAllocator.h>
struct Other final : c10::Allocator {
  c10::DataPtr allocate(size_t n) override { return c10::GetDefaultCPUAllocator()->allocate(n); }
  c10::DeleterFnPtr raw_deleter() const override {
    return c10::GetDefaultCPUAllocator()->raw_deleter();
  }
  void copy_data(void* to, const void* from, size_t n) const override {
    default_copy_data(to, from, n);
  }
};
extern "C" void install() { c10::SetCPUAllocator(new Other); }
"""


@pytest.mark.slow
def test_another_allocator_may_come_later(tmp_path: Any) -> None:
    source, made = tmp_path / "other.cc", tmp_path / "other.so"
    source.write_text(OTHER_ALLOCATOR)
    command = library._command(["c++"])
    command[command.index(str(library._SOURCE))] = str(source)
    subprocess.run([*command, "-fvisibility=default", "-o", str(made)], check=True, timeout=100)
    done = run(
        """
import ctypes
model, places, _ = train(3, close=False)
assert all(places)
ctypes.CDLL(os.environ["LIBRARY"]).install()
_, places, reasons = train(3)
assert not any(places)
assert reasons == {"another CPU allocator was installed after tensorwire's"}, reasons
del model
""",
        LIBRARY=str(made),
    )
    assert done.returncode == 0, done.stderr
