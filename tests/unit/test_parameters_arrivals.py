"""Units of a share, and what a server waits for."""

import threading
import time
from itertools import pairwise

import numpy as np
import pytest

from tensorwire.parameters import Layout, Spec, TensorSpec
from tensorwire.parameters.regions import units_of
from tensorwire.parameters.server.stepping.arrivals import Announced, ArrivingUnits

SGD = "torch.optim.SGD"


def layout(*elements: int, kinds: tuple[str, ...] = ()) -> Layout:
    tensors = tuple(
        TensorSpec(f"t{i}", "float32", (count,), kinds[i] if kinds else "trained")
        for i, count in enumerate(elements)
    )
    return Layout(Spec(SGD, ("lr",), 1, 1, tensors))


@pytest.mark.parametrize("servers", [1, 2, 3])
@pytest.mark.parametrize("elements", [(1,), (10, 300_000, 7), (2_000_000,), (131_072,) * 9])
def test_units_cover_a_share_once(servers: int, elements: tuple[int, ...]) -> None:
    whole = layout(*elements)
    for share in whole.deal(servers):
        units = units_of(share)
        assert [index for unit in units for index in unit] == list(range(len(share.cells)))
        for unit in units:
            cells = [share.cells[index] for index in unit]
            assert len(cells) == 1 or cells[-1].stop - cells[0].start <= whole.cell_bytes
            assert len({cell.block for cell in cells}) == 1
        # As few as that allows.
        for one, other in pairwise(units):
            first, next_ = share.cells[one.start], share.cells[other.start]
            is_full = next_.stop - first.start > whole.cell_bytes
            assert is_full or first.block != next_.block


def test_a_share_without_cells_has_no_units() -> None:
    (empty,) = (share for share in layout(1).deal(2) if not share.cells)
    assert units_of(empty) == ()


class FakeWord:
    """A word that rises when it is waited for."""

    def __init__(self, value: int) -> None:
        self.value = value


def incoming(stamps: list[list[int]], words: list[list[int]]) -> tuple[ArrivingUnits, list[int]]:
    waited: list[int] = []

    def wait(word: FakeWord, stamp: int) -> None:
        time.sleep(0.01)
        waited.append(stamp)
        word.value = stamp

    announced = [
        Announced([FakeWord(v) for v in values], np.array(each, np.uint64), wait)
        for each, values in zip(stamps, words, strict=True)
    ]
    units = [range(0, 2), range(2, 3), range(3, 5)]
    return ArrivingUnits(units, announced), waited


def test_cells_are_taken_in_the_order_of_writing() -> None:
    made, _ = incoming([[9, 2, 5], [3, 4, 8]], [[0] * 3, [0] * 3])
    assert made.order(range(5)) == [2, 3, 4, 0, 1]
    assert made.order([4, 0]) == [4, 0]
    nothing, _ = incoming([], [])
    assert nothing.order([3, 1]) == [3, 1]


def test_only_what_is_missing_is_waited_for() -> None:
    made, waited = incoming([[9, 2, 5], [3, 4, 8]], [[9, 1, 7], [2, 4, 8]])
    for cell in (3, 4):
        made.wait(cell)
    assert waited == []
    assert made.waited_s == 0.0
    made.wait(2)
    made.wait(0)
    made.wait(1)
    assert waited == [2, 3]
    assert 0.02 <= made.waited_s < 1.0


def test_threads_may_wait_for_one_unit() -> None:
    made, waited = incoming([[1, 1, 1]], [[0, 0, 0]])
    threads = [threading.Thread(target=made.wait, args=(cell,)) for cell in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(waited) == {1}
