"""The answers that a worker has got from others, noted for its successor."""

import re
from collections.abc import Iterator

import pytest

from tensorwire.durability.history import HISTORY_BYTES, POSITIONS_AT, History, NoteKind
from tensorwire.memory import Node, Region


@pytest.fixture
def region() -> Iterator[Region]:
    with Node("worker-3") as node:
        yield node.allocate(HISTORY_BYTES, name="history", access="none")


def open_(region: Region) -> History:
    return History(region, 3)


def add(history: History, *numbers: int) -> None:
    for number in numbers:
        history.note(NoteKind.SUM, b"sum %d" % number, number=number)


def taken(history: History) -> list[bytes]:
    """Everything that is replayed, sums only."""
    found = []
    while history._ahead:
        found.append(history.take(NoteKind.SUM, number=history._ahead[0].number))
    return [each for each in found if each is not None]


def test_a_first_process_replays_nothing(region: Region) -> None:
    history = open_(region)
    assert not history.succeeds
    assert not history.replaying
    assert history.take(NoteKind.SUM, number=1) is None


def test_notes_are_replayed_in_order(region: Region) -> None:
    add(open_(region), 1, 2)
    history = open_(region)
    assert history.succeeds
    assert open_(region).is_behind
    assert history.take(NoteKind.SUM, number=1) == b"sum 1"
    assert history.take(NoteKind.SUM, number=2) == b"sum 2"
    assert not history.is_behind
    add(history, 3)
    assert taken(open_(region)) == [b"sum 1", b"sum 2", b"sum 3"]


def test_what_a_predecessor_may_not_have_noted(region: Region) -> None:
    key = 1, 7, 0  # store, version, slice
    first = open_(region)
    assert first.take_or_note(NoteKind.GRADIENTS, b"there", *key) == (True, None)
    add(first, 1)
    history = open_(region)
    assert history.lies_ahead(NoteKind.GRADIENTS, *key)
    assert history.lies_ahead(NoteKind.GRADIENTS, 1)
    assert not history.lies_ahead(NoteKind.GRADIENTS, 1, 8, 0)
    assert history.take_or_note(NoteKind.BUFFERS, b"here", *key) == (False, None), "it had none"
    assert history.take_or_note(NoteKind.GRADIENTS, b"here", *key) == (True, b"there")
    assert not history.lies_ahead(NoteKind.GRADIENTS, 1)
    assert history.take_or_note(NoteKind.GRADIENTS, b"here", *key) == (False, None)
    assert history.take(NoteKind.SUM, number=1) == b"sum 1"
    assert history.take_or_note(NoteKind.BUFFERS, b"here", *key) == (True, None)
    assert open_(region).lies_ahead(NoteKind.BUFFERS, *key)


def test_a_sum_that_was_asked_for_is_ahead_until_it_is_answered(region: Region) -> None:
    add(open_(region), 1)
    history = open_(region)
    history.asked = 2
    history.answered = 1
    assert history.take(NoteKind.SUM, number=1) == b"sum 1"
    assert history.is_behind
    history.answered = 2
    assert not history.is_behind


@pytest.mark.parametrize(
    "key",
    [
        (NoteKind.SUM, 0, 2, 0),
        (NoteKind.VERSION, 0, 1, 0),
        (NoteKind.SUM, 1, 1, 0),
        (NoteKind.SUM, 0, 1, 1),
    ],
)
def test_a_script_that_does_something_else_is_told(
    region: Region, key: tuple[NoteKind, int, int, int]
) -> None:
    add(open_(region), 1)
    with pytest.raises(RuntimeError, match=r"worker 3 .* does other things"):
        open_(region).take(*key)


