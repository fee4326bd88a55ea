"""Names that no server answers for: deadlines and Ctrl-C hold while they are resolved."""

import functools
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from resolving import SERVER

PROGRAM = Path(__file__).with_name("resolving.py")


@functools.cache
def missing() -> str | None:
    """Why a process cannot have an /etc/resolv.conf of its own here."""
    if shutil.which("unshare") is None:
        return "unshare is missing: apt-get install util-linux"
    command = ["unshare", "--mount", "mount", "--bind", "/dev/null", "/etc/resolv.conf"]
    made = subprocess.run(command, capture_output=True, text=True)
    return f"no mount namespace: {made.stderr.strip()}" if made.returncode else None


pytestmark = [
    pytest.mark.skipif(missing() is not None, reason=str(missing())),
    pytest.mark.timeout(60),
]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Returns the output of resolving.py, and how long it took in all."""
    conf = tmp_path_factory.mktemp("etc") / "resolv.conf"
    conf.write_text(f"nameserver {SERVER}\noptions timeout:10 attempts:3\n")
    script = 'mount --bind "$1" /etc/resolv.conf && exec "$2" "$3"'
    command = ["unshare", "--mount", "sh", "-c", script, "sh", str(conf), sys.executable, PROGRAM]
    since = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, timeout=50)
    assert done.returncode == 0, done.stderr
    return {**json.loads(done.stdout), "seconds": time.monotonic() - since}


def test_connect_keeps_its_time(seen: dict[str, Any]) -> None:
    for each in seen["short"]:
        assert each["error"] == "TimeoutError"
        assert "dead.example" in each["text"]
        assert "/etc/resolv.conf" in each["text"]
        assert 0.3 <= each["seconds"] < 2


def test_a_name_takes_one_thread_however_often_it_is_asked_for(seen: dict[str, Any]) -> None:
    assert seen["threads"] == 1


@pytest.mark.parametrize("call", ["connect", "listen"])
def test_interrupting_is_at_once_and_no_error_of_ours(seen: dict[str, Any], call: str) -> None:
    assert seen[call]["error"] == "KeyboardInterrupt", seen[call]
    assert seen[call]["seconds"] < 3


def test_a_forked_child_resolves_by_itself(seen: dict[str, Any]) -> None:
    assert seen["child"] == 0


def test_the_process_ends_while_a_name_is_resolved(seen: dict[str, Any]) -> None:
    """The resolver goes on for half a minute; the process does not wait for it."""
    assert seen["seconds"] < 15
