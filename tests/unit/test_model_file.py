"""A store's values as a file that safetensors reads, and the parts of it at several servers."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorwire.files.npy import npy_header, numpy_dtype
from tensorwire.parameters import ITEM_BYTES, Layout, Spec, TensorSpec
from tensorwire.parameters.model_file import PAGE_BYTES, ModelFile, held_bytes, model_file

safetensors = pytest.importorskip("safetensors")

DTYPES = sorted({*ITEM_BYTES, "int16", "int8", "uint8", "bool"})
tensors = st.lists(
    st.tuples(
        st.sampled_from(DTYPES),
        st.lists(st.integers(0, 40), max_size=3),
        st.sampled_from(["trained", "broadcast"]),
    ),
    max_size=12,
)


def layout_of(found: list[tuple[str, list[int], str]]) -> Layout:
    specs = [TensorSpec(f"t{i}", d, tuple(s), k) for i, (d, s, k) in enumerate(found)]
    return Layout(Spec("sgd", (), 1, 1, tuple(specs)), cell_bytes=256)


def parts(file: ModelFile, layout: Layout, values: np.ndarray, servers: int) -> bytes:
    """The file as the servers' parts make it; each byte comes once."""
    whole, filled = np.zeros(file.size_bytes, np.uint8), np.zeros(file.size_bytes, np.uint8)
    for server, share in enumerate(layout.deal(servers)):
        held = file.held(share, server == 0)
        memory = np.zeros(held_bytes(held), np.uint8)
        for at, piece in file.pieces(values[share.start : share.stop], share, server == 0):
            memory[at : at + len(piece)] = piece
        for start, stop, at in held:
            whole[start:stop] = memory[at : at + stop - start]
            filled[start:stop] += 1
    assert (filled == 1).all()
    return whole.tobytes()


@settings(max_examples=60, deadline=None)
@given(tensors, st.integers(1, 4))
def test_safetensors_reads_what_servers_have(
    found: list[tuple[str, list[int], str]], servers: int
) -> None:
    layout = layout_of(found)
    values = np.random.default_rng(0).integers(0, 2, layout.size_bytes, np.uint8)
    file = model_file(layout, 0, 5)
    data = parts(file, layout, values, servers)
    assert len(file.header) % 8 == 0 or file.fills_pages
    if file.fills_pages:
        assert file.size_bytes % PAGE_BYTES == 0
    read = dict(safetensors.deserialize(data))
    assert len(read) == len(found)
    for index, (dtype, shape, _) in enumerate(found):
        entry, place = read[f"t{index}"], layout.places[index]
        assert list(entry["shape"]) == shape
        assert bytes(entry["data"]) == values[place.start : place.end].tobytes()
        if place.end > place.start:  # a view of it needs no copy
            assert file.places[index].start % numpy_dtype(dtype).itemsize == 0
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    assert header["__metadata__"]["tensorwire.version"] == "5"


@given(st.sampled_from(DTYPES), st.lists(st.integers(0, 1 << 40), max_size=32))
def test_numpy_reads_the_header_of_an_array(dtype: str, shape: list[int]) -> None:
    import io

    header = npy_header(dtype, shape)
    assert len(header) % 64 == 0
    file = io.BytesIO(header)
    assert np.lib.format.read_magic(file) == (1, 0)
    told, fortran, found = np.lib.format.read_array_header_1_0(file)
    assert (list(told), fortran, found) == (shape, False, numpy_dtype(dtype))
    assert file.read() == b""
