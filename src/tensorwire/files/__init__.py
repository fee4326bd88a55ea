"""Shows a running job as files to readers that are no workers. docs/files.md is the guide."""

from .file_worker import FileWorker
from .reader import JobReader, Read
from .snapshot import ReaderSnapshot, SealedModel
from .store import ReadStore, StoredTensor

__all__ = [
    "FileWorker",
    "JobReader",
    "Read",
    "ReadStore",
    "ReaderSnapshot",
    "SealedModel",
    "StoredTensor",
]
