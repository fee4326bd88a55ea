"""Reads a file of a job at a rate until its input ends, and prints the bytes per second.

python files_reader.py HOST:PORT PATH BYTES_PER_SECOND
"""

from __future__ import annotations

import select
import sys
import time


def main(address: str, path: str, rate: float) -> None:
    """Reads blocks of 4 MiB, evenly in time."""
    from tensorwire.files.filesystem import TensorwireFileSystem

    fs = TensorwireFileSystem(address)
    size, block, moved = fs.info(path)["size"], 4 << 20, 0
    print("reads", flush=True)
    started = time.perf_counter()
    while True:
        wait_s = started + moved / rate - time.perf_counter()
        if select.select([sys.stdin], [], [], max(wait_s, 0.0))[0]:
            break
        start = moved % max(size - block, 1)
        moved += len(fs.cat_file(path, start, start + block))
    print(moved / (time.perf_counter() - started), flush=True)
    fs.close()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]))
