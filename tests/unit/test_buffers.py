"""The local side of a transfer: what is taken, what is refused, and with which advice."""

import array
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from tensorwire._core import Buffer
from tensorwire.memory import buffers
from tensorwire.memory.buffers import size_bytes


def as_local(local: Any) -> Any:
    """Returns the core's view of an object that no stream of a GPU computes."""
    found, stream = buffers.as_local(local)
    assert stream is None
    return found


class Dlpack:
    """An object of another array library."""

    def __init__(self, device: int = 1) -> None:
        self.array = np.arange(10.0)
        self.device = device

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return (self.device, 0)


@pytest.mark.parametrize(
    ("local", "size"),
    [
        (b"abc", 3),
        (bytearray(5), 5),
        (memoryview(b"abcd")[1:], 3),
        (array.array("d", [1, 2]), 16),
        (np.zeros((2, 3), np.float32), 24),
        (np.zeros(0), 0),
        (np.float64(2), 8),
        (np.array(7, "M8[s]"), 8),
        (np.zeros(3, "u1,f8"), 27),
        (np.arange(6).reshape(2, 3)[1:], 24),
    ],
)
def test_buffers_pass_as_they_are(local: Any, size: int) -> None:
    assert as_local(local) is local
    assert size_bytes(local) == size


def test_dlpack_shares_memory() -> None:
    source = Dlpack()
    local = as_local(source)
    assert isinstance(local, np.ndarray)
    assert np.shares_memory(local, source.array)
    assert size_bytes(local) == 80


def test_dlpack_of_a_device() -> None:
    with pytest.raises(ValueError, match=r"device type 4.*CPU"):
        as_local(Dlpack(device=4))
    with pytest.raises(TypeError, match=r"Dlpack on a GPU.*not there"):
        as_local(Dlpack(device=2))


@pytest.mark.parametrize(
    ("local", "advice"),
    [
        (None, "numpy array"),
        (3, "numpy array"),
        (object(), "numpy array"),
        ("text", "encode"),
        ([1.0, 2.0], "sequence of remotes"),
        (range(3), "numpy array"),
    ],
)
def test_without_memory(local: object, advice: str) -> None:
    with pytest.raises(TypeError, match=f"{type(local).__name__}.*{advice}"):
        as_local(local)


@pytest.mark.cold
def test_torch_is_not_imported() -> None:
    code = (
        "import sys, numpy, tensorwire.memory.buffers as b; b.as_local(b'x');"
        "b.as_local(numpy.float32(1)); sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


class TestTensors:
    """torch tensors."""

    torch: Any

    @pytest.fixture(autouse=True)
    def import_torch(self) -> None:
        self.torch = pytest.importorskip("torch")

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16", "complex64", "int8", "bool"])
    def test_address_and_size(self, dtype: str) -> None:
        dtype = getattr(self.torch, dtype)
        grad = dtype.is_floating_point or dtype.is_complex
        tensor = self.torch.zeros(3, 5, dtype=dtype, requires_grad=grad)
        assert type(as_local(tensor)) is Buffer
        assert size_bytes(tensor) == 15 * tensor.element_size()

    def test_shapes_without_elements(self) -> None:
        for shape in ((), (0,), (3, 0)):
            tensor = self.torch.zeros(shape)
            assert type(as_local(tensor)) is Buffer
            assert size_bytes(tensor) == 4 * tensor.numel()

    def test_parameter(self) -> None:
        parameter = self.torch.nn.Parameter(self.torch.ones(4))
        assert type(as_local(parameter)) is Buffer

    @pytest.mark.parametrize(
        ("case", "advice"),
        [
            ("transposed", "contiguous"),
            ("column", "contiguous"),
            ("expanded", "contiguous"),
            ("meta", "cpu"),
            ("sparse", "sparse"),
            ("conjugate", "resolve_conj"),
        ],
    )
    def test_refused(self, case: str, advice: str) -> None:
        torch = self.torch
        tensors = {
            "transposed": torch.zeros(4, 4).t(),
            "column": torch.zeros(4, 4)[:, 1],
            "expanded": torch.zeros(3).expand(2, 3),
            "meta": torch.zeros(4, device="meta"),
            "sparse": torch.eye(4).to_sparse(),
            "conjugate": torch.zeros(3, dtype=torch.complex64).conj(),
        }
        with pytest.raises(ValueError, match=advice):
            as_local(tensors[case])

    @pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor:UserWarning")
    def test_without_memory(self) -> None:
        fake = pytest.importorskip("torch._subclasses.fake_tensor")
        with fake.FakeTensorMode():
            tensor = self.torch.zeros(3)
        with pytest.raises(TypeError, match="no memory"):
            as_local(tensor)
