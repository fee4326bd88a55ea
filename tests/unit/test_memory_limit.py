"""How much memory a process may have: the host's, or less where its control groups say so."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tensorwire import _core

HOST_BYTES = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
MIB = 1 << 20

V2 = "30 29 0:26 {inside} /sys/fs/cgroup rw shared:4 - cgroup2 cgroup2 rw,nsdelegate"
V1 = "35 29 0:30 {inside} /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory"
CPU = "36 29 0:31 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct"


def system(root: Path, groups: str, mounts: list[str], limits: dict[str, object]) -> str:
    """Files of a system with these control groups."""
    files = {"proc/self/cgroup": groups, "proc/self/mountinfo": "\n".join(mounts), **limits}
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content}\n")
    return str(root)


@pytest.mark.parametrize(
    ("groups", "mounts", "limits", "expected"),
    [
        # a group's own limit; the least of it and those above; a container that sees only its own
        ("0::/a/b", [V2], {"a/b/memory.max": 64 * MIB}, (64 * MIB, "/a/b")),
        ("0::/a/b", [V2], {"a/b/memory.max": "max", "a/memory.max": 32 * MIB}, (32 * MIB, "/a")),
        ("0::/a", [V2], {"a/memory.max": 9 * MIB, "memory.max": 8 * MIB}, (8 * MIB, "/")),
        ("0::/", [V2], {"memory.max": 16 * MIB}, (16 * MIB, "/")),
        ("0::/docker/x", [V2], {"memory.max": 16 * MIB}, (16 * MIB, "/")),
        # none, or more than there is
        ("0::/a", [V2], {"a/memory.max": "max"}, None),
        ("0::/a", [V2], {"a/memory.max": 1 << 62}, None),
        ("0::/a", [V2], {}, None),
        ("0::/a", [], {"a/memory.max": MIB}, None),
        ("garbage", [V2, "short"], {"memory.max": "x1"}, None),
    ],
)
def test_version_2(
    tmp_path: Path,
    groups: str,
    mounts: list[str],
    limits: dict[str, object],
    expected: tuple[int, str] | None,
) -> None:
    files = {f"sys/fs/cgroup/{name}": content for name, content in limits.items()}
    inside = "/docker/x" if "docker" in groups else "/"
    mounts = [CPU, *(line.format(inside=inside) for line in mounts)]
    check(system(tmp_path, groups, mounts, files), expected)


@pytest.mark.parametrize(
    ("group", "inside", "limits", "expected"),
    [
        ("/a", "/", {"a": 64 * MIB}, (64 * MIB, "/a")),
        ("/a/b", "/", {"a/b": 0x7FFFFFFFFFFFF000, "a": 3 * MIB}, (3 * MIB, "/a")),
        ("/docker/x", "/docker/x", {".": 5 * MIB}, (5 * MIB, "/")),
    ],
)
def test_version_1(
    tmp_path: Path,
    group: str,
    inside: str,
    limits: dict[str, int],
    expected: tuple[int, str],
) -> None:
    files: dict[str, object] = {
        f"sys/fs/cgroup/memory/{name}/memory.limit_in_bytes": limit
        for name, limit in limits.items()
    }
    groups = f"12:cpu,cpuacct:/other\n9:memory:{group}\n0::/elsewhere"
    check(system(tmp_path, groups, [CPU, V1.format(inside=inside)], files), expected)


def check(root: str, expected: tuple[int, str] | None) -> None:
    size, of = _core.memory_limit(root)
    if expected is None:
        assert (size, of) == (HOST_BYTES, "this host's memory")
    else:
        assert (size, of) == (expected[0], f"the memory limit of the control group {expected[1]}")


# ---- a real one

LIMIT_BYTES = 256 * MIB
PROGRAM = f"""
import os, sys, tensorwire as tw
with open(sys.argv[1], "w") as procs:
    procs.write(str(os.getpid()))
with tw.Node("limited", transports=["tcp"]) as node, tw.Node("guest", transports=["tcp"]) as guest:
    try:
        node.allocate({LIMIT_BYTES} + 1)
    except MemoryError as error:
        assert "control group" in str(error), error
    peer = guest.connect(node.address)
    try:
        peer.allocate({LIMIT_BYTES} // 2 + 1)
    except tw.BusyError as error:
        assert "quota" in str(error), error
    peer.allocate({LIMIT_BYTES} // 2)
    print("done")
"""


@pytest.fixture
def group() -> Iterator[Path]:
    """A control group with a limit, which processes can be moved to."""
    for top, limit in (
        (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"),
        (Path("/sys/fs/cgroup"), "memory.max"),
    ):
        folder = top / f"tensorwire-test-{os.getpid()}"
        try:
            folder.mkdir()
        except OSError:
            continue
        try:
            (folder / limit).write_text(str(LIMIT_BYTES))
            yield folder
            return
        except (FileNotFoundError, PermissionError):
            continue
        finally:
            folder.rmdir()
    pytest.skip("no right to make a control group with a memory limit here")


def test_a_process_in_a_control_group(group: Path) -> None:
    """Neither may a region be larger than the limit, nor may peers lease more than half of it."""
    command = [sys.executable, "-c", PROGRAM, str(group / "cgroup.procs")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stdout == "done\n", done.stderr
