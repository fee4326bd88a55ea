"""Every transport passes the conformance suite, in one process and in two."""

import pytest

from tensorwire.testing import check_names, check_transport, run_check


@pytest.mark.parametrize(
    ("place", "name"),
    [(place, name) for place in ("one process", "two processes") for name in check_names(place)],
)
def test_conformance(transport: str, place: str, name: str) -> None:
    run_check(name, transport, place)


def test_a_failure_is_reported_and_hides_no_other() -> None:
    passed = check_transport("nonsense", places=["one process"], only=["slices", "names"])
    with pytest.raises(AssertionError, match=r"2 checks of nonsense failed") as failure:
        list(passed)
    for expected in ("slices in one process", "names in one process", "unknown transport"):
        assert expected in str(failure.value)


def test_what_passed_is_told() -> None:
    passed = check_transport("shm", places=["one process"], only=["slices"])
    assert list(passed) == [("one process", "slices")]


def test_a_place_must_be_known() -> None:
    with pytest.raises(ValueError, match="place"):
        check_names("nowhere")
