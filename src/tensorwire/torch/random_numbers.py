"""Seeds and saves torch's random numbers: of the CPU, and of devices in use.

Only the default generators, which the script uses where it names none.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch


def seed_of(*parts: int) -> int:
    """A seed that differs wherever a part differs (splitmix64 over the parts)."""
    state = 0
    for part in parts:
        state = (state ^ (part & _MASK)) + 0x9E3779B97F4A7C15 & _MASK
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & _MASK
        state = (state ^ state >> 27) * 0x94D049BB133111EB & _MASK
        state ^= state >> 31
    return state >> 1


_MASK = (1 << 64) - 1
# Stand for a slice in seeds of numbers that all workers draw.
IN_AN_EPOCH, BEHIND_A_PASS, IN_A_STEP = -2, -3, -4


class RandomState(NamedTuple):
    """Where the default generators are.

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
    """Where they are now; for `pickle`, at once."""
    cuda = torch.cuda.get_rng_state_all() if _uses_cuda() else []
    return RandomState(_bytes(torch.get_rng_state()), tuple(_bytes(each) for each in cuda))


def set_random_state(state: RandomState) -> None:
    """Puts them there again.

    Raises:
        RuntimeError, AssertionError: CUDA was in use, and cannot be used here; torch says why.
    """
    torch.set_rng_state(_tensor(state.cpu))
    if state.cuda:
        torch.cuda.init()  # else the last seed would come behind these when CUDA starts
        torch.cuda.set_rng_state_all([_tensor(each) for each in state.cuda])
    elif not _uses_cuda():
        _seed_cuda(torch.initial_seed())  # which the state of the CPU's generator has


@contextmanager
def kept_random_state() -> Iterator[None]:
    """Behind it they are where they were before."""
    state = random_state()
    try:
        yield
    finally:
        set_random_state(state)


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
