"""The rest of a traceback, and the mark of an error that is another process's fault."""

import subprocess
import sys
from types import ModuleType, SimpleNamespace

import pytest

import tensorwire
from tensorwire import tracebacks
from tensorwire.errors import PeerLostError, consequence
from tensorwire.tracebacks import Failure, failure_of, is_consequence


def failure(source: str, **names: object) -> Failure:
    """Returns the failure of a program that raises; `names` are its variables."""
    try:
        exec(compile(source, "train.py", "exec"), {"__name__": "__main__", **names})
    except BaseException as error:
        trace = error.__traceback__
        return failure_of(error, trace and trace.tb_next)  # without this function's frame
    raise AssertionError("it raises nothing")


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A package whose frames are to be left out; `call(f)` calls f two frames deeper."""
    module = ModuleType("torch")
    module.__path__ = ["/nowhere/torch"]
    source = "def call(f): return inner(f)\ndef inner(f): return f()\ndef fail(): raise OSError(1)"
    exec(compile(source, "/nowhere/torch/nn.py", "exec"), module.__dict__)
    monkeypatch.setitem(sys.modules, "torch", module)
    return module


def test_frames_of_libraries_are_folded(library: ModuleType) -> None:
    found = failure("def mine(): t.call(t.fail)\nt.call(mine)", t=library)
    assert found.hidden == 5
    lines = [line for line in found.text.splitlines() if "train.py" in line or "…" in line]
    assert [line.strip().partition(", in ")[0] for line in lines] == [
        'File "train.py", line 2', "… 2 frames of torch",
        'File "train.py", line 1', "… 3 frames of torch",
    ]  # fmt: skip
    assert found.line() == "OSError: 1, at train.py:1 in mine"


def test_an_error_of_a_library_alone_is_whole(library: ModuleType) -> None:
    try:
        library.call(library.fail)
    except OSError as error:
        trace = error.__traceback__
        found = failure_of(error, trace and trace.tb_next)  # without this test's own frame
    assert found.hidden == 0
    assert found.text.count("/nowhere/torch/nn.py") == 3
    assert found.where == ""


def test_an_error_at_the_end_of_a_with_is_the_user_s(library: ModuleType) -> None:
    """contextlib stands between the user's line and the library that raises."""
    source = "import contextlib\n@contextlib.contextmanager\ndef edit():\n  yield\n  fail()"
    exec(compile(source, "/nowhere/torch/job.py", "exec"), library.__dict__)
    found = failure("with t.edit():\n  x = 1", t=library)
    assert found.line() == "OSError: 1, at train.py:1"
    assert "contextlib" not in found.text


def test_a_cause_is_shortened_too(library: ModuleType) -> None:
    found = failure(
        "try:\n  t.call(t.fail)\nexcept OSError as e:\n  raise KeyError('outer') from e", t=library
    )
    assert found.hidden == 3
    assert "nowhere" not in found.text
    assert found.text.count("Traceback") == 2


def test_a_cause_that_is_told_in_other_words_is_left_out() -> None:
    """Frames of tensorwire and Python are left out; other code that they call stays."""
    ours: dict[str, object] = {}
    source = """
import pathlib
def save(make):
    try: make()
    except OSError as error: raise OSError('cannot save: it is full') from error
def own(): pathlib.Path('/proc/x/y').mkdir()
"""
    exec(compile(source, f"{tensorwire.__path__[0]}/made.py", "exec"), ours)
    found = failure("save(own)", **ours)
    assert found.text.count("Traceback") == 1
    assert found.text.endswith("OSError: cannot save: it is full\n")
    assert "train.py" in found.text
    assert found.hidden == 4
    found = failure("def mine(): raise OSError('mine')\nsave(mine)", **ours)
    assert found.text.count("Traceback") == 2
    assert "OSError: mine" in found.text


def chain(raised: BaseException, during: BaseException) -> BaseException:
    try:
        try:
            raise during
        except BaseException:
            raise raised  # noqa: B904
    except BaseException as error:
        return error


def test_what_is_a_consequence() -> None:
    assert is_consequence(PeerLostError("x"))
    assert is_consequence(consequence("x"))
    assert is_consequence(chain(ValueError(), consequence("x")))
    assert is_consequence(ExceptionGroup("all", [PeerLostError("x"), consequence("y")]))
    assert not is_consequence(ExceptionGroup("one", [PeerLostError("x"), ValueError()]))
    assert not is_consequence(RuntimeError("x"))
    assert not is_consequence(chain(ValueError(), KeyError()))
    circle = chain(ValueError(), KeyError())
    assert circle.__context__ is not None
    circle.__context__.__context__ = circle
    assert not is_consequence(circle)


@pytest.mark.parametrize(
    ("raised", "mode", "said"),
    [
        ("errors.consequence('worker 1 was lost')", "", "worker 3: RuntimeError: worker 1 was lo"),
        ("errors.consequence('worker 1 was lost')", "full", "Traceback"),
        ("KeyError(1)", "", "Traceback"),
    ],
)
def test_without_a_launcher_a_consequence_is_a_line(raised: str, mode: str, said: str) -> None:
    code = (
        f"from tensorwire import errors, tracebacks; tracebacks.install('worker 3'); raise {raised}"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True,
        env={"TENSORWIRE_TRACEBACKS": mode},
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.startswith(said)
    assert ("Traceback" in done.stderr) == (said == "Traceback")


def test_a_hook_of_the_program_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = lambda *_: None  # noqa: E731
    monkeypatch.setattr(sys, "excepthook", mine)
    tracebacks.install("worker 0")
    assert sys.excepthook is mine


def test_workers_of_an_engine_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    discovery = pytest.importorskip("tensorwire.torch.discovery", reason="torch is not installed")
    meeting = SimpleNamespace(rank=1, workers=2)
    monkeypatch.setattr(discovery.rendezvous, "meet", lambda rank, workers: meeting)
    monkeypatch.setattr(discovery, "_start_servers", lambda meeting: ("place",))
    monkeypatch.setattr(discovery, "_by_engine", False)
    named: list[str] = []
    monkeypatch.setattr(tracebacks, "install", named.append)
    assert discovery.find_place().servers == ("place",)
    assert named == ["worker 1"]
