"""The allocator that produces gradients in place: scripts of their own.

How it is got, what it does beside other allocators and in forked processes.
"""

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
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
    # The two places in which the library is looked for, unless a test names both.
    places = {"XDG_RUNTIME_DIR": environment.get("XDG_CACHE_HOME", "")}
    return subprocess.run(
        [sys.executable, "-W", "error::UserWarning", "-c", PREAMBLE + script],
        env={**os.environ, **places, **environment},
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
    assert not list(tmp_path.glob("tensorwire/allocator-*")), "half a library was left"


@pytest.mark.slow
def test_a_cache_that_others_may_write_is_not_used(tmp_path: Any) -> None:
    folder = tmp_path / "tensorwire"
    folder.mkdir()
    folder.chmod(0o777)
    other = tmp_path / "run"
    other.mkdir(mode=0o700)
    done = run(
        "_, places, _ = train(3); assert all(places)",
        XDG_CACHE_HOME=str(tmp_path),
        XDG_RUNTIME_DIR=str(other),
    )
    assert done.returncode == 0, done.stderr
    assert not list(folder.iterdir())
    assert len(list(other.glob("tensorwire/allocator-*.so"))) == 1


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One that takes no time, with a cache of its own; it says each run in the file `runs`."""
    made = tmp_path / "c++"
    made.write_text(
        f"#!/bin/sh\necho run >>{tmp_path}/runs\n"
        f"while [ -e {tmp_path}/wait ]; do sleep 0.01; done\n"
        'while [ "$1" != -o ]; do shift; done; echo made >"$2"\n'
    )
    made.chmod(0o755)
    monkeypatch.setenv("CXX", str(made))
    for variable, name in (("XDG_CACHE_HOME", "cache"), ("XDG_RUNTIME_DIR", "run")):
        (tmp_path / name).mkdir(mode=0o700)
        monkeypatch.setenv(variable, str(tmp_path / name))
    return made


def runs(compiler: Path) -> int:
    counted = compiler.with_name("runs")
    return len(counted.read_text().splitlines()) if counted.exists() else 0


def test_each_torch_has_a_library_of_its_own(
    compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If torch is replaced by another version at the same place, its headers are other ones."""
    first = library._compiled()
    with monkeypatch.context() as another:
        another.setattr(torch, "__version__", "2.99.0")
        second = library._compiled()
    assert torch.__version__ in first.name
    assert "2.99.0" in second.name
    assert sorted(tmp_path.glob("cache/tensorwire/*.so")) == sorted([first, second])
    assert library._compiled() == first
    assert runs(compiler) == 2


def test_what_another_process_compiled_needs_no_compiler(
    compiler: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Named for a bug: the name had the compiler in it, so without one nothing was found."""
    made = library._compiled()
    monkeypatch.setenv("CXX", "")
    monkeypatch.setenv("PATH", "")
    assert library._compiled() == made
    assert library.find() == f"compiled before, {made}"


def waiters(lock: Path) -> bool:
    inode = f":{lock.stat().st_ino} " if lock.exists() else "none"
    return any(
        "->" in line and inode in line for line in Path("/proc/locks").read_text().splitlines()
    )


def test_where_the_cache_cannot_be_written_one_process_compiles_for_all(
    compiler: Path, tmp_path: Path
) -> None:
    """Named for a bug: each worker compiled its own, at each start."""
    (tmp_path / "cache").rmdir()
    (tmp_path / "cache").touch()  # neither root can make a folder in it
    (tmp_path / "wait").touch()
    lock = tmp_path / "run/tensorwire/allocator.lock"
    with ThreadPoolExecutor() as pool:
        both = [pool.submit(library._compiled) for _ in range(2)]
        while runs(compiler) < 2 and not (runs(compiler) == 1 and waiters(lock)):
            time.sleep(0.01)
        (tmp_path / "wait").unlink()
        (made,) = {each.result() for each in both}
    assert made.parent == lock.parent
    assert library._compiled() == made
    assert runs(compiler) == 1


def test_who_compiles_says_so_and_so_does_who_waits(
    compiler: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Named for a bug: the first start said nothing for up to a minute."""
    (tmp_path / "wait").touch()
    lock = tmp_path / "cache/tensorwire/allocator.lock"
    with ThreadPoolExecutor() as pool:
        both = [pool.submit(library._compiled) for _ in range(2)]
        while not waiters(lock):
            time.sleep(0.01)
        (tmp_path / "wait").unlink()
        (made,) = {each.result() for each in both}
    told = capfd.readouterr().err.splitlines()
    assert [line.partition(str(made))[0] for line in told] == [
        "tensorwire: compiling ",
        "tensorwire: waiting for another process, which compiles ",
    ]
    assert str(compiler) in told[0]
    library._compiled()
    assert not capfd.readouterr().err


@pytest.mark.parametrize("harm", ["cut", "changed", "writable", "linked"])
def test_a_damaged_or_foreign_library_is_compiled_again(
    harm: str, compiler: Path, tmp_path: Path
) -> None:
    """To load one that is cut short ends the process with SIGBUS."""
    made = library._compiled()
    content = made.read_bytes()
    if harm == "cut":
        made.write_bytes(content[:-1])
    elif harm == "changed":
        made.write_bytes(b"x" + content[1:])
    elif harm == "writable":
        made.chmod(0o722)
    else:
        made.rename(tmp_path / "elsewhere.so")
        made.symlink_to(tmp_path / "elsewhere.so")
    assert library._compiled() == made
    assert runs(compiler) == 2
    assert made.read_bytes() == content
    assert not made.is_symlink()
    assert made.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    ("user", "mode", "safe"), [(0, 0o755, 1), (1, 0o700, 1), (2, 0o700, 0), (1, 0o720, 0)]
)
def test_only_this_user_and_root_may_have_written_it(
    user: int, mode: int, safe: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1)
    assert library._is_safe(os.stat_result((mode, 0, 0, 1, user, 0, 0, 0, 0, 0))) == bool(safe)


def test_without_a_home_no_folder_is_named_after_it(
    compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Named for a bug: a folder `~` appeared in the working directory."""
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert library._compiled().is_relative_to(tmp_path / "run")
    assert not list((tmp_path / "here").iterdir())


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
    cache.mkdir(mode=0o700)
    (folder / library._brought().name).write_bytes(b"\x7fELF of a machine that is not this one")
    done = run(
        FROM.format(str(folder)) + "_, places, _ = train(3); assert all(places)",
        XDG_CACHE_HOME=str(cache),
    )
    assert done.returncode == 0, done.stderr
    assert len(list(cache.glob("tensorwire/allocator-*.so"))) == 1


@pytest.mark.slow
def test_why_it_cannot_be_loaded_is_told_where_it_cannot_be_compiled(tmp_path: Path) -> None:
    (tmp_path / library._brought().name).write_bytes(b"\x7fELF of a machine that is not this one")
    (tmp_path / "cache").mkdir(mode=0o700)
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
    command += [f"-L{Path(torch.__file__).parent / 'lib'}", "-lc10", "-fvisibility=default"]
    subprocess.run([*command, "-o", str(made)], check=True, timeout=100)
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
