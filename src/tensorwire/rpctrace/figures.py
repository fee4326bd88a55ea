"""Adds up the records of all processes of a traced command."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import groupby
from operator import add, attrgetter
from pathlib import Path
from typing import Any

from tensorwire.rpctrace import recorder

SHM_BITS, TCP_BITS = 18, 21
"""The lowest buckets of messages whose payload goes ahead by default: of 2^17, of 2^20 bytes."""


@dataclass(slots=True)
class Distribution:
    """The distribution of call times in ns, or of payload sizes in bytes.

    Attributes:
        count, total, most: of the values.
        left: bytes that left the messages.
        encoded: bytes that (de)serializers made or read.
        ns: time in (de)serializers.
        counts, totals: of the values of k bits, by k.
    """

    count: int = 0
    total: int = 0
    most: int = 0
    left: int = 0
    encoded: int = 0
    ns: int = 0
    counts: list[int] = field(default_factory=lambda: [0] * recorder.BUCKETS)
    totals: list[int] = field(default_factory=lambda: [0] * recorder.BUCKETS)

    @classmethod
    def of(cls, words: memoryview) -> Distribution:
        """Makes one of a row of `recorder`, whose head has the same order."""
        middle = recorder.HEAD + recorder.BUCKETS
        counts, totals = words[recorder.HEAD : middle], words[middle : recorder.WORDS]
        values: list[Any] = [*words[: recorder.NS + 1], list(counts), list(totals)]
        return cls(*values)

    def join(self, other: Distribution) -> None:
        """Adds the values of another distribution."""
        for name in ("count", "total", "left", "encoded", "ns"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.most = max(self.most, other.most)
        self.counts = list(map(add, self.counts, other.counts))
        self.totals = list(map(add, self.totals, other.totals))

    def below(self, share: float) -> int:
        """Returns a power of two, or the highest value, that this share of values is not above."""
        seen = 0
        for bits, count in enumerate(self.counts):
            seen += count
            if seen >= share * self.count:
                return min(self.most, 1 << bits)
        return self.most

    def from_bits(self, bits: int) -> tuple[int, int]:
        """Returns how many values have this number of bits or more, and their sum."""
        return sum(self.counts[bits:]), sum(self.totals[bits:])


@dataclass(frozen=True, slots=True)
class Measured:
    """One kind of call or message.

    Attributes:
        kind: "calls", or "messages".
        side: "client", or "server".
        arity, method: of the call.
        what: of calls their codes; of messages "sent" or "received", and the protocol.
        values: times, or sizes.
    """

    kind: str
    side: str
    arity: str
    method: str
    what: tuple[str, ...]
    values: Distribution


@dataclass(frozen=True, slots=True)
class Trace:
    """All that was recorded of a command.

    Attributes:
        rows: what was counted at least once.
        pythons: Python processes that were started.
        users: of these the ones (and forks) with RPCs.
        lost: calls and messages in processes with too many methods.
        unknown: what this grpcio lacks, so that it was not traced.
    """

    rows: list[Measured]
    pythons: int
    users: int
    lost: int
    unknown: list[str]

    def calls(self) -> list[tuple[Measured, Distribution]]:
        """Returns a row for each method, with the times of all codes."""
        return list(_joined(row for row in self.rows if row.kind == "calls"))

    def messages(self) -> list[Measured]:
        """Returns one row for each method, direction and protocol."""
        return [row for row in self.rows if row.kind == "messages"]

    def to_json(self) -> dict[str, Any]:
        """Returns the figures for a file; times in ns, sizes in bytes."""
        return {
            "format": 1,
            "processes": {"python": self.pythons, "with_rpcs": self.users},
            "lost": self.lost,
            "unknown": self.unknown,
            "rows": [_to_json(row) for row in self.rows],
        }


def _joined(rows: Iterable[Measured]) -> Iterable[tuple[Measured, Distribution]]:
    for _, group in groupby(rows, attrgetter("side", "method", "arity")):
        each = list(group)
        whole = Distribution()
        for row in each:
            whole.join(row.values)
        yield each[0], whole


def _to_json(row: Measured) -> dict[str, Any]:
    values = row.values
    about: dict[str, Any] = {"kind": row.kind, "side": row.side, "method": row.method}
    about |= {"arity": row.arity, "count": values.count}
    used = [bits for bits, count in enumerate(values.counts) if count]
    if row.kind == "calls":
        (about["code"],) = row.what
        about |= {"total_ns": values.total, "max_ns": values.most}
        about["histogram"] = [{"below_ns": 1 << k, "count": values.counts[k]} for k in used]
        return about
    about["direction"], about["protocol"] = row.what
    about |= {"bytes": values.total, "bytes_max": values.most, "bytes_beside": values.left}
    about |= {"bytes_encoded": values.encoded, "encoding_ns": values.ns}
    about["histogram"] = [
        {"below_bytes": 1 << k, "count": values.counts[k], "bytes": values.totals[k]} for k in used
    ]
    return about


def _order(item: tuple[recorder.Key, Distribution]) -> tuple[recorder.Key, ...]:
    """Returns a sort key: rows of one method together, and among them rows of one arity."""
    key, _ = item
    return key[:2], key[3:4], key[2:3], key[4:]


def read_trace(folder: Path) -> Trace:
    """Adds up the files of a folder, also those of processes that were killed while they wrote."""
    found: dict[recorder.Key, Distribution] = {}
    users = 0
    for path in sorted(folder.glob("*.rows")):
        words = memoryview(path.read_bytes()).cast("q")
        keys = path.with_suffix(".keys").read_bytes().split(b"\n")[:-1]
        for index, key in enumerate(keys[: len(words) // recorder.WORDS]):
            row = words[index * recorder.WORDS : (index + 1) * recorder.WORDS]
            if row[recorder.COUNT] or index == 0:
                whole = found.setdefault(tuple(json.loads(key)), Distribution())
                whole.join(Distribution.of(row))
        users += 1
    unknown = [": ".join(key[1:]) for key in found if key[0] == "unknown"]
    lost = found.pop(("lost",), Distribution()).count
    rows = [
        Measured(key[0], key[1], key[2], key[3], key[4:], values)
        for key, values in sorted(found.items(), key=_order)
        if key[0] != "unknown"
    ]
    pythons = len(list(folder.glob("*.python")))
    return Trace(rows, pythons, users, lost, sorted(unknown))
