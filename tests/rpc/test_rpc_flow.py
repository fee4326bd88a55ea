"""Windows of streams: messages arrive whole and in order, and never more than fits is under way."""

from collections import deque
from collections.abc import Sequence

import pytest
from ends import parse
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("grpc")

from tensorwire.rpc.runtime import flow, frames
from tensorwire.rpc.runtime.flow import Inflow, Outflow, TooLongError, Waiter

NUMBER = (3, 9)
SIZES = st.one_of(st.integers(0, 100), st.integers(40_000, 60_000), st.just(700_000))


class Stream:
    """One direction of a call: its two ends, and the frames of the message that is being sent."""

    def __init__(self) -> None:
        self.out, self.into = Outflow(), Inflow(-1)
        self.frames: deque[bytes] = deque()

    def send(self) -> bool:
        """Sends what there is room for; True if something was."""
        sent = False
        while self.frames:
            size = len(self.frames[0]) - frames.HEADER.size
            if self.out.reserve(size) is not None:
                break
            (frame,) = parse(self.frames.popleft())
            self.credit(self.into.add(frame.body, frame.flags))
            sent = True
        return sent

    def credit(self, size: int) -> None:
        if size:
            (frame,) = parse(frames.credit_frame(NUMBER, size))
            self.out.grant(frames.parse_credit(frame.body))

    def held(self) -> int:
        return sum(len(piece) for pieces, _ in self.into._messages for piece in pieces)


@given(st.lists(st.tuples(SIZES, st.booleans()), max_size=40))
def test_messages_arrive_in_order_whoever_is_slow(turns: list[tuple[int, bool]]) -> None:
    stream, sent, got = Stream(), [], []

    def take() -> bool:
        taken = stream.into.take()
        if not isinstance(taken, bytes):
            return False
        got.append(taken)
        stream.credit(stream.into.settle()[0])
        return True

    for size, reads in turns:
        message = bytes([len(sent) % 256]) * size
        sent.append(message)
        stream.frames.extend(frames.message_frames(NUMBER, message))
        stream.send()
        longest = max(map(len, sent))
        assert stream.held() <= flow.WINDOW_BYTES + frames.PIECE_BYTES + longest
        if reads:
            take()
    while stream.send() | take():  # a reader that goes on gets everything
        pass
    assert got == sent
    (last,) = parse(frames.last_frame(NUMBER))
    stream.into.add(last.body, last.flags)
    assert stream.into.take() is None


def test_frames_with_room_leave_together() -> None:
    out = Outflow()
    sent = list(frames.message_frames(NUMBER, bytes(3 * flow.WINDOW_BYTES)))
    lots: list[Sequence[bytes]] = []
    waiters = out.send(sent, lots.append)
    waiter = next(waiters)
    assert not waiter.finished
    (first,) = lots
    assert sum(map(len, first)) >= flow.WINDOW_BYTES
    out.grant(flow.WINDOW_BYTES)
    assert waiter.finished
    waiter = next(waiters)
    first, second = lots
    assert [*first, *second] == sent[: len(first) + len(second)]
    out.close()
    assert waiter.finished
    assert list(waiters) == []
    assert len(lots) == 2, "the call is over"


def test_whoever_waits_is_woken() -> None:
    out = Outflow()
    assert out.reserve(flow.WINDOW_BYTES) is None
    waiter = out.reserve(1)
    assert isinstance(waiter, Waiter)
    assert not waiter.finished
    out.grant(flow.WINDOW_BYTES)
    assert waiter.finished
    assert out.reserve(flow.WINDOW_BYTES) is None
    waiting = out.reserve(1)
    out.close()
    assert waiting is not None
    assert waiting.finished
    assert out.reserve(1 << 30) is None  # no sender is held up any more
    into = Inflow(10)
    waiter = into.take()
    assert isinstance(waiter, Waiter)
    into.add(b"x", frames.WHOLE)
    assert waiter.finished
    with pytest.raises(TooLongError):
        into.add(b"x" * 11, frames.WHOLE)
    assert into.take() == b"x"
    waiter = into.take()
    assert isinstance(waiter, Waiter)
    into.close()
    assert waiter.finished
    assert into.take() is None


def test_an_end_waits_for_what_is_taken_and_not_yet_settled() -> None:
    into = Inflow(-1)
    into.add(b"1", frames.WHOLE)
    assert into.take() == b"1"
    assert not into.close(drop=False)
    assert into.settle() == (0, True)
    assert into.close(drop=False)


def test_a_message_that_is_cut_by_a_discard() -> None:
    """The first message of a stream is the only one; a later one may have arrived in part."""
    inflow = Inflow(-1)
    inflow.add(b"first", frames.WHOLE)
    inflow.add(bytes(frames.PIECE_BYTES), frames.MORE)
    assert inflow.take() == b"first"
    inflow.discard()
    inflow.settle()
    inflow.add(b"the rest", frames.WHOLE)
    assert inflow.add(b"", frames.LAST) == 0
    assert inflow._pieces == []
