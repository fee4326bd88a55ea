"""Decides when a share moves from a server that is slower than others, and where to. Pure.

Workers wait for the slowest server in each step. A server takes as long as the share on which it
worked longest; this time is assumed to be proportional to the bytes of all its shares.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

WINDOWS = 3
"""The number of consecutive measurements in which a server must be the slowest."""

GAIN = 0.9
"""The most time that the slowest server may take after a move, relative to the present one."""

LEAST_VERSIONS = 10
"""The least number of versions in a measurement; with fewer it goes on."""


class Reading(NamedTuple):
    """The work of a share since it was opened.

    Attributes:
        versions: how many it has made.
        work_ns: nanoseconds of work for that, without waiting for other servers.
        size_bytes: of the share.
    """

    versions: int
    work_ns: int
    size_bytes: int


class Suggestion(NamedTuple):
    """A share that is to move, and why."""

    share: int
    to: int
    why: str


class Balance:
    """The measurements of the servers of one job, window by window."""

    def __init__(self) -> None:
        self._before: dict[int, Reading] = {}
        self._suspect, self._times = -1, 0

    def begin_again(self) -> None:
        """Forgets earlier measurements, after shares have moved or a server was replaced."""
        self._before.clear()
        self._suspect, self._times = -1, 0

    def look(self, owners: Mapping[int, int], readings: Mapping[int, Reading]) -> Suggestion | None:
        """Ends a window of measurement; returns a move if one was due in enough windows.

        Args:
            owners: the server that has each share.
            readings: of all shares.
        """
        if self._before.keys() != readings.keys():
            self._before = dict(readings)
            return None
        versions = [
            each.versions - self._before[share].versions for share, each in readings.items()
        ]
        if min(versions, default=0) < LEAST_VERSIONS:
            return None  # the window goes on
        worked = {share: each.work_ns - self._before[share].work_ns
                  for share, each in readings.items()}  # fmt: skip
        self._before = dict(readings)
        sizes = {share: each.size_bytes for share, each in readings.items()}
        found = suggest(owners, worked, sizes)
        if found is None:
            self._suspect, self._times = -1, 0
            return None
        giver = owners[found.share]
        self._times = self._times + 1 if giver == self._suspect else 1
        self._suspect = giver
        return found if self._times >= WINDOWS else None


def suggest(
    owners: Mapping[int, int], worked: Mapping[int, int], sizes: Mapping[int, int]
) -> Suggestion | None:
    """Returns the move that relieves the slowest server most; None if no move is worth it.

    Args:
        owners: the server that has each share.
        worked: for how long each share was worked on, in nanoseconds.
        sizes: of the shares, in bytes.
    """
    servers = sorted(set(owners.values()))
    shares = {n: [share for share, owner in owners.items() if owner == n] for n in servers}
    times = {n: max(worked[share] for share in shares[n]) for n in servers}
    totals = {n: sum(sizes[share] for share in shares[n]) for n in servers}
    giver = max(servers, key=lambda n: times[n])
    if len(servers) < 2 or len(shares[giver]) < 2 or not totals[giver] or not times[giver]:
        return None
    best: tuple[float, int, int] | None = None
    for share in shares[giver]:
        left = times[giver] * (totals[giver] - sizes[share]) / totals[giver]
        for taker in servers:
            if taker == giver or not totals[taker] or not sizes[share]:
                continue
            more = times[taker] * (totals[taker] + sizes[share]) / totals[taker]
            others = (times[n] for n in servers if n not in (giver, taker))
            slowest = max(left, more, *others)
            if best is None or slowest < best[0]:
                best = slowest, share, taker
    if best is None or best[0] > GAIN * times[giver]:
        return None
    _, share, taker = best
    ratio = times[giver] / max(times[taker], 1)
    return Suggestion(share, taker, f"server {giver} took {ratio:.1f} times as long as {taker}")
