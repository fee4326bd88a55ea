"""The facts that `tensorwire doctor` reads, from trees of other machines, and takes from a peer."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorwire.doctor import facts
from tensorwire.doctor.facts import Facts


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_this_machine_survives_the_journey() -> None:
    here = facts.read()
    assert here.cpu.usable >= 1
    assert here.memory.fault == ""
    assert {"shm", "tcp"} <= set(here.transports)
    assert Facts.from_json(json.loads(json.dumps(here.to_json()))) == here


def test_an_empty_tree_is_no_error(tmp_path: Path) -> None:
    found = facts.read(tmp_path)
    assert found.interfaces == ()
    assert found.rdma.ports == ()
    assert found.tcp.window_bytes is None
    assert found.cpu.load is None
    assert found.memory.huge_pages == ""


def test_tcp(tmp_path: Path) -> None:
    write(tmp_path / "proc/sys/net", {
        "ipv4/tcp_rmem": "4096\t131072\t6291456\n",
        "ipv4/tcp_wmem": "4096\t16384\t4194304\n",
        "ipv4/tcp_moderate_rcvbuf": "0\n",
        "ipv4/tcp_congestion_control": "cubic\n",
        "core/rmem_max": "212992\n",
    })  # fmt: skip
    found = facts.read_tcp(tmp_path)
    assert found.window_bytes == 2 << 20
    assert found.explicit_receive_bytes == 212992
    assert found.adapts is False
    assert found.congestion == "cubic"


@pytest.mark.parametrize("text", ["", "4096", "a b c", "4096 8192 16384 1"])
def test_odd_buffers(tmp_path: Path, text: str) -> None:
    write(tmp_path / "proc/sys/net/ipv4", {"tcp_rmem": text})
    assert facts.read_tcp(tmp_path).receive_bytes is None


GROUPS = {
    "proc/self/cgroup": "0::/\n",
    "proc/self/mountinfo": "30 29 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n",
}


@pytest.mark.parametrize(
    ("setting", "threads"), [("4", 4), ("", None), ("4,2", None), ("\u00b2", None)]
)
def test_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: str, threads: int | None
) -> None:
    write(tmp_path, {**GROUPS, "sys/fs/cgroup/cpu.max": "150000 100000"})
    monkeypatch.setenv("OMP_NUM_THREADS", setting)
    found = facts.read_cpu(tmp_path)
    assert (found.quota, found.threads) == (1.5, threads)


def test_memory(tmp_path: Path) -> None:
    write(tmp_path, {
        **GROUPS,
        "proc/meminfo": "MemTotal: 2000 kB\nMemAvailable: 1000 kB\n",
        "sys/fs/cgroup/memory.max": "900000",
        "sys/fs/cgroup/memory.current": "100000",
        "sys/kernel/mm/transparent_hugepage/shmem_enabled": "always [advise] never",
    })  # fmt: skip
    found = facts.read_memory(tmp_path)
    assert found.available_bytes == 1024_000
    assert found.group_left_bytes == 800_000
    assert found.huge_pages == "advise"
    assert found.dev_shm_bytes is None


@pytest.mark.parametrize(("mask", "unlimited"), [("000001ffffffffff", True), ("0", False)])
def test_locked_memory(
    tmp_path: Path, mask: str, unlimited: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(facts.resource, "getrlimit", lambda which: (65536, 65536))
    write(tmp_path, {"proc/self/status": f"Name:\tx\nCapEff:\t{mask}\n"})
    assert facts.locked_limit(tmp_path) == (None if unlimited else 65536)


def test_ucx_that_cannot_be_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "_LOAD_UCX", "import ctypes; ctypes.CDLL('libnone-at-all.so')")
    version, fault = facts.load_ucx()
    assert version == ""
    assert "libnone-at-all.so" in fault


# ---- what comes from a peer


GOOD: dict[str, Any] = facts.read().to_json()
GOOD["interfaces"] = [
    {"name": "eth0", "state": "up", "carrier": True, "megabits_per_s": 1000, "mtu": 1500,
     "duplex": "full", "physical": True}
]  # fmt: skip
GOOD["rdma"] = {
    "ports": [{"device": "mlx5_0", "port": 1, "state": "ACTIVE", "gigabits_per_s": 100.0,
               "link_layer": "InfiniBand", "gids": ["fe80::1"], "netdev": ""}],
    "ucx": "1.13.1", "ucx_fault": "", "verbs": True, "locked_bytes": None,
}  # fmt: skip


def test_a_peers_facts() -> None:
    found = Facts.from_json(json.loads(json.dumps(GOOD)))
    assert found.rdma.active[0].gids == ("fe80::1",)
    assert [each.name for each in found.interfaces] == ["eth0"]


def test_text_from_a_peer_cannot_steer_a_terminal() -> None:
    bad = copy.deepcopy(GOOD)
    bad["host"] = "evil\x1b[2J\n" + "x" * 1000
    bad["rdma"]["ports"][0]["gids"] = ["\x1b]0;owned\x07"]
    found = Facts.from_json(bad)
    assert found.host.startswith("evil?[2J?")
    assert len(found.host) == 300
    assert found.rdma.ports[0].gids[0].isprintable()


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (["format"], 1),
        (["cpu"], None),
        (["cpu", "usable"], "2"),
        (["cpu", "extra"], 1),
        (["tcp", "adapts"], "yes"),
        (["rdma", "ports"], 5),
        (["rdma", "ports"], [{"device": "x"}]),
        (["interfaces"], [{}]),
        (["interfaces", 0, "mtu"], "large"),
        (["transports"], 7),
        (["kernel"], ["6"]),
    ],
)
def test_facts_that_do_not_fit(path: list[Any], value: Any) -> None:
    bad = copy.deepcopy(GOOD)
    inner: Any = bad
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    with pytest.raises(ValueError, match="facts"):
        Facts.from_json(bad)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


@settings(deadline=None)  # a busy machine is no failure
@given(JSON, st.sampled_from([key for key in GOOD if key != "format"]))
def test_any_json_is_facts_or_a_value_error(value: Any, key: str) -> None:
    for data in (value, {**GOOD, key: value}):
        try:
            Facts.from_json(data)
        except ValueError:
            pass
