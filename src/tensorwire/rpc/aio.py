"""Names the replacements for `grpc.aio`'s `insecure_channel`, `secure_channel` and `server`."""

from .asyncio.channel import AioRpcChannel, insecure_channel, secure_channel
from .asyncio.server import server

__all__ = ["AioRpcChannel", "insecure_channel", "secure_channel", "server"]
