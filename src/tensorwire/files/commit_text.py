"""Parses the lines that are written into files such as a file worker's `commit`."""

from __future__ import annotations

import errno
import math
import re
from dataclasses import dataclass

from .errors import refuse
from .names import file_name, tensor_name

_MOST_BYTES = 64 << 10


@dataclass(frozen=True)
class CommitText:
    """The text of a commit of the gradients of a version.

    Attributes:
        version: of the parameters that they were computed with.
        samples: the number that they stand for; None: as many as worker 0's slice has.
        absent: the tensors for which there is no gradient. The text has them as names of files.
        allow_nan: elements that are not finite are meant so.
    """

    version: int
    samples: float | None = None
    absent: tuple[str, ...] = ()
    allow_nan: bool = False

    @staticmethod
    def parse(text: str, path: str) -> CommitText:
        """Returns the commit in a text; raises EINVAL with the line that makes no sense."""
        if len(text) > _MOST_BYTES:
            raise refuse(errno.EINVAL, path, f"it has more than {_MOST_BYTES} characters")
        samples, version, absent, allow_nan = None, None, list[str](), False
        meant = "'samples N', 'version V', 'absent NAME', 'nan'"
        for line in lines_of(path, text, "\n", "absent"):
            match line.split(" ", 1):
                case ["version", number] if is_number(number.strip()):
                    version = int(number)
                case ["samples", number] if (found := positive(number)) is not None:
                    samples = found
                case ["absent", name]:
                    try:
                        absent.append(tensor_name(name.strip()))
                    except ValueError:
                        raise senseless(path, line, meant) from None
                case ["nan"]:
                    allow_nan = True
                case _:
                    raise senseless(path, line, meant)
        if version is None:
            raise refuse(
                errno.EINVAL,
                path,
                "'version V' is missing: write the version of the parameters that were used",
            )
        return CommitText(version, samples, tuple(absent), allow_nan)

    def __str__(self) -> str:
        absent = (f"absent {file_name(name).replace(' ', '%20')}" for name in self.absent)
        lines = [f"version {self.version}", *absent]
        if self.samples is not None:
            lines.append(f"samples {self.samples!r}")
        return "".join(f"{line}\n" for line in [*lines, *(["nan"] if self.allow_nan else [])])


def lines_of(path: str, text: str, ends: str, *many: str) -> list[str]:
    """Returns the non-empty lines; a repeated first word that is not in `many` is an error.

    Args:
        path: of the file, for the error.
        text: its content.
        ends: the characters that end lines.
        many: words with which several lines may begin.
    """
    lines = [line for each in re.split(f"[{ends}]", text) if (line := each.strip())]
    names = [name for line in lines if (name := line.split()[0]) not in many]
    if twice := next((name for name in names if names.count(name) > 1), ""):
        raise refuse(errno.EINVAL, path, f"it has {twice!r} twice: write it once")
    return lines


def is_number(text: str) -> bool:
    """Tells whether a text is a whole number that 64 bits hold."""
    return text.isascii() and text.isdigit() and len(text) < 19


def positive(text: str, most: float = math.inf) -> float | None:
    """Returns a finite number that is more than 0 and at most `most`; None for any other text."""
    try:
        found = float(text)
    except ValueError:
        return None
    return found if math.isfinite(found) and 0 < found <= most else None


def senseless(path: str, text: str, meant: str) -> OSError:
    """Returns the error for a line that is none of the meant ones."""
    return refuse(errno.EINVAL, path, f"{text.strip()[:100]!r} is none of {meant}")
