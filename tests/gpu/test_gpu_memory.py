"""Regions in memory of a GPU: what is refused and how, what fails and what then stays right."""

import contextlib
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tensorwire import _core
from tensorwire.errors import PeerLostError, UnavailableError
from tensorwire.memory import Node, RemoteRegion, checksum
from tensorwire.memory.gpu import gpu_number, on_stream
from tensorwire.testing import Channel, PeerGroup, assert_no_leak, node_pair
from tensorwire.testing.gpu import GpuArray, GpuStream, pinned_array
from tensorwire.testing.setup import warm_up_gpu

MIB = 1 << 20


@contextlib.contextmanager
def pair(size: int = MIB, transport: str = "shm", **options: Any) -> Iterator[Any]:
    """Two Nodes, a region of the far one on a GPU, and how the near one sees it."""
    with node_pair([transport], **options) as nodes:
        region = nodes.far.allocate(size, name="r", device="cuda:0")
        yield nodes, region, nodes.to_far.region("r")


def run(code: str, **environment: str) -> str:
    """Runs a program of its own and gives what it says."""
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **environment}, capture_output=True,
        text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


REFUSED = """
import tensorwire as tw
with tw.Node("n") as node:
    try:
        node.allocate(8, device="cuda:{ordinal}")
    except Exception as error:
        print(type(error).__name__, error)
"""


def refused(ordinal: int = 0, **environment: str) -> str:
    return run(REFUSED.format(ordinal=ordinal), **environment)


def test_without_a_driver() -> None:
    said = refused(TENSORWIRE_CUDA_LIBRARY="/nowhere/libcuda.so.1")
    assert said.startswith("UnavailableError memory of a GPU needs NVIDIA's driver")
    assert "/nowhere/libcuda.so.1" in said


def test_of_another_library() -> None:
    assert "lacks cuInit" in refused(TENSORWIRE_CUDA_LIBRARY="libc.so.6")


def test_a_region_takes_no_more_than_the_granules_that_it_needs(driver: str) -> None:
    if driver == "real":
        pytest.skip("NVIDIA's driver cannot be told how much memory there is")
    for size, enough in ((1, 2 * MIB), (2 * MIB, 2 * MIB), (2 * MIB + 1, 4 * MIB)):
        code = REFUSED.replace("allocate(8,", f"allocate({size},").format(ordinal=0)
        assert run(code, STANDIN_BYTES=str(enough)) == ""
        assert run(code, STANDIN_BYTES=str(enough - 1)).startswith("MemoryError")


def test_no_such_gpu() -> None:
    assert refused(7).startswith("ValueError there is no cuda:7: this process sees 1 GPU")


@pytest.mark.parametrize(
    ("setting", "value", "words"),
    [
        ("STANDIN_VERSION", "11080", "CUDA 12.0 or newer"),
        ("STANDIN_FAIL", "cuInit", "UnavailableError NVIDIA's driver does not start"),
        ("STANDIN_FAIL", "cuDevicePrimaryCtxRetain", "MemoryError cannot use cuda:0 (stand-in)"),
        ("STANDIN_FAIL", "cuMemCreate", "MemoryError cannot allocate 8 bytes on cuda:0"),
        ("STANDIN_FAIL", "cuMemMap", "MemoryError cannot map 8 bytes of cuda:0"),
        ("STANDIN_FAIL", "cuMemAddressReserve", "MemoryError cannot map 8 bytes of cuda:0"),
        ("STANDIN_FAIL", "cuMemExportToShareableHandle", "UnavailableError cannot allocate"),
        ("STANDIN_FAIL", "cuStreamCreate", "MemoryError a stream of cuda:0"),
    ],
)
def test_a_driver_that_fails(driver: str, setting: str, value: str, words: str) -> None:
    if driver == "real":
        pytest.skip("NVIDIA's driver cannot be told to fail")
    assert words in refused(**{setting: value})


