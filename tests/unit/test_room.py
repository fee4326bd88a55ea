"""A copy for readers that would use up the memory of the host or group is not begun."""

from pathlib import Path

import pytest

from tensorwire.parameters.server.lending.room import check_room

GIB = 1 << 30


def test_what_is_left_of_host_and_groups_counts(tmp_path: Path) -> None:
    check_room(1 << 60, tmp_path)  # nothing is known
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text(
        f"MemTotal: 1 kB\nMemAvailable: {8 << 20} kB\nPages: 3\n"
    )
    check_room(7 * GIB, tmp_path)
    with pytest.raises(MemoryError, match="this host has 8589934592 left"):
        check_room(7 * GIB + 1, tmp_path)
    (tmp_path / "proc/self/cgroup").write_text("1:cpu:/other\n0::/job/server\n2:memory:/old\n")
    (tmp_path / "proc/self/mountinfo").write_text(
        "30 29 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"
        "31 29 0:27 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
    )
    group = tmp_path / "sys/fs/cgroup/job"
    (group / "server").mkdir(parents=True)
    (group / "server/memory.max").write_text("max\n")
    (group / "server/memory.current").write_text("5\n")
    check_room(7 * GIB, tmp_path)
    (group / "memory.max").write_text(f"{4 * GIB}\n")
    (group / "memory.current").write_text(f"{3 * GIB}\n")
    with pytest.raises(MemoryError, match="group /job has 1073741824 left"):
        check_room(GIB, tmp_path)
    (group / "memory.stat").write_text(f"anon {GIB}\ninactive_file {GIB}\nactive_file 0\n")
    check_room(GIB, tmp_path)
    old = tmp_path / "sys/fs/cgroup/memory/old"
    old.mkdir(parents=True)
    (old / "memory.limit_in_bytes").write_text(f"{GIB}\n")
    (old / "memory.usage_in_bytes").write_text(f"{GIB // 2}\n")
    with pytest.raises(MemoryError, match="group /old has 536870912 left"):
        check_room(GIB // 2, tmp_path)
    (old / "memory.stat").write_text(f"inactive_file 7\ntotal_inactive_file {GIB // 4}\n")
    check_room(GIB // 2, tmp_path)


def test_this_host_has_room_for_a_page() -> None:
    check_room(4096)
    with pytest.raises(MemoryError):
        check_room(1 << 60)
