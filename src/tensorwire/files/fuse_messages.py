"""Encodes and decodes the messages of FUSE that a mount understands. Pure.

The layouts are those of the kernel's include/uapi/linux/fuse.h, version 7.31.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from enum import IntEnum

_ATTRIBUTES = struct.Struct("<QQQQQQIIIIIIIIII")
_ENTRY = struct.Struct("<QQQQII")
_ATTRIBUTES_HEAD = struct.Struct("<QII")
_OPENED = struct.Struct("<QIi")
_DIRENT = struct.Struct("<QQII")
_STATFS = struct.Struct("<QQQQQIIII24x")
UNKNOWN_INODE = 0xFFFFFFFF


class Operation(IntEnum):
    """The requests of the kernel."""

    LOOKUP = 1
    FORGET = 2
    GETATTR = 3
    SETATTR = 4
    MKDIR = 9
    UNLINK = 10
    RMDIR = 11
    RENAME = 12
    OPEN = 14
    READ = 15
    WRITE = 16
    STATFS = 17
    RELEASE = 18
    FSYNC = 20
    GETXATTR = 22
    LISTXATTR = 23
    FLUSH = 25
    OPENDIR = 27
    READDIR = 28
    RELEASEDIR = 29
    FSYNCDIR = 30
    CREATE = 35
    INTERRUPT = 36
    DESTROY = 38
    POLL = 40
    BATCH_FORGET = 42
    RENAME2 = 45


# They would change the tree in ways that are not possible here.
CHANGING = frozenset({6, 8, 13, 21, 24, 51})
"""SYMLINK, MKNOD, LINK, SETXATTR, REMOVEXATTR and TMPFILE."""

DIRECT_IO = 1
"""A flag of an open file: the kernel keeps none of its bytes."""
PASSTHROUGH = 1 << 7
"""A flag of an open file: the kernel reads and maps another file for it, the backing."""

SIZE = 1 << 3
MODE, UID, GID = 1 << 0, 1 << 1, 1 << 2
"""Flags of SETATTR: the attributes to change."""


def attributes(inode: int, size: int, modified: float, mode: int, uid: int, gid: int) -> bytes:
    """Returns the attributes of a file or folder, as answers have them."""
    seconds = int(modified)
    nanoseconds = int((modified - seconds) * 1e9)
    return _ATTRIBUTES.pack(
        inode, size, -(-size // 512), seconds, seconds, seconds, nanoseconds, nanoseconds,
        nanoseconds, mode, 1, uid, gid, 0, 4096, 0,
    )  # fmt: skip


def inode_of(path: str) -> int:
    """Returns the inode number of a path, the same for all versions of it.

    `cp` skips a file whose inode is another one when it opens it than when it has looked at it.
    """
    data = path.encode("utf-8", "surrogateescape")
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little") or 1


def entry(node: int, valid_s: int, found: bytes) -> bytes:
    """Returns the answer to LOOKUP; the kernel may keep the name that long, and no attributes."""
    return _ENTRY.pack(node, 0, valid_s, 0, 0, 0) + found


def attributes_answer(found: bytes) -> bytes:
    """Returns the answer to GETATTR and SETATTR; they are asked for anew each time."""
    return _ATTRIBUTES_HEAD.pack(0, 0, 0) + found


def opened(handle: int, flags: int = 0, backing: int = 0) -> bytes:
    """Returns the answer to OPEN and OPENDIR; `backing` goes with PASSTHROUGH."""
    return _OPENED.pack(handle, flags, backing)


def directory(names: Sequence[tuple[str, bool]], first: int, most_bytes: int) -> bytes:
    """Returns the answer to READDIR: the names that fit, each marked as a folder or file."""
    found = bytearray()
    for number, (name, is_folder) in enumerate(names[first:], first + 1):
        data = name.encode("utf-8", "surrogateescape")
        kind = 4 if is_folder else 8
        size = _DIRENT.size + len(data)
        size += -size % 8
        if len(found) + size > most_bytes:
            break
        found += (_DIRENT.pack(UNKNOWN_INODE, number, len(data), kind) + data).ljust(size, b"\0")
    return bytes(found)


def statfs() -> bytes:
    """Returns the answer to STATFS: no free space, and names of up to 1024 bytes."""
    return _STATFS.pack(0, 0, 0, 0, 0, 4096, 1024, 4096, 0)


def name_in(body: bytes) -> str:
    """Returns a name at the beginning of a body."""
    return body.partition(b"\0")[0].decode("utf-8", "surrogateescape")


def unpack_setattr(body: bytes) -> tuple[int, int]:
    """Returns which attributes are to be changed, and the new size."""
    valid, _, _, size = struct.unpack_from("<IIQQ", body)
    return valid, size


def unpack_open(body: bytes) -> int:
    """Returns the flags of open(2)."""
    return int(struct.unpack_from("<I", body)[0])


def unpack_create(body: bytes) -> tuple[int, str]:
    """Returns the flags of open(2), and the name, of CREATE."""
    return int(struct.unpack_from("<I", body)[0]), name_in(body[16:])


def unpack_mkdir(body: bytes) -> str:
    """Returns the name of MKDIR."""
    return name_in(body[8:])


def unpack_rename(body: bytes, has_flags: bool) -> tuple[int, int, str, str]:
    """Returns the new folder, flags, and both names, of RENAME, and of RENAME2, which has flags."""
    folder, flags = struct.unpack_from("<QI", body)
    old, new = body[16 if has_flags else 8 :].split(b"\0")[:2]
    return folder, flags if has_flags else 0, name_in(old), name_in(new)


def unpack_read(body: bytes) -> tuple[int, int, int]:
    """Returns handle, offset and size, of READ, READDIR, and WRITE, whose data follow at 40."""
    handle, offset, size = struct.unpack_from("<QQI", body)
    return handle, offset, size


WRITTEN_AT = 40


def unpack_handle(body: bytes) -> int:
    """Returns the handle of RELEASE, FSYNC and others, or how many lookups FORGET forgets."""
    return int(struct.unpack_from("<Q", body)[0])


def unpack_xattr(body: bytes) -> tuple[int, str]:
    """Returns the size of the caller's buffer, 0 if it asks for the size; the name, of GETXATTR."""
    return int(struct.unpack_from("<I", body)[0]), name_in(body[8:])


def number_answer(number: int) -> bytes:
    """Returns the answer to WRITE and POLL, and to GETXATTR or LISTXATTR that asks for a size."""
    return struct.pack("<II", number, 0)


def unpack_poll(body: bytes) -> tuple[int, int, int]:
    """Returns handle, the number under which the poll is woken, and whether that is wanted."""
    handle, poll, flags, _ = struct.unpack_from("<QQII", body)
    return handle, poll, flags & 1


def unpack_batch_forget(body: bytes) -> list[tuple[int, int]]:
    """Returns nodes and how many of their lookups are forgotten."""
    (count, _) = struct.unpack_from("<II", body)
    return [struct.unpack_from("<QQ", body, 8 + 16 * i) for i in range(count)]
