"""The owners of slices of workers that were killed, and the order of their batches."""

from typing import Any

import numpy as np
import pytest
import torch

from tensorwire.launch.keeper import Keeper
from tensorwire.launch.spec import JobSpec
from tensorwire.launch.takeovers import PassedSlices as Given
from tensorwire.membership.collective import _answer, _message
from tensorwire.membership.identity import FAREWELL, GOODBYE, taken_by, taker_in, was_never_there
from tensorwire.membership.takeovers import Takeovers, deal_places
from tensorwire.membership.world import World
from tensorwire.torch.taking.taking import Taking


class FakeKeeper(Keeper):
    def __init__(self) -> None:
        super().__init__()
        self.told: list[dict[str, Any]] = []

    def tell(self, message: dict[str, Any]) -> None:
        self.told.append(message)


def given_to(places: int, present: int) -> tuple[Given, list[FakeKeeper]]:
    given, keepers = Given(places, present), [FakeKeeper() for _ in range(places)]
    for rank, keeper in enumerate(keepers[:present]):
        given.add(rank, keeper)
    return given, keepers


def test_those_that_live_get_what_a_dead_one_had_evenly() -> None:
    given, keepers = given_to(5, 4)
    assert given.pass_on(3, [0, 1, 2]) == ([1], 1)  # 0 has the place without a worker
    assert given.pass_on(0, [1, 2]) == ([1, 2], 3)
    assert keepers[1].told == [{"lost": [3], "number": 1}, {"lost": [4], "number": 2}]
    assert keepers[2].told == [{"lost": [0], "number": 3}]
    keepers[1].left = True
    assert given.pass_on(2, [1]) is None


def test_who_leaves_without_having_taken_over_passes_on() -> None:
    given, keepers = given_to(3, 3)
    given.pass_on(2, [0, 1])
    assert given.note_end(0, [1]) == []
    assert keepers[1].told == [{"lost": [2], "number": 2}]
    keepers[1].took = 2
    assert given.note_end(1, []) == []


def test_nobody_is_left_for_what_was_not_taken() -> None:
    given, _ = given_to(2, 2)
    given.pass_on(1, [0])
    assert given.note_end(0, []) == [1]
    assert given.note_end(0, []) == []


def test_a_death_while_workers_come_and_go() -> None:
    """The new owner is told its places up to the change and after it."""
    given, keepers = given_to(4, 3)
    table = given.plan([0, 1, 3], {3: keepers[3]})
    assert table == {0: [0, 2], 1: [1], 3: [3]}
    # 0 had 3, too, up to the change; 2 is to leave and gets nothing, 3 is not there so far.
    assert given.pass_on(0, [1, 2, 3]) == ([1], 2)
    assert keepers[1].told == [{"lost": [0, 3], "next": [0, 2], "words": [0], "number": 2}]
    assert not keepers[2].told
    # Who was to join does not come: nobody had anything of it up to the change.
    assert given.pass_on(3, [1, 2]) == ([1], 3)
    assert keepers[1].told[1] == {"lost": [], "next": [3], "words": [3], "number": 3}
    given.finish()
    assert given.present() == [1]
    assert [given.owner_of(place) for place in range(4)] == [1, 1, 1, 1]


def test_places_are_dealt_evenly() -> None:
    for living in ([0], [3], [0, 1], [1, 4], [0, 2, 5], range(7)):
        dealt = deal_places(7, living)
        assert sorted(place for mine in dealt.values() for place in mine) == list(range(7))
        assert all(mine[0] == rank for rank, mine in dealt.items())
        sizes = [len(mine) for mine in dealt.values()]
        assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(("offer", "why"), [(None, "job.epochs"), ("", ""), ("so", "so")])
def test_the_reason_against(offer: str | None, why: str) -> None:
    keeper = FakeKeeper()
    keeper.offer = offer
    found = Given.reason_against(keeper)
    assert why in found
    assert bool(found) == bool(why)


def test_control_words_grow() -> None:
    words = [GOODBYE, taken_by(1, 0), taken_by(5, 1), taken_by(0, 2), taken_by(65534, 3), FAREWELL]
    assert words == sorted(words)
    assert [taker_in(word) for word in (0, *words)] == [None, None, 1, 5, 0, 65534, None]
    assert [was_never_there(word) for word in words] == [False, True, *[False] * 4]
    assert taken_by(65534, 1 << 40) < FAREWELL
    assert words[-1] < 1 << 63


def test_a_sum_without_the_part_of_a_dead_worker() -> None:
    parts = [_message(2, np.array([1.0, 2.0])), None, _message(2, np.array([3.0, 4.0]))]
    answer = _answer(parts)
    assert answer[:16].view(np.int64).tolist() == [2, 2]
    assert answer[16:].view(np.float64).tolist() == [4.0, 6.0]
    texts = [None, _message(-4, np.frombuffer(b"ab", np.uint8))]
    assert _answer(texts)[16:].tobytes() == b"\0\0ab"


