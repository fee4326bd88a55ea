"""A Pace makes waits for the same poll longer where that pays, and never for long."""

import threading
import time

import pytest

from tensorwire.errors import TimeoutError
from tensorwire.memory import Pace
from tensorwire.testing import node_pair

ROUNDS = 500


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_rounds_and_then_nothing(transport: str) -> None:
    """Two ends answer each other quickly; one that then waits in vain sleeps all the same."""
    with node_pair([transport]) as pair:
        here, there = pair.near.allocate(64, name="here"), pair.far.allocate(64, name="there")
        to_there, to_here = pair.to_far.region("there"), pair.to_near.region("here")
        failures: list[BaseException] = []

        def answer() -> None:
            pace = Pace()
            try:
                for number in range(1, ROUNDS + 1):
                    there.word(0).wait_until(number, 20, peer=pair.to_near, pace=pace)
                    to_here.word(0).set(number)
            except BaseException as error:
                failures.append(error)

        thread = threading.Thread(target=answer)
        thread.start()
        pace = Pace()
        for number in range(1, ROUNDS + 1):
            to_there.word(0).set(number)
            here.word(0).wait_until(number, 20, peer=pair.to_far, pace=pace)
        thread.join()
        assert not failures
        began, cpu = time.monotonic(), time.process_time()
        with pytest.raises(TimeoutError):
            here.word(0).wait_until(ROUNDS + 1, 0.5, peer=pair.to_far, pace=pace)
        assert time.monotonic() - began >= 0.5
        assert time.process_time() - cpu < 0.05


def test_what_is_no_pace() -> None:
    with node_pair(["shm"]) as pair, pytest.raises(TypeError):
        pair.near.allocate(64).word(0).wait_until(0, pace=5)  # type: ignore[arg-type]