def test_a_position_replaces_what_was_made_inside_of_a_pass(region: Region) -> None:
    history = open_(region)
    add(history, 1)  # before the epochs
    history.begin_loop()
    history.mark({"at": 1}, passing=False, again=True)
    add(history, 2)  # the beginning of an epoch
    history.mark({"at": 2}, passing=True)
    add(history, 3)
    history.mark({"at": 3}, passing=True)
    add(history, 4)
    successor = open_(region)
    assert successor.position == {"at": 3}
    assert taken(successor) == [b"sum 1", b"sum 2"]
    with pytest.raises(RuntimeError, match="does other things"):
        successor.take(NoteKind.SUM, number=4)
    successor.reach()
    assert taken(successor) == [b"sum 4"]
    add(successor, 5)
    third = open_(region)
    assert taken(third) == [b"sum 1", b"sum 2"]
    third.reach()
    assert taken(third) == [b"sum 4", b"sum 5"]


def test_a_position_is_not_reached_before_all_of_it_is_replayed(region: Region) -> None:
    history = open_(region)
    add(history, 1)
    history.mark({}, passing=False, again=True)
    with pytest.raises(RuntimeError, match="does other things"):
        open_(region).reach()


def test_what_is_made_between_passes_is_made_again_until_the_epoch_ends(region: Region) -> None:
    history = open_(region)
    history.begin_loop()
    history.mark({}, passing=False, again=True)
    history.mark({}, passing=True)
    add(history, 1)
    history.mark({}, passing=False)  # the pass is over
    add(history, 2)
    history.mark({}, passing=True)  # a second pass
    add(history, 3)
    assert taken(open_(region)) == [b"sum 2"]
    history.mark({}, passing=False, again=True)  # the next epoch
    assert taken(open_(region)) == []


def test_what_is_made_between_loops_is_made_again(region: Region) -> None:
    history = open_(region)
    history.begin_loop()
    history.mark({}, passing=False, again=True)
    history.mark({}, passing=False, again=True)  # the loop is over
    add(history, 1)
    history.begin_loop()
    history.mark({}, passing=False, again=True)
    add(history, 2)
    history.mark({}, passing=False, again=True)
    assert taken(open_(region)) == [b"sum 1"]


def test_a_successor_knows_what_was_committed(region: Region) -> None:
    history = open_(region)
    history.note(NoteKind.COMMIT, b"commit", 2, 7, 1)
    assert open_(region).was_committed(2, 7, 1) == b"commit"
    assert open_(region).was_committed(2, 8, 1) is None
    assert history.was_committed(2, 7, 1) is None, "its own are of no interest to a process"


def test_positions_are_counted(region: Region) -> None:
    history = open_(region)
    for number in range(1, 4):
        assert history.mark({}, passing=False) == ""
        assert (
            int.from_bytes(region.array()[POSITIONS_AT : POSITIONS_AT + 8].tobytes(), "little")
            == number
        )


def test_what_does_not_fit_is_told_and_the_last_position_stays(region: Region) -> None:
    history = open_(region)
    history.mark({"at": 1}, passing=False)
    assert "too many" in history.mark({"much": bytes(HISTORY_BYTES)}, passing=False)
    assert open_(region).position == {"at": 1}


@pytest.mark.parametrize("marked", [False, True])
def test_more_notes_than_there_is_room_for_are_a_reason(region: Region, marked: bool) -> None:
    history = open_(region)
    if marked:
        history.mark({}, passing=True)
    for number in range(1, 200):
        history.note(NoteKind.SUM, bytes(30_000), number=number)
    assert "more between two" in history.reason
    with pytest.raises(RuntimeError, match=r"worker 3 was killed, and no other process.*job\.load"):
        open_(region).check()


def test_the_first_reason_counts(region: Region) -> None:
    history = open_(region)
    history.check()
    history.refuse("it is so")
    history.refuse("it is otherwise")
    assert history.reason == "it is so"
    history.refuse("x" * 5000)
    with pytest.raises(RuntimeError, match="it is so"):
        open_(region).check()


