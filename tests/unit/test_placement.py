"""The planner: what it promises for every graph, and what it refuses from outside."""

import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorwire.placement import (
    ALIGN_BYTES,
    BLOCK_BYTES,
    DTYPES,
    Graph,
    Operator,
    Plan,
    Tensor,
    UpTo,
    plan,
)

MACHINES = ["a", "b", "c"]
sizes = st.one_of(st.integers(0, 40), st.integers(0, 40).map(UpTo), st.none())


@st.composite
def tensors(draw: st.DrawFn, name: str) -> Tensor:
    dtype = draw(st.sampled_from(sorted(DTYPES)))
    return Tensor(name, dtype, tuple(draw(st.lists(sizes, max_size=3))))


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    """Operators in any order of declaration; each uses what operators of lower order make."""
    made: list[Tensor] = []
    operators: list[Operator] = []
    order = 0
    for at in range(draw(st.integers(0, 10))):
        older = [t.name for t in made if _order(operators, t) < order]
        inputs = draw(st.lists(st.sampled_from(older), max_size=4)) if older else []
        outputs = [draw(tensors(f"t{at}.{i}")) for i in range(draw(st.integers(0, 3)))]
        names = tuple(t.name for t in outputs)
        machine = draw(st.sampled_from(MACHINES))
        operators.append(Operator(f"o{at}", machine, tuple(inputs), names, order))
        made += outputs
        order += draw(st.integers(0, 2))
    return Graph(tuple(draw(st.permutations(made))), tuple(draw(st.permutations(operators))))


def _order(operators: list[Operator], tensor: Tensor) -> int:
    return next(o.order for o in operators if tensor.name in o.outputs)


bucket_sizes = st.sampled_from([0, 64, 256, 1024, 512 << 10])
allocations = st.sampled_from([0, 100, 64 << 20])


@given(graphs(), bucket_sizes, allocations)
def test_every_crossing_has_one_place_and_none_overlap(
    graph: Graph, bucket_bytes: int, allocate_bytes: int
) -> None:
    made = plan(graph, bucket_bytes=bucket_bytes, allocate_bytes=allocate_bytes)
    crossings = {(c.tensor.name, c.source, c.target) for c in graph.crossings()}
    placed = [(s.tensor.name, b.source, b.target) for b in made.buckets for s in b.slots]
    assert sorted(placed) == sorted(crossings)
    for pair in made.pairs:
        end = 0
        for index, bucket in enumerate(made.between(*pair)):
            assert (bucket.index, bucket.offset) == (index, end)
            assert bucket.size_bytes <= bucket_bytes or len(bucket.slots) == 1
            inside = 0
            for slot in bucket.slots:
                assert slot.offset == inside
                assert slot.offset % ALIGN_BYTES == slot.size_bytes % ALIGN_BYTES == 0
                inside += slot.size_bytes
                assert made.place(slot.tensor.name, bucket.target) == (bucket, slot)
            assert inside == bucket.size_bytes
            end += inside
        assert made.arena_bytes(*pair) == end


@given(graphs(), allocations)
def test_protocols(graph: Graph, allocate_bytes: int) -> None:
    for bucket in plan(graph, allocate_bytes=allocate_bytes).buckets:
        for slot in bucket.slots:
            tensor, most = slot.tensor, slot.tensor.most_bytes
            if all(isinstance(size, int) for size in tensor.shape):
                expected, room = "static", most
            elif most is not None and most <= allocate_bytes:
                expected, room = "bounded", BLOCK_BYTES + most
            else:
                expected, room = "unbounded", BLOCK_BYTES
            assert slot.protocol == expected
            assert room is not None
            assert room <= slot.size_bytes < room + ALIGN_BYTES


