"""`tensorwire mount`: a running job as a folder of this host, until it is unmounted."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading

import click

from tensorwire.aside import put_output_aside
from tensorwire.command import Command, bare_address
from tensorwire.errors import TensorwireError
from tensorwire.files.job import running_jobs
from tensorwire.files.mount import JobMount
from tensorwire.files.reader import JobReader
from tensorwire.files.tree import Tree

_LOOK_S = 0.2


@click.command(cls=Command, short_help="Mount the files of a running job in a folder.")
@click.option(
    "--secret-file", metavar="FILE", help="The secret for reading, of a job of another host."
)
@click.argument("folder", metavar="DIR")
@click.argument("address", required=False)
def mount(folder: str, address: str | None, secret_file: str | None) -> None:
    """Mount the files of a running job in DIR, until it is unmounted or this process ends.

    ADDRESS is HOST:PORT or tw://HOST:PORT/, as `tensorwire ls` shows it; without it the only job
    of this host is taken. It needs /dev/fuse and the right to mount (root), and no libfuse.

    \b
    In one terminal:
        tensorwire mount /mnt/job

    \b
    In another one:
        cp -r /mnt/job/params at-noon
        umount /mnt/job

    Everybody may read. This user may write gradients of workers of --file-workers, checkpoints,
    the files in `control` and, while the job is paused, parameters. docs/files.md has what each
    file is and what is refused; why something was refused, this process prints. If it is killed,
    its files answer ENOTCONN until `umount DIR`; the job does not notice.
    """  # noqa: D301
    if _is_mounted(folder):
        raise click.ClickException(f"a job is mounted at {folder} already: umount {folder} first")
    if not os.path.isdir(folder):
        raise click.ClickException(f"{folder!r} is no folder: mkdir it first")
    address = bare_address(address or _only_job())
    put_output_aside()
    over = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: over.set())
    try:
        with contextlib.ExitStack() as stack:
            reader = JobReader(address, secret_file=secret_file)
            tree = stack.enter_context(contextlib.closing(Tree(reader)))
            made = stack.enter_context(contextlib.closing(JobMount(tree, folder)))
            click.echo(f"tw://{address}/ is mounted at {made.folder}; Ctrl-C, or umount, ends it")
            told = "reads and maps models itself" if made.passes_through else "asks for each page"
            click.echo(f"the kernel {told} (docs/files.md, passthrough)")
            while not (over.is_set() or made.wait(0.0)):
                over.wait(_LOOK_S)
    except (TensorwireError, OSError, ValueError) as error:
        raise click.ClickException(str(error)) from error


def _is_mounted(folder: str) -> bool:
    """Tells whether the last mount at a folder is a job."""
    place = os.path.realpath(folder)
    kind = ""
    with open("/proc/self/mounts", errors="surrogateescape") as file:
        for line in file:
            _, at, found, *_ = line.split(" ")
            if re.sub(r"\\(\d{3})", lambda code: chr(int(code[1], 8)), at) == place:
                kind = found
    return kind == "fuse.tensorwire"


def _only_job() -> str:
    jobs = running_jobs()
    if len(jobs) != 1:
        found = ", ".join(each.address for each in jobs)
        raise click.UsageError(
            f"there are several jobs, say which: {found}"
            if jobs
            else "no job of this user has a server on this host (one that trains alone has none); "
            "say where it is"
        )
    return jobs[0].address
