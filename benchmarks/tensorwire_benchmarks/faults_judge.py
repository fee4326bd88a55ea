"""Judges a job whose processes were killed, by its files and those of an undisturbed job.

It reads only the events and final values that `faults_job.py` has written, imports nothing of
tensorwire, and knows of no kill. A replaced worker has events of several processes. The first step
of a later process may be one that the former process had committed: that step is then computed and
logged again, with another loss, but takes effect once.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

_MOST = 5  # sentences of one kind

Event = dict[str, Any]


def judge(undisturbed: Path, disturbed: Path, workers: int, samples: int) -> dict[str, list[str]]:
    """Returns sentences about errors of the disturbed job, by "parameters", "samples", "steps".

    Args:
        undisturbed: the folder of the undisturbed job.
        disturbed: the folder of the job whose processes were killed.
        workers: the number of workers in each job.
        samples: the number of samples in an epoch; each optimizer uses each once.
    """
    found: dict[str, list[str]] = {"parameters": [], "samples": [], "steps": []}
    replaced = any(_pids(disturbed, rank)[1:] for rank in range(workers))
    for rank in range(workers):
        one, other = (folder / f"final-{rank}" for folder in (undisturbed, disturbed))
        ignored = "/means" if replaced else None
        found["parameters"] += _compare_finals(rank, one, other, ignored)
    try:
        expected, events = (_events(each, workers) for each in (undisturbed, disturbed))
        found["samples"] += _check_samples(events, samples)
        found["steps"] += _check_steps(expected, events)
        found["parameters"] += _compare_losses(expected, events)
    except (OSError, ValueError, KeyError) as error:
        found["steps"].append(f"the events cannot be read: {error!r}")
    return {kind: sentences[:_MOST] for kind, sentences in found.items()}


def _log(folder: Path, rank: int) -> list[Event]:
    lines = (folder / f"events-{rank}").read_text().splitlines()
    return [json.loads(line) for line in lines]


def _pids(folder: Path, rank: int) -> list[int]:
    """Returns the ids of the processes that were worker `rank`, in their order."""
    try:
        return list(dict.fromkeys(event.get("pid", 0) for event in _log(folder, rank)))
    except (OSError, ValueError):
        return []  # the caller reports the missing events


def _events(folder: Path, workers: int) -> list[Event]:
    """Returns all events, without repetitions by later processes.

    Events in the first step of a later process are `late`: they may repeat an event, and their loss
    may differ.
    """
    found = []
    for rank in range(workers):
        seen: set[tuple[Any, ...]] = set()
        first: int | None = None
        began: dict[int, int] = {}
        for event in _log(folder, rank):
            pid = event.get("pid", 0)
            first = pid if first is None else first
            repeats = pid != first and began.setdefault(pid, event["step"]) == event["step"]
            key = *_key(event), tuple(event["samples"])
            if repeats and key in seen:
                continue
            seen.add(key)
            found.append({**event, "late": repeats})
    return found


def _key(event: Event) -> tuple[str, int, int]:
    return event["optimizer"], event["step"], event["slice"]


def _said(key: tuple[str, int, int]) -> str:
    return f"{key[0]}, step {key[1]}, slice {key[2]}"


def _compare_finals(
    rank: int, undisturbed: Path, disturbed: Path, ignored: str | None
) -> list[str]:
    try:
        one, other = (_final(each) for each in (undisturbed, disturbed))
    except (OSError, ValueError) as error:
        return [f"worker {rank} has left no final values: {error}"]
    if not one:
        return [f"worker {rank} has left no final values"]
    return [
        f"worker {rank}: {name} differs" if name in one and name in other
        else f"worker {rank}: {name} is in one of the jobs only"
        for name in one | other
        if one.get(name) != other.get(name) and not (ignored and name.startswith(ignored))
    ]  # fmt: skip


def _final(path: Path) -> dict[str, tuple[Any, bytes]]:
    head, _, body = path.read_bytes().partition(b"\n")
    found, at = {}, 0
    for name, kind, shape, size in json.loads(head):
        found[name] = (kind, tuple(shape)), body[at : at + size]
        at += size
    if at != len(body):
        raise ValueError(f"{path} has {len(body)} bytes of values, not {at}")
    return found


def _check_samples(events: list[Event], samples: int) -> list[str]:
    used: dict[tuple[str, int], Counter[int]] = defaultdict(Counter)
    for event in events:
        used[event["optimizer"], event["epoch"]].update(event["samples"])
    wrong = []
    for (optimizer, epoch), counts in used.items():
        for sample in sorted({*range(samples), *counts}):
            times = counts[sample]
            if times != 1 or not 0 <= sample < samples:
                wrong.append(f"{optimizer}, epoch {epoch}: sample {sample} used {times} times")
    return wrong


def _check_steps(expected: list[Event], events: list[Event]) -> list[str]:
    counts = Counter(map(_key, events))
    wrong = [f"{_said(key)}: made {times} times" for key, times in counts.items() if times > 1]
    there = {_key(event) for event in expected}
    if not there:
        wrong.append("the undisturbed job has made no step")
    wrong += [f"{_said(key)}: never made" for key in sorted(there - counts.keys())]
    wrong += [f"{_said(key)}: made here only" for key in sorted(counts.keys() - there)]
    return wrong


def _compare_losses(expected: list[Event], events: list[Event]) -> list[str]:
    """Returns a sentence for each event with other losses or samples, in the order of steps."""
    losses = {_key(event): (event["losses"], event["samples"]) for event in expected}
    differ = {
        _key(event)
        for event in events
        if not event["late"] and losses.get(_key(event), ()) != (event["losses"], event["samples"])
    }
    return [
        f"{_said(key)}: other losses or samples" for key in sorted(differ, key=lambda key: key[1])
    ]
