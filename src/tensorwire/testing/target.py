"""Runs the far side of a check: a Node that does as it is told, in any process.

Checks are written once against `Target`. In another process its methods are called by name over
the group's control channel.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, cast

import numpy as np

from tensorwire.memory import Handle, Node, Peer, Region
from tensorwire.memory.core import core_of

from .gpu import peek, poke
from .group import Channel, Member


def beside(function: Callable[..., Any], *args: Any) -> Future[Any]:
    """Calls a function in a thread that does not keep the process alive."""
    running: Future[Any] = Future()

    def run() -> None:
        try:
            running.set_result(function(*args))
        except BaseException as error:
            running.set_exception(error)

    threading.Thread(target=run, name=f"beside {function!r}", daemon=True).start()
    return running


class Target:
    """A Node and the regions that a check lets it allocate, each under a key.

    Everything is a method with picklable arguments and results, so that it can be called from
    another process.
    """

    def __init__(self, options: dict[str, Any]) -> None:
        self._options = options
        self._node = Node(**{"name": "far", **options})
        self._regions: dict[str, Region] = {}
        self._peer: Peer | None = None

    def address(self) -> str:
        """Returns the address where the Node listens."""
        return self._node.address

    def pid(self) -> int:
        """Returns the number of the process that the Node is in."""
        return os.getpid()

    def allocate(
        self,
        key: str,
        size_bytes: int,
        access: str = "rw",
        name: str | None = None,
        device: str | None = None,
    ) -> Handle:
        """Allocates a region under a key, and returns its handle."""
        self._regions[key] = self._node.allocate(
            size_bytes, access=access, name=name, device=device
        )
        return self._regions[key].handle()

    def find(self, key: str, name: str) -> int:
        """Looks a region up by name, for instance one that a peer allocated; returns its size."""
        self._regions[key] = self._node.region(name)
        return self._regions[key].size_bytes

    def fill(self, key: str, start: int, data: bytes) -> None:
        """Puts bytes into a region."""
        region = self._regions[key]
        if region.device != "cpu":
            poke(_address(region) + start, data)
            return
        region.array()[start : start + len(data)] = np.frombuffer(data, np.uint8)

    def contents(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        """Returns the bytes of a region."""
        return _bytes_of(self._regions[key], start, stop)

    def is_filled(self, key: str, start: int, stop: int, value: int) -> bool:
        """Tells whether all these bytes are `value`."""
        found = np.frombuffer(_bytes_of(self._regions[key], start, stop), np.uint8)
        return bool((found == value).all())

    def free(self, key: str) -> None:
        """Frees the region of a key."""
        self._regions.pop(key).free()

    def value(self, key: str, offset: int) -> int:
        """Returns the value of a word."""
        return self._regions[key].word(offset).value

    def wait_until(self, key: str, offset: int, value: int, timeout_s: float) -> None:
        """Waits until a word is at least `value`."""
        self._node.wait_until(self._regions[key].word(offset), value, timeout_s)

    def accept(self) -> str:
        """Takes the next connection, for `answer_rounds` and `hang_up`; returns the peer's name."""
        self._peer = self._node.accept(timeout_s=10.0)
        return self._peer.name

    def hang_up(self) -> None:
        """Ends the connection that `accept` took."""
        assert self._peer is not None
        self._peer.close()

    def answer_rounds(self, key: str, sizes: list[int], reply_to: str, words: str) -> list[int]:
        """Checks the bytes that each signal announces.

        In round k, once the word at 0 of `words` is at least k, sizes[k - 1] bytes of `key` must
        all be `round_value(k)`: from 64 on, or from 0 if the word is in another region. Then word 0
        of the peer's region `reply_to` is raised to k, which allows the next round.

        Returns:
            The rounds in which some byte was not yet there.
        """
        assert self._peer is not None
        region = self._regions[key]
        word, start = self._regions[words].word(0), 64 if words == key else 0
        reply = self._peer.region(reply_to).word(0)
        wrong = []
        for round_, size in enumerate(sizes, 1):
            word.wait_until(round_, 20.0)
            if _bytes_of(region, start, start + size) != bytes([round_value(round_)]) * size:
                wrong.append(round_)
            reply.set(round_)
        return wrong

    def restart(self) -> None:
        """Closes the Node and starts another one at the same address, without the old regions."""
        address = self._node.address
        self.close()
        self._node = Node(**{"name": "far", **self._options, "listen": address})

    def stats(self) -> dict[str, int]:
        """Returns the counters of the Node."""
        return self._node.stats()

    def close(self) -> None:
        """Closes the Node."""
        self._node.close()
        self._regions.clear()
        self._peer = None

    def begin(self, method: str, *args: Any) -> Callable[[], Any]:
        """Starts a method beside the caller; the result waits for it and gives its value."""
        running = beside(getattr(self, method), *args)
        return lambda: running.result(60.0)


class _TargetElsewhere:
    """A stand-in for a Target in another process, which calls its methods there."""

    def __init__(self, member: Member) -> None:
        self._member = member

    def begin(self, method: str, *args: Any) -> Callable[[], Any]:
        self._member.send((method, args))
        return lambda: self._finish(method)

    def _finish(self, method: str) -> Any:
        error, result = self._member.recv(timeout_s=60.0)
        if error is not None:
            raise AssertionError(f"{method} in the other process: {error}\n{self._member.log()}")
        return result

    def __getattr__(self, method: str) -> Callable[..., Any]:
        return lambda *args: self.begin(method, *args)()


def target_elsewhere(member: Member) -> Target:
    """Returns a Target whose methods run in the process that runs `serve_target`."""
    return cast(Target, _TargetElsewhere(member))


def serve_target(channel: Channel, options: dict[str, Any]) -> None:
    """Runs a Target that obeys the messages of a channel until the channel ends."""
    target = Target(options)
    try:
        while True:
            method, args = channel.recv(None)
            reply: tuple[str | None, Any]
            try:
                reply = None, getattr(target, method)(*args)
            except Exception as error:
                reply = f"{type(error).__name__}: {error}", None
            channel.send(reply)
    except EOFError:
        pass
    finally:
        target.close()


def _address(region: Region) -> int:
    address: int = core_of(region).address
    return address


def _bytes_of(region: Region, start: int, stop: int | None) -> bytes:
    if region.device == "cpu":
        return region.array()[start:stop].tobytes()
    start, stop, _ = slice(start, stop).indices(region.size_bytes)
    return peek(_address(region) + start, stop - start)


def round_value(number: int) -> int:
    """Returns the byte that fills round `number`; differs from the 250 rounds before."""
    return number * 37 % 251
