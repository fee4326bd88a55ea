"""`tensorwire doctor --quick`: every finding has a state, and what is missing has a remedy."""

import hashlib
import json
import os
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from tensorwire.cli import main
from tensorwire.doctor import advice, facts
from tensorwire.doctor import inventory as info_module
from tensorwire.memory.devices import RdmaPort

LIBRARY = "tensorwire.torch.allocator.library"


def look(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["doctor", "--quick", *arguments])


@pytest.fixture
def findings(tmp_path: Path) -> dict[str, dict[str, str]]:
    path = tmp_path / "found.json"
    result = look("--json", str(path))
    assert result.exit_code == 0, result.output
    return {found["subject"]: found for found in json.loads(path.read_text())["findings"]}


def test_json_names_everything_and_each_lack_has_a_remedy(
    findings: dict[str, dict[str, str]],
) -> None:
    found = findings
    assert {"core", "shm", "tcp", "rdma", "numpy", "torch", "open files", "locked memory"} <= set(
        found
    )
    assert {"huge pages", "cores", "memory", "load", "placement", "compiler"} <= set(found)
    for item in found.values():
        assert item["state"] in ("yes", "partly", "no")
        assert item["detail"]
        if item["state"] == "no":
            assert item["remedy"], item


def test_shm_and_tcp_work_where_the_tests_run(findings: dict[str, dict[str, str]]) -> None:
    assert findings["shm"]["state"] in ("yes", "partly")
    assert findings["tcp"]["state"] == "yes"
    assert findings["core"]["state"] == "yes"


def test_without_rdma_the_remedy_is_told(findings: dict[str, dict[str, str]]) -> None:
    found = findings["rdma"]
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
    result = look()
    assert result.exit_code == 0
    for word in ("shm", "tcp", "rdma", "remedy"):
        assert word in result.output


def test_a_check_that_fails_is_a_finding(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def check_broken() -> advice.Finding:
        raise OSError("no such thing")

    monkeypatch.setattr(info_module, "CHECKS", {"broken": check_broken})
    path = tmp_path / "found.json"
    look("--json", str(path))
    shown = json.loads(path.read_text())["findings"]
    assert [(each["subject"], each["state"]) for each in shown] == [("broken", "partly")]
    (found,) = info_module.look()
    assert (found.subject, found.level) == ("broken", advice.NOTE)
    assert "no such thing" in found.text


def test_without_any_transport_the_exit_code_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = advice.Finding(advice.MISSING, "shm", "none", "another kernel")
    monkeypatch.setattr(info_module, "CHECKS", {"shm": lambda: nothing})
    assert look().exit_code == 1


def test_the_earlier_name_says_the_new_one() -> None:
    result = CliRunner().invoke(main, ["info"])
    assert result.exit_code == 2
    assert "it is now: tensorwire doctor --quick" in result.output


@pytest.mark.parametrize("other", [["10.0.0.1:7000"], ["--serve"], ["--seconds", "1"]])
def test_nothing_is_measured_beside_it(other: list[str]) -> None:
    result = look(*other)
    assert result.exit_code == 2
    assert "--quick measures nothing" in result.output


def test_missing_torch_comes_with_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(info_module.importlib.util, "find_spec", lambda _: None)
    assert "tensorwire[torch]" in info_module.CHECKS["torch"]().remedy


@pytest.mark.parametrize("state", ["ACTIVE", "DOWN"])
def test_quick_and_whole_agree(monkeypatch: pytest.MonkeyPatch, state: str) -> None:
    """Named for a bug: for root one said that memory may be locked without limit, one that not."""
    port = RdmaPort("mlx5_0", 1, state, 100.0, "InfiniBand", ("fe80::1",), "")
    monkeypatch.setattr(info_module, "rdma_ports", lambda: [port])
    monkeypatch.setattr(facts, "locked_limit", lambda root=None: 65536)
    monkeypatch.setattr(facts, "read_cpu", lambda root=None: facts.Cpu("x", 8, 2, 1.5, 1.8))
    cpu = facts.read_cpu()
    rdma = facts.Rdma((port,), "1.0", "", True, 65536)
    judged = {
        each.subject: each
        for each in (
            *advice.about_cpu(cpu), *advice.about_rdma(rdma, ["rdma"]),
            *advice.about_memory(facts.read_memory()),
        )
    }  # fmt: skip
    for subject in ("locked memory", "cores", "load", "huge pages"):
        found = info_module.CHECKS[subject]()
        of_doctor = judged[found.subject]
        assert found.text.startswith(of_doctor.text)
        assert found.remedy == of_doctor.remedy
        assert found.level == of_doctor.level
    assert (info_module.CHECKS["locked memory"]().level == advice.OK) == (state == "DOWN")


def test_placement_and_compiler_are_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    library = pytest.importorskip(
        "tensorwire.torch.allocator.library", reason="torch is not installed"
    )
    for variable in ("XDG_CACHE_HOME", "XDG_RUNTIME_DIR"):
        monkeypatch.setenv(variable, str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(library, "_brought", lambda: tmp_path / "none")
    monkeypatch.setattr(library.shutil, "which", {"g++": "/usr/bin/g++"}.get)
    found = info_module.check_placement()
    assert (found.level, found.text) == (advice.OK, "compiled at first use, by /usr/bin/g++")
    assert info_module.check_compiler().text == "/usr/bin/g++"
    monkeypatch.setattr(library.shutil, "which", lambda name: None)
    without = info_module.check_placement()
    assert without.level == advice.NOTE
    assert "gradients are copied: no C++ compiler" in without.text
    assert "g++" in without.remedy
    assert info_module.check_compiler().level == advice.MISSING
    monkeypatch.setenv("CXX", "no-such-compiler -O1")
    assert "CXX names 'no-such-compiler'" in info_module.check_compiler().text
    (tmp_path / "tensorwire" / library._name()).write_bytes(hashlib.sha256(b"").digest())
    monkeypatch.delenv("CXX")
    assert info_module.check_placement().text.startswith("compiled before, ")
    assert info_module.check_compiler().level == advice.NOTE


def test_a_compiler_may_be_several_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """Named for a bug: of CXX="ccache g++" only the first word was run."""
    library = pytest.importorskip(
        "tensorwire.torch.allocator.library", reason="torch is not installed"
    )
    monkeypatch.setenv("CXX", "env g++")
    found = library.find_compiler()
    assert found[0].endswith("/env")
    assert found[1:] == ["g++"]
    assert library._command(found)[:2] == found


def test_help_teaches_by_examples() -> None:
    for arguments, example in (
        (["--help"], "tensorwire doctor --quick"),
        (["--help"], "tensorwire run --workers 2 train.py"),
        (["run", "--help"], "--full-tracebacks"),
        (["doctor", "--help"], "tensorwire doctor --quick"),
        (["bench", "memory", "--help"], "tensorwire bench memory --quick"),
    ):
        result = CliRunner().invoke(main, arguments)
        assert result.exit_code == 0
        assert example in result.output
    assert "tensorwire" in CliRunner().invoke(main, ["--version"]).output
