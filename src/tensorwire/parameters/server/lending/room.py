"""Tells how much memory is left, since Linux grants more than it has."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from tensorwire import _core

_ROOT = Path("/")
_KEPT = 8  # one part of so many of what is left is not taken
# Of a control group, by whether it is of version 2: its limit, what it uses, and of its memory.stat
# what begins the names of page cache in it and in the groups below.
_FILES = {
    True: ("memory.max", "memory.current", ""),
    False: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
}


def check_room(size_bytes: int, root: Path = _ROOT) -> None:
    """Checks that there is room in memory for this number of bytes.

    The remaining memory of the host and of this process's control groups counts, with the page
    cache, which they can take back.

    Args:
        size_bytes: that are wanted.
        root: where proc and sys are.

    Raises:
        MemoryError: there is too little left.
    """
    for left, where in _left(root):
        if size_bytes > left - left // _KEPT:
            raise MemoryError(f"{size_bytes} bytes are wanted, and {where} has {left} left")


def _left(root: Path) -> Iterator[tuple[int, str]]:
    if (free := _numbers(root / "proc/meminfo").get("MemAvailable:")) is not None:
        yield free * 1024, "this host"
    yield from groups_left(root)


def groups_left(root: Path = _ROOT) -> Iterator[tuple[int, str]]:
    """Yields how many bytes each control group of this process can still give, and its name.

    Groups without a limit are left out.
    """
    for folder, name, version_2 in _core.control_groups("memory", str(root)):
        limit, usage, part = _FILES[version_2]
        group = Path(os.fsdecode(folder))
        most, used = _number(group / limit), _number(group / usage)
        if most is not None and used is not None:
            stat = _numbers(group / "memory.stat")
            cache = sum(stat.get(f"{part}{kind}_file", 0) for kind in ("inactive", "active"))
            yield max(most - used + cache, 0), f"the control group {name}"


def _numbers(path: Path) -> dict[str, int]:
    lines = (line.split() for line in _text(path).splitlines())
    return {words[0]: int(words[1]) for words in lines if len(words) > 1 and words[1].isdecimal()}


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isdecimal() else None


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, ValueError):
        return ""  # no such group, or no limits in it
