"""Serves several shares in one process, each as if alone, in a thread of its own.

A share is given to another process only by the end of this one, so that no thread of it can go on
beside its successor.
"""

from __future__ import annotations

import os
import select
import threading
import traceback
from collections.abc import Callable, Sequence

from tensorwire.durability.descriptor_store import DescriptorStore


class Shares:
    """The shares of this process; more may come while it serves them.

    Args:
        serve: waits for what a socket says first, and serves that share until its end; returns
            an exit code, or None where the socket ended before.
    """

    def __init__(self, serve: Callable[[DescriptorStore], int | None]) -> None:
        self._serve = serve
        self._codes: list[int] = []
        self._ended = os.eventfd(0, os.EFD_CLOEXEC)

    def run(self, stores: Sequence[DescriptorStore]) -> int:
        """Returns when the last share has ended, with the largest exit code; 0 if none came.

        Args:
            stores: a socket for each share that may come.
        """
        waiting = {store.descriptor: store for store in stores}
        threads = 0
        poll = select.poll()
        for descriptor in (self._ended, *waiting):
            poll.register(descriptor, select.POLLIN)
        while waiting or threads:
            for descriptor, _ in poll.poll():
                if descriptor == self._ended:
                    os.eventfd_read(self._ended)
                    continue
                poll.unregister(descriptor)
                store = waiting.pop(descriptor)
                if store.has_ended:
                    continue
                threads += 1
                threading.Thread(target=self._run, args=(store,), name="tensorwire-share").start()
            if threads and len(self._codes) == threads:
                break
        return max(self._codes, default=0)

    def _run(self, store: DescriptorStore) -> None:
        try:
            code = self._serve(store)
        except BaseException:
            traceback.print_exc()
            code = 1
        self._codes.append(code or 0)
        os.eventfd_write(self._ended, 1)
