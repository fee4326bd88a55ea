"""The examples that train: alone, with workers, over both transports; and beside their twins."""

import ast
import difflib
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from programs import output_of

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.cold  # what people run is tested as they run it
TWINS = ["digits_cnn", "char_transformer"]
SMALL = ["--characters=9000", "--batch-size=4", "--sample=20"]
FENCE = r"^```{}\n(.*?)^```$"


@pytest.fixture
def run(repository: Path, tmp_path: Path) -> Callable[..., str]:
    """Runs an example in an empty folder, alone or with options of `tensorwire run`."""

    def run(launch: str | None, script: str, *arguments: str, code: int = 0) -> str:
        command = [sys.executable, "-W", "error"]
        if launch is not None:
            command = [sys.executable, "-m", "tensorwire", "run", *launch.split()]
        path = script if "/" in script else str(repository / "examples" / f"{script}.py")
        return output_of([*command, path, *arguments], tmp_path, code)

    return run


def code_lines(path: Path) -> list[str]:
    """Without the docstring, comments and empty lines."""
    tree = ast.parse(path.read_text())
    docstring = tree.body.pop(0)
    assert isinstance(docstring, ast.Expr)
    lines = path.read_text().splitlines()[docstring.end_lineno :]
    return [line for line in lines if line.strip() and not line.lstrip().startswith("#")]


@pytest.mark.parametrize("name", TWINS)
def test_at_most_eight_lines_differ(repository: Path, name: str) -> None:
    plain, ours = (
        code_lines(repository / "examples" / f"{name}{which}.py") for which in ("_plain", "")
    )
    changes = [line[0] for line in difflib.ndiff(plain, ours)]
    assert 0 < max(changes.count("-"), changes.count("+")) <= 8
    shared = (repository / "examples" / f"{ours_module(ours)}.py").read_text()
    assert "tensorwire" not in shared, "it would hide lines that differ"


def ours_module(lines: list[str]) -> str:
    """The module of this folder that a twin imports."""
    return next(line.split()[1] for line in lines if line.split()[1] in ("digits", "characters"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "options"),
    [
        ("digits_cnn_plain", ["--min-accuracy=0.9"]),
        ("char_transformer_plain", SMALL),
        ("char_transformer", SMALL),
    ],
)
def test_alone(run: Callable[..., str], script: str, options: list[str]) -> None:
    if script == "digits_cnn_plain":
        pytest.importorskip("sklearn")
    assert "epoch 2/2: " in run(None, script, "--epochs=2", *options)


