"""Adds the checkpoints that are written through a mount to the tree of the job.

A checkpoint is in the tree of the job when it is complete. A program that writes one through a
mount has to see its files before that, and nobody else does.
"""

from __future__ import annotations

import contextlib
import errno
import fnmatch
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

from tensorwire.parameters.checkpoint_files import METADATA

from .checkpoints import CHECKPOINTS, CheckpointWriting, is_checkpoint
from .errors import refuse
from .tree import Tree
from .tree_items import WRITABLE, FileContent, FileWriting, TreeEntry

_POLLED = ("status/version", "grads/*/version", "control/state")


@dataclass
class _File:
    """A file of a checkpoint that is not complete; `writing` is None once it is closed."""

    writing: CheckpointWriting | None
    size_bytes: int = 0
    modified: float = 0.0

    @property
    def size(self) -> int:
        return self.size_bytes if self.writing is None else self.writing.size_bytes


class MountedTree:
    """The tree that a mount shows. Any thread. The methods raise OSError, as for `Tree`.

    Args:
        tree: of the job.
    """

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self._lock = threading.Lock()  # guards what follows, also while server 0 is awaited
        self._files: dict[str, _File] = {}
        self._folders: dict[str, float] = {}  # that are not complete, and when they were made

    # ---- what there is

    def entry(self, path: str) -> TreeEntry:
        """Returns the entry at a path."""
        if (file := self._files.get(path)) is not None:
            return _file_entry(path, file)
        if (made := self._folders.get(path)) is not None:
            return _folder_entry(path, made)
        return _writable(self._tree.entry(path))

    def entries(self, path: str) -> list[TreeEntry]:
        """Returns the entries of a folder."""
        files, folders = list(self._files.items()), list(self._folders.items())
        made = [_file_entry(*each) for each in files] + [_folder_entry(*each) for each in folders]
        pending = {each.path: each for each in made if each.path.rpartition("/")[0] == path}
        found = (
            [] if path in dict(folders) else [_writable(each) for each in self._tree.entries(path)]
        )
        return [*(each for each in found if each.path not in pending), *pending.values()]

    # ---- contents

    def open(self, path: str) -> FileContent:
        """Returns the content of a file."""
        if path in self._files:
            raise refuse(errno.EBUSY, path, "its checkpoint is not complete")
        return self._tree.open(path)

    def open_for_writing(self, path: str, flags: int = 0) -> FileWriting:
        """Returns the writer of an existing file.

        Args:
            path: of the file.
            flags: of open(2).
        """
        if not is_checkpoint(path):
            return self._tree.open_for_writing(path)
        with self._lock:
            file = self._files.get(path)
            if file is not None and file.writing is not None:
                raise refuse(errno.EBUSY, path, "another program writes it")
            if flags & os.O_ACCMODE == os.O_RDONLY:
                raise refuse(errno.EBUSY, path, "its checkpoint is not complete")
            if not flags & os.O_TRUNC:
                raise refuse(
                    errno.ESPIPE, path, "a checkpoint is written from start to end, and anew"
                )
            return self._begin(path)

    def create(self, path: str) -> FileWriting:
        """Returns the writer of a new file."""
        if not is_checkpoint(path):
            raise refuse(errno.EROFS, path)
        with self._lock:
            return self._begin(path)

    def truncate(self, path: str, size: int) -> None:
        """Gives the file this size."""
        file = self._files.get(path)
        writing = None if file is None else file.writing
        if writing is None:
            if is_checkpoint(path):
                raise refuse(errno.ESPIPE, path, "a checkpoint is written from start to end")
            self._tree.open_for_writing(path).truncate(size)
        else:
            try:
                writing.truncate(size)
            except OSError:
                self.failed(path)
                raise

    def _begin(self, path: str) -> CheckpointWriting:
        folder = path.rpartition("/")[0]
        if folder != CHECKPOINTS and folder not in self._folders:
            if folder in (each.path for each in self._tree.entries(CHECKPOINTS)):
                raise refuse(
                    errno.EPERM, path, "its checkpoint is complete: remove it, and make it anew"
                )
            raise refuse(errno.ESTALE, path, "its checkpoint is gone: make it anew")
        with self._forgotten_if_gone(path):
            writing = self._tree.desk.write(path)
        self._files[path] = _File(writing, modified=time.time())
        return writing

    @contextlib.contextmanager
    def _forgotten_if_gone(self, path: str) -> Iterator[None]:
        """Hides a checkpoint if the block shows that server 0 does not have it any more."""
        try:
            yield
        except OSError as error:
            if error.errno in (errno.ESTALE, errno.ENOENT):
                self._forget(path)
            raise

    def give_up(self, path: str, writing: CheckpointWriting) -> None:
        """Gives up a file that is not whole, as the mount ends before it is closed."""
        with self._lock, contextlib.suppress(OSError):  # it goes with this process's connection
            self._forget(path)
            writing.abandon()

    def closed(self, path: str, writing: FileWriting) -> None:
        """Finishes a whole file; with its last one a checkpoint is complete."""
        with self._lock:
            file = self._files.get(path)
            if file is None or file.writing is not writing:
                return  # it was closed before, or is gone
            try:
                file.writing.sync()
            except OSError:
                self._forget(path)
                raise
            file.size_bytes, file.writing = file.writing.size_bytes, None
            if path.count("/") == 1 or path.endswith(f"/{METADATA}"):
                self._forget(path)

    def failed(self, path: str) -> None:
        """Forgets the checkpoint of a file that could not be written."""
        with self._lock:
            self._forget(path)

    # ---- what a checkpoint is

    def make_folder(self, path: str) -> None:
        """Begins a checkpoint of several files."""
        if not is_checkpoint(path):
            raise refuse(errno.EROFS, path)
        with self._lock:
            if path in self._folders or path in self._files:
                raise refuse(errno.EEXIST, path)
            self._tree.desk.make_folder(path)
            self._folders[path] = time.time()

    def complete(self, path: str) -> None:
        """Completes a checkpoint whose files are all written, also without a `.metadata`."""
        with self._lock:
            if path in self._folders:
                with self._forgotten_if_gone(path):
                    self._tree.desk.complete(path)
                self._forget(path)

    def remove(self, path: str) -> None:
        """Removes a file, or a checkpoint that is a file."""
        if not is_checkpoint(path):
            raise refuse(errno.EROFS, path)
        with self._lock:
            file = self._files.get(path)
            self._tree.desk.remove(path)
            if file is not None and file.writing is not None:
                self._forget(path)  # without it there is no checkpoint
            self._files.pop(path, None)

    def remove_folder(self, path: str) -> None:
        """Removes a checkpoint with its content."""
        if not is_checkpoint(path):
            raise refuse(errno.EROFS, path)
        with self._lock:
            with self._forgotten_if_gone(path):
                self._tree.desk.remove(path)
            self._forget(path)

    def rename(self, path: str, to: str, keep: bool = False) -> None:
        """Renames a file of a checkpoint that is being written; `keep`: only to a new name."""
        if not (is_checkpoint(path) and is_checkpoint(to)):
            raise refuse(errno.EROFS, path)
        with self._lock:
            if keep and to in self._files:
                raise refuse(errno.EEXIST, to)
            if path.rpartition("/")[0] == CHECKPOINTS or path not in self._files:
                raise refuse(
                    errno.EXDEV, path, "only a file of a checkpoint that is written is renamed"
                )
            self._tree.desk.rename(path, to)
            self._files[to] = self._files.pop(path)
            if to.endswith(f"/{METADATA}"):
                self._forget(to)

    def _forget(self, path: str) -> None:
        """Forgets a checkpoint, so that only the job's tree shows it."""
        name = "/".join(path.split("/")[:2])
        self._folders.pop(name, None)
        for each in [each for each in self._files if f"{each}/".startswith(f"{name}/")]:
            del self._files[each]


def is_polled(path: str) -> bool:
    """Tells whether poll(2) waits for a change of the file."""
    return any(fnmatch.fnmatchcase(path, pattern) for pattern in _POLLED)


def _file_entry(path: str, file: _File) -> TreeEntry:
    return TreeEntry(path, False, file.size, modified=file.modified, mode=WRITABLE)


def _folder_entry(path: str, made: float) -> TreeEntry:
    return TreeEntry(path, True, modified=made, mode=WRITABLE)


def _writable(found: TreeEntry) -> TreeEntry:
    """Returns the entry, writable if the job's user may write checkpoints there."""
    if found.path == CHECKPOINTS or is_checkpoint(found.path):
        return replace(found, mode=WRITABLE)
    return found
