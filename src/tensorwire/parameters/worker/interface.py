"""Defines a worker's methods of a store: push gradients, commit, wait for a version."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from tensorwire.durability.history import NoteKind

from ..device import DeviceBytes
from ..kernel import Rows
from ..layout import Layout, Selection
from ..messages import Bytes, Commit, Result
from .snapshot import Snapshot


class Place(NamedTuple):
    """Memory for one gradient, of exactly its bytes.

    Attributes:
        memory: writable.
        shared: it is the server's: a gradient there is not pushed, its commit says PRODUCED. Else
            it is registered memory of this process, from which pushes leave without a copy.
        block: the same place in the pool, where memory is shared. In both any gradient of the same
            size and server may lie: its commit says POOLED, and where.
        server: the first server that has a part of it; -1: it is sent.
        on_device: the memory, where that is on a device, one piece for each server; `memory` is
            empty then.
    """

    memory: Bytes
    shared: bool
    block: Bytes | None = None
    server: int = -1
    on_device: Sequence[DeviceBytes] = ()


class Part(NamedTuple):
    """The tensors of a store that a worker of a pipeline has, by their indices.

    Attributes:
        wants: it has these, and gets their values.
        sends: it says what becomes of these: their gradients and first values come from it. Every
            tensor belongs to one worker of each pipeline.
    """

    wants: Sequence[int]
    sends: Sequence[int]


class Store(Protocol):
    """A store, as a worker uses it. One thread at a time, but another one may call `push`.

    Attributes:
        layout: where tensors lie.
        own: the tensors that this worker has, as `read_reduced` gives them.
        version: the one that the last `wait` asked for, whether it came or not; 1 before.
        path: how the servers are reached ("shm", "tcp", "shm+tcp", "local").
        compares: the kernel does not tell what was written by way of `value`; see `take_back`.
        notes_bytes: memory of servers for copies and notes for a successor; 0 before a version.
        asynchronous: pushes go on while the caller computes; where memory is shared, the caller
            copies itself.
        memory: where the values of each version arrive, for others than the CPU to read; the caller
            does not write there. It changes only after this worker's commits.
    """

    layout: Layout
    own: Selection
    version: int
    path: str
    compares: bool
    notes_bytes: int
    asynchronous: bool
    memory: Bytes

    @property
    def bytes_pushed(self) -> int:
        """The bytes of gradients and buffers that were written, since the start.

        Gradients produced in place are not among them.
        """

    def value(self, tensor: int) -> Bytes:
        """Returns a tensor that this worker has, in place; only PUBLISH and APPLY change it.

        No other process sees what the caller writes there; `take_back` finds it.
        """

    def place(self, tensor: int) -> slice:
        """Returns the place in `memory` of a tensor that this worker has."""

    def differs(self, tensor: int, data: Any) -> bool:
        """Tells whether bytes differ from the tensor in the present version."""

    def take_back(self, always: bool = False) -> list[int]:
        """Takes back writes by way of `value`, and returns the tensors that had any.

        It looks at pages. A tensor that shares a page with one that was written to is told only if
        its bytes differ, or if no tensor's do. Where the kernel does not tell what was written
        (`PrivateMapping.compares`), a call looks at a 32nd, and only what differs is found.

        Args:
            always: take everything back also if nothing is found.
        """

    def places(self, slice_index: int) -> Sequence[Place | str]:
        """Returns the best place to produce each tensor's gradient, or why there is none.

        This process writes there between two versions.
        """

    def push(self, slice_index: int, tensor: int, data: Any) -> int:
        """Starts to send one tensor's bytes (without padding) into a slice's slot.

        `data` is one contiguous piece of memory; it is kept alive and must not change before
        `settle`.

        Returns:
            How many of the bytes this process copies in memory itself.
        """

    def push_rows(self, slice_index: int, tensor: int, rows: Rows, values: Bytes) -> int:
        """Starts to send a gradient of a tensor of kind "rows", for the commit that names it.

        Args:
            slice_index: of the slice.
            tensor: its index.
            rows: rising, each once.
            values: of these rows, one after the other. Both as `data` of `push`.

        Returns:
            As `push`.
        """

    def settle(self) -> None:
        """Waits until every push is in place: sources may change."""

    def commit(self, slice_index: int, commit: Commit) -> None:
        """Commits everything pushed for a slice; every slice commits every version once."""

    def missing(self) -> Sequence[int]:
        """Returns this worker's slices that are not committed yet for the next version.

        Commits of a killed worker that only some servers have are sent to the others.
        """

    def due(self, again: Callable[[int], None] | None = None) -> Sequence[int]:
        """Waits for the version that the commits asked for; `wait` then returns at once.

        Args:
            again: commits a slice of another worker, which was killed, without a batch.

        Returns:
            Without `again`: slices of this worker that need a batch first; else nothing.
        """

    def written(self) -> Bytes:
        """Returns which values were written while the job was paused: for each tensor 1 or 0.

        Only after a result that was `edited`; a commit with WRITTEN means these values.
        """

    def last_commit(self, slice_index: int) -> Commit:
        """Returns the last commit of a slice, from any worker; where memory is shared."""

    def on_device(self) -> Sequence[tuple[range, DeviceBytes]]:
        """Returns the shares that are on the device of this worker's model: which bytes, and where.

        The trained parameters there are those of the version that was waited for, until the next
        commit.
        """

    def is_committed(self, slice_index: int) -> bool:
        """Tells whether this process's predecessor has committed a slice of the next version.

        Pushes for it do nothing, and its commit stays the one that was made.
        """

    def take_or_note(
        self, kind: NoteKind, slice_index: int, data: bytes
    ) -> tuple[bool, bytes | None]:
        """Notes something of a slice of the next version, which is not committed.

        Gradients that are noted lie at the servers, and a process in the place of this one pushes
        nothing until it has been given the note.

        Returns:
            As `History.take_or_note`.
        """

    def lies_ahead(self, kind: NoteKind, slice_index: int | None = None) -> bool:
        """Tells whether this process's predecessor has noted this of a slice; None: of any."""

    def read_gradient(self, slice_index: int, tensor: int, how: int, block: int) -> Bytes:
        """Returns a gradient that lies at the servers; `how` and `block` as a commit says it."""

    def go_on(self, version: int) -> None:
        """Continues after a version that this process's predecessor has seen.

        Returns when parameters do not change until this process commits.
        """

    def wait(self) -> Result:
        """Waits for the version that the commits asked for.

        Raises:
            RuntimeError: the job is over; the message says why and names the failed process.
            PeerLostError: a server is gone.
        """

    def read_reduced(self, target: Bytes) -> None:
        """Fills `target` with the reduced gradient of `own`, after REDUCE."""

    def push_reduced(self, tensor: int, data: Any) -> int:
        """Replaces a tensor's reduced gradient, after REDUCE; only for the worker of slice 0.

        Returns:
            As `push`.
        """

    def read_values(self, target: Bytes) -> None:
        """Fills `target` (whole store) with all parameters; between versions."""

    def read_state(self, name: str, target: Bytes) -> None:
        """Fills `target` (whole store) with a state; between versions."""

    def write_state(self, name: str, source: Bytes) -> None:
        """Overwrites a state; between versions, by one worker."""

    def snapshot(self) -> Snapshot:
        """Returns a copy of the version in place, which stays as it is; between versions.

        No other worker takes part, and the others go on as soon as this one does.

        Raises:
            BusyError: this worker holds as many as there may be, or others did for 300 s; the
                message names them.
            MemoryError: there is none left for it.
            RuntimeError, PeerLostError: as `wait`.
        """

    def still(self) -> AbstractContextManager[None]:
        """Returns a context in which no version is made, also if workers go at their own pace."""

    def counts(self, averaged: bool = False) -> NDArray[np.int64]:
        """Returns each tensor's number of steps; if `averaged`, of values in its average."""

    def set_counts(self, counts: NDArray[np.int64], averaged: bool = False) -> None:
        """Overwrites these counts; between versions, by one worker."""

    def scalars(self) -> NDArray[np.float64]:
        """Returns the numbers that the optimizer keeps, a row per tensor; between versions."""

    def set_scalars(self, scalars: NDArray[np.float64]) -> None:
        """Overwrites these numbers; between versions, by one worker."""

    def reason(self) -> str:
        """Returns why the job has failed, as a server told it; "" if none did."""

    def release(self) -> None:
        """Frees the store, also at the servers; all workers call it."""

    def close(self) -> None:
        """Frees this worker's regions or memory; idempotent."""
