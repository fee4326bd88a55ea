"""Stands for a server in the launcher's tests: gives an address, ends after all goodbyes.

FAKE_SERVER chooses what is wrong with it, FAKE_STANDBY what is wrong with a standby. With
--descriptor-store it is durable: it hands over its listening socket and a file with two numbers,
its progress and the goodbyes, and answers what `ask` of the tests' scripts sends.
"""

import argparse
import contextlib
import json
import os
import signal
import socket
import sys
import time
from typing import Any, NoReturn

NUMBER = 8
CODES = {"late": 5, "lost": 1, "consequence": 75}  # of a server that fails after the goodbyes


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--standby", action="store_true")
    parser.add_argument("--descriptor-store", type=int)
    parser.add_argument("--index", type=int)
    parser.add_argument("--workers", type=int)
    parser.add_argument("--count", type=int)
    parser.add_argument("--servers", default="")
    parser.add_argument("--command")
    parser.add_argument("--listen")
    parser.add_argument("--address-fd", type=int)
    parser.add_argument("--import-from", default="")
    options = parser.parse_args()
    if options.standby:
        assert len(sys.argv) == 4, sys.argv
        take_over(parser, options.descriptor_store)
    wrong = wrong_with(options)
    print(f"started with servers={options.servers!r} listen={options.listen}")
    ranks = [name for name in os.environ if "RANK" in name or "WORLD" in name or "MASTER" in name]
    print(f"ranks in the environment: {ranks}")
    print(f"imports {os.environ.get('TENSORWIRE_IMPORT')} from {options.import_from!r}")
    print(f"durable {os.environ.get('TENSORWIRE_DURABLE')} {options.descriptor_store is not None}")
    if wrong == "fails":
        print("no such luck", file=sys.stderr)
        sys.exit(7)
    if wrong == "ends":
        sys.exit(0)
    if wrong == "silent":
        wait_for_ever()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the workers
    if wrong == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)

    listener = socket.create_server(("127.0.0.1", 0))
    address = f"127.0.0.1:{listener.getsockname()[1]}\n"
    if wrong == "garbage":
        address = "here I am\n"
    if wrong != "closes":
        os.write(options.address_fd, address.encode())
    os.close(options.address_fd)
    if options.descriptor_store is not None:
        serve(options, listener, *hand_in(options.descriptor_store, listener), term=0)
    for _ in range(options.workers):
        listener.accept()[0].close()
    print("all have said goodbye")
    sys.exit(CODES.get(wrong, 0))


def wrong_with(options: argparse.Namespace) -> str:
    wrong, _, index = os.environ.get("FAKE_SERVER", "").partition(" ")
    return "" if index and int(index) != options.index else wrong


def hand_in(store: int, listener: socket.socket) -> tuple[socket.socket, int]:
    """Keeps the listener, the numbers, and as many more files as FAKE_FILES says."""
    keeper = socket.socket(fileno=store)
    numbers = memfd(bytes(2 * NUMBER))
    keep(keeper, "numbers", numbers, {"progress": 0})
    for index in range(int(os.environ.get("FAKE_FILES", "0"))):
        file = memfd(b"%d" % index)
        keep(keeper, f"file {index}", file, {"index": index, "padding": "x" * 1000})
        os.close(file)
    for _ in range(2):  # the second one replaces the first
        keep(keeper, "listener", listener.fileno(), None)
    keep(keeper, "unwanted", numbers, [])
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        keeper.send(b'{"drop": "unwanted"}')
    return keeper, numbers


