"""Checks whether there is memory for a copy, since Linux grants more than it has."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

_ROOT = Path("/")
_KEPT = 8  # one part of so many of what is left is not taken


def check_room(size_bytes: int, root: Path = _ROOT) -> None:
    """Finds that so much can be written to memory.

    What the host and the control groups (version 2) of this process can still give counts,
    together with page cache, which they can take back.

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
    top = root / "sys/fs/cgroup"
    for group in _groups(root, top):
        most, used = (_number(group / f"memory.{name}") for name in ("max", "current"))
        if most is not None and used is not None:
            stat = _numbers(group / "memory.stat")
            cache = stat.get("inactive_file", 0) + stat.get("active_file", 0)
            yield max(most - used + cache, 0), f"the control group /{group.relative_to(top)}"


def _groups(root: Path, top: Path) -> list[Path]:
    """This process's own first, then those that bound it."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        if line.startswith("0::/"):
            own = top / line[4:]
            return [own, *(each for each in own.parents if each.is_relative_to(top))]
    return []


def _numbers(path: Path) -> dict[str, int]:
    lines = (line.split() for line in _text(path).splitlines())
    return {words[0]: int(words[1]) for words in lines if len(words) > 1 and words[1].isdigit()}


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isdigit() else None


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""  # no such group, or no limits in it
