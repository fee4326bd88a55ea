"""The rest of a closed Node while a program still has its objects: nothing but views."""

import gc
import os
import re
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from actor import MIB, PATIENCE_S, background, memory_of

from tensorwire import ClosedError, Node, PeerLostError, StaleHandleError
from tensorwire.testing import node_pair, warm_up
from tensorwire.testing.setup import pattern

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("nothing_left")]

SIZE = 32 * MIB
SLACK = 4 * MIB  # what allocators keep


def descriptors() -> list[str]:
    """Returns the targets of this process's descriptors."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        path = Path(f"/proc/self/fd/{name}")
        if path.is_symlink():  # not the one that the folder was listed by
            found.append(os.readlink(path))
    return sorted(found)


def resident() -> int:
    """Bytes of memory that this process has in use."""
    gc.collect()
    return memory_of("self")["VmRSS"]


def closed(call: Callable[[], Any]) -> bool:
    with pytest.raises(ClosedError):
        call()
    return True


def test_nothing_is_left_but_objects(transport: str) -> None:
    """Also of memory that was freed before, and of what the peer's was mapped as."""
    before, memory = descriptors(), resident()
    with node_pair([transport]) as pair:
        regions = [pair.far.allocate(SIZE, name=str(number)) for number in range(3)]
        remotes = [pair.to_far.region(str(number)) for number in range(3)]
        for remote in remotes:
            remote.write(pattern(SIZE)).wait(PATIENCE_S)
        lease = pair.to_far.allocate(SIZE, "lease")
        lease.write(pattern(SIZE)).wait(PATIENCE_S)
        leased = pair.far.region("lease")
        word, far_word = regions[0].word(0), remotes[0].word(0)
        transfer = far_word.set(1 << 63)
        transfer.wait(PATIENCE_S)
        regions[2].free()
        assert resident() - memory > 4 * SIZE - SLACK
        pair.near.close()
        pair.far.close()
        assert descriptors() == before
        assert resident() - memory < SLACK
        for region in (*regions, leased):
            assert closed(region.memoryview)
            assert closed(region.array)
            assert closed(region.discard)
            assert repr(region)
        if transport == "shm":
            assert closed(remotes[0].memoryview)
        for remote in (*remotes, lease):
            assert isinstance(
                failure(lambda remote=remote: remote.write(b"x").wait(0)), ClosedError
            )
        assert closed(lambda: word.value)
        assert "closed" in repr(word)
        assert closed(lambda: word.wait_until(1 << 63))
        transfer.wait(0)
        del region, remote


def failure(call: Callable[[], Any]) -> Exception | None:
    try:
        call()
    except Exception as error:
        return error
    return None


def test_views_keep_what_they_show(transport: str) -> None:
    """And only that; the last of them gives it back."""
    before, memory = descriptors(), resident()
    with node_pair([transport]) as pair:
        shown, other = (pair.far.allocate(SIZE, name=name) for name in ("shown", "other"))
        for region in (shown, other):
            region.array()[:] = pattern(SIZE)
        array, view = shown.array("uint32", 4), shown[4096:].memoryview()
        far = pair.to_far.region("shown")
        far_array = far.array() if transport == "shm" else None
        pair.near.close()
        pair.far.close()
        assert descriptors() == before
        assert SIZE - SLACK < resident() - memory < SIZE + SLACK
        assert (array.view(np.uint8) == pattern(16)).all()
        assert bytes(view[:16]) == pattern(SIZE)[4096:4112].tobytes()
        if far_array is not None:
            array[0] = 7
            assert far_array[0] == 7, "it is the same memory"
        assert shown.word(8).value == int.from_bytes(pattern(16)[8:], "little")
        del array, far_array
        assert resident() - memory > SIZE - SLACK
        view.release()
        assert resident() - memory < SLACK
        assert closed(lambda: shown.word(8).value)


def test_the_peers_page_goes_with_the_peer() -> None:
    """Not with the Node that it was connected to, nor with the object that stands for it."""
    warm_up("shm")
    with Node("stays") as node:
        before = descriptors()
        with Node("goes") as other:
            peer = node.connect(other.address)
        assert peer in [peer]
        with pytest.raises((PeerLostError, ClosedError)):
            peer.region("any", timeout_s=PATIENCE_S)
        assert descriptors() == before


def repeat(call: Callable[[], Any], started: threading.Barrier) -> Exception:
    """Calls again and again until that raises; returns the error."""
    call()
    started.wait(PATIENCE_S)
    while True:
        if error := failure(call):
            return error


def close_at_work(transport: str) -> None:
    """Closes both Nodes of a pair while threads write, read, add and wait."""
    size = 2 * MIB
    with node_pair([transport]) as pair:
        region = pair.far.allocate(size, name="target")
        remote = pair.to_far.region("target")
        mine = pair.near.allocate(8).word(0)
        source, back = pattern(size - 64), np.empty(size - 64, np.uint8)
        started = threading.Barrier(4)
        at_work = [
            background(repeat, lambda: remote[64:].write(source).wait(), started),
            background(repeat, lambda: remote[64:].read(back).wait(), started),
            background(repeat, lambda: remote.word(0).fetch_add(), started),
            background(failure, lambda: mine.wait_until(1)),
        ]
        started.wait(PATIENCE_S)
        pair.near.close()
        pair.far.close()
        errors = [future.result(PATIENCE_S) for future in at_work]
        kinds = (ClosedError, PeerLostError, StaleHandleError)
        assert all(isinstance(error, kinds) for error in errors), errors
        assert closed(region.array)


def test_closing_while_others_are_at_work(transport: str) -> None:
    """Threads end with an error, and touch nothing that is gone."""
    for _ in range(8):
        close_at_work(transport)


def test_closing_while_another_thread_connects() -> None:
    """Named for a bug: `connect` went on until its own time was up, with its descriptors."""
    with socket.create_server(("127.0.0.1", 0)) as mute:
        node = Node("closes")
        address = f"127.0.0.1:{mute.getsockname()[1]}"
        connecting = background(failure, lambda: node.connect(address, timeout_s=PATIENCE_S))
        time.sleep(0.1)
        node.close()
        assert isinstance(connecting.result(5.0), ClosedError)


def test_a_node_that_is_closed_while_it_connects(transport: str) -> None:
    """The peer is there, or the Node is closed; nothing in between."""
    outcomes: set[str] = set()
    with Node("far", transports=[transport]) as far:
        for i in range(60):
            near = Node("near", transports=[transport])

            def connect(near: Node = near) -> None:
                try:
                    near.connect(far.address)
                    outcomes.add("connected")
                except Exception as error:
                    outcomes.add(f"{type(error).__name__}: {error}")

            thread = threading.Thread(target=connect)
            thread.start()
            time.sleep((i % 30) * 5e-5)
            near.close()
            thread.join()
    others = {each for each in outcomes if not re.match("connected$|ClosedError: .*closed", each)}
    assert not others
