"""Lays out a store's values as a safetensors file, and finds which server has which bytes.

Pure. The format is 8 bytes with the length of a header, the header in JSON, padded with spaces, and
the tensors without gaps. Tensors of larger elements come first, so that each lies at a multiple of
its elements' size; the header is padded so that the data begin at such a place, and, where that can
be, so that the file fills whole pages: then memory can be the file.
Source: the description of the format in the safetensors repository.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from .layout import ITEM_BYTES, Layout, Share
from .messages import Bytes

PAGE_BYTES = 4096

_ALIGN_BYTES = 64
_NAMES = {
    "float64": "F64", "float32": "F32", "bfloat16": "BF16", "float16": "F16", "int64": "I64",
    "int32": "I32", "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip
_LARGEST_ITEM = max(ITEM_BYTES.values())


class Run(NamedTuple):
    """Bytes [start, stop) of the layout that lie in the file from `at` on."""

    start: int
    stop: int
    at: int


class FileRange(NamedTuple):
    """Bytes [start, stop) of the file that lie in a server's memory from `at` on."""

    start: int
    stop: int
    at: int


class ModelFile:
    """The file of a layout.

    Args:
        layout: of the store.
        metadata: what the header says besides, as text.

    Attributes:
        header: the first bytes, up to the data.
        size_bytes: of the whole.
        places: by tensor, where in the file its bytes lie.
        fills_pages: the file ends where a page does.
    """

    def __init__(self, layout: Layout, metadata: Mapping[str, str]) -> None:
        tensors = layout.spec.tensors
        order = sorted(
            range(len(tensors)),
            key=lambda i: (-_item_bytes(layout, i), layout.places[i].start, i),
        )
        entries: dict[str, object] = {"__metadata__": dict(metadata)}
        offsets, at = {}, 0
        for index in order:
            size = tensors[index].size_bytes
            offsets[index] = at
            entries[tensors[index].name] = {
                "dtype": _NAMES[tensors[index].dtype],
                "shape": list(tensors[index].stored_shape),
                "data_offsets": [at, at + size],
            }
            at += size
        largest = max((_item_bytes(layout, i) for i in order if tensors[i].elements), default=1)
        text = json.dumps(entries).encode()
        self.header, self.fills_pages = _padded(text, at, largest)
        base = len(self.header)
        self.size_bytes = base + at
        self.places = tuple(
            slice(base + offsets[i], base + offsets[i] + tensors[i].size_bytes)
            for i in range(len(tensors))
        )
        self._runs: list[Run] = []
        for index in order:
            place = layout.places[index]
            run = Run(place.start, place.end, base + offsets[index])
            last = self._runs[-1] if self._runs else None
            if last and (last.stop, last.at + last.stop - last.start) == (run.start, run.at):
                self._runs[-1] = Run(last.start, run.stop, last.at)
            elif run.stop > run.start:
                self._runs.append(run)

    def runs(self, share: Share) -> list[Run]:
        """Returns a server's part of the data, as runs of its share."""
        found = []
        for run in self._runs:
            start, stop = share.clip(run.start, run.stop)
            if start < stop:
                found.append(Run(start, stop, run.at + start - run.start))
        return found

    def held(self, share: Share, first: bool) -> list[FileRange]:
        """Returns the ranges of the file in a server's memory, which follow each other there.

        Args:
            share: of the server.
            first: it is the one that has the header, too.
        """
        found = [FileRange(0, len(self.header), 0)] if first else []
        at = len(self.header) if first else 0
        for run in sorted(self.runs(share), key=lambda each: each.at):
            size = run.stop - run.start
            found.append(FileRange(run.at, run.at + size, at))
            at += size
        return found

    def pieces(self, values: Bytes, share: Share, first: bool) -> Iterator[tuple[int, Bytes]]:
        """Yields the pieces of a server's part of the file, each with its place in `held` memory.

        Args:
            values: of the share.
            share: of the server.
            first: it is the one that has the header, too.
        """
        at = 0
        if first:
            yield 0, np.frombuffer(self.header, np.uint8)
            at = len(self.header)
        for run in sorted(self.runs(share), key=lambda each: each.at):
            yield at, values[run.start - share.start : run.stop - share.start]
            at += run.stop - run.start


def model_file(layout: Layout, store: int, version: int) -> ModelFile:
    """Returns the file of a version of a store, which servers and readers lay out alike."""
    metadata = {"format": "pt", "tensorwire.store": str(store), "tensorwire.version": f"{version}"}
    return ModelFile(layout, metadata)


def held_bytes(held: Sequence[FileRange]) -> int:
    """Returns the size of a server's memory for its part of a file."""
    return held[-1].at + held[-1].stop - held[-1].start if held else 0


def _item_bytes(layout: Layout, index: int) -> int:
    tensor = layout.spec.tensors[index]
    return tensor.size_bytes // tensor.elements if tensor.elements else _LARGEST_ITEM


def _padded(text: bytes, data_bytes: int, item_bytes: int) -> tuple[bytes, bool]:
    """Returns the padded header with its length in front; and whether the file fills pages then."""
    size, fills = 8 + len(text), data_bytes % item_bytes == 0
    goal = -data_bytes % PAGE_BYTES if fills else 0
    align = PAGE_BYTES if fills else _ALIGN_BYTES
    size += (goal - size) % align
    length = size - 8
    return length.to_bytes(8, "little") + text.ljust(length), fills
