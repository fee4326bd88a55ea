"""The toy server, with a thread that prints for ever once the server's output is aside."""

import sys
import threading
import time

from toy_server import kernels

from tensorwire.parameters import serve


def shout() -> None:
    mine = sys.stderr
    while sys.stderr is mine:
        time.sleep(0.001)
    for number in range(1 << 30):
        print(number, "loud" * 500, file=sys.stdout if number % 2 else sys.stderr)
        if number > 200:
            time.sleep(0.005)


threading.Thread(target=shout, daemon=True).start()
sys.exit(serve(None, "loud_server", kernels))
