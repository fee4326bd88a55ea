"""`tensorwire info`: every finding has a state, and what is missing has a remedy."""

import json
import os

import pytest
from click.testing import CliRunner

from tensorwire.cli import info as info_module
from tensorwire.cli import main


def findings(*arguments: str) -> dict[str, dict[str, str]]:
    result = CliRunner().invoke(main, ["info", "--json", *arguments])
    assert result.exit_code == 0, result.output
    return {found["subject"]: found for found in json.loads(result.output)["findings"]}


def test_json_names_everything_and_each_lack_has_a_remedy() -> None:
    found = findings()
    assert {"core", "shm", "tcp", "rdma", "numpy", "torch", "open files", "locked memory"} <= set(
        found
    )
    assert {"huge pages", "cores", "memory", "load"} <= set(found)
    for item in found.values():
        assert item["state"] in ("yes", "partly", "no")
        assert item["detail"]
        if item["state"] == "no":
            assert item["remedy"], item


def test_shm_and_tcp_work_where_the_tests_run() -> None:
    found = findings()
    assert found["shm"]["state"] in ("yes", "partly")
    assert found["tcp"]["state"] == "yes"
    assert found["core"]["state"] == "yes"


def test_without_rdma_the_remedy_is_told() -> None:
    found = findings()["rdma"]
    if not os.path.isdir("/sys/class/infiniband"):
        assert found["state"] == "no"
        assert "rdma link add" in found["remedy"]
    else:
        assert found["state"] == "yes" or found["remedy"]


def test_no_descriptor_is_left_open() -> None:
    before = os.listdir("/proc/self/fd")
    for check in (info_module.check_shm, info_module.check_tcp):
        check()
    assert len(os.listdir("/proc/self/fd")) == len(before)


def test_the_table_reads_without_colour() -> None:
    result = CliRunner().invoke(main, ["info"])
    assert result.exit_code == 0
    for word in ("shm", "tcp", "rdma", "remedy"):
        assert word in result.output


def test_a_check_that_fails_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def check_broken() -> info_module.Finding:
        raise OSError("no such thing")

    monkeypatch.setattr(info_module, "CHECKS", (check_broken,))
    (found,) = info_module.look()
    assert (found.subject, found.state) == ("broken", "partly")
    assert "no such thing" in found.detail


def test_without_any_transport_the_exit_code_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = info_module.Finding("shm", info_module.MISSING, "none", "another kernel")
    monkeypatch.setattr(info_module, "CHECKS", (lambda: nothing,))
    assert CliRunner().invoke(main, ["info"]).exit_code == 1


def test_missing_torch_comes_with_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(info_module.importlib.util, "find_spec", lambda _: None)
    assert "tensorwire[torch]" in info_module.check_torch().remedy


def test_help_teaches_by_examples() -> None:
    for arguments, example in (
        (["--help"], "tensorwire info"),
        (["info", "--help"], "tensorwire info --json"),
        (["bench", "memory", "--help"], "tensorwire bench memory --quick"),
    ):
        result = CliRunner().invoke(main, arguments)
        assert result.exit_code == 0
        assert example in result.output
    assert "tensorwire" in CliRunner().invoke(main, ["--version"]).output
