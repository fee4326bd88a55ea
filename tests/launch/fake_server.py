"""Stands for a server in the launcher's tests: gives an address, ends after all goodbyes.

FAKE_SERVER chooses what is wrong with it.
"""

import argparse
import os
import signal
import socket
import sys
from typing import NoReturn


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--index", type=int)
    parser.add_argument("--workers", type=int)
    parser.add_argument("--count", type=int)
    parser.add_argument("--servers", default="")
    parser.add_argument("--command")
    parser.add_argument("--listen")
    parser.add_argument("--address-fd", type=int)
    parser.add_argument("--import-from", default="")
    options = parser.parse_args()
    wrong, _, index = os.environ.get("FAKE_SERVER", "").partition(" ")
    if index and int(index) != options.index:
        wrong = ""
    print(f"started with servers={options.servers!r} listen={options.listen}")
    ranks = [name for name in os.environ if "RANK" in name or "WORLD" in name or "MASTER" in name]
    print(f"ranks in the environment: {ranks}")
    print(f"imports {os.environ.get('TENSORWIRE_IMPORT')} from {options.import_from!r}")
    if wrong == "fails":
        print("no such luck", file=sys.stderr)
        sys.exit(7)
    if wrong == "ends":
        sys.exit(0)
    if wrong == "silent":
        wait_for_ever()
    if wrong == "stubborn":
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)

    listener = socket.create_server(("127.0.0.1", 0))
    address = f"127.0.0.1:{listener.getsockname()[1]}\n"
    if wrong == "garbage":
        address = "here I am\n"
    if wrong != "closes":
        os.write(options.address_fd, address.encode())
    os.close(options.address_fd)
    for _ in range(options.workers):
        listener.accept()[0].close()
    print("all have said goodbye")
    sys.exit({"late": 5, "lost": 1}.get(wrong, 0))


def wait_for_ever() -> NoReturn:
    while True:
        signal.pause()


if __name__ == "__main__":
    main()
