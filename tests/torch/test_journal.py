"""A shard that is killed in the middle of a version: its successor makes the very same version.

The processes here share anonymous memory, as servers share what a launcher keeps for them.
"""

import math
import mmap
import os
import random
import signal
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tensorwire import failpoints
from tensorwire.parameters import (
    APPLY,
    AVERAGE,
    CHECK_FINITE,
    PUSHED,
    REDUCE,
    REDUCED,
    WANT_NORM,
    Commit,
    Layout,
    Result,
    Spec,
    TensorSpec,
)
from tensorwire.parameters.contributions import Contribution
from tensorwire.parameters.journal import Journal
from tensorwire.parameters.rows import heads_bytes, part_of, tables_of
from tensorwire.parameters.shard import Shard, ShardMemory
from tensorwire.torch.kernels import ParameterKind, describe, kernel_of
from tensorwire.transitions import STEP, TABLE

CELL_BYTES, SLICES, THREADS = 4096, 3, 2
VERSIONS, MORE_VERSIONS = 40, 400

Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
MAKE: dict[str, Make] = {
    "SGD": lambda p: torch.optim.SGD(p, 0.1),
    "momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
    "Adam": lambda p: torch.optim.Adam(p, 0.01),
    "NAdam": lambda p: torch.optim.NAdam(p, 0.01),
    "ASGD": lambda p: torch.optim.ASGD(p, 0.01),
    "Muon": lambda p: torch.optim.Muon(p, 0.01),
    "rows": lambda p: torch.optim.Adagrad(p, 0.1),
    "worker": lambda p: torch.optim.SGD(p, 0.1),
}
NAMES = [*MAKE, "ema"]
MAKE["ema"] = MAKE["Adam"]


