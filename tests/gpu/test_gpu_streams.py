"""The checker of streams' order finds a wait that is missing: each is left out once."""

import contextlib

import pytest

from tensorwire.testing.checks.gpu import stream_rounds
from tensorwire.testing.setup import setup, warm_up_gpu


@pytest.mark.parametrize("memory", [("gpu", "gpu"), ("gpu", "host")])
@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize(("wait", "hold"), [(True, True), (False, True), (True, False)])
def test_a_missing_wait_is_found(
    transport: str, memory: tuple[str, str], wait: bool, hold: bool
) -> None:
    warm_up_gpu()
    wrong = (
        contextlib.nullcontext() if wait and hold else pytest.raises(AssertionError, match="round")
    )
    with wrong, setup(transport, "one process", memory) as scene:
        stream_rounds(scene, wait, hold)


def test_a_driver_that_forgets_a_wait_is_found(
    driver: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same where the core asks for the wait, and the driver does not keep it."""
    if driver == "real":
        pytest.skip("NVIDIA's driver cannot be told to forget a wait")
    warm_up_gpu()
    monkeypatch.setenv("STANDIN_FORGETS_WAITS", "1")
    with (
        pytest.raises(AssertionError, match="round"),
        setup("shm", "one process", ("gpu", "gpu")) as scene,
    ):
        stream_rounds(scene)
