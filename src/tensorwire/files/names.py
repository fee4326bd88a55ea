"""Converts names of tensors to names of files without characters of patterns and URLs. Pure."""

from __future__ import annotations

from urllib.parse import quote, unquote

NPY = ".npy"
_SPECIAL = frozenset("/%:*?[]#\\")


def file_name(name: str) -> str:
    """Returns a name that is one part of a path; different names give different ones."""
    if name in (".", "..", ""):
        return name.replace(".", "%2E") or "%"
    return "".join(
        quote(each, safe="") if each in _SPECIAL or not each.isprintable() else each
        for each in name
    )


def tensor_name(file: str) -> str:
    """Returns the name of the tensor of a file: the inverse of `file_name`."""
    return "" if file == "%" else unquote(file, errors="strict")


def tensor_of(file: str) -> str:
    """Returns the name of the tensor or state in an .npy file of this name.

    Raises:
        LookupError: there can be no such file.
    """
    stem = file.removesuffix(NPY)
    name = tensor_name(stem)
    if not file.endswith(NPY) or file_name(name) != stem:
        raise LookupError(file)
    return name
