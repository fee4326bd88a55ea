"""Interrupts at every point at which Python looks for signals: no other thread waits for ever."""

import dis
import sys
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from test_rpc_conformance import wait_for

from tensorwire.rpc.runtime import call, client, engine, flow, frames, line

FILES = {module.__file__ for module in (call, client, engine, flow, line)}
LONG_S = 2.0


class Interrupt:
    """Raises KeyboardInterrupt in this thread at the n-th such point of the runtime.

    Python looks after calls, at the beginning of functions and where loops go on.
    """

    def __init__(self, at: int) -> None:
        self.where = ""
        self._left = at
        self._last: tuple[FrameType, bool] | None = None

    def __enter__(self) -> "Interrupt":
        sys.settrace(self._traced)
        return self

    def __exit__(self, kind: Any, *_: Any) -> bool:
        sys.settrace(None)
        return kind is KeyboardInterrupt

    def _traced(self, frame: FrameType, event: str, argument: Any) -> Any:
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        code = frame.f_code
        if event == "opcode":
            looks = self._last is not None and self._last[0] is frame and self._last[1]
            name = dis.opname[code.co_code[frame.f_lasti]]
            self._last = frame, name.startswith(("CALL", "RESUME", "JUMP_BACKWARD"))
            if looks and code.co_filename in FILES and code.co_name != "__del__":
                self._left -= 1
                if self._left == 0:
                    self.where = f"{Path(code.co_filename).name}:{frame.f_lineno}"
                    raise KeyboardInterrupt
        else:  # what a Python function returns comes without a look
            self._last = (frame, True) if event == "call" else None
        return self._traced


class Ring:
    """Reader, writer, node and memory of a line whose other end is the test."""

    def __init__(self) -> None:
        self.node = self.memory = self.peer = self
        self.reader = self.writer = lambda: self
        self._changed = threading.Condition()
        self._arrived: deque[frames.Frame] = deque()
        self._taken: deque[frames.Frame] = deque()
        self.reading = threading.Event()
        self.written: list[bytes] = []
        self.meanwhile: list[Callable[[], object]] = []

    def put(self, *given: frames.Frame) -> None:
        with self._changed:
            self._arrived.extend(given)
            self._changed.notify_all()

    def read(self, timeout_s: float | None) -> bool:
        with self._changed:
            self.reading.set()
            self._changed.wait_for(lambda: self._arrived, timeout_s)
        self.take()
        return bool(self._taken)

    def take(self) -> None:
        while self._arrived:
            self._taken.append(self._arrived.popleft())

    def next(self) -> frames.Frame | None:
        return self._taken.popleft() if self._taken else None

    def write_out(self, outbox: deque[bytes], most: int, patient: bool) -> bool:
        while outbox:
            self.written.append(outbox.popleft())
        if self.meanwhile:
            in_thread(self.meanwhile.pop()).join()
        return True

    def close(self) -> None:
        """Does nothing, in the place of a node's."""

    def word(self, at: int) -> None:
        """Does nothing, in the place of a memory's."""


class Limits:
    receive_bytes = send_bytes = -1


def in_thread(run: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


def over(slot: int, size: int = 1) -> frames.Frame:
    return frames.Frame(frames.END, frames.WHOLE, (slot, 1), frames.PLAIN_END + bytes(size))


class Setting:
    def __init__(self) -> None:
        ring: Any = Ring()
        self.ring = ring
        self.client = client.RuntimeClient(ring, Limits())  # type: ignore[arg-type]
        self.reader = self.client.reader

    def begin(self, slot: int) -> call.RuntimeCall:
        made = call.RuntimeCall(self.client, (slot, 1), None, lambda data, _: data, lambda *_: None)
        self.client.begin(made, b"/t/m", (), b"")
        return made

    def follow(self, waited: call.RuntimeCall) -> threading.Thread:
        """A thread that waits, and sleeps or reads by now."""
        before = len(self.reader._followers)
        thread = in_thread(waited.wait_blocking)
        wait_for(lambda: len(self.reader._followers) > before or self.ring.reading.is_set())
        return thread


def a_leader_ends(s: Setting, at: int) -> Interrupt:
    """Another thread has to read on, whose answer comes later."""
    mine, other = s.begin(0), s.begin(1)
    threads: list[threading.Thread] = []

    def beside() -> None:
        s.ring.reading.wait(0.05)
        threads.append(in_thread(other.wait_blocking))
        for _ in range(50):
            if not s.reader._followers:
                threading.Event().wait(0.001)
        s.ring.put(over(0))

    helper = in_thread(beside)
    with Interrupt(at) as interrupt:
        mine.wait_blocking()
    helper.join()
    s.ring.put(over(1))
    threads[0].join(LONG_S)
    assert other.finished, interrupt.where
    return interrupt


def a_follower_ends(s: Setting, at: int) -> Interrupt:
    """The follower that is interrupted may have been chosen to read next."""
    first, mine, last = s.begin(0), s.begin(1), s.begin(2)
    s.follow(first)
    s.ring.reading.wait(LONG_S)

    def beside() -> None:
        for _ in range(50):
            if not s.reader._followers:
                threading.Event().wait(0.001)
        in_thread(last.wait_blocking)
        for _ in range(50):
            if len(s.reader._followers) < 2:
                threading.Event().wait(0.001)
        s.ring.put(over(1), over(0))

    helper = in_thread(beside)
    with Interrupt(at) as interrupt:
        mine.wait_blocking()
    helper.join()
    s.ring.put(over(2))
    for _ in range(2000):
        if not last.finished:
            threading.Event().wait(0.001)
    assert last.finished, interrupt.where
    return interrupt


def answers_of_others(s: Setting, at: int) -> Interrupt:
    """The one that reads handles the answer of a call that another thread waits for."""
    other = s.begin(0)
    s.ring.put(over(0))
    with Interrupt(at) as interrupt:
        s.client.line.read(1.0)
    in_thread(other.wait_blocking).join(LONG_S if interrupt.where else 0.1)
    assert other.finished, interrupt.where
    return interrupt


def a_large_response(s: Setting, at: int) -> Interrupt:
    """The thread that waits makes it; if it is interrupted, the next one does, or fails."""
    mine = s.begin(0)
    s.ring.put(over(0, 100_000))
    with Interrupt(at) as interrupt:
        mine.wait()
    if not mine._has_ended:
        s.ring.put(over(0, 100_000))
    in_thread(mine.wait).join(LONG_S)
    assert mine.finished, interrupt.where
    return interrupt


def frames_of_others(s: Setting, at: int) -> Interrupt:
    """Frames that another thread sends while this one writes are left to this one."""
    s.ring.meanwhile.append(lambda: s.client.send((b"left",)))
    with Interrupt(at) as interrupt:
        s.client.send((b"mine",))
    s.ring.meanwhile.clear()
    written = s.ring.written
    in_thread(lambda: s.client.send((b"later",))).join()
    wait_for(lambda: s.client.line.is_over or (b"later" in written and not s.client.line.outbox))
    return interrupt


@pytest.mark.parametrize(
    "what",
    [a_leader_ends, a_follower_ends, answers_of_others, a_large_response, frames_of_others],
    ids=lambda each: each.__name__,
)
def test_interrupts(what: Callable[[Setting, int], Interrupt]) -> None:
    """Named for bugs: the turn was lost with a thread, or an answer, or what it was to make."""
    at = 1
    while what(Setting(), at).where:
        at += 1
    assert at > 5