@given(graphs(), bucket_sizes, st.randoms(use_true_random=False))
def test_machines_never_wait_for_each_other(
    graph: Graph, bucket_bytes: int, random: random.Random
) -> None:
    """Each machine runs its operators in order; a bucket leaves when all its tensors are made."""
    made = plan(graph, bucket_bytes=bucket_bytes)
    waiting = {
        machine: sorted(
            (o for o in graph.operators if o.machine == machine), key=lambda o: (o.order, o.name)
        )
        for machine in MACHINES
    }
    done: set[str] = set()

    def can_run(operator: Operator) -> bool:
        for name in operator.inputs:
            if graph.maker(name).machine == operator.machine:
                continue
            bucket, _ = made.place(name, operator.machine)
            if not all(slot.tensor.name in done for slot in bucket.slots):
                return False
        return True

    while any(waiting.values()):
        able = [machine for machine, left in waiting.items() if left and can_run(left[0])]
        assert able, "every machine waits for another"
        done.update(waiting[random.choice(able)].pop(0).outputs)


@given(graphs(), bucket_sizes, st.data())
def test_the_order_of_declaration_does_not_matter(
    graph: Graph, bucket_bytes: int, data: st.DataObject
) -> None:
    other = Graph(
        tuple(data.draw(st.permutations(graph.tensors))),
        tuple(
            replace(o, inputs=tuple(data.draw(st.permutations(o.inputs))))
            for o in data.draw(st.permutations(graph.operators))
        ),
    )
    first, second = (plan(g, bucket_bytes=bucket_bytes) for g in (graph, other))
    assert first == second
    assert first.digest == second.digest


@given(graphs(), bucket_sizes, st.integers(1, 5), st.data())
def test_what_does_not_cross_does_not_matter(
    graph: Graph, bucket_bytes: int, scale: int, data: st.DataObject
) -> None:
    """Operators within a machine, other numbers for the same order, and unused tensors."""
    operators, made = [], list(graph.tensors)
    for o in graph.operators:
        operators.append(replace(o, order=o.order * 2 * scale))
        if o.outputs and data.draw(st.booleans()):
            local = Tensor(f"local {o.name}", "float32", (3, None))
            made.append(local)
            order = o.order * 2 * scale + 1
            operators.append(Operator(f"also {o.name}", o.machine, o.outputs, (local.name,), order))
    other = Graph(tuple(made), tuple(operators))
    assert plan(other, bucket_bytes=bucket_bytes) == plan(graph, bucket_bytes=bucket_bytes)


@given(graphs(), graphs(), bucket_sizes)
@pytest.mark.slow
def test_a_pair_does_not_depend_on_other_machines(
    graph: Graph, other: Graph, bucket_bytes: int
) -> None:
    """A second program on machines of its own, run at the same time."""
    tensors = tuple(replace(t, name=f"x.{t.name}") for t in other.tensors)
    operators = tuple(
        Operator(
            f"x.{o.name}",
            f"x.{o.machine}",
            tuple(f"x.{n}" for n in o.inputs),
            tuple(f"x.{n}" for n in o.outputs),
            o.order,
        )
        for o in other.operators
    )
    both = Graph(graph.tensors + tensors, graph.operators + operators)
    alone = plan(graph, bucket_bytes=bucket_bytes)
    together = plan(both, bucket_bytes=bucket_bytes)
    assert set(alone.pairs) <= set(together.pairs)
    for pair in alone.pairs:
        assert together.between(*pair) == alone.between(*pair)


@given(graphs(), graphs(), bucket_sizes)
@pytest.mark.slow
def test_digests_are_equal_if_the_plans_are(graph: Graph, other: Graph, bucket_bytes: int) -> None:
    first, second = (plan(each, bucket_bytes=bucket_bytes) for each in (graph, other))
    assert (first.digest == second.digest) == (first == second)


X, Y = Tensor("x", "float32", (4,)), Tensor("y", "float32", (4,))
MAKE = Operator("make", "a", (), ("x",), 0)


