"""Derives from a job's secret the one by which its parameters can be read and nothing else."""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Mapping

_PURPOSE = b"tensorwire: read the parameters of a job, and no more"


def job_secret(environ: Mapping[str, str] = os.environ) -> bytes:
    """Returns the secret that a Node takes by itself; b"" if there is none.

    Raises:
        OSError: it is in a file that cannot be read.
    """
    file = environ.get("TENSORWIRE_SECRET_FILE", "")
    return secret_in(file, environ.get("TENSORWIRE_SECRET", ""))


def secret_in(path: str, text: str) -> bytes:
    """Returns the secret in a file, or if no file is named, in a text.

    Raises:
        OSError: the file cannot be read.
    """
    if not path:
        return os.fsencode(text)
    with open(path, "rb") as file:
        return file.read().strip()


def reading_secret(secret: bytes) -> str:
    """Returns the secret that permits reading only; all servers of a job derive the same.

    The job's secret cannot be found from it. A job without a secret, on loopback, has none for
    readers either: "".
    """
    return hmac.new(secret, _PURPOSE, hashlib.sha256).hexdigest() if secret else ""
