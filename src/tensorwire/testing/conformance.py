"""The conformance suite: what every transport must do, as a list of named checks.

A new backend is done when `check_transport` passes. Each check runs alone, on fresh Nodes, with the
target in the same process and again in another one, and must leave nothing behind. `Elsewhere` puts
the target on another host.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Iterator

from .checks import data, grants, lifetime, words
from .leaks import assert_no_leak
from .setup import PLACES, CheckSetup, Elsewhere, setup, warm_up

Check = Callable[[CheckSetup], None]

_CHECKS: dict[str, Check] = {
    name: check
    for module in (data, words, grants, lifetime)
    for name, check in vars(module).items()
    if getattr(check, "__module__", None) == module.__name__ and not name.startswith("_")
}


def check_names(place: str) -> list[str]:
    """Names of the checks that can run in a place, "one process" or "two processes"."""
    if place not in PLACES:
        raise ValueError(f"a place is one of {PLACES}, not {place!r}")
    return [
        name for name in _CHECKS if place == "two processes" or name not in lifetime.TWO_PROCESSES
    ]


def run_check(name: str, transport: str, place: str | Elsewhere) -> None:
    """Runs one check.

    Args:
        name: one of `check_names(place)`.
        transport: the only one that its Nodes may use.
        place: "one process", "two processes", or where else the target runs; there the checks of
            two processes can run.

    Raises:
        Exception: the check failed; an AssertionError also if it left something behind.
    """
    warm_up(transport)
    with assert_no_leak():
        _run(name, transport, place)


def _run(name: str, transport: str, place: str | Elsewhere) -> None:
    # A function of its own: its names keep Nodes alive.
    with setup(transport, place, **grants.OPTIONS.get(name, {})) as scene:
        _CHECKS[name](scene)


def check_transport(
    transport: str,
    *,
    places: Iterable[str | Elsewhere] = PLACES,
    only: Iterable[str] | None = None,
) -> Iterator[tuple[str, str]]:
    """Runs the suite and yields (place, name) after each check that passed.

    `for _ in check_transport("tcp"): pass` is the whole suite; one failure does not hide others.

    Args:
        transport: name of the backend.
        places: where targets run.
        only: names of checks; None runs all.

    Raises:
        AssertionError: at the end, with every failure.
    """
    chosen = None if only is None else set(only)
    failures = []
    for place in places:
        title = place.name if isinstance(place, Elsewhere) else place
        for name in check_names("two processes" if isinstance(place, Elsewhere) else place):
            if chosen is not None and name not in chosen:
                continue
            try:
                run_check(name, transport, place)
            except Exception:
                failures.append(f"{name} in {title}:\n{traceback.format_exc()}")
                continue
            yield title, name
    if failures:
        raise AssertionError(
            f"{len(failures)} checks of {transport} failed\n\n" + "\n".join(failures)
        )
