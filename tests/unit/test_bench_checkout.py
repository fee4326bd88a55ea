"""Benches that no wheel carries are found in a checkout; elsewhere one sentence names them."""

import importlib.util
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from tensorwire.bench import checkout
from tensorwire.bench.rivals import RIVALS, Rival
from tensorwire.cli import bench as bench_module
from tensorwire.cli import main

SAID = "is in tensorwire's repository, and no wheel carries it: clone the repository, run"


@pytest.fixture
def wheel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Hides the checkout, like an installed wheel."""
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(checkout, "_FOLDER", tmp_path)
    monkeypatch.setattr(
        importlib.util, "find_spec",
        lambda name: None if name.partition(".")[0] == checkout.PACKAGE else find_spec(name),
    )  # fmt: skip


@pytest.fixture
def group(wheel: None) -> click.Group:
    found = click.Group("bench")
    for command in bench_module.in_repository():
        found.add_command(command)
    return found


def test_a_checkout_is_found_by_the_path_of_the_package(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / checkout.PACKAGE).mkdir()
    monkeypatch.setattr(checkout, "_FOLDER", tmp_path)
    monkeypatch.setattr(sys, "path", before := list(sys.path))
    assert checkout.found()
    assert checkout.found()
    assert sys.path == before
    assert sys.path.count(str(tmp_path)) == 1
    assert sys.path[-1] == str(tmp_path)
    assert checkout.missing("x", "bench x") is None


@pytest.mark.parametrize("name", ["training", "placement", "parameters", "faults", "rpc", "modes"])
def test_elsewhere_each_bench_says_where_it_is(group: click.Group, name: str) -> None:
    for options in ([], ["--quick", "--json", "x.json"], ["--models", "digits"]):
        result = CliRunner().invoke(group, [name, *options])
        assert result.exit_code == 1
        told = " ".join(result.output.split())
        assert told.startswith(f"Error: 'tensorwire bench {name}' {SAID}")
        assert told.endswith(f"and then '.venv/bin/tensorwire bench {name}'")


def test_both_lists_are_the_same(group: click.Group) -> None:
    here = bench_module.bench
    for name, command in group.commands.items():
        assert command.get_short_help_str(200) == here.commands[name].get_short_help_str(200)
    assert {*group.commands, "memory"} == set(here.commands)
    listed = CliRunner().invoke(main, ["bench", "--help"]).output
    assert all(f"\n  {name} " in listed for name in here.commands)


@pytest.mark.parametrize("rival", RIVALS, ids=lambda rival: rival.name)
def test_elsewhere_a_rival_is_missing_for_that_reason(wheel: None, rival: Rival) -> None:
    assert str(rival.missing()).startswith(f"the rival {rival.name} {SAID}")


def test_elsewhere_explain_takes_scripts_only(wheel: None) -> None:
    result = CliRunner().invoke(main, ["explain", "lstm", "--tiny"])
    assert result.exit_code == 1
    told = " ".join(result.output.split())
    assert told.startswith(f"Error: the workload 'lstm' {SAID}")
    assert told.endswith("'.venv/bin/tensorwire explain lstm'; or give a script, train.py")
