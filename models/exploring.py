"""What slices.py and changes.py have in common: a model whose states are all visited."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Generic, TypeVar

S = TypeVar("S")


class Violation(Exception):
    """The protocol has lost, doubled or mixed something."""


def put(items: tuple, at: int, item: object) -> tuple:  # type: ignore[type-arg]
    """A tuple with another item."""
    return (*items[:at], item, *items[at + 1 :])


class Explored(Generic[S]):
    """A job of which each state says which ones can come next."""

    def start(self) -> S:
        """Nothing has happened yet."""
        raise NotImplementedError

    def after(self, s: S) -> Iterator[S]:
        """The states that can come next, without a kill."""
        raise NotImplementedError

    def kills(self, s: S) -> Iterator[S]:
        """The states that a kill can bring next."""
        raise NotImplementedError

    def check_end(self, s: S) -> None:
        """Raises Violation if a state in which nothing can happen any more is wrong."""
        raise NotImplementedError

    def explore(self) -> int:
        """The number of states; Violation says what is wrong in one of them."""
        start = self.start()
        seen, left = {start}, [start]
        while left:
            state = left.pop()
            found = list(self.after(state))
            if not found:
                self.check_end(state)
            for each in (*found, *self.kills(state)):
                if each not in seen:
                    seen.add(each)
                    left.append(each)
        return len(seen)


def report(
    jobs: Mapping[str, Explored[S]], changes: Mapping[str, str], find: Callable[[str], str]
) -> int:
    """Explores jobs, then changes of the protocol; 1 if one of these was not found.

    Args:
        jobs: by names.
        changes: by names, what each is.
        find: says by its name what is wrong with a change; "" if nothing is.
    """
    started = time.perf_counter()
    for name, job in jobs.items():
        states = job.explore()
        print(f"{name}: {states} states, {time.perf_counter() - started:.1f} s", flush=True)
    missed = 0
    for change, what in changes.items():
        found = find(change)
        print(f"{'found' if found else 'NOT found'}: {what}: {found}", flush=True)
        missed += not found
    return min(missed, 1)
