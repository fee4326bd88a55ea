"""Builds the tree of files of a running job: the names, sizes and contents.

It stands on a `JobReader`, and knows neither fsspec nor a terminal. Errors are OSErrors with the
errno that docs/files.md tells.
"""

from __future__ import annotations

import errno
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from tensorwire.parameters.model_file import model_file

from .checkpoints import CHECKPOINTS, CheckpointDesk, checkpoints_folder
from .control_tree import CONTROL, control_folder
from .drafts import Drafts, DraftWriting, is_written
from .errors import as_os_errors, refuse
from .gradient_tree import GRADIENTS, GradientFolders, gradients_folder
from .names import NPY, file_name, tensor_name, tensor_of
from .npy import npy_header
from .owner import JobOwner
from .reader import JobReader
from .snapshot import ReaderSnapshot, SealedModel
from .store import ReadStore, StoredTensor
from .tree_items import (
    READABLE,
    WRITABLE,
    Changes,
    FileContent,
    FileWriting,
    Folder,
    Item,
    Text,
    TreeEntry,
    fixed,
)

MODEL = "model.safetensors"


class Tree:
    """The files of a job. Any thread. Closing it closes the reader.

    Args:
        reader: of the job.

    Attributes:
        reader: as given.
        gradients: the files of workers whose gradients come from there.
        owner: controls the job, where this user may.
        desk: where memory for checkpoints is asked for.
        changes: of the files of status.
    """

    def __init__(self, reader: JobReader) -> None:
        self.reader = reader
        self._snapshots: dict[tuple[int, int], ReaderSnapshot] = {}
        self._takes: Counter[tuple[int, int]] = Counter()
        self._taking = threading.Lock()
        self._seen: dict[int, float] = {}
        self.changes = Changes()
        self.gradients = GradientFolders(reader.address)
        self.owner = JobOwner(reader)
        self.desk = CheckpointDesk(self.owner)
        self._drafts: dict[int, Drafts] = {}

    def close(self) -> None:
        """Gives back the snapshots that `take` holds, and ends the connections. Idempotent."""
        self._snapshots.clear()
        self._takes.clear()
        self._drafts.clear()
        self.gradients.close()
        self.owner.close()
        self.reader.close()

    # ---- what there is

    def entry(self, path: str) -> TreeEntry:
        """Returns the entry at a path; raises ENOENT or ENOTDIR."""
        parts = _parts(path)
        with as_os_errors(path):
            return self._find(path, parts).entry()

    def entries(self, path: str) -> list[TreeEntry]:
        """Returns the entries of a folder; raises ENOENT or ENOTDIR."""
        parts = _parts(path)
        with as_os_errors(path):
            found = self._find(path, parts)
            if not isinstance(found, Folder):
                raise refuse(errno.ENOTDIR, path)
            return [found.child(name).entry() for name in found.names()]

    # ---- contents

    def open(self, path: str) -> FileContent:
        """Returns the content of a file, of one version until it is closed, or raises OSError."""
        parts = _parts(path)
        with as_os_errors(path):
            found = self._find(path, parts)
            if isinstance(found, Folder):
                raise refuse(errno.EISDIR, path)
            return found.open()

    def open_for_writing(self, path: str) -> FileWriting:
        """Returns the writer of a writable file; raises EROFS, EISDIR and others."""
        parts = _parts(path)
        with as_os_errors(path):
            try:
                found = self._find(path, parts)
            except FileNotFoundError:  # nothing can be created
                raise refuse(errno.EROFS, path) from None
            if isinstance(found, Folder):
                raise refuse(errno.EISDIR, path)
            return found.open_for_writing()

    def sealed(self, path: str) -> SealedModel:
        """Returns a model.safetensors as a file of this host that can be mapped, or raises EINVAL.

        `SealedModel` says for how long and for what it can be used.
        """
        parts = _parts(path)
        with as_os_errors(path):
            found = self._find(path, parts)
            if not isinstance(found, _ModelItem):
                raise refuse(errno.EINVAL, path, f"only a {MODEL} can be mapped")
            snapshot = found.snapshot()
            try:
                return snapshot.sealed()
            except BaseException:
                snapshot.close()
                raise

    # ---- snapshots

    def take(self, store: int = 0, whole: bool = True) -> int:
        """Takes a snapshot and holds it, under snapshots/; returns its version.

        Taken several times at one version it is one folder, which stays until it was released as
        often, and has the optimizer's state if one of them asked for it.

        Args:
            store: number of the store.
            whole: with the optimizer's state.
        """
        with as_os_errors("snapshots"):
            snapshot = self.reader.snapshot(store, whole=whole)
        key = store, snapshot.version
        with self._taking:
            needless = self._snapshots.get(key)
            if needless is None or (snapshot.whole and not needless.whole):
                self._snapshots[key] = snapshot
            else:
                needless = snapshot
            self._takes[key] += 1
        if needless is not None:
            needless.close()
        return snapshot.version

    def release(self, version: int, store: int = 0) -> None:
        """Gives a snapshot back that `take` holds; raises ENOENT if it does not."""
        key = store, version
        with self._taking:
            if key not in self._snapshots:
                raise refuse(errno.ENOENT, f"snapshots/{version}", "this process does not hold it")
            self._takes[key] -= 1
            if self._takes[key] > 0:
                return  # somebody else has taken it too
            snapshot = self._snapshots.pop(key)
            del self._takes[key]
        with as_os_errors(f"snapshots/{version}"):
            snapshot.close()

    def taken(self) -> list[tuple[int, int]]:
        """Returns the stores and versions of the snapshots that `take` holds."""
        return sorted(self._snapshots)

    # ---- parameters that are written

    def drafts(self, store: ReadStore) -> Drafts:
        """Returns the values written through this process for a store."""
        found = self._drafts.get(store.number)
        if found is None or not found.goes_on_with(store):
            found = self._drafts[store.number] = Drafts(store)
        return found

    def written(self) -> list[str]:
        """Returns the names of the files that are written and not committed."""
        found = [self.reader.store(n) for n in list(self._drafts) if self.reader.has_store(n)]
        return [name for store in found for name in self.drafts(store).names]

    def discard_written(self) -> None:
        """Discards written parameters, which will not be committed."""
        self._drafts.clear()

    def commit_written(self, version: int, allow_nan: bool, path: str) -> None:
        """Commits written parameters for when the job goes on; raises like `Drafts.commit`."""
        found = self.owner.held()
        if found is None:
            raise refuse(errno.EROFS, path, "the job is not paused: write 1 into control/pause")
        self.drafts(found[0]).commit(self.owner, version, allow_nan, path)

    # ---- for what is in the tree

    def version(self) -> int:
        """Returns the version in place of the first store."""
        return self.reader.store(_first(self)).version()

    def seen(self, version: int) -> float:
        """Returns the time when this process saw a version first."""
        if len(self._seen) > 1000:
            self._seen.clear()
        return self._seen.setdefault(version, time.time())

    def held_snapshot(self, store: int, version: int, whole: bool) -> ReaderSnapshot:
        """Returns one more hold on an existing snapshot."""
        mine = self._snapshots.get((store, version))
        whole = whole or (mine is not None and mine.whole) or self._is_whole(store, version)
        return self.reader.snapshot(store, version=version, whole=whole)

    def _is_whole(self, store: int, version: int) -> bool:
        return [version, True] in self.snapshots(store)

    def snapshots(self, store: int) -> list[list[Any]]:
        """Returns the versions of which there are snapshots, and whether they have the state."""
        mine = [[v, s.whole] for (number, v), s in self._snapshots.items() if number == store]
        told = self.reader.status()["snapshots"].get(str(store), [])
        return sorted(mine + [each for each in told if each not in mine])

    def _find(self, path: str, parts: Sequence[str]) -> Item:
        node: Item = _root(self)
        for number, part in enumerate(parts):
            if not isinstance(node, Folder):
                raise refuse(errno.ENOTDIR, "/".join(parts[:number]))
            folder = node
            try:
                node = folder.child(part)
            except (LookupError, ValueError):
                if parts[0] in ("params", "optimizer"):
                    with suppress(LookupError, ValueError):
                        folder.child(f"{part}.npy")
                        raise refuse(errno.ENOENT, path, f"the file is {part}.npy") from None
                raise refuse(errno.ENOENT, path) from None
        return node


