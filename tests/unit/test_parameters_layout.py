"""The layout of a store: every byte in one cell, every cell at one server, the same everywhere."""

import json
import math
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tensorwire.parameters.layout import (
    ALIGN_BYTES,
    KINDS,
    Layout,
    Selection,
    Spec,
    TensorSpec,
    checked_wants,
    padded,
)

DTYPES = ["float64", "float32", "bfloat16", "float16", "int64", "int32", "int8", "bool"]


@st.composite
def specs(draw: st.DrawFn) -> Spec:
    groups = draw(st.integers(1, 3))
    parts = st.tuples(
        st.sampled_from(DTYPES),
        st.lists(st.integers(0, 40), max_size=3).map(tuple),
        st.sampled_from(KINDS),
        st.integers(0, groups - 1),
    )
    tensors = draw(st.lists(parts, max_size=12))
    sides = st.tuples(st.integers(1, 70), st.integers(1, 20))  # of tables
    tensors = [
        (dtype, draw(sides) if kind == "rows" else shape, kind, group)
        for dtype, shape, kind, group in tensors
    ]
    named = tuple(TensorSpec(f"t{i}", *each) for i, each in enumerate(tensors))
    return Spec("torch.optim.SGD:", ("lr", "momentum"), groups, draw(st.integers(1, 4)), named)


cell_sizes = st.sampled_from([64, 128, 192, 4096, 256 << 10])


def most(spec: Spec, tensor: int, cell_bytes: int) -> int:
    """A table's cell has whole rows, however long they are; what must not be cut is one cell."""
    found = spec.tensors[tensor]
    if found.kind == "whole":
        return max(cell_bytes, padded(found.size_bytes))
    is_table = found.kind == "rows"
    return max(cell_bytes, math.lcm(found.row_bytes, ALIGN_BYTES)) if is_table else cell_bytes


@given(specs(), cell_sizes)
def test_places_do_not_overlap_and_cells_cover_everything(spec: Spec, cell_bytes: int) -> None:
    layout = Layout(spec, cell_bytes)
    end = 0
    for place in sorted(layout.places, key=lambda place: (place.start, place.stop)):
        assert place.start == end
        assert place.start % ALIGN_BYTES == 0
        assert place.start <= place.end <= place.stop
        end = place.stop
    assert layout.size_bytes == max(end, ALIGN_BYTES)
    for tensor, place in zip(spec.tensors, layout.places, strict=True):
        assert place.end - place.start == tensor.size_bytes
    at = 0
    for index, cell in enumerate(layout.cells):
        assert (cell.index, cell.start) == (index, at)
        assert 0 < cell.stop - cell.start <= most(spec, cell.pieces[0].tensor, cell_bytes)
        inside = cell.start
        for piece in cell.pieces:
            assert piece.start == inside < piece.stop
            inside = piece.stop
            tensor, place = spec.tensors[piece.tensor], layout.places[piece.tensor]
            assert place.start <= piece.start < piece.stop <= place.stop
            assert (tensor.kind, tensor.group, tensor.dtype) == (cell.kind, cell.group, cell.dtype)
        assert inside == cell.stop
        assert cell.kind != "whole" or len(cell.pieces) == 1
        at = cell.stop
    assert at == end


@given(specs(), cell_sizes, st.integers(1, 7))
def test_shares_cover_all_cells(spec: Spec, cell_bytes: int, servers: int) -> None:
    layout = Layout(spec, cell_bytes)
    shares = layout.deal(servers)
    assert len(shares) == servers
    assert [cell for share in shares for cell in share.cells] == list(layout.cells)
    for place in layout.places:
        parts = [share.clip(place.start, place.end) for share in shares]
        assert sum(max(stop - start, 0) for start, stop in parts) == place.end - place.start
    # Equal but for a cell.
    largest = max((most(spec, i, cell_bytes) for i in range(len(spec.tensors))), default=0)
    assert max(s.size_bytes for s in shares) <= layout.size_bytes / servers + 2 * largest
    # The grid does not depend on the number of servers.
    assert Layout(spec, cell_bytes).cells == layout.cells


