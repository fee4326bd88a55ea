"""The environment that a launcher sets, read by a worker that may have been started by anybody."""

import pytest

from tensorwire.errors import UnavailableError
from tensorwire.membership import Place, WorkerMember

GOOD = {
    "TENSORWIRE_RANK": "1",
    "TENSORWIRE_WORKERS": "2",
    "TENSORWIRE_SERVERS": "127.0.0.1:1, 127.0.0.1:2",
}


def test_a_complete_environment() -> None:
    place = Place.from_environment({**GOOD, "TENSORWIRE_SLICES": "4"})
    assert place == Place(1, 2, ("127.0.0.1:1", "127.0.0.1:2"), 4)
    assert Place.from_environment(GOOD) == Place(1, 2, ("127.0.0.1:1", "127.0.0.1:2"), 2)


def test_nothing_said_is_alone() -> None:
    assert Place.from_environment({}) is None
    assert Place.from_environment({"TENSORWIRE_SLICES": "3"}) == Place(slices=3)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"TENSORWIRE_RANK": "2"}, "TENSORWIRE_RANK is '2', not a number from 0 to 1"),
        ({"TENSORWIRE_RANK": "one"}, "not a number"),
        ({"TENSORWIRE_RANK": None}, "TENSORWIRE_RANK is not; start the script by a launcher"),
        ({"TENSORWIRE_WORKERS": None}, "TENSORWIRE_WORKERS is not"),
        ({"TENSORWIRE_WORKERS": "0"}, "TENSORWIRE_WORKERS is '0'"),
        ({"TENSORWIRE_SERVERS": " , "}, "is empty"),
        ({"TENSORWIRE_SLICES": "-1"}, "TENSORWIRE_SLICES is '-1'"),
    ],
)
def test_what_makes_no_sense(change: dict[str, str | None], words: str) -> None:
    environ = {**GOOD, **change}
    with pytest.raises(ValueError, match=words):
        Place.from_environment({k: v for k, v in environ.items() if v is not None})


def test_slices_are_dealt_equally() -> None:
    with pytest.raises(ValueError, match="3 slices cannot be dealt equally to 2 workers"):
        Place(0, 2, ("127.0.0.1:1",), 3).check()


def test_pipelines_of_consecutive_workers() -> None:
    places = [Place(rank, 6, ("127.0.0.1:1",), 6, 2) for rank in range(6)]
    assert {place.replicas for place in places} == {3}
    assert [place.stage for place in places] == [0, 1] * 3
    assert [place.my_slices for place in places[::2]] == [range(2), range(2, 4), range(4, 6)]
    assert all(a.my_slices == b.my_slices for a, b in zip(places[::2], places[1::2], strict=True))


def test_pipelines_are_dealt_equally() -> None:
    with pytest.raises(ValueError, match="5 workers cannot be dealt to pipelines of 2"):
        Place(0, 5, ("127.0.0.1:1",), 5, 2).check()
    with pytest.raises(ValueError, match="3 slices cannot be dealt equally to 2 replicas"):
        Place(0, 4, ("127.0.0.1:1",), 3, 2).check()


def test_a_server_that_is_not_there() -> None:
    with pytest.raises(UnavailableError, match=r"worker 1 cannot join: server 0 at 127\.0\.0\.1:1"):
        WorkerMember.join(Place(1, 2, ("127.0.0.1:1",), 2), timeout_s=2.0)
