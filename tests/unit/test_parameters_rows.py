"""Gradients of tables: what goes to which server, what comes back, and what is not believed."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorwire.parameters.contributions import Contribution
from tensorwire.parameters.kernel import Lookup
from tensorwire.parameters.layout import CELL_BYTES, Layout, Share, Spec, TensorSpec
from tensorwire.parameters.messages import APPLY, PUSHED, REDUCE, WANT_NORM, Bytes, Commit
from tensorwire.parameters.regions import units_of
from tensorwire.parameters.rows import (
    Gradient,
    Table,
    change,
    changed_starts,
    heads_bytes,
    part_of,
    read_part,
    tables_of,
    take_change,
)
from tensorwire.parameters.shard import Shard, ShardMemory

SGD = "torch.optim.SGD:"


def layout(*shapes: tuple[int, int]) -> Layout:
    tensors = [TensorSpec(f"t{i}", "float32", shape, "rows") for i, shape in enumerate(shapes)]
    dense = TensorSpec("dense", "float32", (70,))
    return Layout(Spec(SGD, ("lr",), 1, 1, (dense, *tensors)), 192)


widths = st.one_of(st.integers(1, 20), st.sampled_from([16, 32]))
shapes = st.lists(st.tuples(st.integers(1, 90), widths), min_size=1, max_size=5)


@given(shapes, st.integers(1, 4))
def test_every_row_is_at_one_server(shapes: list[tuple[int, int]], servers: int) -> None:
    made = layout(*shapes)
    seen: dict[int, list[int]] = {i: [] for i in range(1, len(shapes) + 1)}
    for share in made.deal(servers):
        heads = 0
        for table in tables_of(share):
            at = 0
            for member in table.members:
                seen[member.tensor] += range(member.first, member.first + member.height)
                place = made.places[member.tensor]
                row = share.start + table.start + member.at * table.row_bytes
                assert row == place.start + member.first * table.row_bytes
                assert member.at == at
                at += member.height
            assert at == table.height
            assert table.stop <= share.size_bytes
            assert table.head == heads
            heads += -(-table.head_bytes // 64) * 64
            for index in table.cells:
                assert {p.tensor for p in share.cells[index].pieces} <= set(table.tensors)
                begin = share.cells[index].start - share.start - table.start
                assert begin % table.row_bytes == 0
        assert heads == heads_bytes(share)
        units = units_of(share)
        for table in tables_of(share):
            assert sum(table.cells == unit for unit in units) == 1
    assert seen == {i: list(range(n)) for i, (n, _) in enumerate(shapes, 1)}


def write(table: Table, gradients: dict[int, Gradient], heads: Bytes, slot: Bytes) -> None:
    head, values = part_of(table, gradients)
    heads[table.head : table.head + head.nbytes] = head.view(np.uint8)
    at = table.start
    for each in values:
        slot[at : at + each.nbytes] = each
        at += each.nbytes


@given(shapes, st.integers(1, 4), st.data())
def test_a_gradient_comes_apart_and_together(
    shapes: list[tuple[int, int]], servers: int, data: st.DataObject
) -> None:
    made = layout(*shapes)
    gradients, wanted = {}, {}
    for tensor, (height, width) in enumerate(shapes, 1):
        if data.draw(st.booleans()):
            continue  # this one has no gradient
        rows = np.array(sorted(data.draw(st.sets(st.integers(0, height - 1)))), np.int64)
        values = tensor + np.arange(len(rows) * width, dtype=np.float32) / 1024
        gradients[tensor] = rows, values.view(np.uint8)
        wanted.update(
            {
                (tensor, int(row)): values[i * width :][:width].tobytes()
                for i, row in enumerate(rows)
            }
        )
    found = {}
    for share in made.deal(servers):
        heads = np.full(heads_bytes(share), 255, np.uint8)
        slot = np.zeros(share.size_bytes, np.uint8)
        for table in tables_of(share):
            write(table, gradients, heads, slot)
        for table in tables_of(share):
            part, there = read_part(table, heads, slot)
            for i, row in enumerate(part.tolist()):
                member = [m for m in table.members if m.at <= row][-1]
                name = member.tensor, row - member.at + member.first
                found[name] = there[i * table.row_bytes :][: table.row_bytes].tobytes()
    assert found == wanted


@given(shapes, st.integers(1, 3), st.data())
def test_changes_arrive_and_nothing_else(
    shapes: list[tuple[int, int]], servers: int, data: st.DataObject
) -> None:
    shares = layout(*shapes).deal(servers)
    starts = changed_starts(shares)
    memory = np.zeros(starts[-1], np.uint8)
    parts = [(s, table) for s, share in enumerate(shares) for table in tables_of(share)]
    views = [np.zeros(table.height * table.row_bytes, np.uint8) for _, table in parts]
    wanted = [view.copy() for view in views]
    for number, (server, table) in enumerate(parts):
        count = data.draw(st.integers(0, table.capacity))
        rows = np.sort(np.random.default_rng(number).permutation(table.height)[:count])
        here = memory[starts[server] : starts[server + 1]]
        head = change(7, rows.astype(np.int64)).view(np.uint8)
        values = np.full(count * table.row_bytes, 1 + number, np.uint8)
        here[table.changed : table.changed + head.nbytes] = head
        here[table.values_at : table.values_at + values.nbytes] = values
        for row in rows:
            wanted[number][row * table.row_bytes : (row + 1) * table.row_bytes] = 1 + number
    for version in (6, 7):  # what belongs to another version is not looked at
        assert not any(view.any() for view in views)
        for (server, table), view in zip(parts, views, strict=True):
            take_change(table, version, memory[starts[server] :], view)
    assert all(np.array_equal(a, b) for a, b in zip(views, wanted, strict=True))


def one() -> tuple[Share, Table, Bytes, Bytes]:
    (share,) = layout((40, 3)).deal(1)
    (table,) = tables_of(share)
    return share, table, np.zeros(heads_bytes(share), np.uint8), np.zeros(4096, np.uint8)


@pytest.mark.parametrize(
    "numbers",
    [
        [-1],
        [41],
        [1 << 62],
        [5, 0, (1 << 63) - 1, -(1 << 63), -1, 5],
        [2, 3, 3],
        [2, 3, 1],
        [1, -1],
        [1, 40],
        [3, 0, 39, 40],
        [2, -1, 4],
    ],
    ids=str,
)
def test_a_lying_worker_is_found_out(numbers: list[int]) -> None:
    _, table, heads, slot = one()
    heads[: 8 * len(numbers)] = np.array(numbers, np.int64).view(np.uint8)
    with pytest.raises(ValueError, match=r"a gradient has .* rows|rows of a gradient are not"):
        read_part(table, heads, slot)


@pytest.mark.parametrize("numbers", [[3, -1], [3, 11], [3, 1, 40], [3, 2, 0, -1]], ids=str)
def test_a_lying_server_is_found_out(numbers: list[int]) -> None:
    _, table, _, memory = one()
    memory[: 8 * len(numbers)] = np.array(numbers, np.int64).view(np.uint8)
    with pytest.raises(ValueError, match="rows that are not its own"):
        take_change(table, 3, memory, np.zeros(480, np.uint8))


# ---- what a shard does with them


class Sum:
    """A `Lookup` that adds the mean to the rows."""

    def __init__(self, columns: int, master: Bytes) -> None:
        self._master = master.view(np.float32).reshape(-1, columns)

    def reduce(self, parts: Sequence[tuple[Any, Bytes, float]]) -> Any:
        self._total = np.zeros_like(self._master)
        for rows, values, weight in parts:
            gradient = values.view(np.float32).reshape(-1, self._master.shape[1])
            self._total[rows] += np.float32(weight) * gradient
        every = [rows for rows, _, _ in parts]
        self._rows = np.unique(np.concatenate(every)) if every else np.empty(0, np.int64)
        return self._rows

    def square_sums(self) -> Any:
        return (self._total[self._rows].astype(np.float64) ** 2).sum(1)

    def step(self, hyper: Any, parts: Any, scale: float) -> list[tuple[float, ...]]:
        self._master[self._rows] += np.float32(scale) * self._total[self._rows]
        return [() for _ in parts]


class Only:
    """An `Kernel` for tables."""

    hyper: tuple[str, ...] = ()
    states: tuple[str, ...] = ()
    scalars: tuple[str, ...] = ()
    changes_kept = False

    def bind_rows(self, table: TensorSpec, master: Bytes, states: Mapping[str, Bytes]) -> Lookup:
        return Sum(table.shape[1], master)

    def bind(self, *_: Any) -> Any:
        raise AssertionError("there is nothing else")


class Told:
    """A `Publisher`."""

    def __init__(self) -> None:
        self.found: list[tuple[int, list[int]]] = []

    def __call__(self, start: int, stop: int) -> None:
        raise AssertionError("only rows changed")

    def rows(self, table: Table, rows: Any) -> None:
        (member,) = table.members
        self.found.append((member.tensor, (rows + member.first).tolist()))


ROWS, WIDTH = 3000, 300  # some cells
Gradient = dict[int, float]  # a row's elements, all alike


def train(servers: int, slices: list[Gradient], operation: int, max_norm: float) -> Any:
    """The table, and what every shard was told, or the sums of squares of all shards."""
    tensor = TensorSpec("t", "float32", (ROWS, WIDTH), "rows")
    made = Layout(Spec(SGD, (), 1, len(slices), (tensor,)))
    assert len(made.cells) > 3
    commit = Commit(2, operation, WANT_NORM, 1.0, max_norm, 1.0, ((),), bytes([PUSHED]))
    shards: list[Shard] = []
    sums: list[float] = []

    def note(mine: Any) -> list[float]:
        sums.extend(mine.tolist())
        return sums

    for share in made.deal(servers):
        size = share.size_bytes
        slots = [np.zeros(size, np.uint8) for _ in slices]
        heads = [np.zeros(heads_bytes(share), np.uint8) for _ in slices]
        for table in tables_of(share):
            for number, gradient in enumerate(slices):
                rows = np.array(sorted(gradient), np.int64)
                values = np.repeat([gradient[row] for row in rows], WIDTH).astype(np.float32)
                write(table, {0: (rows, values.view(np.uint8))}, heads[number], slots[number])
        contributions = [
            Contribution(slot, heads=head) for slot, head in zip(slots, heads, strict=True)
        ]
        memory = ShardMemory(np.zeros(size, np.uint8), contributions, counts=np.zeros(1, np.int64))
        shard = Shard(share, Only(), memory, threads=2)
        # Another version, which only takes the norm.
        only = replace(commit, operation=REDUCE)
        shard.advance([only] * len(slices), note)
        shards.append(shard)
    tolds = []
    for shard in shards:
        told = Told()
        shard.advance([commit] * len(slices), lambda _: sums, told)
        tolds += told.found
        shard.close()
    whole = b"".join(bytes(shard.memory.master) for shard in shards)
    table_now = np.frombuffer(whole[: ROWS * WIDTH * 4], np.float32).reshape(ROWS, WIDTH)
    return table_now, tolds, sums


GRADIENTS = [{0: 1.0, 5: 2.0, 1700: 3.0, 2999: 4.0}, {5: 4.0, 6: 2.0, 2999: -4.0}]


@pytest.mark.parametrize("servers", [1, 2, 3])
def test_rows_are_averaged_over_all_slices(servers: int) -> None:
    table, told, _ = train(servers, GRADIENTS, APPLY, math.inf)
    wanted = np.zeros((ROWS, WIDTH), np.float32)
    for row, value in {0: 0.5, 5: 3.0, 6: 1.0, 1700: 1.5}.items():
        wanted[row] = value
    assert np.array_equal(table, wanted)
    assert sorted(row for _, rows in told for row in rows) == [0, 5, 6, 1700, 2999]


def test_norms_do_not_depend_on_the_number_of_servers() -> None:
    random = np.random.default_rng(5)
    slices = [
        {int(row): float(random.normal()) for row in random.permutation(ROWS)[:500]}
        for _ in range(2)
    ]
    found = [train(servers, slices, APPLY, 3.0) for servers in (1, 2, 3)]
    mean = np.zeros(ROWS)
    for each in slices:
        for row, value in each.items():
            mean[row] += np.float32(value) * 0.5
    norms = [math.sqrt(math.fsum(sums)) for _, _, sums in found]
    assert norms[0] == norms[1] == norms[2]
    assert norms[0] == pytest.approx(math.sqrt(WIDTH * (mean**2).sum()), rel=1e-6)
    assert np.array_equal(found[0][0], found[1][0])
    assert np.array_equal(found[0][0], found[2][0])


def test_reduce_alone_changes_nothing() -> None:
    table, told, _ = train(1, GRADIENTS, REDUCE, math.inf)
    assert not table.any()
    assert not told


def test_what_is_wrong_is_named() -> None:
    (share,) = Layout(Spec(SGD, (), 1, 2, (TensorSpec("words", "float32", (9, 4), "rows"),))).deal(
        1
    )
    heads = [np.zeros(heads_bytes(share), np.uint8) for _ in range(2)]
    heads[1][:8] = np.array([10]).view(np.uint8)
    slots = [np.zeros(share.size_bytes, np.uint8) for _ in range(2)]
    contributions = [
        Contribution(slot, heads=head) for slot, head in zip(slots, heads, strict=True)
    ]
    memory = ShardMemory(np.zeros(share.size_bytes, np.uint8), contributions)
    commit = Commit(2, APPLY, 0, 1.0, math.inf, 1.0, ((),), bytes([PUSHED]))
    shard = Shard(share, Only(), memory)
    with pytest.raises(ValueError, match=r"slice 1, 'words': a gradient has 10 rows"):
        shard.advance([commit, commit], lambda sums: sums.tolist())


@pytest.mark.parametrize("shape", [(), (4,), (0, 3), (3, 0), (2, 2, 2)], ids=str)
def test_a_table_has_rows_and_columns(shape: tuple[int, ...]) -> None:
    spec = Spec(SGD, (), 1, 1, (TensorSpec("t", "float32", shape, "rows"),))
    with pytest.raises(ValueError, match="a table has two dimensions"):
        spec.check()


def test_rows_of_64_bytes_are_one_table() -> None:
    """However many tensors they are of; so a step of many of them is as quick as of one."""
    (share,) = layout((5, 16), (7, 16), (3, 17), (4, 16), (6, 17)).deal(1)
    assert sorted(table.tensors for table in tables_of(share)) == [(3,), (4, 2, 1), (5,)]


def test_long_rows_make_large_cells() -> None:
    made = Layout(Spec(SGD, (), 1, 1, (TensorSpec("t", "float32", (3, CELL_BYTES), "rows"),)))
    assert [cell.stop - cell.start for cell in made.cells] == [4 * CELL_BYTES] * 3
