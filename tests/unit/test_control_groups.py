"""How much memory and how many cores a process may have: the host's, or what its groups grant."""

import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorwire import _core
from tensorwire.launch import JobSpec
from tensorwire.launch.process import MemoryKills

HOST_BYTES = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
MIB = 1 << 20

V2 = "30 29 0:26 {inside} /sys/fs/cgroup rw shared:4 - cgroup2 cgroup2 rw,nsdelegate"
V1 = "35 29 0:30 {inside} /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory"
ABOVE = V2.replace("{inside}", "/..")
OTHER = "31 29 0:26 /other /sys/fs/cgroup/other rw - cgroup2 cgroup2 rw"
CPU = "36 29 0:31 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct"


def system(root: Path, groups: str, mounts: list[str], limits: dict[str, object]) -> str:
    """Files of a system with these control groups."""
    files = {"proc/self/cgroup": groups, "proc/self/mountinfo": "\n".join(mounts), **limits}
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else f"{content}\n".encode())
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
        # a group below a container's; one whose name begins as the container's; a process that was
        # moved out of what its namespace shows; a namespace with the mounts of the outside
        ("0::/docker/x/y", [V2], {"y/memory.max": 3 * MIB}, (3 * MIB, "/y")),
        (
            "0::/docker/xy",
            [V2],
            {"memory.max": 16 * MIB, "../cgroupy/memory.max": 1},
            (16 * MIB, "/"),
        ),
        ("0::/../b", [V2], {"../b/memory.max": 1, "memory.max": 16 * MIB}, (16 * MIB, "/")),
        ("0::/", [ABOVE], {"memory.max": 16 * MIB}, (16 * MIB, "/")),
        # a mount that shows other groups counts only where none shows this one
        ("0::/a", [OTHER, V2], {"a/memory.max": 5 * MIB, "other/memory.max": 1}, (5 * MIB, "/a")),
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


@pytest.mark.parametrize(
    ("groups", "limits", "quota"),
    [
        ("0::/job/step", {"job/step/cpu.max": "50000 100000"}, 0.5),
        ("0::/job/step", {"job/cpu.max": "200000 100000", "job/step/cpu.max": "8000 1000"}, 2),
        ("0::/", {"cpu.max": "150000 100000"}, 1.5),
        ("3:cpu,cpuacct:/x/y\n0::/", {"cpu/x/cpu.cfs_quota_us": 50000,
         "cpu/x/cpu.cfs_period_us": 100000, "cpu/x/y/cpu.cfs_quota_us": -1,
         "cpu/x/y/cpu.cfs_period_us": 100000}, 0.5),
        ("3:cpu:/x\n0::/", {"cpu/x/cpu.cfs_quota_us": 50000}, None),
        ("0::/job", {"job/cpu.max": "max 100000"}, None),
        ("0::/job", {"job/cpu.max": "150000"}, None),
        ("0::/job", {"job/cpu.max": "100 0"}, None),
        ("0::/job", {"job/cpu.max": "0 100000"}, None),
        ("0::/job", {"job/cpu.max": "-1 100000"}, None),
        ("0::/job", {"job/cpu.max": "5x 100000"}, None),
        ("0::/job", {"job/cpu.max": "99999999999999999999 1"}, None),
        ("0::/job", {"job/cpu.max": "\u00b2 100000"}, None),
        ("0::/job", {"job/cpu.max/a": "the file is a folder"}, None),
        ("0::/job", {}, None),
        ("", {"cpu.max": "50000 100000"}, None),
        (f"0::/{'a/' * 100_000}", {"cpu.max": "50000 100000"}, None),
    ],
)  # fmt: skip
def test_cpu_quota(
    tmp_path: Path, groups: str, limits: dict[str, object], quota: float | None
) -> None:
    files = {f"sys/fs/cgroup/{name}": content for name, content in limits.items()}
    mounts = [CPU, V1.format(inside="/"), V2.format(inside="/")]
    mounts[0] = mounts[0].replace("cpu,cpuacct ", "cpu ")
    assert _core.cpu_quota(system(tmp_path, groups, mounts, files)) == quota


@pytest.mark.parametrize(
    ("groups", "file"),
    [("0::/a/b", "a/b/memory.events"), ("9:memory:/a/b\n0::/", "memory/a/b/memory.oom_control")],
)
def test_processes_killed_for_memory(tmp_path: Path, groups: str, file: str) -> None:
    """Each one explains one death; what was before, and other groups, explain none."""
    name = f"sys/fs/cgroup/{file}"
    mounts = [V1.format(inside="/"), V2.format(inside="/")]

    def killed(count: int) -> str:
        content = f"oom {count + 7}\noom_kill {count}\noom_group_kill 0"
        return system(tmp_path, groups, mounts, {name: content})

    kills = MemoryKills(killed(3))
    assert not kills.explains_death()
    killed(5)
    assert [kills.explains_death() for _ in range(3)] == [True, True, False]
    assert kills.count == 2
    (tmp_path / name).write_text("garbage")
    assert not kills.explains_death()
    (tmp_path / name).unlink()
    assert not MemoryKills(str(tmp_path)).explains_death()


