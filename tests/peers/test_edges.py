"""Edges between two Nodes: every protocol, flow control, what is counted, what is refused."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from tensorwire import BusyError, ClosedError, PeerLostError, TimeoutError
from tensorwire.edges import Edges
from tensorwire.placement import BLOCK_BYTES, Graph, Operator, Plan, Tensor, UpTo, plan
from tensorwire.testing import Pair, node_pair

STATIC = Tensor("static", "float32", (3, 5))
OTHER = Tensor("other", "int64", (7,))
BOUNDED = Tensor("bounded", "int16", (UpTo(100), 2))
UNBOUNDED = Tensor("unbounded", "float64", (None, 3))
EMPTY = Tensor("empty", "float32", (0, 4))
BRAIN = Tensor("brain", "bfloat16", (6,))
ALL = (STATIC, OTHER, BOUNDED, UNBOUNDED, EMPTY, BRAIN)


def planned(*tensors: Tensor, **options: Any) -> Plan:
    """All are made on "a" at once and used on "b"."""
    names = tuple(t.name for t in tensors)
    make = Operator("make", "a", (), names, 0)
    use = Operator("use", "b", names, (), 1)
    return plan(Graph(tensors, (make, use)), **options)


@contextmanager
def connected(transport: str, made: Plan, **options: Any) -> Iterator[tuple[Edges, Edges, Pair]]:
    with node_pair([transport]) as pair:
        options = {"timeout_s": 10.0} | options
        with (
            Edges(pair.near, made, "a", {"b": pair.to_far}, **options) as a,
            Edges(pair.far, made, "b", {"a": pair.to_near}, **options) as b,
        ):
            yield a.open(), b.open(), pair


def value(tensor: Tensor, turn: int) -> Any:
    """Returns the value of turn `turn`; shapes differ from turn to turn where they may."""
    random = np.random.default_rng(turn)
    dtype = {"bfloat16": "uint16"}.get(tensor.dtype, tensor.dtype)
    varying = {BOUNDED: ((turn * 13) % 101, 2), UNBOUNDED: (turn * 100 % 700, 3)}
    shape = varying.get(tensor, tensor.shape)
    return random.integers(0, 100, shape).astype(dtype)  # type: ignore[arg-type]


def assert_same(found: Any, expected: Any) -> None:
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    assert np.array_equal(found, expected)


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("bucket_bytes", [0, 512 << 10], ids=["single", "shared"])
@pytest.mark.parametrize("in_place", [False, True], ids=["given", "placed"])
def test_every_protocol(transport: str, in_place: bool, bucket_bytes: int) -> None:
    made = planned(*ALL, bucket_bytes=bucket_bytes)
    with connected(transport, made) as (a, b, _):
        for turn in range(1, 12):
            for tensor in ALL:
                new = value(tensor, turn)
                if in_place:
                    a.place(tensor.name, new.shape)[...] = new
                    a.put(tensor.name)
                else:
                    a.put(tensor.name, new)
            for tensor in reversed(ALL):
                with b.get(tensor.name) as found:
                    assert_same(found, value(tensor, turn))
        sent = a.stats()
        assert sent["sent"] == b.stats()["received"] > 0
        varying = sent["sent_copied"]
        if transport == "shm":
            assert (sent["sent_in_place"], varying) == (
                (sent["sent"], 0) if in_place else (0, sent["sent"])
            )
            assert b.stats()["received_read"] == 0
        else:
            read = b.stats()["received_read"]
            assert read > 0  # values without a bound
            assert (sent["sent_in_place"], varying) == ((read, 0) if in_place else (0, read))


def test_in_place_means_that_no_bytes_move(transport: str) -> None:
    """By the core's own counter; what is left are blocks and words."""
    big = Tensor("big", "float32", (1 << 16,))
    with connected(transport, planned(big)) as (a, b, pair):
        a.place("big")[:] = 3
        before = pair.near.stats()["bytes_written"]
        a.put("big")
        with b.get("big") as found:
            assert (found == 3).all()
        moved = pair.near.stats()["bytes_written"] - before
        assert moved == (0 if transport == "shm" else 4 << 16)


def test_bounded_moves_what_there_is(transport: str) -> None:
    with connected(transport, planned(BOUNDED)) as (a, b, pair):
        before = pair.near.stats()["bytes_written"]
        a.put("bounded", np.ones((10, 2), np.int16))
        with b.get("bounded") as found:
            assert found.shape == (10, 2)
        assert pair.near.stats()["bytes_written"] - before == BLOCK_BYTES + 40


