"""Makes messages of arrays, and the arrays that their Tensors name while they are in this process.

A protobuf message holds bytes only, so a Tensor holds a ticket: a number under which this process
keeps an array that is to be sent, or the memory that one arrived in. Tickets that come from outside
are thrown away; see `incoming.py`.
"""

from __future__ import annotations

import importlib
import math
import os
import struct
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from sys import getrefcount, modules
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tensorwire.errors import StaleHandleError, UnavailableError
from tensorwire.memory import Region
from tensorwire.memory.buffers import check_unmasked

from ..tensor_pb2 import HELD, Tensor
from .fields import tensors
from .inbox import Landed
from .janitor import JANITOR

HOLD_S = 600.0
"""The seconds that an array without an owner waits to be sent."""


@dataclass(slots=True, eq=False, repr=False)
class LentArray:
    """An array that a Tensor stands for until it is sent.

    Attributes:
        source: the bytes for `RemoteRegion.write`; keeps the array alive.
        owned: it stays after it was sent.
        since: of time.monotonic; it is dropped `HOLD_S` later, unless it is owned.
    """

    source: NDArray[np.uint8]
    owned: bool
    since: float


class Holding:
    """The memory that Tensors of one message arrived in.

    It is given back when no references are left to the message, to a part of it that leads to a
    Tensor, or to an array over the memory. Messages of protobuf cannot tell that they are dropped,
    so their reference counts are looked at: owners first, as without them no code reaches the rest.

    Args:
        arrival: the memory.
        tickets: which Tensor stands for which piece.
        passed: the objects of the message, owners first, that lead to its Tensors; the list is
            emptied. Only the caller has a reference, to the first one, the message itself.
    """

    __slots__ = ("__weakref__", "_arrival", "_is_over", "_lock", "_message", "_pieces", "_views")

    def __init__(self, arrival: Landed, tickets: dict[int, int], passed: list[Any]) -> None:
        self._arrival = arrival
        self._is_over = False
        self._pieces = tickets
        # An object that is collected while it is held may look at an array.
        self._lock = threading.RLock()
        self._views: dict[int, weakref.ref[NDArray[np.uint8]]] = {}
        self._message = _counted(passed)
        for ticket in tickets:
            _held[ticket] = self
        JANITOR.watch(self)

    def view(self, ticket: int) -> NDArray[np.uint8] | None:
        """Returns the bytes of a piece; None if they were given back."""
        with self._lock:
            if self._is_over:
                return None
            known = self._views.get(ticket)
            view = known() if known is not None else None
            if view is None:
                view = self._arrival.piece(self._pieces[ticket])
                self._views[ticket] = weakref.ref(view)
            return view

    def has(self, ticket: int) -> bool:
        """Returns whether a Tensor stands for a piece of this memory."""
        return ticket in self._pieces

    def _is_viewed(self) -> bool:
        """Returns whether any array over the memory is still there."""
        for view in list(self._views.values()):
            if view() is not None:
                return True
        return False

    def forked(self) -> None:
        """Resets the lock, which another thread may hold, in a forked child.

        No memory is mapped there.
        """
        self._lock = threading.RLock()
        self._views.clear()
        self._arrival.disown()

    def look(self) -> bool:
        """Gives the memory back if no code can reach it any more. False when it was given back."""
        with self._lock:
            if not self._is_over and self._is_seen():
                return True
            self._is_over = True
            self._views.clear()
            self._message.clear()
        # Where this is interrupted, the janitor comes back to it.
        for ticket in self._pieces:
            _held.pop(ticket, None)
        self._arrival.give_back()
        return False

    def _is_seen(self) -> bool:
        if self._is_viewed():
            return True
        for each, alone in self._message:
            if getrefcount(each) > alone:
                return True
        # The message's owner may have been collected since, and have looked at an array before.
        return self._is_viewed()


def drop(request: list[Any], holdings: list[Holding], response: Any) -> None:
    """Lets go of a request that its servicer has no longer, and of its memory.

    Not yet if the response has Tensors of it: they are sent from there.

    Args:
        request: the only reference to it, which is taken out.
        holdings: of its memory.
        response: a message, or any other object, which has no Tensors.
    """
    if holdings and any(
        holding.has(each.held.ticket) for each in tensors(response) for holding in holdings
    ):
        return
    request.clear()
    for holding in holdings:
        holding.look()


def _counted(passed: list[Any]) -> list[tuple[Any, int]]:
    """Returns each object with the count that `look` sees when no other reference is left."""
    message = [(each, 0) for each in passed]
    passed.clear()
    # Seen as in `look`: by the tuple, the loop, and the call. Owners in pure Python have what they
    # own, so that counts too.
    counted: list[tuple[Any, int]] = []
    for each, _ in message:
        count = getrefcount(each)
        counted.append((each, count if counted else _ALONE))
    return counted


