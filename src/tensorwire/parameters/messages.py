"""What workers and servers write into each other's memory, as numpy dtypes; pure.

A commit goes from a worker to every server, once per slice and version: what is to be done, and the
hyper-parameters of this step. A result comes back from every server. Both lie behind a signal word
whose value is the version, so whoever sees the word sees the whole message. docs/parameters.md has
the tables.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]

APPLY, REDUCE, PUBLISH, RELEASE = 1, 2, 3, 4
"""Operations: reduce and apply; reduce only, the result stays in slot 0; slot 0's values become the
parameters; the store is not needed any more."""

REDUCED = 1
"""Flag of APPLY and REDUCE: slot 0 holds the reduced gradient already."""
CHECK_FINITE = 2
"""Flag: nothing is applied if the reduced gradient has an infinite or undefined element."""
WANT_NORM = 4
"""Flag: the result tells the norm of the reduced gradient."""

OPERATION_NAMES = {
    APPLY: "step()",
    REDUCE: "synchronize() or clip_grad_norm_()",
    PUBLISH: "DistributedOptimizer(), edit() or load()",
    RELEASE: "close(), add_param_group() or edit()",
}

_COMMIT = np.dtype(
    [
        ("version", "<i8"),
        ("operation", "<i8"),
        ("flags", "<i8"),
        ("scale", "<f8"),
        ("max_norm", "<f8"),
        ("weight", "<f8"),
    ]
)
_RESULT = np.dtype(
    [
        ("version", "<i8"),
        ("failed", "<i8"),
        ("finite", "<i8"),
        ("norm", "<f8"),
        ("wait_s", "<f8"),
        ("work_s", "<f8"),
        ("message_bytes", "<i8"),
    ]
)

WORD_BYTES = 64
"""A signal word and padding, before each message."""
RESULT_BYTES = 4096
"""A result with its word and its text."""
MESSAGE_BYTES = RESULT_BYTES - WORD_BYTES - _RESULT.itemsize

POISON = 1 << 62
"""Value of a result's word when no version will follow: the message says why."""


@dataclass(frozen=True, slots=True)
class Commit:
    """What one slice asks of a server.

    Attributes:
        version: the version that this makes.
        operation: APPLY, REDUCE, PUBLISH or RELEASE.
        flags: REDUCED, CHECK_FINITE, WANT_NORM.
        scale: every gradient is multiplied by this; 1 / loss scale with a scaler.
        max_norm: the reduced gradient is scaled down to this norm; inf: never.
        weight: of this slice in the mean, its number of samples.
        hyper: float64, (groups, names).
        present: uint8, one per tensor: this slice has a gradient for it.
    """

    version: int
    operation: int
    flags: int
    scale: float
    max_norm: float
    weight: float
    hyper: NDArray[np.float64]
    present: NDArray[np.uint8]

    def to_bytes(self) -> Bytes:
        """As it is written."""
        head = np.zeros((), _COMMIT)
        head["version"], head["operation"] = self.version, self.operation
        head["flags"], head["scale"] = self.flags, self.scale
        head["max_norm"], head["weight"] = self.max_norm, self.weight
        parts = (head.tobytes(), np.ascontiguousarray(self.hyper).tobytes(), self.present.tobytes())
        return np.frombuffer(b"".join(parts), np.uint8)

    @staticmethod
    def size_bytes(groups: int, names: int, tensors: int) -> int:
        """Length of every commit of a store."""
        return _COMMIT.itemsize + 8 * groups * names + tensors

    @staticmethod
    def from_bytes(data: Bytes, groups: int, names: int, tensors: int) -> Commit:
        """Copies it out of memory that its writer may change.

        Raises:
            ValueError: it is no commit.
        """
        copy = data[: Commit.size_bytes(groups, names, tensors)].tobytes()
        head = np.frombuffer(copy, _COMMIT, 1)[0]
        end = _COMMIT.itemsize + 8 * groups * names
        hyper = np.frombuffer(copy[_COMMIT.itemsize : end], "<f8").reshape(groups, names)
        commit = Commit(
            int(head["version"]),
            int(head["operation"]),
            int(head["flags"]),
            float(head["scale"]),
            float(head["max_norm"]),
            float(head["weight"]),
            hyper,
            np.frombuffer(copy[end:], np.uint8),
        )
        if commit.operation not in OPERATION_NAMES:
            raise ValueError(f"unknown operation {commit.operation}")
        numbers = {"weight": commit.weight, "max_norm": commit.max_norm, "scale": commit.scale}
        for name, number in numbers.items():
            if not number > 0 or (name != "max_norm" and number == float("inf")):
                raise ValueError(f"{name} is {number}, which is not a positive number")
        return commit

    def difference(self, other: Commit) -> str | None:
        """Where two slices of one step disagree, in words; weight and presence may differ."""
        if self.operation != other.operation:
            mine, theirs = OPERATION_NAMES[self.operation], OPERATION_NAMES[other.operation]
            return f"{mine} here, {theirs} there"
        for field in ("version", "flags", "scale", "max_norm"):
            mine, theirs = getattr(self, field), getattr(other, field)
            if mine != theirs:
                return f"{field} {mine} here, {theirs} there"
        if self.hyper.tobytes() != other.hyper.tobytes():
            return "hyper-parameters (learning rate, …) differ"
        return None


@dataclass(frozen=True, slots=True)
class Result:
    """What a server says of a version.

    Attributes:
        version: the version that is now in place.
        finite: False: CHECK_FINITE was asked and failed, nothing was applied.
        norm: of the reduced gradient before clipping; nan where nobody asked.
        wait_s: how long the server waited for the last slice after the first.
        work_s: how long it then took.
        failed: the store is over, and `message` says why.
        message: text for the user.
    """

    version: int
    finite: bool = True
    norm: float = float("nan")
    wait_s: float = 0.0
    work_s: float = 0.0
    failed: bool = False
    message: str = ""

    def to_bytes(self) -> Bytes:
        """As it is written; a message that is too long is cut."""
        text = self.message.encode()[:MESSAGE_BYTES]
        head = np.zeros((), _RESULT)
        head["version"], head["failed"], head["finite"] = self.version, self.failed, self.finite
        head["norm"], head["wait_s"], head["work_s"] = self.norm, self.wait_s, self.work_s
        head["message_bytes"] = len(text)
        return np.frombuffer(head.tobytes() + text, np.uint8)

    @staticmethod
    def from_bytes(data: Bytes) -> Result:
        """Copies it out of memory."""
        copy = data.tobytes()
        head = np.frombuffer(copy, _RESULT, 1)[0]
        size = min(max(int(head["message_bytes"]), 0), MESSAGE_BYTES)
        text = copy[_RESULT.itemsize : _RESULT.itemsize + size].decode(errors="replace")
        return Result(
            int(head["version"]),
            bool(head["finite"]),
            float(head["norm"]),
            float(head["wait_s"]),
            float(head["work_s"]),
            bool(head["failed"]),
            text,
        )