class Rig:
    """The memory of one server of a store, and what workers write into it.

    Each version is an APPLY; every third one looks at the norm, every fifth one applies what a
    REDUCE before it has kept.
    """

    def __init__(self, name: str) -> None:
        rows = name == "rows"
        shapes = [(300, 8), (17,), (64, 40), (9, 9)] if name != "Muon" else [(30, 40), (50, 20)]
        if rows:
            shapes = [(700, 16), (50, 16)]
        parameters = [nn.Parameter(torch.zeros(shape)) for shape in shapes]
        optimizer = MAKE[name](parameters)
        kinds = {ParameterKind(0, torch.float32, len(s), rows, s) for s in shapes}
        text = "average only" if name == "worker" else describe(optimizer, kinds, None, False)
        self.kernel = kernel_of(text)
        kind = "rows" if rows else "whole" if name == "Muon" else "trained"
        tensors = [TensorSpec(str(i), "float32", s, kind, 0) for i, s in enumerate(shapes)]
        tensors += [TensorSpec("mean", "float32", (1500,), "average", 0)] * (not rows)
        self.spec = spec = Spec(
            text, self.kernel.hyper, 1, SLICES, tuple(tensors), 1, self.kernel.scalars,
            0.9 if name == "ema" else 0.0,
        )  # fmt: skip
        (self.share,) = Layout(spec, CELL_BYTES).deal(1)
        self._memory = mmap.mmap(-1, 64 << 20)
        self._used = 0
        size, count = self.share.size_bytes, len(tensors)
        slices = range(SLICES)
        heads = heads_bytes(self.share)
        contributions = [Contribution(self.take(size), heads=self.take(heads)) for _ in slices]
        self.memory = memory = ShardMemory(
            self.take(size),
            contributions,
            {each: self.take(size) for each in self.kernel.states},
            self.take(8 * count).view(np.int64),
            self.take(8 * count * len(spec.scalars)).view(np.float64).reshape(count, -1)
            if spec.scalars
            else np.zeros((count, 0)),
            self.take(size) if spec.ema else None,
            self.take(8 * count).view(np.int64),
            self.take(size),
        )
        self.cells = memory.changed_by_cell(self.share, self.kernel)
        self.tables = memory.changed_by_table(self.share)
        self.words = self.take(Journal.size_bytes(self.share, len(spec.scalars)))
        self.undo = self.take(Journal.undo_bytes(self.cells, THREADS))
        states = len(self.kernel.states)
        self.table_undo = self.take(Journal.table_undo_bytes(self.share, states))
        self.given = self.take(64).view(np.int64)  # the version for which workers have committed
        hyper = optimizer.param_groups[0]
        if name == "worker":
            self.hyper: tuple[float, ...] = ()
        else:
            self.hyper = self.kernel.hyper_of(optimizer)[0]
        assert hyper["lr"]
        count = len(self.share.cells)
        self.sums = self.take(8 * (1 + MORE_VERSIONS) * count).view(np.float64).reshape(-1, count)

    def take(self, size: int) -> Any:
        start = self._used
        self._used += -(-size // 64) * 64
        assert self._used <= 64 << 20
        return np.frombuffer(self._memory, np.uint8, size, start)

    def commit(self, version: int) -> list[Commit]:
        """Returns the workers' commit; gradients are written once, as workers write them."""
        tables, count = tables_of(self.share), len(self.spec.tensors)
        operation, flags, max_norm = APPLY, 0, math.inf
        if version % 5 == 4:
            operation = REDUCE
        elif version % 5 == 0:
            flags, max_norm = REDUCED | WANT_NORM, 0.5
        elif version % 3 == 0 or self.kernel.changes_kept:
            flags, max_norm = CHECK_FINITE | WANT_NORM, 1.0
        if self.given[0] < version and not flags & REDUCED:
            random_numbers = np.random.default_rng(version)
            for each in self.memory.contributions:
                values = random_numbers.standard_normal(self.share.size_bytes // 4)
                each.slot[:] = values.astype(np.float32).view(np.uint8)
                for table in tables:
                    gradients = {}
                    for member in table.members:
                        chosen = random_numbers.random(member.height) < 0.3
                        rows = np.flatnonzero(chosen).astype(np.int64)
                        random_values = random_numbers.standard_normal((len(rows), 16))
                        gradients[member.tensor] = (
                            rows, random_values.astype(np.float32).reshape(-1).view(np.uint8),
                        )  # fmt: skip
                    head, parts = part_of(table, gradients)
                    each.heads[table.head : table.head + head.nbytes] = head.view(np.uint8)
                    at = table.start
                    for part in parts:
                        each.slot[at : at + part.nbytes] = part
                        at += part.nbytes
            self.given[0] = version
        present = bytes([PUSHED]) * count
        scale = 0.5 if operation == REDUCE else 1.0  # of what is reduced, not of what is applied
        return [
            Commit(version, operation, flags, scale, max_norm, 1.0 + i, (self.hyper,), present)
            for i in range(SLICES)
        ]

    def run(self, last: int, counted: int = 0) -> int:
        """Makes versions up to the last one, from where another process left off.

        It ends itself when it has counted a step of so many tensors.
        """
        journal = Journal(
            self.share, len(self.spec.scalars), self.words, self.undo, self.table_undo,
            self.cells, self.tables,
        )  # fmt: skip
        shard = Shard(self.share, self.kernel, self.memory, THREADS, journal)
        if counted:
            shard._counts = Fatal(shard._counts, counted)  # type: ignore[assignment]
        first = journal.published + 1
        for version in range(first, last + 1):
            commits = self.commit(version)

            def exchange(sums: Any, version: int = version) -> list[float]:
                self.sums[version, : len(sums)] = sums
                return sums.tolist()  # type: ignore[no-any-return]

            finite, norm = shard.advance(commits, exchange)
            failpoints.failpoint("version.applied")
            journal.publish(version, Result(version, finite, norm).to_bytes())
            failpoints.failpoint("version.published")
        shard.close()
        return first

    def content(self) -> dict[str, bytes]:
        memory = self.memory
        arrays = {"parameters": memory.master, "counts": memory.counts, "scalars": memory.scalars}
        arrays |= memory.states
        arrays |= {"averaged": memory.averaged, "kept": memory.kept, "sums": self.sums}
        if memory.average is not None:
            arrays[AVERAGE] = memory.average
        return {name: array.tobytes() for name, array in arrays.items()}

    def child(self, last: int, fail: str = "", counted: int = 0) -> int:
        """Another process that makes the versions."""
        if pid := os.fork():
            return pid
        try:
            torch.set_num_threads(1)
            failpoints.arm("server-0", fail)
            self.run(last, counted)
            os._exit(0)
        finally:
            os._exit(1)


class Fatal:
    """Counts of tensors, at which a process is killed after `left` changes."""

    def __init__(self, counts: Any, left: int) -> None:
        self._counts, self._left = counts, left

    def __getitem__(self, tensor: int) -> int:
        return int(self._counts[tensor])

    def __setitem__(self, tensor: int, count: int) -> None:
        self._counts[tensor] = count
        self._left -= 1
        if not self._left:
            os.kill(os.getpid(), signal.SIGKILL)


def undisturbed(name: str, versions: int) -> dict[str, bytes]:
    rig = Rig(name)
    rig.run(versions)
    assert any(rig.memory.master) or name == "worker"
    return rig.content()


# The rows of a step, without those of what the rig leaves out: other servers, first values.
STEPS = {row.name for row in STEP.all_rows()} - {
    "version.copied", "norms.sent", "norms.awaited", "norm.noted",
}  # fmt: skip
REACHED = {*STEPS, "version.applied", "version.published"} - {row.name for row in TABLE.rows}
ROWS = {place.replace("cell", "table") for place in REACHED}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.slow
def test_killed_at_each_place(name: str) -> None:
    """At the first, the second and a later time that a place is reached, one after the other."""
    whole = undisturbed(name, VERSIONS)
    places = ROWS if name == "rows" else REACHED
    if name == "worker":
        places = REACHED | {"norm.noted"}
    for place in sorted(places):
        rig, hit = Rig(name), 0
        for times in (1, 2, 7, 1):
            _, status = os.waitpid(rig.child(VERSIONS, f"server-0:{place}:{times}:kill"), 0)
            hit += status == signal.SIGKILL
            assert status in (0, signal.SIGKILL), (place, times, status)
        rig.run(VERSIONS)
        assert hit >= (2 if place == "norm.noted" else 3), (place, hit)  # there every fifth version
        assert rig.content() == whole, place


def test_killed_while_it_counts() -> None:
    """Tensors of a cell, whose counts differ then, are again treated alike when the norm is taken.

    Else the sum of their squares is made in another order, and the norm has other bits.
    """
    whole = undisturbed("Adam", 30)
    for counted in range(9, 13):  # in the third version, which has a norm
        rig = Rig("Adam")
        _, status = os.waitpid(rig.child(30, counted=counted), 0)
        assert status == signal.SIGKILL
        rig.run(30)
        assert rig.content() == whole, counted


# A momentum is a state as Adam's are, and the numbers of ASGD are as those of NAdam.
@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("momentum", "ASGD")])
@pytest.mark.slow
def test_killed_at_any_moment(name: str) -> None:
    """By a signal from outside, also in the middle of a kernel of torch."""
    whole, chance = undisturbed(name, MORE_VERSIONS), random.Random(name)
    rig, kills = Rig(name), 0
    for _ in range(200):
        child = rig.child(MORE_VERSIONS)
        time.sleep(0.005 + chance.random() * 0.02)
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        if status == 0:
            break
        kills += 1
    rig.run(MORE_VERSIONS)
    assert kills >= 5
    assert rig.content() == whole
