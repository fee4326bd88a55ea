"""Defines the messages that workers and servers write into each other's memory. Pure.

A commit goes from a worker to every server, once per slice and version: what is to be done, and the
hyper-parameters of this step. Where a pipeline computes a slice, each of its workers sends one. A
result comes back from every server. Both travel in mailboxes, in which the version is the number of
the message.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .layout import MALFORMED, Spec, checked_wants
from .modes import SYNC, Mode, checked_mode

Bytes = NDArray[np.uint8]
Hyper = tuple[float, ...]
"""The hyper-parameters of one group."""

APPLY, REDUCE, PUBLISH, RELEASE = 1, 2, 3, 4
"""Operations: reduce and apply; reduce only, the result is kept; slot 0's values become the
parameters; the store is not needed any more."""

REDUCED = 1
"""Flag of APPLY and REDUCE: the reduced gradient is kept already."""
CHECK_FINITE = 2
"""Flag: nothing is applied if the reduced gradient has an infinite or undefined element."""
WANT_NORM = 4
"""Flag: the result tells the norm of the reduced gradient."""

WRITTEN = 8
"""Flag of PUBLISH: the values are not slot 0's, but those that were written while the job was
paused."""

OPERATION_NAMES = {
    APPLY: "step()",
    REDUCE: "synchronize() or clip_grad_norm_()",
    PUBLISH: "DistributedOptimizer(), edit() or load()",
    RELEASE: "close(), add_param_group() or edit()",
}

# numpy's structured arrays say the same and take ten times as long for a few numbers.
_COMMIT = struct.Struct("<qqqddd")  # version, operation, flags, scale, max_norm, weight
# version, failed, finite, edited, norm, wait_s, work_s, notes_s, notes_bytes, message_bytes
_RESULT = struct.Struct("<qqqqddddqq")

RESULT_BYTES = 4032
"""A result with its text."""
MESSAGE_BYTES = RESULT_BYTES - _RESULT.size

ABSENT, PUSHED, PRODUCED, POOLED = 0, 1, 2, 3
"""The state of a tensor in a commit.

ABSENT: the slice has no gradient for it. PUSHED: it was written into the slice's slot. PRODUCED: it
was produced in the slice's other slot, into which nothing is pushed. POOLED: it was produced in the
slice's pool, or in the place of another tensor.
"""

BLOCK_BYTES = 4
"""The size of a tensor's entry in `Commit.blocks`, in memory."""

POISON = 1 << 62
"""Value of a result's word when no version will follow: the message says why."""


class DisagreementError(ValueError):
    """The error of workers that do not ask for the same."""


class Description(NamedTuple):
    """A store as one worker wants it; docs/internals/parameters.md tells of home, view and wants.

    `durable`: it is to outlive the servers, where their memory does. `mode`: how the steps of
    workers follow each other. `device`: on which the model is, see `ModelDevice`; "": it is not on
    one, or servers are to keep their shares in memory of the host.
    """

    home: int
    view: int
    wants: Sequence[int] | None
    spec: Spec
    durable: bool = False
    mode: Mode = SYNC
    device: str = ""

    def to_json(self) -> bytes:
        """Returns the text by which it travels."""
        wants = None if self.wants is None else list(self.wants)
        raw: dict[str, object] = {
            "home": self.home,
            "view": self.view,
            "wants": wants,
            "durable": self.durable,
            "device": self.device,
        }
        raw |= {"mode": self.mode.name, "staleness": self.mode.staleness}
        return json.dumps({**raw, "spec": self.spec.to_json().decode()}).encode()

    @staticmethod
    def from_json(data: bytes, servers: int, known: dict[str, Spec] | None = None) -> Description:
        """Returns a description, checked; the text of a ValueError names the fault.

        `known` has Specs by their text, and gets this one: workers describe the same as a rule.
        """
        try:
            raw = json.loads(data)
            home = int(raw["home"])
            if not -1 <= home < servers:
                raise ValueError(f"it names server {home}, and there are {servers} servers")
            text, known = raw["spec"], {} if known is None else known
            spec = known.get(text) or Spec.from_json(text.encode())
            known[text] = spec
            wants = checked_wants(raw["wants"], spec)
            mode = checked_mode(raw["mode"], raw["staleness"])
            durable, device = raw["durable"] is True, raw["device"]
            if not isinstance(device, str):
                raise ValueError(f"the name of its device is {device!r}, not text")
            return Description(home, int(raw["view"]), wants, spec, durable, mode, device)
        except MALFORMED as error:
            raise ValueError(str(error)) from error


