"""Seeds and saves torch's random numbers: of the CPU, and of devices in use.

These are the default generators, which a script uses where it names none. `OwnNumbers` has those of
Python and numpy too.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch


def seed_of(*parts: int) -> int:
    """Returns a seed that differs wherever a part differs (splitmix64 over the parts)."""
    state = 0
    for part in parts:
        state = (state ^ (part & _MASK)) + 0x9E3779B97F4A7C15 & _MASK
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & _MASK
        state = (state ^ state >> 27) * 0x94D049BB133111EB & _MASK
        state ^= state >> 31
    return state >> 1


_MASK = (1 << 64) - 1
# These stand for a slice in seeds of numbers that all workers draw.
IN_AN_EPOCH, BEHIND_A_PASS, IN_A_STEP, IN_A_SOURCE = -2, -3, -4, -5


class RandomState(NamedTuple):
    """The states of the default generators.

    Attributes:
        cpu: state of the CPU's.
        cuda: state of each CUDA device's; empty where none is in use.
    """

    cpu: bytes
    cuda: tuple[bytes, ...]


def seed_all(seed: int) -> None:
    """Seeds the generators of the CPU and of CUDA devices.

    Where CUDA is not in use yet, its generators begin with this seed when it is.
    """
    torch.default_generator.manual_seed(seed)
    _seed_cuda(seed)


def random_state() -> RandomState:
    """Returns the present states of the default generators; for `pickle`, at once."""
    cuda = torch.cuda.get_rng_state_all() if _uses_cuda() else []
    return RandomState(_bytes(torch.get_rng_state()), tuple(_bytes(each) for each in cuda))


def set_random_state(state: RandomState) -> None:
    """Puts saved states back into the default generators.

    Raises:
        RuntimeError, AssertionError: CUDA was in use, and cannot be used here; torch says why.
    """
    torch.set_rng_state(_tensor(state.cpu))
    if state.cuda:
        torch.cuda.init()  # else the last seed would come after these when CUDA starts
        torch.cuda.set_rng_state_all([_tensor(each) for each in state.cuda])
    elif not _uses_cuda():
        _seed_cuda(torch.initial_seed())  # which the state of the CPU's generator has


@contextmanager
def kept_random_state() -> Iterator[None]:
    """Restores the default generators after the block."""
    state = random_state()
    try:
        yield
    finally:
        set_random_state(state)


class OwnNumbers:
    """Random numbers of its own for code that runs a part at a time, each in a `with` block.

    In the first block the default generators of torch's CPU, Python and numpy have the seed; each
    later one goes on where the last one ended. Outside they are as if there were no blocks.

    Args:
        seed: from 0 up.
        more: generators of torch that are treated in the same way.
    """

    def __init__(self, seed: int, more: Sequence[torch.Generator] = ()) -> None:
        self._seed = seed
        self._generators = (torch.default_generator, *more)
        self._inside: tuple[Any, ...] | None = None
        self._outside: tuple[Any, ...] = ()

    def __enter__(self) -> None:
        self._outside = self._now()
        if self._inside is not None:
            self._put(self._inside)
            return
        for generator in self._generators:
            generator.manual_seed(self._seed)
        random.seed(self._seed)
        np.random.seed(self._seed & 0xFFFFFFFF)

    def __exit__(self, *error: object) -> None:
        self._inside = self._now()
        self._put(self._outside)

    def _now(self) -> tuple[Any, ...]:
        states = [generator.get_state() for generator in self._generators]
        return states, random.getstate(), np.random.get_state()

    def _put(self, state: tuple[Any, ...]) -> None:
        for generator, each in zip(self._generators, state[0], strict=True):
            generator.set_state(each)
        random.setstate(state[1])
        np.random.set_state(state[2])


def _seed_cuda(seed: int) -> None:
    if torch.backends.cuda.is_built():
        torch.cuda.manual_seed_all(seed)


def _uses_cuda() -> bool:
    return bool(torch.cuda.is_initialized())


def _bytes(state: torch.Tensor) -> bytes:
    data: bytes = state.numpy().tobytes()
    return data


def _tensor(state: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)