@pytest.mark.parametrize(
    ("fails", "error"),
    [
        ("cuMemcpyAsync", UnavailableError),
        ("cuEventRecord", UnavailableError),
    ],
)
def test_a_transfer_that_the_driver_refuses(
    driver: str, monkeypatch: pytest.MonkeyPatch, fails: str, error: type[Exception]
) -> None:
    if driver == "real":
        pytest.skip("NVIDIA's driver cannot be told to fail")
    with pair() as (nodes, _region, remote):
        word = nodes.to_far.region(nodes.far.allocate(8, name="w").handle()).word(0)
        local = GpuArray(bytes(MIB))
        with monkeypatch.context() as patch:
            patch.setenv("STANDIN_FAIL", fails)
            with pytest.raises(error):
                remote.write(local, signal=(word, 1)).wait(10)
        assert nodes.far.region("w").word(0).value == 0
        remote.write(local, signal=(word, 1)).wait(10)
        assert nodes.far.region("w").word(0).value == 1


FIRST_WRITE = """
import tensorwire as tw
from tensorwire.testing.gpu import GpuArray
with tw.Node("far") as far, tw.Node("near") as near:
    region = far.allocate(8, device="cuda:0")
    remote = near.connect(far.address).region(region.handle())
    try:
        remote.write(GpuArray(8)).wait(10)
    except Exception as error:
        print(type(error).__name__, error)
"""


def test_no_event_is_left(driver: str) -> None:
    if driver == "real":
        pytest.skip("NVIDIA's driver cannot be told to fail")
    said = run(FIRST_WRITE, STANDIN_FAIL="cuEventCreate")
    assert said.startswith("MemoryError an event of cuda:0")