def follower_text(home: int, rank: int) -> bytes:
    """Returns the description of a worker that wants worker 0's store, and has no model.

    Args:
        home: a server whose memory it has mapped.
        rank: its own.
    """
    return json.dumps({"like": 0, "home": home, "view": rank}).encode()


def told_description(
    data: bytes,
    servers: int,
    first: Description | None = None,
    known: dict[str, Spec] | None = None,
) -> Description:
    """Returns a worker's own description, or worker 0's, which it follows.

    Args:
        data: as it came.
        servers: how many there are.
        first: worker 0's; None: this is worker 0.
        known: as of `Description.from_json`.

    Raises:
        ValueError: it is neither.
    """
    try:
        raw = json.loads(data)
        follows = isinstance(raw, dict) and raw.get("like") == 0
    except MALFORMED as error:
        raise ValueError(str(error)) from error
    if not follows:
        return Description.from_json(data, servers, known)
    home, view = raw.get("home"), raw.get("view")
    if first is None or not isinstance(view, int) or home not in range(servers):
        raise ValueError(
            f"as a file worker it names server {home!r} and worker {view!r}, which do not exist or "
            "came before worker 0: use the same version of tensorwire in all processes"
        )
    if not first.mode.is_sync:
        raise ValueError(
            f"it takes its gradients from files, which tw.init({first.mode}) does not support: "
            'use mode="sync", or no --file-workers'
        )
    return first._replace(home=home, view=view, device="")


@dataclass(frozen=True, slots=True)
class Commit:
    """The request of one slice to a server.

    Attributes:
        version: the version that this makes.
        operation: APPLY, REDUCE, PUBLISH or RELEASE.
        flags: REDUCED, CHECK_FINITE, WANT_NORM, WRITTEN.
        scale: every gradient is multiplied by this; 1 / loss scale with a scaler.
        max_norm: the reduced gradient is scaled down to this norm; inf: never.
        weight: of this slice in the mean, its number of samples; 0: its gradient does not count.
        hyper: of every group.
        present: one byte per tensor: ABSENT, PUSHED, PRODUCED or POOLED.
        blocks: for each tensor, where POOLED: 2 t if it lies in tensor t's place in the pool, and
            2 t + 1 if in tensor t's place among what is produced. Not in the message: it is in
            memory beside the pool.
    """

    version: int
    operation: int
    flags: int
    scale: float
    max_norm: float
    weight: float
    hyper: tuple[Hyper, ...]
    present: bytes
    blocks: Sequence[int] = ()

    @property
    def looks(self) -> bool:
        """True if the norm of the whole reduced gradient is taken."""
        asked = bool(self.flags & (WANT_NORM | CHECK_FINITE)) or self.max_norm < math.inf
        return asked and self.operation in (APPLY, REDUCE)

    def to_bytes(self) -> Bytes:
        """Returns the bytes of the message."""
        head = _COMMIT.pack(
            self.version, self.operation, self.flags, self.scale, self.max_norm, self.weight
        )
        return np.frombuffer(head + self._packed_hyper() + self.present, np.uint8)

    def _packed_hyper(self) -> bytes:
        numbers = [number for group in self.hyper for number in group]
        return struct.pack(f"<{len(numbers)}d", *numbers)

    @staticmethod
    def empty(version: int, operation: int, spec: Spec) -> Commit:
        """Returns a commit without gradients and hyper-parameters."""
        hyper = ((0.0,) * len(spec.hyper),) * spec.groups
        present = bytes(len(spec.tensors))
        return Commit(version, operation, 0, 1.0, math.inf, 1.0, hyper, present)

    @staticmethod
    def size_bytes(groups: int, names: int, tensors: int) -> int:
        """Returns the length of every commit of a store."""
        return _COMMIT.size + 8 * groups * names + tensors

    @staticmethod
    def from_bytes(data: Bytes, groups: int, names: int, tensors: int) -> Commit:
        """Returns the commit in memory that its writer may change, as a copy.

        Raises:
            ValueError: it is no commit.
        """
        copy = data[: Commit.size_bytes(groups, names, tensors)].tobytes()
        found = struct.unpack_from(f"<{groups * names}d", copy, _COMMIT.size)
        hyper = tuple(found[names * group : names * (group + 1)] for group in range(groups))
        end = _COMMIT.size + 8 * groups * names
        version, operation, flags, scale, max_norm, weight = _COMMIT.unpack_from(copy)
        commit = Commit(version, operation, flags, scale, max_norm, weight, hyper, copy[end:])
        if commit.operation not in OPERATION_NAMES:
            raise ValueError(f"it asks for operation {commit.operation}, which does not exist")
        if commit.present and max(commit.present) > POOLED:
            raise ValueError(f"it marks a gradient with {max(commit.present)}, above {POOLED}")
        numbers = {"weight": commit.weight, "max_norm": commit.max_norm, "scale": commit.scale}
        for name, number in numbers.items():
            least = "from 0 up" if name == "weight" else "above 0"
            fits = number >= 0 if name == "weight" else number > 0
            if not fits or (name != "max_norm" and number == float("inf")):
                raise ValueError(f"{name} is {number}, which is not a number {least}")
        return commit

    def difference(self, other: Commit, mine: str = "here", theirs: str = "there") -> str | None:
        """Returns how two slices of one step disagree, or None; weight and presence may differ.

        Args:
            other: another slice's.
            mine: what the sentence calls this one.
            theirs: what it calls the other.
        """
        if self.operation != other.operation:
            first, second = OPERATION_NAMES[self.operation], OPERATION_NAMES[other.operation]
            return f"{first} {mine}, {second} {theirs}"
        for field in ("version", "flags", "scale", "max_norm"):
            first, second = getattr(self, field), getattr(other, field)
            if first != second:
                return f"{field} {first} {mine}, {second} {theirs}"
        if self._packed_hyper() != other._packed_hyper():
            numbers = zip(sum(self.hyper, ()), sum(other.hyper, ()), strict=True)
            for one, two in numbers:
                if one != two:
                    return f"a hyper-parameter (learning rate, …) is {one} {mine}, {two} {theirs}"
            return "hyper-parameters (learning rate, …) differ"
        return None