def test_a_bucket_is_one_transfer_and_one_signal(transport: str) -> None:
    with connected(transport, planned(STATIC, OTHER)) as (a, b, pair):
        before = pair.near.stats()
        a.put("static", value(STATIC, 1))
        assert pair.near.stats()["writes"] == before["writes"]  # the other is not ready
        a.put("other", value(OTHER, 1))
        with b.get("other"), b.get("static"):
            pass
        after = pair.near.stats()
        assert after["writes"] - before["writes"] == 1
        assert after["signals"] - before["signals"] == 1


def test_memory_is_used_again_when_all_of_the_bucket_is_released(transport: str) -> None:
    with connected(transport, planned(STATIC, OTHER), flights=1, timeout_s=0.3) as (a, b, _):
        a.put("other", value(OTHER, 1))
        a.put("static", value(STATIC, 1))
        first, second = b.get("static"), b.get("other")
        a.put("static", value(STATIC, 2))
        with pytest.raises(TimeoutError, match="has not released turn 1 of bucket 0"):
            a.put("other", value(OTHER, 2))
        first.release()
        first.release()  # counts once
        with pytest.raises(TimeoutError, match="machine 'b'"):
            a.put("other", value(OTHER, 2))
        assert_same(second.value, value(OTHER, 1))
        second.release()
        a.put("other", value(OTHER, 2))
        with b.get("static") as static, b.get("other") as other:
            assert_same(static, value(STATIC, 2))
            assert_same(other, value(OTHER, 2))
        a.settle()


def test_flights_let_the_sender_go_ahead(transport: str) -> None:
    with connected(transport, planned(STATIC, UNBOUNDED), flights=4) as (a, b, _):
        for turn in range(1, 5):
            a.put("static", value(STATIC, turn))
            a.put("unbounded", value(UNBOUNDED, turn))
        arrivals = [(b.get("static"), b.get("unbounded")) for _ in range(4)]
        for turn, (static, unbounded) in reversed(list(enumerate(arrivals, 1))):
            assert_same(static.value, value(STATIC, turn))
            assert_same(unbounded.value, value(UNBOUNDED, turn))
            static.release()
            unbounded.release()


def test_a_tensor_for_two_machines(transport: str) -> None:
    """Each has its own copy: what one does to it, the other does not see."""
    users = [Operator(f"use {m}", m, ("static",), (), 1) for m in "bc"]
    made = plan(Graph((STATIC,), (Operator("make", "a", (), ("static",), 0), *users)))
    with node_pair([transport]) as first, node_pair([transport]) as second:
        to_c = first.near.connect(second.near.address)
        to_a = second.near.accept(timeout_s=10)
        with (
            Edges(first.near, made, "a", {"b": first.to_far, "c": to_c}) as a,
            Edges(first.far, made, "b", {"a": first.to_near}) as b,
            Edges(second.near, made, "c", {"a": to_a}) as c,
        ):
            for edges in (a, b, c):
                edges.open()
            for turn in range(1, 5):
                a.place("static")[:] = value(STATIC, turn)
                a.put("static")
                with b.get("static") as found:
                    assert_same(found, value(STATIC, turn))
                    found[:] = -1
                with c.get("static") as found:
                    assert_same(found, value(STATIC, turn))


@pytest.mark.parametrize(
    ("act", "error", "message"),
    [
        (lambda a, b: a.put("static", np.ones((3, 5))), ValueError, "planned as float32"),
        (lambda a, b: a.put("static", np.ones((5, 3), "f4")), ValueError, r"shape \(5, 3\)"),
        (lambda a, b: a.put("static", np.ones((5, 3), "f4").T), ValueError, "not contiguous"),
        (lambda a, b: a.put("static", [1.0]), TypeError, "numpy array, not list"),
        (lambda a, b: a.put("bounded", np.ones((101, 2), "i2")), ValueError, "not possible"),
        (lambda a, b: a.put("static"), ValueError, "was not placed"),
        (lambda a, b: a.place("bounded"), ValueError, "place it with a shape"),
        (lambda a, b: a.place("bounded", (101, 2)), ValueError, r"shape \(101, 2\) is not"),
        (
            lambda a, b: (a.place("static"), a.place("static")),
            ValueError,
            "was placed before: call put",
        ),
        (
            lambda a, b: (a.place("static"), a.put("static", value(STATIC, 1))),
            ValueError,
            "put it without a value",
        ),
        (lambda a, b: a.put("nothing", 3), LookupError, "makes no tensor 'nothing'"),
        (lambda a, b: b.put("static", 3), LookupError, "machine 'b' makes no"),
        (lambda a, b: a.get("static"), LookupError, "gets no tensor"),
        (lambda a, b: b.get("static"), TimeoutError, "turn 1 of 'static' did not come from"),
        (lambda a, b: (a.close(), a.put("static", 3)), ClosedError, "edges of machine 'a'"),
        (lambda a, b: (b.close(), b.get("static")), ClosedError, "edges of machine 'b'"),
    ],
)
def test_misuse(
    transport: str, act: Callable[[Edges, Edges], Any], error: type[Exception], message: str
) -> None:
    with connected(transport, planned(*ALL), timeout_s=0.2) as (a, b, _):
        with pytest.raises(error, match=message):
            act(a, b)