class _Array(Item):
    """A tensor or state as an .npy file, as it is now or in a snapshot."""

    def __init__(
        self, tree: Tree, path: str, tensor: StoredTensor, version: int | None = None
    ) -> None:
        super().__init__(path)
        self.tree = tree
        self._tensor, self._version = tensor, version
        self._header = npy_header(tensor.spec.dtype, tensor.spec.stored_shape)

    def entry(self) -> TreeEntry:
        spec, version = self._tensor.spec, self._version
        version = self._tensor.store.version() if version is None else version
        size = len(self._header) + self._tensor.size_bytes
        seen = self.tree.seen(version)
        mode = WRITABLE if self._is_open_to_writers() else READABLE
        return TreeEntry(self.path, False, size, version, spec.dtype, spec.stored_shape, seen, mode)

    def _is_open_to_writers(self) -> bool:
        """Tells whether it is a parameter of a paused job."""
        if self._version is not None or self._tensor.state is not None:
            return False
        return is_written(self._tensor) and self._tensor.store.held_version() is not None

    def open_for_writing(self) -> FileWriting:
        if self._version is not None or self._tensor.state is not None:
            raise refuse(errno.EROFS, self.path)
        drafts = self.tree.drafts(self._tensor.store)
        return DraftWriting(drafts, self._tensor, lambda: self._live().read(), self.path)

    def open(self) -> FileContent:
        if self._version is None:
            return self._live()
        number = self._tensor.store.number
        needs_state = self._tensor.state is not None
        with self.tree.held_snapshot(number, self._version, needs_state) as snapshot:
            data = snapshot.tensor_bytes(self._tensor, self._header)
        return FileContent.of_bytes(data, self._version)

    def _live(self) -> FileContent:
        """Returns content of one version that the first read fetches; all of it if need be."""
        size = len(self._header) + self._tensor.size_bytes
        kept: list[bytes | memoryview] = []

        def whole() -> bytes | memoryview:
            if not kept:
                # numpy's memory has huge pages: fresh, it costs half as much as memory of `bytes`.
                data = np.empty(size, np.uint8)
                base = len(self._header)
                data[:base] = np.frombuffer(self._header, np.uint8)
                self.tree.reader.read_into(self._tensor, data[base:])
                kept.append(data.data.toreadonly())
            return kept[0]

        def read(start: int, stop: int) -> bytes:
            if not kept:
                kept.append(self.tree.reader.read(self._tensor, header=self._header).data)
            if isinstance(kept[0], bytes) and (start, stop) == (0, size):
                return kept[0]
            return bytes(kept[0][start:stop])

        def read_part(start: int, stop: int) -> bytes:
            base, head = len(self._header), self._header[start:stop]
            if stop <= base:
                return head
            first, last = max(start - base, 0), stop - base
            return self.tree.reader.read(self._tensor, first, last, head).data

        return FileContent(size, read, None, kept.clear, self.path, read_part, whole=whole)