def test_what_is_lost_within_a_pass_is_not_needed_behind_the_next_position(region: Region) -> None:
    """Named for a bug: one large sum made a worker irreplaceable for the rest of the job."""
    history = open_(region)
    history.begin_loop()
    history.mark({"at": 1}, passing=True, again=True)
    history.note(NoteKind.SUM, bytes(2_000_000), number=1)
    add(history, 2)  # would come behind a gap
    assert re.search(r"2,000,\d+ bytes of answers, and 1,572,864 are the most", history.reason)
    assert not history.is_refused
    history.mark({"at": 2}, passing=True)
    assert history.reason == ""
    add(history, 3)
    successor = open_(region)
    successor.check()
    assert successor.position == {"at": 2}
    successor.reach()
    assert taken(successor) == [b"sum 3"]


def test_what_is_lost_between_passes_is_needed_until_the_next_epoch(region: Region) -> None:
    history = open_(region)
    history.begin_loop()
    history.mark({}, passing=False, again=True)
    history.note(NoteKind.SUM, bytes(2_000_000), number=1)
    assert history.mark({}, passing=True) == ""
    add(history, 2)
    assert "bytes of answers" in history.reason
    with pytest.raises(RuntimeError, match="bytes of answers"):
        open_(region).check()
    assert sum(len(each.data) for each in history._outside) == 0, "it is not kept in vain"
    history.mark({"at": 2}, passing=False, again=True)
    add(history, 3)
    successor = open_(region)
    successor.check()
    successor.reach()
    assert taken(successor) == [b"sum 3"]


def test_what_does_not_fit_before_the_epochs_is_noted_with_positions(region: Region) -> None:
    history = open_(region)
    data = [bytes([number]) * 300_000 for number in range(5)]
    for number, each in enumerate(data):
        history.note(NoteKind.SUM, each, number=number)
    assert "1,500,120 bytes of answers, and 1,047,552 are the most" in history.reason
    history.begin_loop()
    for at in range(3):
        history.mark({"at": at}, passing=False, again=True)
        assert history.reason == ""
        assert taken(open_(region)) == data


def test_sums_that_grow_too_many_between_passes(region: Region) -> None:
    """Each has fitted; together with what is kept they do not, until the next epoch."""
    history = open_(region)
    history.begin_loop()
    history.mark({}, passing=False, again=True)
    history.note(NoteKind.SUM, bytes(900_000), number=1)
    assert history.mark({"kept": bytes(400_000)}, passing=False) == ""
    history.note(NoteKind.SUM, bytes(200_000), number=2)
    assert history.reason == ""
    assert history.mark({"kept": bytes(500_000)}, passing=False) == ""
    assert "bytes of answers" in history.reason
    history.mark({"kept": bytes(500_000)}, passing=False, again=True)
    assert history.reason == ""
    assert taken(open_(region)) == []


def test_a_reason_that_stays_takes_the_place_of_one_that_does_not(region: Region) -> None:
    history = open_(region)
    history.note(NoteKind.SUM, bytes(2_000_000), number=1)
    history.refuse("it is so")
    assert history.reason == "it is so"
    history.mark({}, passing=False)
    assert history.reason == "it is so"


def test_a_load_is_left_out_as_a_whole(region: Region) -> None:
    first = open_(region)
    add(first, 1)
    assert first.skip_load() is None
    first.note(NoteKind.LOAD, b"")
    add(first, 2)
    first.note(NoteKind.COMMIT, b"commit", 0, 2, 0)
    half = open_(region)
    half.take(NoteKind.SUM, number=1)
    assert half.skip_load() is None
    assert half.is_next(NoteKind.LOAD), "nothing is left out of one that was not finished"
    first.note(NoteKind.LOAD, b"told", number=1)
    add(first, 3)
    history = open_(region)
    history.take(NoteKind.SUM, number=1)
    assert history.skip_load() == b"told"
    assert taken(history) == [b"sum 3"]


def test_a_load_that_failed_has_told_nothing(region: Region) -> None:
    first = open_(region)
    first.note(NoteKind.LOAD, b"")
    first.note(NoteKind.LOAD, b"")
    first.note(NoteKind.LOAD, b"told", number=1)
    history = open_(region)
    assert history.skip_load() is None
    history.take(NoteKind.LOAD)
    assert history.skip_load() == b"told"
