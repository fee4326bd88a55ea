"""Defines names and words by which a job is paused and parameters are written. Pure.

A process with the job's secret asks for a pause by a word of server 0. Each store then stands still
after its next step: the step is made, and no worker has been told. Values that are to become the
parameters are written into memory of the servers that nobody else uses. Another word says that all
values are there; the workers are told so with the step, and make a version of them together.
`server/stepping/hold.py` is the server's side. docs/internals/files.md has the tables.
"""

from __future__ import annotations

PAUSE = "pause"
"""The region of server 0 with a word that grows by 1 when a pause is wanted, and when it ends."""
PAUSE_BYTES = 64

HELD_AT = 0
"""In RegionKind.HOLD: the server's word, see `held_word`."""
EDIT_AT = 64
"""The writer's word: the version after which written values shall follow."""
TAKEN_AT = 128
"""The server's word: the version after which written values will follow."""
WRITTEN_AT = 192
"""A byte for each tensor: 1 if it is written."""


def hold_bytes(tensors: int) -> int:
    """Returns the size of the region of a store with this number of tensors."""
    return WRITTEN_AT + tensors


def is_wanted(word: int) -> bool:
    """Tells whether the word of PAUSE says that the job is to stand still."""
    return word % 2 == 1


def held_word(version: int, over: bool = False) -> int:
    """Returns the word of a version at which a store stands still; `over`: it has gone on."""
    return 2 * version + 1 + over


def held_version(word: int) -> int | None:
    """Returns the version at which a store stands still; None: it does not."""
    return word // 2 if word % 2 == 1 else None