def _alone() -> int:
    """Returns the count of an object that one tuple has, seen in a loop."""
    for each, _ in [(object(), 0)]:
        return getrefcount(each)
    raise AssertionError


_ALONE = _alone()


class _Overdue:
    """A watch over arrays that were not sent; drops them after `HOLD_S`.

    Attributes:
        due: of time.monotonic; a thread that lends an array after it calls `watch`.
    """

    def __init__(self) -> None:
        self.due = 0.0

    def forked(self) -> None:
        """Resets the state in a forked child, whose janitor looks at nothing yet."""
        self.due = 0.0

    def watch(self, now: float) -> None:
        """Asks the janitor to look, at most once a second: that costs more than an array."""
        self.due = now + 1.0
        JANITOR.watch(self)

    def look(self) -> bool:
        self.due = 0.0  # a thread that comes after this asks again
        now, waits = time.monotonic(), False
        # A list of pairs would make objects, so that a collection might let arrays go meanwhile.
        for ticket in list(_lent):
            lent = _lent.get(ticket)
            if lent is None or lent.owned:
                continue
            if lent.since + HOLD_S < now:
                _lent.pop(ticket, None)
            else:
                waits = True
        return waits


_tickets: list[int] = []
_DRAWN = struct.Struct("<64Q")
_lent: dict[int, LentArray] = {}
_held: dict[int, Holding] = {}
_overdue = _Overdue()


def _forked() -> None:
    """Resets the state in a forked child: new numbers, and no memory, as that is its parent's."""
    _tickets.clear()
    _overdue.forked()
    for holding in set(_held.values()):
        holding.forked()


os.register_at_fork(after_in_child=_forked)


def new_ticket() -> int:
    """Returns a number that no peer can guess, never 0."""
    while True:
        try:
            return _tickets.pop()
        except IndexError:
            _tickets.extend(each | 1 << 63 for each in _DRAWN.unpack(os.urandom(_DRAWN.size)))


def pack(array: Any, *, owner: object = None) -> Any:
    """Makes a Tensor of an array, whose bytes leave only when the message is sent.

    The array is not copied if its elements lie one after the other in C order. It must not change
    until the message was sent: until the call that sends it returns, or for a message of a stream
    until the next one is asked for.

    Args:
        array: a numpy array, torch tensor on the CPU, `Region` (its bytes), or any object that
            np.asarray takes.
        owner: the Tensor can be sent any number of times, also by copies of the message, as long as
            this object lives. Without one the array is let go when it was delivered, and after
            ten minutes if it never is: a request when its call has ended well, a response or a
            message of a stream when it left.

    Returns:
        A `tensorwire.rpc.Tensor`, to be put into messages or to be one.

    Raises:
        TypeError: it holds Python objects, has a type that is not the same everywhere, is masked,
            or the owner is of a class without weak references.
        ValueError: a torch tensor that is not on the CPU, not dense, or quantized.
    """
    dtype, shape, source = _describe(array)
    if source.nbytes == 0:
        return Tensor(dtype=dtype, shape=shape)
    ticket = new_ticket()
    # Parsing takes a quarter of the time that setting one field after the other does.
    head, ticket_bytes = _head(dtype, tuple(shape)), _TICKET.pack(ticket)
    message = Tensor.FromString(head + ticket_bytes + _AFTER_TICKET)
    if owner is not None:
        try:
            weakref.finalize(owner, _lent.pop, ticket, None).atexit = False
        except TypeError as error:
            raise TypeError(
                f"the owner is of {type(owner).__name__}, which has no weak references: "
                "take an object of a class of your own, as the one that has the array"
            ) from error
    now = time.monotonic()
    _lent[ticket] = LentArray(source, owner is not None, now)
    if owner is None and now >= _overdue.due:
        _overdue.watch(now)
    return message


