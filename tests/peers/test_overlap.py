"""Bytes that arrive over tcp are copied while the rest of them is on its way."""

import numpy as np
from actor import MIB, PATIENCE_S, background, eventually
from relay import MESSAGES, Relay

from tensorwire import Node

FRAME = 64  # bytes of a header, docs/internals/wire.md


def test_half_of_a_chunk_is_placed_before_the_other_half_has_come() -> None:
    with (
        Node("far", transports=["tcp"]) as far,
        Node("near", transports=["tcp"]) as near,
        Relay(far.address) as relay,
    ):
        connecting = background(near.connect, relay.address)
        relay.join()
        relay.forward(len(MESSAGES))
        region = far.allocate(MIB)
        looking = background(connecting.result(PATIENCE_S).region, region.handle())
        relay.send("server", relay.receive("client", FRAME))
        relay.send("client", relay.receive("server", FRAME))
        remote = looking.result(PATIENCE_S)
        placed = region.array()

        transfer = remote.write(np.ones(MIB, np.uint8))
        sent = relay.receive("client", FRAME + MIB)
        first, second = FRAME + 4096, FRAME + 4096 + MIB // 2 + 65536
        relay.send("server", sent[:first])
        eventually(lambda: placed[4095] == 1, "the beginning is placed")
        relay.send("server", sent[first:second])
        eventually(lambda: placed[MIB // 2] == 1, "half of it is placed")
        relay.send("server", sent[second:])
        relay.send("client", relay.receive("server", FRAME))
        transfer.wait(PATIENCE_S)
        assert placed.all()
