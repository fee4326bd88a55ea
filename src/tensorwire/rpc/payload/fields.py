"""Finds which fields of a message are Tensors. Pure: descriptors and messages only.

For each type of message it is looked up once which of its fields can lead to one, so that a message
that can have none costs one look into a table. Extensions and messages packed in an Any are not
looked into.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

from ..tensor_pb2 import Tensor

_NAME = Tensor.DESCRIPTOR.full_name

_types: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()
_ways: dict[Any, tuple[tuple[str, str, bool], ...]] = {}


def may_have_tensors(message_type: Any) -> bool:
    """Returns whether objects of this class can have a Tensor."""
    descriptor = getattr(message_type, "DESCRIPTOR", None)
    if descriptor is None:
        return False
    known = _types.get(message_type)
    if known is None:
        known = False
        if hasattr(descriptor, "fields"):
            known = descriptor.full_name == _NAME or bool(_ways_from(descriptor))
        _types[message_type] = known
    return known


def tensors(message: Any, passed: list[Any] | None = None) -> Iterator[Any]:
    """Yields all Tensors of a message that are set.

    Args:
        message: any object; one that is no protobuf message has none.
        passed: gets every object on the way to a Tensor and the Tensors, each owner before its
            parts. Code that has a Tensor of the message has got it from one of them.
    """
    descriptor = getattr(message, "DESCRIPTOR", None)
    if descriptor is None:
        return
    if descriptor.full_name == _NAME:
        if passed is not None:
            passed.append(message)
        yield message
        return
    ways = _ways_from(descriptor)
    if not ways:
        return
    if passed is not None:
        passed.append(message)
    for name, kind, is_tensor in ways:
        if kind == "one":
            elements: Any = (getattr(message, name),) if message.HasField(name) else ()
        else:
            container = getattr(message, name)
            elements = container.values() if kind == "map" else container
        if not len(elements):
            continue
        if passed is not None and kind != "one":
            passed.append(container)
        if not is_tensor:
            for element in elements:
                yield from tensors(element, passed)
            continue
        if passed is not None:
            elements = list(elements)
            passed += elements
        yield from elements


def _ways_from(descriptor: Any) -> tuple[tuple[str, str, bool], ...]:
    """Returns (name, kind, whether it has Tensors) of each field that can lead to a Tensor.

    The kind is "one", "many" or "map".
    """
    ways = _ways.get(descriptor)
    if ways is None:
        ways = _ways[descriptor] = tuple(
            (field.name, kind, target.full_name == _NAME)
            for field in descriptor.fields
            if (found := _target(field)) is not None
            for target, kind in [found]
            if _reaches(target, set())
        )
    return ways


def _target(field: Any) -> tuple[Any, str] | None:
    """Returns the type of message that a field leads to, and its kind; None for a plain value."""
    if field.message_type is None:
        return None
    if field.message_type.GetOptions().map_entry:
        value = field.message_type.fields_by_name["value"].message_type
        return None if value is None else (value, "map")
    return field.message_type, "many" if field.is_repeated else "one"


def _reaches(descriptor: Any, seen: set[str]) -> bool:
    if descriptor.full_name == _NAME:
        return True
    if descriptor.full_name in seen:
        return False
    seen.add(descriptor.full_name)
    targets = (_target(field) for field in descriptor.fields)
    return any(_reaches(found[0], seen) for found in targets if found is not None)
