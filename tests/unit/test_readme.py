"""The examples in the documents do what the text around them says."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import click
import pytest

from tensorwire.cli import main

FENCE = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: Path) -> list[str]:
    """The python blocks of a page, each moved to its line, so that a traceback names the page's."""
    text = page.read_text()
    return ["\n" * text.count("\n", 0, m.start(1)) + m[1] for m in FENCE.finditer(text)]


def run(program: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", program], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_two_processes(repository: Path, tmp_path: Path) -> None:
    """The `py` block of that page: a program of its own, which a second process has to import."""
    page = (repository / "docs" / "memory.md").read_text()
    (block,) = re.findall(r"^```py\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    program = tmp_path / "two_processes.py"
    program.write_text(block)
    assert run(program).split() == "[0. 1. 2. 3. 4. 5. 6. 7. 8. 9.]".split()


@pytest.mark.parametrize("transports", ["shm", "tcp"])
def test_memory_page(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, transports: str
) -> None:
    """All blocks of both pages are one program, in their order."""
    monkeypatch.setenv("TENSORWIRE_TRANSPORTS", transports)
    pages = [repository / "docs" / name for name in ("memory.md", "memory-advanced.md")]
    found = [(page, block) for page in pages for block in blocks(page)]
    assert len(found) > 8
    if importlib.util.find_spec("torch") is None:
        found = [(page, block) for page, block in found if "import torch" not in block]
    program = tmp_path / "memory_page.py"
    runs = [f"exec(compile({block!r}, {str(page)!r}, 'exec'))\n" for page, block in found]
    program.write_text("".join(runs))
    printed = run(program)
    assert printed.startswith("499500.0\n")
    assert f"\n{transports} " in printed


def test_rpc_in_the_readme(repository: Path, tmp_path: Path) -> None:
    """The only `python` block; its output is in the text after it."""
    pytest.importorskip("grpc")
    (block,) = blocks(repository / "README.md")
    program = tmp_path / "rpc_page.py"
    program.write_text(block)
    printed = run(program).strip()
    assert f"It prints `{printed}`" in (repository / "README.md").read_text()


@pytest.mark.slow
def test_rpc_page(repository: Path, tmp_path: Path) -> None:
    """The `python` blocks are one program, which imports the `proto` block; the diff is made."""
    pytest.importorskip("grpc")
    protoc = pytest.importorskip("grpc_tools.protoc")
    from tensorwire import rpc

    page = repository / "docs" / "rpc.md"
    text = page.read_text()
    fences = re.findall(r"^```(\w*)$", text, re.MULTILINE)
    assert set(fences) == {"", "diff", "proto", "python"}
    (proto,) = re.findall(r"^```proto\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    (tmp_path / "prediction.proto").write_text(proto)
    ways = [f"-I{rpc.proto_path()}", f"-I{tmp_path}", f"--python_out={tmp_path}"]
    assert protoc.main(["", *ways, "prediction.proto"]) == 0
    (diff,) = re.findall(r"^```diff\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    for sign in "-+":
        lines = [line[1:] for line in diff.splitlines() if line.startswith(sign)]
        assert len(lines) == 2
        program = tmp_path / "diff.py"
        head = "import grpc, tensorwire.rpc\nfrom concurrent import futures\n"
        program.write_text(head + "\n".join(lines) + "\nchannel.close()")
        run(program)
    found = blocks(page)
    assert len(found) == fences.count("python")
    program = tmp_path / "rpc_page.py"
    program.write_text(
        "".join(f"exec(compile({block!r}, {str(page)!r}, 'exec'))\n" for block in found)
    )
    assert run(program).startswith("inside: no ")


@pytest.mark.parametrize("transports", ["shm", "tcp"])
def test_placement_page(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, transports: str
) -> None:
    """All blocks are one program; what it prints first is the table on the page."""
    monkeypatch.setenv("TENSORWIRE_TRANSPORTS", transports)
    page = repository / "docs" / "internals" / "placement.md"
    program = tmp_path / "placement_page.py"
    program.write_text("".join(blocks(page)))
    *table, last = run(program).splitlines()
    assert "".join(f"    {line}\n" for line in table) in page.read_text()
    assert last == f"(32, 7) {12800 if transports == 'shm' else 0}"


def test_measured_place(repository: Path) -> None:
    """The marks between which figures are written are there, once and in order."""
    text = (repository / "README.md").read_text()
    begin, end = "<!-- measured:begin -->\n", "<!-- measured:end -->\n"
    assert text.count(begin) == text.count(end) == 1
    assert text.index(begin) < text.index(end)


def test_commands_exist(repository: Path) -> None:
    """Every `tensorwire ...` and `make ...` that a page mentions is a command or a verb."""
    pages = {*repository.glob("*.md"), *repository.glob("*/*.md"), *repository.glob("docs/**/*.md")}
    pages.remove(repository / "docs" / "internals" / "wire.md")  # quotes text that is hashed
    pages.remove(repository / "CHANGELOG.md")  # names commands that have gone
    text = "\n".join(page.read_text() for page in pages)
    commands = set(re.findall(r"`tensorwire ([a-z]+)", text))
    assert commands
    assert commands <= set(main.list_commands(click.Context(main)))
    verbs = set(re.findall(r"(?:`|^    )make ([a-z][a-z-]*)", text, re.MULTILINE))
    makefile = (repository / "Makefile").read_text()
    known = set(re.findall(r"^([a-z-]+)(?:-%)?:", makefile, re.MULTILINE))
    assert verbs
    assert verbs <= known


def test_files_to_begin_with_exist(repository: Path) -> None:
    """Each file of that table is in one of the folders of its row."""
    text = (repository / "ARCHITECTURE.md").read_text()
    rows = re.findall(
        r"^\| (`.*) \| (.*) \|$", text.partition("## Where to begin")[2], re.MULTILINE
    )
    rows = [
        (folders, files) for folders, files in rows if (repository / folders.split("`")[1]).is_dir()
    ]
    assert len(rows) > 10
    for folders, files in rows:
        found = {
            each.name
            for folder in re.findall(r"`(.*?)`", folders)
            for each in (repository / folder).iterdir()
        }
        assert set(re.findall(r"`(.*?)`", files)) <= found