@pytest.mark.parametrize(
    ("tensors", "operators", "message"),
    [
        ((X, X), (MAKE,), "two tensors are called 'x'"),
        ((X,), (MAKE, MAKE), "two operators are called 'make'"),
        ((X, Y), (MAKE,), "no operator makes tensor 'y'"),
        ((X,), (MAKE, replace(MAKE, name="also")), "made by 'make' and 'also'"),
        ((X,), (replace(MAKE, inputs=("z",)),), "no tensor 'z'"),
        ((X,), (replace(MAKE, inputs=("x",)),), "which 'make' makes at 0"),
        ((X, Y), (MAKE, Operator("use", "b", ("x",), ("y",), 0)), "has order 0 and uses 'x'"),
    ],
)
def test_graphs_that_make_no_sense(tensors: Any, operators: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Graph(tensors, operators)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("", "float32", ()), "a tensor's name"),
        (("a\n", "float32", ()), "printable"),
        (("x", "float33", ()), "no dtype 'float33'"),
        (("x", "float32", (-1,)), "a size"),
        (("x", "float32", (True,)), "a size"),
        (("x", "float32", (UpTo(-1),)), "a size"),
        (("x", "float32", (1,) * 17), "at most 16"),
        (("x", "float32", (1 << 30, 1 << 30)), "2\\*\\*48"),
    ],
)
def test_tensors_that_make_no_sense(arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Tensor(*arguments)


def test_shapes_that_a_run_may_make() -> None:
    assert Tensor("x", "int8", (2, 3)).takes((2, 3))
    assert not Tensor("x", "int8", (2, 3)).takes((3, 2))
    assert not Tensor("x", "int8", (2, 3)).takes((2,))
    assert Tensor("x", "int8", (UpTo(4), None)).takes((0, 9))
    assert not Tensor("x", "int8", (UpTo(4), None)).takes((5, 9))


def chain(orders: dict[str, int], **used: int) -> Graph:
    """x and y are made on a, and used on b at the given orders."""
    return Graph(
        (X, Y),
        (
            Operator("make x", "a", (), ("x",), orders["x"]),
            Operator("make y", "a", (), ("y",), orders["y"]),
            Operator("use x", "b", ("x",), (), used["x"]),
            Operator("use y", "b", ("y",), (), used["y"]),
        ),
    )


def buckets(made: Plan) -> list[list[str]]:
    return [[slot.tensor.name for slot in bucket.slots] for bucket in made.buckets]


def test_tensors_share_a_bucket_if_nobody_waits_for_the_first() -> None:
    assert buckets(plan(chain({"x": 0, "y": 1}, x=2, y=3))) == [["x", "y"]]
    assert buckets(plan(chain({"x": 0, "y": 2}, x=1, y=3))) == [["x"], ["y"]]
    assert buckets(plan(chain({"x": 0, "y": 1}, x=2, y=3), bucket_bytes=64)) == [["x"], ["y"]]
    assert buckets(plan(chain({"x": 1, "y": 0}, x=2, y=3))) == [["y", "x"]]


def test_several_users_on_one_machine_are_one_crossing() -> None:
    use = [Operator(f"use {i}", "b", ("x", "x"), (), 3 - i) for i in range(3)]
    at_home = Operator("at home", "a", ("x",), (), 1)
    elsewhere = Operator("elsewhere", "c", ("x",), (), 9)
    found = Graph((X,), (MAKE, *use, at_home, elsewhere)).crossings()
    assert [(c.target, c.ready, c.needed) for c in found] == [("b", 0, 1), ("c", 0, 9)]


def test_table() -> None:
    bounded = Tensor("long", "int16", (UpTo(100), None, 2))
    use = Operator("use", "b", ("x", "long"), (), 5)
    graph = Graph((X, bounded), (replace(MAKE, outputs=("x", "long")), use))
    lines = str(plan(graph)).splitlines()
    assert lines[0].split() == ["bucket", "tensor", "what", "protocol", "offset", "bytes"]
    assert lines[1].split() == "a → b 0 long int16 (≤100, ?, 2) unbounded 0 192".split()
    assert lines[2].split() == "a → b 0 x float32 (4) static 192 64".split()
    assert str(plan(Graph((), ()))).split() == lines[0].split()
