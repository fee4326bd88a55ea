"""A file whose server hangs: FUSE spoken over /dev/fuse, answers until it is opened, then none.

A process that asks for its attributes or closes it waits for ever, or until the server dies. The
layouts are from the kernel's include/uapi/linux/fuse.h, version 7.31.
"""

from __future__ import annotations

import os
import signal
import struct
import tempfile

from attack import CLONE_NEWNS, PR_SET_PDEATHSIG, call

HEADER = struct.Struct("<IIQQIIII")  # length, operation, unique, node, uid, gid, pid, padding
ANSWER = struct.Struct("<IiQ")  # length, error, unique
GETATTR, OPEN, INIT = 3, 14, 26
MS_REC, MS_PRIVATE, MNT_DETACH = 0x4000, 0x40000, 2
ENOSYS = 38


def attributes() -> bytes:
    """The attributes of a file that everybody may read and write, valid for no time."""
    return struct.pack("<QII", 0, 0, 0) + struct.pack(
        "<QQQQQQIIIIIIIIII", 1, 4096, 8, 0, 0, 0, 0, 0, 0, 0o100666, 1, 0, 0, 0, 4096, 0
    )


def serve(device: int) -> None:
    """Answers what opening the file takes, and from then on nothing."""
    opened = False
    while True:
        request = os.read(device, 1 << 17)
        _, operation, unique, *_ = HEADER.unpack_from(request)
        if opened:
            continue
        if operation == INIT:
            body = struct.pack("<IIIIHHIIHHII", 7, 31, 4096, 0, 8, 8, 4096, 1, 1, 0, 0, 0) + bytes(
                24
            )
        elif operation == GETATTR:
            body = attributes()
        elif operation == OPEN:
            body, opened = struct.pack("<QII", 1, 0, 0), True
        else:
            os.write(device, ANSWER.pack(ANSWER.size, -ENOSYS, unique))
            continue
        os.write(device, ANSWER.pack(ANSWER.size + len(body), 0, unique) + body)


def hung_file() -> int:
    """An open file of a server that hangs from now on; it dies with this process. Needs root.

    The mount is in a mount namespace of its own, which this process enters.
    """
    call("unshare", CLONE_NEWNS)
    call("mount", b"none", b"/", None, MS_REC | MS_PRIVATE, None)
    device = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    with tempfile.NamedTemporaryFile() as point:
        options = f"fd={device},rootmode=100000,user_id=0,group_id=0,allow_other"
        call("mount", b"hung", point.name.encode(), b"fuse", 0, options.encode())
        if os.fork() == 0:
            call("prctl", PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            try:
                serve(device)
            finally:
                os._exit(0)
        os.close(device)
        try:
            os.stat(point.name)  # the kernel knows now that there is a page that can be mapped
            return os.open(point.name, os.O_RDWR | os.O_CLOEXEC)
        finally:
            call("umount2", point.name.encode(), MNT_DETACH)


def hung_file_if_any() -> int:
    """Returns the descriptor of `hung_file`; -1 on a machine without FUSE."""
    try:
        return hung_file()
    except OSError:
        return -1
