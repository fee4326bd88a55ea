"""Commits and results survive the way through memory; what is none is an error."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorwire.parameters.messages import (
    APPLY,
    CHECK_FINITE,
    MESSAGE_BYTES,
    OPERATION_NAMES,
    RESULT_BYTES,
    Commit,
    Result,
    merged,
)

numbers = st.floats(allow_nan=False, allow_infinity=False)
positive = st.floats(min_value=1e-300, max_value=1e300)


@st.composite
def commits(draw: st.DrawFn) -> Commit:
    groups, names, tensors = (draw(st.integers(1, 4)) for _ in range(3))
    hyper = draw(st.lists(numbers, min_size=groups * names, max_size=groups * names))
    present = draw(st.lists(st.integers(0, 1), min_size=tensors, max_size=tensors))
    return Commit(
        draw(st.integers(1, 1 << 40)),
        draw(st.sampled_from(sorted(OPERATION_NAMES))),
        draw(st.integers(0, 7)),
        draw(positive),
        draw(positive | st.just(math.inf)),
        draw(positive),
        tuple(tuple(hyper[names * group : names * (group + 1)]) for group in range(groups)),
        bytes(present),
    )


@given(commits(), st.binary(max_size=20))
def test_commits_travel(commit: Commit, behind: bytes) -> None:
    shape = (len(commit.hyper), len(commit.hyper[0]), len(commit.present))
    data = commit.to_bytes()
    assert len(data) == Commit.size_bytes(*shape)
    memory = np.concatenate([data, np.frombuffer(behind, np.uint8)])
    again = Commit.from_bytes(memory, *shape)
    memory[:] = 0  # the writer goes on; the commit was copied
    assert again.to_bytes().tobytes() == data.tobytes()
    assert again.difference(commit) is None
    assert again.version == commit.version
    assert again.weight == commit.weight


@given(st.binary(min_size=200, max_size=200))
def test_bytes_are_a_commit_or_an_error(data: bytes) -> None:
    array = np.frombuffer(data, np.uint8)
    try:
        commit = Commit.from_bytes(array, 2, 3, 5)
    except ValueError:
        return
    assert commit.operation in OPERATION_NAMES
    assert 0 <= commit.weight < math.inf
    assert commit.max_norm > 0


@pytest.mark.parametrize(
    "change",
    [
        {"operation": 0},
        {"weight": -1.0},
        {"weight": math.nan},
        {"weight": math.inf},
        {"max_norm": 0.0},
        {"max_norm": math.nan},
    ],
)
def test_impossible_commits(change: dict[str, float]) -> None:
    fields = {"version": 1, "operation": APPLY, "flags": 0, "scale": 1.0}
    fields |= {"max_norm": math.inf, "weight": 1.0, **change}
    commit = Commit(**fields, hyper=((0.0,),), present=b"\1")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"."):
        Commit.from_bytes(commit.to_bytes(), 1, 1, 1)


@given(commits())
def test_difference_sees_what_must_agree(commit: Commit) -> None:
    fields = {name: getattr(commit, name) for name in Commit.__dataclass_fields__}
    assert commit.difference(Commit(**fields)) is None
    assert commit.difference(Commit(**{**fields, "weight": commit.weight / 2})) is None
    other_hyper = tuple(tuple(float(x == 0) for x in group) for group in commit.hyper)
    assert commit.difference(Commit(**{**fields, "hyper": other_hyper}))
    other = next(each for each in OPERATION_NAMES if each != commit.operation)
    assert commit.difference(Commit(**{**fields, "operation": other}))
    assert commit.difference(Commit(**{**fields, "flags": commit.flags ^ CHECK_FINITE}))


@given(
    st.builds(
        Result,
        st.integers(0, 1 << 40),
        st.booleans(),
        numbers,
        numbers,
        numbers,
        numbers,
        st.integers(0, 1 << 40),
        st.booleans(),
        st.text(),
    )
)
def test_results_travel(result: Result) -> None:
    data = result.to_bytes()
    memory = np.zeros(RESULT_BYTES, np.uint8)
    memory[: len(data)] = data
    assert Result.from_bytes(memory) == result


def test_a_long_message_is_cut() -> None:
    """Also in the middle of a character."""
    data = Result(1, failed=True, message="x" + "é" * RESULT_BYTES).to_bytes()
    assert len(data) <= RESULT_BYTES
    again = Result.from_bytes(data)
    assert again.message.startswith("xéé")
    assert len(again.message.encode()) <= MESSAGE_BYTES + 3


@given(st.binary(min_size=RESULT_BYTES, max_size=RESULT_BYTES))
def test_any_bytes_are_a_result(data: bytes) -> None:
    Result.from_bytes(np.frombuffer(data, np.uint8))


def commit(present: bytes, weight: float = 1.0) -> Commit:
    return Commit(2, APPLY, 0, 1.0, math.inf, weight, ((0.1,),), present)


def test_the_commits_of_a_pipeline_become_one() -> None:
    parts = [commit(bytes([1, 0, 0]), 8.0), commit(bytes([0, 2, 0]), 8.0)]
    parts += [commit(bytes([0, 0, 0]), 4.0), commit(bytes([1, 2, 1]), 4.0)]
    found = merged(parts, 2)
    assert [each.present for each in found] == [bytes([1, 2, 0]), bytes([1, 2, 1])]
    assert [each.weight for each in found] == [8.0, 4.0]
    assert merged(parts, 1) == parts


def test_commits_of_a_pipeline_that_contradict_each_other() -> None:
    with pytest.raises(ValueError, match="tensor 1 has gradients from two processes"):
        merged([commit(bytes([1, 1])), commit(bytes([0, 2]))], 2)
    with pytest.raises(ValueError, match=r"slice 1 of \[8.0, 1.0\] samples"):
        merged([commit(b"\0")] * 2 + [commit(b"\0", 8.0), commit(b"\0")], 2)