def test_a_folder_of_any_name(tmp_path: Path) -> None:
    """The kernel writes a space of a mount's path as \\040, and a group's name in any bytes."""
    mounts = ["30 29 0:26 / /a\\040b rw - cgroup2 cgroup2 rw"]
    root = system(tmp_path, "", mounts, {"proc/self/cgroup": b"0::/g\xff\n"})
    group = os.fsencode(tmp_path) + b"/a b/g\xff"
    os.makedirs(group)
    Path(os.fsdecode(group), "memory.max").write_text("4096\n")
    groups = _core.control_groups("memory", root)
    assert groups == [(group, "/g\ufffd", True), (os.path.dirname(group), "/", True)]
    check(root, (4096, "/g\ufffd"))


TEXT = st.binary(max_size=60) | st.sampled_from(
    [b"0::/a", b"0::/../a", b"3:cpu,memory:/a", b"50000 100000", V2.encode(), CPU.encode()]
)


@given(TEXT, TEXT, TEXT)
def test_any_text(groups: bytes, mounts: bytes, limit: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        files = {"proc/self/cgroup": groups, "proc/self/mountinfo": mounts}
        names = ("cpu.max", "memory.max", "cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")
        files |= {f"sys/fs/cgroup/{name}": limit for name in names}
        root = system(Path(folder), "", [], {**files})
        quota = _core.cpu_quota(root)
        assert quota is None or 0 < quota < math.inf
        assert 0 <= _core.memory_limit(root)[0] <= HOST_BYTES


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


@contextmanager
def group(limits: dict[str, dict[str, object]]) -> Iterator[Path]:
    """A control group, which processes can be moved to.

    Args:
        limits: contents of files, by the folder in which hierarchies of the controller may be.
    """
    for top, files in limits.items():
        folder = Path("/sys/fs/cgroup", top, f"tensorwire-test-{os.getpid()}")
        try:
            folder.mkdir()
        except OSError:
            continue
        try:
            for name, content in files.items():
                (folder / name).write_text(str(content))
            yield folder
            return
        except (FileNotFoundError, PermissionError):
            continue
        finally:
            folder.rmdir()
    pytest.skip("no right to make a control group with a limit here")


def run_in(group: Path, program: str) -> str:
    """Returns the output of a program that was told the file by which to enter a control group."""
    command = [sys.executable, "-c", program, str(group / "cgroup.procs")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_process_in_a_control_group() -> None:
    """Neither may a region be larger than the limit, nor may peers lease more than half of it."""
    with group({
        "memory": {"memory.limit_in_bytes": LIMIT_BYTES}, ".": {"memory.max": LIMIT_BYTES}
    }) as made:  # fmt: skip
        assert run_in(made, PROGRAM) == "done\n"


HALF_A_CORE = """
import os, sys
with open(sys.argv[1], "w") as procs:
    procs.write(str(os.getpid()))
import tensorwire as tw
from tensorwire.launch import JobSpec
from tensorwire.launch.process import MemoryKills
from tensorwire.memory import cores, crowded
from tensorwire.parameters import most_threads
job = JobSpec(("-m", "this"), 1)
threads = job.worker_environment({}, 0, [], 1)["OMP_NUM_THREADS"]
with tw.Node("quota", transports=["tcp"]) as node:
    print(cores(), threads, most_threads(), crowded(), node.stats()["spin_bound_ns"])
"""


def test_half_a_core() -> None:
    """Then one thread computes, and none polls: it would use up what the others need."""
    with group({
        "cpu": {"cpu.cfs_period_us": 100_000, "cpu.cfs_quota_us": 50_000},
        ".": {"cpu.max": "50000 100000"},
    }) as made:  # fmt: skip
        assert run_in(made, HALF_A_CORE) == "0.5 1 1 True 0\n"


@pytest.mark.parametrize(("cores", "threads"), [(0.5, 1), (3.9, 1), (5.5, 2), (8, 4)])
def test_a_share_of_the_cores(cores: float, threads: int) -> None:
    """A worker's share is the same for every asker, so a successor computes the same bits."""
    job = JobSpec(("-m", "this"), 2, cores=cores)
    assert job.worker_environment({}, 1, [], 1)["OMP_NUM_THREADS"] == str(threads)
    own = job.worker_environment({"OMP_NUM_THREADS": "7"}, 1, [], 1)
    assert own["OMP_NUM_THREADS"] == "7"
