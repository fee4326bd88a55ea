"""Changes the cells of one server in a step; only memory, no processes and no waiting.

One pass per cell: reduce the slices' gradients into a tile that stays in cache, apply the optimizer
to that tile. There are two passes where a step needs the norm of the whole gradient first, or
whether it is finite. Between them the reduced gradient is kept: in slot 0, or, where a journal is
written, in memory of its own, so that both passes can be made again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial

import numpy as np

from tensorwire.failpoints import failpoint

from .contributions import Contributions
from .device import DeviceBytes, ShareDevice
from .journal import MOST_THREADS, Change, Journal, Numbers
from .kernel import Kernel, Lookup, Rows, Scalars, TableStep, Tile
from .layout import CELL_BYTES, Cell, Share
from .messages import (
    ABSENT,
    POOLED,
    PRODUCED,
    REDUCE,
    REDUCED,
    WRITTEN,
    Bytes,
    Commit,
    Hyper,
)
from .rows import Table, read_part, tables_of
from .shard_memory import ShardMemory
from .step import Arrivals, Exchange, Publisher, Step

_NO_ROWS: Rows = np.empty(0, np.int64)
_MIN_CELLS_PER_THREAD = 2  # of CELL_BYTES; a pool costs some tens of microseconds


def threads_for(cells: int, most: int) -> int:
    """Returns how many threads work on a number of cells of CELL_BYTES."""
    return max(1, min(most, cells // _MIN_CELLS_PER_THREAD, MOST_THREADS))


class Shard:
    """The cells of one server, which up to `threads` threads reduce and step.

    One thread at a time calls the methods. With a journal, a version in which another process was
    killed is completed as if nothing had happened.
    """

    def __init__(
        self,
        share: Share,
        kernel: Kernel,
        memory: ShardMemory,
        threads: int = 1,
        journal: Journal | None = None,
    ) -> None:
        self.share = share
        self._journal = journal
        self.memory = memory
        self._kernel = kernel
        self._bundles = memory.bundles(share)
        self._kept_on_device: DeviceBytes = None
        self._trained = [i for _, members in self._bundles.values() for i in members]
        self._bind_tiles()
        # By their first cells, which stand for all of a table's.
        self._tables = {table.cells.start: table for table in tables_of(share)}
        self._lookups = {i: self._bind_rows(kernel, table) for i, table in self._tables.items()}
        self._worked_on = [*self._bundles, *self._tables]
        self._copied = [
            i for i, cell in enumerate(share.cells) if cell.kind in ("broadcast", "average")
        ]
        self._here = sorted({p.tensor for i in self._trained for p in share.cells[i].pieces})
        tables = self._tables.values()
        self._counted = [*self._here, *(tensor for table in tables for tensor in table.tensors)]
        self._reduced_rows: dict[int, Rows] = {}
        # As plain integers: for a handful of them numpy's calls cost more than the sums.
        self._counts = memory.counts.data
        trained_bytes = sum(share.cells[i].stop - share.cells[i].start for i in self._trained)
        threads = threads_for(-(-trained_bytes // CELL_BYTES) + len(self._tables), threads)
        if memory.device is not None:
            threads = 1  # the device does the work
        self.threads = threads
        # The caller works too.
        self._pool = ThreadPoolExecutor(threads - 1, "tensorwire-apply") if threads > 1 else None

    def close(self) -> None:
        """Ends its threads; idempotent."""
        if self._pool:
            self._pool.shutdown()

    def _bind_tiles(self) -> None:
        """Makes a tile of each cell, and of each bundle of several."""
        cells, bundles = self.share.cells, self._bundles
        self._tiles = {
            i: self._bind(self._kernel, cell) for i, cell in enumerate(cells) if cell.kind != "rows"
        }
        self._bundle_tiles = {
            i: self._tiles[i] if len(members) == 1 else self._bind(self._kernel, bundle)
            for i, (bundle, members) in bundles.items()
        }

    def _bind(self, kernel: Kernel, cell: Cell) -> Tile:
        begin, end = cell.start - self.share.start, cell.stop - self.share.start
        memory, changes = self.memory, cell.kind in ("trained", "whole")
        states = memory.states if changes else {}
        shape = None
        if cell.kind == "whole":
            shape = self.share.layout.spec.tensors[cell.pieces[0].tensor].shape
        slots = [each.slot for each in memory.contributions]
        # Where nothing can be produced, no commit says that it was.
        produced = [
            each.slot if each.produced is None or not changes else each.produced
            for each in memory.contributions
        ]
        kept = slots[0] if memory.kept is None else memory.kept
        if changes and self._kept_on_device is not None:
            kept = self._kept_on_device
        return kernel.bind(
            cell,
            shape,
            (memory.worked_on if changes else memory.master)[begin:end],
            [slot[begin:end] for slot in (*slots, *produced)],
            {name: state[begin:end] for name, state in states.items()},
            kept[begin:end],
        )

    def _bind_rows(self, kernel: Kernel, table: Table) -> Lookup:
        tensor = self.share.layout.spec.tensors[table.tensors[0]]
        part = slice(table.start, table.stop)
        states = {name: state[part] for name, state in self.memory.states.items()}
        return kernel.bind_rows(tensor, self.memory.master[part], states)

    def check(self, commit: Commit, produces: bool) -> None:
        """Raises ValueError for gradients that are said to be where none can be."""
        layout, share = self.share.layout, self.share
        if produces and POOLED not in commit.present:
            return
        for tensor in self._here:
            how, name = commit.present[tensor], layout.spec.tensors[tensor].name
            if how in (PRODUCED, POOLED) and not produces:
                raise ValueError(
                    f"it says that the gradient of {name!r} is in the server's memory, to which "
                    "this worker has no access"
                )
            if how == POOLED:
                block, place = commit.blocks[tensor] // 2, layout.places[tensor]
                if block < len(layout.places):
                    there = layout.places[block]
                    whole = share.clip(there.start, there.end) == (there.start, there.end)
                    if whole and there.end - there.start == place.end - place.start:
                        continue
                raise ValueError(
                    f"it says that the gradient of {name!r} is in block {block}, which is not here "
                    "or has another size"
                )

    def _contributions(self, commits: Sequence[Commit]) -> Contributions:
        memory = self.memory
        return Contributions(
            commits, self._counts, memory.scalars, self._here, self.share, memory.contributions
        )

    def _keep_reduced(self, step: Step) -> None:
        """Keeps the reduced gradient; the sums of its squares per cell, if asked for."""
        given, reduced, looks = step.given, step.reduced, step.looks
        self._keep_on_device()

        def work(index: int) -> list[float]:
            if index in self._tables:
                rows = self._find_rows(index, given, reduced)
                if self._journal and not reduced:
                    weights = given.of_any(self._tables[index].tensors)
                    self._journal.note_reduced(index, step.head.version, weights)
                return self._square_sums(index, rows) if looks else []
            cell, tile = self.share.cells[index], self._tiles[index]
            for run in () if reduced else given.of(cell):
                tile.reduce(run.weights, run.start, run.stop, True)
            if not looks:
                return []
            return [sum(tile.square_sum(start, stop) for start, stop in given.summed(cell))]

        cells = [*self._trained, *self._tables]
        sums = self._map(work, step.arrivals, cells)
        step.sums, step.reduced = np.array(sums, np.float64), True
        if step.head.operation == REDUCE and self.memory.device is not None:
            self._copy_kept(self.memory.device, to_host=True)

    def _keep_on_device(self) -> None:
        """Gets memory for a reduced gradient on the device, where there is one."""
        device = self.memory.device
        if device is not None and self._kept_on_device is None:
            self._kept_on_device = device.empty(self.share.size_bytes)
            self._bind_tiles()

    def _copy_kept(self, device: ShareDevice, to_host: bool) -> None:
        """Copies the reduced gradient to the host, where workers read and write it, or back."""
        memory, base = self.memory, self.share.start
        host = memory.contributions[0].slot if memory.kept is None else memory.kept
        for bundle, _ in self._bundles.values():
            part = slice(bundle.start - base, bundle.stop - base)
            pair = host[part], self._kept_on_device[part]
            device.copy(*(pair if to_host else pair[::-1]))
        device.synchronize()

    def _find_rows(self, index: int, given: Contributions, reduced: bool) -> Rows:
        """Reduces the gradient of a table, unless that is done; returns the rows that have one."""
        if not reduced:
            return self._reduce_rows(index, given.of_any(self._tables[index].tensors))
        if index not in self._reduced_rows:
            # A process that was killed reduced it: the slices' gradients still lie there.
            weights = self._journal.noted_reduced(index) if self._journal else None
            if weights is None:
                name = self.share.layout.spec.tensors[self._tables[index].tensors[0]].name
                raise ValueError(
                    f"a step needs the averaged gradient of {name!r}, which this server does not "
                    "have: go on from the last checkpoint (job.load)"
                )
            return self._reduce_rows(index, weights)
        return self._reduced_rows[index]

    def _reduce_rows(self, index: int, weights: Sequence[tuple[int, float]]) -> Rows:
        """Reduces the rows of a table that any of some slices has, by weight; returns them."""
        table = self._tables[index]
        parts = []
        for number, weight in weights:
            try:
                there = self.memory.contributions[number]
                rows, values = read_part(table, there.heads, there.slot)
            except ValueError as error:
                name = self.share.layout.spec.tensors[table.tensors[0]].name
                more = f" and {len(table.tensors) - 1} more" if len(table.tensors) > 1 else ""
                raise ValueError(f"slice {number}, {name!r}{more}: {error}") from None
            parts.append((rows, values, weight))
        self._reduced_rows[index] = found = self._lookups[index].reduce(parts)
        return found

    def _square_sums(self, index: int, rows: Rows) -> list[float]:
        """Returns a sum for each cell of a table, which does not depend on the shares."""
        table, cells = self._tables[index], self.share.cells
        squares = self._lookups[index].square_sums()
        size = cells[index].stop - cells[index].start
        sums = np.bincount(rows * table.row_bytes // size, squares, len(table.cells))
        return sums.tolist()  # type: ignore[no-any-return]

    def _make_cells(self, step: Step) -> None:
        """Makes the cells and tables of the version that are not made yet."""
        journal, version, publisher = step.journal, step.head.version, step.publisher
        given = step.given  # before threads ask

        def work(index: int) -> Sequence[float]:
            if journal and journal.is_done(index, version):
                step.after.extend(self._noted(journal, index, given))
            elif index not in self._tables:
                self._make_cell(step, index)
                if publisher:
                    bundle, _ = self._bundles[index]
                    publisher(bundle.start, bundle.stop)
            else:
                rows = self._make_table(step, index)
                if publisher:
                    publisher.rows(self._tables[index], rows)
            return ()

        self._map(work, step.arrivals)

    def _make_cell(self, step: Step, index: int) -> None:
        """Makes a cell's new values."""
        if journal := step.journal:
            change = Change(index, step.head.version, _NO_ROWS)
            journal.save(change)
            failpoint("cell.saved")
            journal.arm(change)
            failpoint("cell.armed")
        self._change_cell(step, index)
        failpoint("cell.changed")
        if journal:
            journal.mark(change)
            failpoint("cell.done")
            journal.disarm(change)
            failpoint("cell.disarmed")

    def _make_table(self, step: Step, index: int) -> Rows:
        """Makes the new values of a table's rows, like a cell's; returns these rows."""
        rows = self._find_rows(index, step.given, step.reduced)
        if journal := step.journal:
            change = Change(index, step.head.version, rows)
            journal.save_rows(change)
            failpoint("table.saved")
            journal.arm_rows(change)
            failpoint("table.armed")
        hyper = step.head.hyper[self.share.cells[index].group]
        self._note(step, self._step_rows(index, step.given, hyper, step.scale))
        failpoint("table.changed")
        if journal:
            journal.mark(change)
            failpoint("table.done")
            journal.disarm_rows(change)
            failpoint("table.disarmed")
        return rows

    def _change_cell(self, step: Step, index: int) -> None:
        """Applies the gradient to a cell, reduced here if it is not kept."""
        memory = self.memory
        (cell, _), tile = self._bundles[index], self._bundle_tiles[index]
        found: list[tuple[Sequence[int], Scalars]] = []
        hyper = step.head.hyper[cell.group]
        for run in step.given.of(cell):
            if not step.reduced:
                tile.reduce(run.weights, run.start, run.stop, False)
            scalars = tile.step(
                hyper, run.step, run.scalars, run.start, run.stop, step.reduced, step.scale
            )
            if scalars:
                begin, end = cell.start + run.start, cell.start + run.stop
                tensors = [p.tensor for p in cell.pieces if begin <= p.start < end]
                found.append((tensors, scalars))
        if memory.average is not None:
            self._average(cell, memory.average)
        if memory.device is not None:
            part = slice(cell.start - self.share.start, cell.stop - self.share.start)
            memory.device.copy(memory.master[part], memory.on_device[part])
            memory.device.synchronize()
        if found:
            self._note(step, found)

    @staticmethod
    def _note(step: Step, found: list[tuple[Sequence[int], Scalars]]) -> None:
        """Keeps numbers of tensors until all cells are done."""
        if step.journal:
            for tensors, scalars in found:
                step.journal.note(tensors, scalars)
        step.after.extend(found)

    def _count(self, step: Step) -> None:
        memory, given = self.memory, step.given
        if memory.average is not None:
            memory.averaged[self._here] += 1
        self._copy_buffers(step.commits, step.publisher, step.arrivals)
        for tensor in self._counted:
            self._counts[tensor] += given.all_present or bool(given.weights(tensor))
        for tensors, scalars in step.after:
            memory.scalars[tensors] = scalars

    def _noted(
        self, journal: Journal, index: int, given: Contributions
    ) -> list[tuple[Sequence[int], Scalars]]:
        """Returns the numbers of tensors after a step that another process has made of a cell."""
        if not self.memory.scalars.size:
            return []
        if index in self._tables:
            tensors: Sequence[int] = self._tables[index].tensors
        else:
            tensors = [piece.tensor for piece in self._bundles[index][0].pieces]
        return [([each], journal.noted(each)) for each in tensors if given.weights(each)]

    def _average(self, cell: Cell, average: Bytes) -> None:
        """Updates the average of a cell, which begins with the first values (AveragedModel)."""
        base, averaged = self.share.start, self.memory.averaged.data
        for start, stop, begins in cell.runs(lambda piece: averaged[piece.tensor] == 0):
            part = slice(start - base, stop - base)
            weight = 1.0 if begins else 1.0 - self.share.layout.spec.ema
            self._kernel.average(cell.dtype, average[part], self.memory.worked_on[part], weight)

    def _step_rows(
        self, index: int, given: Contributions, hyper: Hyper, scale: float
    ) -> list[tuple[Sequence[int], Scalars]]:
        """Applies the reduced gradient to a table; returns tensors and their scalars after it."""
        parts: list[TableStep] = []
        tensors: list[list[int]] = []
        for member in self._tables[index].members:
            stop = member.at + member.height
            step, scalars = self._counts[member.tensor] + 1, given.scalars(member.tensor)
            present = bool(given.weights(member.tensor))
            if not present:
                continue  # it has no rows
            if parts and parts[-1][1:] == (member.at, step, scalars):
                parts[-1] = parts[-1]._replace(stop=stop)
                tensors[-1].append(member.tensor)
            else:
                parts.append(TableStep(member.at, stop, step, scalars))
                tensors.append([member.tensor])
        after = self._lookups[index].step(hyper, parts, scale)
        return [(each, scalars) for each, scalars in zip(tensors, after, strict=True) if scalars]

    def _copy_buffers(
        self, commits: Sequence[Commit], publisher: Publisher | None, arrivals: Arrivals | None
    ) -> None:
        # Slice 0 decides: a commit of another slice alone leaves the buffers as they are.
        for index in self._copied if any(commits[0].present) else ():
            if arrivals:
                arrivals.wait(index)
            cell, tile = self.share.cells[index], self._tiles[index]
            source = self.memory.contributions[0].slot
            floating = "float" in cell.dtype
            if cell.kind == "average" and floating and len(commits) > 1:
                equal = [(i, 1.0 / len(commits)) for i in range(len(commits))]
                tile.reduce(equal, 0, cell.stop - cell.start, True)
                source = source if self.memory.kept is None else self.memory.kept
            self._take(source, cell.start, cell.stop, publisher)

    def _publish(self, step: Step) -> None:
        """Copies slot 0 into the parameters of the present tensors; nothing else is touched."""
        source = self.memory.contributions[0].slot
        if step.head.flags & WRITTEN:
            if self.memory.written is None:
                raise ValueError(
                    "a commit is of written parameters, for which this server has no memory: use "
                    "the same version of tensorwire in all processes"
                )
            source = self.memory.written

        def work(index: int) -> Sequence[float]:
            present = step.head.present
            runs = self.share.cells[index].runs(lambda piece: present[piece.tensor] != ABSENT)
            for start, stop, is_present in runs:
                if is_present:
                    self._take(source, start, stop, step.publisher)
            return ()

        self._map(work, step.arrivals, range(len(self.share.cells)))
        if self.memory.device is not None:
            self._fill_device(self.memory.device)

    def _fill_device(self, device: ShareDevice) -> None:
        """Copies the present values to the device."""
        for bundle, _ in self._bundles.values():
            part = slice(bundle.start - self.share.start, bundle.stop - self.share.start)
            device.copy(self.memory.on_device[part], self.memory.master[part])
        device.synchronize()

    def _take(self, source: Bytes, start: int, stop: int, publisher: Publisher | None) -> None:
        """Takes bytes [start, stop) of the store from memory with the bytes of the share."""
        piece = slice(start - self.share.start, stop - self.share.start)
        self.memory.master[piece] = source[piece]
        if publisher:
            publisher(start, stop)

    def advance(
        self,
        commits: Sequence[Commit],
        exchange: Exchange,
        publisher: Publisher | None = None,
        arrivals: Arrivals | None = None,
    ) -> tuple[bool, float]:
        """Makes the version that the slices' commits ask for.

        Args:
            commits: one per slice, agreed.
            exchange: see `Exchange`.
            publisher: is told of new values; None: there is none.
            arrivals: what is still on its way; None: nothing.

        Returns:
            Whether the gradient was finite, and its norm; True and nan if no commit asks for them.
        """
        journal = self._journal
        if self._kernel.changes_kept and not commits[0].flags & REDUCED:
            journal = None  # it is reduced anew, all of it
        contribute = partial(self._contributions, commits)
        step = Step(commits, exchange, publisher, arrivals, contribute, journal)
        if step.reduced and self.memory.device is not None:
            self._keep_on_device()
            if arrivals:  # what was edited may still be on its way
                for index in self._trained:
                    arrivals.wait(index)
            self._copy_kept(self.memory.device, to_host=False)
        memory, version = self.memory, step.head.version
        if journal and (norm := journal.norm(version)) is not None:
            step.take_noted(norm)
        if step.publishes:
            self._publish(step)
            failpoint("version.copied")
        if self._journal is not None and step.trains:
            numbers = Numbers(memory.counts, memory.averaged, memory.scalars)
            self._journal.save_numbers(version, numbers)
            failpoint("numbers.saved")
            self._journal.begin(version)
            failpoint("version.begun")
        if step.reduces:
            self._keep_reduced(step)
            failpoint("version.reduced")
        if step.looks:
            step.take_norm()
        if step.looks and journal and self._kernel.changes_kept:
            journal.note_norm(version, step.norm)
            failpoint("norm.noted")
        if step.applies:
            self._make_cells(step)
            self._count(step)
            failpoint("version.counted")
        return step.finite, step.norm

    def _map(
        self,
        work: Callable[[int], Sequence[float]],
        arrivals: Arrivals | None,
        cells: Sequence[int] | None = None,
    ) -> list[float]:
        """Runs `work` for each cell on all threads; returns the results in the cells' order.

        Without `cells`, for each bundle of cells and each table.
        """
        bundled = cells is None and len(self._bundles) < len(self._trained)
        cells = self._worked_on if cells is None else cells
        indices = cells if arrivals is None else arrivals.order(cells)
        # Each thread takes the next cell: a thread whose core is busy then delays no other.
        left = deque(indices)

        def work_on() -> dict[int, Sequence[float]]:
            found = {}
            while left:
                try:
                    index = left.popleft()
                except IndexError:
                    break
                if arrivals:
                    for each in self._bundles[index][1] if bundled else (index,):
                        arrivals.wait(each)
                found[index] = work(index)
            return found

        helpers = []
        if self._pool:
            helpers = [self._pool.submit(work_on) for _ in range(self.threads - 1)]
        try:
            results = work_on()
        finally:
            left.clear()  # after an error no thread begins another cell
            wait(helpers)
        for helper in helpers:
            results |= helper.result()
        return [each for index in cells for each in results[index]]
