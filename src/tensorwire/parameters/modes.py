"""Defines modes: how the steps of workers follow each other. Pure.

In "sync" a version is made of the commits of all slices. In "async" and "bounded" each commit makes
a version: each worker goes at its own pace, in "bounded" at most so many steps ahead of the
slowest. docs/modes.md tells what that means.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Any, NamedTuple

NAMES = ("sync", "async", "bounded")


class Mode(NamedTuple):
    """The mode given to `tw.init`.

    Attributes:
        name: one of NAMES.
        staleness: where bounded, how many steps a worker may be ahead; else None.
    """

    name: str = "sync"
    staleness: int | None = None

    @property
    def is_sync(self) -> bool:
        """True if a version is made of the commits of all slices."""
        return self.name == "sync"

    def __str__(self) -> str:
        bound = "" if self.staleness is None else f", staleness={self.staleness}"
        return f'mode="{self.name}"{bound}'


SYNC = Mode()


def checked_mode(name: Any, staleness: Any) -> Mode:
    """Returns the mode of these two values; the text of a ValueError names the fault."""
    if name not in NAMES:
        raise ValueError(f"mode is {', '.join(map(repr, NAMES))}, not {name!r}")
    if name != "bounded":
        if staleness is not None:
            raise ValueError(f'staleness= is for mode="bounded", and mode is {name!r}')
        return Mode(name)
    if isinstance(staleness, bool) or not isinstance(staleness, int) or staleness < 0:
        raise ValueError(
            'mode="bounded" needs staleness=, the number of steps from 0 up that a worker may be '
            f"ahead of the slowest, not {staleness!r}"
        )
    return Mode(name, staleness)


class Pace(NamedTuple):
    """The progress of a worker when it gets a version.

    Attributes:
        version: that it gets, the same number at all servers.
        clock: steps that it has made.
        behind: how many steps the slowest other worker lacks in this version: the staleness of
            the version. Workers that wait for all others do not count.
        delay: commits of others between the version with which it computed, and its own commit.
    """

    version: int
    clock: int
    behind: int
    delay: int

    def to_text(self) -> str:
        """Returns the text by which it travels."""
        return json.dumps(list(self))

    @staticmethod
    def from_text(text: str) -> Pace:
        """Returns the pace of a text of `to_text`."""
        return Pace(*map(int, json.loads(text)))


class Paces:
    """The statistics of versions that one worker, or all, have adopted.

    Attributes:
        behind, delays: how often each number occurred; from 16 up they are counted by powers of
            two, so that there are few counts.
        most_behind, most_delay: the largest numbers.
        last: the pace that was added last.
    """

    def __init__(self) -> None:
        self.behind: Counter[int] = Counter()
        self.delays: Counter[int] = Counter()
        self.most_behind = self.most_delay = 0
        self.last: Pace | None = None

    def add(self, pace: Pace) -> None:
        """Adds an adopted version."""
        self.last = pace
        self.behind[_bin_of(pace.behind)] += 1
        self.delays[_bin_of(pace.delay)] += 1
        self.most_behind = max(self.most_behind, pace.behind)
        self.most_delay = max(self.most_delay, pace.delay)

    def joined(self, other: Paces) -> Paces:
        """Returns the sum of both."""
        both = Paces()
        both.behind, both.delays = self.behind + other.behind, self.delays + other.delays
        both.most_behind = max(self.most_behind, other.most_behind)
        both.most_delay = max(self.most_delay, other.most_delay)
        return both

    def described(self) -> dict[str, Any]:
        """Returns the numbers for a report and `tensorwire status`."""
        return {
            "staleness_max": self.most_behind,
            "staleness": _named(self.behind.copy()),
            "delay_max": self.most_delay,
            "delays": _named(self.delays.copy()),
        }


_EXACT = 16


def _bin_of(number: int) -> int:
    return number if number < _EXACT else 1 << number.bit_length() - 1


def _named(counts: Counter[int]) -> dict[str, int]:
    names = {n: str(n) if n < _EXACT else f"{n}-{2 * n - 1}" for n in sorted(counts)}
    return {name: counts[number] for number, name in names.items()}
