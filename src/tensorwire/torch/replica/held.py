"""Records the gradients and buffers of an optimizer while another one steps, for a replacement.

A replacement computes its last batch again. If one of several optimizers had stepped, it computes
with the parameters which that step has made, and the results differ: other gradients for optimizers
that had not stepped, other buffers. So before a commit is noted, the places of other optimizers'
gradients at the servers and the buffers are noted too; where the script gets to that commit once
more, gradients and buffers are restored.

Gradients at the servers may be overwritten: by a process that computes the batch again, which
therefore pushes and produces nothing before; and by a further backward pass of this process, which
is noted before it happens.
"""

from __future__ import annotations

import pickle

import numpy as np
import torch

from tensorwire.durability.history import NoteKind
from tensorwire.failpoints import failpoint
from tensorwire.parameters import Store

from ..session import Session
from .buffers import Buffers
from .reducer import Reducer


class Held:
    """The saved gradients and buffers of one optimizer's replica.

    Args:
        session: of the worker.
        store: of the replica.
        reducer: its gradients.
        buffers: of its model.
    """

    def __init__(self, session: Session, store: Store, reducer: Reducer, buffers: Buffers) -> None:
        self._session, self._store = session, store
        self._reducer, self._buffers = reducer, buffers
        self._noted = -1  # which of the reducer's gradients, by its `begun`
        self._changed = -1  # the same, of the gradients that came again after that
        self._watches = False

    def note(self, steps: bool) -> None:
        """Notes gradients and buffers before an optimizer commits; `steps`: it is this one."""
        if not steps:
            self._note_gradients()
        own = self._buffers.own(steps)
        data = {name: each.tobytes() for name, each in own}
        if not data and not self._store.lies_ahead(NoteKind.BUFFERS, self._reducer.slice_index):
            return
        body = pickle.dumps(data)
        _, former = self._store.take_or_note(NoteKind.BUFFERS, self._reducer.slice_index, body)
        if former is not None:
            self._buffers.put(self._store, pickle.loads(former))  # the worker's own

    def _note_gradients(self) -> None:
        reducer, slice_index = self._reducer, self._reducer.slice_index
        begun = reducer.begun
        found = None if begun in (self._noted, self._changed) else reducer.lying()
        ahead = self._store.lies_ahead(NoteKind.GRADIENTS, slice_index)
        if found is None and not ahead:
            return
        present, blocks = found or (b"", ())
        data = present + np.array(blocks, np.uint32).tobytes()
        is_noted, former = self._store.take_or_note(NoteKind.GRADIENTS, slice_index, data)
        failpoint("gradients.noted")
        if not is_noted:
            return
        self._noted = begun
        if not self._watches:
            self._watches = True
            reducer.watch(self._on_change)
        if former is None or self._store.is_committed(slice_index):
            return
        if self._store.lies_ahead(NoteKind.CHANGED, slice_index):
            reducer.lacks = True
            return
        count = len(self._store.layout.spec.tensors)
        reducer.put_back(former[:count], np.frombuffer(former[count:], np.uint32).tolist())

    def _on_change(self, gradient: torch.Tensor) -> None:
        """Notes that a gradient comes, in backward's thread, before it is added."""
        if self._noted == self._reducer.begun:
            self._noted, self._changed = -1, self._noted
            self._store.take_or_note(NoteKind.CHANGED, self._reducer.slice_index, b"")

    def forget(self) -> None:
        """Forgets earlier notes, because a position is about to be noted."""
        self._noted = -1
