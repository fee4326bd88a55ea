"""gRPC: makes the bytes of messages whose arrays travel in them. Pure; knows no calls."""

from __future__ import annotations

import copyreg
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tensorwire.errors import StaleHandleError

from ..tensor_pb2 import NEVER_SET, Tensor
from .envelope import MAGIC
from .fields import may_have_tensors, tensors
from .tensors import sources_of, without_held

Serializer = Callable[[Any], bytes] | None


@dataclass(slots=True, eq=False, repr=False)
class Encoded:
    """A request of the user's whose bytes were made before it was known how it travels.

    Attributes:
        message: the user's.
        serializer: has made them.
        body: its bytes, None once they were taken.
    """

    message: Any
    serializer: Callable[[Any], bytes]
    body: bytes | None

    def take(self) -> bytes:
        """Returns its bytes, and keeps them no longer; makes them once more if they were taken."""
        body, self.body = self.body, None
        return self.serializer(self.message) if body is None else body


def as_sent(request: Any, body: bytes | None) -> Any:
    """Returns a request for a second attempt, with the same bytes as the first one.

    The user may have changed the message for the next call since.

    Args:
        request: the user's message.
        body: the bytes of it; None: it has arrays, and is serialized again.
    """
    return request if body is None else Encoded(request, lambda _: body, body)


class Encoder:
    """Encodes messages that may travel as they are, for one serializer. Any thread may use it.

    Args:
        serializer: the user's, None for messages that are bytes.
    """

    __slots__ = ("_plain", "_serializer")

    def __init__(self, serializer: Serializer) -> None:
        self._serializer = serializer
        # The type of the latest message, if it cannot have arrays.
        self._plain: type = bytes

    def small(
        self, message: Any, least_bytes: int
    ) -> bytes | tuple[bytes, Sequence[int]] | Encoded | None:
        """Encodes a message if it is small.

        Args:
            message: the user's.
            least_bytes: a message of this size, or with arrays of this size, is not small.

        Returns:
            Its bytes, with the tickets of its arrays if it has some. A message that is not small is
            returned for a `SentMessage`: with its bytes, if they were made, else None.

        Raises:
            Exception: the error of the serializer.
        """
        kind, serializer = type(message), self._serializer
        if kind is not self._plain:
            if kind is Tensor or may_have_tensors(kind):
                return self._small_arrays(message, least_bytes)
            self._plain = kind
        body = message if serializer is None else serializer(message)
        if type(body) is bytes and len(body) < least_bytes and not body.startswith(MAGIC):
            return body
        return None if serializer is None else Encoded(message, serializer, body)

    def _small_arrays(self, message: Any, least_bytes: int) -> tuple[bytes, Sequence[int]] | None:
        try:
            arrays = sources_of(message)
        except StaleHandleError:
            return None  # the sender finds out, and reports it
        if sum([each.nbytes for each in arrays.values()]) >= least_bytes:
            return None
        body = inside(message, arrays, self._serializer)
        if type(body) is bytes and len(body) < least_bytes and not body.startswith(MAGIC):
            return body, tuple(arrays)
        return None


def embed(message: Any) -> Any:
    """Returns a copy of a message with the bytes of its Tensors in it.

    For every way that is not a channel or server of `tensorwire.rpc`: a file, a queue, a plain
    grpcio channel, JSON, `Any.Pack`.

    Raises:
        TypeError: it is no message.
        StaleHandleError: the array of a Tensor is gone.
    """
    if not hasattr(message, "DESCRIPTOR"):
        raise TypeError(f"embed takes a protobuf message, not {type(message).__name__}")
    return _filled(message, arrays_of(message))


def arrays_of(message: Any) -> dict[int, NDArray[np.uint8]]:
    """Returns the arrays that the Tensors of a message stand for, by their tickets."""
    return sources_of(message) if may_have_tensors(type(message)) else {}


def inside(message: Any, arrays: dict[int, NDArray[np.uint8]], serializer: Serializer) -> Any:
    """Returns the serializer's result for a message with these arrays in it."""
    if arrays:
        if type(message) is Tensor and serializer is Tensor.SerializeToString:
            body = _appended(message, arrays)
            if body is not None:
                return body
        message = _filled(message, arrays)
    return message if serializer is None else serializer(message)


def _appended(message: Any, arrays: dict[int, NDArray[np.uint8]]) -> bytes | None:
    """Encodes a Tensor with its array, copied once; None: this protobuf does not allow it."""
    head = without_held(message.SerializePartialToString())
    if head is None:
        return None
    (array,) = arrays.values()
    return b"".join((head, _data_head(array.nbytes), array.data))


@lru_cache(maxsize=256)
def _data_head(size_bytes: int) -> bytes:
    """Encodes the tag and the length that precede the bytes of a Tensor's field `data`."""
    head = bytearray([Tensor.DESCRIPTOR.fields_by_name["data"].number << 3 | 2])
    while size_bytes >= 0x80:
        head.append(size_bytes & 0x7F | 0x80)
        size_bytes >>= 7
    return bytes([*head, size_bytes])


def without_arrays(message: Any, serializer: Serializer) -> Any:
    """Returns the serializer's result for a message whose arrays travel beside it.

    Other serializers than ours refuse it, see `HELD`; so they get one that looks complete.
    """
    if serializer is None:
        return message
    if serializer is type(message).SerializeToString:
        return message.SerializePartialToString()
    copy = type(message)()
    copy.CopyFrom(message)
    for each in tensors(copy):
        if each.HasField("held"):
            setattr(each.held, NEVER_SET, True)
    return serializer(copy)


def _filled(message: Any, arrays: dict[int, NDArray[np.uint8]]) -> Any:
    """Returns a copy of a message with these bytes in its Tensors."""
    copy = type(message)()
    copy.CopyFrom(message)
    for each in tensors(copy):
        if ticket := each.held.ticket:
            each.data = arrays[ticket].tobytes()
        each.ClearField("held")
    return copy


def carry_in_pickles(message_type: Any) -> None:
    """Makes pickle take the arrays of messages of this class with them."""
    copyreg.dispatch_table.setdefault(message_type, _reduced)


def _reduced(message: Any) -> tuple[Any, ...]:
    return _restored, (type(message), embed(message).SerializeToString())


def _restored(message_type: Any, data: bytes) -> Any:
    return message_type.FromString(data)


carry_in_pickles(Tensor)
