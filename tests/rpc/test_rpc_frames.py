"""Frames of the runtime: what is made can be parsed, and whatever else comes is refused."""

import tracemalloc

import pytest
from ends import parse
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("grpc")

from tensorwire.rpc.runtime import frames
from tensorwire.rpc.runtime.frames import Frame, FrameError, Metadatum

NUMBERS = st.tuples(st.integers(0, (1 << 32) - 1), st.integers(0, (1 << 32) - 1))
KEYS = st.text("abc0189_.-", min_size=1, max_size=20)
TEXTS = st.text(st.characters(min_codepoint=33, max_codepoint=126), max_size=30)


@st.composite
def metadata(draw: st.DrawFn) -> tuple[Metadatum, ...]:
    plain = st.tuples(KEYS.filter(lambda key: not key.endswith("-bin")), TEXTS)
    binary = st.tuples(KEYS.map(lambda key: key + "-bin"), st.binary(max_size=30))
    return tuple(Metadatum(*each) for each in draw(st.lists(plain | binary, max_size=5)))


MESSAGES = st.binary(max_size=100) | st.integers(0, 3).map(
    lambda pieces: bytes(pieces * frames.PIECE_BYTES + 7)
)


@given(NUMBERS, st.binary(max_size=50), st.integers(0, (1 << 64) - 1), metadata(), MESSAGES)
def test_a_call_arrives_as_it_left(
    number: tuple[int, int],
    method: bytes,
    timeout_us: int,
    entries: tuple[Metadatum, ...],
    message: bytes,
) -> None:
    name = method.hex().encode()
    sent = frames.call_frames(number, name, timeout_us, entries, message)
    assert all(len(each) <= frames.MOST_BYTES for each in sent)
    first, *others = parse(b"".join(sent))
    body = frames.parse_call(first.body)
    assert (first.kind, first.number) == (frames.CALL, number)
    assert (body.method, body.timeout_us, body.metadata) == (name.decode(), timeout_us, entries)
    assert body.piece + b"".join(each.body for each in others) == message
    flags = [each.flags for each in (first, *others)]
    assert flags == [frames.MORE] * len(others) + [frames.WHOLE]


@given(
    NUMBERS, st.integers(0, 16), st.text(max_size=50), metadata(), metadata(), MESSAGES | st.none()
)
def test_an_end_arrives_as_it_left(
    number: tuple[int, int],
    code: int,
    details: str,
    initial: tuple[Metadatum, ...],
    trailing: tuple[Metadatum, ...],
    message: bytes | None,
) -> None:
    sent = frames.end_frames(number, code, details.encode(), initial, trailing, message)
    assert all(len(each) <= frames.MOST_BYTES for each in sent)
    *before, last = parse(b"".join(sent))
    body = frames.parse_end(last.body)
    assert body[:4] == (code, details, initial, trailing)
    assert {each.kind for each in before} <= {frames.MESSAGE}
    if message is None:
        assert (last.flags, body.piece) == (0, b"")
    else:
        assert last.flags == frames.WHOLE
        assert b"".join(each.body for each in before) + body.piece == message


@given(metadata())
def test_metadata_that_are_valid_stay(entries: tuple[Metadatum, ...]) -> None:
    assert frames.as_metadata(entries) == entries
    (frame,) = parse(frames.head_frame((1, 2), entries))
    assert frames.parse_head(frame.body) == entries


@pytest.mark.parametrize(
    "entries",
    [
        [("Upper", "x")],
        [("a", " x")],
        [("a", "x\n")],
        [("a", "ä")],
        [("", "x")],
        [("grpc-timeout", "1S")],
        [("a",)],
        [("a", 1)],
        [("a-bin", 1)],
        [("a-bin", "text")],
        5,
        [("a", "x" * 17_000)],
    ],
)
def test_metadata_that_are_not_plainly_valid(entries: object) -> None:
    assert frames.as_metadata(entries) is None


def test_keys_that_grpc_keeps_are_for_servers() -> None:
    status = (Metadatum("grpc-status-details-bin", b"\x00"),)
    assert frames.as_metadata(status) is None
    assert frames.as_metadata(status, reserved=True) == status


@given(st.binary(max_size=400))
def test_bytes_from_outside(data: bytes) -> None:
    """Frames, or an error of one kind."""
    try:
        for each in parse(data):
            assert isinstance(each, Frame)
    except FrameError:
        pass
    for parser in (frames.parse_call, frames.parse_end, frames.parse_head):
        try:
            parser(data)
        except FrameError:
            pass


@given(NUMBERS, metadata(), st.data())
def test_frames_that_are_changed(
    number: tuple[int, int], entries: tuple[Metadatum, ...], data: st.DataObject
) -> None:
    sent = b"".join(
        frames.call_frames(number, b"/a/b", 5, entries, b"message")
        + frames.end_frames(number, 0, b"details", entries, entries, b"response")
    )
    changed = bytearray(sent)
    for _ in range(data.draw(st.integers(1, 4))):
        changed[data.draw(st.integers(0, len(sent) - 1))] = data.draw(st.integers(0, 255))
    cut = bytes(changed[: data.draw(st.integers(0, len(sent)))])
    parsers = {frames.CALL: frames.parse_call, frames.END: frames.parse_end}
    try:
        for each in parse(cut):
            if each.kind in parsers:
                parsers[each.kind](each.body)
    except FrameError:
        pass


def test_a_frame_that_is_cut_off() -> None:
    (whole,) = frames.call_frames((1, 1), b"/a/b", 5, (Metadatum("a", "b"),), b"message")
    for size in range(1, len(whole)):
        with pytest.raises(FrameError):
            list(parse(whole[:size]))


@pytest.mark.parametrize("size", [0, 1, frames.PIECE_BYTES - 1, frames.PIECE_BYTES + 1])
def test_small_pieces_that_are_not_the_last(size: int) -> None:
    """Any number of them could be sent without ever exceeding the limit of a message."""
    data = frames.HEADER.pack(
        frames.HEADER.size + size, frames.MESSAGE, frames.MORE, 0, 1, 1
    ) + bytes(size)
    with pytest.raises(FrameError, match=f"a piece of {size} bytes, and more"):
        list(parse(data))


@pytest.mark.parametrize("kind", ["call", "end", "stream"])
def test_a_long_message_is_copied_once(kind: str) -> None:
    message, number = bytes(8 << 20), (1, 2)
    tracemalloc.start()
    try:
        made = {
            "call": lambda: frames.call_frames(number, b"/m", 1, (), message),
            "end": lambda: frames.end_frames(number, 0, message=message),
            "stream": lambda: list(frames.message_frames(number, message)),
        }[kind]()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert sum(map(len, made)) > len(message)
    assert peak < 1.2 * len(message)


@given(NUMBERS, st.sampled_from((0, 1, 100, frames.PIECE_BYTES - 1, frames.PIECE_BYTES)))
def test_a_plain_end_is_an_end(number: frames.Number, size_bytes: int) -> None:
    message = bytes(range(256)) * (size_bytes // 256) + bytes(size_bytes % 256)
    plain = frames.plain_end_frame(number, message)
    assert [plain] == frames.end_frames(number, 0, message=message)
