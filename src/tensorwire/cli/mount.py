"""`tensorwire mount`: a running job as a folder of this host, until it is unmounted."""

from __future__ import annotations

import contextlib
import os
import signal
import threading

import click

from tensorwire.command import Command
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

    ADDRESS is HOST:PORT, as `tensorwire ls` shows it; without it the only job of this host is
    taken. It needs /dev/fuse and the right to mount (root), and no libfuse.

    \b
    In one terminal:
        tensorwire mount /mnt/job

    \b
    In another one:
        cp -r /mnt/job/params at-noon
        umount /mnt/job

    All may be read by everybody, and gradients of workers of --file-workers may be written by this
    user. docs/files.md has what each file is, and what is refused. If this process is killed, its
    files answer ENOTCONN until `umount DIR`; the job does not notice.
    """  # noqa: D301
    if not os.path.isdir(folder):
        raise click.ClickException(f"{folder!r} is no folder; make one, which it is mounted over")
    address = (address or _only_job()).removeprefix("tw://").strip("/")
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


def _only_job() -> str:
    jobs = running_jobs()
    if len(jobs) != 1:
        found = ", ".join(each.address for each in jobs)
        raise click.UsageError(
            f"there are several jobs, say which: {found}"
            if jobs
            else "no job of this user has its first server on this host; say where it is"
        )
    return jobs[0].address
