"""`tensorwire ls`, `cat`, `cp` and `stat`: a running job as files; no fsspec and no mount."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import click

from tensorwire.bench.report import new_table
from tensorwire.command import Command, terminal
from tensorwire.files.errors import as_os_errors, refuse
from tensorwire.files.job import find_way, running_jobs
from tensorwire.files.reader import JobReader
from tensorwire.files.tree import MODEL, Tree
from tensorwire.files.tree_items import TreeEntry

_SCHEME = "tw://"
_CHUNK_BYTES = 16 << 20
_OF_A_VERSION = ("params", "optimizer")


class _Place(NamedTuple):
    """The two parts of a tw:// argument: the address of a job and a path in it."""

    address: str
    path: str


class _Trees:
    """The jobs that one command looks at, each connected once."""

    def __init__(self, secret_file: str | None) -> None:
        self._secret_file = secret_file
        self._stack = contextlib.ExitStack()
        self._found: dict[str, Tree] = {}

    def __enter__(self) -> _Trees:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def tree(self, address: str) -> Tree:
        """Returns the tree of a job."""
        if address not in self._found:
            with as_os_errors(f"{_SCHEME}{address}"):
                try:
                    reader = JobReader(address, secret_file=self._secret_file)
                except ValueError as error:  # a malformed address, or a secret that is too short
                    raise refuse(errno.EINVAL, f"{_SCHEME}{address}", str(error)) from None
            self._found[address] = Tree(reader)
            self._stack.callback(self._found[address].close)
        return self._found[address]


class _Failures:
    """The errors of single arguments; each is printed at once, and the others go on."""

    def __init__(self, command: str) -> None:
        self._command, self.count = command, 0

    @contextlib.contextmanager
    def told(self, action: str, what: str) -> Iterator[None]:
        """Prints an OSError of the block as the tools of a shell do."""
        try:
            yield
        except OSError as error:
            self.count += 1
            reason = error.strerror or str(error)
            click.echo(f"tensorwire {self._command}: {action} '{what}': {reason}", err=True)


def _place(text: str) -> _Place | None:
    """Returns the place that a tw:// argument names; None for a path of this host."""
    if not text.startswith(_SCHEME):
        return None
    address, _, path = text.removeprefix(_SCHEME).partition("/")
    if "@" in address:
        raise click.UsageError("a tw:// address has no user and no secret: use --secret-file")
    return _Place(address, path.strip("/"))


def _job_place(text: str) -> _Place:
    place = _place(text)
    if place is None:
        hint = f"; write tw://{text}" if ":" in text.partition("/")[0] else ""
        raise click.UsageError(f"{text!r} is no file of a job: those are tw://HOST:PORT/PATH{hint}")
    return place


_SECRET = click.option(
    "--secret-file", metavar="FILE", help="The secret for reading, of a job of another host."
)


# ---- ls


@click.command(cls=Command, short_help="List the files of a running job: tw://HOST:PORT/…")
@click.option("-l", "long", is_flag=True, help="Sizes, dtypes, shapes, versions, times, paths.")
@click.option("-d", "itself", is_flag=True, help="A folder itself, not what is in it.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option(
    "--save-secret",
    metavar="FILE",
    help="Write the secret for reading into a new file, for another host. Takes one address.",
)
@_SECRET
@click.argument("addresses", nargs=-1)
def ls(
    addresses: tuple[str, ...],
    long: bool,
    itself: bool,
    as_json: bool,
    save_secret: str | None,
    secret_file: str | None,
) -> None:
    """List what a running job shows as files.

    A file of a job is tw://HOST:PORT/PATH. On this host HOST:PORT is what `tensorwire status` and
    `tensorwire ls` show. For a job of another host it is the door that `tensorwire ls` shows there,
    and --secret-file or TENSORWIRE_READ_SECRET_FILE names a file with the secret for reading.

    \b
    The jobs of this host, and the doors at which readers of other hosts come:
        tensorwire ls

    \b
    The parameters, with dtype, shape and version:
        tensorwire ls -l tw://127.0.0.1:41234/params

    With -l a snapshot's model.safetensors has the path of memory that safetensors.safe_open maps.

    The exit code is 2 if an argument could not be listed.
    """  # noqa: D301
    if save_secret is not None:
        if len(addresses) != 1:
            raise click.UsageError("--save-secret takes one address")
        _save_secret(_job_place(addresses[0]).address, Path(save_secret))
    if not addresses:
        _list_jobs(as_json)
        return
    failures, found = _Failures("ls"), []
    with _Trees(secret_file) as trees:
        for text in addresses:
            address, path = _job_place(text)
            with failures.told("cannot access", text):
                tree = trees.tree(address)
                entry = tree.entry(path)
                entries = [entry]
                if entry.is_folder and not itself:
                    entries = tree.entries(path)
                found.append((text, entries))
                if as_json:
                    continue
                if len(addresses) > 1 and entry.is_folder:
                    click.echo(f"{text}:")
                if long:
                    _show(tree, entries)
                else:
                    for each in entries:
                        click.echo(each.name or text)
    if as_json:
        listed = [{"address": text, **asdict(each)} for text, all_ in found for each in all_]
        click.echo(json.dumps(listed, indent=1))
    if failures.count:
        raise click.exceptions.Exit(2)


