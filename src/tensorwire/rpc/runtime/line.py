"""Moves frames between two ends: many threads write in turns, one at a time reads.

A thread that sends while another one writes leaves its frames to that thread, which writes all of
them at once, in order. Knows the header of a frame, and nothing of calls.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from tensorwire.errors import TensorwireError

from .. import logs
from ..payload.threads import THREADS
from .flow import Waiter, open_latch
from .frames import Frame, FrameError
from .ring import Rings

_BATCH_BYTES = 1 << 17
"""The size of a write that may wait for the one before, which the other end handles meanwhile."""
_LOOP_BATCH_BYTES = 1 << 18
"""The size of a write in an event loop, which may not wait: a thread that wakes at the answer to
one write starts the next, which costs more than the earlier arrival at the other end saves.
"""
_SLICE_S = 0.05
_LAZY_S = 0.004
_MOST_DOUBTS = 50
"""The number of times `LOOK_S` that a thread waits for a turn whose owner is unknown."""
MOST_BACKLOG = 256
"""The most frames that wait for a client: one that takes no answers gets no more calls."""
LOOK_S = 0.001
_SAME_VERSION = "use the same version of tensorwire at both ends"
_INTERRUPTED = (
    "a handler of a signal has interrupted this thread while it read or wrote for this channel, "
    "so it cannot wait for a call of the same one; let it leave that to another thread"
)


class LineEnd(Protocol):
    """The receiver of all that arrives at one end. Called by the thread that reads.

    Attributes:
        patient: a thread that sends may wait a millisecond for the frames sent before.
    """

    patient: bool

    def arrived(self, frame: Frame) -> None:
        """Handles a frame; FrameError if it makes no sense here."""

    def over(self, reason: str) -> None:
        """Learns, once, that nothing arrives any more."""


class Line:
    """One end of a line of frames between two processes. Any thread may send.

    Args:
        rings: the memory; the node of this end is closed if the other end sends invalid frames.
        end: gets the frames that arrive.

    Attributes:
        is_over: nothing arrives any more.
        outbox: the frames that wait for room at the other end.
        may_nest: the thread that reads sleeps, or runs a user's code: that code may read too.
        writer: the thread that writes now, 0 if none does.
    """

    def __init__(self, rings: Rings, end: LineEnd) -> None:
        self._node = rings.node
        self._word = rings.memory.word(0)
        self._peer = rings.peer
        self._reader, self._writer = rings.reader(), rings.writer()
        self._batch_bytes = _BATCH_BYTES if end.patient else _LOOP_BATCH_BYTES
        self._end = end
        self.outbox: deque[bytes] = deque()
        self._writing = threading.RLock()
        self._blocked = False
        self._holder = 0
        self.is_over = False
        self._ending = threading.Lock()
        self.may_nest = False
        self._unhandled = False  # perhaps: a reading thread was interrupted before it handled
        self.writer = 0

    def send(self, frames: Sequence[bytes]) -> None:
        """Sends frames after those that were sent before, without waiting."""
        self.outbox.extend(frames)
        if self._holder != threading.get_ident():
            self.flush()

    def hold(self) -> None:
        """Holds back the frames of this thread until `release`, or until another thread sends."""
        self._holder = threading.get_ident()

    def release(self) -> None:
        """Takes back a `hold` of this thread, and sends the frames that were held."""
        self._holder = 0
        self.flush()

    def flush(self) -> None:
        """Writes the frames that were sent, unless another thread does, or there is no room."""
        writing, me, starting = self._writing, threading.get_ident(), False
        # A handler of a signal, when this thread was about to write.
        within = writing._is_owned()  # type: ignore[attr-defined]
        try:
            while self.outbox and not self._blocked and self.writer != me:
                if not writing.acquire(blocking=False):
                    return
                if not self._blocked:  # it may have become so since
                    self.writer = me
                    self._blocked = starting = not self._write_out()
                    if starting:
                        threading.Thread(
                            target=self._write_later, name="tensorwire-rpc-send", daemon=True
                        ).start()
                        starting = False
                    self.writer = 0
                writing.release()
        except BaseException as error:  # anywhere: others may have left their frames to this thread
            if within:
                raise  # as it will there
            while writing._is_owned():  # type: ignore[attr-defined]
                self.writer = 0
                writing.release()
            if starting:
                self._give_up(error)
            elif self.outbox:
                THREADS.run(self.flush)
            raise

    def _write_out(self) -> bool:
        """Writes as many frames as there is room for; False if some are left."""
        outbox = self.outbox
        try:
            return self._writer.write_out(outbox, self._batch_bytes, self._end.patient)
        except TensorwireError:
            outbox.clear()  # the thread that reads finds out why
        except FrameError as error:
            outbox.clear()
            self._fail(error)
        except BaseException as error:
            outbox.clear()
            self._give_up(error)
            raise
        return True

    def _write_later(self) -> None:
        """Waits for room and writes, in a thread of its own, until everything is written."""
        while True:
            error = None
            try:
                self._writer.wait_room(len(self.outbox[0]), None)
            except IndexError:
                pass  # it was given up
            except TensorwireError as found:
                error = found
            with self._writing:
                self.writer = threading.get_ident()
                try:
                    if error is not None:
                        self.outbox.clear()  # the thread that reads finds out why
                    self._blocked = not self._write_out()
                finally:
                    self.writer = 0
            if not self._blocked:
                self.flush()  # frames that came in between
                return

    def drain(self, timeout_s: float) -> None:
        """Waits until all that was sent is at the other end, at most `timeout_s` seconds."""
        until = time.monotonic() + timeout_s
        while self.outbox and not self.is_over and time.monotonic() < until:
            time.sleep(0.001)
        with self._writing:
            try:
                self._writer.drain(max(until - time.monotonic(), 0.0))
            except TensorwireError:
                pass  # the other end is gone, or does not read

    def read(self, timeout_s: float | None) -> None:
        """Waits until something arrives, and handles it. One thread at a time."""
        if self._unhandled:
            self.read_now()
            return
        self._unhandled = self.may_nest = True  # a handler of a signal runs in here
        try:
            if not self._reader.read(timeout_s):
                self._unhandled = False
                return
        except FrameError as error:
            self.may_nest = False
            self._fail(error)
            return
        except TensorwireError as error:
            self.read_now()  # the last frames of the other end may be there still
            self.end(str(error))
            return
        self._handle()

    async def serve(self, most_backlog: int | None = None) -> None:
        """Reads until it is over, as a task of the running event loop.

        Args:
            most_backlog: pauses reading while more frames than this wait for the other end; None:
                never pauses.
        """
        while not self.is_over:
            while most_backlog is not None and len(self.outbox) > most_backlog and not self.is_over:
                await asyncio.sleep(LOOK_S)
            try:
                await self._word.reached(self._reader.awaited, peer=self._peer)
            except TensorwireError as error:
                self.read_now()
                self.end(str(error))
                return
            self.read_now()
            await asyncio.sleep(0)  # others have their turn, whatever arrives

    def read_now(self) -> None:
        """Handles all frames that are there, first the ones that were taken and not handled yet."""
        self.may_nest, self._unhandled = False, True
        try:
            self._reader.take()
        except TensorwireError as error:
            self.end(str(error))
        except FrameError as error:
            self._fail(error)
        else:
            self._handle()

    def _handle(self) -> None:
        """Passes the frames that the reader has taken to the end of this line."""
        self.may_nest = False
        take, arrived = self._reader.next, self._end.arrived
        try:
            while (frame := take()) is not None:
                arrived(frame)
            self._unhandled = False
        except TensorwireError as error:
            self.end(str(error))
        except FrameError as error:
            self._fail(error)
        except BaseException as error:
            self._give_up(error)
            raise

    def _fail(self, error: Exception) -> None:
        text = f"the other end broke the protocol of tensorwire.rpc: {error}; {_SAME_VERSION}"
        logs.OWN.warning("a connection was closed, because %s", text)
        self.end(text, closes_node=True)

    def _give_up(self, error: BaseException) -> None:
        """Ends the line: this thread was interrupted, perhaps with frames of other threads."""
        reason = f"a thread was interrupted that read or wrote for all: {error!r}"
        self.end(reason, closes_node=True)

    def end(self, reason: str, *, closes_node: bool = False) -> None:
        """Tells this end that nothing arrives any more; once.

        Args:
            reason: for its calls.
            closes_node: closes the node too, which is all that the two ends share.
        """
        with self._ending:
            before, self.is_over = self.is_over, True
        # First: a thread that learns of the end must not send calls and payload by this node.
        try:
            if closes_node:
                self._node.close()
        finally:
            if not before:
                self._end.over(reason)


class SharedReader:
    """Lets threads that wait read in turns, so that an answer arrives in the thread that wants it.

    At most one thread reads; each of the others sleeps until its waiter is finished, or the turn
    comes to it. After `watch`, a thread of the line reads when no other one does, or has just done:
    a thread that asks for one message after the other reads them itself. After `hurry`, that thread
    reads at once.

    Args:
        line: that is read.
    """

    def __init__(self, line: Line) -> None:
        self._line = line
        self.forked()
        _READERS.add(self)

    def forked(self) -> None:
        """Resets the state; again in a forked child: no thread has the turn, the line is over."""
        self._turn: dict[int, object] = {}  # at most one: a mark of the thread that has it
        self._leader = 0
        self._led_for: Waiter | None = None
        self._inside: set[int] = set()
        self._mutex = threading.RLock()  # a handler of a signal may come back in here
        self._followers: dict[int, threading.Lock] = {}
        self._watched = 0
        self._hurried = 0
        self._led = 0
        self._hurry = threading.Event()
        self._wanted = threading.Event()
        self._started = False

    def wait(self, waiter: Waiter, until: float | None, *, whole: bool = False) -> bool:
        """Waits until a waiter is finished or a time of time.monotonic has come; True if finished.

        Args:
            waiter: is to be finished.
            until: None waits for ever.
            whole: only arriving frames can finish it, so it need not be looked at meanwhile.

        Raises:
            RuntimeError: this thread was handling frames or writing, and something has interrupted
                it that waits too.
        """
        # Owes: the turn is free, or about to be, and no other thread knows. Wherever this thread is
        # interrupted: it has the turn if `mine` is there.
        owes, me, doubts, mine = False, threading.get_ident(), 0, object()
        # A handler of a signal may come when this thread has the turn, and could not say so yet.
        nested = me in self._inside
        try:
            self._inside.add(me)
            while not waiter.finished:
                if waiter.has_work:
                    if owes:  # it may take long
                        self._pass_on()
                        owes = False
                    waiter.work()
                    continue
                left = None if until is None else until - time.monotonic()
                if left is not None and left <= 0:
                    break
                if self._line.writer == me:
                    raise RuntimeError(_INTERRUPTED)
                if self._turn.setdefault(0, mine) is mine:
                    self._leader = me
                    owes = True
                    self._led += 1
                    self._lead(waiter, until, whole=whole)
                    self._leader = 0
                    self._turn.clear()
                    if self._followers or self._watched > 0:
                        self._pass_on()
                    owes = False
                    if self._line.is_over and not (waiter.finished or waiter.has_work):
                        time.sleep(0.001)  # another thread is finishing the waiters
                elif self._leader == me:
                    self._lead_within(waiter, until, whole=whole)
                elif nested and not self._leader:
                    doubts += 1
                    if doubts > _MOST_DOUBTS:
                        raise RuntimeError(_INTERRUPTED)
                    owes = True
                    owes = self._follow(waiter, LOOK_S if left is None else min(left, LOOK_S))
                else:
                    owes, doubts = True, 0
                    owes = self._follow(waiter, left)
            if owes:  # the turn was not taken
                self._pass_on()
                owes = False
            return waiter.finished
        finally:
            if self._turn.get(0) is mine:
                self._leader = 0
                self._turn.clear()
                owes = True
            if owes:
                self._pass_on()
            if not nested:
                self._inside.discard(me)
            if waiter.has_work and not waiter.finished:  # this thread was interrupted
                THREADS.run(waiter.work)

    def _lead(self, waiter: Waiter, until: float | None, *, whole: bool) -> None:
        """Reads until a waiter is finished or has work to do, or its time or the line is over."""
        before, self._led_for = self._led_for, waiter
        try:
            while not (waiter.finished or waiter.has_work or self._line.is_over):
                left = None
                if until is not None:
                    left = until - time.monotonic()
                    if left <= 0:
                        return
                if not whole:
                    left = _SLICE_S if left is None else min(left, _SLICE_S)
                self._line.read(left)
        finally:
            self._led_for = before

    def _lead_within(self, waiter: Waiter, until: float | None, *, whole: bool) -> None:
        """Reads like `_lead`, in a signal handler or deserializer that interrupts this thread."""
        line = self._line
        if not line.may_nest:
            raise RuntimeError(_INTERRUPTED)
        try:
            line.read_now()
            self._lead(waiter, until, whole=whole)
        finally:
            line.may_nest = True

    def leave(self, waiter: Waiter, work: Callable[[], object], *, attended: bool) -> None:
        """Leaves the work that would hold up all that arrives to another thread.

        In the thread that reads.

        Args:
            waiter: the work finishes it, and is done by a thread that waits for it.
            work: raises nothing but interrupts of its thread.
            attended: a thread waits for it, or is about to; else a thread of its own may do it.
        """
        waiter.leave(work)
        if not attended and self._led_for is not waiter:
            THREADS.run(waiter.work)

    def _follow(self, waiter: Waiter, timeout_s: float | None) -> bool:
        """Sleeps while another thread reads; True if this one is chosen to read after it."""
        latch = threading.Lock()
        latch.acquire()
        mine = id(latch)
        try:
            with self._mutex:
                self._followers[mine] = latch
            waiter.latches.append(latch)
            # A thread that finishes it, or gives up the turn, from here on finds the latch.
            if not (waiter.finished or waiter.has_work) and self._turn:
                most = threading.TIMEOUT_MAX
                latch.acquire(timeout=-1 if timeout_s is None else min(timeout_s, most))
        finally:
            with self._mutex:  # first: a turn that no thread takes over is lost
                chosen = self._followers.pop(mine, None) is None
            waiter.latches[:] = [each for each in waiter.latches if each is not latch]
        return chosen

    def _pass_on(self) -> None:
        """Wakes a thread that takes the turn, which is free, if any waits."""
        if not self._followers and self._watched <= 0:
            return  # a thread that comes from here on finds the turn free
        with self._mutex:
            for mine, latch in self._followers.items():
                open_latch(latch)  # before it is forgotten: this thread may be interrupted
                self._followers.pop(mine, None)
                return
            wanted = self._watched > 0
        if wanted:
            self._wanted.set()

    def watch(self) -> None:
        """Starts to read all that arrives even if no thread waits, until `unwatch`."""
        with self._mutex:
            self._watched += 1
            start, self._started = not self._started, True
        if start:
            threading.Thread(target=self._run, name="tensorwire-rpc-read", daemon=True).start()
        self._wanted.set()

    def unwatch(self) -> None:
        """Takes back a `watch`."""
        with self._mutex:
            self._watched -= 1

    def hurry(self) -> None:
        """Starts to read everything as soon as it arrives, until `unhurry`; within a `watch`."""
        with self._mutex:
            self._hurried += 1
        self._hurry.set()

    def unhurry(self) -> None:
        """Takes back a `hurry`."""
        with self._mutex:
            self._hurried -= 1
            if not self._hurried:
                self._hurry.clear()

    def stop(self) -> None:
        """Ends the thread, when the line is over."""
        self._wanted.set()
        self._hurry.set()

    def _run(self) -> None:
        line = self._line
        while not line.is_over:
            self._wanted.wait()
            self._wanted.clear()
            while self._watched > 0 and not line.is_over:
                led = self._led
                if not self._hurry.wait(_LAZY_S) and (led != self._led or self._turn):
                    continue
                if self._turn.setdefault(0, self) is not self:
                    break  # the thread that has it passes it on
                self._leader = threading.get_ident()
                try:
                    line.read(_SLICE_S)
                finally:
                    self._leader = 0
                    self._turn.clear()
                self._pass_on()


_READERS: weakref.WeakSet[SharedReader] = weakref.WeakSet()


def _forked() -> None:
    for each in list(_READERS):
        each.forked()


os.register_at_fork(after_in_child=_forked)
