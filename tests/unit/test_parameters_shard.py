"""Threads of a shard: cells are shared out as they come, and an error ends the work."""

import math
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tensorwire.parameters.contributions import Contribution
from tensorwire.parameters.layout import CELL_BYTES, Layout, Spec, TensorSpec
from tensorwire.parameters.messages import APPLY, PUSHED, Commit
from tensorwire.parameters.shard import Shard, ShardMemory

CELLS = 12


class Tile:
    def __init__(self, index: int, act: Callable[[int], None]) -> None:
        self._index, self._act = index, act

    def reduce(self, weights: Any, start: int, stop: int, keep: bool) -> None:
        self._act(self._index)

    def square_sum(self, start: int, stop: int) -> float:
        return 0.0

    def step(self, *_: Any) -> tuple[float, ...]:
        return ()


class Recorder:
    """An `Kernel` that only tells which cell is worked on."""

    hyper: tuple[str, ...] = ()
    states: tuple[str, ...] = ()
    scalars: tuple[str, ...] = ()
    changes_kept = False

    def __init__(self, act: Callable[[int], None]) -> None:
        self._act, self._bound = act, 0

    def bind(self, *_: Any) -> Tile:
        self._bound += 1
        return Tile(self._bound - 1, self._act)


def make(act: Callable[[int], None], threads: int) -> tuple[Shard, Commit]:
    tensor = TensorSpec("a", "float32", (CELLS * CELL_BYTES // 4,), "trained", 0)
    (share,) = Layout(Spec("x", (), 1, 1, (tensor,))).deal(1)
    assert len(share.cells) == CELLS
    data = [np.zeros(share.size_bytes, np.uint8) for _ in range(2)]
    memory = ShardMemory(data[0], [Contribution(data[1])], counts=np.zeros(1, np.int64))
    commit = Commit(2, APPLY, 0, 1.0, math.inf, 1.0, ((),), bytes([PUSHED]))
    return Shard(share, Recorder(act), memory, threads), commit


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_every_cell_is_worked_on_once(threads: int) -> None:
    seen: list[int] = []
    shard, commit = make(seen.append, threads)
    assert shard.threads == threads
    for _ in range(3):
        shard.advance([commit], lambda sums: sums.tolist())
    shard.close()
    assert sorted(seen) == sorted([*range(CELLS)] * 3)
    assert shard.memory.counts.tolist() == [3]


def test_a_thread_that_is_held_up_holds_up_no_other_cell() -> None:
    others = threading.Semaphore(0)

    def act(index: int) -> None:
        if index == 0:
            for _ in range(CELLS - 1):
                assert others.acquire(timeout=20), "cells wait for the first one"
        else:
            others.release()

    shard, commit = make(act, 2)
    shard.advance([commit], lambda sums: sums.tolist())
    shard.close()


@pytest.mark.parametrize("failing", [0, 5])
def test_an_error_in_any_thread_ends_the_work(failing: int) -> None:
    def act(index: int) -> None:
        if index == failing:
            raise ZeroDivisionError

    shard, commit = make(act, 2)
    with pytest.raises(ZeroDivisionError):
        shard.advance([commit], lambda sums: sums.tolist())
    assert shard.memory.counts.tolist() == [0]
    shard.close()