class _ModelItem(Item):
    """A model.safetensors: the newest snapshot, or one that there is."""

    def __init__(self, tree: Tree, path: str, store: ReadStore, version: int | None) -> None:
        super().__init__(path)
        self.tree = tree
        self._store, self._version = store, version

    def entry(self) -> TreeEntry:
        version = self._store.version() if self._version is None else self._version
        size = model_file(self._store.layout, self._store.number, version).size_bytes
        return TreeEntry(self.path, False, size, version, modified=self.tree.seen(version))

    def snapshot(self) -> ReaderSnapshot:
        """Returns a snapshot with the content, until it is closed."""
        number = self._store.number
        if self._version is None:
            return self.tree.reader.snapshot(number)
        return self.tree.held_snapshot(number, self._version, False)

    def open(self) -> FileContent:
        snapshot = self.snapshot()
        return FileContent(
            snapshot.size_bytes,
            snapshot.read,
            snapshot.version,
            snapshot.close,
            self.path,
            buffers=snapshot.mapped_pieces,
            backing=lambda: snapshot.server_path,
        )


# ---- the folders


def _root(tree: Tree) -> Folder:
    def names() -> list[str]:
        numbers = tree.reader.stores()
        many = ["stores"] if len(numbers) > 1 else []
        own = _of_store(tree, "", min(numbers)).names() if numbers else []
        grads = [GRADIENTS] if tree.gradients.ranks() else []
        return sorted([*own, *grads, CHECKPOINTS, CONTROL, "status", *many])

    def child(path: str, name: str) -> Item:
        if name == "status":
            return _status(tree, path)
        if name == CHECKPOINTS:
            return checkpoints_folder(tree.reader, path)
        if name == CONTROL:
            return control_folder(tree, path)
        if name == GRADIENTS and tree.gradients.ranks():
            return gradients_folder(path, tree.gradients)
        if name == "stores":
            return Folder(
                path,
                lambda: [str(n) for n in tree.reader.stores() if tree.reader.has_store(n)],
                lambda at, each: _of_store(tree, at, _number(each)),
            )
        numbers = tree.reader.stores() if not tree.reader.has_store(0) else [0]
        if not numbers:
            raise LookupError(name)
        return _of_store(tree, "", min(numbers)).child(name)

    return Folder("", names, child)