class Script:
    """A script's use of the batches of a pass: `turns.next()` and `step`."""

    def __init__(self, slices: tuple[int, ...], steps: int, together: int = 1) -> None:
        world = World(slices[0], 8, slices=8)
        self.takeovers = Takeovers(world, None)  # type: ignore[arg-type]
        self.takeovers.slices = slices
        self.taking = Taking(self.takeovers)
        self.ahead: set[int] = set()
        self.committed: set[int] = set()
        self.turns = self.taking.batches(
            lambda step: step < steps, lambda step, index: 4, 0, together, lambda: None,
            lambda index: index in self.ahead,
        )  # fmt: skip

    def batch(self) -> tuple[int, int] | None:
        planned = list(self.turns.rest())
        each = self.turns.next()
        if each is not None:
            self.taking.give(each[1])
        self.foreseen = planned
        return each

    def step(self, samples: int = 4) -> None:
        self.taking.begin_commit(self, 0)
        self.committed.add(self.taking.slice_of(0))
        due = [i for i in self.takeovers.slices if i not in self.committed | self.ahead]
        if not due:
            self.committed, self.ahead = set(), set()
        self.taking.committed(due, samples)


def run(script: Script, every: int = 1) -> list[tuple[int, int]]:
    found = []
    while (each := script.batch()) is not None:
        found.append(each)
        if len(found) % every == 0:
            script.step(4 * every)
    return found


def test_batches_of_one_slice_and_of_several() -> None:
    assert run(Script((1,), 3)) == [(0, 1), (1, 1), (2, 1)]
    several = run(Script((1, 4), 4, 2), every=2)
    assert several == [(0, 1), (1, 1), (0, 4), (1, 4), (2, 1), (3, 1), (2, 4), (3, 4)]


def test_a_slice_that_is_due_comes_at_once() -> None:
    script = Script((1,), 3)
    assert script.batch() == (0, 1)
    script.takeovers.slices = (1, 0)
    script.step()
    assert script.taking.due == (0,)
    with pytest.raises(RuntimeError, match="a batch of slice 0 is due, which the loader gives"):
        script.step()
    assert [script.batch()] == [(0, 0)]
    assert script.turns.given == 1
    script.step()
    assert run(script) == [(1, 1), (1, 0), (2, 1), (2, 0)]


def test_batches_that_the_script_itself_accumulates() -> None:
    script = Script((1,), 4)
    script.batch(), script.batch()
    script.takeovers.slices = (1, 0)
    script.step(8)
    assert [script.batch(), script.batch()] == [(0, 0), (1, 0)]
    script.step(8)
    assert run(script, 2) == [(2, 1), (3, 1), (2, 0), (3, 0)]


def test_a_slice_that_is_ahead_is_left_out_once() -> None:
    script = Script((1, 0), 2)
    script.ahead = {0}
    assert run(script) == [(0, 1), (1, 1), (1, 0)]


def test_other_samples_than_those_of_the_batches() -> None:
    script = Script((1,), 2)
    script.batch()
    script.takeovers.slices = (1, 0)
    script.step(3)
    with pytest.raises(RuntimeError, match=r"made of 3 samples, and the batches .* have 4"):
        script.batch()


def test_a_pass_without_steps_has_all_slices() -> None:
    script = Script((1, 0), 2)
    assert [script.batch() for _ in range(5)] == [(0, 1), (1, 1), (0, 0), (1, 0), None]


def test_a_batch_that_is_due_and_not_used() -> None:
    script = Script((1, 0), 2)
    script.batch(), script.step(), script.batch()
    with pytest.raises(RuntimeError, match="a batch is asked for, and no step made"):
        script.batch()
    with pytest.raises(RuntimeError, match=r"close\(\) while slice 0 of this step is due"):
        script.taking.check("close()")


def test_what_is_foreseen_comes() -> None:
    """So that batches which are read ahead need not be read again."""
    script = Script((1, 4, 6), 6, 2)
    script.batch()
    foreseen, found = list(script.turns.rest()), []
    while (each := script.batch()) is not None:
        found.append(each)
        if len(found) % 2 == 1:
            script.step(8)
    assert found == foreseen


def test_random_numbers_behind_a_step_are_those_of_its_own_slice() -> None:
    """A script that draws between two passes draws the same where a slice was taken over."""
    script = Script((1, 0), 2)
    script.batch(), torch.manual_seed(5), script.step()
    script.batch(), torch.manual_seed(6), script.step()
    drawn = torch.rand(3)
    assert torch.equal(drawn, torch.rand(3, generator=torch.Generator().manual_seed(5)))
    assert script.taking.default_slice == 1
    script.takeovers.ranks = (1, 0)  # it acts for worker 0
    script.batch(), torch.manual_seed(5), script.step()
    script.batch(), torch.manual_seed(6), script.step()
    drawn = torch.rand(3)
    assert torch.equal(drawn, torch.rand(3, generator=torch.Generator().manual_seed(6)))
    assert script.taking.default_slice == 0


def test_who_joins_runs_the_script(tmp_path: Any) -> None:
    script = tmp_path / "script.py"
    script.write_text("")
    job = JobSpec((str(script),), 2, slices=4, restart_workers=False)
    assert job.places == 4
    assert job.worker_command(3) == job.worker_command(0)