def unpack(message: Any, like: str = "numpy") -> Any:
    """Returns the array of a Tensor, writable.

    If the Tensor arrived beside its message, the array is a view of that memory. The memory is this
    process's until the array, all arrays made from it, and the message are gone; then the sender
    gets it back. A Tensor that came in its message, as from a plain gRPC peer, gives a copy.

    Args:
        message: a `tensorwire.rpc.Tensor`, received or made by `pack`.
        like: "numpy" for a numpy array, "torch" for a torch tensor on the CPU, which also has
            dtypes that numpy does not know.

    Raises:
        TypeError: not a Tensor, or its dtype is unknown there.
        ValueError: its fields do not fit together, or `like` is neither of the two.
        StaleHandleError: its memory was given back: this is a copy of a message that is gone.
        ClosedError: it arrived in the process that this one was forked from.
        UnavailableError: torch is asked for and not installed.
    """
    if like == "torch":
        return _torch_tensor(message)
    if like != "numpy":
        raise ValueError(f'like is "numpy" or "torch", not {like!r}')
    if type(message) is Tensor:  # the usual one: only its size needs a check
        known, shape, body = _dtypes.get(message.dtype), message.shape[:], message.data
        if known is not None and len(shape) == 1:
            size_bytes = shape[0] * known.itemsize
            if len(body) == size_bytes:
                return np.ndarray(shape, known, bytearray(body))
            if (ticket := message.held.ticket) and (data := _found(ticket)).nbytes == size_bytes:
                return data.view(known)
    name, shape = _checked(message)
    dtype = _dtypes.get(name) or _known_dtype(name)
    data = _bytes_of(message)
    _check_size(name, shape, data, dtype.itemsize)
    return data.view(dtype).reshape(shape)


def _torch_tensor(message: Any) -> Any:
    """Returns the array of a Tensor as a torch tensor; see `unpack`."""
    try:
        torch: Any = importlib.import_module("torch")
    except ImportError as error:
        raise UnavailableError(
            'unpack(message, like="torch") makes a torch tensor, and torch is not installed: '
            "pip install torch, or use unpack(message)"
        ) from error
    name, shape = _checked(message)
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"torch has no dtype {name!r}")
    data = _bytes_of(message)
    _check_size(name, shape, data, dtype.itemsize)
    if data.nbytes == 0:
        return torch.empty(shape, dtype=dtype, device="cpu")
    return torch.from_numpy(data).view(dtype).reshape(shape)


def sources_of(message: Any) -> dict[int, NDArray[np.uint8]]:
    """Returns the bytes that the Tensors of a message stand for, of any origin, by their tickets.

    Raises:
        StaleHandleError: they are gone.
        ClosedError: they arrived in the process that this one was forked from.
    """
    if type(message) is Tensor:  # the usual one
        ticket = message.held.ticket
        return {ticket: _found(ticket)} if ticket else {}
    return {ticket: _found(ticket) for each in tensors(message) if (ticket := each.held.ticket)}


def _found(ticket: int) -> NDArray[np.uint8]:
    if (lent := _lent.get(ticket)) is not None:
        return lent.source
    holding = _held.get(ticket)
    data = holding.view(ticket) if holding is not None else None
    if data is None:
        raise StaleHandleError(
            "the array of this Tensor is gone: it was sent before, or its owner, or the message "
            "that it came in, was dropped. Make it with pack(array, owner=...) to send it many "
            "times, and keep an array that arrived, or its message, as long as it is needed. What "
            "is sent by plain grpcio, or stored, is made by embed(message)"
        )
    return data


_TICKET = struct.Struct("<Q")


def _around_ticket() -> tuple[bytes, bytes]:
    """Returns the bytes before and after the ticket in an encoded `held` field."""
    ticket = 0xFEDCBA9876543210
    message = Tensor(held=HELD)
    message.held.ticket = ticket
    before, after = message.SerializePartialToString().split(_TICKET.pack(ticket))
    return before, after


_BEFORE_TICKET, _AFTER_TICKET = _around_ticket()
_HELD_BYTES = len(_BEFORE_TICKET) + _TICKET.size + len(_AFTER_TICKET)


def without_held(encoded: bytes) -> bytes | None:
    """Takes the field `held` off an encoded Tensor; None: this protobuf does not put it last."""
    at = len(encoded) - _HELD_BYTES
    if encoded.startswith(_BEFORE_TICKET, at) and encoded.endswith(_AFTER_TICKET):
        return encoded[:at]
    return None


@lru_cache(maxsize=1024)
def _head(dtype: str, shape: tuple[int, ...]) -> bytes:
    """Encodes a Tensor of an array up to its ticket."""
    encoded: bytes = Tensor(dtype=dtype, shape=shape).SerializeToString()
    return encoded + _BEFORE_TICKET


def give_ticket(message: Any, ticket: int) -> None:
    """Makes a Tensor stand for an array of this process."""
    held = message.held
    held.CopyFrom(HELD)
    held.ticket = ticket


def delivered(tickets: Sequence[int]) -> None:
    """Lets go of arrays that have left, except those with an owner."""
    for ticket in tickets:
        lent = _lent.get(ticket)
        if lent is not None and not lent.owned:
            _lent.pop(ticket, None)


def lent_arrays() -> int:
    """Returns the number of arrays that wait to be sent; for tests."""
    return len(_lent)


def held_tensors() -> int:
    """Returns the number of Tensors that arrived and are still here; for tests."""
    return len(_held)