def _of_store(tree: Tree, path: str, number: int) -> Folder:
    store = tree.reader.store(number)
    return fixed(
        path,
        {
            "params": lambda at: _params(tree, at, store, None),
            "optimizer": lambda at: _optimizer(tree, at, store, None),
            MODEL: lambda at: _ModelItem(tree, at, store, None),
            "snapshots": lambda at: _snapshots(tree, at, store),
        },
    )


def _params(tree: Tree, path: str, store: ReadStore, version: int | None) -> Folder:
    def child(at: str, name: str) -> Item:
        return _Array(tree, at, store.tensor(tensor_of(name)), version)

    return Folder(path, lambda: [f"{file_name(each)}{NPY}" for each in store.names], child)


def _optimizer(tree: Tree, path: str, store: ReadStore, version: int | None) -> Folder:
    trained = set(store.layout.trained) if store.states else set()
    names = [name for index, name in enumerate(store.names) if index in trained]

    def child(at: str, name: str) -> Item:
        tensor = tensor_name(name)
        if tensor not in names or file_name(tensor) != name:
            raise LookupError(name)

        def array(at: str, state: str) -> Item:
            return _Array(tree, at, store.tensor(tensor, tensor_of(state)), version)

        return Folder(at, lambda: [f"{file_name(s)}{NPY}" for s in store.states], array)

    return Folder(path, lambda: [file_name(each) for each in names], child)


def _snapshots(tree: Tree, path: str, store: ReadStore) -> Folder:
    def listed() -> dict[int, bool]:
        return dict(tree.snapshots(store.number))

    def child(at: str, name: str) -> Item:
        version = _number(name)
        whole = listed()[version]
        children: dict[str, Callable[[str], Item]] = {
            "params": lambda at: _params(tree, at, store, version),
            MODEL: lambda at: _ModelItem(tree, at, store, version),
        }
        if whole:
            children["optimizer"] = lambda at: _optimizer(tree, at, store, version)
        return fixed(at, children)

    return Folder(path, lambda: [str(each) for each in listed()], child)


def _status(tree: Tree, path: str) -> Folder:
    def text(make: Callable[[dict[str, Any]], Iterator[object]]) -> Callable[[str], Item]:
        return lambda at: Text(
            at, tree.changes, lambda: "".join(f"{each}\n" for each in make(tree.reader.status()))
        )

    def version(at: str) -> Item:
        return Text(at, tree.changes, lambda: f"{tree.version()}\n")

    def of_stores(name: str) -> Callable[[str], Item]:
        return text(lambda told: (each[name] for each in told["stores"]))

    return fixed(
        path,
        {
            "version": version,
            "optimizer": of_stores("optimizer"),
            "tensors": of_stores("tensors"),
            "workers": text(
                lambda told: (
                    " ".join(str(each.get(k, "-")) for k in ("rank", "state", "pid", "transport"))
                    for each in told["workers"]
                )
            ),
            "servers": text(lambda told: iter(told["servers"])),
            "doors": text(lambda told: iter(told["doors"])),
            "snapshots": text(
                lambda told: (
                    f"{number} {v} {'whole' if whole else 'values'}"
                    for number, held in told["snapshots"].items()
                    for v, whole in held
                )
            ),
            "job.json": text(lambda told: iter([json.dumps(told, indent=1)])),
        },
    )


def _first(tree: Tree) -> int:
    if tree.reader.has_store(0):
        return 0
    numbers = tree.reader.stores()
    if not numbers:
        raise LookupError("no optimizer is open")
    return min(numbers)


def _number(text: str) -> int:
    if not (text.isascii() and text.isdigit()) or str(int(text)) != text:
        raise LookupError(text)
    return int(text)


def _parts(path: str) -> list[str]:
    parts = [each for each in path.split("/") if each not in ("", ".")]
    if ".." in parts or "\0" in path:
        raise refuse(errno.EINVAL, path, "a path of a job has no '..' and no NUL")
    return parts
