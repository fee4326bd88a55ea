"""The search for cycles rests while a store's objects are made."""

import gc
from collections.abc import Iterator

import pytest

from tensorwire.parameters import uncollected


@pytest.fixture
def collections() -> Iterator[list[int]]:
    """Returns the generations of all collections so far; they come often."""
    seen: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            seen.append(info["generation"])

    before = gc.get_threshold()
    gc.callbacks.append(note)
    gc.set_threshold(50, 2, 2)
    yield seen
    gc.set_threshold(*before)
    gc.callbacks.remove(note)


def test_no_collection_is_made_inside_and_all_are_afterwards(collections: list[int]) -> None:
    with uncollected():
        collections.clear()
        kept = [[] for _ in range(2000)]
        assert not collections
    kept += [[] for _ in range(2000)]
    assert collections
    assert gc.isenabled()


def test_a_collector_that_was_off_stays_off_and_an_error_changes_nothing() -> None:
    with pytest.raises(KeyError), uncollected():
        raise KeyError
    assert gc.isenabled()
    gc.disable()
    try:
        with uncollected():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
