"""The memory in which gradients are written as files, without any job."""

import errno

import numpy as np
import pytest

from tensorwire.files.commit_text import CommitText
from tensorwire.files.gradient_memory import ABSENT, COMMITTED, OPEN, OVER, GradientMemory, plan
from tensorwire.files.npy import npy_header
from tensorwire.parameters import Layout, Spec, TensorSpec

SPEC = Spec(
    "torch.optim.SGD",
    ("lr",),
    1,
    2,
    (
        TensorSpec("a", "float32", (3, 5)),
        TensorSpec("frozen", "float32", (2,), "constant"),
        TensorSpec("h", "bfloat16", (4,)),
        TensorSpec("turned", "float32", (2, 3), order=(1, 0)),
        TensorSpec("empty", "float64", (0, 7)),
    ),
)


def made() -> GradientMemory:
    _, told, size = plan(Layout(SPEC))
    memory = np.zeros(size, np.uint8)
    found = GradientMemory.make(memory, told, 4, 7)
    assert found.state == COMMITTED
    found.open(2)
    assert found.files == plan(Layout(SPEC))[0]
    assert GradientMemory.make(memory, told, 4, 7).version == 2  # of a predecessor
    return found


def code_of(action: object, *arguments: object) -> int | None:
    with pytest.raises(OSError, match="Errno") as caught:
        action(*arguments)  # type: ignore[operator]
    return caught.value.errno


def test_files_are_those_of_the_tensors_with_gradients() -> None:
    memory = made()
    assert [(each.name, each.shape) for each in memory.files] == [
        ("a", (3, 5)),
        ("h", (4,)),
        ("turned", (3, 2)),
        ("empty", (0, 7)),
    ]
    assert (memory.state, memory.version, memory.store) == (OPEN, 2, 7)
    with pytest.raises(LookupError):
        memory.index("frozen")


def test_what_was_written_is_taken() -> None:
    memory = made()
    header, data = npy_header("float32", (3, 5)), np.arange(15, dtype=np.float32)
    memory.write(0, len(header), data.view(np.uint8), "a")
    assert not memory.read(0, 0, len(header)).strip(b"\0")  # a hole
    memory.write(0, 0, header, "a")
    taken = memory.elements(0, "a", False)
    assert taken is not None
    assert (taken.view(np.float32) == data).all()
    memory.write(3, 0, npy_header("float64", (0, 7)), "empty")
    assert memory.elements(3, "empty", False) is not None
    memory.sizes[1] = ABSENT
    assert memory.elements(1, "h") is None


def test_a_file_of_another_length_or_kind_is_refused() -> None:
    memory = made()
    header = npy_header("float32", (3, 5))

    def put(data: bytes) -> None:
        memory.truncate(0, 0, "a")
        memory.write(0, 0, data, "a")

    assert code_of(memory.elements, 0, "a") == errno.ENODATA
    for size in (1, 9, 30, len(header), len(header) + 59):
        put((header + bytes(60))[:size])
        assert code_of(memory.elements, 0, "a") == errno.ENODATA
    put(header + bytes(61))
    assert code_of(memory.elements, 0, "a") == errno.EFBIG
    room = memory.files[0].room_bytes
    assert code_of(memory.write, 0, room, b"x", "a") == errno.EFBIG
    assert code_of(memory.truncate, 0, room + 1, "a") == errno.EFBIG
    text = b"{'descr': '<f4', 'fortran_order': True, 'shape': (3, 5), }"
    for wrong in (
        b"x" * 188,
        npy_header("float64", (3, 5)),
        npy_header("float32", (5, 3)),
        b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text,
        b"\x93NUMPY\x01\x00\x40\x00" + b"[" * 64,
        b"\x93NUMPY\x02\x00\xff\xff\xff\xff" + bytes(64),
    ):
        put(wrong + bytes(60))
        assert code_of(memory.elements, 0, "a") == errno.EINVAL
    for kind in (  # the first divides by zero in numpy, which ends the process
        "'m8[s/0]'",
        "('f4', 1)",
        f"{{'names': ['a'], 'formats': ['f4'], 'offsets': [{1 << 70}]}}",
        "b'<f4'",
        "None",
    ):
        text = f"{{'descr': {kind}, 'fortran_order': False, 'shape': (3, 5)}}".encode()
        put(b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + bytes(60))
        assert code_of(memory.elements, 0, "a") == errno.EINVAL
    put(header + np.full(15, np.inf, np.float32).tobytes())
    assert code_of(memory.elements, 0, "a", False) == errno.EDOM
    assert memory.elements(0, "a", True) is not None
    memory.write(1, 0, npy_header("bfloat16", (4,)) + b"\x80\x7f" * 4, "h")
    assert code_of(memory.elements, 1, "h", False) == errno.EDOM


def test_writing_ends_with_a_commit_and_begins_with_a_version() -> None:
    memory = made()
    memory.write(0, 0, b"abc", "a")
    memory.commit(12.0)
    assert memory.samples == 12
    assert code_of(memory.write, 0, 0, b"x", "a") == errno.EBUSY
    memory.open(3)
    assert (memory.version, memory.size(0)) == (3, 0)
    memory.commit(None)
    assert memory.samples is None
    memory.end()
    assert memory.state == OVER
    assert code_of(memory.truncate, 0, 0, "a") == errno.ESTALE


def test_texts_of_commits() -> None:
    text = "version 7\n absent a b \nsamples 2.5\nnan\n\n"
    found = CommitText.parse(text, "commit")
    assert found == CommitText(7, 2.5, ("a b",), True)
    assert CommitText.parse(str(found), "commit") == found
    strange = CommitText(7, absent=("a\nversion 8", "b\u2028c", "%2F/", " "))  # names of tensors
    assert CommitText.parse(str(strange), "commit") == strange
    wrong_texts = ["", "version", "version x", "version 1\nsamples nan", "version 1\nother 2"]
    wrong_texts += ["version 1_0", "version -1", "version 1\nversion 2"]
    wrong_texts += ["version 1\nsamples 2\nsamples 2", "version 1\nnan\nnan"]
    for wrong in wrong_texts:
        assert code_of(CommitText.parse, wrong, "commit") == errno.EINVAL


def test_memory_of_something_else() -> None:
    with pytest.raises(ValueError, match="no memory for gradients"):
        GradientMemory(np.zeros(8192, np.uint8))
