"""A program that runs where no name server answers; see test_resolving.py. Prints JSON."""

import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tensorwire import Node

SERVER = "127.0.0.77"  # takes questions and answers none


def outcome(call: Callable[[], Any]) -> dict[str, Any]:
    """The type and text of what a call raises, and how long it took."""
    since = time.monotonic()
    try:
        call()
        kind, text = "", ""
    except BaseException as error:
        kind, text = type(error).__name__, str(error)
    return {"error": kind, "text": text, "seconds": time.monotonic() - since}


def interrupted(call: Callable[[], Any]) -> dict[str, Any]:
    """Presses Ctrl-C after half a second, in a program that survives errors."""

    def survives_errors() -> None:
        try:
            call()
        except Exception as error:
            raise AssertionError(f"swallowed {error!r}") from error

    timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    try:
        return outcome(survives_errors)
    finally:
        timer.join()


def in_a_child(call: Callable[[], Any]) -> int:
    """The exit status of a forked child that makes the call."""
    pid = os.fork()
    if pid == 0:
        try:
            call()
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def blocking_threads() -> int:
    """Threads for what may block; those without work end soon."""
    tasks = Path("/proc/self/task").iterdir()
    return sum((task / "comm").read_text() == "tw-blocking\n" for task in tasks)


def connect_here() -> None:
    with Node("host") as host, Node("guest") as guest:
        assert guest.connect(host.address).name == "host"


def main() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as silent, Node("asking") as node:
        silent.bind((SERVER, 53))
        connect_here()
        found = {
            "short": [
                outcome(lambda: node.connect("dead.example:99", timeout_s=0.3)) for _ in range(3)
            ],
            "threads": blocking_threads(),
            "connect": interrupted(lambda: node.connect("dead.example:99", timeout_s=60)),
            "listen": interrupted(lambda: Node(listen="dead.example:0")),
            "child": in_a_child(connect_here),
        }
        print(json.dumps(found), flush=True)
        sys.exit(0)  # with the resolver still at work


if __name__ == "__main__":
    main()