def _describe(array: Any) -> tuple[str, Sequence[int], NDArray[np.uint8]]:
    """Returns (dtype, shape, bytes) of an array; the bytes keep it alive."""
    if type(array) is np.ndarray and array.flags.c_contiguous:
        known = _as_they_lie.get(array.dtype)
        if known is not None:
            shape = array.shape
            return known, shape, (array if len(shape) == 1 else array.reshape(-1)).view(_UINT8)
    torch = modules.get("torch")
    if torch is not None and isinstance(array, torch.Tensor):
        if not array.is_cpu or array.layout is not torch.strided or array.is_nested:
            where = f"on {array.device}, {'nested' if array.is_nested else array.layout}"
            raise ValueError(
                f"a Tensor is made of a dense tensor on the CPU, not {where}: "
                "call its cpu(), to_dense() or unbind() first"
            )
        if array.is_quantized:
            raise ValueError(
                f"a Tensor of {array.dtype} would lose the scale of its numbers: send "
                "int_repr(), and the scale and zero point beside it"
            )
        array = array.detach().resolve_conj().resolve_neg().contiguous()
        shape = list(array.shape)
        name = str(array.dtype).removeprefix("torch.")
        return name, shape, array.reshape(-1).view(torch.uint8).numpy()
    if isinstance(array, Region):
        array = array.array()
    check_unmasked(array)
    array = np.asarray(array)
    dtype = array.dtype
    name = _names.get(dtype) or _name_of(dtype)
    shape = array.shape
    array = np.ascontiguousarray(array, _dtypes.get(name) or _known_dtype(name))
    if len(shape) != 1:
        array = array.reshape(-1)
    return name, shape, array.view(_UINT8)


_UINT8 = np.dtype(np.uint8)
_dtypes: dict[str, np.dtype[Any]] = {}
"""The dtypes of Tensors, by their names, with the byte order of a Tensor."""
_names: dict[np.dtype[Any], str] = {}
"""The names of the dtypes of arrays here; to ask numpy for one takes longer than all the rest."""
_as_they_lie: dict[np.dtype[Any], str] = {}
"""The names of the dtypes whose elements lie in arrays as they travel."""


def _known_dtype(name: str) -> np.dtype[Any]:
    """Returns the dtype of this name, and remembers it; TypeError if it is no dtype of Tensors."""
    try:
        known = np.dtype(name)
    except (TypeError, ValueError, SyntaxError) as error:  # numpy evaluates some of them
        raise TypeError(
            f"numpy has no dtype {name!r}: use unpack(message, like='torch')"
        ) from error
    if not _portable(known) or known.name != name:
        raise TypeError(f"{name!r} is no dtype of a Tensor")
    return _dtypes.setdefault(name, known.newbyteorder("<"))


def _name_of(dtype: np.dtype[Any]) -> str:
    """Returns the name of a dtype, and remembers it; TypeError if it is no dtype of Tensors."""
    if not _portable(dtype):
        hint = ": np.frombuffer(data, np.uint8) makes numbers of bytes" if dtype.kind == "S" else ""
        raise TypeError(f"a Tensor has numbers that are the same everywhere, not {dtype}{hint}")
    name = dtype.name
    if dtype == _known_dtype(name):
        _as_they_lie[dtype] = name
    return _names.setdefault(dtype, name)


def _portable(dtype: np.dtype[Any]) -> bool:
    return dtype.kind in "biufc" and dtype.char not in "gG"  # long double differs by machine


def _checked(message: Any) -> tuple[str, tuple[int, ...]]:
    if not isinstance(message, Tensor):
        raise TypeError(f"a tensorwire.rpc.Tensor is needed, not {type(message).__name__}")
    name = message.dtype
    if not name:
        raise TypeError("this Tensor has no dtype: the field was never set, or not by pack(...)")
    shape = tuple(message.shape[:])  # a copy of all takes less than an iteration
    if shape and min(shape) < 0:
        raise ValueError(f"a Tensor has the shape {shape}; a size cannot be negative")
    return name, shape


def _bytes_of(message: Any) -> NDArray[np.uint8]:
    if ticket := message.held.ticket:
        return _found(ticket)
    return np.frombuffer(bytearray(message.data), np.uint8)


def _check_size(
    dtype: str, shape: tuple[int, ...], data: NDArray[np.uint8], item_bytes: int
) -> None:
    if math.prod(shape) * item_bytes != data.nbytes:
        hint = "" if data.nbytes else ": a sender that uses plain grpcio calls embed(message) first"
        raise ValueError(
            f"a Tensor of {dtype} with shape {shape} came with {data.nbytes} bytes{hint}"
        )