def merged(commits: Sequence[Commit], pipeline: int) -> list[Commit]:
    """Returns one commit per slice, merged from the workers of its pipeline, in order.

    Raises:
        ValueError: two of them have the gradient of one tensor, or they count other samples.
    """
    if pipeline == 1:
        return list(commits)
    found = []
    for first in range(0, len(commits), pipeline):
        group = commits[first : first + pipeline]
        weights = [commit.weight for commit in group]
        if len(set(weights)) > 1:
            raise ValueError(
                f"the processes of a pipeline computed slice {first // pipeline} of {weights} "
                "samples: let all of them take the same batches from job.loader"
            )
        present = np.array([np.frombuffer(commit.present, np.uint8) for commit in group])
        if (twice := np.flatnonzero(np.count_nonzero(present, axis=0) > 1)).size:
            raise ValueError(
                f"tensor {twice[0]} has gradients from two processes of a pipeline: use each "
                "parameter in one process"
            )
        joined = present.max(axis=0)
        blocks = [0] * len(joined) if POOLED in joined else []
        for commit in group:
            for tensor, block in enumerate(commit.blocks):
                if commit.present[tensor] == POOLED:
                    blocks[tensor] = block
        found.append(replace(group[0], present=joined.tobytes(), blocks=tuple(blocks)))
    return found


@dataclass(frozen=True, slots=True)
class Result:
    """The report of a server on a version.

    Attributes:
        version: the version that is now in place.
        finite: False: CHECK_FINITE was asked and failed, nothing was applied.
        norm: of the reduced gradient before clipping; nan if it was not asked for.
        wait_s: how long the server waited for the last slice after the first.
        work_s: how long it then took.
        notes_s: the part of it that went to copies and notes for a successor.
        notes_bytes: memory for these.
        failed: the store is over, and `message` says why.
        message: text for the user.
        edited: values were written while the job was paused; the next version is made of them, by
            PUBLISH with WRITTEN. Server 0 says so.
    """

    version: int
    finite: bool = True
    norm: float = float("nan")
    wait_s: float = 0.0
    work_s: float = 0.0
    notes_s: float = 0.0
    notes_bytes: int = 0
    failed: bool = False
    message: str = ""
    edited: bool = False

    def to_bytes(self) -> Bytes:
        """Returns the bytes of the message; a text that is too long is cut."""
        text = self.message.encode()[:MESSAGE_BYTES]
        head = _RESULT.pack(
            self.version,
            self.failed,
            self.finite,
            self.edited,
            self.norm,
            self.wait_s,
            self.work_s,
            self.notes_s,
            self.notes_bytes,
            len(text),
        )
        return np.frombuffer(head + text, np.uint8)

    @staticmethod
    def from_bytes(data: Bytes) -> Result:
        """Returns the result in memory, as a copy."""
        head = _RESULT.unpack(data[: _RESULT.size].tobytes())
        version, failed, finite, edited, norm, wait_s, work_s, notes_s, notes_bytes, size = head
        size = min(max(size, 0), MESSAGE_BYTES)
        text = data[_RESULT.size : _RESULT.size + size].tobytes().decode(errors="replace")
        took = wait_s, work_s, notes_s, notes_bytes
        return Result(version, bool(finite), norm, *took, bool(failed), text, bool(edited))
