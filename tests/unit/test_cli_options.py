"""No option of any command is ignored: it works, or is an error that says why."""

import importlib
import importlib.util
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from tensorwire.cli import main
from tensorwire.command import Command

WRONG = [
    ("run -w 1 -w 2 SCRIPT", "--workers is given twice"),
    ("run --slices 2 --slices 4 -w 2 SCRIPT", "--slices is given twice"),
    ("run SCRIPT -w 2", "-w stands after the script, which gets it; put it before SCRIPT"),
    ("run SCRIPT --workers=2 --lr 1", "--workers=2 stands after the script"),
    ("run SCRIPT --on-death end", "--on-death stands after the script"),
    ("run --on-death end --on-death restart -w 2 SCRIPT", "--on-death is given twice"),
    ("run -w 2 --on-death restart:-1 SCRIPT", "restarts is -1; 0 or more are needed"),
    ("run -w 2 --on-death restart:0 SCRIPT", "restarts is 0; 1 or more are needed"),
    ("run -w 2 --on-death restart --transports tcp SCRIPT", "add shm, or use --on-death end"),
    ("run -w 2 --on-death restart --listen 0.0.0.0 SCRIPT", "or use --on-death end"),
    ("run -w 2:4 --on-death restart SCRIPT", "means --on-death takeover"),
    ("run -w 1:1 SCRIPT", "start several, or name more: --workers 1:MAX"),
    ("run -w 1:1000000000 SCRIPT", "there can be 65536 at most"),
    ("run -w 1000000000 SCRIPT", "there can be 65536 at most"),
    ("run -w 2 -s 1:3000 SCRIPT", "256 are the most"),
    ("run -w 2:4 --slices 8 SCRIPT", "means 4 slices: leave --slices out"),
    ("run -w 4:2 SCRIPT", "'--workers' / '-w': 4:2 starts 4 processes, above its"),
    ("run -w 2 -s 3:1 SCRIPT", "3:1 starts 3 processes, above its maximum, 1"),
    ("run -w 2:x SCRIPT", "is not a number, or two numbers as in 2:4"),
    ("run -w 2 --on-death never SCRIPT", "is unknown; choose restart, takeover or end"),
    ("run -w 2 --on-death end:3 SCRIPT", "'end:3': only restart and takeover take a number"),
    ("run -w 2 --on-death restart:x SCRIPT", "is not a number of deaths, as in restart:3"),
    ("run -w 2 --durable SCRIPT", "--durable is now --on-death restart"),
    ("run -w 2 --no-durable SCRIPT", "--no-durable is now --on-death end"),
    ("run -w 2 --restarts 5 SCRIPT", "--restarts is now --on-death restart:N"),
    ("run -w 2 --restarts=5 SCRIPT", "--restarts is now --on-death restart:N"),
    ("run -w 2 --no-restart-workers SCRIPT", "is now --on-death takeover"),
    ("run -w 2 --slices 4 --elastic SCRIPT", "--elastic is now --workers W:MAX"),
    ("run -w 2 --shares 4 SCRIPT", "--shares is now --servers S:MAX"),
    ("run -w 2", "Missing argument 'SCRIPT'"),
    ("doctor --jsn", "No such option"),
    ("doctor --quick --json /dev/stdout", "/dev/stdout is no file"),
    ("doctor --quick --json /dev/null", "/dev/null is no file"),
    ("doctor --quick --json /dev/fd/1", "/dev/fd/1 is no file"),
    ("doctor --json a --json b", "--json is given twice"),
    ("doctor --seconds 1 --seconds 2", "--seconds is given twice"),
    ("doctor --listen 127.0.0.1:0", "--listen belongs to --serve"),
    ("doctor --serve --json a", "belong to the measuring end"),
    ("explain --json a --json b SCRIPT", "--json is given twice"),
    ("explain --tiny SCRIPT", "--tiny is for a workload"),
    ("explain lstm --jsn x", "No such option"),
    ("explain lstm more", "the workload lstm takes no argument 'more'"),
    ("explain lstm --json nowhere/at/all.json", "the folder of nowhere/at/all.json does not exist"),
    ("explain --json nowhere/at/all.json SCRIPT", "does not exist"),
    ("bench memory --figure figure.txt", "figure.txt is no figure; it ends with .svg, .pdf, .png"),
    ("bench memory --figure same.svg --json same.svg", "both name same.svg"),
    ("bench memory --json nowhere/at/all.json", "does not exist"),
    ("bench memory --cases signal --sizes 8", "--sizes is of write and read, which --cases leaves"),
    ("bench memory --cases signal --figure f.svg", "--figure is of write and read"),
    ("bench memory --cases round_trip --wires shm", "round_trip is measured on tcp"),
    ("bench memory --systems torch-copy", "torch-copy is measured on gpu alone: name it with --w"),
    ("bench memory --systems raw-socket --wires shm", "measured on tcp, which --wires leaves out"),
    ("bench memory --sizes 8,8", "8 is named twice"),
    ("bench memory --wires shm --wires shm", "shm is named twice"),
    ("bench memory --seconds 1 --seconds 2", "--seconds is given twice"),
    ("bench memory --from SCRIPT --quick", "--quick has no meaning for --from"),
    ("bench memory --from SCRIPT --wires shm", "--wires has no meaning for --from"),
    ("bench memory --from SCRIPT", "SCRIPT: not a bench report of format 2"),
    ("bench memory --from nothing.json", "'nothing.json' does not exist"),
    ("bench training --wires alone --steps 5", "--steps has no meaning for --wires alone"),
    ("bench training --wires alone --models mlp200", "measures small models"),
    ("bench training --wires alone --systems limit", "measures tensorwire, which --systems leaves"),
    ("bench training --steps 5 --steps 6", "--steps is given twice"),
    ("rpc trace", "Missing argument 'COMMAND...'"),
    ("rpc trace --json a --json b -- true", "--json is given twice"),
    ("rpc trace --json nowhere/at/all.json -- true", "does not exist"),
    ("rpc trace --jsn x -- true", "No such option"),
]