def _save_secret(address: str, path: Path) -> None:
    secret = find_way(address).secret
    if not secret:
        raise click.ClickException(f"no secret for reading the job at {address} is known here")
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise click.ClickException(f"cannot create '{path}': {error.strerror}") from None
    with open(descriptor, "wb") as file:
        file.write(secret)


def _list_jobs(as_json: bool) -> None:
    jobs = [
        {"address": each.address, "door": each.door, "command": each.command}
        for each in running_jobs()
    ]
    if as_json:
        click.echo(json.dumps(jobs, indent=1))
        return
    if not jobs:
        click.echo(
            "no job of this user has a server on this host; one that trains alone has none",
            err=True,
        )
        return
    table = new_table(None, "files", "for readers of other hosts", "command", wraps=True)
    for job in jobs:
        table.add_row(f"{_SCHEME}{job['address']}/", f"{_SCHEME}{job['door']}/", job["command"])
    terminal(120).print(table)


def _show(tree: Tree, entries: list[TreeEntry]) -> None:
    headings = "name", ">bytes", "dtype", "shape", ">version", "seen", "path"
    table = new_table(None, *headings, wraps=True)
    for each in entries:
        told = _described(tree, each)
        table.add_row(*(str(told.get(name.lstrip(">"), "")) for name in headings))
    terminal(130).print(table)


def _described(tree: Tree, entry: TreeEntry) -> dict[str, Any]:
    if entry.is_folder:
        return {"name": f"{entry.name}/", "type": "folder"}
    told: dict[str, Any] = {"name": entry.name, "type": "file", "bytes": entry.size_bytes}
    if entry.dtype:
        told |= {"dtype": entry.dtype, "shape": list(entry.shape)}
    if entry.version is not None:
        told["version"] = entry.version
        told["seen"] = time.strftime("%H:%M:%S", time.localtime(entry.modified))
    if entry.name == MODEL and "snapshots/" in entry.path:
        with tree.sealed(entry.path) as model:
            if not model.is_copy:
                told["path"] = model.path
    return told


# ---- cat


@click.command(cls=Command, short_help="Write files of a running job to the standard output.")
@_SECRET
@click.argument("addresses", nargs=-1, required=True)
def cat(addresses: tuple[str, ...], secret_file: str | None) -> None:
    """Write files of a running job to the standard output, each of one version.

    \b
    The version that is in place:
        tensorwire cat tw://127.0.0.1:41234/status/version

    \b
    The model as it is, as a file:
        tensorwire cat tw://127.0.0.1:41234/model.safetensors > model.safetensors

    The exit code is 1 if a file could not be read.
    """  # noqa: D301
    failures = _Failures("cat")
    with _Trees(secret_file) as trees:
        for text in addresses:
            address, path = _job_place(text)
            with failures.told("cannot read", text):
                for data in _chunks(trees.tree(address), path):
                    _write(data)
    _write(b"")
    if failures.count:
        raise click.exceptions.Exit(1)


def _write(data: bytes) -> None:
    try:
        sys.stdout.buffer.write(data)
        if not data:
            sys.stdout.buffer.flush()
    except OSError as error:
        # What is still in the buffer must not be written again at the end.
        os.dup2(os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):  # the reader has seen enough
            raise click.exceptions.Exit(141) from None  # as a shell tells the signal
        click.echo(f"tensorwire cat: cannot write: {error.strerror}", err=True)
        raise click.exceptions.Exit(1) from None


def _chunks(tree: Tree, path: str) -> Iterator[bytes]:
    with tree.open(path) as content:
        for start in range(0, content.size_bytes, _CHUNK_BYTES):
            yield content.read(start, start + _CHUNK_BYTES)


# ---- cp


