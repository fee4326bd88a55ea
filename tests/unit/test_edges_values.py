"""Values from another machine's memory: blocks and heads of any bytes."""

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorwire.edges.route import Route
from tensorwire.edges.values import check, check_shape, read_block, size_bytes, write_block
from tensorwire.placement import BLOCK_BYTES, Graph, Operator, Plan, Slot, Tensor, UpTo, plan

TENSORS = [
    Tensor("bounded", "int16", (UpTo(100), 2)),
    Tensor("unbounded", "float64", (None, 3, None)),
    Tensor("empty", "int8", (None, 0)),
]
slots = st.sampled_from([Slot(tensor, "unbounded", 0, BLOCK_BYTES) for tensor in TENSORS])
sizes = st.one_of(st.integers(0, 120), st.integers(0, (1 << 64) - 1))


@given(slots, st.binary(min_size=BLOCK_BYTES, max_size=BLOCK_BYTES))
def test_any_bytes_are_no_block(slot: Slot, block: bytes) -> None:
    with pytest.raises(ValueError, match="and the plan says"):
        read_block(slot, block)


@given(slots, sizes, sizes, sizes, st.lists(sizes, min_size=16, max_size=16))
def test_a_block_that_is_taken_makes_sense(
    slot: Slot, rank: int, size: int, memory: int, dims: list[int]
) -> None:
    block = struct.pack("<8s19Q", b"TWBLOCK1", rank, size, memory, *dims).ljust(BLOCK_BYTES)
    try:
        shape, number = read_block(slot, block)
    except ValueError:
        return
    check_shape(slot.tensor, shape)
    assert (size_bytes(slot.tensor, shape), number) == (size, memory)


@given(slots, st.lists(st.integers(0, 100), max_size=3), st.integers(0, (1 << 64) - 1))
def test_blocks_round_trip(slot: Slot, shape: list[int], memory: int) -> None:
    found = tuple(shape)
    if slot.tensor.takes(found):
        block = write_block(slot.tensor, found, memory).tobytes()
        assert len(block) == BLOCK_BYTES
        assert read_block(slot, block) == (found, memory)


def a_plan(dtype: str) -> Plan:
    make, use = Operator("make", "a", (), ("x",), 0), Operator("use", "b", ("x",), (), 1)
    return plan(Graph((Tensor("x", dtype, (4,)),), (make, use)))


@given(st.binary(min_size=48, max_size=64))
def test_any_bytes_are_no_head(head: bytes) -> None:
    assert Route(a_plan("int8"), "a", "b", 2, "").difference(head)


def test_heads() -> None:
    route = Route(a_plan("int8"), "a", "b", 2, "")
    assert route.difference(route.head) == ""
    assert route.difference(Route(a_plan("int8"), "a", "b", 3, "").head) == "flights=3, here 2"
    assert route.difference(Route(a_plan("int16"), "a", "b", 2, "").head) == "another plan"


@pytest.mark.parametrize(
    ("array", "error", "advice"),
    [
        (np.ma.array(np.zeros(4, "int16"), mask=[0, 1, 0, 0]), TypeError, "mask"),
        (np.zeros(4, ">i2"), ValueError, "planned as int16"),
        (np.zeros(4, "V2"), ValueError, "planned as int16"),
        (np.zeros(8, "int16")[::2], ValueError, "contiguous"),
        (np.zeros(4, object), ValueError, "planned as int16"),
    ],
)
def test_arrays_that_are_no_run(array: object, error: type[Exception], advice: str) -> None:
    """An array that would arrive as something else is refused where it is put."""
    with pytest.raises(error, match=advice):
        check(Tensor("x", "int16", (4,)), array)
