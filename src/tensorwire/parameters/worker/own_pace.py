"""Gives a worker a store on servers in which each worker steps at its own pace.

The parameters that it sees are in memory of its own, which servers fill while it is in `wait`.
"""
# ruff: noqa: D102 - the methods are described in Store

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from tensorwire.membership.worker import WorkerMember

from ..device import ModelDevice
from ..layout import Spec
from ..messages import Result
from ..modes import Mode, Pace, Paces
from .snapshot import Snapshot
from .store import RemoteStore


class OwnPaceStore(RemoteStore):
    """See `Store`; a version that `wait` returns with has this worker's own number.

    Attributes:
        paces: what servers told of the versions that were adopted.
    """

    def __init__(
        self,
        member: WorkerMember,
        number: int,
        spec: Spec,
        mode: Mode,
        device: ModelDevice | None = None,
    ) -> None:
        self.paces = Paces()
        self._still = 0  # how many blocks of `still` this is in
        self._present = 0  # the version that stands still there
        super().__init__(member, number, spec, None, mode, device)

    def wait(self) -> Result:
        """See `Store`: by now all servers have applied this worker's commits."""
        result = super().wait()
        if result.message:
            self.paces.add(Pace.from_text(result.message))
        return replace(result, message="")

    @contextmanager
    def still(self) -> Iterator[None]:
        """See `Store`. Others may compute meanwhile, and wait in their steps."""
        if self._still == 0:
            self._present = self._asker.pause()
        self._still += 1
        try:
            yield
        finally:
            self._still -= 1
            if self._still == 0 and not self.reason():
                self._asker.go_on()

    def snapshot(self) -> Snapshot:
        with self.still():
            return self._asker.make(self._present)
