"""Parses JSON that another process has written into values of declared types.

Every socket and file by which programs talk about a job is read here, so that the callers may trust
the values. Knows no message: each reader declares the form of its messages, as a TypedDict, a
dataclass or a type such as `dict[str, Any]`.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import reprlib
import types
import typing
from typing import Any, TypeVar

T = TypeVar("T")

_MOST_DEPTH = 32
_NAMES = {
    bool: "true or false", dict: "an object", float: "a number", int: "a whole number",
    list: "a list", str: "text", types.NoneType: "null",
}  # fmt: skip


def parse_json(data: bytes | str, form: type[T], most_bytes: int = 1 << 16) -> T:
    """Returns the value of a JSON text, if it has the declared form.

    Neither `true` nor `1.0` is an int; an int is taken for a float. An object has all keys that its
    form requires, and none that the form does not name.

    Args:
        data: the text, in UTF-8.
        form: a TypedDict or a dataclass, which is made; `dict[str, X]`, `list[X]`, `X | None`,
            `int`, `float`, `bool`, `str`, or `Any`.
        most_bytes: the longest text that is read.

    Raises:
        ValueError: the text is too long, nested too deeply, no JSON (NaN and Infinity are none),
            has a key twice, a number that 64 bits do not hold, or another form; it says which.
    """
    if len(data) > most_bytes:
        raise ValueError(f"it is longer than {most_bytes} bytes")
    try:
        found = _DECODER.decode(data if isinstance(data, str) else bytes(data).decode())
        _checked(found, Any, "", 0)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    return typing.cast(T, _checked(found, form, "it", 0))


def _checked(value: Any, form: Any, name: str, depth: int) -> Any:
    """Returns a value in the declared form; `name` is its place, for the message."""
    if depth > _MOST_DEPTH:
        raise ValueError("it is nested too deeply")
    kind, origin, parts = type(value), typing.get_origin(form), typing.get_args(form)
    if form is Any:
        for each in value.values() if kind is dict else value if kind is list else ():
            _checked(each, Any, name, depth + 1)
        return value
    if origin in (types.UnionType, typing.Union):
        form = next((part for part in parts if kind is part), parts[0])
        return _checked(value, form, name, depth)
    if form is float and kind is int:
        return float(value)
    if origin is list and kind is list:
        return [_checked(v, parts[0], f"{name}[{at}]", depth + 1) for at, v in enumerate(value)]
    if origin is dict and kind is dict:
        return {key: _checked(v, parts[1], f"{name}.{key}", depth + 1) for key, v in value.items()}
    fields = _forms_of(form)
    if fields is not None and kind is dict:
        if unknown := sorted(value.keys() - fields.keys()):
            raise ValueError(f"{name} has {unknown[0]!r:.80}, which is unknown")
        if missing := [key for key, (_, needed) in fields.items() if needed and key not in value]:
            raise ValueError(f"{name} has no {missing[0]!r}")
        made = {k: _checked(v, fields[k][0], f"{name}.{k}", depth + 1) for k, v in value.items()}
        return form(**made)
    if kind is form:
        return value
    wanted = _NAMES[dict if fields is not None else origin or form]
    raise ValueError(f"{name.removeprefix('it.')} is {reprlib.repr(value)}, not {wanted}")


@functools.cache
def _forms_of(form: Any) -> dict[str, tuple[Any, bool]] | None:
    """Returns the form of each key of an object, and whether it is required; None: no object."""
    if dataclasses.is_dataclass(form):
        needed = {
            each.name
            for each in dataclasses.fields(form)
            if each.default is each.default_factory is dataclasses.MISSING
        }
    elif typing.is_typeddict(form):
        needed = set(form.__required_keys__)
    else:
        return None
    return {key: (each, key in needed) for key, each in typing.get_type_hints(form).items()}


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("it has a key twice")
    return found


def _whole(text: str) -> int:
    number = int(text) if len(text) <= 20 else 1 << 64
    if not -(1 << 63) <= number < 1 << 64:
        raise ValueError(f"{text[:30]} is a number that 64 bits do not hold")
    return number


def _finite(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError(f"{text[:30]} is no number")
    return number


_DECODER = json.JSONDecoder(
    object_pairs_hook=_object, parse_int=_whole, parse_float=_finite, parse_constant=_finite
)
