"""Manages all edges of one machine: tensors that it makes for others and gets from them.

The caller decides which machine computes what, and when.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import numpy as np

from tensorwire.errors import ClosedError
from tensorwire.memory import Node, Peer
from tensorwire.placement import Plan

from .incoming import Arrival, Incoming, wait_opened
from .outgoing import Outgoing
from .route import Route
from .values import Value, check_shape, size_bytes, values_in

_HEAD_BYTES = 64


class Edges:
    """The edges of one machine under a plan.

    Every machine of the plan makes one and opens it. A turn of a tensor is one use of its place:
    the k-th `put` of it at its maker belongs to the k-th `get` of it at each machine that uses it.
    One thread at a time.

    Args:
        node: this process.
        plan: the same at all machines.
        machine: which of its machines this is.
        peers: for each machine that it has a tensor for or from, the process.
        flights: turns of a bucket that can be on the way or in use; the same at all machines. One
            more lets the sender work on while the receiver uses the last.
        label: tells apart plans that run at the same time between the same Nodes.
        timeout_s: of every waiting; None waits for ever.
        most_bytes: of one tensor without a bound that is read into new memory.

    Raises:
        ValueError: the machine is not in the plan, a peer is missing, or flights is below 1.
    """

    def __init__(
        self,
        node: Node,
        plan: Plan,
        machine: str,
        peers: Mapping[str, Peer],
        *,
        flights: int = 2,
        label: str = "",
        timeout_s: float | None = 60.0,
        most_bytes: int = 4 << 30,
    ) -> None:
        if flights < 1:
            raise ValueError(f"flights is {flights}; 1 or more are needed")
        machines = {each for pair in plan.pairs for each in pair}
        if machines and machine not in machines:
            raise ValueError(f"the plan has no tensor that goes to or from machine {machine!r}")
        self.machine = machine
        self.plan = plan
        self._timeout_s = timeout_s
        self._outgoing: dict[str, Outgoing] = {}
        self._incoming: dict[str, Incoming] = {}
        self._local: dict[str, Value] = {}
        self.closed = False
        self._opened = False
        try:
            for source, target in plan.pairs:
                if machine not in (source, target):
                    continue
                other = target if source == machine else source
                if other not in peers:
                    raise ValueError(f"machine {machine!r} needs the peer of machine {other!r}")
                route = Route(plan, source, target, flights, label)
                if source == machine:
                    self._outgoing[other] = Outgoing(node, route, peers[other], timeout_s)
                else:
                    self._incoming[other] = Incoming(
                        node, route, peers[other], timeout_s, most_bytes
                    )
        except BaseException:
            self.close()
            raise
        self._sources = {n: each for each in self._incoming.values() for n in each.route.places}
        self._targets: dict[str, list[Outgoing]] = {}
        for bucket in plan.buckets:
            for slot in bucket.slots if bucket.source == machine else ():
                self._targets.setdefault(slot.tensor.name, []).append(self._outgoing[bucket.target])

    def open(self) -> Edges:
        """Waits until the other machines have their memory, and learns where it is.

        Raises:
            ValueError: a machine has another plan or other flights.
            TimeoutError: a machine did not make its Edges in time.
            PeerLostError, ClosedError: as everywhere.
        """
        deadline = None if self._timeout_s is None else time.monotonic() + self._timeout_s
        for target, outgoing in self._outgoing.items():
            what = f"machine {target!r} ({outgoing.peer.name})"
            wait_opened(outgoing.peer, outgoing.route.opened_name, deadline, what)
            remote = outgoing.peer.region(outgoing.route.name)
            head = np.empty(_HEAD_BYTES, np.uint8)
            remote.read(head).wait(None if deadline is None else 10.0)
            if different := outgoing.route.difference(head.tobytes()):
                raise ValueError(f"{what} has {different}: all machines make the same plan")
            outgoing.attach(remote)
        for source, incoming in self._incoming.items():
            what = f"machine {source!r} ({incoming.peer.name})"
            name = incoming.route.taken_name
            incoming.attach(wait_opened(incoming.peer, name, deadline, what))
        self._opened = True
        return self

    def place(self, name: str, shape: Sequence[int] | None = None) -> Value:
        """Returns memory to make the next turn of a tensor in, before `put(name)`.

        On one host it is the memory in which the one machine that uses the tensor will find it, or
        read it; else memory of this process, from which it is sent. Its content is undefined.

        Args:
            name: a tensor that this machine makes.
            shape: of this turn; may be left out if the plan knows it.

        Raises:
            LookupError: this machine makes no such tensor for another.
            ValueError: the shape is not planned or not given, or the tensor was placed already.
            TimeoutError: a machine did not release older turns in time.
            PeerLostError, ClosedError: as everywhere.
        """
        targets = self._made_here(name)
        tensor = targets[0].route.places[name][-1].tensor
        if shape is None:
            if not tensor.is_static:
                raise ValueError(f"{name!r} is planned as {tensor}: place it with a shape")
            shape = [size for size in tensor.shape if isinstance(size, int)]
        sizes = tuple(map(int, shape))
        check_shape(tensor, sizes)
        if name in self._local:
            raise ValueError(f"{name!r} was placed before: call put() before the next place()")
        if len(targets) == 1:
            value = targets[0].place(name, sizes)
            if value is not None:
                return value
        value = values_in(tensor, sizes, np.empty(size_bytes(tensor, sizes), np.uint8))
        self._local[name] = value
        return value

    def put(self, name: str, value: Value | None = None) -> None:
        """Makes the next turn of a tensor; it leaves when all tensors of its bucket are made.

        A value that was not placed is sent from where it is, with one copy on one host. It must
        not change until all machines that use it have released it: after `settle`, or when as many
        later turns were put as there are flights. After a TimeoutError nothing is put.

        Args:
            name: a tensor that this machine makes.
            value: a contiguous numpy array; None if it was placed.

        Raises:
            LookupError: this machine makes no such tensor for another.
            TypeError: no array.
            ValueError: dtype or shape are not as planned, it is not contiguous, or it was placed
                and is given too, or neither.
            TimeoutError: a machine did not release older turns in time.
            PeerLostError, ClosedError: as everywhere.
        """
        targets = self._made_here(name)
        local = self._local.get(name)
        if value is not None and local is not None:
            raise ValueError(f"{name!r} was placed: put it without a value")
        value = local if value is None else value
        shapes = [target.prepare(name, value) for target in targets]
        for target, shape in zip(targets, shapes, strict=True):
            target.put(name, value, shape)
        self._local.pop(name, None)

    def get(self, name: str) -> Arrival:
        """Waits for the next turn of a tensor.

        Release what it returns when nothing uses its value any more: the sender gets the memory
        back when all tensors of the bucket are released.

        Raises:
            LookupError: this machine gets no such tensor.
            TimeoutError: it did not come in time.
            PeerLostError: its maker was lost before it came.
            BusyError: it is larger than `most_bytes`.
            ValueError: what its maker wrote contradicts the plan.
            ClosedError: as everywhere.
        """
        self._check_open()
        try:
            source = self._sources[name]
        except KeyError:
            raise LookupError(f"machine {self.machine!r} gets no tensor {name!r}") from None
        return source.get(name)

    def settle(self) -> None:
        """Waits until the other machines have released all that has left.

        Raises:
            TimeoutError: a machine did not in time.
            PeerLostError, ClosedError: as everywhere.
        """
        self._check_open()
        for outgoing in self._outgoing.values():
            outgoing.settle()

    def stats(self) -> dict[str, int]:
        """Returns bytes of values since the start.

        sent: to each machine. sent_in_place: of those, made where the receiver uses or reads them.
        sent_copied: of those, copied in memory by a CPU of this process, on one host as the
        transfer itself. received: here. received_read: of those, read into new memory.
        """
        out, back = self._outgoing.values(), self._incoming.values()
        return {
            "sent": sum(each.bytes_sent for each in out),
            "sent_in_place": sum(each.bytes_in_place for each in out),
            "sent_copied": sum(each.bytes_copied for each in out),
            "received": sum(each.bytes_received for each in back),
            "received_read": sum(each.bytes_read for each in back),
        }

    def close(self) -> None:
        """Takes the memory away from the other machines; arrays of it stay valid. Idempotent."""
        self.closed = True
        for outgoing in self._outgoing.values():
            outgoing.close()
        for incoming in self._incoming.values():
            incoming.close()

    def __enter__(self) -> Edges:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            if kind is None and self._opened and not self.closed:
                self.settle()
        finally:
            self.close()

    def _made_here(self, name: str) -> list[Outgoing]:
        self._check_open()
        try:
            return self._targets[name]
        except KeyError:
            raise LookupError(
                f"machine {self.machine!r} makes no tensor {name!r} that another uses"
            ) from None

    def _check_open(self) -> None:
        if self.closed:
            raise ClosedError(f"the edges of machine {self.machine!r} are closed")
        if not self._opened:
            raise ValueError(f"the edges of machine {self.machine!r} are used before open()")
