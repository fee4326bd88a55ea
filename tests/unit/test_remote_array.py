"""`RemoteRegion.array`: the peer's memory itself, where it can be seen."""

import os

import numpy as np
import pytest

from tensorwire import ClosedError, Node, UnavailableError


def test_both_sides_see_one_memory() -> None:
    with Node("owner") as owner, Node("user") as user:
        region = owner.allocate(4096, name="x")
        remote = user.connect(owner.address).region("x")
        assert remote.mapped
        theirs = remote[64:128].array("float32", (4, 4))
        theirs[:] = np.arange(16).reshape(4, 4)
        assert region[64:128].array("float32").tolist() == list(range(16))
        region.array()[64] = 255
        assert remote.memoryview()[64] == 255


def test_it_outlives_region_node_and_peer() -> None:
    with Node("user") as user:
        with Node("owner") as owner:
            region = owner.allocate(4096, name="x")
            region.array()[:] = 7
            array = user.connect(owner.address).region("x").array()
            region.free()
        assert array.tolist() == [7] * 4096
        array[0] = 1


def test_a_read_only_grant_gives_a_read_only_array() -> None:
    with Node("owner") as owner, Node("user") as user:
        owner.allocate(4096, name="x", access="r")
        array = user.connect(owner.address).region("x").array()
        assert not array.flags.writeable
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1


def test_what_a_network_reaches_cannot_be_mapped() -> None:
    with Node("owner") as owner, Node("user", transports=["tcp"]) as user:
        owner.allocate(4096, name="x")
        remote = user.connect(owner.address).region("x")
        assert not remote.mapped
        with pytest.raises(UnavailableError, match="use read"):
            remote.array()
        with pytest.raises(UnavailableError, match="tcp"):
            remote.memoryview()


@pytest.mark.parametrize(
    ("dtype", "shape", "error", "words"),
    [
        ("O", None, TypeError, "Python objects"),
        ("float32", (3, 400), ValueError, "needs 4800 bytes"),
        ("float32", -1, ValueError, "negative"),
        (np.dtype("S3"), None, ValueError, "no multiple"),
    ],
)
def test_shapes_that_do_not_fit(
    dtype: object, shape: object, error: type[Exception], words: str
) -> None:
    with Node("owner") as owner, Node("user") as user:
        owner.allocate(4096, name="x")
        remote = user.connect(owner.address).region("x")
        with pytest.raises(error, match=words):
            remote.array(dtype, shape)  # type: ignore[arg-type]


def test_a_forked_child_has_none() -> None:
    with Node("owner") as owner, Node("user") as user:
        owner.allocate(4096, name="x")
        remote = user.connect(owner.address).region("x")
        child = os.fork()
        if child == 0:
            try:
                remote.array()
            except ClosedError:
                os._exit(0)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
