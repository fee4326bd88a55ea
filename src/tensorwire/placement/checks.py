"""Checks values that come as JSON: errors are ValueErrors that say where they are. Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

MAX_BYTES = 1 << 48
"""Of one tensor, and of all slots between two machines: sums of offsets stay far below 2**63."""

MAX_NAME = 200


def load(text: str | bytes, what: str, version: int) -> dict[str, Any]:
    """Decodes a document and checks what it says it is.

    Raises:
        ValueError: no JSON, another document, or another version.
    """
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"this is no JSON: {error}") from None
    except TypeError:
        raise ValueError(f"JSON is str or bytes, not {type(text).__name__}") from None
    if not isinstance(document, dict) or document.get("format") != f"tensorwire {what}":
        raise ValueError(f"this is no {what}: its format is not 'tensorwire {what}'")
    found = document.get("version")
    if type(found) is not int or found != version:
        raise ValueError(f"{what} has version {found!r}; this tensorwire reads version {version}")
    return document


def dump(what: str, version: int, parts: dict[str, Any]) -> str:
    """The document as text, the same for equal parts."""
    document = {"format": f"tensorwire {what}", "version": version, **parts}
    return json.dumps(document, separators=(",", ":"), sort_keys=True)


def fields(value: Any, where: str, names: Sequence[str]) -> list[Any]:
    """The values of an object that has exactly these members."""
    if not isinstance(value, dict) or set(value) != set(names):
        found = sorted(map(repr, value)) if isinstance(value, dict) else type(value).__name__
        raise ValueError(f"{where} has the members {', '.join(names)}; found {found}")
    return [value[name] for name in names]


def items(value: Any, where: str, most: int) -> list[Any]:
    """A list that is not too long."""
    if not isinstance(value, list):
        raise ValueError(f"{where} is a list, not {type(value).__name__}")
    if len(value) > most:
        raise ValueError(f"{where} has {len(value)} entries; at most {most} are possible")
    return value


def name(value: Any, where: str) -> str:
    """A name that can be printed and encoded."""
    if not isinstance(value, str) or not 0 < len(value) <= MAX_NAME or not value.isprintable():
        raise ValueError(f"{where} is a printable text of 1 to {MAX_NAME} characters: {value!r}")
    return value


def number(value: Any, where: str, low: int, high: int) -> int:
    """A whole number in a range."""
    if type(value) is not int or not low <= value <= high:
        raise ValueError(f"{where} is a whole number from {low} to {high}, not {value!r}")
    return value