@pytest.mark.parametrize(("line", "said"), WRONG, ids=[line for line, _ in WRONG])
def test_options_that_make_no_sense(
    line: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Named for a bug: `explain alexnet --json f` wrote nothing and said nothing."""
    if line.startswith(("bench training", "bench placement")):
        pytest.importorskip("torch", reason="torch is not installed")
    monkeypatch.chdir(tmp_path)
    Path("SCRIPT").write_text("raise AssertionError('it was run')")
    result = CliRunner().invoke(main, line.split())
    assert result.exit_code != 0
    assert not isinstance(result.exception, AssertionError)
    assert said in " ".join(result.output.split())


NEED_TORCH = [
    "run -w 2 SCRIPT", "explain SCRIPT", "explain lstm", "bench training --quick",
    "bench placement --quick", "bench placement --list",
]  # fmt: skip


@pytest.mark.parametrize("line", NEED_TORCH)
def test_without_torch_the_remedy_is_told(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Named for a bug: three tracebacks of a server, or one of the bench."""
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "torch" else find_spec(name)
    )
    monkeypatch.setitem(sys.modules, "torch", None)  # its import fails
    catalog = importlib.import_module("tensorwire_benchmarks.workloads.catalog")
    catalog._tensors.cache_clear()
    monkeypatch.chdir(tmp_path)
    Path("SCRIPT").write_text("raise AssertionError('it was run')")
    result = CliRunner().invoke(main, line.split())
    assert isinstance(result.exception, SystemExit), result.exception
    assert "Error: " in result.output
    assert "torch: pip install 'tensorwire[" in " ".join(result.output.split())


def commands(group: click.Group) -> list[click.Command]:
    found, context = [], click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        found += commands(command) if isinstance(command, click.Group) else [command]
    return found


def test_every_command_looks_at_its_options() -> None:
    assert len(commands(main)) >= 8
    assert [each.name for each in commands(main) if not isinstance(each, Command)] == []


def test_every_option_has_a_help() -> None:
    for command in commands(main):
        for option in command.params:
            assert not isinstance(option, click.Option) or option.help, (command.name, option.name)


def test_the_help_of_run_fits_on_one_screen() -> None:
    result = CliRunner().invoke(main, ["run", "--help"], terminal_width=80)
    lines = result.output.splitlines()
    assert "Options:" in lines
    assert len(lines) < 40
    assert max(map(len, lines)) <= 80