def test_after_a_refusal_the_turn_can_be_put(transport: str) -> None:
    with connected(transport, planned(STATIC)) as (a, b, _):
        with pytest.raises(ValueError, match="planned as"):
            a.put("static", np.ones((5, 3), np.float32))
        a.put("static", value(STATIC, 1))
        with b.get("static") as found:
            assert_same(found, value(STATIC, 1))


def test_other_plans_and_flights_are_noticed(transport: str) -> None:
    with node_pair([transport]) as pair:
        for other, options, message in [
            (planned(STATIC, OTHER), {}, "another plan"),
            (planned(STATIC), {"flights": 3}, "flights=3, here 2"),
        ]:
            with Edges(pair.near, planned(STATIC), "a", {"b": pair.to_far}) as a:
                b = Edges(pair.far, other, "b", {"a": pair.to_near}, **options)  # type: ignore[arg-type]
                with pytest.raises(ValueError, match=message):
                    a.open()
                b.close()


def test_machines_that_do_not_fit(transport: str) -> None:
    made = planned(STATIC)
    with node_pair([transport]) as pair:
        with pytest.raises(ValueError, match="machine 'c'"):
            Edges(pair.near, made, "c", {})
        with pytest.raises(ValueError, match="needs the peer of machine 'b'"):
            Edges(pair.near, made, "a", {})
        with pytest.raises(ValueError, match="flights is 0; 1 or more"):
            Edges(pair.near, made, "a", {"b": pair.to_far}, flights=0)
        with Edges(pair.near, made, "a", {"b": pair.to_far}, timeout_s=0.2) as alone:
            with pytest.raises(TimeoutError, match="has not opened its edges"):
                alone.open()


def test_use_before_open(transport: str) -> None:
    with node_pair([transport]) as pair:
        with Edges(pair.near, planned(STATIC), "a", {"b": pair.to_far}) as a:
            with pytest.raises(ValueError, match=r"machine 'a' are used before open\(\)"):
                a.put("static", value(STATIC, 1))


@pytest.mark.parametrize("end", ["edges", "node"])
def test_release_after_the_source_has_ended(transport: str, end: str) -> None:
    with connected(transport, planned(STATIC)) as (a, b, pair):
        a.put("static", value(STATIC, 1))
        arrival = b.get("static")
        a.close()
        if end == "node":
            pair.near.close()
        arrival.release()


def test_two_plans_at_a_time(transport: str) -> None:
    made = planned(STATIC)
    with node_pair([transport]) as pair:
        sides = [
            (
                Edges(pair.near, made, "a", {"b": pair.to_far}, label=label),
                Edges(pair.far, made, "b", {"a": pair.to_near}, label=label),
            )
            for label in ("x", "y")
        ]
        for turn, (a, b) in enumerate(sides):
            a.open()
            b.open()
            a.put("static", value(STATIC, turn))
        for turn, (a, b) in enumerate(sides):
            with b.get("static") as found:
                assert_same(found, value(STATIC, turn))
            a.close()
            b.close()
            b.close()


@pytest.mark.parametrize(
    ("offset", "wrong"),
    [(0, 1), (8, 17), (16, 1 << 62), (24, 99), (32, 1 << 60), (48, 1)],
    ids=["magic", "rank", "bytes", "memory", "size", "more sizes"],
)
@pytest.mark.parametrize("tensor", [BOUNDED, UNBOUNDED], ids=lambda t: t.name)
def test_a_block_that_makes_no_sense(
    transport: str, tensor: Tensor, offset: int, wrong: int
) -> None:
    """A machine that lies reaches no memory that it should not."""
    if tensor is BOUNDED and offset == 24:
        return  # its values are behind the block
    with connected(transport, planned(tensor)) as (a, b, pair):
        a.put(tensor.name, value(tensor, 1))
        arena = 64 + 2 * 64
        remote = pair.to_far.region("edges//0-1")
        remote[arena + offset :].write(np.array([wrong], np.uint64)).wait(10)
        with pytest.raises(ValueError, match="sent what does not fit the plan"):
            b.get(tensor.name)
        a.close()


