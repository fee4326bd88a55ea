"""Torch's random numbers where CUDA starts late; a generator of the CPU takes the part of a GPU's.

torch itself keeps calls that wait until CUDA starts, also on a machine without a GPU.
"""

from collections.abc import Iterator

import pytest
import torch

from tensorwire.torch import random_numbers


class Gpu:
    """CUDA with one GPU, which is in use once a test has called `start`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.generator = torch.Generator()
        self._started = False
        monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: self._started)
        monkeypatch.setattr(torch.cuda, "init", self.start)
        for module in (torch.cuda, torch.cuda.random):
            monkeypatch.setattr(module, "device_count", lambda: 1)
            monkeypatch.setattr(module, "_lazy_init", self.start)
        monkeypatch.setattr(torch.cuda, "default_generators", (self.generator,))
        monkeypatch.setattr(torch.cuda, "_queued_calls", [])
        monkeypatch.setattr(torch.cuda, "_lazy_seed_tracker", torch.cuda._LazySeedTracker())

    def start(self) -> None:
        """Makes the earlier calls, like `torch.cuda.init`."""
        if self._started:
            return
        self._started = True
        seeds = [call for call in torch.cuda._lazy_seed_tracker.get_calls() if call]
        for call, _ in [*torch.cuda._queued_calls, *seeds]:
            call()

    def draw(self) -> float:
        """The next number of the GPU's generator."""
        self.start()
        return float(torch.rand((), generator=self.generator))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    state = torch.get_rng_state()
    yield Gpu(monkeypatch)
    torch.set_rng_state(state)


def first_of(seed: int) -> float:
    return float(torch.rand((), generator=torch.Generator().manual_seed(seed)))


def test_cuda_that_starts_behind_a_seed_begins_with_it(gpu: Gpu) -> None:
    """Named for a bug: CUDA that a script first used inside its loop was not seeded."""
    torch.manual_seed(1)
    random_numbers.seed_all(7)
    assert gpu.draw() == first_of(7)


def test_cuda_that_is_in_use_is_seeded(gpu: Gpu) -> None:
    gpu.start()
    random_numbers.seed_all(7)
    assert gpu.draw() == first_of(7)


def test_a_seed_that_cuda_has_not_begun_with_is_kept(gpu: Gpu) -> None:
    random_numbers.seed_all(7)
    with random_numbers.kept_random_state():
        random_numbers.seed_all(8)
    assert gpu.draw() == first_of(7)


def test_a_process_in_the_place_of_another_draws_what_that_would_have_drawn(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Named for a bug: a seed of its own followed the numbers that it took over."""
    random_numbers.seed_all(7)
    gpu.draw()
    state = random_numbers.random_state()
    then = gpu.draw()
    successor = Gpu(monkeypatch)
    torch.manual_seed(1)
    random_numbers.set_random_state(state)
    assert successor.draw() == then
