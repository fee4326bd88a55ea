"""Rows of tables, taken and put from Python: what is refused, and that it changes nothing."""

import numpy as np
import pytest

from tensorwire.memory import put_rows, take_rows

WIDE = 12


def table() -> np.ndarray:
    return np.arange(10 * WIDE, dtype=np.uint8)


def test_rows_come_and_go() -> None:
    whole, rows = table(), np.array([7, 0, 9])
    packed = np.zeros(4 * WIDE, np.uint8)  # more than is needed
    take_rows(whole, WIDE, rows, packed)
    assert (packed.reshape(-1, WIDE)[:3] == whole.reshape(-1, WIDE)[rows]).all()
    assert not packed[3 * WIDE :].any()
    expected = table().reshape(-1, WIDE)
    expected[rows] = 200
    put_rows(whole, WIDE, rows, np.full(3 * WIDE, 200, np.uint8))
    assert (whole.reshape(-1, WIDE) == expected).all()
    take_rows(whole, WIDE, rows[:0], packed[:0])
    assert (whole.reshape(-1, WIDE) == expected).all()


@pytest.mark.parametrize(
    ("rows", "row_bytes", "room", "words"),
    [
        ([0, 10], WIDE, 2 * WIDE, "there is no row 10 in a table of 10"),
        ([-1], WIDE, WIDE, "there is no row -1"),
        ([1, 2], WIDE, 2 * WIDE - 1, "23 bytes have no room for 2 rows of 12"),
        ([1], 7, WIDE, "a table of 120 bytes has no rows of 7"),
        ([1], 0, WIDE, "has no rows of 0"),
    ],
)
def test_what_does_not_fit_changes_nothing(
    rows: list[int], row_bytes: int, room: int, words: str
) -> None:
    whole, packed, numbers = table(), np.zeros(room, np.uint8), np.array(rows)
    for action in (take_rows, put_rows):
        with pytest.raises(ValueError, match=words):
            action(whole, row_bytes, numbers, packed)
    assert (whole == table()).all()
    assert not packed.any()


def test_memory_that_cannot_be_used() -> None:
    whole, packed, rows = table(), np.zeros(WIDE, np.uint8), np.array([1])
    whole.flags.writeable = packed.flags.writeable = False
    with pytest.raises((TypeError, ValueError)):
        take_rows(whole, WIDE, rows, packed)
    with pytest.raises((TypeError, ValueError)):
        put_rows(whole, WIDE, rows, packed)
    for numbers in (np.array([0.5]), rows.astype(np.int32), np.array([[1]]), np.arange(4)[::2]):
        with pytest.raises(TypeError):
            take_rows(table(), WIDE, numbers, np.zeros(2 * WIDE, np.uint8))
    with pytest.raises(ValueError, match="contiguous"):
        take_rows(table()[::2], WIDE, rows, np.zeros(WIDE, np.uint8))
