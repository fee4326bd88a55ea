"""Descriptors that a server hands to its launcher, and gets from it as a successor."""

import json
import os
import socket
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tensorwire import failpoints
from tensorwire.durability.descriptor_store import DescriptorStore
from tensorwire.membership.identity import GOODBYE
from tensorwire.membership.server import ServerMember
from tensorwire.memory import Node

Pair = tuple[DescriptorStore, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    mine, launchers = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with mine, launchers:
        launchers.settimeout(5)
        yield DescriptorStore(mine), launchers


def told(launchers: socket.socket) -> tuple[Any, list[int]]:
    data, descriptors, *_ = socket.recv_fds(launchers, 1 << 16, 4)
    return json.loads(data), descriptors


def test_memory_goes_from_one_server_to_the_next(pair: Pair) -> None:
    store, launchers = pair
    with Node("server-0") as node:
        member = ServerMember(0, 1, node, 1, store)
        kept = dict([_kept(launchers)])  # the words of workers
        region = member.allocate(4096, name="7/state/x", progress=8)
        region.array()[:] = 7
        kept |= [_kept(launchers)]
        unwanted = member.allocate(64, name="3/counts")
        kept |= [_kept(launchers)]
        assert kept["region 7/state/x"][0]["progress"] == 8
        gone = member.allocate(64, name="7/gone")
        told(launchers)
        member.free(gone)
        assert told(launchers) == ({"drop": "region 7/gone"}, [])
        handles = region.handle(), unwanted.handle()
    mine, successors = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    _send(successors, {"start": ["--index", "0"], "term": 3, "restarts": 1, "messages": 2})
    for part in (list(kept.items())[:1], list(kept.items())[1:]):
        entries = [[key, about] for key, (about, _) in part]
        _send(successors, {"kept": entries}, [descriptor for _, (_, descriptor) in part])
    second = DescriptorStore(mine)
    takeover = second.wait_for_takeover()
    assert takeover == (["--index", "0"], 3, 1)
    with Node("server-0", incarnation=handles[0].incarnation) as node:
        member = ServerMember(0, 1, node, 1, second)
        with pytest.raises(ValueError, match="needs 64 bytes: start the job anew"):
            member.allocate(64, name="7/state/x")
        member.forget("3/")
        with pytest.raises(LookupError):
            node.region("3/counts")
        again = node.region("7/state/x")
        assert bool((again.array() == 7).all())
        mine_again = again.handle()
        assert (mine_again.id, mine_again.generation) == (handles[0].id, handles[0].generation)
        again.array().view(np.uint8)[0] = 1
    successors.close()
    mine.close()
    for _, descriptor in kept.values():
        os.close(descriptor)


def _kept(launchers: socket.socket) -> tuple[str, tuple[Any, int]]:
    message, (descriptor,) = told(launchers)
    return message["keep"], (message["about"], descriptor)


def _send(to: socket.socket, message: Any, descriptors: list[int] | None = None) -> None:
    socket.send_fds(to, [json.dumps(message).encode()], descriptors or [])


def test_a_standby_that_is_not_needed(pair: Pair) -> None:
    store, launchers = pair
    launchers.close()
    assert store.wait_for_takeover() is None


@pytest.mark.parametrize(
    "messages",
    [
        [b"{"],
        [b"[]"],
        [b'{"start": [], "term": 1}'],
        [b'{"start": 3, "term": 1, "restarts": 1, "messages": 0}'],
        [b'{"start": [], "term": 1, "restarts": 1, "messages": 1}', b"{}"],
        [b'{"start": [], "term": 1, "restarts": 1, "messages": 1}', b'{"kept": [["a", {}]]}'],
    ],
)
def test_messages_that_make_no_sense(pair: Pair, messages: list[bytes]) -> None:
    store, launchers = pair
    for message in messages:
        launchers.send(message)
    with pytest.raises(ValueError, match="the launcher's messages cannot be understood"):
        store.wait_for_takeover()


def test_without_a_launcher_nothing_is_kept(pair: Pair) -> None:
    """The server is about to be killed; until then it serves."""
    store, launchers = pair
    launchers.close()
    store.keep("key", {}, 1)
    store.drop("key")


@pytest.mark.parametrize(
    "text", ["server-0", "server-0:nowhere:1:kill", "server-0:cell.armed:0:kill", "a:b:c:d"]
)
def test_a_failpoint_that_makes_no_sense(text: str) -> None:
    with pytest.raises(ValueError, match="TENSORWIRE_FAIL is"):
        failpoints.arm("server-0", text)


def test_failpoints_of_others() -> None:
    failpoints.arm("server-0", "")
    failpoints.arm("server-0", "server-1:cell.armed:1:kill")
    failpoints.failpoint("cell.armed")


def test_after_the_last_goodbye_nobody_is_waited_for(pair: Pair) -> None:
    """Named for a bug: a successor waited for another server that had ended, 10 s long."""
    with Node("server-1") as node:
        member = ServerMember(1, 1, node, 3, pair[0])
        member.words[0].set(GOODBYE)
        member.connect(("127.0.0.1:1",))
        member.gather()
