"""Regions, listeners and incarnations of a former process: what is taken up, and what is not."""

import contextlib
import fcntl
import os
import socket
from collections.abc import Iterator
from typing import Any

import pytest

import tensorwire as tw
from tensorwire import Node, Region

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
FUTURE_WRITE = 0x10


@pytest.fixture
def node() -> Iterator[Node]:
    with Node("goes on", transports=["shm", "tcp"]) as node:
        yield node


@contextlib.contextmanager
def closed_at_end(descriptor: int) -> Iterator[int]:
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def memory(size: int, seals: int = SEALS) -> int:
    descriptor = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, size)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


def restored(node: Node, descriptor: int, **options: Any) -> Region:
    facts = {"name": "r", "id": 5, "generation": 7, "size_bytes": 5000, **options}
    return node.restore(descriptor, **facts)


@pytest.mark.parametrize("access", ["rw", "w", "none"])
def test_memory_outlives_its_node(node: Node, access: str) -> None:
    with Node("gone", transports=["shm"]) as gone:
        region = gone.allocate(5000, name="weights", access=access)
        region.array()[:3] = 1, 2, 3
        handle, descriptor = region.handle(), region.descriptor()
    with closed_at_end(descriptor):
        assert not os.get_inheritable(descriptor)
        again = node.restore(
            descriptor,
            name="weights",
            id=handle.id,
            generation=handle.generation,
            size_bytes=5000,
            access=access,
        )
    assert list(again.array()[:4]) == [1, 2, 3, 0]
    assert again.handle().generation == handle.generation
    assert node.region("weights").access == again.access == access
    os.close(again.descriptor())


def test_an_id_is_used_once(node: Node) -> None:
    with closed_at_end(memory(8192)) as descriptor:
        restored(node, descriptor)
        ids = [node.allocate(8).handle().id for _ in range(8)]
        assert len({5, *ids}) == 9
        assert set(range(9)) == {5, *ids}
        low = node.allocate(8)
        free = low.handle().id
        low.free()
        assert restored(node, descriptor, name=None, id=free).handle().id == free
        assert node.allocate(8).handle().id != free
        top = restored(node, descriptor, name="top", id=16383)
        top.free()
        assert restored(node, descriptor, name="top", id=16383).name == "top"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"id": 5, "name": "other"}, "already a region with the id 5"),
        ({"name": "r"}, "already a region named 'r'"),
        ({"id": 16384}, "0 to 16383"),
        ({"id": -1}, "region's id is 0"),
        ({"id": 1 << 40}, "region's id is 0"),
        ({"generation": 0}, "generation is 1"),
        ({"generation": 1 << 64}, "generation is 1"),
        ({"size_bytes": 0}, "has 1 to"),
        ({"size_bytes": 9000}, "smaller than it claims"),
        ({"size_bytes": 4096}, "of another size"),
        ({"size_bytes": (1 << 63) - 1}, "smaller than it claims"),
        ({"access": "r"}, "access 'r' cannot be restored"),
        ({"access": "x"}, "access is one of"),
        ({"name": "a\nb"}, "control characters"),
        ({"name": "n" * 256}, "at most 255"),
    ],
)
def test_wrong_facts(node: Node, options: dict[str, Any], says: str) -> None:
    with closed_at_end(memory(8192)) as descriptor:
        restored(node, descriptor)
        with pytest.raises(ValueError, match=says):
            restored(node, descriptor, **{"name": "s", "id": 9, **options})
        assert restored(node, descriptor, name="s", id=9).size_bytes == 5000


def test_wrong_descriptors(node: Node) -> None:
    reader, writer = os.pipe()
    with closed_at_end(reader), closed_at_end(writer):
        with pytest.raises(ValueError, match="no memory of a region"):
            restored(node, reader)
    with pytest.raises(ValueError, match="cannot duplicate descriptor"):
        restored(node, reader)
    for number in (-1, 1 << 31, 1 << 70):
        with pytest.raises(ValueError, match="a descriptor is 0"):
            restored(node, number)
    with pytest.raises(TypeError, match="a descriptor is an int"):
        restored(node, "5")  # type: ignore[arg-type]
    for seals in (0, fcntl.F_SEAL_SHRINK, fcntl.F_SEAL_GROW):
        with (
            closed_at_end(memory(8192, seals)) as descriptor,
            pytest.raises(ValueError, match="size is not sealed"),
        ):
            restored(node, descriptor)
    for seal in (fcntl.F_SEAL_WRITE, FUTURE_WRITE):
        with (
            closed_at_end(memory(8192, SEALS | seal)) as descriptor,
            pytest.raises(ValueError, match="sealed against writing"),
        ):
            restored(node, descriptor)
    with closed_at_end(memory(8192)) as descriptor:
        read_only = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY)
        with closed_at_end(read_only), pytest.raises(ValueError, match="for reading alone"):
            restored(node, read_only)
    with node.allocate(5000, access="r") as region, closed_at_end(region.descriptor()) as sealed:
        with pytest.raises(ValueError, match="sealed against writing"):
            restored(node, sealed)


