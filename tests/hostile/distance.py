"""A network between honest newcomers and the victim: every byte arrives `DELAY_S` later.

A newcomer from afar is in its handshake for some round trips, and so meets more of a flood than a
process on this host.
"""

from __future__ import annotations

import asyncio

from tensorwire.testing import Channel

DELAY_S = 0.01  # one way


def relay(channel: Channel, address: str) -> None:
    """Process function: passes connections on to an address; sends its own first."""
    asyncio.run(_relay(channel, address))


async def _relay(channel: Channel, address: str) -> None:
    host, _, port = address.rpartition(":")

    async def arrived(client: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        try:
            server, to_server = await asyncio.open_connection(host, int(port))
        except OSError:
            to_client.close()
            return
        await asyncio.gather(_pass_on(client, to_server), _pass_on(server, to_client))

    listener = await asyncio.start_server(arrived, "127.0.0.1", 0)
    channel.send(f"127.0.0.1:{listener.sockets[0].getsockname()[1]}")
    await listener.serve_forever()


async def _pass_on(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    loop = asyncio.get_running_loop()
    try:
        while data := await source.read(1 << 16):
            loop.call_later(DELAY_S, sink.write, data)
    except ConnectionError:
        pass  # it ends there as well
    loop.call_later(DELAY_S, sink.close)
