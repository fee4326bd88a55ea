"""Serves the files `control/…`, by which the owner of a job controls it: a write is a command.

`snapshot` is for everybody who may read; the others are for the job's own user on its host.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import Protocol

from tensorwire.jobs.asking import ScaleError

from .commit_text import is_number, lines_of, positive, senseless
from .errors import refuse
from .owner import JobOwner
from .reader import JobReader
from .tree_items import Changes, CommandItem, Folder, Item, Text, fixed
from .wanted import is_still_wanted

CONTROL = "control"
_MOST_WAIT_S = 1e6
_SCALE_S = 300.0


class Controlled(Protocol):
    """The actions that control files have, as `Tree` implements them."""

    reader: JobReader
    owner: JobOwner
    changes: Changes

    def version(self) -> int:
        """Returns the version in place of the first store."""

    def take(self, store: int = 0, whole: bool = True) -> int:
        """Takes a snapshot, and returns its version."""

    def release(self, version: int, store: int = 0) -> None:
        """Gives back a snapshot that `take` took."""

    def taken(self) -> list[tuple[int, int]]:
        """Returns (store, version) of the snapshots that are held."""

    def written(self) -> list[str]:
        """Returns the files of parameters that are written and not committed."""

    def discard_written(self) -> None:
        """Discards written parameters, which will not be committed."""

    def commit_written(self, version: int, allow_nan: bool, path: str) -> None:
        """Commits written parameters; the job has them when it goes on."""


def control_folder(tree: Controlled, path: str) -> Folder:
    """Returns the folder `control`."""

    def command(
        text: Callable[[], str], do: Callable[[Controlled, str, str], object]
    ) -> Callable[[str], Item]:
        return lambda at: CommandItem(at, tree.changes, text, lambda said: do(tree, at, said))

    def paused() -> str:
        return f"{int(tree.owner.held() is not None)}\n"

    def state() -> str:
        found = tree.owner.held()
        return f"running {tree.version()}\n" if found is None else f"paused {found[1]}\n"

    def written() -> str:
        return "".join(f"{name}.npy\n" for name in tree.written())

    def held() -> str:
        return "".join(f"{store} {version}\n" for store, version in tree.taken())

    def members() -> str:
        workers, servers = tree.reader.members()
        return f"workers {workers}\nservers {servers}\n"

    return fixed(
        path,
        {
            "state": lambda at: Text(at, tree.changes, state),
            "pause": command(paused, _pause),
            "commit": command(written, _commit),
            "snapshot": command(held, _snapshot),
            "scale": command(members, _scale),
        },
    )


def _pause(tree: Controlled, path: str, text: str) -> None:
    match text.split():
        case ["1"]:
            tree.owner.pause(tree.reader.timeout_s)
        case ["1", seconds] if (wait_s := positive(seconds, _MOST_WAIT_S)) is not None:
            tree.owner.pause(wait_s)
        case ["0"]:
            if names := tree.written():
                raise refuse(
                    errno.EBUSY,
                    path,
                    f"params/{names[0]}.npy is written and not committed, and would be gone: write "
                    "'version V' into control/commit, or 'discard'",
                )
            tree.owner.go_on()
        case _:
            raise senseless(path, text, "'1', '1 SECONDS' or '0'")


def _commit(tree: Controlled, path: str, text: str) -> None:
    version, allow_nan, drop = None, False, False
    for line in lines_of(path, text, "\n;"):
        match line.split():
            case ["version", number] if is_number(number):
                version = int(number)
            case ["nan"]:
                allow_nan = True
            case ["discard"]:
                drop = True
            case _:
                raise senseless(path, line, "'version V', 'nan' or 'discard'")
    if drop and version is None and not allow_nan:
        tree.discard_written()
    elif version is None or drop:
        text = "'version V' is missing: write the version that control/state has"
        raise refuse(errno.EINVAL, path, text)
    else:
        tree.commit_written(version, allow_nan, path)


def _snapshot(tree: Controlled, path: str, text: str) -> None:
    match text.split():
        case ["take"]:
            tree.take()
        case ["take", "values"]:
            tree.take(whole=False)
        case ["release", version] if is_number(version):
            tree.release(int(version))
        case _:
            raise senseless(path, text, "'take', 'take values' or 'release VERSION'")


def _scale(tree: Controlled, path: str, text: str) -> None:
    workers, servers, drain, wait_s = None, None, [], _SCALE_S
    for line in lines_of(path, text, "\n;", "drain"):
        match line.split():
            case ["workers", number] if is_number(number):
                workers = int(number)
            case ["servers", number] if is_number(number):
                servers = int(number)
            case ["drain", *ranks] if ranks and all(map(is_number, ranks)):
                drain += [int(each) for each in ranks]
            case ["timeout", seconds] if (found := positive(seconds, _MOST_WAIT_S)) is not None:
                wait_s = found
            case _:
                meant = "'workers N', 'servers N', 'drain RANK…' or 'timeout SECONDS'"
                raise senseless(path, line, meant)
    asked: dict[str, object] = {}
    if workers is not None:
        asked["workers"] = {"count": workers, "drain": sorted(set(drain))}
    if servers is not None:
        asked["servers"] = {"count": servers}
    if drain and workers is None:
        raise refuse(errno.EINVAL, path, "'drain RANK…' needs 'workers N', how many are to stay")
    if not asked:
        raise refuse(errno.EINVAL, path, "it says neither 'workers N' nor 'servers N'")
    try:
        tree.owner.scale(asked, wait_s)
    except ScaleError as error:
        code = errno.EBUSY if error.busy else errno.EPERM
        code = code if is_still_wanted() else errno.EINTR
        raise refuse(code, path, str(error)) from error