def test_a_wake_up_that_does_not_come(driver: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that has failed calls no function: copies are looked at now and then all the same."""
    if driver == "real":
        pytest.skip("NVIDIA's driver cannot be told to fail")
    with pair() as (_nodes, _region, remote):
        monkeypatch.setenv("STANDIN_FAIL", "cuLaunchHostFunc")
        for _ in range(3):
            remote.write(GpuArray(bytes(MIB))).wait(10)


def test_memory_that_cannot_be_pinned_is_staged(
    driver: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if driver == "real":
        pytest.skip("NVIDIA's driver pins what it is asked to")
    monkeypatch.setenv("STANDIN_NO_PIN", "1")
    with node_pair(["shm"]) as nodes:
        region = nodes.far.allocate(3 * MIB, name="h")
        remote = nodes.to_far.region("h")
        data = np.arange(3 * MIB, dtype=np.uint32).astype(np.uint8)
        remote.write(GpuArray(data)).wait(10)
        assert (region.array() == data).all()
        stats = nodes.near.stats()
        assert (stats["gpu_bytes_direct"], stats["gpu_bytes_staged"]) == (0, 3 * MIB)


def test_what_is_staged_and_what_is_not() -> None:
    """Memory of the host is pinned for good when it is in a region, and copied once."""
    with pair() as (nodes, _region, remote):
        own = nodes.near.allocate(MIB)

        def moved(local: Any) -> tuple[int, int]:
            before = nodes.near.stats()
            remote.write(local).wait(10)
            after = nodes.near.stats()
            return tuple(after[k] - before[k] for k in ("gpu_bytes_direct", "gpu_bytes_staged"))

        assert moved(GpuArray(bytes(MIB))) == (MIB, 0)
        assert moved(own) == (MIB, 0)
        assert moved(pinned_array(np.zeros(MIB, np.uint8))) == (MIB, 0)
        assert moved(np.zeros(MIB, np.uint8)) == (0, MIB)
        with pytest.raises(ValueError, match="GPU has this memory pinned"):
            own.discard()


def test_devices_by_name() -> None:
    class TorchDevice:
        type, index = "cuda", 0

        def __str__(self) -> str:
            return "cuda:0"

    named = [None, "cpu", "cuda:0", "cuda:12", TorchDevice()]
    assert [gpu_number(each) for each in named] == [-1, -1, 0, 12, 0]
    for wrong in ("gpu", "cuda:", "cuda:-1", "cuda:x", "xpu:0", "meta"):
        with pytest.raises(ValueError, match="a device is"):
            gpu_number(wrong)
    for wrong_type in (3, b"cuda", object()):
        with pytest.raises(TypeError, match="named by a str"):
            gpu_number(wrong_type)


def test_streams_by_name() -> None:
    class Cuda:
        def __cuda_stream__(self) -> tuple[int, int]:
            return 0, 77

    stream = GpuStream()
    assert on_stream(stream, -1) == (stream.cuda_stream, 0)
    assert on_stream(Cuda(), 3) == (77, 3)
    assert on_stream(5, 1) == (5, 1)
    with pytest.raises(ValueError, match="whose stream"):
        on_stream(5, -1)
    with pytest.raises(ValueError, match=r"2\*\*64"):
        on_stream(-1, 0)
    with pytest.raises(TypeError, match="not str"):
        on_stream("s", 0)
    stream.close()


def test_no_cpu_looks_at_it() -> None:
    """Everything that would show the bytes to a CPU, or pass them on as memory of the host."""
    with pair() as (nodes, region, remote):
        assert (region.device, remote.device) == ("cuda:0", "cuda:0")
        for look in (region.array, region.memoryview, remote.array, remote.memoryview):
            with pytest.raises(UnavailableError, match="no CPU can look"):
                look()
        for words in (region.word, remote.word):
            with pytest.raises(ValueError, match="no word can be"):
                words(0)
        for refuse in (region.private, remote.private):
            with pytest.raises(UnavailableError):
                refuse()
        with pytest.raises(ValueError, match="free the region"):
            region.discard()
        with pytest.raises(ValueError, match="only memory of the host"):
            checksum(GpuView(region))
        core: Any = region._core
        with pytest.raises(ValueError, match="no word can be"):
            nodes.far._core.wait_word(core, 0, 1, 0.1)
        with pytest.raises(ValueError, match="no word can be"):
            core.load_word(0)
        assert not core.reaches(0, 0)


def test_memory_outlives_its_node() -> None:
    with pair() as (_, region, remote):
        handle, descriptor = region.handle(), region.descriptor()
        remote.write(np.arange(MIB // 8)).wait(30)
        facts = {"id": handle.id, "generation": handle.generation, "size_bytes": MIB}
    try:
        with Node("goes on", transports=["shm"]) as node, Node("reads") as reader:
            with pytest.raises(ValueError, match="cannot be restored over this"):
                node.restore(descriptor, name="r", **facts)
            with pytest.raises((ValueError, UnavailableError), match=r"smaller|cannot map"):
                node.restore(descriptor, name="r", on_gpu=True, **{**facts, "size_bytes": 9 * MIB})
            again = node.restore(descriptor, name="r", on_gpu=True, **facts)
            assert (again.device, again.handle().generation) == ("cuda:0", handle.generation)
            os.close(again.descriptor())
            found = np.zeros(MIB // 8, np.int64)
            reader.connect(node.address).region("r").read(found).wait(30)
            assert (found == np.arange(MIB // 8)).all()
            memfd = os.memfd_create("host")
            with pytest.raises((ValueError, UnavailableError)):
                node.restore(memfd, name="other", on_gpu=True, **{**facts, "id": 9})
            os.close(memfd)
    finally:
        os.close(descriptor)


def GpuView(region: Any) -> Any:
    return region._local_buffer()[0]


def test_views_for_other_libraries() -> None:
    with pair() as (nodes, region, remote):
        local = GpuArray(bytes(range(256)) * 16)
        remote[64:].write(local).wait(10)
        for view in (region[64 : 64 + 4096], remote[64 : 64 + 4096]):
            found = view.__cuda_array_interface__
            assert (found["shape"], found["typestr"], found["data"][1]) == ((4096,), "|u1", False)
            copy = GpuArray(4096)
            region[64 : 64 + 4096]  # a slice is a view of its own
            remote[64 : 64 + 4096].read(copy).wait(10)
            assert copy.tobytes() == bytes(range(256)) * 16
        readable = nodes.far.allocate(64, access="r", device="cuda:0")
        seen = nodes.to_far.region(readable.handle())
        assert seen.__cuda_array_interface__["data"][1], "it was granted for reading alone"
        host = nodes.far.allocate(8)
        assert not hasattr(host, "__cuda_array_interface__")
        assert not hasattr(nodes.to_far.region(host.handle()), "__cuda_array_interface__")


def test_objects_that_lie() -> None:
    class Lie:
        def __init__(self, **changes: Any) -> None:
            self.__cuda_array_interface__ = {
                "shape": (8,), "typestr": "|u1", "data": (array.address, False), "version": 3,
                **changes,
            }  # fmt: skip

    array = GpuArray(4096)
    host = np.zeros(64, np.uint8)
    with pair() as (_nodes, _region, remote):
        remote.write(Lie()).wait(10)
        for changes, words in (
            ({"data": (host.ctypes.data, False)}, "is none"),
            ({"shape": (1 << 40,)}, "is none"),
            ({"strides": (2,)}, "not contiguous"),
            ({"mask": host}, "mask"),
        ):
            with pytest.raises(ValueError, match=words):
                remote.write(Lie(**changes))
        with pytest.raises(ValueError, match="read-only"):
            remote.read(Lie(data=(array.address, True)))


@pytest.mark.gpu
@pytest.mark.parametrize("handle", [0, 1], ids=["0", "CU_STREAM_LEGACY"])
def test_the_legacy_stream_is_behind_blocking_streams(handle: int) -> None:
    with pair() as (_, _, remote):
        stream, local, found = GpuStream(blocking=True), GpuArray(MIB), np.zeros(MIB, np.uint8)
        for value in range(1, 4):
            stream.pause(0.2)
            stream.fill(local, value)
            remote.write(local, stream=handle).wait(10)
            remote.read(found).wait(10)
            assert (found == value).all()


def test_a_stream_that_is_captured(driver: str) -> None:
    if driver == "real":
        pytest.skip("the test with torch has it")
    from tensorwire.testing import gpu

    stream = GpuStream()
    with pair() as (_nodes, _region, remote):
        gpu._call("cuStreamBeginCapture_v2", gpu.ctypes.c_void_p(stream.cuda_stream), 0)
        for start in (remote.write, remote.read):
            with pytest.raises(ValueError, match="captured into a CUDA graph"):
                start(GpuArray(8), stream=stream)
        gpu._call("cuStreamEndCapture", gpu.ctypes.c_void_p(stream.cuda_stream), None)
        remote.write(GpuArray(8), stream=stream).wait(10)
    stream.close()


def test_a_batch_of_several_streams_names_one() -> None:
    class On:
        def __init__(self, stream: GpuStream) -> None:
            self.__cuda_array_interface__ = {
                **array.__cuda_array_interface__, "stream": stream.cuda_stream,
            }  # fmt: skip

    array, streams = GpuArray(8), [GpuStream(), GpuStream()]
    with pair() as (nodes, _region, remote):
        locals_ = [On(stream) for stream in streams]
        targets = [remote[:8], remote[8:16]]
        with pytest.raises(ValueError, match="another stream"):
            nodes.to_far.write(locals_, targets)
        nodes.to_far.write(locals_, targets, stream=streams[0]).wait(10)
    for stream in streams:
        stream.close()


def test_the_path_tells_of_each_pair() -> None:
    for transport, words in (("shm", "one copy by the GPU"), ("tcp", "pinned chunks")):
        with node_pair([transport]) as nodes:
            told = {(each.local, each.remote): each.how for each in nodes.to_far.path.gpu}
            assert len(told) == 4
            assert words in told["gpu", "gpu"]


def test_handles_of_other_incarnations_and_quota() -> None:
    with pair() as (nodes, region, _remote):
        leased = nodes.far.stats()
        assert leased["gpu_bytes_direct"] == 0
        region.free()
        again = nodes.far.allocate(MIB, name="r", device="cuda:0")
        back = GpuArray(b"x" * MIB)
        nodes.to_far.region("r").read(back).wait(10)
        assert not any(back.tobytes()), "new memory is zeroed"
        again.free()


def _in_a_fork(remote: RemoteRegion, results: Any) -> None:
    try:
        Node("child").allocate(8, device="cuda:0")
    except Exception as error:
        results.send(f"{type(error).__name__}: {error}")
    else:
        results.send("nothing was raised")


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_has_no_gpu() -> None:
    with pair() as (_nodes, _region, remote):
        context = multiprocessing.get_context("fork")
        here, there = context.Pipe()
        child = context.Process(target=_in_a_fork, args=(remote, there))
        child.start()
        assert here.poll(20)
        said = here.recv()
        child.join(20)
        assert said.startswith("UnavailableError: CUDA cannot be used in a process that was forked")
        remote.write(GpuArray(8)).wait(10)


def test_a_descriptor_that_is_no_memory_of_a_gpu(tmp_path: Path) -> None:
    """A hostile peer's descriptor is refused before the driver sees it, or by the driver."""
    reader, writer = os.pipe()
    file = os.open(tmp_path / "file", os.O_CREAT | os.O_RDWR)
    socket_like = os.eventfd(0)
    memfd = os.memfd_create("standin-gpu-x")
    try:
        for descriptor in (reader, writer, file, socket_like):
            with pytest.raises(ValueError, match="memory of a GPU that is none"):
                _core.import_gpu_memory(descriptor, 4096, True)
        with pytest.raises(UnavailableError, match="a peer's memory on a GPU"):
            _core.import_gpu_memory(memfd, 4096, True)
        null = os.open("/dev/null", os.O_RDWR)
        with pytest.raises(UnavailableError, match="a peer's memory on a GPU"):
            _core.import_gpu_memory(null, 4096, True)
        os.close(null)
    finally:
        for descriptor in (reader, writer, file, socket_like, memfd):
            os.close(descriptor)


def _own(channel: Channel) -> None:
    with Node("owner", transports=["shm"]) as node:
        channel.send(node.allocate(32 * MIB, device="cuda:0").handle())
        channel.recv(None)


@pytest.mark.slow
def test_twenty_owners_are_killed() -> None:
    """In the middle of copies to and from their memory; nothing of any is left here."""
    warm_up_gpu()
    local = GpuArray(bytes(32 * MIB))
    with Node("user", transports=["shm"]) as node:
        _kill_one(node, local)
        with assert_no_leak():
            for _ in range(19):
                _kill_one(node, local)


def _kill_one(node: Node, local: GpuArray) -> None:
    with PeerGroup() as group:
        member = group.start(_own)
        handle = member.recv(60)
        remote = node.connect(handle.address).region(handle)
        transfers = [remote.write(local) for _ in range(4)] + [remote.read(local)]
        member.kill()
        for transfer in transfers:
            with contextlib.suppress(PeerLostError):
                transfer.wait(20)
        assert all(transfer.done() for transfer in transfers)


def test_pinned_by_somebody_else() -> None:
    """torch, say, has pinned the memory of a region: the GPU copies by itself, and it stays so."""
    from tensorwire.testing import gpu

    with pair() as (nodes, _region, remote):
        local = nodes.near.allocate(MIB)
        address = gpu.ctypes.c_void_p(local.array().ctypes.data)
        gpu._enter(0)
        gpu._call("cuMemHostRegister_v2", address, gpu.ctypes.c_size_t(MIB), 1)
        remote.write(local).wait(10)
        stats = nodes.near.stats()
        assert (stats["gpu_bytes_direct"], stats["gpu_bytes_staged"]) == (MIB, 0)
        local.free()
        gpu._enter(0)
        gpu._call("cuMemHostUnregister", address)


def test_nothing_is_left() -> None:
    warm_up_gpu()
    with assert_no_leak():
        for transport in ("shm", "tcp"):
            with pair(transport=transport) as (_nodes, _region, remote):
                remote.write(GpuArray(bytes(MIB))).wait(10)
                remote.read(np.zeros(MIB, np.uint8)).wait(10)
