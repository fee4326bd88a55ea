"""Handles and addresses: round trips, and bytes from anywhere."""

import copy
import dataclasses
import pickle
import zlib

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tensorwire import Handle
from tensorwire.memory.handle import join_address, split_address

U64 = st.integers(0, 2**64 - 1)
NAMES = st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=63)
HOSTS = st.one_of(
    st.ip_addresses(v=4).map(str),
    st.ip_addresses(v=6).map(str),
    st.from_regex(r"[a-z][a-z0-9.-]{0,40}", fullmatch=True),
)
ADDRESSES = st.builds(join_address, HOSTS, st.integers(0, 65535))
HANDLES = st.builds(
    Handle,
    address=ADDRESSES,
    incarnation=U64,
    id=st.integers(0, 2**32 - 1),
    generation=U64,
    size_bytes=st.integers(0, 2**63 - 1),
    access=st.sampled_from(["rw", "r", "w", "none"]),
    name=NAMES,
    node=NAMES,
)
ONE = Handle("10.0.0.1:7000", 2**64 - 1, 3, 5, 1 << 40, "rw", "weights/0", "worker-17")


@given(HANDLES)
def test_round_trip(handle: Handle) -> None:
    data = handle.to_bytes()
    for form in (data, bytearray(data), memoryview(data)):
        assert Handle.from_bytes(form) == handle
    assert pickle.loads(pickle.dumps(handle)) == handle
    assert copy.deepcopy(handle) == handle
    assert hash(Handle.from_bytes(data)) == hash(handle)


@pytest.mark.parametrize("field", ["name", "node", "address"])
@pytest.mark.parametrize("sign", ["\n", "\0", "\x7f", "\x85"])
def test_control_characters(field: str, sign: str) -> None:
    """A handle comes from anywhere, and its texts end up in messages."""
    hidden = {field: f"10.0.0{sign}1:7000"}
    with pytest.raises(ValueError, match="control characters"):
        dataclasses.replace(ONE, **hidden)


def test_small() -> None:
    assert len(ONE.to_bytes()) == 41 + len("10.0.0.1:7000") + len("weights/0") + len("worker-17")
    assert len(pickle.dumps(ONE)) < 256


def test_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        ONE.size_bytes = 1  # type: ignore[misc]


@given(st.binary(max_size=300))
@example(b"")
@example(b"TWRH")
@example(b"TWRH\x01" + bytes(60))
def test_hostile_bytes(data: bytes) -> None:
    with pytest.raises(ValueError, match="handle"):
        Handle.from_bytes(data)


@given(HANDLES, st.data())
def test_damage_is_noticed(handle: Handle, data: st.DataObject) -> None:
    good = handle.to_bytes()
    position = data.draw(st.integers(0, len(good) - 1))
    bad = bytearray(good)
    bad[position] ^= data.draw(st.integers(1, 255))
    for wrong in (bytes(bad), good[:position], good + b"\0"):
        with pytest.raises(ValueError):  # noqa: PT011
            Handle.from_bytes(wrong)


@given(st.binary(min_size=37, max_size=200))
def test_hostile_bytes_with_a_good_checksum(data: bytes) -> None:
    """Bytes with a good checksum give a ValueError or a valid handle, nothing else."""
    body = b"TWRH\x01" + data[5:]
    body += zlib.crc32(body).to_bytes(4, "little")
    try:
        handle = Handle.from_bytes(body)
    except ValueError:
        return
    assert handle.to_bytes() == body


def test_of_a_later_version() -> None:
    data = bytearray(ONE.to_bytes())
    data[4] = 9
    with pytest.raises(ValueError, match="version 9"):
        Handle.from_bytes(bytes(data))


@pytest.mark.parametrize("wrong", [None, "text", [1, 2], 7])
def test_from_bytes_takes_bytes(wrong: object) -> None:
    with pytest.raises(TypeError, match="bytes"):
        Handle.from_bytes(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("field", "value", "error"),
    [
        ("incarnation", -1, ValueError),
        ("incarnation", 2**64, ValueError),
        ("incarnation", 1.0, TypeError),
        ("incarnation", True, TypeError),
        ("id", 2**32, ValueError),
        ("size_bytes", 2**63, ValueError),
        ("access", "x", ValueError),
        ("access", "wr", ValueError),
        ("name", "x" * 256, ValueError),
        ("name", "\ud800", ValueError),
        ("name", b"bytes", TypeError),
        ("node", None, TypeError),
        ("address", "nowhere", ValueError),
    ],
)
def test_fields_are_checked(field: str, value: object, error: type[Exception]) -> None:
    with pytest.raises(error, match=field):
        dataclasses.replace(ONE, **{field: value})


@pytest.mark.parametrize(
    ("address", "host", "port"),
    [
        ("127.0.0.1:0", "127.0.0.1", 0),
        ("localhost:65535", "localhost", 65535),
        ("[::1]:7000", "::1", 7000),
        ("[fe80::1%eth0]:1", "fe80::1%eth0", 1),
    ],
)
def test_addresses(address: str, host: str, port: int) -> None:
    assert split_address(address) == (host, port)
    assert join_address(host, port) == address


@pytest.mark.parametrize(
    "address",
    "-host-host:-:1-host:x-host:65536-host:123456-::1:5-[::1]-[::1:5-::1]:5-[host]:5-host:+1-host:١-"
    "host:1 -h[::1]:5".split("-"),
)
def test_malformed_addresses(address: str) -> None:
    with pytest.raises(ValueError, match=r"port|address"):
        split_address(address)
    with pytest.raises(TypeError, match="str"):
        split_address(address.encode())  # type: ignore[arg-type]