def take_over(parser: argparse.ArgumentParser, store: int) -> NoReturn:
    """A standby: waits for the end of a server, and becomes it."""
    wrong = os.environ.get("FAKE_STANDBY", "")
    print(f"pid of standby: {os.getpid()}.", flush=True)
    if wrong == "fails":
        sys.exit(3)
    if wrong == "deaf":
        wait_for_ever()
    keeper = socket.socket(fileno=store)
    if not (data := keeper.recv(1 << 20)):
        sys.exit(0)
    if wrong == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if wrong == "exits":
        sys.exit(9)
    if wrong == "slow":
        time.sleep(0.5)
    start = json.loads(data)
    options = parser.parse_args(start["start"])
    assert options.address_fd is None, start
    assert options.descriptor_store is None, start
    kept: dict[str, tuple[int, Any]] = {}
    for _ in range(start["messages"]):
        data, descriptors, flags, _ = socket.recv_fds(keeper, 1 << 20, 200)
        assert not flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC)
        entries = json.loads(data)["kept"]
        assert 0 < len(entries) == len(descriptors) <= 100
        kept |= {key: (fd, about) for (key, about), fd in zip(entries, descriptors, strict=True)}
    files = int(os.environ.get("FAKE_FILES", "0"))
    assert kept.keys() == {"numbers", "listener", *(f"file {index}" for index in range(files))}
    for index in range(files):
        descriptor, about = kept[f"file {index}"]
        assert about["index"] == index
        assert os.pread(descriptor, 100, 0) == b"%d" % index
        os.close(descriptor)
    listener = socket.socket(fileno=kept["listener"][0])
    print(f"took over with servers={options.servers!r}", flush=True)
    serve(options, listener, keeper, kept["numbers"][0], start["term"])


def serve(
    options: argparse.Namespace,
    listener: socket.socket,
    keeper: socket.socket,
    numbers: int,
    term: int,
) -> NoReturn:
    """Answers until all workers have said goodbye; what was asked of the dead waits here."""
    while number_at(numbers, 1) < options.workers:
        connection, _ = listener.accept()
        with connection, connection.makefile("rw") as file:
            match file.readline().split():
                case []:
                    set_number(numbers, 1, number_at(numbers, 1) + 1)
                case ["add"]:
                    set_number(numbers, 0, number_at(numbers, 0) + 1)
                case ["exit", code]:
                    os._exit(int(code))
                case ["lose"]:
                    keeper.send(b'{"drop": "listener"}')
                case ["say", what]:
                    SAYINGS[what](keeper, numbers)
            file.write(f"{os.getpid()} {term} {number_at(numbers, 0)}\n")
    print("all have said goodbye", flush=True)
    os._exit(CODES.get(wrong_with(options), 0))


def memfd(data: bytes) -> int:
    descriptor = os.memfd_create("fake")
    os.write(descriptor, data)
    return descriptor


def number_at(descriptor: int, place: int) -> int:
    return int.from_bytes(os.pread(descriptor, NUMBER, place * NUMBER), "little")


def set_number(descriptor: int, place: int, value: int) -> None:
    os.pwrite(descriptor, value.to_bytes(NUMBER, "little"), place * NUMBER)


def keep(keeper: socket.socket, key: str, descriptor: int, about: object) -> None:
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it may keep no more
        socket.send_fds(keeper, [json.dumps({"keep": key, "about": about}).encode()], [descriptor])


def many_keys(keeper: socket.socket, descriptor: int) -> None:
    try:
        for index in range(5000):
            keep(keeper, f"key {index}", descriptor, None)
    except OSError:
        return


# What no server may say.
SAYINGS = {
    "nothing": lambda k, d: socket.send_fds(k, [b"{}"], [d]),
    "no-json": lambda k, d: socket.send_fds(k, [b"keep this \xff"], [d]),
    "deep": lambda k, d: k.send(b"[" * 60000),
    "no-object": lambda k, d: socket.send_fds(k, [b"[1]"], [d]),
    "no-descriptor": lambda k, d: k.send(b'{"keep": "a", "about": 1}'),
    "two-descriptors": lambda k, d: socket.send_fds(k, [b'{"keep": "a", "about": 1}'], [d, d]),
    "a-drop-with-one": lambda k, d: socket.send_fds(k, [b'{"drop": "numbers"}'], [d]),
    "too-long": lambda k, d: keep(k, "a", d, "x" * 100_000),
    "no-offset": lambda k, d: keep(k, "a", d, {"progress": -1}),
    "many-keys": many_keys,
}


def wait_for_ever() -> NoReturn:
    while True:
        signal.pause()


if __name__ == "__main__":
    main()
