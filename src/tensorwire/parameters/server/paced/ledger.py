"""Records, for its successor, the state of a server whose workers go at their own pace.

In "sync" all workers are told the same, and a journal has it. Here each worker was told something
else, and server 0 alone knows which commit came when and which worker waits for which. All of that
is written into one of two halves of a memory that outlives the process, and then a word says which
of them counts: so a process that is killed leaves the state before an event, or after it.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ...modes import Pace, Paces
from ...regions import RegionKind
from ..opening import Opening
from .clocks import Clocks
from .events import Event

_HEAD_BYTES = 64  # the word, and the lengths of both halves


@dataclass
class Round:
    """The result of a worker's commits since it was answered.

    Attributes:
        finite, norm: of their gradients; the norm is the last one's.
        work_s, notes_s: as of a `Result`.
        since: when the last of them was applied, by a clock that all processes of a host share.
    """

    finite: bool = True
    norm: float = float("nan")
    work_s: float = 0.0
    notes_s: float = 0.0
    since: float = 0.0


@dataclass
class Lead:
    """The additional knowledge of server 0.

    Attributes:
        clocks: of all slices.
        paces: of all versions that were adopted.
        adopted: by rank, the version that a worker computes with.
        delays: by rank, the longest delay of a worker's commits since it was answered; see `Pace`.
        held: workers that wait for an answer.
        pace: of the worker that is answered.
        decided: how many events were decided.
        event: the last of them.
        paused: by rank, the number of the last pause that was decided.
    """

    clocks: Clocks
    adopted: dict[int, int]
    delays: dict[int, int]
    paces: Paces = field(default_factory=Paces)
    held: list[int] = field(default_factory=list)
    pace: Pace | None = None
    decided: int = 0
    event: Event | None = None
    paused: dict[int, int] = field(default_factory=dict)


@dataclass
class Account:
    """All that a successor of a server has to know.

    Attributes:
        taken: by commit of a version, the number of the last that was applied.
        rounds: by rank.
        events: how many were done.
        version: that is in place.
        norms: the number of the last exchange of sums.
        answers: by rank, the number and the bytes of the result that a worker was told last.
        over: no version follows.
        lead: at server 0.
    """

    taken: list[int]
    rounds: dict[int, Round]
    events: int = 0
    version: int = 1
    norms: int = 1
    answers: dict[int, tuple[int, bytes]] = field(default_factory=dict)
    over: bool = False
    lead: Lead | None = None


class Ledger:
    """The ledger of one store at this server; only the store's thread uses it.

    Attributes:
        account: the present state; `note` makes a successor begin with it.
    """

    def __init__(self, opening: Opening) -> None:
        ranks = dict.fromkeys(opening.committers)
        self.account = Account([1] * len(opening.committers), {rank: Round() for rank in ranks})
        self._memory: NDArray[np.uint8] | None = None
        if opening.durable:
            self._memory = opening.allocate(RegionKind.LEDGER).array()
            self._head = self._memory[:_HEAD_BYTES].view(np.int64)
            size = (len(self._memory) - _HEAD_BYTES) // 2
            self._halves = [
                self._memory[_HEAD_BYTES + i * size : _HEAD_BYTES + (i + 1) * size] for i in (0, 1)
            ]
            if self._head[0]:
                half = int(self._head[0]) - 1
                length = int(self._head[1 + half])
                # Written by a process of this program, where no other member reads or writes.
                self.account = pickle.loads(self._halves[half][:length].data)

    def note(self) -> None:
        """Notes the account, with which a successor then begins; does nothing without memory."""
        if self._memory is None:
            return
        data = pickle.dumps(self.account, pickle.HIGHEST_PROTOCOL)
        half = int(self._head[0] == 1)
        if len(data) > len(self._halves[half]):
            raise ValueError(
                f"the notes about the workers have {len(data)} bytes, and "
                f"{len(self._halves[half])} fit: start with fewer workers"
            )
        self._halves[half][: len(data)] = np.frombuffer(data, np.uint8)
        self._head[1 + half] = len(data)
        self._head[0] = 1 + half
