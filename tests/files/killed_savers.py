"""Saves a checkpoint by torch's own functions in processes that are killed at random instants.

Arguments: the checkpoint's address, how many savers, a seed. The state of saver n has n in each
element. A line for each saver: its number, and whether it had ended before it was killed; before
the next one it waits for a line.
"""

import os
import random
import signal
import sys
import time
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

address, count, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
os.sync = lambda: None  # of which torch calls one per file; no disk is used here
chance = random.Random(seed)


def state(number: int) -> dict[str, Any]:
    return {f"p{each}": torch.full((1 << 18,), float(number)) for each in range(40)}


def save(number: int) -> None:
    dcp.save(state(number), checkpoint_id=address, no_dist=True)


def in_child(number: int, kill_s: float | None) -> float:
    """Runs an action in a child, and kills it after `kill_s` seconds; returns how long it took."""
    began, child = time.monotonic(), os.fork()
    if not child:
        try:
            save(number)
        except BaseException:
            os._exit(1)
        os._exit(0)
    if kill_s is not None:
        time.sleep(kill_s)
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    assert code in (0, -signal.SIGKILL), code
    took_s = time.monotonic() - began
    print(number, int(code == 0), flush=True)
    sys.stdin.readline()
    return took_s


# The first one tells how long it takes.
whole_s = in_child(0, None)
for each in range(1, count + 1):
    in_child(each, chance.uniform(0, 1.1 * whole_s))
