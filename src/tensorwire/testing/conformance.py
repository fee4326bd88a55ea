"""Lists the named checks that every transport must pass.

A new backend is done when `check_transport` passes. Each check runs alone, on fresh Nodes, with the
target in the same process and again in another one, and must leave nothing behind. `Elsewhere` puts
the target on another host.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from .checks import data, gpu, grants, lifetime, words
from .leaks import assert_no_leak
from .setup import HOST, MEMORY_PAIRS, PLACES, CheckSetup, Elsewhere, setup, warm_up, warm_up_gpu

Check = Callable[[CheckSetup], None]


def _checks_of(*modules: Any) -> dict[str, Check]:
    return {
        name: check
        for module in modules
        for name, check in vars(module).items()
        if getattr(check, "__module__", None) == module.__name__
        and not name.startswith("_")
        and check is not gpu.stream_rounds
    }


_CHECKS = _checks_of(data, words, grants, lifetime)
_GPU_CHECKS = _checks_of(gpu)


def check_names(place: str, memory: tuple[str, str] | None = None) -> list[str]:
    """Returns the names of the checks that can run in "one process" or "two processes".

    Args:
        place: the place.
        memory: the kinds of memory on the local side ("host", "pinned" or "gpu") and on the remote
            side ("host" or "gpu"): checks that need a GPU. None: those that need none.
    """
    if place not in PLACES:
        raise ValueError(f"a place is one of {PLACES}, not {place!r}")
    if memory is not None and memory not in MEMORY_PAIRS:
        raise ValueError(f"memory is one of {MEMORY_PAIRS}, not {memory!r}")
    apart = (*lifetime.TWO_PROCESSES, *gpu.TWO_PROCESSES)
    return [
        name
        for name in (_CHECKS if memory is None else _GPU_CHECKS)
        if (place == "two processes" or name not in apart)
        and (name != "gpu_stream_order" or memory is None or memory[0] == "gpu")
        and (name != "gpu_stream_and_host" or memory is None or memory[0] != "gpu")
    ]


def run_check(
    name: str, transport: str, place: str | Elsewhere, memory: tuple[str, str] | None = None
) -> None:
    """Runs one check.

    Args:
        name: one of `check_names(place, memory)`.
        transport: the only one that its Nodes may use.
        place: "one process", "two processes", or where else the target runs; there the checks of
            two processes can run.
        memory: as for `check_names`.

    Raises:
        Exception: the check failed; an AssertionError also if it left something behind.
    """
    warm_up(transport)
    if memory is not None:
        warm_up_gpu()
    with assert_no_leak():
        _run(name, transport, place, memory)


def _run(name: str, transport: str, place: str | Elsewhere, memory: tuple[str, str] | None) -> None:
    # A function of its own: its names keep Nodes alive.
    with setup(transport, place, memory or HOST, **grants.OPTIONS.get(name, {})) as scene:
        (_CHECKS if memory is None else _GPU_CHECKS)[name](scene)


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
