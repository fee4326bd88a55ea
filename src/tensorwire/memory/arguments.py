"""Checks the plain values that users pass: slices, sizes, words, names. Pure."""

from __future__ import annotations

import math
from operator import index
from typing import Any

WORD_BYTES = 8
_WORD_MAX = (1 << 64) - 1
_SIZE_MAX = (1 << 63) - 1
_DESCRIPTOR_MAX = (1 << 31) - 1


def addend(value: Any) -> int:
    """Checks a number that is to be added to a word."""
    try:
        result = index(value)
    except TypeError as error:
        raise TypeError(f"an int is added to a word, not {type(value).__name__}") from error
    if not -(1 << 63) <= result < 1 << 63:
        raise ValueError(f"what is added to a word is -2**63 to 2**63 - 1, not {result}")
    return result


def name_text(name: Any, what: str) -> str:
    """Checks the name of a Node or region; the core checks its length and control characters."""
    if not isinstance(name, str):
        raise TypeError(f"a {what}'s name is a str, not {type(name).__name__}")
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"a {what}'s name is valid Unicode, not {name!r}") from error
    return name


def check_word_memory(region: Any, on_gpu: bool) -> None:
    """Refuses a word in memory of a GPU, where no CPU can raise one."""
    if on_gpu:
        raise ValueError(
            f"{region!r} is memory of a GPU, where no word can be: put the word into a region of "
            "the host's memory"
        )


def byte_count(size_bytes: Any) -> int:
    """Checks the size of a new region."""
    try:
        result = index(size_bytes)
    except TypeError as error:
        raise TypeError(f"a region's size is a number of bytes, not {size_bytes!r}") from error
    if not 1 <= result <= _SIZE_MAX:
        raise ValueError(f"a region has 1 to 2**63 - 1 bytes, not {result}")
    return result


def whole_number(value: Any, low: int, high: int, what: str) -> int:
    """Checks a number that the core takes: low to high."""
    try:
        result = index(value)
    except TypeError as error:
        raise TypeError(f"{what} is an int, not {type(value).__name__} ({value!r})") from error
    if not low <= result <= high:
        raise ValueError(f"{what} is {low} to {high}, not {result}")
    return result


def seconds(value: Any, what: str, above: float | None = None) -> float:
    """Checks a number of seconds, which may be infinite, and that it is above a limit."""
    try:
        result = float(value)
    except (TypeError, ValueError):
        raise TypeError(f"{what} is a number of seconds, not {value!r}") from None
    if isinstance(value, str | bytes):
        raise TypeError(f"{what} is a number of seconds, not {value!r}")
    if math.isnan(result) or (above is not None and result <= above):
        limit = "" if above is None else f" above {above:g}"
        raise ValueError(f"{what} is a number of seconds{limit}, not {value!r}")
    return result


def descriptor_number(value: Any) -> int:
    """Checks the number of a descriptor; the core checks the file that it names."""
    return whole_number(value, 0, _DESCRIPTOR_MAX, "a descriptor")


def byte_range(piece: Any, size_bytes: int) -> tuple[int, int]:
    """Checks a slice of bytes and returns (start, stop)."""
    if not isinstance(piece, slice):
        raise TypeError(f"regions are sliced by bytes, region[a:b], not indexed with {piece!r}")
    if piece.step is not None and piece.step != 1:
        raise ValueError(f"a slice of a region is one piece, without a step of {piece.step}")
    try:
        start = 0 if piece.start is None else index(piece.start)
        stop = size_bytes if piece.stop is None else index(piece.stop)
    except TypeError as error:
        raise TypeError(f"a slice of a region has integer bounds, not {piece!r}") from error
    if not 0 <= start <= stop <= size_bytes:
        raise ValueError(
            f"[{start}:{stop}] is outside of [0:{size_bytes}]; bounds count bytes from the start "
            "and are never cut off"
        )
    return start, stop


def word_offset(base: int, size_bytes: int, offset: int) -> int:
    """Checks a word's offset in a slice and returns its offset in the region."""
    offset = index(offset)
    if offset < 0 or offset + WORD_BYTES > size_bytes:
        raise ValueError(f"a word of 8 bytes at {offset} is outside of [0:{size_bytes}]")
    if (base + offset) % WORD_BYTES:
        raise ValueError(
            f"a word starts at a multiple of 8 bytes from the region's start, not at "
            f"{base + offset}"
        )
    return base + offset


def word_value(value: Any) -> int:
    """Checks a word's value, which is 0 to 2**64 - 1."""
    try:
        result = index(value)
    except TypeError as error:
        raise TypeError(
            f"a word's value is an int, not {type(value).__name__} ({value!r})"
        ) from error
    if not 0 <= result <= _WORD_MAX:
        raise ValueError(f"a word holds 0 to 2**64 - 1, not {result}")
    return result