@pytest.mark.parametrize("servers", [1, 2, 3, 4])
@pytest.mark.parametrize("elements", [(65_536,) * 96, (300, 36_864, 96, 147_456) * 24])
def test_each_part_of_backward_has_gradients_for_each_server(
    servers: int, elements: tuple[int, ...]
) -> None:
    """Named for a bug: backward filled the link of one server after the other."""
    tensors = tuple(TensorSpec(f"t{i}", "float32", (n,)) for i, n in enumerate(elements))
    layout = Layout(Spec("torch.optim.SGD:", (), 1, 1, tensors))
    shares = layout.deal(servers)
    for quarter in range(4):
        made = range(quarter * len(elements) // 4, (quarter + 1) * len(elements) // 4)
        clipped = [
            [share.clip(layout.places[i].start, layout.places[i].stop) for i in made]
            for share in shares
        ]
        found = [sum(max(stop - start, 0) for start, stop in each) for each in clipped]
        assert min(found) >= 0.5 * sum(found) / servers
        assert max(found) <= 1.5 * sum(found) / servers


def test_gradients_of_a_block_come_one_behind_the_other() -> None:
    tensors = tuple(TensorSpec(f"t{i}", "float32", (20_000,)) for i in range(64))
    cells = Layout(Spec("torch.optim.SGD:", (), 1, 1, tensors)).cells
    blocks: dict[int, set[int]] = {}
    for cell in cells:
        blocks.setdefault(cell.block, set()).update(piece.tensor for piece in cell.pieces)
    assert len(blocks) == 16
    for found in blocks.values():
        assert max(found) - min(found) == len(found) - 1
    assert sum(map(len, blocks.values())) == len(tensors)


@given(specs(), st.data(), st.integers(1, 3))
@pytest.mark.slow
def test_a_selection_has_its_tensors_once(spec: Spec, data: st.DataObject, servers: int) -> None:
    """Packed in the order of the layout, whatever range of it is asked for."""
    layout = Layout(spec)
    tensors = data.draw(st.sets(st.sampled_from(range(len(spec.tensors))))) if spec.tensors else []
    selection = Selection(layout, tensors)
    source = [byte % 251 for byte in range(layout.size_bytes)]
    target = [-1] * selection.size_bytes
    bounds = [0, *(share.stop for share in layout.deal(servers) if share.cells), layout.size_bytes]
    for first, last in pairwise(bounds):
        for start, stop, at in selection.of(first, last):
            assert first <= start < stop <= last
            assert set(target[at : at + stop - start]) == {-1}
            target[at : at + stop - start] = source[start:stop]
    size = 0
    for index in tensors:
        place = layout.places[index]
        size += place.stop - place.start
        assert target[selection.place(index)] == source[place.start : place.end]
    assert selection.size_bytes == max(size, ALIGN_BYTES)
    assert target.count(-1) == selection.size_bytes - size


@given(specs())
def test_a_selection_of_all_is_the_layout(spec: Spec) -> None:
    layout = Layout(spec)
    selection = Selection(layout)
    assert selection.size_bytes == layout.size_bytes
    for index, place in enumerate(layout.places):
        assert selection.place(index) == slice(place.start, place.end)


def test_what_is_wanted_is_checked() -> None:
    spec = Spec("x", ("lr",), 1, 1, tuple(TensorSpec(f"t{i}", "float32", ()) for i in range(3)))
    assert checked_wants(None, spec) is None
    assert checked_wants([2, 0], spec) == [2, 0]
    for wrong in ([3], [-1], [True], ["0"], [0.0], 7, {}, [0, 0], [[0]]):
        with pytest.raises(ValueError, match="wanted"):
            checked_wants(wrong, spec)


@given(specs())
def test_specs_travel(spec: Spec) -> None:
    again = Spec.from_json(spec.to_json())
    assert again == spec
    assert again.difference(spec) is None
    assert Layout(again).places == Layout(spec).places


@given(specs(), specs())
@pytest.mark.slow
def test_difference_tells_whether_two_are_equal(one: Spec, other: Spec) -> None:
    assert (one.difference(other) is None) == (one == other)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)
GOOD = Spec("x", ("lr",), 1, 1, (TensorSpec("a", "float32", (2, 3)),))


@given(st.binary(max_size=60))
def test_bytes_that_are_no_spec(data: bytes) -> None:
    with pytest.raises(ValueError, match="description of a model and optimizer cannot be read"):
        Spec.from_json(data)


def paths(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [at]
    items = value.items() if isinstance(value, dict) else ()
    items = enumerate(value) if isinstance(value, list) else items
    for key, inner in items:
        found += paths(inner, (*at, key))
    return found


@given(st.sampled_from(paths(json.loads(GOOD.to_json()))), values)
@example(("groups",), float("inf"))
@example(("tensors", 0, "shape"), [float("inf")])
@example(("tensors", 0, "group"), float("inf"))
def test_a_hostile_spec_is_an_error_or_usable(path: tuple[Any, ...], value: Any) -> None:
    """One part of a good one is replaced by anything. It found an optimizer that is no text."""
    raw = json.loads(GOOD.to_json())
    if not path:
        raw = value
    else:
        target = raw
        for key in path[:-1]:
            target = target[key]
        target[path[-1]] = value
    try:
        spec = Spec.from_json(json.dumps(raw).encode())
    except ValueError:
        return
    assert isinstance(spec.optimizer, str)
    assert spec.to_json()
    if spec.tensors and spec.tensors[0].elements < 1 << 20:
        Layout(spec)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 1}, "use the same version"),
        ({"slices": 0}, "slices"),
        ({"pipeline": 0}, "workers per slice"),
        ({"groups": 1 << 20}, "groups"),
        ({"extra": 1}, "extra"),
        ({"tensors": [{"name": "a"}]}, "dtype"),
        ({"optimizer": 3}, "optimizer"),
    ],
)
def test_bad_fields(change: dict[str, Any], message: str) -> None:
    raw = {**json.loads(GOOD.to_json()), **change}
    with pytest.raises(ValueError, match=message):
        Spec.from_json(json.dumps(raw).encode())


def test_bad_cells() -> None:
    for size in (0, -64, 100):
        with pytest.raises(ValueError, match="multiple"):
            Layout(GOOD, size)


def test_twice_the_same_name() -> None:
    tensor = TensorSpec("a", "float32", (1,))
    with pytest.raises(ValueError, match="two tensors"):
        Spec("x", (), 1, 1, (tensor, tensor)).check()


@pytest.mark.parametrize(
    ("elements", "cell_bytes"),
    [(1, 128 << 10), (250_000, 128 << 10), (1 << 20, 512 << 10), (3 << 20, 1 << 20)],
)
def test_small_stores_have_small_cells(elements: int, cell_bytes: int) -> None:
    """Named for a bug: of a model below 1 MiB one server had everything, and others nothing."""
    layout = Layout(
        Spec("torch.optim.SGD:", (), 1, 1, (TensorSpec("a", "float32", (elements,), "trained"),))
    )
    assert layout.cell_bytes == cell_bytes
    shares = layout.deal(4)
    if elements >= 250_000:
        sizes = [share.size_bytes for share in shares]
        assert max(sizes) - min(sizes) <= cell_bytes
        assert min(sizes) > 0
