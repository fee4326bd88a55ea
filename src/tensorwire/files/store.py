"""Reader side of a store: its tensors, where their bytes lie, and the words of its version."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property

import numpy as np

from tensorwire.errors import StaleHandleError, UnavailableError
from tensorwire.memory import Peer, RemoteRegion
from tensorwire.parameters import Bytes, Layout, Share, TensorSpec
from tensorwire.parameters.hold import held_version
from tensorwire.parameters.reading import (
    FIRST_VERSION,
    HELD_WORD_AT,
    ReadPlace,
    StoreFacts,
    facts_name,
    parts_of,
    version_name,
)
from tensorwire.parameters.snapshot import VALUES, state

_WAIT_S = 10.0
_OVER = 1 << 62


class ReadStore:
    """A store of a job. Any thread.

    Attributes:
        number: of the store.
        layout: of its tensors.
        shares: of the servers.
        states: the names of the optimizer's states.
        doors: of the servers.
    """

    def __init__(self, facts: Sequence[StoreFacts], doors: Sequence[Peer]) -> None:
        self.number, self.doors = facts[0].store, list(doors)
        self.layout: Layout = facts[0].layout()
        self.shares: tuple[Share, ...] = self.layout.deal(facts[0].servers)
        self._facts = facts
        self.states = sorted(facts[0].states)
        self._regions: dict[tuple[int, str], RemoteRegion] = {}
        self._words = [door.region(version_name(self.number)) for door in doors]
        self._indices = {tensor.name: i for i, tensor in enumerate(self.layout.spec.tensors)}

    @staticmethod
    def find(number: int, doors: Sequence[Peer]) -> ReadStore:
        """Returns the store of a number.

        Raises:
            LookupError: there is none.
            UnavailableError: its servers are of another version of tensorwire.
        """
        try:
            facts = [StoreFacts.from_json(_read_text(door, facts_name(number))) for door in doors]
            if any(each.servers != len(doors) for each in facts):
                counts = sorted({each.servers for each in facts})
                raise ValueError(f"its servers say that there are {counts}, not {len(doors)}")
            return ReadStore(facts, doors)
        except ValueError as error:
            raise UnavailableError(f"the job at {doors[0].address}: {error}") from error

    def is_over(self) -> bool:
        """Tells whether the store is freed, or a server is gone."""
        try:
            self._word(0)
        except (StaleHandleError, ConnectionError):
            return True
        return False

    def tensor(self, name: str, state_name: str | None = None) -> StoredTensor:
        """Returns a tensor, or the optimizer's state for it; LookupError if there is none."""
        index = self._indices[name]
        if state_name is not None and not self.has_state(index, state_name):
            raise LookupError(state_name)
        return StoredTensor(self, index, state_name)

    def has_state(self, index: int, name: str) -> bool:
        """Tells whether the optimizer keeps a state of this name for a tensor."""
        return name in self.states and index in self.layout.trained

    @property
    def names(self) -> list[str]:
        """The names of the tensors, in the model's order."""
        return list(self._indices)

    def newest_version(self) -> int:
        """Returns the newest version that a server has, or makes just now."""
        words = [self._word(server) for server in range(len(self.doors))]
        return max(FIRST_VERSION, *((word + 1) // 2 for word in words))

    def version(self) -> int:
        """Returns the version in place at server 0; while the next one is made that before it."""
        return self._word(0) // 2

    def held_word(self) -> int:
        """Reads the word that tells whether it stands still for a pause; see `hold.held_word`."""
        value = np.zeros(1, np.uint64)
        self._words[0][HELD_WORD_AT : HELD_WORD_AT + 8].read(value).wait(_WAIT_S)
        return int(value[0])

    def held_version(self) -> int | None:
        """Returns the version at which it stands still; None: it does not."""
        return held_version(self.held_word())

    def settled(self, servers: Sequence[int]) -> int | None:
        """Returns the version that all these servers have in place; None while they differ."""
        words = {self._word(server) for server in servers}
        word = words.pop()
        return word // 2 if not words and word % 2 == 0 and word >= 2 * FIRST_VERSION else None

    def region(self, place: ReadPlace) -> RemoteRegion:
        """Returns the region of an array as it is now."""
        key = place.server, place.region
        if key not in self._regions:
            self._regions[key] = self.doors[place.server].region(place.region)
        return self._regions[key]

    def place(self, server: int, part: str) -> ReadPlace | None:
        """Returns the place of a server's share of an array; None: only snapshots have it."""
        return self._facts[server].places.get(part)

    def _word(self, server: int) -> int:
        value = np.zeros(1, np.uint64)
        self._words[server][:8].read(value).wait(_WAIT_S)
        return int(value[0])


class StoredTensor:
    """A tensor of a store, or a state of the optimizer for it.

    Attributes:
        store: that it is of.
        index: among the tensors.
        state: the name of the state; None: the values.
        spec: its name, dtype and shape.
        size_bytes: of its elements.
        path: for people.
    """

    def __init__(self, store: ReadStore, index: int, state_name: str | None) -> None:
        self.store, self.index, self.state = store, index, state_name
        self.spec: TensorSpec = store.layout.spec.tensors[index]
        self.size_bytes = self.spec.size_bytes
        self.path = self.spec.name if state_name is None else f"{self.spec.name}/{state_name}"
        self._part = VALUES if state_name is None else state(state_name)

    @cached_property
    def is_live(self) -> bool:
        """Tells whether it can be read without a snapshot."""
        return all(
            self.store.place(server, self._part) is not None
            for server in self._servers(0, self.size_bytes)
        )

    def settled_version(self, start: int, stop: int) -> int | None:
        """Returns the version of its bytes [start, stop); None while they are being changed."""
        return self.store.settled(self._servers(start, stop))

    def copy(self, start: int, stop: int, header: bytes = b"") -> bytes:
        """Returns the header and the present bytes [start, stop), perhaps of several versions."""
        pieces: list[bytes | memoryview] = [header]
        under_way = []
        for source in self._sources(start, stop):
            if source.mapped:
                pieces.append(source.memoryview())
            else:
                target = np.empty(source.size_bytes, np.uint8)
                under_way.append(source.read(target))
                pieces.append(target.data)
        for transfer in under_way:
            transfer.wait(60.0)
        return b"".join(pieces)

    def copy_into(self, start: int, stop: int, target: Bytes) -> None:
        """Copies the present bytes [start, stop) into memory of that size."""
        under_way, at = [], 0
        for source in self._sources(start, stop):
            end = at + source.size_bytes
            under_way.append(source.read(target[at:end]))
            at = end
        for transfer in under_way:
            transfer.wait(60.0)

    def _sources(self, start: int, stop: int) -> Iterator[RemoteRegion]:
        """Yields the regions with its bytes [start, stop), piece by piece."""
        first = self.store.layout.places[self.index].start
        for server, begin, end in parts_of(self.store.shares, first + start, first + stop):
            place = self.store.place(server, self._part)
            assert place is not None
            at = place.at + begin - self.store.shares[server].start
            yield self.store.region(place)[at : at + end - begin]

    def _servers(self, start: int, stop: int) -> list[int]:
        """Returns the servers that have a part of it; server 0 for an empty one."""
        first = self.store.layout.places[self.index].start
        parts = parts_of(self.store.shares, first + start, first + stop)
        return [server for server, _, _ in parts] or [0]


def _read_text(door: Peer, name: str) -> bytes:
    region = door.region(name)
    data = np.empty(region.size_bytes, np.uint8)
    region.read(data).wait(_WAIT_S)
    size = int(data[:8].view(np.int64)[0])
    return data[8 : 8 + max(size, 0)].tobytes()
