"""Makes the header of .npy files, as numpy reads it. Pure.

bfloat16, which numpy does not have, is two bytes without a meaning ("|V2"), as ml_dtypes writes it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_MAGIC = b"\x93NUMPY\x01\x00"
_ALIGN_BYTES = 64  # of the data, as numpy wants it


def numpy_dtype(name: str) -> np.dtype[np.generic]:
    """Returns the dtype of a tensor as numpy has it."""
    return np.dtype("V2") if name == "bfloat16" else np.dtype(name)


def npy_header(dtype: str, shape: Sequence[int]) -> bytes:
    """Returns the header of the elements, which follow in C order."""
    described = numpy_dtype(dtype).newbyteorder("<").str
    text = repr({"descr": described, "fortran_order": False, "shape": tuple(shape)})
    size = len(_MAGIC) + 2 + len(text) + 1
    if size > 0xFFFF:
        raise ValueError("a shape has too many dimensions for the header of an .npy file")
    padding = -size % _ALIGN_BYTES
    length = len(text) + 1 + padding
    return _MAGIC + length.to_bytes(2, "little") + (text + " " * padding + "\n").encode("latin-1")
