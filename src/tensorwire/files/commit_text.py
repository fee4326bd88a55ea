"""Parses the text that is written into a file worker's `commit`; only the version is required."""

from __future__ import annotations

import errno
import math
from dataclasses import dataclass

from .errors import refuse
from .names import file_name, tensor_name

_MOST_BYTES = 64 << 10


@dataclass(frozen=True)
class CommitText:
    """The text of a commit of the gradients of a version.

    Attributes:
        version: of the parameters that they were computed with.
        samples: for how many they stand; None: for as many as those of worker 0's slice.
        absent: the tensors for which there is no gradient. The text has them as names of files.
        allow_nan: elements that are not finite are meant so.
    """

    version: int
    samples: float | None = None
    absent: tuple[str, ...] = ()
    allow_nan: bool = False

    @staticmethod
    def parse(text: str, path: str) -> CommitText:
        """Raises EINVAL with the line that makes no sense."""
        if len(text) > _MOST_BYTES:
            raise refuse(errno.EINVAL, path, f"it has more than {_MOST_BYTES} characters")
        samples, version, absent, allow_nan = None, None, [], False
        told = set[str]()
        for line in filter(None, (each.strip() for each in text.split("\n"))):
            word, _, value = line.partition(" ")
            value = value.strip()
            if word in told and word != "absent":
                raise refuse(errno.EINVAL, path, f"it says {word!r} twice")
            told.add(word)
            try:
                if word == "samples":
                    samples = float(value)
                    if not (samples > 0 and math.isfinite(samples)):
                        raise ValueError
                elif word == "version":
                    if not (value.isascii() and value.isdecimal()):
                        raise ValueError
                    version = int(value)
                elif word == "absent" and value:
                    absent.append(tensor_name(value))
                elif line == "nan":
                    allow_nan = True
                else:
                    raise ValueError
            except ValueError:
                raise refuse(
                    errno.EINVAL,
                    path,
                    f"{line[:100]!r} is none of 'samples N', 'version V', 'absent NAME', 'nan'",
                ) from None
        if version is None:
            raise refuse(
                errno.EINVAL, path, "'version V' is missing: that of the parameters that were used"
            )
        return CommitText(version, samples, tuple(absent), allow_nan)

    def __str__(self) -> str:
        absent = (f"absent {file_name(name).replace(' ', '%20')}" for name in self.absent)
        lines = [f"version {self.version}", *absent]
        if self.samples is not None:
            lines.append(f"samples {self.samples!r}")
        return "".join(f"{line}\n" for line in [*lines, *(["nan"] if self.allow_nan else [])])
