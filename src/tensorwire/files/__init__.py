"""The live job as files: for readers that are no workers. docs/files.md is the guide."""

from .reader import JobReader, Read
from .snapshot import ReaderSnapshot, SealedModel
from .store import ReadStore, StoredTensor

__all__ = ["JobReader", "Read", "ReadStore", "ReaderSnapshot", "SealedModel", "StoredTensor"]
