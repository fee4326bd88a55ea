"""The cells of one server, and what a step does to them. Memory only: no processes, no waiting.

One pass per cell: reduce the slices' gradients into a tile that stays in cache, apply the optimizer
to that tile. Where something has to be known of the whole gradient first (its norm, whether it is
finite) there are two passes, and slot 0 keeps the reduced gradient between them.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import zip_longest
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from .kernel import Kernel, Lent, Lookup, Rows, Tile, Weight
from .layout import Cell, Piece, Share
from .messages import (
    APPLY,
    CHECK_FINITE,
    POOLED,
    PRODUCED,
    PUBLISH,
    PUSHED,
    REDUCE,
    REDUCED,
    RELEASE,
    WANT_NORM,
    Bytes,
    Commit,
)
from .rows import Table, read_part, tables_of


class Placed(Protocol):
    """Is told of new values, while others are still being worked on. Any thread."""

    def __call__(self, start: int, stop: int) -> None:
        """Of bytes [start, stop) of the store."""

    def rows(self, table: Table, rows: Rows) -> None:
        """Of some rows of a table."""


# A pool costs some tens of microseconds: not for a few cells.
_MIN_CELLS_PER_THREAD = 2


@dataclass(frozen=True)
class Memory:
    """The memory of a shard; every array has the bytes of its share.

    Attributes:
        master: the parameters.
        slots: one per slice: gradients that were pushed.
        produced: one per slice, where it may be: gradients that were produced in place.
        pools: one per slice, where it may be: gradients that were produced in any place of a tensor
            of the same size.
        states: optimizer state by name.
        counts: int64, one per tensor of the whole store: steps that were applied to it.
        heads: one per slice: which rows of tables it has a gradient of; of `rows.heads_bytes`.
    """

    master: Bytes
    slots: Sequence[Bytes]
    produced: Sequence[Bytes | None] = ()
    pools: Sequence[Bytes | None] = ()
    states: Mapping[str, Bytes] = field(default_factory=dict)
    counts: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    heads: Sequence[Bytes] = ()


def threads_for(cells: int, most: int) -> int:
    """How many threads work on so many cells."""
    return max(1, min(most, cells // _MIN_CELLS_PER_THREAD))


class Arrivals(Protocol):
    """What is still on its way when a version is begun; cells by their place in the share."""

    def order(self, cells: Sequence[int]) -> list[int]:
        """The cells in the order in which they are expected."""

    def wait(self, cell: int) -> None:
        """Until all gradients of the cell are there. Any thread."""


class Shard:
    """Reduces and applies. Methods are called by one thread at a time.

    Attributes:
        share: its cells.
        memory: theirs.
        threads: how many work on them.
    """

    def __init__(self, share: Share, apply: Kernel, memory: Memory, threads: int = 1) -> None:
        self.share = share
        self.memory = memory
        self._tiles = [
            self._bind(apply, cell) if cell.kind != "rows" else None for cell in share.cells
        ]
        self._trained = [i for i, cell in enumerate(share.cells) if cell.kind == "trained"]
        # By their first cells, which stand for all of a table's.
        self._tables = {table.cells.start: table for table in tables_of(share)}
        self._lookups = {i: self._bind_rows(apply, table) for i, table in self._tables.items()}
        self._worked_on = [*self._trained, *self._tables]
        self._copied = [
            i for i, cell in enumerate(share.cells) if cell.kind in ("broadcast", "average")
        ]
        here = {p.tensor for i in self._trained for p in share.cells[i].pieces}
        self._here = sorted(here)
        tables = self._tables.values()
        self._counted = [*self._here, *(tensor for table in tables for tensor in table.tensors)]
        self._reduced_rows: dict[int, Rows] = {}
        # As plain integers: for a handful of them numpy's calls cost more than the sums.
        self._counts = memory.counts.data
        threads = threads_for(len(self._worked_on), threads)
        self.threads = threads
        # The caller works too.
        self._pool = ThreadPoolExecutor(threads - 1, "tensorwire-apply") if threads > 1 else None

    def close(self) -> None:
        """Ends its threads; idempotent."""
        if self._pool:
            self._pool.shutdown()

    def _bind(self, apply: Kernel, cell: Cell) -> Tile:
        begin, end = cell.start - self.share.start, cell.stop - self.share.start
        memory = self.memory
        states = memory.states if cell.kind == "trained" else {}
        # Where nothing can be produced, no commit says that it was.
        pairs = zip_longest(memory.slots, memory.produced)
        produced = [slot if own is None else own for slot, own in pairs]
        return apply.bind(
            cell.dtype,
            memory.master[begin:end],
            [slot[begin:end] for slot in (*memory.slots, *produced)],
            {name: state[begin:end] for name, state in states.items()},
        )

    def _bind_rows(self, apply: Kernel, table: Table) -> Lookup:
        tensor = self.share.layout.spec.tensors[table.tensors[0]]
        rows = self.memory.master[table.start : table.stop]
        return apply.bind_rows(tensor.dtype, tensor.shape[1], rows)

    def check(self, commit: Commit, produces: bool) -> None:
        """Raises ValueError for gradients that are said to be where none can be."""
        layout, share = self.share.layout, self.share
        if produces and POOLED not in commit.present:
            return
        for tensor in self._here:
            how = commit.present[tensor]
            if how in (PRODUCED, POOLED) and not produces:
                raise ValueError("it cannot have produced gradients in our memory")
            if how == POOLED:
                block, place = commit.blocks[tensor] // 2, layout.places[tensor]
                if block < len(layout.places):
                    there = layout.places[block]
                    whole = share.clip(there.start, there.end) == (there.start, there.end)
                    if whole and there.end - there.start == place.end - place.start:
                        continue
                raise ValueError(f"gradient {tensor} cannot be in the place of {block}")

    def _runs(self, commits: Sequence[Commit]) -> _Runs:
        return _Runs(commits, self._counts, self._here, self.share, self.memory)

    def reduce(
        self, commits: Sequence[Commit], norms: bool, arrivals: Arrivals | None = None
    ) -> NDArray[np.float64]:
        """Puts the reduced gradient into slot 0.

        Returns:
            The sum of its squares per cell of the share, in order; empty if not asked for.
        """
        runs = self._runs(commits)

        def work(index: int) -> list[float]:
            if index in self._tables:
                rows = self._reduce_rows(index, runs)
                return self._square_sums(index, rows) if norms else []
            cell, tile = self.share.cells[index], self._tile(index)
            for run in runs.of(cell):
                tile.reduce(run.weights, run.start, run.stop, True)
            return [square_sum(tile, cell, runs)] if norms else []

        return np.array(self._map(work, arrivals), np.float64)

    def _tile(self, index: int) -> Tile:
        tile = self._tiles[index]
        assert tile is not None
        return tile

    def _reduce_rows(self, index: int, runs: _Runs) -> Rows:
        """The rows of a table that any slice has."""
        table = self._tables[index]
        parts = []
        for number, weight in runs.of_any(table.tensors):
            try:
                rows, values = read_part(
                    table, self.memory.heads[number], self.memory.slots[number]
                )
            except ValueError as error:
                name = self.share.layout.spec.tensors[table.tensors[0]].name
                more = f" and {len(table.tensors) - 1} more" if len(table.tensors) > 1 else ""
                raise ValueError(f"slice {number}, {name!r}{more}: {error}") from None
            parts.append((rows, values, weight))
        self._reduced_rows[index] = found = self._lookups[index].reduce(parts)
        return found

    def _square_sums(self, index: int, rows: Rows) -> list[float]:
        """Of each cell of a table, so that nothing depends on who has which."""
        table, cells = self._tables[index], self.share.cells
        squares = self._lookups[index].square_sums()
        size = cells[index].stop - cells[index].start
        sums = np.bincount(rows * table.row_bytes // size, squares, len(table.cells))
        return sums.tolist()  # type: ignore[no-any-return]

    def square_sums(
        self, commits: Sequence[Commit], arrivals: Arrivals | None = None
    ) -> NDArray[np.float64]:
        """The sum of squares per cell of the gradient that slot 0 holds already."""
        runs = self._runs(commits)

        def work(index: int) -> list[float]:
            if index in self._tables:
                return self._square_sums(index, self._reduced_rows[index])
            return [square_sum(self._tile(index), self.share.cells[index], runs)]

        return np.array(self._map(work, arrivals), np.float64)

    def apply(
        self,
        commits: Sequence[Commit],
        reduced: bool,
        scale: float = 1.0,
        placed: Placed | None = None,
        arrivals: Arrivals | None = None,
    ) -> None:
        """Makes the next version.

        Args:
            commits: one per slice.
            reduced: slot 0 holds the reduced gradient.
            scale: of the reduced gradient, for clipping.
            placed: None: nobody asks.
            arrivals: None: all is there.
        """
        counts = self._counts
        runs = self._runs(commits)
        hyper = commits[0].hyper

        def work(index: int) -> Sequence[float]:
            cell = self.share.cells[index]
            if index in self._tables:
                rows = self._reduced_rows[index] if reduced else self._reduce_rows(index, runs)
                self._lookups[index].step(hyper[cell.group], scale)
                if placed:
                    placed.rows(self._tables[index], rows)
                return ()
            tile = self._tile(index)
            for run in runs.of(cell):
                if not reduced:
                    tile.reduce(run.weights, run.start, run.stop, False)
                tile.step(hyper[cell.group], run.step, run.start, run.stop, reduced, scale)
            if placed:
                placed(cell.start, cell.stop)
            return ()

        self._map(work, arrivals)
        self._copy_buffers(commits, placed, arrivals)
        for tensor in self._counted:
            counts[tensor] += runs.all_present or bool(runs.weights(tensor))

    def _copy_buffers(
        self, commits: Sequence[Commit], placed: Placed | None, arrivals: Arrivals | None
    ) -> None:
        for index in self._copied:
            if arrivals:
                arrivals.wait(index)
            cell, tile = self.share.cells[index], self._tile(index)
            floating = "float" in cell.dtype
            if cell.kind == "average" and floating and len(commits) > 1:
                equal = [(i, 1.0 / len(commits)) for i in range(len(commits))]
                tile.reduce(equal, 0, cell.stop - cell.start, True)
            self._take(cell.start, cell.stop, placed)

    def publish(
        self, present: bytes, placed: Placed | None = None, arrivals: Arrivals | None = None
    ) -> None:
        """Parameters := slot 0, for the tensors that are present; nothing else is touched."""

        def work(index: int) -> Sequence[float]:
            start = stop = -1
            for piece in self.share.cells[index].pieces:
                if not present[piece.tensor]:
                    continue
                if piece.start != stop:
                    self._take(start, stop, placed)
                    start = piece.start
                stop = piece.stop
            self._take(start, stop, placed)
            return ()

        self._map(work, arrivals, range(len(self.share.cells)))

    def _take(self, start: int, stop: int, placed: Placed | None) -> None:
        """Bytes [start, stop) of the store from slot 0."""
        if start == stop:
            return
        piece = slice(start - self.share.start, stop - self.share.start)
        self.memory.master[piece] = self.memory.slots[0][piece]
        if placed:
            placed(start, stop)

    def advance(
        self,
        commits: Sequence[Commit],
        exchange: Callable[[NDArray[np.float64]], Sequence[float]],
        placed: Placed | None = None,
        arrivals: Arrivals | None = None,
    ) -> tuple[bool, float]:
        """Does what the slices' commits ask for.

        Args:
            commits: one per slice, agreed.
            exchange: gives the sums of squares of all cells of the store, in order, for this
                shard's.
            placed: None: nobody asks.
            arrivals: None: all is there.

        Returns:
            Whether the gradient was finite (True where nobody asked), and its norm (nan likewise).
        """
        head = commits[0]
        if head.operation == RELEASE:
            return True, math.nan
        if head.operation == PUBLISH:
            self.publish(head.present, placed, arrivals)
            return True, math.nan
        reduced = bool(head.flags & REDUCED)
        look = bool(head.flags & (WANT_NORM | CHECK_FINITE)) or head.max_norm < math.inf
        finite, norm, scale = True, math.nan, 1.0
        if head.operation == REDUCE or look:
            if reduced:
                sums = self.square_sums(commits, arrivals)
            else:
                sums = self.reduce(commits, look, arrivals)
            reduced = True
            if look:
                norm = _root_of_sum(exchange(sums))
                finite = math.isfinite(norm)
                if head.max_norm < math.inf:
                    # As torch.nn.utils.clip_grad_norm_.
                    scale = min(head.max_norm / (norm + 1e-6), 1.0)
        if head.operation == APPLY and (finite or not head.flags & CHECK_FINITE):
            self.apply(commits, reduced, scale, placed, arrivals)
        return finite, norm

    def _map(
        self,
        work: Callable[[int], Sequence[float]],
        arrivals: Arrivals | None,
        cells: Sequence[int] | None = None,
    ) -> list[float]:
        """The results for some cells in order; None: each trained cell and each table."""
        cells = self._worked_on if cells is None else cells
        indices = cells if arrivals is None else arrivals.order(cells)
        # Each thread takes the next: one whose core is wanted by others holds up nobody.
        left = deque(indices)

        def work_on() -> dict[int, Sequence[float]]:
            found = {}
            while left:
                try:
                    index = left.popleft()
                except IndexError:
                    break
                if arrivals:
                    arrivals.wait(index)
                found[index] = work(index)
            return found

        helpers = []
        if self._pool:
            helpers = [self._pool.submit(work_on) for _ in range(self.threads - 1)]
        try:
            results = work_on()
        finally:
            left.clear()  # after an error nobody begins with another
            wait(helpers)
        for helper in helpers:
            results |= helper.result()
        return [each for index in cells for each in results[index]]


def _root_of_sum(squares: Sequence[float]) -> float:
    try:
        return math.sqrt(math.fsum(squares))
    except OverflowError:
        return math.inf


def square_sum(tile: Tile, cell: Cell, runs: _Runs) -> float:
    """Of the reduced gradient of a cell."""
    return sum(tile.square_sum(start, stop) for start, stop in runs.summed(cell))


class _Run(NamedTuple):
    start: int
    stop: int
    weights: tuple[Weight, ...]
    step: int


@lru_cache(maxsize=64)
def _weights(
    parts: tuple[tuple[float, float], ...], present: tuple[int, ...]
) -> tuple[tuple[int, float], ...]:
    """(slot, weight) of the slices that have a gradient, from scale and weight of every commit.

    The mean over the samples of all slices: one without a gradient has a gradient of 0. Slots of
    what was produced come behind all slots of what was pushed, and behind them numbers for pools.
    """
    total = math.fsum(weight for _, weight in parts)
    return tuple(
        (i + len(parts) * (how - PUSHED), parts[i][0] * parts[i][1] / total)
        for i, how in enumerate(present)
        if how
    )


class _Runs:
    """Consecutive tensors of a cell that are treated alike; almost always that is the whole cell.

    The same slices have a gradient for them, and the same number of steps was applied to them.
    """

    def __init__(
        self,
        commits: Sequence[Commit],
        counts: memoryview,
        here: Sequence[int],
        share: Share,
        memory: Memory,
    ) -> None:
        self._commits = commits
        self.slices = len(commits)
        self._counts = counts
        self._share, self._memory = share, memory
        self._pooled = any(POOLED in commit.present for commit in commits)
        alike = [commit.present[:1] * len(commit.present) for commit in commits]
        self.all_alike = all(
            each == commit.present for each, commit in zip(alike, commits, strict=True)
        )
        self.all_present = all(b"\0" not in commit.present for commit in commits)
        applied = [counts[tensor] for tensor in here]
        same_count = not applied or min(applied) == max(applied)
        self._all_same = self.all_present and same_count
        self._count = applied[0] + 1 if applied else 1
        self._parts = tuple((commit.scale, commit.weight) for commit in commits)
        self._all = _weights(self._parts, tuple(each[0] for each in alike if each))

    def weights(self, tensor: int) -> tuple[tuple[int, float], ...]:
        """(slot, weight) of the slices that have a gradient for it."""
        return _weights(self._parts, tuple([commit.present[tensor] for commit in self._commits]))

    def of_any(self, tensors: Sequence[int]) -> list[tuple[int, float]]:
        """(slice, weight) of the slices that have a gradient for one of them, wherever."""
        found = {
            slot % self.slices: weight for each in tensors for slot, weight in self.weights(each)
        }
        return sorted(found.items())

    def of(self, cell: Cell) -> Iterator[_Run]:
        if self.all_alike and not self._pooled and self._all_same:
            yield _Run(0, cell.stop - cell.start, self._all, self._count)
            return
        run: _Run | None = None
        for piece in cell.pieces:
            slots = self.weights(piece.tensor)
            weights: tuple[Weight, ...] = slots
            if self._pooled:
                weights = tuple((self._find(slot, piece), weight) for slot, weight in slots)
            start, stop = piece.start - cell.start, piece.stop - cell.start
            count = self._counts[piece.tensor] + 1
            if run and run.stop == start and (run.weights, run.step) == (weights, count):
                run = _Run(run.start, stop, weights, count)
                continue
            if run and run.weights:
                yield run
            run = _Run(start, stop, weights, count)
        if run and run.weights:
            yield run

    def summed(self, cell: Cell) -> Iterator[tuple[int, int]]:
        """What is summed in one go for a norm: wherever gradients lie, the same."""
        if self._all_same:
            yield 0, cell.stop - cell.start
            return
        slices = self.slices
        before: tuple[Any, int] = (), 0
        begin = end = 0
        for piece in cell.pieces:
            weights = [(slot % slices, weight) for slot, weight in self.weights(piece.tensor)]
            start, stop = piece.start - cell.start, piece.stop - cell.start
            alike = weights, self._counts[piece.tensor] + 1
            if start != end or alike != before:
                if before[0]:
                    yield begin, end
                begin, before = start, alike
            end = stop
        if before[0]:
            yield begin, end

    def _find(self, slot: int, piece: Piece) -> int | Lent:
        """A piece of a gradient that may be pooled."""
        index = slot - 2 * len(self._commits)
        if index < 0:
            return slot
        places = self._share.layout.places
        tensor, produced = divmod(self._commits[index].blocks[piece.tensor], 2)
        start = places[tensor].start + piece.start - places[piece.tensor].start - self._share.start
        memory = (self._memory.produced if produced else self._memory.pools)[index]
        assert memory is not None
        return Lent(memory[start : start + piece.stop - piece.start])