@click.command(cls=Command, short_help="Copy files of a running job to this host.")
@click.option("-r", "recursive", is_flag=True, help="Folders too, all files of one version.")
@_SECRET
@click.argument("arguments", nargs=-1, required=True, metavar="ADDRESS... TARGET")
def cp(arguments: tuple[str, ...], recursive: bool, secret_file: str | None) -> None:
    """Copy files of a running job to TARGET, a file or a folder of this host.

    A file that is there is replaced when the new one is complete: an error leaves it as it was.
    With -r parameters and state come from one snapshot, so that they are of one version; of a whole
    job such a snapshot and the status are copied.

    \b
    One parameter:
        tensorwire cp tw://127.0.0.1:41234/params/layer.weight.npy .

    \b
    All parameters, of one version:
        tensorwire cp -r tw://127.0.0.1:41234/params at-noon

    The exit code is 1 if something could not be copied. Nothing is copied into a job:
    checkpoints are written by fsspec or by `tensorwire mount`.
    """  # noqa: D301
    *sources, last = arguments
    if not sources:
        raise click.UsageError("say where to: tensorwire cp ADDRESS... TARGET")
    if _place(last) is not None:
        with (failures := _Failures("cp")).told("cannot create", last):
            raise refuse(
                errno.EROFS,
                last,
                "this command copies from a job; what can be written there, such as checkpoints, "
                "is written by fsspec or by a mount",
            )
        raise click.exceptions.Exit(failures.count)
    target, failures = Path(last), _Failures("cp")
    if len(sources) > 1 and not target.is_dir():
        with failures.told("target", last):
            raise refuse(errno.ENOTDIR, last)
        raise click.exceptions.Exit(1)
    if not (target if target.is_dir() else target.parent).is_dir():
        with failures.told("target", last):
            raise refuse(errno.ENOENT, str(target.parent), "there is no such folder here")
        raise click.exceptions.Exit(1)
    with _Trees(secret_file) as trees:
        for text in sources:
            address, path = _job_place(text)
            with failures.told("cannot copy", text):
                tree = trees.tree(address)
                entry = tree.entry(path)
                to = target / (entry.name or address) if target.is_dir() else target
                if not entry.is_folder:
                    _copy_file(tree, path, to)
                elif recursive:
                    _copy_folder(tree, path, to, failures)
                else:
                    raise refuse(errno.EISDIR, path, "-r copies folders")
    if failures.count:
        raise click.exceptions.Exit(1)


def _copy_file(tree: Tree, path: str, to: Path) -> None:
    """Writes beside the target first, so that a full disk or the job's end leaves the old file.

    A target that is no regular file, such as a device or a pipe, is written to directly, and the
    target of a link is replaced.
    """
    if to.exists() and not to.is_file():
        with open(to, "wb") as opened:
            opened.writelines(_chunks(tree, path))
        return
    to = Path(os.path.realpath(to))
    descriptor, name = tempfile.mkstemp(prefix=f".{to.name[:100]}.", dir=to.parent)
    try:
        with open(descriptor, "wb") as file:
            for data in _chunks(tree, path):
                file.write(data)
        os.chmod(name, 0o666 & ~_umask())
        os.replace(name, to)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


def _copy_folder(tree: Tree, path: str, to: Path, failures: _Failures) -> None:
    """Copies a folder and its content; parameters and state come from one snapshot."""
    parts = path.split("/") if path else []
    prefix, own = (parts[:2], parts[2:]) if parts[:1] == ["stores"] else ([], parts)
    if (own and own[0] not in _OF_A_VERSION) or len(prefix) == 1:
        _copy_all(tree, path, to, failures)
        return
    store = int(prefix[1]) if prefix else 0
    version = tree.take(store, whole=own != ["params"])
    frozen = "/".join([*prefix, "snapshots", str(version), *own])
    try:
        _copy_all(tree, frozen, to, failures)
    finally:
        tree.release(version, store)
    if not parts:
        _copy_all(tree, "status", to / "status", failures)


def _copy_all(tree: Tree, path: str, to: Path, failures: _Failures) -> None:
    to.mkdir(exist_ok=True)
    for each in tree.entries(path):
        with failures.told("cannot copy", each.path):
            if each.is_folder:
                _copy_all(tree, each.path, to / each.name, failures)
            else:
                _copy_file(tree, each.path, to / each.name)


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


# ---- stat


@click.command(cls=Command, short_help="Show what a file of a running job is.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option(
    "--hold",
    is_flag=True,
    help="Hold the path of a model.safetensors, and wait until this process is ended.",
)
@_SECRET
@click.argument("addresses", nargs=-1, required=True)
def stat(addresses: tuple[str, ...], as_json: bool, hold: bool, secret_file: str | None) -> None:
    """Show size, dtype, shape, version and time of files of a running job.

    \b
    A tensor:
        tensorwire stat tw://127.0.0.1:41234/params/layer.weight.npy

    \b
    The newest version as a file for safetensors.safe_open, until Ctrl-C:
        tensorwire stat --hold tw://127.0.0.1:41234/model.safetensors

    The exit code is 1 if one of them could not be asked for.
    """  # noqa: D301
    failures, found = _Failures("stat"), []
    with _Trees(secret_file) as trees, contextlib.ExitStack() as held:
        for text in addresses:
            address, path = _job_place(text)
            with failures.told("cannot stat", text):
                tree = trees.tree(address)
                told = {"file": text, **_described(tree, tree.entry(path))}
                if hold:
                    model = held.enter_context(tree.sealed(path))
                    told |= {"version": model.version, "path": model.path}
                found.append(told)
        if as_json:
            click.echo(json.dumps(found, indent=1))
        for told in () if as_json else found:
            width = max(map(len, told))
            click.echo("\n".join(f"{name:>{width}}: {value}" for name, value in told.items()))
        if hold and found:
            sys.stdout.flush()
            with contextlib.suppress(KeyboardInterrupt):
                signal.pause()
    if failures.count:
        raise click.exceptions.Exit(1)