def test_what_has_no_descriptor(node: Node) -> None:
    region = node.allocate(4096)
    with pytest.raises(ValueError, match=r"descriptor\(\) is for a whole region"):
        region[:8].descriptor()
    node.close()
    with pytest.raises(tw.ClosedError):
        region.descriptor()
    with closed_at_end(memory(8192)) as descriptor:
        with pytest.raises(tw.ClosedError):
            restored(node, descriptor)
        with Node("no shm", transports=["tcp"]) as other:
            with pytest.raises(tw.UnavailableError, match="leave out shm"):
                other.allocate(8).descriptor()
            with pytest.raises(tw.UnavailableError, match="leave out shm"):
                restored(other, descriptor)
            os.close(other.allocate(8, mappable=True).descriptor())


class TestListener:
    """The socket of a former process, and its incarnation."""

    def test_those_who_waited_are_served(self) -> None:
        with Node("first") as first:
            descriptor, incarnation = first.listener(), first.incarnation
            address = first.address
        assert not os.get_inheritable(descriptor)
        host, port = address.split(":")
        with (
            closed_at_end(descriptor),
            socket.create_connection((host, int(port))) as waiting,
            Node("first", incarnation=incarnation, listener=descriptor) as second,
            Node("user") as user,
        ):
            assert second.address == address
            assert second.incarnation == incarnation
            assert user.connect(address).incarnation == incarnation
            waiting.settimeout(10)
            waiting.sendall(b"x" * 200)
            with contextlib.suppress(ConnectionResetError):
                assert waiting.recv(200) == b""  # heard and refused, not left to wait
            second.close()
            with pytest.raises(tw.ClosedError):
                second.listener()

    def test_advertise_is_the_host(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as door:
            port = door.getsockname()[1]
            with Node(listener=door.fileno(), advertise="localhost") as node:
                assert node.address == f"localhost:{port}"
            assert not os.get_blocking(door.fileno())  # one socket, and still the caller's too

    @pytest.mark.parametrize("kind", ["bound", "datagram", "unix", "pipe", "closed"])
    def test_what_is_no_listener(self, kind: str) -> None:
        with contextlib.ExitStack() as stack:
            if kind == "pipe":
                reader, writer = os.pipe()
                stack.callback(os.close, reader)
                stack.callback(os.close, writer)
            else:
                family = socket.AF_UNIX if kind == "unix" else socket.AF_INET
                style = socket.SOCK_DGRAM if kind == "datagram" else socket.SOCK_STREAM
                door = stack.enter_context(socket.socket(family, style))
                if kind == "unix":
                    door.bind("")
                    door.listen()
                else:
                    door.bind(("127.0.0.1", 0))
                reader = door.fileno()
                if kind == "closed":
                    door.close()
            with pytest.raises(ValueError, match="no TCP socket that listens"):
                Node(listener=reader)

    @pytest.mark.parametrize("number", [-1, 1 << 31, 1 << 70])
    def test_numbers_out_of_range(self, number: int) -> None:
        with pytest.raises(ValueError, match="a descriptor is 0"):
            Node(listener=number)

    @pytest.mark.parametrize("number", [0, -1, 1 << 64])
    def test_incarnations_out_of_range(self, number: int) -> None:
        with pytest.raises(ValueError, match="an incarnation is 1"):
            Node(incarnation=number)

    def test_other_than_loopback_needs_a_secret(self) -> None:
        with (
            socket.create_server(("0.0.0.0", 0)) as door,
            pytest.raises(ValueError, match=r"loopback only, not on 0\.0\.0\.0"),
        ):
            Node(listener=door.fileno())