def test_too_large_for_the_receiver() -> None:
    with connected("tcp", planned(UNBOUNDED), most_bytes=1000) as (a, b, _):
        a.put("unbounded", np.ones((100, 3)))
        with pytest.raises(BusyError, match="has 2400 bytes, above most_bytes=1000"):
            b.get("unbounded")
        a.close()


def test_values_outlive_the_edges(transport: str) -> None:
    with connected(transport, planned(STATIC, UNBOUNDED)) as (a, b, _):
        a.put("static", value(STATIC, 1))
        a.put("unbounded", value(UNBOUNDED, 1))
        arrivals = [b.get("static"), b.get("unbounded")]
        found = [arrival.value for arrival in arrivals]
        for arrival in arrivals:
            arrival.release()
    assert_same(found[0], value(STATIC, 1))
    assert_same(found[1], value(UNBOUNDED, 1))


def test_a_peer_that_leaves(transport: str) -> None:
    made = planned(STATIC)
    with node_pair([transport]) as pair:
        a = Edges(pair.near, made, "a", {"b": pair.to_far}, timeout_s=20)
        b = Edges(pair.far, made, "b", {"a": pair.to_near}, timeout_s=20)
        a.open()
        b.open()
        a.put("static", value(STATIC, 1))
        a.put("static", value(STATIC, 2))
        with b.get("static"):  # what came before is still there
            pair.near.close()
        b.get("static").release()
        with pytest.raises(PeerLostError, match=r"machine 'a' was lost before turn 3 of 'static'"):
            b.get("static")
        b.close()
        a.close()


@pytest.mark.parametrize("seed", range(12))
def test_any_order_of_puts_gets_and_releases(transport: str, seed: int) -> None:
    """Both directions at a time; whatever is possible next happens, in a random order."""
    random = np.random.default_rng(seed)
    flights, turns = int(random.integers(1, 5)), 12
    back = [Tensor(f"{t.name} back", t.dtype, t.shape) for t in ALL]
    names, backs = tuple(t.name for t in ALL), tuple(t.name for t in back)
    graph = Graph(
        (*ALL, *back),
        (
            Operator("make", "a", (), names, 0),
            Operator("use", "b", names, backs, 1),
            Operator("end", "a", backs, (), 2),
        ),
    )
    made = plan(graph, bucket_bytes=int(random.choice([0, 300, 1 << 20])))
    with connected(transport, made, flights=flights) as (a, b, _):
        sides = {t.name: (t, a, b) for t in ALL}
        sides |= {f"{t.name} back": (t, b, a) for t in ALL}
        slots = {
            slot.tensor.name: [s.tensor.name for s in bucket.slots]
            for bucket in made.buckets
            for slot in bucket.slots
        }
        put, got = dict.fromkeys(sides, 0), dict.fromkeys(sides, 0)
        held: dict[str, dict[int, Any]] = {name: {} for name in sides}
        released: dict[str, set[int]] = {name: set() for name in sides}

        def can_put(name: str) -> bool:
            older = put[name] + 1 - flights
            done = older < 1 or all(older in released[each] for each in slots[name])
            return put[name] < turns and done

        def can_get(name: str) -> bool:
            return all(put[each] > got[name] for each in slots[name])

        while any(len(each) < turns for each in released.values()):
            able = [("put", n) for n in sides if can_put(n)]
            able += [("get", n) for n in sides if can_get(n)]
            able += [("release", n) for n in sides if held[n]]
            act, name = able[random.integers(len(able))]
            tensor, source, target = sides[name]
            if act == "put":
                put[name] += 1
                new = value(tensor, put[name])
                if random.integers(2):
                    source.place(name, new.shape)[...] = new
                    source.put(name)
                else:
                    source.put(name, new)
            elif act == "get":
                got[name] += 1
                held[name][got[name]] = target.get(name)
            else:
                turn = random.choice(list(held[name]))
                arrival = held[name].pop(turn)
                assert_same(arrival.value, value(tensor, turn))
                arrival.release()
                released[name].add(turn)
