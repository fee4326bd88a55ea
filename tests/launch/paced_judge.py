"""Judges what workers have adopted that went at their own pace: apart from what made it."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any


def judge(folder: Path, steps: int, rounds: int, slices: int, staleness: int | None) -> int:
    """Checks that every (slice, step) is applied once at each server, and no worker leads too far.

    Returns:
        How many adopted versions were looked at.
    """
    events = [
        json.loads(line)
        for path in sorted(folder.glob("adopted-*"))
        for line in path.read_text().splitlines()
    ]
    seen: dict[tuple[int, ...], Any] = {}
    versions: dict[int, list[int]] = {}
    for event in events:
        digits, version = event["digits"], event["pace"][0]
        # The first version is the empty one; then come a publication and all steps of each round.
        base = 2 + event["round"] * (slices * steps + 1)
        assert sum(digits) == version - base, (event, "a version is not of one commit")
        assert versions.setdefault(version, digits) == digits, (event, "two versions of a number")
        for index in event["slices"]:
            key = event["rank"], event["round"], event["step"], index
            # A process that takes a worker's place has what that had adopted, and tells it again.
            assert seen.setdefault(key, event) == event, (seen[key], event, "adopted twice")
            assert digits[index] == event["step"] + 1, (event, "not each of its steps once")
        ahead = event["step"] + 1 - min(digits)
        assert staleness is None or ahead <= staleness, (event, "too far ahead")
        assert event["pace"][2] == max(0, ahead), (event, "another staleness was told")
    check_order(versions, steps, slices)
    return len(seen)


def check_order(versions: dict[int, list[int]], steps: int, slices: int) -> None:
    """Checks the order: a later version of a round has everything that earlier ones have."""
    by_round: dict[int, list[list[int]]] = {}
    for version in sorted(versions):
        round_ = (version - 2) // (slices * steps + 1)
        by_round.setdefault(round_, []).append(versions[version])
    for found in by_round.values():
        for before, after in pairwise(found):
            assert all(a <= b for a, b in zip(before, after, strict=True)), (before, after)


def described(folder: Path) -> Any:
    """For a message."""
    return {path.name: path.read_text() for path in sorted(folder.glob("adopted-*"))}
