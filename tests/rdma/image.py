"""The boot image of the rig's machines: Debian's kernel, not installed, and an initramfs.

Both are kept in build/rig and made anew only when the kernel or this file changes. The initramfs
loads the modules, lays a writable layer over the host's root and hands over to `agent.py` there.
"""

import fcntl
import lzma
import os
import platform
import shlex
import shutil
import struct
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "rig"
AGENT = Path(__file__).with_name("agent.py")

# rdma_rxe asks for the hash "crc32" by name, which does not load its module here.
MODULES = (
    "virtio_pci", "virtio_net", "virtio_console", "9pnet_virtio", "9p", "overlay", "crc32_generic",
    "rdma_rxe", "ib_uverbs", "rdma_cm", "rdma_ucm", "fuse",
)  # fmt: skip

INIT = """#!/bin/busybox sh
bb=/bin/busybox
$bb mkdir -p /proc /host /layer /root
$bb mount -t proc proc /proc
while read -r name; do $bb insmod "/modules/$name" || echo "not loaded: $name"; done </modules/order
$bb mount -t 9p -o trans=virtio,version=9p2000.L,msize=512000,cache=loose,ro host /host
$bb mount -t tmpfs -o size=75% layer /layer
$bb mkdir /layer/upper /layer/work
$bb mount -t overlay -o lowerdir=/host,upperdir=/layer/upper,workdir=/layer/work overlay /root
$bb mount -t proc proc /root/proc
$bb mount -t sysfs sys /root/sys
$bb mount -t devtmpfs dev /root/dev
$bb mkdir -p /root/dev/shm /root/dev/pts
$bb mount -t tmpfs shm /root/dev/shm
$bb mount -t devpts pts /root/dev/pts
$bb mount -t tmpfs run /root/run
$bb umount /proc
exec $bb switch_root /root {agent}
"""


class ImageError(Exception):
    """The machines cannot be made here; the message says what is missing."""


@dataclass(frozen=True)
class Image:
    """The files that QEMU is given.

    Attributes:
        kernel: an uncompressed ELF image. Uncompressing it under emulation would take seconds.
        initramfs: a cpio archive.
    """

    kernel: Path
    initramfs: Path


def image() -> Image:
    """Gives the image, made first if it is missing or out of date. Safe in several processes.

    Raises:
        ImageError: a tool or the kernel cannot be had.
    """
    if platform.machine() != "x86_64":
        raise ImageError("the rig needs an x86-64 host: its machines run this host's programs")
    BUILD.mkdir(parents=True, exist_ok=True)
    with open(BUILD / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        made = Image(BUILD / "vmlinux", BUILD / "initramfs.cpio")
        package = next(iter(sorted(BUILD.glob("linux-image-*.deb"))), None)
        sources = [package or BUILD / "missing", Path(__file__), Path(sys.executable)]
        if any(_older(path, sources) for path in (made.kernel, made.initramfs)):
            _make(package or _download(), made)
    return made


def _older(path: Path, sources: list[Path]) -> bool:
    if not all(source.exists() for source in (path, *sources)):
        return True
    return any(path.stat().st_mtime < source.stat().st_mtime for source in sources)


def _download() -> Path:
    """Fetches the newest kernel that Debian has; nothing of it is installed here."""
    try:
        return _fetch()
    except ImageError:
        if os.geteuid() != 0:
            raise
        _output("apt-get", "update", "-qq")  # the lists are missing or old
        return _fetch()


def _fetch() -> Path:
    found = _output("apt-cache", "depends", "linux-image-amd64").split()
    names = [word for word in found if word.startswith("linux-image-") and word[12].isdigit()]
    if not names:
        raise ImageError(
            "apt knows no kernel; with Debian's sources, as root: apt-get update. The rig boots "
            f"what linux-image-amd64 depends on; that package as a .deb in {BUILD} does, too"
        )
    _output("apt-get", "download", "-qq", "-o", "APT::Sandbox::User=root", names[0])
    return next(BUILD.glob("linux-image-*.deb"))


def _make(package: Path, made: Image) -> None:
    tree = BUILD / "tree"
    shutil.rmtree(tree, ignore_errors=True)
    _output("dpkg-deb", "-x", str(package), str(tree))
    modules = next((tree / "lib" / "modules").iterdir())
    version = modules.name
    made.kernel.write_bytes(_uncompressed((tree / "boot" / f"vmlinuz-{version}").read_bytes()))
    _output("depmod", "-b", str(tree), version)
    root = BUILD / "initramfs"
    shutil.rmtree(root, ignore_errors=True)
    for folder in ("bin", "dev", "modules"):
        (root / folder).mkdir(parents=True)
    shutil.copy(_tool("busybox", "busybox-static"), root / "bin")
    order = []
    for line in _output("modprobe", "-d", str(tree), "-S", version, "--show-depends", "-a",
                        *MODULES).splitlines():  # fmt: skip
        path = Path(line.split()[1])
        if line.startswith("insmod") and path.name not in order:
            order.append(path.name)
            shutil.copy(path, root / "modules")
    (root / "modules" / "order").write_text("".join(f"{name}\n" for name in order))
    agent = f"{shlex.quote(sys.executable)} -IS {shlex.quote(str(AGENT))}"
    (root / "init").write_text(INIT.format(agent=agent))
    (root / "init").chmod(0o755)
    with open(made.initramfs, "wb") as file:
        names = "\n".join(str(path.relative_to(root)) for path in sorted(root.rglob("*")))
        subprocess.run(["cpio", "-o", "-H", "newc", "--quiet", "-R", "0:0"], cwd=root, check=True,
                       input=names.encode(), stdout=file)  # fmt: skip
    shutil.rmtree(tree)
    shutil.rmtree(root)


def _uncompressed(kernel: bytes) -> bytes:
    """The ELF image inside a bzImage; see Documentation/arch/x86/boot.rst of the kernel."""
    sectors = kernel[0x1F1] or 4
    offset, length = struct.unpack_from("<II", kernel, 0x248)
    start = (sectors + 1) * 512 + offset
    if kernel[start : start + 6] != b"\xfd7zXZ\0":
        return kernel  # QEMU boots it as it is, only later
    # xz may be followed by the size; the decompressor stops at the end of the stream.
    return lzma.LZMADecompressor().decompress(kernel[start : start + length])


def _tool(name: str, package: str) -> str:
    path = shutil.which(name, path="/usr/sbin:/usr/bin:/sbin:/bin")
    if path is None:
        raise ImageError(f"{name} is missing: apt-get install {package}")
    return path


TOOLS = {"apt-cache": "apt", "apt-get": "apt", "dpkg-deb": "dpkg", "depmod": "kmod",
         "modprobe": "kmod", "cpio": "cpio"}  # fmt: skip


def _output(name: str, *arguments: str) -> str:
    command = [_tool(name, TOOLS[name]), *arguments]
    done = subprocess.run(command, cwd=BUILD, capture_output=True, text=True)
    if done.returncode != 0:
        raise ImageError(f"{shlex.join(command)} failed:\n{done.stderr}")
    return done.stdout