def tensors(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    items: Any = value.items() if isinstance(value, dict) else None
    items = enumerate(value) if isinstance(value, list | tuple) else items
    if items is None:
        yield path, value.numpy().tobytes() if isinstance(value, torch.Tensor) else value
        return
    for key, item in items:
        yield from tensors(item, f"{path}/{key}")


@pytest.mark.slow
def test_digits(run: Callable[..., str], tmp_path: Path) -> None:
    """The main job."""
    pytest.importorskip("sklearn")
    printed = run("--workers 2", "digits_cnn")
    assert "[worker 0] epoch 15/15: " in printed
    assert "[worker 1]" not in printed, "nothing to tell"
    for text in ("computation", "exposed communication", "server: work", "shm"):
        assert text in printed
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["last"]["accuracy"] >= 0.97
    assert len(report["epochs"]) == 15
    assert report["workers"] == report["slices"] == 2
    assert report["steps"] == 15 * 23  # 22 steps of 2 x 32 samples and the rest of 1437
    assert report["paths"] == ["shm"]
    assert report["computation_s"] + report["exposed_communication_s"] == pytest.approx(
        report["seconds_per_step"]
    )


@pytest.mark.slow
def test_digits_same_bits(run: Callable[..., str], tmp_path: Path) -> None:
    """From one process, and from two with two servers."""
    pytest.importorskip("sklearn")
    saved = []
    for launch in ("--workers 1 --slices 2", "--workers 2 --servers 2 --transports tcp"):
        printed = run(launch, "digits_cnn", "--epochs=2", "--min-accuracy=0.9")
        assert ("tcp" if "tcp" in launch else "shm") in printed
        saved.append(dict(tensors(torch.load(tmp_path / "digits.pt", weights_only=True))))
    assert len(saved[0]) > 40
    assert saved[1] == saved[0]


@pytest.mark.slow
def test_digits_that_learn_too_little_fail(run: Callable[..., str]) -> None:
    pytest.importorskip("sklearn")
    printed = run(None, "digits_cnn", "--epochs=1", "--min-accuracy=1", code=1)
    assert "epoch 1/1: " in printed
    assert "is below 1.0" in printed


@pytest.mark.slow
def test_transformer_learns(run: Callable[..., str]) -> None:
    printed = run("--workers 2", "char_transformer", "--epochs=4", *SMALL)
    losses = [float(loss) for loss in re.findall(r"\[worker 0\] epoch .* loss (\d\.\d+)", printed)]
    assert len(losses) == 4
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.9 * losses[0]


def program_of(
    repository: Path, pages: str, folder: Path, language: str = "py"
) -> tuple[Path, int]:
    """Writes the blocks of pages in a language as one program; returns also how many there are."""
    runs = []
    for page in pages.split():
        text = (repository / page).read_text()
        for match in re.finditer(FENCE.format(language), text, re.MULTILINE | re.DOTALL):
            # Each block moved to its line, so that a traceback names the page's.
            block = "\n" * text.count("\n", 0, match.start(1)) + match[1]
            runs.append(f"exec(compile({block!r}, {page!r}, 'exec'))\n")
    program = folder / f"page_{language}.py"
    program.write_text("".join(runs))
    return program, len(runs)


TRAINING = "docs/training.md docs/data.md docs/gradients.md docs/checkpoints.md"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pages", "launch"),
    [("README.md", "--workers 2"), (TRAINING, None), (TRAINING, "--workers 2")],
    ids=["readme", "training-alone", "training"],
)
def test_pages(
    run: Callable[..., str], repository: Path, tmp_path: Path, pages: str, launch: str | None
) -> None:
    """The `py` blocks of pages that go on from each other are one program."""
    program, count = program_of(repository, pages, tmp_path)
    assert count == 1 if pages == "README.md" else count == 15
    printed = run(launch, str(program))
    epochs = 10 if pages == "README.md" else 3
    assert f"epoch {epochs}/{epochs}: " in printed
    saved = torch.load(tmp_path / "checkpoint", weights_only=True)
    assert {"model", "optimizer"} <= set(saved)
    assert saved["tensorwire"]["epochs"] == epochs


def _output_of_torch(command: Sequence[str], folder: Path) -> str:
    """Returns the output of a script that has nothing of tensorwire in it; it gets a second try.

    On a busy machine torch sometimes aborts in the end of a process that has left its process
    group: "terminate called without an active exception". Saved files are removed before, as the
    second try would go on from there; unless they were there already.
    """
    there = set(folder.glob("*.pt"))
    try:
        return output_of(command, folder)
    except AssertionError as error:
        if "terminate called without an active exception" not in str(error):
            raise
    for made in set(folder.glob("*.pt")) - there:
        made.unlink()
    return output_of(command, folder)


@pytest.mark.slow
def test_from_ddp(run: Callable[..., str], repository: Path, tmp_path: Path) -> None:
    """The script before and the script after learn the same task; each goes on where it ended."""
    page = "docs/from-ddp.md"
    ddp, count = program_of(repository, page, tmp_path, "python")
    assert count == 2
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    printed = _output_of_torch([*torchrun, str(ddp)], tmp_path)
    before = re.findall(r"^epoch (\d): accuracy (\S+)$", printed, re.MULTILINE)
    ours, count = program_of(repository, page, tmp_path)
    assert count == 7
    printed = run("--workers 2", str(ours))
    after = re.findall(r"^.worker 0. epoch (\d)/3: accuracy (\S+) ", printed, re.MULTILINE)
    for lines in (before, after):
        assert [epoch for epoch, _ in lines] == ["1", "2", "3"]
        assert float(lines[-1][1]) > 0.85
    saved = [torch.load(tmp_path / name, weights_only=True) for name in ("ddp.pt", "checkpoint")]
    names = [[key.removeprefix("module.") for key in each["model"]] for each in saved]
    assert names[0] == names[1]
    assert "epoch " not in _output_of_torch([*torchrun, str(ddp)], tmp_path)
    assert "epoch " not in run(None, str(ours))
